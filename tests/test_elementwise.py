"""Elementwise ops: special values, kinks and ties, powers, choices, accuracy.

Choices must not leak NaN; the accuracy is that of the kernels with exponentials.
"""

from __future__ import annotations

from math import erfc, inf, nan, sqrt

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag
from pyggml.device import CpuDevice
from pyggml.gradcheck import gradcheck


def gradients(fn, *arrays):
    """Return the gradients of the sum of fn in each input."""
    inputs = [ag.param(array) for array in arrays]
    with ag.grad_tape():
        value = ag.sum(fn(*inputs))
    found = ag.grad(value, inputs, allow_unused=True)
    return [None if gradient is None else gradient.tolist() for gradient in found]


SPECIAL = np.array(
    [-inf, -2.5, -1.0, -1e-40, -0.0, 0.0, 1e-40, 0.5, 1.0, 3.0, inf, nan], dtype=np.float32
)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["square", "sqrt", "exp", "log", "abs", "sign", "sin", "cos", "tanh", "negative"]
)
def test_special_values_come_out_as_in_numpy(name):
    ours = {"square": "sqr", "negative": "neg"}.get(name, name)
    with np.errstate(all="ignore"):
        expected = getattr(np, name)(SPECIAL)
    np.testing.assert_allclose(getattr(ag, ours)(SPECIAL).numpy(), expected, 1e-6)


@pytest.mark.parametrize("name", ["maximum", "minimum", "greater", "less", "equal", "power"])
def test_special_values_of_two_inputs_come_out_as_in_numpy(name):
    x, y = SPECIAL[:, None], SPECIAL[None, :]
    with np.errstate(all="ignore"):
        expected = getattr(np, name)(x, y)
    found = getattr(ag, {"power": "pow"}.get(name, name))(x, y).numpy()
    np.testing.assert_allclose(found, expected, 1e-6)


@pytest.mark.parametrize("name", ["maximum", "minimum", "greater", "less", "equal"])
def test_nan_and_infinity_are_compared_as_in_numpy_on_every_device(name, every_device):
    x, y = SPECIAL[:, None], SPECIAL[None, :]
    np.testing.assert_array_equal(getattr(ag, name)(x, y).numpy(), getattr(np, name)(x, y))


def test_clamp_keeps_nan_as_numpy_does(every_device):
    found = ag.clamp(SPECIAL, min=-1.0, max=0.5).numpy()
    np.testing.assert_allclose(found, np.clip(SPECIAL, -1.0, 0.5), 1e-6)


def test_clamp_does_not_write_into_its_input_as_ggmls_does(every_device):
    x = ag.tensor([-2.0, 2.0])
    y = x * 1.0
    clamped = ag.clamp(y, min=-1.0, max=1.0)
    assert (y + clamped).tolist() == [-3.0, 3.0]
    assert x.tolist() == [-2.0, 2.0]


@pytest.mark.parametrize(
    ("name", "at_minus_infinity", "at_infinity"),
    [
        ("relu", 0.0, inf),
        ("leaky_relu", -inf, inf),
        ("elu", -1.0, inf),
        ("tanh", -1.0, 1.0),
        ("sigmoid", 0.0, 1.0),
        ("silu", 0.0, inf),
        ("gelu", 0.0, inf),
        ("softplus", 0.0, inf),
        ("hardsigmoid", 0.0, 1.0),
    ],
)
def test_activations_reach_their_limits_and_keep_nan(name, at_minus_infinity, at_infinity):
    found = getattr(ag, name)([-inf, inf, nan]).numpy()
    np.testing.assert_array_equal(found, [at_minus_infinity, at_infinity, nan])


def test_both_forms_of_gelu_have_the_limits_of_relu_in_value_and_gradient():
    for approximate in ("none", "tanh"):
        x = [-inf, -40.0, 0.0, 40.0, inf]

        def form(x, approximate=approximate):
            return ag.gelu(x, approximate=approximate)

        assert form(x).tolist() == [0.0, 0.0, 0.0, 40.0, inf]
        assert gradients(form, x) == [[0.0, 0.0, 0.5, 1.0, 1.0]]


def test_saturated_activations_have_finite_gradients():
    x = [-1e30, -100.0, 100.0, 1e30]
    assert gradients(ag.tanh, x) == [[0.0, 0.0, 0.0, 0.0]]
    assert gradients(ag.sigmoid, x)[0][::3] == [0.0, 0.0]
    assert gradients(ag.silu, x)[0][::3] == [0.0, 1.0]
    assert gradients(ag.softplus, x)[0][::3] == [0.0, 1.0]
    assert gradients(ag.elu, x)[0][::3] == [0.0, 1.0]


