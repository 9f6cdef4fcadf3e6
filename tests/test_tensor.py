"""Tensors as people meet them: what goes in, what comes out, and what is said when it cannot be."""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag

BASE = np.arange(24, dtype=np.float64).reshape(2, 3, 4) / 7

READ_ONLY = BASE.astype(np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    "array",
    [
        BASE.T,
        BASE[::-1],
        BASE[:, ::2, 1:],
        BASE,
        np.float64(2.5),
        np.array(3.5),
        READ_ONLY,
        BASE.astype(">f4"),
        BASE.astype(">f8"),
        BASE.astype(np.float16),
        np.asfortranarray(BASE),
        np.broadcast_to(BASE[:, :1], (2, 5, 4)),
        BASE > 1,
        BASE.tolist(),
    ],
    ids=[
        "transposed",
        "reversed",
        "strided",
        "float64",
        "scalar",
        "0-d",
        "read-only",
        "big-endian f4",
        "big-endian f8",
        "float16",
        "fortran",
        "broadcast",
        "bool",
        "list",
    ],
)
def test_an_array_of_any_stride_order_and_float_type_arrives_with_its_values(array):
    x = ag.tensor(array)
    assert x.dtype == np.float32
    np.testing.assert_array_equal(x.numpy(), np.asarray(array).astype(np.float32))
    np.testing.assert_array_equal((x * 1.0).numpy(), np.asarray(array).astype(np.float32))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64, ">i4", ">i8"])
def test_integers_of_any_type_arrive_as_int32(dtype):
    x = ag.tensor(np.array([1, 2, 100], dtype))
    assert x.dtype == np.int32
    assert x.tolist() == [1, 2, 100]


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_an_integer_outside_int32_is_refused(value):
    with pytest.raises(pg.DTypeError, match="integers must fit in int32; got values from"):
        ag.tensor([value, 0])


@pytest.mark.parametrize(
    "data",
    [
        [1j],
        ["a"],
        [None],
        [object()],
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(2, [("a", "f4")]),
    ],
)
def test_data_that_are_not_real_numbers_are_refused(data):
    with pytest.raises(pg.DTypeError, match="tensor: needs real numbers"):
        ag.tensor(data)


def test_a_ragged_list_is_refused():
    with pytest.raises(pg.DTypeError, match="tensor: needs a rectangular array"):
        ag.tensor([[1.0], [1.0, 2.0]])


def test_five_dimensions_and_no_elements_are_refused():
    with pytest.raises(
        pg.ShapeError,
        match=r"tensor: at most 4 dimensions; got shape \(1, 1, 1, 1, 1\); merge some",
    ):
        ag.tensor(np.ones((1, 1, 1, 1, 1)))
    with pytest.raises(pg.ShapeError, match="tensor: needs at least one element"):
        ag.tensor([])


def test_an_unknown_dtype_is_refused_and_the_known_ones_listed():
    for wrong in ("float8", "complex64", 7):
        with pytest.raises(
            pg.DTypeError, match="dtype: pyggml has float32, int32, float16, bfloat16; got"
        ):
            ag.tensor([1.0], dtype=wrong)


def test_fractions_are_not_made_integers_silently():
    with pytest.raises(pg.DTypeError, match="needs integers; got float64"):
        ag.tensor([1.5], dtype="int32")


def test_numpy_returns_a_copy():
    w = ag.param([1.0, 2.0])
    w.numpy()[:] = 9.0
    assert w.tolist() == [1.0, 2.0]


def test_numpy_functions_and_operators_see_the_value():
    x = ag.tensor([1.0, 4.0])
    assert np.asarray(x * 2.0).tolist() == [2.0, 8.0]
    assert np.asarray(x, dtype=np.float64).dtype == np.float64
    assert (np.array([10.0, 10.0]) - x).tolist() == [9.0, 6.0]
    assert isinstance(np.array([10.0, 10.0]) * x, pg.ag.Tensor)
    assert (np.eye(2) @ x).tolist() == [1.0, 4.0]


def test_python_numbers_come_from_tensors_of_one_element():
    assert float(ag.tensor([[2.5]])) == 2.5
    assert int(ag.tensor(3)) == 3
    with pytest.raises(pg.ShapeError, match=r"item: needs exactly one element; got shape \(2,\)"):
        ag.tensor([1.0, 2.0]).item()


def test_repr_is_short_and_computes_nothing():
    w = ag.param([1.0, 2.0])
    assert repr(w) == "param([1., 2.], dtype=float32, device='cpu', requires_grad=True)"
    assert repr(w * 2.0) == "tensor(<pending affine>, shape=(2,), dtype=float32, device='cpu')"
    assert repr(ag.tensor(np.zeros((9, 9)))) == "tensor(shape=(9, 9), dtype=float32, device='cpu')"


