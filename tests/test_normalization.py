"""Softmax and the norms: values at the edges of the number range, gradients through statistics."""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag
from pyggml.device import CpuDevice

RNG = np.random.default_rng(5)


def value_and_gradients(fn, seed, *arrays):
    """Return fn's value, and its gradients for an upstream gradient."""
    params = [ag.param(a) for a in arrays]
    with ag.grad_tape():
        value = fn(*params)
    grads = ag.grad(value, params, seed=ag.tensor(seed, dtype="float32"))
    return value.numpy(), [g.numpy() for g in grads]


# ---- softmax ----


def test_softmax_takes_the_largest_and_smallest_floats(every_device):
    top = np.finfo(np.float32).max
    assert ag.softmax([top, -top, top]).tolist() == [0.5, 0.0, 0.5]


def test_softmax_of_minus_infinity_is_zero_and_its_gradient_finite(every_device):
    y, (dx,) = value_and_gradients(ag.softmax, [1.0, 2.0, 3.0], [0.0, -np.inf, 0.0])
    assert y.tolist() == [0.5, 0.0, 0.5]
    assert dx.tolist() == [-0.5, 0.0, 0.5]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_softmax_of_nan_or_infinity_is_nan_in_that_row_only(bad):
    y = ag.softmax([[0.0, bad, 1.0], [2.0, 2.0, -np.inf]]).numpy()
    assert np.isnan(y[0]).all()
    assert y[1].tolist() == [0.5, 0.5, 0.0]


def test_softmax_of_a_row_of_minus_infinity_is_nan_as_in_numpy():
    assert np.isnan(ag.softmax([-np.inf, -np.inf]).numpy()).all()


def test_softmax_of_a_long_row_loses_no_accuracy():
    x = RNG.standard_normal(100_003).astype(np.float32)
    right = np.exp(x.astype(float)) / np.exp(x.astype(float)).sum()
    np.testing.assert_allclose(ag.softmax(x).numpy(), right, rtol=1e-6)


def test_log_softmax_keeps_the_logarithm_next_to_large_numbers(every_device):
    np.testing.assert_allclose(ag.log_softmax([1e8, 1e8]).numpy(), [-np.log(2.0)] * 2, rtol=1e-6)
    assert ag.log_softmax([0.0, -1e30]).tolist() == [0.0, np.float32(-1e30)]


def test_log_softmax_with_minus_infinity_has_a_finite_gradient(every_device):
    y, (dx,) = value_and_gradients(ag.log_softmax, [1.0, 0.0], [0.0, -np.inf])
    assert y.tolist() == [0.0, -np.inf]
    assert dx.tolist() == [0.0, 0.0]


# ---- layer norm and RMS norm ----


def test_layer_norm_normalises_over_all_axes_of_its_weight(every_device):
    x, w = RNG.standard_normal((2, 3, 4)), RNG.standard_normal((3, 4))
    b = RNG.standard_normal((3, 4))
    mean, var = x.mean(axis=(1, 2), keepdims=True), x.var(axis=(1, 2), keepdims=True)
    right = (x - mean) / np.sqrt(var + 1e-5) * w + b
    np.testing.assert_allclose(ag.layer_norm(x, w, b).numpy(), right, atol=2e-6)


def test_layer_norm_with_a_bias_alone():
    assert ag.layer_norm([[1.0, 3.0]], None, [1.0, 2.0], eps=0.0).tolist() == [[0.0, 3.0]]


def test_layer_norm_of_a_large_mean_keeps_the_variance():
    x = (1e4 + RNG.standard_normal((3, 1000))).astype(np.float32)
    wide = x.astype(float)
    right = (wide - wide.mean(axis=1, keepdims=True)) / wide.std(axis=1, keepdims=True)
    np.testing.assert_allclose(ag.layer_norm(x, eps=0.0).numpy(), right, atol=1e-3)


def test_a_constant_row_gives_zeros_and_finite_gradients(every_device):
    y, (dx,) = value_and_gradients(ag.layer_norm, [[1.0, 2.0, 6.0]], [[7.0, 7.0, 7.0]])
    assert y.tolist() == [[0.0, 0.0, 0.0]]
    np.testing.assert_allclose(dx, np.array([[-2.0, -1.0, 3.0]]) / np.sqrt(1e-5), rtol=1e-5)


def test_nan_stays_in_its_row():
    y = ag.rms_norm([[np.nan, 1.0], [3.0, 3.0]], eps=0.0).numpy()
    assert np.isnan(y[0]).all()
    assert y[1].tolist() == [1.0, 1.0]


def test_layer_norm_gradient_is_orthogonal_to_shift_and_scale():
    x = RNG.standard_normal((5, 300))
    _, (dx,) = value_and_gradients(
        lambda x: ag.layer_norm(x, eps=0.0), RNG.standard_normal((5, 300)), x
    )
    np.testing.assert_allclose(dx.sum(axis=1), 0.0, atol=1e-4)
    np.testing.assert_allclose((dx * x).sum(axis=1), 0.0, atol=1e-4)


@pytest.mark.parametrize("shape", [(700, 300), (50, 70, 61)])
def test_norms_have_the_same_bits_for_any_number_of_threads(shape):
    x, g = (RNG.standard_normal(shape).astype(np.float32) for _ in range(2))
    results = []
    for n_threads in (1, 2, 3):
        device = CpuDevice(n_threads=n_threads)
        with pg.device(device):
            layer = value_and_gradients(ag.layer_norm, g, x)
            batch = value_and_gradients(lambda x: ag.batch_norm(x, training=True), g, x)
        results.append([layer[0], layer[1][0], batch[0], batch[1][0]])
        device.close()
    for other in results[1:]:
        assert all((a == b).all() for a, b in zip(results[0], other, strict=True))


