"""Layers that depend on the mode, on random numbers, or on what came before.

These are batch norm, dropout and attention layers; test_recurrent.py has the recurrent ones.
"""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag, nn, optim


@pytest.fixture(params=["cpu", "reference"], autouse=True)
def device(request):
    with pg.device(request.param) as found:
        yield found


@pytest.fixture
def tolerance(device):
    return {"rtol": 1e-10, "atol": 1e-10} if device.double else {"rtol": 1e-5, "atol": 1e-5}


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


# ---- batch norm ----------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, 0.6, None])
def test_running_statistics_are_those_of_the_formula(momentum, tolerance):
    layer = nn.BatchNorm2d(3, momentum=momentum)
    mean, var = np.zeros(3), np.ones(3)
    for step in range(4):
        x = normal(step, 2, 3, 4, 5) * (step + 1) + step
        layer(x)
        part = 1 / (step + 1) if momentum is None else momentum
        mean = (1 - part) * mean + part * x.mean(axis=(0, 2, 3))
        var = (1 - part) * var + part * x.var(axis=(0, 2, 3), ddof=1)
    assert layer.num_batches_tracked.item() == 4
    np.testing.assert_allclose(layer.running_mean.numpy(), mean, **tolerance)
    np.testing.assert_allclose(layer.running_var.numpy(), var, **tolerance)
    x = normal(9, 2, 3, 4, 5)
    expected = (x - mean[:, None, None]) / np.sqrt(var[:, None, None] + layer.eps)
    np.testing.assert_allclose(layer.eval()(x).numpy(), expected, **tolerance)
    assert layer.num_batches_tracked.item() == 4


@pytest.mark.parametrize("momentum", [0.1, None])
def test_training_steps_with_batch_norm_share_one_plan(momentum, device):
    device.clear_plans()
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=momentum), nn.Linear(4, 1))
    opt = optim.Adam(model.parameters())
    for step in range(5):
        with ag.grad_tape():
            loss = ag.mean(ag.sqr(model(ag.tensor(normal(step, 6, 3)))))
        opt.zero_grad()
        ag.backward(loss)
        opt.step()
        assert model[1].running_mean._source is not None  # computed in the same run
    assert len(device.plans) == 1


def test_a_batch_with_one_value_per_channel_is_an_error_and_changes_nothing():
    layer = nn.BatchNorm1d(2)
    layer(normal(0, 4, 2))
    before = layer.state_dict()
    for shape in ((1, 2), (1, 2, 1)):
        with pytest.raises(pg.ShapeError, match="more than one value per channel"):
            layer(np.ones(shape))
    for name, value in layer.state_dict().items():
        np.testing.assert_array_equal(value, before[name])
    assert np.isfinite(layer.eval()(np.ones((1, 2))).numpy()).all()


def test_gradients_go_through_the_statistics_of_the_batch(tolerance):
    layer = nn.BatchNorm1d(3)
    x = ag.param(normal(0, 8, 3))
    with ag.grad_tape():
        out = layer(x)
    ag.backward(out, seed=ag.tensor(normal(1, 8, 3)))
    np.testing.assert_allclose(x.grad.numpy().sum(axis=0), 0.0, **tolerance)


def test_a_forward_call_whose_result_nobody_read_counts_though_weights_change_later(tolerance):
    linear, norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
    model = nn.Sequential(linear, norm)
    opt = optim.SGD(model.parameters(), lr=0.5)
    mean = np.zeros(2)
    for step in range(3):
        unread, x = normal(10 + step, 5, 2), normal(20 + step, 5, 2)
        for batch in (unread, x):
            out = batch @ linear.weight.numpy().T + linear.bias.numpy()
            mean = 0.9 * mean + 0.1 * out.mean(axis=0)
        model(unread)
        with ag.grad_tape():
            loss = ag.mean(ag.sqr(model(ag.tensor(x)) - 1.0))
        opt.zero_grad()
        ag.backward(loss)
        opt.step()
    np.testing.assert_allclose(norm.running_mean.numpy(), mean, **tolerance)


def test_calls_whose_results_nobody_reads_do_not_pile_up(device):
    norm = nn.BatchNorm1d(2)
    for step in range(50):
        with ag.grad_tape():
            norm(ag.tensor(normal(step, 4, 2)))
    assert len(norm.running_mean._at[0].sources) <= 6
    assert norm.num_batches_tracked.item() == 50


def test_a_layer_used_twice_in_a_step_counts_both_batches(tolerance):
    norm = nn.BatchNorm1d(2)
    a, b = normal(0, 4, 2), normal(1, 4, 2)
    with ag.grad_tape():
        loss = ag.sum(norm(ag.tensor(a)) * norm(ag.tensor(b)))
    ag.backward(loss)
    mean = 0.9 * 0.1 * a.mean(axis=0) + 0.1 * b.mean(axis=0)
    np.testing.assert_allclose(norm.running_mean.numpy(), mean, **tolerance)


def test_statistics_are_counted_once_in_a_checkpointed_segment(tolerance):
    found = []
    for wrap in (lambda module: module, nn.checkpoint):
        pg.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()))
        with ag.grad_tape():
            loss = ag.mean(ag.sqr(model(ag.tensor(normal(0, 6, 3)))))
        ag.backward(loss)
        grads = [p.grad.numpy() for p in model.parameters()]
        found.append((grads, model.state_dict()))
    for plain, checkpointed in zip(found[0][0], found[1][0], strict=True):
        np.testing.assert_array_equal(plain, checkpointed)
    for name, value in found[0][1].items():
        np.testing.assert_array_equal(value, found[1][1][name])


