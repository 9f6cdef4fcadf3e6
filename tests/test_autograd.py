"""The tape and the reverse walk: what must hold for gradients whatever the ops."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag, optim
from pyggml.plan import Program


def gradient(fn, *arrays):
    """Return fn's gradients in each array, on the cpu device."""
    params = [ag.param(a) for a in arrays]
    with ag.grad_tape():
        value = fn(*params)
    ag.backward(value)
    return [p.grad.numpy() for p in params]


# ---- values used many times ----


def test_a_value_used_in_several_products_gets_the_sum_of_all_paths():
    dx, da = gradient(lambda x, a: x * (x * a) + (x * x) * a + x * (x * a), 1.0, 1.0)
    assert (dx, da) == (6.0, 3.0)


def test_a_value_minus_itself_has_gradient_zero():
    assert gradient(lambda a: ag.sum(a - a), [1.0, 2.0])[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("copies", [2, 3, 7])
def test_the_sum_of_k_copies_has_gradient_k(copies):
    def repeated(a):
        total = a
        for _ in range(copies - 1):
            total = total + a
        return total

    assert gradient(repeated, 2.0)[0] == copies


def test_square_shows_one_gradient_in_both_views():
    x = ag.param(3.0)
    with ag.grad_tape():
        y = x * x
    returned = ag.backward(y)
    assert returned[x].item() == 6.0
    assert x.grad.item() == 6.0


def test_two_parameters_that_hold_equal_values_stay_two():
    a, b = ag.param([2.0]), ag.param([2.0])
    with ag.grad_tape():
        loss = ag.sum(a * a * b)
    ag.backward(loss)
    assert a.grad.tolist() == [8.0]
    assert b.grad.tolist() == [4.0]


# ---- broadcasting ----


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (ag.add, [(3, 4), (1, 4)]),
        (ag.mul, [(2, 1, 4, 64), (2, 1, 4, 1)]),
        (ag.add, [(1, 3), (2, 3)]),
        (lambda a, b, c: a @ b + c, [(2, 3), (3, 1), (1, 3)]),
        (ag.add, [(), (3, 4)]),
    ],
)
def test_a_broadcast_operand_gets_a_gradient_of_its_own_shape_in_either_order(fn, shapes):
    generator = np.random.default_rng(1)
    arrays = [generator.standard_normal(shape) for shape in shapes]
    orders = [(fn, arrays)]
    if len(arrays) == 2:
        orders.append((lambda a, b: fn(b, a), arrays[::-1]))
    for each, inputs in orders:
        grads = gradient(lambda *xs, each=each: ag.sum(each(*xs)), *inputs)
        assert [g.shape for g in grads] == [a.shape for a in inputs]
        ag.gradcheck(each, inputs)


def test_expand_transpose_reshape_then_matmul_routes_the_gradient_back():
    column = [[1.0], [2.0], [3.0], [4.0]]

    def fn(x):
        return ag.sum(
            ag.reshape(ag.transpose(ag.broadcast_to(x, (2, 2))), (1, 4)) @ ag.tensor(column)
        )

    assert gradient(fn, [[1.0, 2.0]])[0].tolist() == [[3.0, 7.0]]


# ---- what gradients reach ----


def test_constants_get_no_gradient_and_parameters_do():
    w, x = ag.param([[1.0, 2.0]]), ag.tensor([[3.0], [4.0]])
    with ag.grad_tape():
        loss = ag.sum(w @ x)
    grads = ag.backward(loss)
    assert set(grads) == {w}
    assert x.grad is None
    assert w.grad.tolist() == [[3.0, 4.0]]


def test_detach_stops_the_gradient_on_its_path_only():
    assert gradient(lambda x: ag.sum(ag.detach(x) * x), [2.0])[0].tolist() == [2.0]


def test_a_parameter_that_the_loss_does_not_reach_keeps_none():
    used, unused = ag.param([1.0]), ag.param([1.0])
    with ag.grad_tape():
        loss = ag.sum(used * 2.0)
    ag.backward(loss)
    assert unused.grad is None


