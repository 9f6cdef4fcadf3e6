"""Optimizers: each method against its formula in NumPy, on every device; the accumulation window;
bad settings.
"""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag, optim

DEVICES = ["cpu", "reference"]


def run(make, gradients, start, device, decay=None):
    """Return the weight after steps whose gradients are given, made through a loss that is linear
    in the weight.
    """
    with pg.device(device):
        w = ag.param(start)
        opt = make([w])
        for g in gradients:
            opt.zero_grad()
            with ag.grad_tape():
                loss = ag.sum(w * ag.tensor(g))
            ag.backward(loss)
            opt.step()
        return w.numpy()


def sgd(w, gradients, lr, momentum=0.0, nesterov=False, decay=0.0):
    velocity = None
    for g in gradients:
        g = g + decay * w
        if momentum:
            velocity = g if velocity is None else momentum * velocity + g
            g = g + momentum * velocity if nesterov else velocity
        w = w - lr * g
    return w


def adam(w, gradients, lr, beta1=0.9, beta2=0.999, epsilon=1e-8, l2=0.0, decoupled=0.0):
    m = v = 0.0
    for t, g in enumerate(gradients, start=1):
        g = g + l2 * w
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        w = w - lr * decoupled * w
        w = w - lr * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + epsilon)
    return w