def test_running_statistics_load_after_training_as_before_it():
    norm, other = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    for layer, seed in ((norm, 0), (other, 1)):
        layer(normal(seed, 4, 2))
    other.load_state_dict(norm.state_dict())
    for name, value in norm.state_dict().items():
        np.testing.assert_array_equal(other.state_dict()[name], value)


# ---- dropout -------------------------------------------------------------------------------------


def test_dropout_drops_in_training_only_and_keeps_the_mean():
    layer, x = nn.Dropout(0.25), ag.tensor(np.ones(4000))
    pg.manual_seed(0)
    values = layer(x).numpy()
    np.testing.assert_allclose(np.unique(values), [0.0, 4 / 3], rtol=1e-6)
    assert values.mean() == pytest.approx(1.0, abs=0.03)
    assert layer.eval()(x) is x
    assert not nn.Dropout(1.0)(x).numpy().any()


def test_one_seed_gives_one_model_and_one_set_of_masks():
    def outputs():
        pg.manual_seed(7)
        model = nn.Sequential(
            nn.Linear(8, 8), nn.Dropout(), nn.GRU(8, 4, num_layers=2, dropout=0.5)
        )
        return model(ag.tensor(np.ones((2, 3, 8))))[0].numpy()

    first = outputs()
    np.testing.assert_array_equal(outputs(), first)
    assert not np.array_equal(nn.Linear(8, 8).weight.numpy(), nn.Linear(8, 8).weight.numpy())


# ---- attention -----------------------------------------------------------------------------------


def test_grouped_heads_equal_full_heads_with_repeated_keys_and_values(tolerance):
    grouped, full = nn.MultiheadAttention(8, 4, num_kv_heads=2), nn.MultiheadAttention(8, 4)
    values = grouped.state_dict()
    assert values["in_proj_weight"].shape == (8 + 4 + 4, 8)
    values["in_proj_bias"] = normal(3, 16)
    grouped.load_state_dict(values)
    for name in ("in_proj_weight", "in_proj_bias"):
        q, k, v = np.split(values[name], (8, 12))
        k, v = (t.reshape(2, 1, 2, -1).repeat(2, axis=1).reshape(8, *t.shape[1:]) for t in (k, v))
        values[name] = np.concatenate([q, k, v])
    full.load_state_dict(values)
    x = ag.tensor(normal(0, 2, 5, 8))
    for causal in (False, True):
        np.testing.assert_allclose(
            grouped(x, causal=causal).numpy(), full(x, causal=causal).numpy(), **tolerance
        )


def test_causal_attention_equals_attention_under_a_triangular_mask(tolerance):
    layer, x = nn.MultiheadAttention(6, 2), normal(0, 2, 5, 6)
    masked = layer(x, mask=np.tri(5, dtype=bool)).numpy()
    np.testing.assert_allclose(layer(x, causal=True).numpy(), masked, **tolerance)
    changed = x.copy()
    changed[:, 3:] += 1.0
    np.testing.assert_allclose(
        layer(changed, causal=True).numpy()[:, :3], masked[:, :3], **tolerance
    )


def test_attention_weights_are_dropped_in_training_only():
    layer, x = nn.MultiheadAttention(4, 2, dropout=0.5, bias=False), ag.tensor(normal(0, 1, 6, 4))
    kept = layer.eval()(x).numpy()
    np.testing.assert_array_equal(layer(x).numpy(), kept)
    assert not np.allclose(layer.train()(x).numpy(), kept)
    everything = nn.MultiheadAttention(4, 2, dropout=1.0, bias=False)
    assert not everything(x).numpy().any()


def test_transformer_layers_drop_in_training_only():
    pg.manual_seed(0)
    x = ag.tensor(normal(0, 2, 3, 8))
    for layer in (nn.TransformerEncoderLayer(8, 2, 16), nn.TransformerDecoderLayer(8, 2, 16)):
        inputs = (x,) if isinstance(layer, nn.TransformerEncoderLayer) else (x, x)
        assert not np.array_equal(layer(*inputs).numpy(), layer(*inputs).numpy())
        layer.eval()
        np.testing.assert_array_equal(layer(*inputs).numpy(), layer(*inputs).numpy())


def test_a_transformer_layer_takes_any_activation():
    layer = nn.TransformerEncoderLayer(4, 2, 8, activation=ag.silu).eval()
    assert layer(ag.tensor(normal(0, 1, 3, 4))).shape == (1, 3, 4)


def test_statistics_that_nobody_computed_survive_a_change_of_the_weights_before_them():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    x = np.random.default_rng(0).standard_normal((4, 3))
    h = model[0](ag.tensor(x)).numpy()
    model(ag.tensor(x))  # nothing is read
    model[0].weight.assign(np.ones((3, 3)))
    np.testing.assert_allclose(model[1].running_mean.numpy(), 0.1 * h.mean(0), atol=1e-6)
    assert np.isfinite(model(ag.tensor(x)).numpy()).all()
