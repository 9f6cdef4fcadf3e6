"""Checkpointing: gradients equal the plain ones to the last bit, in less memory.

The first part states for pyggml what the tests of ggmlR's ag_checkpoint state for it.
"""

from __future__ import annotations

import gc
import resource
import sys
from pathlib import Path

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag, graph, nn, optim, plan


@pytest.fixture(params=["cpu", "reference"], autouse=True)
def device(request):
    with pg.device(request.param) as found:
        yield found


def uniform(seed, *shape):
    return np.random.default_rng(seed).uniform(-1, 1, shape)


def plain(fn, *args, **kwargs):
    return fn(*args, **kwargs)


def gradients(build, shapes, seed=4):
    """Return the gradients of build(checkpoint or plain call, params) in both ways of calling."""
    both = []
    for call in (plain, ag.checkpoint):
        params = [ag.param(uniform(seed + i, *shape)) for i, shape in enumerate(shapes)]
        with ag.grad_tape():
            loss = build(call, params)
        ag.backward(loss)
        both.append([None if p.grad is None else p.grad.numpy() for p in params])
    return both


def assert_same_bits(both):
    expected, got = both
    for right, ours in zip(expected, got, strict=True):
        assert right is not None
        assert ours is not None
        np.testing.assert_array_equal(ours, right)


SQUARE = (4, 4)


def two_layers(call, params):
    w1, w2 = params
    x, y = ag.tensor(uniform(1, *SQUARE)), ag.tensor(uniform(2, *SQUARE))
    h = call(lambda inp: ag.relu(w1 @ inp), x)
    return ag.mse_loss(w2 @ h, y)


def test_checkpointed_gradients_equal_the_ordinary_ones():
    assert_same_bits(gradients(two_layers, [SQUARE, SQUARE]))


def test_the_segments_gradient_is_not_doubled():
    expected, got = gradients(two_layers, [SQUARE, SQUARE])
    assert np.abs(got[0]).max() / np.abs(expected[0]).max() == 1.0


def test_gradients_flow_through_a_checkpoint_to_earlier_layers():
    def build(call, params):
        w0, w1 = params
        a = w0 @ ag.tensor(uniform(1, *SQUARE))
        h = call(lambda inp: ag.relu(w1 @ inp), a)
        return ag.mse_loss(h, ag.tensor(uniform(2, *SQUARE)))

    assert_same_bits(gradients(build, [SQUARE, SQUARE], seed=7))


def kept_ops(call):
    """Return the ops whose forward values the backward pass of a small network reads."""
    w1, w2 = ag.param(uniform(9, 64, 64)), ag.param(uniform(10, 64, 64))
    x, y = ag.tensor(uniform(11, 64, 64)), ag.tensor(uniform(12, 64, 64))
    with ag.grad_tape():
        h = call(lambda inp: ag.tanh(ag.tanh(w1 @ inp)), x)
        loss = ag.mse_loss(w2 @ h, y)
        del h
    ag.backward(loss)
    return [line.op for line in ag.saved_tensors(loss)]


def test_a_checkpointed_segment_stores_no_activations():
    assert kept_ops(plain) == ["sub", "tanh", "tanh"]
    assert kept_ops(ag.checkpoint) == ["sub", "tanh"]  # the segment's result, not its inside


def test_checkpoints_nest():
    def build(call, params):
        w1, w2, w3 = params

        def outer(inp):
            inner = call(lambda z: ag.relu(w1 @ z), inp)
            return ag.relu(w2 @ inner)

        h2 = call(outer, ag.tensor(uniform(1, *SQUARE)))
        return ag.mse_loss(w3 @ h2, ag.tensor(uniform(2, *SQUARE)))

    assert_same_bits(gradients(build, [SQUARE] * 3, seed=13))