def test_a_frozen_parameter_gets_no_gradient():
    w, frozen = ag.param([1.0]), ag.param([5.0])
    frozen.requires_grad = False
    with ag.grad_tape():
        loss = ag.sum(w * frozen)
    ag.backward(loss)
    assert w.grad.tolist() == [5.0]
    assert frozen.grad is None


def test_freezing_after_recording_started_takes_effect_at_once():
    w, v = ag.param([1.0]), ag.param([5.0])
    with ag.grad_tape():
        first = ag.sum(w * v)
        v.requires_grad = False
        second = ag.sum(w * v)
    ag.backward(second)
    assert v.grad is None
    ag.backward(first)
    assert v.grad.tolist() == [1.0]
    assert w.grad.tolist() == [10.0]


def test_backward_adds_to_grad_and_returns_this_call_only():
    w = ag.param([1.0])
    for factor in (2.0, 3.0):
        with ag.grad_tape():
            loss = ag.sum(w * factor)
        returned = ag.backward(loss)
    assert returned[w].tolist() == [3.0]
    assert w.grad.tolist() == [5.0]


def test_backward_twice_on_one_value_counts_twice():
    w = ag.param([2.0])
    with ag.grad_tape():
        loss = ag.sum(w * w)
    ag.backward(loss)
    ag.backward(loss)
    assert w.grad.tolist() == [8.0]


def test_two_losses_that_share_a_forward_pass_add_their_gradients():
    w = ag.param([2.0])
    with ag.grad_tape():
        h = w * w
        first, second = ag.sum(h * 3.0), ag.sum(h * h)
    ag.backward(first)
    ag.backward(second)
    assert w.grad.tolist() == [3 * 4.0 + 4 * 8.0]


def test_reading_a_value_before_backward_changes_nothing():
    w = ag.param([2.0])
    with ag.grad_tape():
        h = w * w
        loss = ag.sum(h * h)
        assert h.tolist() == [4.0]
        assert loss.item() == 16.0
    ag.backward(loss)
    assert w.grad.tolist() == [32.0]


def test_zero_grad_between_forward_and_backward_does_not_lose_the_tape():
    w = ag.param([2.0])
    opt = optim.SGD([w], lr=0.1)
    with ag.grad_tape():
        loss = ag.sum(w * w)
    opt.zero_grad()
    ag.backward(loss)
    assert w.grad.tolist() == [4.0]


def test_a_tape_can_be_continued_on_values_recorded_on_an_earlier_one():
    w = ag.param([3.0])
    with ag.grad_tape():
        h = w * w
    with ag.grad_tape():
        loss = ag.sum(h * w)
    ag.backward(loss)
    assert w.grad.tolist() == [27.0]


# ---- tapes and no_grad ----


def test_outside_a_tape_nothing_is_recorded_for_gradients():
    w = ag.param([1.0])
    loss = ag.sum(w * 2.0)
    assert not loss.requires_grad
    with pytest.raises(
        pg.GradError, match="backward: this value does not depend on a parameter on a tape"
    ):
        ag.backward(loss)


def test_a_nested_tape_neither_ends_nor_empties_the_outer_one():
    w = ag.param([2.0])
    with ag.grad_tape():
        h = w * w
        with ag.grad_tape():
            inner = ag.sum(w * 5.0)
        assert ag.is_recording()
        loss = ag.sum(h * w)
    ag.backward(inner)
    assert w.grad.tolist() == [5.0]
    w.grad = None
    ag.backward(loss)
    assert w.grad.tolist() == [12.0]


def test_no_grad_inside_a_tape_makes_constants():
    w = ag.param([3.0])
    with ag.grad_tape():
        with ag.no_grad():
            factor = w * 2.0
        loss = ag.sum(w * factor)
    ag.backward(loss)
    assert w.grad.tolist() == [6.0]


def test_no_grad_and_recording_the_same_expression_stay_apart():
    w = ag.param([3.0])
    with ag.grad_tape():
        with ag.no_grad():
            constant = w * w
        loss = ag.sum(w * w * constant)
    ag.backward(loss)
    assert w.grad.tolist() == [6.0 * 9.0]


def test_recording_mode_is_restored_after_an_exception():
    with ag.grad_tape():
        with pytest.raises(ValueError, match="boom"), ag.no_grad():
            raise ValueError("boom")
        assert ag.is_recording()
    assert not ag.is_recording()


