"""LSTM and GRU: sequences in parts, plans, threads, and gradients of gradients."""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag, nn, optim
from pyggml.ops.recurrent import recurrence

KINDS = pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])


@pytest.fixture
def device(every_device):
    return every_device


@pytest.fixture
def tolerance(device):
    return {"rtol": 1e-10, "atol": 1e-10} if device.double else {"rtol": 1e-5, "atol": 1e-5}


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


@KINDS
def test_a_sequence_read_in_two_parts_gives_what_it_gives_in_one(kind, tolerance):
    layer, x = kind(3, 4, num_layers=2), normal(0, 2, 7, 3)
    whole, final = layer(x)
    first, state = layer(x[:, :3])
    second, state = layer(x[:, 3:], state)
    joined = np.concatenate([first.numpy(), second.numpy()], axis=1)
    np.testing.assert_allclose(joined, whole.numpy(), **tolerance)
    finals = zip(final, state, strict=True) if kind is nn.LSTM else [(final, state)]
    for expected, found in finals:
        np.testing.assert_allclose(found.numpy(), expected.numpy(), **tolerance)


@KINDS
def test_a_sequence_of_one_step_and_a_long_one_work(kind, device):
    layer = kind(2, 3, bidirectional=True)
    assert layer(np.ones((4, 1, 2)))[0].shape == (4, 1, 6)
    with ag.grad_tape():
        loss = ag.mean(layer(ag.tensor(np.ones((1, 100, 2))))[0])
    ag.backward(loss)
    assert all(np.isfinite(p.grad.numpy()).all() for p in layer.parameters())


@KINDS
def test_training_steps_of_a_recurrent_layer_share_one_plan(kind, device):
    device.clear_plans()
    layer = kind(2, 3, num_layers=2, dropout=0.5)
    opt = optim.SGD(layer.parameters(), lr=0.1)
    for step in range(3):
        with ag.grad_tape():
            loss = ag.mean(ag.sqr(layer(ag.tensor(normal(step, 2, 6, 2)))[0]))
        opt.zero_grad()
        ag.backward(loss)
        opt.step()
    assert len(device.plans) == 1


def test_what_stands_between_recurrent_layers_is_dropped_in_training_only(device):
    layer = nn.GRU(3, 4, num_layers=2, dropout=1.0)
    x, other = normal(0, 2, 5, 3), normal(1, 2, 5, 3)
    np.testing.assert_array_equal(layer(x)[0].numpy(), layer(other)[0].numpy())
    layer.eval()
    assert not np.allclose(layer(x)[0].numpy(), layer(other)[0].numpy())


@KINDS
def test_gradients_flow_through_the_states_between_two_parts(kind, tolerance):
    layer, x = kind(3, 4, num_layers=2), normal(0, 2, 7, 3)
    found = []
    for cut in (None, 3):
        with ag.grad_tape():
            given = ag.tensor(x, requires_grad=True)
            outputs, state = layer(given[:, :cut])
            if cut:
                second, state = layer(given[:, cut:], state)
                outputs = ag.concat([outputs, second], axis=1)
            last = state[1] if kind is nn.LSTM else state
            loss = ag.sum(ag.sqr(outputs)) + ag.sum(last)
        found.append([g.numpy() for g in ag.grad(loss, [given, *layer.parameters()])])
    for whole, parts in zip(*found, strict=True):
        np.testing.assert_allclose(parts, whole, **tolerance)