METHODS = [
    ("SGD", lambda p: optim.SGD(p, lr=0.1), lambda w, g: sgd(w, g, 0.1)),
    (
        "SGD decay",
        lambda p: optim.SGD(p, lr=0.1, weight_decay=0.2),
        lambda w, g: sgd(w, g, 0.1, decay=0.2),
    ),
    (
        "SGD momentum",
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
        lambda w, g: sgd(w, g, 0.1, 0.9),
    ),
    (
        "SGD nesterov",
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda w, g: sgd(w, g, 0.1, 0.9, True, 0.1),
    ),
    ("Adam", lambda p: optim.Adam(p, lr=0.1), lambda w, g: adam(w, g, 0.1)),
    (
        "Adam decay",
        lambda p: optim.Adam(p, lr=0.1, weight_decay=0.3),
        lambda w, g: adam(w, g, 0.1, l2=0.3),
    ),
    (
        "AdamW",
        lambda p: optim.AdamW(p, lr=0.1, betas=(0.8, 0.9), weight_decay=0.3),
        lambda w, g: adam(w, g, 0.1, 0.8, 0.9, decoupled=0.3),
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("make", "formula"), [m[1:] for m in METHODS], ids=[m[0] for m in METHODS])
@pytest.mark.parametrize("shape", [(), (3, 5), (2, 1000)])
def test_ten_updates_equal_the_methods_formula(make, formula, shape, device):
    generator = np.random.default_rng(0)
    start = generator.standard_normal(shape)
    gradients = [generator.standard_normal(shape) for _ in range(10)]
    tolerance = 1e-10 if device == "reference" else 2e-6
    np.testing.assert_allclose(
        run(make, gradients, start, device),
        formula(start, gradients),
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize("device", DEVICES)
def test_step_reads_the_accumulated_gradient_or_takes_explicit_ones(device):
    with pg.device(device):
        values = []
        for explicit in (False, True):
            w = ag.param([1.0])
            opt = optim.SGD([w], lr=0.1)
            with ag.grad_tape():
                loss = ag.sum(w * w)
            grads = ag.backward(loss)
            assert opt.step(grads if explicit else None) is True
            values.append(w.item())
        assert values[0] == values[1] == pytest.approx(0.8)


@pytest.mark.parametrize("device", DEVICES)
def test_a_window_updates_on_its_last_step_and_changes_nothing_before(device):
    with pg.device(device):
        w = ag.param([1.0])
        opt = optim.SGD([w], lr=1.0, accumulate_steps=3)
        for i, g in enumerate([1.0, 2.0, 6.0]):
            with ag.grad_tape():
                loss = ag.sum(w * g)
            ag.backward(loss)
            assert opt.step() is (i == 2)
            assert w.item() == (1.0 if i < 2 else -2.0)  # 1 - mean(1, 2, 6)
        assert opt.t == 1
        assert w.grad is None


def test_the_sum_instead_of_the_mean_moves_k_times_as_far():
    moved = []
    for average in (True, False):
        w = ag.param([0.0])
        opt = optim.SGD([w], lr=1.0, accumulate_steps=4, average=average)
        for _ in range(4):
            with ag.grad_tape():
                loss = ag.sum(w * 1.0)
            ag.backward(loss)
            opt.step()
        moved.append(w.item())
    assert moved == [-1.0, -4.0]


def test_explicit_gradients_in_a_window_are_an_error_that_explains_itself():
    w = ag.param([1.0])
    opt = optim.SGD([w], lr=1.0, accumulate_steps=2)
    with ag.grad_tape():
        loss = ag.sum(w * w)
    grads = ag.backward(loss)
    with pytest.raises(
        pg.GradError, match=r"SGD: step\(grads\) would use the last micro-batch only"
    ):
        opt.step(grads)


def test_micro_batches_share_one_plan_each_and_memory_does_not_grow_with_the_window():
    cpu = pg.devices()[0]
    cpu.clear_plans()
    w = ag.param(np.zeros((8, 8)))
    opt = optim.SGD([w], lr=1.0, accumulate_steps=6)
    for _ in range(12):
        with ag.grad_tape():
            loss = ag.mean(ag.tensor(np.ones((4, 8))) @ w)
        ag.backward(loss)
        opt.step()
    assert len(cpu.plans) <= 3  # the first of a window, those between, and the last


def test_no_gradient_is_not_a_zero_gradient():
    for gradient, expected in ((None, 1.0), (0.0, 0.9)):
        w = ag.param([1.0])
        opt = optim.SGD([w], lr=1.0, weight_decay=0.1)
        if gradient is not None:
            with ag.grad_tape():
                loss = ag.sum(w * gradient)
            ag.backward(loss)
        opt.step()
        assert w.item() == pytest.approx(expected)


def test_a_parameter_listed_twice_is_updated_once():
    w = ag.param([1.0])
    opt = optim.SGD([w, w], lr=1.0)
    with ag.grad_tape():
        loss = ag.sum(w * 1.0)
    ag.backward(loss)
    opt.step()
    assert w.item() == 0.0


def test_two_optimizers_can_share_a_loss():
    a, b = ag.param([1.0]), ag.param([1.0])
    first, second = optim.SGD([a], lr=1.0), optim.AdamW([b], lr=0.1, weight_decay=0.0)
    with ag.grad_tape():
        loss = ag.sum(a * b)
    ag.backward(loss)
    first.step()
    second.step()
    assert a.item() == 0.0
    assert b.item() == pytest.approx(0.9)


@pytest.mark.parametrize("method", [optim.SGD, optim.Adam, optim.AdamW])
@pytest.mark.parametrize("wrong", [0, -2, 1.5, True, "3"])
def test_accumulate_steps_must_be_a_positive_integer(method, wrong):
    with pytest.raises(pg.SettingError, match="accumulate_steps must be a positive integer"):
        method([ag.param([1.0])], accumulate_steps=wrong)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: optim.SGD(p, lr=-1.0), r"SGD: lr must be in \[0.0, inf\); got -1.0"),
        (lambda p: optim.SGD(p, lr=float("nan")), "SGD: lr must be"),
        (lambda p: optim.SGD(p, lr=0.1, momentum=1.0), "SGD: momentum must be"),
        (lambda p: optim.SGD(p, lr=0.1, nesterov=True), "SGD: nesterov needs momentum"),
        (lambda p: optim.AdamW(p, betas=(0.9, 1.0)), r"AdamW: betas\[1\] must be"),
        (lambda p: optim.Adam([]), "Adam: needs at least one parameter"),
        (lambda p: optim.Adam([1.0]), "Adam: needs parameters made with ag.param; got float"),
        (
            lambda p: optim.Adam([p[0] * 2.0]),
            "Adam: needs parameters made with ag.param; got Tensor",
        ),
    ],
)
def test_a_setting_out_of_range_is_refused(make, message):
    with pytest.raises(pg.SettingError, match=message):
        make([ag.param([1.0])])