def test_softplus_of_plus_and_minus_100_is_accurate():
    found = ag.softplus([-100.0, -80.0, 100.0]).tolist()
    exact = [float(np.float32(np.exp(-100.0))), np.exp(-80.0), 100.0]
    assert found == pytest.approx(exact, rel=1e-6, abs=0)


def test_swiglu_is_the_first_input_times_silu_of_the_second():
    x, gate = np.array([[1.0, -2.0]]), np.array([[0.5], [-1.0]])
    expected = x * gate / (1.0 + np.exp(-gate))
    np.testing.assert_allclose(ag.swiglu(x, gate).numpy(), expected, 1e-6)


# ---- kinks and ties ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fn",
    [
        ag.relu,
        lambda x: ag.clamp(x, min=0.0),
        lambda x: ag.clamp(x, min=0.0, max=inf),
        lambda x: ag.maximum(x, 0.0),
        lambda x: ag.maximum(x, ag.tensor(0.0)),
    ],
    ids=["relu", "clamp", "clamp to infinity", "maximum", "maximum with a tensor"],
)
def test_relu_clamp_and_maximum_agree_at_zero(fn):
    assert fn([-1.0, 0.0, 2.0]).tolist() == [0.0, 0.0, 2.0]
    assert gradients(fn, [-1.0, -0.0, 0.0, 1e-40, 2.0]) == [[0.0, 0.0, 0.0, 1.0, 1.0]]


def test_clamp_passes_the_gradient_strictly_between_its_bounds():
    x = [-2.0, -1.0, 0.0, 0.5, 1.0]
    assert gradients(lambda x: ag.clamp(x, min=-1.0, max=0.5), x) == [[0.0, 0.0, 1.0, 0.0, 0.0]]
    assert gradients(lambda x: ag.minimum(x, 0.5), x) == [[1.0, 1.0, 1.0, 0.0, 0.0]]


def test_in_a_tie_the_gradient_goes_to_the_second_operand():
    for fn in (ag.maximum, ag.minimum):
        assert gradients(fn, [1.0, 2.0], [1.0, 2.0]) == [[0.0, 0.0], [1.0, 1.0]]


def test_the_gradient_of_abs_at_zero_is_zero():
    assert gradients(ag.abs, [-2.0, 0.0, 3.0]) == [[-1.0, 0.0, 1.0]]


def test_at_zero_leaky_relu_and_elu_have_the_slope_of_the_negative_side():
    assert gradients(lambda x: ag.leaky_relu(x, negative_slope=0.25), [0.0]) == [[0.25]]
    assert gradients(lambda x: ag.elu(x, alpha=0.5), [0.0]) == [[0.5]]


def test_hardswish_and_hardsigmoid_are_flat_where_they_end():
    assert gradients(ag.hardsigmoid, [-4.0, 0.0, 4.0]) == [
        [0.0, pytest.approx(1 / 6, rel=1e-6), 0.0]
    ]
    assert gradients(ag.hardswish, [-4.0, 4.0]) == [[0.0, 1.0]]


# ---- powers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4, 5, 8, -1, -2, -3, -4, -7, 0.5, 2.5, -0.5])
def test_powers_of_either_sign_and_of_zero_are_those_of_numpy(exponent, every_device):
    x = np.array([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0])
    with np.errstate(all="ignore"):
        expected = np.power(x, float(exponent))
    np.testing.assert_allclose(ag.pow(x, exponent).numpy(), expected, 1e-6)
    np.testing.assert_allclose(ag.pow(x, ag.tensor(float(exponent))).numpy(), expected, 1e-6)


def test_the_gradient_of_a_power_at_zero_is_right_where_there_is_one():
    for exponent, slope in ((0, 0.0), (1, 1.0), (2, 0.0), (3, 0.0), (1.5, 0.0), (7, 0.0)):
        assert gradients(lambda x, n=exponent: ag.pow(x, n), [0.0]) == [[slope]]
        tensor = gradients(lambda x, n=exponent: ag.pow(x, ag.tensor(float(n))), [0.0])
        assert tensor == [[slope]]


def test_gradients_in_base_and_exponent_are_finite_at_a_base_of_zero():
    assert gradients(ag.pow, [0.0, 0.0, 0.0], [0.0, 1.0, 2.0]) == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


