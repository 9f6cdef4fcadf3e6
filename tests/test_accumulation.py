"""Gradient accumulation: where the sum is, when the update happens, and what it equals.

The first part states for pyggml what the tests of ggmlR's accumulation state for it. Two of those
record a trap of that system, where the obvious loop trains on the last micro-batch only; here the
tests state that the trap is not there.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag, graph, nn, optim


@pytest.fixture(params=["cpu", "reference"], autouse=True)
def device(request):
    with pg.device(request.param) as found:
        yield found


@pytest.fixture
def tolerance(device):
    """What the tests of ggmlR allow, in double precision; 1e-6 in single."""
    return 1e-10 if device.name == "reference" else 1e-6


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def backward(w, x, y=None):
    """Run forward and backward of mse(w @ x, y) and return what ag.backward returns."""
    target = np.zeros((2, x.shape[1])) if y is None else y
    with ag.grad_tape():
        loss = ag.mse_loss(w @ ag.tensor(x), ag.tensor(target))
    return ag.backward(loss)


METHODS = {
    "SGD": lambda p, **k: optim.SGD(p, lr=0.1, **k),
    "SGD momentum": lambda p, **k: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, **k),
    "Adam": lambda p, **k: optim.Adam(p, lr=0.01, **k),
    "AdamW": lambda p, **k: optim.AdamW(p, lr=0.01, weight_decay=0.1, **k),
}


def test_backward_accumulates_into_grad_across_calls(tolerance):
    w, x1, x2 = ag.param(normal(101, 2, 3)), normal(1, 3, 1), normal(2, 3, 1)

    def single(x):
        w.grad = None
        backward(w, x)
        return w.grad.numpy()

    g1, g2 = single(x1), single(x2)
    w.grad = None
    backward(w, x1)
    np.testing.assert_array_equal(w.grad.numpy(), g1)
    backward(w, x2)
    np.testing.assert_allclose(w.grad.numpy(), g1 + g2, rtol=tolerance, atol=tolerance)


def test_zero_grad_clears_the_accumulator():
    w = ag.param(normal(102, 2, 3))
    opt = optim.SGD({"w": w}, lr=0.01)
    backward(w, normal(1, 3, 1))
    assert w.grad is not None
    opt.zero_grad()
    assert w.grad is None


def test_k_micro_batches_accumulate_to_the_full_batch_gradient(tolerance):
    k, w, x = 4, ag.param(normal(103, 2, 3)), normal(1, 3, 4)
    backward(w, x)
    full = w.grad.numpy()
    w.grad = None
    for i in range(k):
        backward(w, x[:, i : i + 1])
    np.testing.assert_allclose(w.grad.numpy() / k, full, rtol=tolerance, atol=tolerance)


def test_backward_returns_only_the_last_calls_gradients_not_the_sum():
    w = ag.param(normal(104, 2, 3))
    backward(w, normal(1, 3, 1))
    returned = backward(w, normal(2, 3, 1))
    assert not np.allclose(w.grad.numpy(), returned[w].numpy())


def test_step_applies_the_sum_and_explicit_gradients_the_last_call(tolerance):
    """The trap: step() must not mean the last micro-batch, whatever step(grads) means."""
    start, x1, x2 = normal(105, 2, 3), normal(1, 3, 1), normal(2, 3, 1)

    def run(explicit):
        w = ag.param(start)
        opt = optim.SGD([w], lr=0.1)
        backward(w, x1)
        last = backward(w, x2)
        total = w.grad.numpy()
        opt.step(last if explicit else None)
        return w.numpy(), total, last[w].numpy()

    stepped, total, _ = run(False)
    np.testing.assert_allclose(stepped, start - 0.1 * total, rtol=tolerance, atol=tolerance)
    stepped, total, last = run(True)
    np.testing.assert_allclose(stepped, start - 0.1 * last, rtol=tolerance, atol=tolerance)
    assert not np.allclose(last, total)


def test_step_with_no_argument_reads_the_accumulated_grad():
    start, x, values = normal(106, 2, 3), normal(1, 3, 1), []
    for explicit in (False, True):
        w = ag.param(start)
        opt = optim.SGD([w], lr=0.1)
        grads = backward(w, x)
        opt.step(grads if explicit else None)
        values.append(w.numpy())
    np.testing.assert_array_equal(*values)


def test_accumulate_steps_delays_the_update_until_the_kth_step():
    w = ag.param(normal(107, 2, 3))
    opt = optim.SGD({"w": w}, lr=0.1, accumulate_steps=3)
    x, before = normal(1, 3, 1), w.numpy()
    for _ in range(2):
        backward(w, x)
        assert opt.step() is False
        np.testing.assert_array_equal(w.numpy(), before)
    backward(w, x)
    assert opt.step() is True
    assert not np.allclose(w.numpy(), before)


@pytest.mark.parametrize("method", METHODS)
def test_k_accumulated_micro_batches_equal_one_full_batch(method, tolerance):
    k, start, x = 4, normal(108, 2, 3), normal(1, 3, 8)
    full, parts = ag.param(start), ag.param(start)
    whole, windowed = METHODS[method]([full]), METHODS[method]([parts], accumulate_steps=k)
    for _ in range(3):
        whole.zero_grad()
        backward(full, x)
        whole.step()
        for i in range(k):
            backward(parts, x[:, 2 * i : 2 * i + 2])
            windowed.step()
    assert whole.t == windowed.t == 3
    # Adam divides by a root of the gradient: its last bits count for more.
    loose = tolerance * (20 if method.startswith("Adam") else 1)
    np.testing.assert_allclose(parts.numpy(), full.numpy(), rtol=loose, atol=loose)


def test_without_average_the_plain_sum_is_applied(tolerance):
    k, start, x = 2, normal(109, 2, 3), normal(1, 3, 1)

    def run(average):
        w = ag.param(start)
        opt = optim.SGD({"w": w}, lr=0.1, accumulate_steps=k, average=average)
        for _ in range(k):
            backward(w, x)
            opt.step()
        return w.numpy()

    w = ag.param(start)
    backward(w, x)
    one = w.grad.numpy()
    np.testing.assert_allclose(run(True), start - 0.1 * one, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(run(False), start - 0.1 * k * one, rtol=tolerance, atol=tolerance)


def test_adam_advances_its_bias_correction_counter_once_per_real_update():
    w = ag.param(normal(110, 2, 3))
    opt = optim.Adam({"w": w}, lr=1e-2, accumulate_steps=3)
    for updates in (1, 2):
        for _ in range(3):
            backward(w, normal(1, 3, 1))
            opt.step()
        assert opt.t == updates


def test_windows_of_one_are_unchanged_and_explicit_gradients_still_work():
    start = normal(111, 2, 3)
    w = ag.param(start)
    opt = optim.Adam({"w": w}, lr=1e-2)
    assert opt.step(backward(w, normal(1, 3, 1))) is True
    assert opt.t == 1
    assert not np.allclose(w.numpy(), start)


@pytest.mark.parametrize(("method", "wrong"), [(optim.SGD, 0), (optim.Adam, -2)])
def test_accumulate_steps_rejects_a_non_positive_value(method, wrong):
    with pytest.raises(ValueError, match="positive integer"):
        method({"w": ag.param(np.ones((2, 2)))}, accumulate_steps=wrong)


# ---- more cases ----


def linear_step(w, gradient):
    with ag.grad_tape():
        loss = ag.sum(w * gradient)
    ag.backward(loss)


def test_micro_batches_of_unequal_size_give_the_full_batch_gradient_by_sum_and_count():
    """The mean of means is 2, the mean over all four samples is 1."""
    batches = ([4.0], [0.0, 0.0, 0.0])

    def moved(reduce, **window):
        w = ag.param(0.0)
        opt = optim.SGD([w], lr=1.0, accumulate_steps=2)
        for x in batches:
            with ag.grad_tape():
                loss = reduce(w * ag.tensor(x))
            ag.backward(loss)
            opt.step(**{name: len(x) for name in window})
        return -w.item()

    assert moved(ag.mean) == 2.0
    assert moved(ag.sum, count=True) == 1.0


def test_counts_for_some_micro_batches_only_are_an_error():
    w = ag.param(0.0)
    opt = optim.SGD([w], lr=1.0, accumulate_steps=2)
    linear_step(w, 1.0)
    opt.step(count=3)
    linear_step(w, 1.0)
    with pytest.raises(pg.GradError, match=r"give count= to every step\(\) of a window or to none"):
        opt.step()


def test_a_schedule_sees_updates_not_micro_batches():
    w = ag.param(0.0)
    schedule = optim.step_decay(1.0, every=2, factor=0.5)
    opt = optim.SGD([w], lr=schedule, accumulate_steps=4)
    for _ in range(16):
        linear_step(w, 1.0)
        opt.step()
    assert opt.lr == 0.25
    assert w.item() == -(1.0 + 1.0 + 0.5 + 0.5)


def test_adam_over_one_window_of_three_equal_gradients():
    w = ag.param(0.0)
    opt = optim.Adam([w], lr=1e-3, accumulate_steps=3)
    for _ in range(3):
        linear_step(w, 1.0)
        opt.step()
    assert w.item() == pytest.approx(-0.001, rel=1e-6)
    assert opt.t == 1


def test_weight_decay_is_applied_once_per_window():
    w = ag.param(1.0)
    opt = optim.SGD([w], lr=1.0, weight_decay=0.1, accumulate_steps=3)
    for _ in range(3):
        linear_step(w, 0.0)
        opt.step()
    assert w.item() == pytest.approx(0.9, rel=1e-6)


@pytest.mark.parametrize("how", ["flush", "step"])
def test_an_incomplete_window_is_averaged_over_what_is_in_it(how):
    w = ag.param(0.0)
    opt = optim.SGD([w], lr=1.0, accumulate_steps=4)
    linear_step(w, 1.0)
    opt.step()
    linear_step(w, 3.0)
    if how == "flush":
        opt.step()
        assert opt.flush() is True
        assert opt.flush() is False
    else:
        assert opt.step(flush=True) is True
    assert w.item() == -2.0
    assert opt.t == 1
    linear_step(w, 1.0)
    assert opt.step() is False  # the next window starts empty


def test_zero_grad_in_an_open_window_is_an_error_that_explains_itself():
    w = ag.param(0.0)
    opt = optim.SGD([w], lr=1.0, accumulate_steps=2)
    opt.zero_grad()
    linear_step(w, 1.0)
    opt.step()
    with pytest.raises(pg.GradError, match="zero_grad would lose 1 of 2 micro-batches; leave it"):
        opt.zero_grad()
    opt.zero_grad(discard_window=True)
    assert w.grad is None
    linear_step(w, 1.0)
    assert opt.step() is False


def test_clip_norm_acts_on_the_averaged_gradient():
    w = ag.param([0.0, 0.0])
    opt = optim.SGD([w], lr=1.0, accumulate_steps=2, clip_norm=2.5)
    for gradient in ([6.0, 0.0], [0.0, 8.0]):  # mean (3, 4), norm 5
        linear_step(w, ag.tensor(gradient))
        opt.step()
    np.testing.assert_allclose(w.numpy(), [-1.5, -2.0], rtol=1e-6)


def test_a_gradient_that_is_not_finite_skips_the_step_and_changes_nothing():
    w = ag.param([1.0, 1.0])
    opt = optim.AdamW([w], lr=0.1, clip_norm=1.0)
    linear_step(w, ag.tensor([1.0, 1.0]))
    assert opt.step()
    opt.zero_grad()
    before, state = w.numpy(), opt.state_dict()
    linear_step(w, ag.tensor([np.inf, 1.0]))
    assert opt.step() is False
    assert opt.skipped == 1
    np.testing.assert_array_equal(w.numpy(), before)
    for name, value in opt.state_dict().items():
        np.testing.assert_array_equal(value, state[name])
    with pytest.raises(pg.GradError, match="clip_grad_norm: the gradients' norm is not finite"):
        optim.clip_grad_norm([w], 1.0)


def test_clipping_huge_gradients_does_not_overflow():
    w = ag.param(np.zeros(100))
    linear_step(w, ag.tensor(np.full(100, 1e20)))
    assert optim.clip_grad_norm([w], 1.0) == pytest.approx(1e21, rel=1e-5)
    np.testing.assert_allclose(w.grad.numpy(), 0.1, rtol=1e-5)


def test_clipping_zero_gradients_leaves_zeros():
    w = ag.param(np.zeros(3))
    linear_step(w, ag.tensor(np.zeros(3)))
    assert optim.clip_grad_norm([w], 1.0) == 0.0
    assert w.grad.tolist() == [0.0, 0.0, 0.0]


def test_a_negative_norm_is_refused():
    w = ag.param(1.0)
    for make in (lambda: optim.clip_grad_norm([w], -1), lambda: optim.SGD([w], clip_norm=-1)):
        with pytest.raises(ValueError, match="must be in"):
            make()


def test_both_views_of_a_gradient_show_the_clipped_value():
    w = ag.param([3.0, 4.0])
    with ag.grad_tape():
        loss = ag.sum(w * w) * 0.5
    returned = ag.backward(loss)
    optim.clip_grad_norm([w], 1.0)
    np.testing.assert_allclose(w.grad.numpy(), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(returned[w].numpy(), [0.6, 0.8], rtol=1e-6)


def test_saving_and_loading_in_a_new_process_continues_to_the_last_bit(tmp_path, device):
    program = """
