"""Averages of weights."""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag, nn, optim


def train(params, step):
    """Change the weights as training would."""
    for w in params:
        w.assign(np.random.default_rng(step).standard_normal(w.shape))


def averages_of(ema):
    with ema.applied():
        return [w.numpy() for w in ema.params]


def test_averages_follow_the_formula(every_device):
    params = [ag.param(np.ones(shape)) for shape in [(3, 5), (7,), ()]]
    ema = optim.EMA(params, decay=0.8)
    expected = [w.numpy() for w in params]
    for step in range(5):
        train(params, step)
        ema.update()
        expected = [0.8 * a + 0.2 * w.numpy() for a, w in zip(expected, params, strict=True)]
    assert ema.t == 5
    tolerance = 1e-12 if every_device.double else 1e-6
    for found, value in zip(averages_of(ema), expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=tolerance, atol=tolerance)


def test_a_decay_may_be_a_function_of_the_updates_made():
    w = ag.param([0.0])
    ema = optim.EMA([w], decay=lambda t: t / (t + 1))  # the plain mean
    for value in (3.0, 6.0, 0.0):
        w.assign([value])
        ema.update()
    assert averages_of(ema)[0] == pytest.approx(3.0)


def test_the_averages_are_in_place_inside_the_block_and_the_weights_after_it():
    w = ag.param([1.0, 2.0])
    ema = optim.EMA({"w": w}, decay=0.5)
    w.assign([3.0, 4.0])
    ema.update()
    with pytest.raises(KeyError), ema.applied():
        assert w.tolist() == [2.0, 3.0]
        assert (w * 2.0).tolist() == [4.0, 6.0]
        raise KeyError
    assert w.tolist() == [3.0, 4.0]
    assert (w * 2.0).tolist() == [6.0, 8.0]


def test_training_goes_on_after_the_block_as_without_it():
    results = []
    for with_block in (False, True):
        w = ag.param([1.0, 2.0])
        opt = optim.SGD([w], lr=0.1, momentum=0.9)
        ema = optim.EMA([w], decay=0.9)
        for _ in range(4):
            opt.zero_grad()
            with ag.grad_tape():
                loss = ag.sum(w * w)
            ag.backward(loss)
            opt.step()
            ema.update()
            if with_block:
                averages_of(ema)
        results.append(w.tolist())
    assert results[0] == results[1]


def test_a_pending_value_of_the_other_weights_is_never_computed():
    w = ag.param([1.0])
    ema = optim.EMA([w])
    pending = w * 2.0
    with ema.applied(), pytest.raises(pg.StaleError, match="has changed"):
        pending.item()


def test_updates_share_one_plan_and_the_node_table_does_not_grow():
    from pyggml import graph

    cpu = pg.devices()[0]
    params = [ag.param(np.ones(3)), ag.param(np.ones(4))]
    ema = optim.EMA(params)
    ema.update()
    cpu.clear_plans()
    before = len(graph._nodes)
    for _ in range(5):
        ema.update()
    assert len(cpu.plans) == 1
    assert len(graph._nodes) == before


def test_an_update_between_forward_and_backward_disturbs_neither():
    w = ag.param([3.0])
    ema = optim.EMA([w], decay=0.5)
    with ag.grad_tape():
        loss = ag.sum(w * w)
    ema.update()
    assert ag.backward(loss)[w].item() == 6.0


def test_averages_follow_weights_that_move_to_another_device():
    model = nn.Linear(2, 1, bias=False)
    model.weight.assign([[1.0, 2.0]])
    ema = optim.EMA(model.parameters(), decay=0.5)
    model.to("reference")
    model.weight.assign([[3.0, 4.0]])
    ema.update()
    with ema.applied():
        assert model.weight.device.name == "reference"
        assert model.weight.tolist() == [[2.0, 3.0]]
    assert model.weight.tolist() == [[3.0, 4.0]]


@pytest.mark.parametrize("swapped", [False, True])
def test_saving_and_loading_restores_averages_and_count(swapped):
    w = ag.param([1.0, 2.0])
    ema = optim.EMA([w], decay=0.5)
    w.assign([3.0, 4.0])
    ema.update()
    if swapped:
        ema.swap()
    state = ema.state_dict()
    assert {name: value.tolist() for name, value in state.items()} == {"t": 1, "0": [2.0, 3.0]}
    again = optim.EMA([ag.param([0.0, 0.0])], decay=0.5)
    again.load_state_dict(state)
    assert again.t == 1
    assert averages_of(again)[0].tolist() == [2.0, 3.0]


def test_mistakes_are_errors_that_say_what_to_do():
    w = ag.param([1.0])
    ema = optim.EMA([w])
    with ema.applied():
        with pytest.raises(pg.GradError, match=r"EMA: update\(\) while the weights are the averag"):
            ema.update()
        with pytest.raises(pg.GradError, match="EMA: the weights are the averages already"):
            with ema.applied():
                pass
    for wrong in (1.0, -0.1, float("nan")):
        with pytest.raises(pg.SettingError, match=r"EMA: decay must be in \[0.0, 1.0\)"):
            optim.EMA([w], decay=wrong)
    with pytest.raises(pg.SettingError, match="EMA: decay must be in"):
        optim.EMA([w], decay=lambda t: 2.0).update()
    for wrong in ({"t": np.array(1)}, {"t": np.array(1), "0": np.zeros(2)}, {"0": np.zeros(1)}):
        with pytest.raises(pg.ShapeError, match="EMA: load_state_dict needs the shapes"):
            ema.load_state_dict(wrong)