def test_the_gradient_of_a_whole_power_at_a_negative_base_is_right():
    assert gradients(ag.pow, [-2.0, -2.0], [3.0, -1.0])[0] == [12.0, -0.25]


def test_powers_of_a_number_are_exact_where_numpys_are():
    assert ag.pow(2.0, [0.0, 1.0, 10.0, -2.0]).tolist() == [1.0, 2.0, 1024.0, 0.25]


def test_a_power_can_be_differentiated_twice_at_zero():
    x = ag.param([0.0])
    with ag.grad_tape():
        first = ag.grad(ag.sum(ag.pow(x, 3) + ag.pow(x, 2)), x)
        second = ag.grad(ag.sum(first), x)
    assert (first.tolist(), second.tolist()) == ([0.0], [2.0])


# ---- choices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("condition", [np.array([True, False]), [1.0, 0.0], [2.5, 0.0]])
def test_where_takes_booleans_and_numbers_that_are_not_zero(condition):
    assert ag.where(condition, [1.0, 2.0], [3.0, 4.0]).tolist() == [1.0, 4.0]


def test_what_where_does_not_take_reaches_neither_value_nor_gradient(every_device):
    condition = ag.tensor([1.0, 1.0, 0.0])
    assert ag.where(condition, [1.0, 2.0, inf], [nan, -inf, 5.0]).tolist() == [1.0, 2.0, 5.0]
    squares = gradients(
        lambda x, y: ag.sqr(ag.where(condition, x, y)), [1.0, 2.0, inf], [nan, -inf, 5.0]
    )
    assert squares == [[2.0, 4.0, 0.0], [0.0, 0.0, 10.0]]


def test_a_function_is_kept_from_its_pole_by_a_where_before_it(every_device):
    def log_or_zero(x):
        condition = ag.greater(x, 0.0)
        return ag.where(condition, ag.log(ag.where(condition, x, 1.0)), 0.0)

    assert log_or_zero([1.0, 0.0, -1.0]).tolist() == [0.0, 0.0, 0.0]
    assert gradients(log_or_zero, [1.0, 2.0, 0.0, -1.0]) == [[1.0, 0.5, 0.0, 0.0]]


def test_an_infinite_gradient_stays_in_the_branch_that_was_taken(every_device):
    x, y = ag.param([1.0, 1.0, 1.0]), ag.param([1.0, 1.0, 1.0])
    with ag.grad_tape():
        value = ag.where([1.0, 1.0, 0.0], x, y)
    grads = ag.backward(value, seed=ag.tensor([2.0, nan, inf]))
    np.testing.assert_array_equal(grads[x].numpy(), [2.0, nan, 0.0])
    np.testing.assert_array_equal(grads[y].numpy(), [0.0, 0.0, inf])


def test_where_broadcasts_all_three_and_sums_gradients_back():
    condition = np.array([[True], [False]])
    assert gradients(lambda x, y: ag.where(condition, x, y), [1.0, 2.0, 3.0], [[4.0], [5.0]]) == [
        [1.0, 1.0, 1.0],
        [[0.0], [3.0]],
    ]


def test_no_gradient_flows_into_a_condition_or_through_a_comparison():
    x = ag.param([1.0, 2.0])
    with ag.grad_tape():
        assert not ag.greater(x, 1.5).requires_grad
        value = ag.sum(ag.where(x, ag.param([1.0, 1.0]), 0.0))
    assert ag.grad(value, x, allow_unused=True) is None


def test_a_number_that_changes_can_be_a_tensor_without_a_new_plan():
    x = ag.tensor([1.0, 2.0, 3.0])
    for limit in (1.5, 2.5):
        assert ag.minimum(x, ag.tensor(limit)).tolist() == [min(v, limit) for v in (1.0, 2.0, 3.0)]


# ---- broadcasting --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((3, 4), (1, 4)),
        ((2, 1, 4, 64), (2, 1, 4, 1)),
        ((2, 1), (1, 300)),
        ((), (3, 4)),
        ((1,), (5,)),
    ],
)
def test_either_operand_broadcasts_and_gets_a_gradient_of_its_shape(left, right):
    generator = np.random.default_rng(0)
    x, y = generator.uniform(0.5, 2.0, left), generator.uniform(0.5, 2.0, right)
    for fn, formula in (
        (ag.add, np.add),
        (ag.sub, np.subtract),
        (ag.mul, np.multiply),
        (ag.div, np.divide),
        (ag.maximum, np.maximum),
        (ag.pow, np.power),
    ):
        for first, second in ((x, y), (y, x)):
            found = fn(first, second).numpy()
            np.testing.assert_allclose(found, formula(first, second), 1e-5, 1e-6)
            gradcheck(fn, [first, second], device="cpu", directions=1)