# ---- group norm ----


def test_one_group_is_a_layer_norm_and_each_channel_alone_an_instance_norm(every_device):
    x = RNG.standard_normal((2, 4, 3, 5)).astype(np.float32)
    whole = ag.layer_norm(x.reshape(2, 60)).numpy().reshape(x.shape)
    np.testing.assert_allclose(ag.group_norm(x, groups=1).numpy(), whole, atol=1e-6)
    alone = ag.layer_norm(x.reshape(2, 4, 15)).numpy().reshape(x.shape)
    np.testing.assert_allclose(ag.group_norm(x, groups=4).numpy(), alone, atol=1e-6)


NORMS = {
    **{
        f"group_norm of {shape} in {groups}": (
            lambda x, w, b, groups=groups: ag.group_norm(x, w, b, groups=groups),
            [shape, (4,), (4,)],
        )
        for shape in [(3, 4), (2, 4, 3), (1, 4, 2, 3)]
        for groups in (1, 2, 4)
        if shape != (3, 4) or groups < 4  # of one value each, the gradient is 0
    },
    **{
        f"batch_norm of {shape}": (
            lambda x, w, b: ag.batch_norm(x, w, b, training=True),
            [shape, shape[1:2], shape[1:2]],
        )
        for shape in [(3, 70), (3, 1), (2, 3, 4), (2, 1, 2, 2), (1, 3, 2, 2)]
    },
    "layer_norm of a line": (ag.layer_norm, [(5,), (5,), (5,)]),
    "layer_norm over all axes": (ag.layer_norm, [(2, 3, 2), (2, 3, 2), (2, 3, 2)]),
    "layer_norm over an axis of size 1": (ag.layer_norm, [(4, 3, 1), (3, 1)]),
    "layer_norm of more rows than blocks": (ag.layer_norm, [(70, 3), (3,), (3,)]),
    "layer_norm of single values": (ag.layer_norm, [(3, 1), (1,), (1,)]),
    "rms_norm of single values": (lambda x, w: ag.rms_norm(x, w, eps=0.5), [(3, 1), (1,)]),
}


@pytest.mark.parametrize("name", NORMS)
def test_gradients_in_every_layout_of_weights(name, every_device):
    fn, shapes = NORMS[name]
    generator = np.random.default_rng(3)
    arrays = [generator.standard_normal(shape) for shape in shapes]
    ag.gradcheck(fn, arrays, device=every_device, order=2, device_tolerance=2e-5)


# ---- batch norm ----

BATCHES = [(6, 3), (100, 70), (4, 3, 5), (3, 2, 4, 5), (5, 1, 2)]


@pytest.mark.parametrize("shape", BATCHES, ids=str)
def test_batch_norm_gradients_sum_to_zero_over_the_batch_for_any_upstream(shape, every_device):
    y, (dx,) = value_and_gradients(
        lambda x: ag.batch_norm(x, training=True),
        RNG.standard_normal(shape),
        3.0 + RNG.standard_normal(shape),
    )
    rest = tuple(i for i in range(len(shape)) if i != 1)
    assert np.abs(dx).max() > 0.01
    np.testing.assert_allclose(dx.sum(axis=rest), 0.0, atol=2e-5)
    np.testing.assert_allclose(y.mean(axis=rest), 0.0, atol=1e-6)
    np.testing.assert_allclose(y.std(axis=rest), 1.0, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1), (1, 2, 1, 1)], ids=str)
def test_training_on_one_value_per_channel_is_a_value_error_and_never_nan(shape):
    for fn in (lambda x: ag.batch_norm(x, training=True), ag.batch_statistics):
        with pytest.raises(ValueError, match=r"training needs more than one value per channel"):
            fn(np.ones(shape))


def test_one_image_is_enough_to_train_on():
    y = ag.batch_norm(np.arange(4.0).reshape(1, 1, 2, 2), training=True).numpy()
    np.testing.assert_allclose(y.mean(), 0.0, atol=1e-7)


@pytest.mark.parametrize("shape", BATCHES, ids=str)
def test_batch_statistics_are_mean_and_unbiased_variance(shape, every_device):
    x = RNG.standard_normal(shape)
    rest = tuple(i for i in range(len(shape)) if i != 1)
    mean, var = ag.batch_statistics(x)
    np.testing.assert_allclose(mean.numpy(), x.mean(axis=rest), atol=1e-6)
    np.testing.assert_allclose(var.numpy(), x.var(axis=rest, ddof=1), rtol=1e-5)


def test_no_gradient_flows_through_batch_statistics():
    x = ag.param(RNG.standard_normal((4, 2)))
    with ag.grad_tape():
        mean, var = ag.batch_statistics(x)
    assert not mean.requires_grad
    assert not var.requires_grad


def test_evaluation_by_the_statistics_of_a_batch_is_what_training_on_it_gives():
    x, w, b = RNG.standard_normal((8, 3, 2)), RNG.standard_normal(3), RNG.standard_normal(3)
    trained = ag.batch_norm(x, w, b, training=True).numpy()
    mean, var = x.mean(axis=(0, 2)), x.var(axis=(0, 2))
    evaluated = ag.batch_norm(x, w, b, running_mean=mean, running_var=var).numpy()
    np.testing.assert_allclose(evaluated, trained, atol=2e-6)