def test_several_checkpoints_in_sequence_each_get_their_gradient():
    def build(call, params):
        h = ag.tensor(uniform(1, *SQUARE))
        for i, w in enumerate(params):
            # The segment closes over the loop variable: fn runs at once, so that is no trap here.
            h = (call if i % 2 else plain)(lambda inp: ag.relu(w @ inp), h)  # noqa: B023
        return ag.mse_loss(h, ag.tensor(uniform(2, *SQUARE)))

    assert_same_bits(gradients(build, [SQUARE] * 4, seed=17))


def test_a_stochastic_segment_replays_with_the_same_random_draw():
    def build(call, params):
        pg.manual_seed(99)
        h = call(lambda inp: ag.dropout(params[0] @ inp, p=0.5), ag.tensor(uniform(1, *SQUARE)))
        return ag.mse_loss(h, ag.tensor(uniform(2, *SQUARE)))

    assert_same_bits(gradients(build, [SQUARE], seed=11))


def test_a_failing_segment_leaves_tape_generator_and_mode_untouched():
    x, w = ag.tensor(uniform(1, 2, 2)), ag.param(uniform(2, 2, 2))
    pg.manual_seed(5)
    expected = ag.dropout(x, p=0.5).numpy()
    pg.manual_seed(5)

    def boom(inp):
        ag.relu(inp)
        raise RuntimeError("boom")

    with ag.grad_tape():
        with pytest.raises(RuntimeError, match="^boom$"):
            ag.checkpoint(boom, x)
        assert ag.is_recording()
        assert graph.state.segment == ()
        np.testing.assert_array_equal(ag.dropout(x, p=0.5).numpy(), expected)
        loss = ag.sum(w * x)
    ag.backward(loss)
    np.testing.assert_array_equal(w.grad.numpy(), x.numpy())


def test_a_failing_segment_that_drew_random_numbers_gives_them_back():
    x = ag.tensor(uniform(1, 2, 2))
    pg.manual_seed(5)
    expected = ag.dropout(x, p=0.5).numpy()
    pg.manual_seed(5)

    def boom(inp):
        ag.dropout(inp, p=0.5)
        raise RuntimeError("boom")

    with ag.grad_tape():
        with pytest.raises(RuntimeError, match="boom"):
            ag.checkpoint(boom, x)
        np.testing.assert_array_equal(ag.dropout(x, p=0.5).numpy(), expected)