def test_integer_tensors_do_no_arithmetic():
    with pytest.raises(
        pg.DTypeError, match=r"mul: needs float32; got int32 of shape \(2,\); pass dtype='float32'"
    ):
        ag.tensor([1, 2]) * ag.tensor([1.0, 2.0])


def test_devices_do_not_mix():
    with pytest.raises(
        pg.DeviceError, match="add: all inputs must live on one device; got cpu, reference"
    ):
        ag.tensor(1.0) + ag.tensor(1.0, device="reference")


def test_an_unknown_device_names_the_ones_there_are():
    with pytest.raises(
        pg.DeviceError, match="device: there is no 'vulkan9'; this process has cpu, reference"
    ):
        pg.set_device("vulkan9")


def test_a_device_block_is_left_even_by_an_exception():
    with pytest.raises(KeyError), pg.device("reference"):
        assert ag.tensor(1.0).device.name == "reference"
        raise KeyError
    assert ag.tensor(1.0).device.name == "cpu"


def test_the_reference_device_keeps_double_precision():
    with pg.device("reference"):
        third = ag.tensor(1.0) / 3.0
        assert third.item() == 1.0 / 3.0
        assert third.dtype == np.float64


def test_assign_checks_shape_and_keeps_the_parameter():
    w = ag.param([1.0, 2.0])
    w.assign([3.0, 4.0])
    assert w.tolist() == [3.0, 4.0]
    with pytest.raises(pg.ShapeError, match=r"assign: needs the shape \(2,\); got \(3,\)"):
        w.assign([1.0, 2.0, 3.0])
    with pytest.raises(pg.GradError, match="assign: only a parameter"):
        (w * 1.0).assign([1.0, 1.0])


X = np.array([[0.5, -1.5, 2.0], [3.0, 0.25, -0.75]])

METHODS = {
    "pow": (lambda x: x**3, X**3),
    "reflected pow": (lambda x: 2.0**x, 2.0**X),
    "abs": (lambda x: abs(x) + x.abs(), 2 * np.abs(X)),
    "greater": (lambda x: x > 0.3, X > 0.3),
    "less": (lambda x: x < X[0], X < X[0]),
    "equal": (lambda x: x == 0.25, X == 0.25),
    "not equal": (lambda x: x != X[0], X != X[0]),
    "at least": (lambda x: x >= 0.25, X >= 0.25),
    "at most": (lambda x: x <= 0.25, X <= 0.25),
    "equal integers": (lambda x: x.argmax(1) == np.array([2, 1]), X.argmax(1) == [2, 1]),
    "transpose": (lambda x: x.transpose(), X.T),
    "permute": (lambda x: x.permute(1, 0), X.T),
    "reshape": (lambda x: x.reshape(3, -1), X.reshape(3, -1)),
    "sum": (lambda x: x.sum(0), X.sum(0)),
    "mean": (lambda x: x.mean(1, keepdims=True), X.mean(1, keepdims=True)),
    "max": (lambda x: x.max(-1), X.max(-1)),
    "min": (lambda x: x.min(), X.min()),
    "var": (lambda x: x.var(0, ddof=1), X.var(0, ddof=1)),
    "argmax": (lambda x: x.argmax(1), X.argmax(1)),
    "exp, log, sqrt": (lambda x: x.exp().log().abs().sqrt(), np.sqrt(np.abs(X))),
    "clamp": (lambda x: x.clamp(min=-1.0, max=1.0), X.clip(-1, 1)),
    "squeeze": (lambda x: x.unsqueeze(1).squeeze(), X),
    "softmax": (lambda x: x.softmax(0), np.exp(X) / np.exp(X).sum(0)),
    "tanh, sigmoid": (lambda x: x.tanh().sigmoid(), 1 / (1 + np.exp(-np.tanh(X)))),
    "astype": (lambda x: x.astype("int32"), X.astype(int)),
    "index": (lambda x: x[1, ::-1], X[1, ::-1]),
    "iteration": (lambda x: next(iter(x)), X[0]),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_and_operators_do_what_numpy_does(name):
    method, expected = METHODS[name]
    np.testing.assert_allclose(method(ag.tensor(X)).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_comparing_with_none_or_a_word_is_false_and_hashing_goes_by_identity():
    x = ag.tensor([1.0])
    assert (x == None) is False  # noqa: E711
    assert (x == "x") is False
    assert {x: 1}[x] == 1
    assert len({x, ag.tensor([1.0])}) == 2


def test_a_number_formats_like_one():
    assert f"{ag.tensor(2.5):.2f}" == "2.50"


def test_zeros_of_both_signs_are_two_constants():
    x = ag.tensor([1.0])
    assert (1.0 / (x * 0.0)).item() == np.inf
    assert (1.0 / (x * -0.0)).item() == -np.inf
    assert np.signbit(ag.full((2,), -0.0).numpy()).all()