def test_a_decorated_generator_computes_without_grad_and_its_caller_with():
    @ag.no_grad()
    def numbers():
        for i in range(3):
            assert not ag.is_recording()
            yield i

    with ag.grad_tape():
        for _ in numbers():
            assert ag.is_recording()


def test_a_generator_that_outlives_its_block_leaves_no_mode_behind():
    def paused():
        with ag.no_grad():
            yield 1

    with ag.grad_tape():
        generator = paused()
        next(generator)
    generator.close()
    assert not ag.is_recording()
    with ag.grad_tape():
        assert ag.is_recording()


def test_recording_mode_belongs_to_its_thread():
    seen = []
    with ag.grad_tape():
        thread = threading.Thread(target=lambda: seen.append(ag.is_recording()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_a_value_recorded_in_another_thread_can_be_used_and_differentiated_here():
    w, made = ag.param([2.0]), []

    def record():
        with ag.grad_tape():
            made.append(w * w)

    thread = threading.Thread(target=record)
    thread.start()
    thread.join()
    with ag.grad_tape():
        loss = ag.sum(made[0] * w)
    ag.backward(loss)
    assert w.grad.tolist() == [12.0]


# ---- ag.grad ----


def test_grad_of_an_intermediate_value():
    x = ag.param(2.0)
    with ag.grad_tape():
        h = x * x
        y = h * h
    assert ag.grad(y, h).item() == 8.0
    assert [g.item() for g in ag.grad(y, [x, h])] == [32.0, 8.0]
    assert x.grad is None


def test_third_derivative_of_a_cube():
    x = ag.param(2.0)
    with ag.grad_tape():
        value = x * x * x
        for _ in range(3):
            value = ag.grad(value, x)
    assert value.item() == 6.0


def test_grad_of_an_unrelated_tensor_is_an_error_or_none_on_request():
    x, other = ag.param(2.0), ag.param(1.0)
    with ag.grad_tape():
        y = x * x
    with pytest.raises(
        pg.GradError, match=r"grad: the value does not depend on the tensor of shape \(\)"
    ):
        ag.grad(y, other)
    assert ag.grad(y, [other], allow_unused=True) == [None]


def test_a_seed_weights_the_elements_of_a_value():
    x = ag.param([1.0, 2.0])
    with ag.grad_tape():
        y = x * x
    ag.backward(y, seed=ag.tensor([1.0, 10.0]))
    assert x.grad.tolist() == [2.0, 40.0]


def test_backward_of_several_elements_without_seed_says_what_to_do():
    x = ag.param([1.0, 2.0])
    with ag.grad_tape():
        y = x * x
    with pytest.raises(
        pg.ShapeError, match=r"backward: needs a value of one element; got shape \(2,\); reduce it"
    ):
        ag.backward(y)


# ---- laziness that never lies ----


def test_a_pending_value_whose_parameter_changed_is_an_error_not_a_wrong_number():
    w = ag.param([1.0])
    pending = w * 2.0
    w.assign([5.0])
    with pytest.raises(
        pg.StaleError, match=r"recorded with a \(1,\) parameter that has changed since.*read it"
    ):
        pending.numpy()
    assert (w * 2.0).tolist() == [10.0]


def test_backward_after_the_update_is_an_error_that_says_why():
    w = ag.param([1.0])
    opt = optim.SGD([w], lr=0.1)
    with ag.grad_tape():
        loss = ag.sum(w * w)
    ag.backward(loss)
    opt.step()
    assert loss.item() == 1.0
    with pytest.raises(
        pg.GradError, match="the tape of this value is gone, its parameters have been updated since"
    ):
        ag.backward(loss)


def test_what_is_held_when_the_update_runs_keeps_its_value_from_before():
    w = ag.param([1.0])
    opt = optim.SGD([w], lr=0.5)
    with ag.grad_tape():
        doubled = w * 2.0
        view = w.reshape(1, 1)
        loss = ag.sum(doubled * doubled)
    ag.backward(loss)
    opt.step()
    assert (doubled.item(), view.item(), loss.item(), w.grad.item()) == (2.0, 1.0, 4.0, 8.0)
    assert w.item() == -3.0


def test_data_given_to_a_tensor_are_copied_at_once():
    data = np.ones(3, np.float32)
    x = ag.tensor(data)
    y = x * 2.0
    data[:] = 7.0
    assert y.tolist() == [2.0, 2.0, 2.0]


def test_a_running_total_of_losses_keeps_memory_bounded():
    w = ag.param(np.ones((64, 64)))
    opt = optim.SGD([w], lr=1e-6)
    x = np.ones((64, 64), np.float32)
    total = ag.tensor(0.0)
    for _ in range(2000):
        opt.zero_grad()
        with ag.grad_tape():
            loss = ag.mean(w @ ag.tensor(x))
            total = total + loss
        ag.backward(loss)
        opt.step()
    assert total._at[0].sources == []  # the total is a number: it holds no step's data
    assert isinstance(float(total), float)


# ---- parts of a tensor ---------------------------------------------------------------------------


def scaled_parts(x, ranges, axis=1):
    """Return the sum of squares of x's entries in each range, times 1, 2, ..."""
    total = 0.0
    for factor, (begin, end) in enumerate(ranges, 1):
        part = x[begin:end] if axis == 0 else x[:, begin:end]
        total = total + factor * ag.sum(ag.sqr(part))
    return total


@pytest.mark.parametrize("axis", [0, 1])
def test_gradients_of_parts_that_tile_an_axis_are_joined_without_padding(axis):
    x = ag.param(np.arange(24.0).reshape(12, 2) if axis == 0 else np.arange(24.0).reshape(2, 12))
    with ag.grad_tape():
        loss = scaled_parts(x, [(5, 12), (0, 2), (2, 5)], axis)
    gradient = ag.grad(loss, x)
    names = [line.name for line in ag.plan_report(gradient).ops]
    assert names.count("concat") == 1 and "pad" not in names
    factors = np.repeat([2.0, 3.0, 1.0], [2, 3, 7])
    expected = 2.0 * x.numpy() * (factors[:, None] if axis == 0 else factors)
    np.testing.assert_allclose(gradient.numpy(), expected)


def working_bytes(value):
    frame, node = value._at
    return frame.device.working_bytes(Program((node,), (), ()))


def test_a_run_holds_one_gradient_of_a_shared_weight_however_often_it_is_used():
    w = ag.param(np.eye(64))
    needed = []
    for steps in (4, 40):
        with ag.grad_tape():
            h = ag.tensor(np.ones((1, 64)))
            for _ in range(steps):
                h = ag.tanh(h @ w)
            loss = ag.sum(h)
        needed.append(working_bytes(ag.grad(loss, w)))
    assert needed[1] - needed[0] < 64 * 64 * 4


def test_a_run_holds_one_gradient_of_a_tensor_however_many_parts_are_used():
    needed = []
    for count in (4, 40):
        x = ag.param(np.ones((64, 64)))
        with ag.grad_tape():
            loss = scaled_parts(x, [(i, i + 1) for i in range(1, 1 + count)], 0)
        needed.append(working_bytes(ag.grad(loss, x)))
    assert needed[1] - needed[0] < 2 * 64 * 64 * 4


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 2), (2, 5), (5, 12)],
        [(0, 2), (3, 12)],
        [(0, 6), (4, 12)],
        [(0, 6), (6, 12), (2, 3)],
        [(1, 6), (6, 12)],
        [(0, 6), (6, 11)],
    ],
    ids=["tiles", "a gap", "an overlap", "one part twice", "no first", "no last"],
)
def test_gradients_of_parts_add_up_however_the_parts_lie(ranges, every_device):
    def of_parts(x):
        return scaled_parts(x, ranges) + ag.sum(x * x * x) + scaled_parts(x, [(0, 1), (1, 2)], 0)

    ag.gradcheck(of_parts, [np.random.default_rng(0).standard_normal((2, 12))], order=2)


def test_a_value_does_not_become_stale_by_a_parameter_that_it_does_not_depend_on():
    p, q = ag.param([1.0]), ag.param([2.0])
    forgotten = p * 3.0
    del forgotten
    held = q * 3.0
    p.assign([5.0])
    assert held.item() == 6.0
    assert (q * 2.0).item() == 4.0