import sys
import numpy as np
import pyggml as pg
from pyggml import ag, optim
pg.set_device(sys.argv[1])
def step(w, opt):
    opt.zero_grad()
    with ag.grad_tape():
        loss = ag.sum(w * 1.0)
    ag.backward(loss)
    opt.step()
"""
    first = (
        program
        + """
w = ag.param(0.0)
opt = optim.Adam([w], lr=1e-3)
for _ in range(3):
    step(w, opt)
np.savez(sys.argv[2], w=w.numpy(), **opt.state_dict())
step(w, opt)
print(w.item().hex())
"""
    )
    second = (
        program
        + """
values = dict(np.load(sys.argv[2]))
w = ag.param(values.pop("w"))
opt = optim.Adam([w], lr=1e-3)
opt.load_state_dict(values)
step(w, opt)
print(w.item().hex())
"""
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", text, device.name, tmp_path / "state.npz"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for text in (first, second)
    ]
    assert printed[0] == printed[1]
    assert float.fromhex(printed[0]) == pytest.approx(-0.004, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("t"), "needs t and no names but"),
        (lambda s: s.update(extra=np.zeros(1)), "needs t and no names but"),
        (lambda s: s.pop("0.1"), r"0.1 must have shape \(2,\); got nothing"),
        (lambda s: s.update({"0.0": np.zeros(3)}), r"0.0 must have shape \(2,\); got \(3,\)"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(change, message):
    w = ag.param([0.0, 0.0])
    opt = optim.Adam([w], lr=1e-3)
    linear_step(w, 1.0)
    opt.step()
    state = opt.state_dict()
    change(state)
    with pytest.raises(pg.ShapeError, match=message):
        opt.load_state_dict(state)
    assert opt.t == 1


def test_accumulation_costs_one_buffer_per_parameter():
    w = ag.param(np.ones((64, 64)))
    opt = optim.SGD([w], lr=1.0, accumulate_steps=8)

    def micro_batch():
        with ag.grad_tape():
            loss = ag.mean(ag.tensor(np.ones((4, 64))) @ w)
        return loss, ag.backward(loss)

    micro_batch()
    opt.step()
    loss, _ = micro_batch()
    del _
    # Nobody keeps what backward returned: the sum grows in place.
    report = ag.plan_report(loss)
    assert report.bytes["gradients"] == 64 * 64 * 4
    assert [line.name for line in report.ops].count("accumulate") == 1


def test_keeping_what_backward_returned_keeps_its_value():
    w = ag.param(0.0)
    with ag.grad_tape():
        loss = ag.sum(w * 2.0)
    kept = ag.backward(loss)
    kept[w].item()
    linear_step(w, 3.0)
    assert w.grad.item() == 5.0
    assert kept[w].item() == 2.0


def test_two_parameters_with_the_same_gradient_accumulate_apart():
    a, b = ag.param(0.0), ag.param(0.0)
    for _ in range(3):
        with ag.grad_tape():
            loss = ag.sum(a + b)
        ag.backward(loss)
        assert a.grad.item() == b.grad.item()
    assert a.grad.item() == b.grad.item() == 3.0


def test_tied_weights_get_one_update():
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    opt = optim.SGD(model.parameters(), lr=0.1)
    assert len(model.parameters()) == 2
    before = layer.weight.numpy()
    with ag.grad_tape():
        loss = ag.sum(model(ag.tensor(np.ones((2, 3)))))
    grads = ag.backward(loss)
    opt.step()
    np.testing.assert_allclose(
        layer.weight.numpy(), before - 0.1 * grads[layer.weight].numpy(), rtol=1e-6, atol=1e-7
    )
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


# ---- a test of the tests ----


def test_an_engine_that_steps_on_the_last_micro_batch_is_caught(monkeypatch, tolerance):
    original = optim.Optimizer._finish

    def last_only(self, grads, full):
        if not full:
            self.zero_grad(discard_window=True)
        return original(self, grads, full)

    monkeypatch.setattr(optim.Optimizer, "_finish", last_only)
    with pytest.raises(AssertionError):
        test_k_accumulated_micro_batches_equal_one_full_batch("SGD", tolerance)
    with pytest.raises(AssertionError):
        test_accumulate_steps_delays_the_update_until_the_kth_step()


def test_the_node_table_does_not_grow_over_windows():
    w = ag.param(np.ones((4, 4)))
    opt = optim.AdamW([w], lr=1e-3, accumulate_steps=2)

    def window():
        for _ in range(2):
            with ag.grad_tape():
                loss = ag.mean(ag.tensor(np.ones((4, 4))) @ w)
            ag.backward(loss)
            opt.step()

    window()
    window()
    before = len(graph._nodes)
    for _ in range(20):
        window()
    assert len(graph._nodes) == before