def test_checkpoint_outside_a_tape_just_runs_the_function():
    out = ag.checkpoint(ag.relu, ag.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert out.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert not out.requires_grad


# ---- more cases ----


def test_parameters_inside_get_gradients_though_no_input_needs_one():
    model = nn.Linear(4, 3)
    x = ag.tensor(uniform(1, 10, 4))
    found = []
    for call in (plain, ag.checkpoint):
        for p in model.parameters():
            p.grad = None
        with ag.grad_tape():
            loss = ag.sum(call(model, x))
        ag.backward(loss)
        found.append([p.grad.numpy() for p in model.parameters()])
    assert model.bias.grad.tolist() == [10.0, 10.0, 10.0]
    assert_same_bits(found)


def test_a_tensor_argument_that_needs_no_gradient_gets_none():
    x, mask = ag.param(uniform(1, 3)), ag.tensor([1.0, 0.0, 1.0])
    with ag.grad_tape():
        loss = ag.sum(ag.checkpoint(lambda a, m: a * m, x, mask))
    ag.backward(loss)
    assert x.grad.tolist() == [1.0, 0.0, 1.0]
    assert mask.grad is None


@pytest.mark.parametrize(("use_both", "expected"), [(True, [4.0, 3.0]), (False, [3.0, 2.0])])
def test_tensors_in_dicts_go_in_and_tuples_come_out(use_both, expected):
    x, y = ag.param(2.0), ag.param(3.0)

    def fn(d, *, flag, nothing=None, number=1):
        assert flag
        assert nothing is None
        assert number == 7
        return d["a"] * d["b"], [d["a"] + d["b"], None, "text"]

    with ag.grad_tape():
        product, (total, none, text) = ag.checkpoint(fn, {"a": x, "b": y}, flag=True, number=7)
        assert (none, text) == (None, "text")
        loss = product + total if use_both else product
    ag.backward(loss)
    assert [x.grad.item(), y.grad.item()] == expected


def test_nested_transcendental_segments():
    x = ag.param([0.1, 0.2])
    with ag.grad_tape():
        inner = ag.checkpoint(lambda v: ag.sin(ag.checkpoint(ag.exp, v)), x)
        loss = ag.sum(inner)
    ag.backward(loss)
    np.testing.assert_allclose(x.grad.numpy(), [0.496202, 0.418120], atol=1e-6)


def test_three_levels_of_nesting_equal_the_plain_run():
    def build(call, params):
        a, b, c = params

        def middle(v):
            return ag.tanh(call(lambda z: ag.exp(z * a) * z, v) * b)

        def outer(v):
            return call(middle, v) * call(middle, v * c)

        return ag.sum(call(outer, ag.tensor(uniform(1, 5))))

    assert_same_bits(gradients(build, [(5,)] * 3))


def test_a_weight_reached_only_through_the_closure():
    w, x = ag.param(uniform(1, 3, 2)), ag.tensor(uniform(2, 4, 3))
    with ag.grad_tape():
        loss = ag.sum(ag.checkpoint(lambda v: v @ w, x))
    ag.backward(loss)
    np.testing.assert_allclose(w.grad.numpy(), x.numpy().T @ np.ones((4, 2)), rtol=1e-6)


def test_fn_is_called_once_and_sees_the_loop_variable_of_its_iteration():
    calls, w = [], [ag.param([float(i + 1)]) for i in range(3)]
    with ag.grad_tape():
        h = ag.tensor([1.0])
        for i in range(3):
            h = ag.checkpoint(lambda v: calls.append(i) or v * w[i] * w[i], h)  # noqa: B023
        loss = ag.sum(h)
    ag.backward(loss)
    assert [p.grad.item() for p in w] == [72.0, 36.0, 24.0]
    assert calls == [0, 1, 2]


def test_five_thousand_checkpointed_calls_under_the_default_recursion_limit():
    assert sys.getrecursionlimit() <= 1000
    w = ag.param(uniform(1, 2, 2))
    x = ag.tensor(uniform(2, 1, 2))
    found = []
    for call in (plain, ag.checkpoint):
        w.grad = None
        with ag.grad_tape():
            total = ag.tensor(0.0)
            for _ in range(5000):
                total = total + ag.sum(call(lambda v: ag.relu(v @ w) @ w, x))
            loss = total / 5000.0
        ag.backward(loss)
        found.append([w.grad.numpy()])
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=2e-4)


def test_frozen_weights_and_low_rank_adapters():
    frozen = ag.tensor(uniform(1, 4, 4))
    a, b = ag.param(uniform(2, 4, 2)), ag.param(np.zeros((2, 4)))
    opt = optim.SGD([a, b], lr=0.1)
    x = ag.tensor(uniform(3, 5, 4))
    seen = []
    for _ in range(2):
        opt.zero_grad()
        with ag.grad_tape():
            loss = ag.sum(ag.checkpoint(lambda v: ag.relu(v @ frozen + v @ a @ b), x))
        ag.backward(loss)
        seen.append([float(np.abs(p.grad.numpy()).sum()) for p in (a, b)])
        opt.step()
    assert seen[0][0] == 0.0
    assert seen[0][1] > 0.0
    assert seen[1][0] > 0.0
    assert frozen.grad is None


@pytest.mark.filterwarnings("error")
def test_without_anything_to_differentiate_nothing_is_kept():
    calls = []

    def fn(v):
        calls.append(1)
        return ag.relu(v)

    x = ag.tensor([1.0])
    with ag.no_grad():
        assert not ag.checkpoint(fn, x).requires_grad
    with ag.grad_tape():
        assert not ag.checkpoint(fn, x).requires_grad
    assert len(calls) == 2


