"""Reductions: axes, ties, NaN and infinity, and gradients where the plain formula has none."""

from __future__ import annotations

from itertools import combinations
from math import inf, log, nan

import numpy as np
import pytest

from pyggml import ag

SHAPE = (3, 2, 5, 4)
EVERY_SET_OF_AXES = [axes for n in range(1, 5) for axes in combinations(range(4), n)]


def gradient(fn, array):
    """Return the gradient of the sum of fn."""
    x = ag.param(array)
    with ag.grad_tape():
        value = ag.sum(fn(x))
    return ag.grad(value, x).tolist()


# ---- axes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", EVERY_SET_OF_AXES, ids=str)
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "var", "std"])
def test_every_set_of_axes_gives_what_numpy_gives(name, axes, every_device):
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    for keepdims in (False, True):
        found = getattr(ag, name)(x, axis=axes, keepdims=keepdims).numpy()
        expected = getattr(np, name)(x.astype(np.float64), axis=axes, keepdims=keepdims)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, 2e-6, 1e-6)


@pytest.mark.parametrize("axis", [None, 0, 1, 2, -1])
@pytest.mark.parametrize("keepdims", [False, True])
def test_argmax_gives_what_numpy_gives(axis, keepdims, every_device):
    x = np.random.default_rng(0).integers(0, 5, (4, 5, 300)).astype(np.float32)  # many ties
    found = ag.argmax(x, axis=axis, keepdims=keepdims).numpy()
    np.testing.assert_array_equal(found, np.argmax(x, axis=axis, keepdims=keepdims))
    assert found.dtype == np.int32


@pytest.mark.parametrize("shape", [(1,), (1, 1), (7,), (1, 33), (65_536,), (64, 1024), (3, 40_000)])
def test_long_and_short_rows_are_reduced_right(shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for axis in (None, -1):
        exact = np.sum(x.astype(np.float64), axis=axis)
        np.testing.assert_allclose(ag.sum(x, axis=axis).numpy(), exact, 1e-5, 1e-4)
        np.testing.assert_array_equal(ag.max(x, axis=axis).numpy(), np.max(x, axis=axis))
        np.testing.assert_array_equal(ag.argmax(x, axis=axis).numpy(), np.argmax(x, axis=axis))


def test_a_sum_of_many_floats_keeps_its_digits():
    ones = np.full(1 << 22, 0.1, np.float32)
    exact = float(np.float32(0.1)) * ones.size
    assert ag.sum(ones).item() == pytest.approx(exact, rel=1e-6)


def test_reducing_no_axes_returns_the_tensor():
    x = ag.tensor(3.0)
    assert (ag.max(x).item(), ag.logsumexp(x).item(), ag.norm(x).item()) == (3.0, 3.0, 3.0)
    assert ag.argmax(x).item() == 0


# ---- ties, NaN and infinity ----------------------------------------------------------------------


def test_the_gradient_of_max_and_min_is_shared_evenly_among_ties(every_device):
    x = [[1.0, 5.0, 5.0, 2.0], [3.0, 3.0, 3.0, 3.0]]
    share = [[0.0, 0.5, 0.5, 0.0], [0.25, 0.25, 0.25, 0.25]]
    assert gradient(lambda x: ag.max(x, axis=1), x) == share
    assert gradient(lambda x: ag.min(x, axis=1), np.negative(x)) == share
    assert gradient(ag.max, x) == [[0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]


def test_nan_reaches_max_and_min_from_any_place(every_device):
    for place in range(70):
        x = np.zeros((2, 70))
        x[0, place] = nan
        for axis in (0, 1, None):
            for name in ("max", "min"):
                found = getattr(ag, name)(x, axis=axis).numpy()
                np.testing.assert_array_equal(found, getattr(np, name)(x, axis=axis))


def test_argmax_finds_the_first_nan_as_numpy_does():
    x = np.array([[1.0, nan, 3.0, nan], [4.0, 1.0, 2.0, 3.0]])
    assert ag.argmax(x, axis=1).tolist() == [1, 0]


def test_max_and_argmax_of_infinities(every_device):
    x = np.array([[-inf, -inf], [inf, -inf], [1.0, inf]])
    assert ag.max(x, axis=1).tolist() == [-inf, inf, inf]
    assert ag.argmax(x, axis=1).tolist() == [0, 0, 1]


def test_logsumexp_is_stable_and_takes_infinities(every_device):
    x = [[1000.0, 1000.0], [-1000.0, -1000.0], [-inf, 2.0], [-inf, -inf], [inf, 0.0]]
    expected = [1000.0 + log(2.0), -1000.0 + log(2.0), 2.0, -inf, inf]
    np.testing.assert_allclose(ag.logsumexp(x, axis=1).numpy(), expected, 1e-6)


def test_the_gradient_of_logsumexp_is_finite_beside_rows_of_minus_infinity(every_device):
    x = [[1e8, 1e8], [-inf, 2.0], [-inf, -inf]]
    assert gradient(lambda x: ag.logsumexp(x, axis=1), x) == [[0.5, 0.5], [0.0, 1.0], [0.0, 0.0]]


# ---- norm, var, std ------------------------------------------------------------------------------


def test_norm_has_gradient_zero_at_the_zero_vector(every_device):
    x = [[3.0, 4.0], [0.0, 0.0]]
    assert ag.norm(x, axis=1).tolist() == [5.0, 0.0]
    [along, at_zero] = gradient(lambda x: ag.norm(x, axis=1), x)
    assert along == pytest.approx([0.6, 0.8], rel=1e-6)
    assert at_zero == [0.0, 0.0]


def test_norm_is_that_of_numpy_and_keeps_nan():
    x = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    np.testing.assert_allclose(ag.norm(x, axis=0).numpy(), np.linalg.norm(x, axis=0), 1e-6)
    assert np.isnan(ag.norm([1.0, nan]).item())


def test_std_of_equal_elements_is_zero_with_gradient_zero():
    assert ag.std([2.0, 2.0, 2.0]).item() == 0.0
    assert gradient(ag.std, [2.0, 2.0, 2.0]) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("ddof", [0, 1, 2])
def test_var_and_std_divide_by_the_count_less_ddof(ddof):
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    for name in ("var", "std"):
        found = getattr(ag, name)(x, axis=-1, ddof=ddof).numpy()
        np.testing.assert_allclose(found, getattr(np, name)(x, axis=-1, ddof=ddof), 1e-6)


def test_var_keeps_its_digits_far_from_zero():
    x = np.array([1e4, 1e4 + 1.0, 1e4 + 2.0, 1e4 + 3.0])
    assert ag.var(x).item() == pytest.approx(1.25, rel=1e-5)