# ---- accuracy ------------------------------------------------------------------------------------


def sweep(low: float, high: float) -> np.ndarray:
    """Return floats from low to high: evenly spaced ones, and ones of every size down to 1e-44."""
    generator = np.random.default_rng(0)
    even = np.linspace(low, high, 20_001)
    sizes = np.exp(generator.uniform(np.log(1e-44), np.log(max(-low, high)), 20_000))
    x = np.concatenate([even, sizes, -sizes]).astype(np.float32)
    return x[(x >= low) & (x <= high)]


def sigmoid(x):
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def normal(x):
    return 0.5 * np.array([erfc(-v * sqrt(0.5)) for v in x])


def tanh_form(x):
    return sigmoid(2.0 * sqrt(2.0 / np.pi) * (x + 0.044715 * x**3))


@pytest.mark.parametrize(
    ("fn", "formula", "low", "high", "ulps"),
    [
        (ag.exp, np.exp, -110.0, 88.7, 1),
        (ag.log, np.log, 1e-45, 3e38, 1),
        (ag.tanh, np.tanh, -100.0, 100.0, 2.5),
        (ag.sigmoid, sigmoid, -120.0, 120.0, 2.5),
        (ag.silu, lambda x: x * sigmoid(x), -120.0, 120.0, 3),
        (ag.softplus, lambda x: np.logaddexp(x, 0.0), -120.0, 120.0, 2.5),
        (ag.elu, lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0.0))), -40.0, 40.0, 2),
        (ag.gelu, lambda x: x * normal(x), -16.0, 16.0, 6),
        # in the tail the rounding error of x^3 counts
        (lambda x: ag.gelu(x, approximate="tanh"), lambda x: x * tanh_form(x), -3.0, 16.0, 15),
    ],
    ids=["exp", "log", "tanh", "sigmoid", "silu", "softplus", "elu", "gelu", "gelu tanh"],
)
def test_kernels_are_within_a_few_units_in_the_last_place_everywhere(fn, formula, low, high, ulps):
    x = sweep(low, high)
    with np.errstate(under="ignore"):
        exact = formula(x.astype(np.float64))
        unit = np.spacing(np.abs(exact.astype(np.float32))).astype(np.float64)
    error = np.abs(fn(x).numpy() - exact) / unit
    assert error.max() <= ulps, (x[error.argmax()], error.max())


@pytest.mark.parametrize(
    ("fn", "slope"),
    [
        (ag.silu, lambda x: sigmoid(x) * (1.0 + x * sigmoid(-x))),
        (ag.gelu, lambda x: normal(x) + x * np.exp(-0.5 * x * x) / sqrt(2.0 * np.pi)),
        (ag.tanh, lambda x: 1.0 - np.tanh(x) ** 2),
        (ag.sigmoid, lambda x: sigmoid(x) * sigmoid(-x)),
        (ag.softplus, sigmoid),
        (ag.elu, lambda x: np.exp(np.minimum(x, 0.0))),
    ],
    ids=["silu", "gelu", "tanh", "sigmoid", "softplus", "elu"],
)
def test_slopes_are_accurate_to_a_float_beside_1(fn, slope):
    x = sweep(-30.0, 30.0)
    [found] = gradients(fn, x)
    with np.errstate(under="ignore"):
        np.testing.assert_allclose(found, slope(x.astype(np.float64)), rtol=0, atol=3e-7)


def test_results_do_not_depend_on_the_number_of_threads_or_on_an_elements_place():
    x = np.random.default_rng(0).standard_normal(10_007).astype(np.float32)
    whole = [fn(x).numpy() for fn in (ag.gelu, ag.exp, ag.tanh, ag.softplus)]
    single = CpuDevice(n_threads=1)
    with pg.device(single):
        for fn, expected in zip((ag.gelu, ag.exp, ag.tanh, ag.softplus), whole, strict=True):
            np.testing.assert_array_equal(fn(x).numpy(), expected)
            np.testing.assert_array_equal(fn(x[5:]).numpy(), expected[5:])
    single.close()