@KINDS
def test_gradients_of_gradients_are_those_of_the_reference_device(kind, device):
    layer = kind(3, 4, bidirectional=True)
    weights = layer.state_dict()

    def penalty_gradients(device):
        with pg.device(device):
            copy = kind(3, 4, bidirectional=True)
            copy.load_state_dict(weights)
            with ag.grad_tape():
                x = ag.tensor(normal(0, 2, 5, 3), requires_grad=True)
                first = ag.grad(ag.sum(ag.sqr(copy(x)[0])), x)
                penalty = ag.sum(ag.sqr(first))
            ag.backward(penalty)
            return [p.grad.numpy() for p in copy.parameters()]

    pairs = zip(penalty_gradients(device), penalty_gradients("reference"), strict=True)
    for found, right in pairs:
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", [1, 2], ids=["GRU", "LSTM"])
@pytest.mark.parametrize("reverse", [False, True])
def test_any_number_of_threads_gives_the_same_bits(first, reverse, on_threads):
    batch, hidden, steps = 21, 40, 4
    width = (2 + first) * hidden
    shapes = [(width, hidden), (width, 9), (steps * batch, 9), (4 * hidden,)]
    arrays = [0.3 * normal(i, *s) for i, s in enumerate([*shapes, *[(batch, hidden)] * first])]

    def values():
        inputs = [ag.tensor(a, requires_grad=True) for a in arrays]
        with ag.grad_tape():
            h, last = recurrence(*inputs, reverse=reverse)
            loss = ag.sum(ag.sqr(h)) + ag.sum(last[-1])
        return [h, *last, *ag.grad(loss, inputs[4:])]

    expected = on_threads(1, values)
    for n_threads in (2, 5):
        for found, one in zip(on_threads(n_threads, values), expected, strict=True):
            np.testing.assert_array_equal(found, one)


@KINDS
@pytest.mark.parametrize("few", [1, 2, 3])
def test_an_item_has_the_same_bits_in_any_batch(kind, few):
    layer, x = kind(9, 40, bidirectional=True), normal(0, 21, 11, 9)
    whole, part = layer(x)[0].numpy(), layer(x[:few])[0].numpy()
    np.testing.assert_array_equal(part, whole[:few])


@KINDS
def test_only_a_batch_of_several_items_starts_threads(kind, monkeypatch):
    used, device = [], type(ag.tensor(1.0).device)
    original = device.compute

    def compute(self, graph, n_threads=1):
        used.append(n_threads)
        return original(self, graph, n_threads)

    monkeypatch.setattr(device, "compute", compute)
    before = pg.get_num_threads()
    layer = kind(64, 128)
    try:
        pg.set_num_threads(2)
        for batch in (1, 4):
            layer(normal(0, batch, 100, 64))[0].numpy()
    finally:
        pg.set_num_threads(before)
    assert used == [1, 2]


@KINDS
def test_on_the_cpu_a_longer_sequence_is_not_a_longer_graph(kind):
    layer, counts = kind(3, 4), []
    for steps in (3, 60):
        with ag.grad_tape():
            loss = ag.mean(layer(ag.tensor(normal(0, 2, steps, 3)))[0])
        counts.append(len(ag.plan_report(*ag.grad(loss, layer.parameters())).ops))
    assert counts[0] == counts[1]


@KINDS
def test_a_checkpointed_recurrent_layer_has_the_same_gradients(kind, device):
    layer, x = kind(3, 4, num_layers=2), normal(0, 2, 5, 3)
    found = []
    for wrapped in (layer, nn.checkpoint(layer)):
        with ag.grad_tape():
            loss = ag.sum(ag.sqr(wrapped(ag.tensor(x))[0]))
        found.append([g.numpy() for g in ag.grad(loss, layer.parameters())])
    for plain, checkpointed in zip(*found, strict=True):
        np.testing.assert_array_equal(plain, checkpointed)


@KINDS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_inputs_of_a_half_type_give_nearly_the_same_gradients(kind, dtype, device):
    layer, found = kind(3, 4, bidirectional=True), []
    for given in ("float32", dtype):
        with ag.grad_tape():
            x = ag.tensor(normal(0, 2, 5, 3), dtype=given, requires_grad=True)
            loss = ag.sum(ag.sqr(layer(x)[0]))
        found.append([g.numpy() for g in ag.grad(loss, [x, *layer.parameters()])])
    for full, half in zip(*found, strict=True):
        np.testing.assert_allclose(half, full, rtol=0.05, atol=0.05)
