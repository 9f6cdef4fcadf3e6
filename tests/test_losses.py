"""Losses: values at the edges of the number range, labels that are ignored, and reductions."""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag

RNG = np.random.default_rng(7)


def value_and_gradient(fn, x):
    x = ag.param(x)
    with ag.grad_tape():
        loss = fn(x)
    return loss.item(), ag.grad(loss, x).numpy()


def log_softmax(x):
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


# ---- softmax cross entropy ----


def test_logits_hundreds_apart_give_their_exact_difference(every_device):
    loss, gradient = value_and_gradient(
        lambda x: ag.softmax_cross_entropy(x, [0]), [[-431.0, 279.0, 427.0]]
    )
    assert loss == 858.0
    np.testing.assert_allclose(gradient, [[-1.0, 0.0, 1.0]], atol=1e-6)


def test_equal_logits_near_1e8_give_the_logarithm_of_their_number(every_device):
    loss, gradient = value_and_gradient(lambda x: ag.softmax_cross_entropy(x, [0]), [[1e8, 1e8]])
    assert loss == pytest.approx(0.693147, abs=1e-6)
    assert gradient.tolist() == [[-0.5, 0.5]]


def test_a_logit_of_minus_infinity_costs_nothing_and_gradients_stay_finite(every_device):
    logits = [[0.0, -np.inf]]
    loss, gradient = value_and_gradient(lambda x: ag.softmax_cross_entropy(x, [0]), logits)
    assert (loss, gradient.tolist()) == (0.0, [[0.0, 0.0]])
    loss, gradient = value_and_gradient(lambda x: ag.softmax_cross_entropy(x, [[1.0, 0.0]]), logits)
    assert (loss, gradient.tolist()) == (0.0, [[0.0, 0.0]])


LABEL_LOSSES = {
    "softmax_cross_entropy": ag.softmax_cross_entropy,
    "nll_loss": lambda x, y, **settings: ag.nll_loss(ag.log_softmax(x), y, **settings),
    "cross_entropy": lambda x, y, **settings: ag.cross_entropy(ag.softmax(x), y, **settings),
}


@pytest.mark.parametrize("name", LABEL_LOSSES)
def test_if_all_labels_are_ignored_loss_and_gradients_are_zero(name, every_device):
    for reduction in ("mean", "sum"):
        loss, gradient = value_and_gradient(
            lambda x, reduction=reduction: LABEL_LOSSES[name](
                x, [7, 7], ignore_index=7, reduction=reduction
            ),
            RNG.standard_normal((2, 3)),
        )
        assert loss == 0.0
        assert (gradient == 0.0).all()


@pytest.mark.parametrize("name", LABEL_LOSSES)
def test_the_mean_is_over_the_labels_that_are_not_ignored(name, every_device):
    x = RNG.standard_normal((4, 3))
    kept = -log_softmax(x)[[0, 2], [1, 0]]
    loss = LABEL_LOSSES[name](x, [1, -100, 0, -100], ignore_index=-100)
    assert loss.item() == pytest.approx(kept.mean(), rel=1e-5)
    each = LABEL_LOSSES[name](x, [1, -100, 0, -100], ignore_index=-100, reduction="none")
    np.testing.assert_allclose(each.numpy(), [kept[0], 0.0, kept[1], 0.0], rtol=1e-5)