def test_a_value_inside_a_segment_that_somebody_holds_can_be_read():
    held, w = [], ag.param([2.0])

    def fn(v):
        held.append(v * w)
        return held[0] * w

    with ag.grad_tape():
        loss = ag.sum(ag.checkpoint(fn, ag.tensor([3.0])))
    ag.backward(loss)
    assert held[0].item() == 6.0
    assert w.grad.item() == 12.0


def test_gradients_of_gradients_through_a_segment():
    x = ag.param(0.5)
    with ag.grad_tape():
        y = ag.checkpoint(lambda v: ag.exp(v) * ag.sin(v), x)
        second = ag.grad(ag.grad(y, x), x)
    assert second.item() == pytest.approx(2 * np.exp(0.5) * np.cos(0.5), rel=1e-5)


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def test_a_thousand_steps_leave_memory_and_objects_flat():
    w = ag.param(uniform(1, 32, 32))
    x = ag.tensor(uniform(2, 8, 32))
    opt = optim.SGD([w], lr=1e-3)

    def step():
        opt.zero_grad()
        with ag.grad_tape():
            loss = ag.mean(ag.checkpoint(lambda v: ag.relu(ag.relu(v @ w) @ w), x))
        ag.backward(loss)
        opt.step()

    def tensors():
        return sum(
            issubclass(type(o), (ag.Tensor, graph.Source, graph.Node)) for o in gc.get_objects()
        )

    for _ in range(50):
        step()
    gc.collect()
    gc.disable()
    try:
        before = tensors(), resident_bytes()
        for _ in range(1000):
            step()
        after = tensors(), resident_bytes()
    finally:
        gc.enable()
    assert after[0] <= before[0]
    assert after[1] <= before[1] + (2 << 20)


# ---- tests of the tests: each silent failure, made on purpose, is seen ----


def break_recomputation(monkeypatch):
    """Make recomputed nodes differ, as a replay with another random draw would."""
    original = plan.Program._emit

    def emit(self, wanted, made):
        before = len(self.steps)
        original(self, wanted, made)
        for step in self.steps[before:]:
            if step.version and step.node.op.name == "relu":
                node = step.node
                step.node = graph.find_node((graph.OPS["detach"], (), node.mode, *node.inputs))

    monkeypatch.setattr(plan.Program, "_emit", emit)


def clear():
    graph.clear_nodes()
    for found in pg.devices():
        found.clear_plans()


def test_a_replay_that_computes_something_else_is_caught(monkeypatch):
    def build(call, params):
        h = call(lambda inp: ag.relu(params[0] @ inp) @ params[0], ag.tensor(uniform(1, *SQUARE)))
        return ag.mse_loss(h, ag.tensor(uniform(2, *SQUARE)))

    assert_same_bits(gradients(build, [SQUARE]))
    break_recomputation(monkeypatch)
    clear()
    with pytest.raises(AssertionError):
        assert_same_bits(gradients(build, [SQUARE]))
    monkeypatch.undo()
    clear()


@pytest.mark.parametrize("failure", ["dropped", "doubled", "detached"])
def test_a_lost_doubled_or_cut_gradient_is_caught(failure):
    """The three silent failures of a checkpoint that replays fn on detached inputs."""

    def broken(fn, *args):
        if failure == "dropped":  # the segment's parameters are never seen
            with ag.no_grad():
                return fn(*args)
        if failure == "doubled":  # the gradient arrives by two ways
            with ag.no_grad():
                value = fn(*args)
            return fn(*args) + (fn(*args) - value)
        return fn(*[ag.detach(a) for a in args])  # nothing before the segment trains

    def build(call, params):
        w0, w1 = params
        a = w0 @ ag.tensor(uniform(1, *SQUARE))
        h = (plain if call is plain else broken)(lambda inp: ag.relu(w1 @ inp), a)
        return ag.mse_loss(h, ag.tensor(uniform(2, *SQUARE))) + ag.sum(a)

    with pytest.raises(AssertionError):
        assert_same_bits(gradients(build, [SQUARE, SQUARE], seed=7))