@pytest.mark.parametrize("name", LABEL_LOSSES)
def test_labels_may_have_any_number_of_axes(name, every_device):
    x, y = RNG.standard_normal((2, 3, 4, 5)), RNG.integers(0, 5, (2, 3, 4))
    right = -np.take_along_axis(log_softmax(x), y[..., None], axis=-1)[..., 0]
    each = LABEL_LOSSES[name](x, y, reduction="none").numpy()
    np.testing.assert_allclose(each, right, rtol=1e-5, atol=1e-6)
    one = LABEL_LOSSES[name](x[0, 0, 0], y[0, 0, 0]).item()
    assert one == pytest.approx(right[0, 0, 0], rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_label_smoothing_mixes_every_label_with_the_uniform_distribution(smoothing, every_device):
    x, y = RNG.standard_normal((5, 4)), RNG.integers(0, 4, 5)
    target = (1 - smoothing) * np.eye(4)[y] + smoothing / 4
    right = -(target * log_softmax(x)).sum(axis=1).mean()
    for labels in (y, np.eye(4)[y]):
        loss = ag.softmax_cross_entropy(x, labels, label_smoothing=smoothing).item()
        assert loss == pytest.approx(right, rel=1e-5)
        loss = ag.cross_entropy(ag.softmax(x), labels, label_smoothing=smoothing).item()
        assert loss == pytest.approx(right, rel=1e-5)


def test_an_ignored_row_of_nan_does_not_reach_the_loss_or_the_gradient():
    loss, gradient = value_and_gradient(
        lambda x: ag.softmax_cross_entropy(x, [-1, 0], ignore_index=-1),
        [[np.nan, 1.0], [0.0, 0.0]],
    )
    assert loss == pytest.approx(np.log(2.0))
    assert gradient.tolist() == [[0.0, 0.0], [-0.5, 0.5]]


def test_nan_in_a_row_that_counts_is_seen():
    assert np.isnan(ag.softmax_cross_entropy([[np.nan, 1.0], [0.0, 0.0]], [1, 0]).item())


def test_many_classes_lose_no_accuracy(every_device):
    x, y = RNG.standard_normal((2, 50_003)).astype(np.float32), [3, 50_002]
    right = -log_softmax(x.astype(float))[[0, 1], y].mean()
    assert ag.softmax_cross_entropy(x, y).item() == pytest.approx(right, rel=1e-6)


# ---- cross entropy of probabilities ----


def test_a_probability_of_zero_costs_the_logarithm_of_the_floor(every_device):
    loss, gradient = value_and_gradient(lambda p: ag.cross_entropy(p, [0]), [[0.0, 1.0]])
    assert loss == pytest.approx(-np.log(1e-12), rel=1e-6)
    assert gradient.tolist() == [[0.0, 0.0]]


# ---- distances ----


def test_huber_is_square_inside_and_linear_outside_of_delta(every_device):
    error = np.array([-3.0, -0.5, -0.25, 0.0, 0.5, 2.0])
    right = np.where(abs(error) <= 0.5, error**2 / 2, 0.5 * (abs(error) - 0.25))
    each = ag.huber_loss(error, np.zeros(6), delta=0.5, reduction="none").numpy()
    np.testing.assert_allclose(each, right, rtol=1e-6)
    _, gradient = value_and_gradient(
        lambda x: ag.huber_loss(x, np.zeros(6), delta=0.5, reduction="sum"), error
    )
    np.testing.assert_allclose(gradient, np.clip(error, -0.5, 0.5), rtol=1e-6)


def test_l1_has_gradient_zero_where_the_error_is_zero(every_device):
    loss, gradient = value_and_gradient(
        lambda x: ag.l1_loss(x, [1.0, 1.0, 1.0], reduction="sum"), [0.0, 1.0, 3.0]
    )
    assert loss == 3.0
    assert gradient.tolist() == [-1.0, 0.0, 1.0]


# ---- losses of probabilities ----


def test_binary_cross_entropy_is_exact_for_large_logits(every_device):
    x = np.array([1e4, -1e4, 1e4, -1e4, 0.0, -30.0])
    t = np.array([1.0, 0.0, 0.0, 1.0, 0.5, 0.0])
    each = ag.binary_cross_entropy_with_logits(x, t, reduction="none").numpy()
    right = [0.0, 0.0, 1e4, 1e4, np.log(2.0), np.exp(-30.0)]
    np.testing.assert_allclose(each, right, rtol=1e-5, atol=1e-9)
    _, gradient = value_and_gradient(
        lambda x: ag.binary_cross_entropy_with_logits(x, t, reduction="sum"), x
    )
    np.testing.assert_allclose(gradient, [0.0, 0.0, 1.0, -1.0, 0.0, 0.0], atol=1e-6)


def test_pos_weight_weighs_the_positive_targets():
    x, t, w = RNG.standard_normal((4, 3)), RNG.random((4, 3)), np.array([1.0, 2.0, 5.0])
    p = 1 / (1 + np.exp(-x))
    right = -(w * t * np.log(p) + (1 - t) * np.log(1 - p)).mean()
    assert ag.binary_cross_entropy_with_logits(x, t, pos_weight=w).item() == pytest.approx(
        right, rel=1e-5
    )


def test_kl_div_of_a_distribution_from_itself_is_zero_and_zero_targets_count_nothing(every_device):
    t = np.array([[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]])
    with np.errstate(divide="ignore"):
        log_t = np.log(t)  # with -inf
    for settings, target in (({}, t), ({"log_target": True}, log_t)):
        each = ag.kl_div(log_t, target, reduction="none", **settings).numpy()
        np.testing.assert_allclose(each, np.zeros((2, 3)), atol=1e-7)
        uniform = np.full((2, 3), -np.log(3.0))
        loss = ag.kl_div(uniform, target, reduction="batchmean", **settings).item()
        right = (np.log(3.0) * 2 + 0.25 * np.log(0.25) + 0.75 * np.log(0.75)) / 2
        assert loss == pytest.approx(right, rel=1e-5)


# ---- reductions ----

PAIRS = {
    "mse_loss": (ag.mse_loss, lambda a, b: (a - b) ** 2),
    "l1_loss": (ag.l1_loss, lambda a, b: abs(a - b)),
    "huber_loss": (
        ag.huber_loss,
        lambda a, b: np.where(abs(a - b) < 1, (a - b) ** 2 / 2, abs(a - b) - 0.5),
    ),
    "binary_cross_entropy_with_logits": (
        ag.binary_cross_entropy_with_logits,
        lambda a, b: np.log1p(np.exp(a)) - a * b,
    ),
    "kl_div": (ag.kl_div, lambda a, b: b * (np.log(b) - a)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_reductions_are_mean_sum_and_none(name, every_device):
    fn, formula = PAIRS[name]
    a, b = RNG.standard_normal((3, 4)), RNG.random((3, 4))
    right = formula(a, b)
    np.testing.assert_allclose(fn(a, b, reduction="none").numpy(), right, rtol=1e-5, atol=1e-6)
    assert fn(a, b, reduction="sum").item() == pytest.approx(right.sum(), rel=1e-5)
    assert fn(a, b).item() == pytest.approx(right.mean(), rel=1e-5)


@pytest.mark.parametrize("name", PAIRS)
def test_an_unknown_reduction_is_refused(name):
    with pytest.raises(pg.SettingError, match=f"{name}: reduction must be 'mean', 'sum' or 'none'"):
        PAIRS[name][0]([1.0], [1.0], reduction="average")
