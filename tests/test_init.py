"""First weights: their spread against the formulas, and that one seed repeats them."""

from __future__ import annotations

import numpy as np
import pytest

import pyggml as pg
from pyggml import nn
from pyggml.nn import init

SHAPE = (40, 30, 5, 5)
FAN_IN, FAN_OUT = 30 * 25, 40 * 25

UNIFORM = {
    "uniform": (lambda: init.uniform(SHAPE, low=-0.5, high=0.5), 0.5),
    "kaiming relu": (
        lambda: init.kaiming_uniform(SHAPE, nonlinearity="relu"),
        np.sqrt(2) * np.sqrt(3 / FAN_IN),
    ),
    "kaiming leaky fan_out": (
        lambda: init.kaiming_uniform(SHAPE, a=0.5, mode="fan_out"),
        np.sqrt(2 / 1.25) * np.sqrt(3 / FAN_OUT),
    ),
    "xavier": (lambda: init.xavier_uniform(SHAPE, gain=2.0), 2 * np.sqrt(6 / (FAN_IN + FAN_OUT))),
}
NORMAL = {
    "normal": (lambda: init.normal(SHAPE, mean=0.25, std=0.02), 0.25, 0.02),
    "kaiming": (lambda: init.kaiming_normal(SHAPE), 0.0, np.sqrt(2 / FAN_IN)),
    "kaiming tanh fan_out": (
        lambda: init.kaiming_normal(SHAPE, mode="fan_out", nonlinearity="tanh"),
        0.0,
        5 / 3 / np.sqrt(FAN_OUT),
    ),
    "xavier": (lambda: init.xavier_normal(SHAPE), 0.0, np.sqrt(2 / (FAN_IN + FAN_OUT))),
    # between -2 and 2 standard deviations, the deviation is 0.8796 of the whole
    "trunc_normal": (
        lambda: init.trunc_normal(SHAPE, mean=1.0, std=0.1, low=0.8, high=1.2),
        1.0,
        0.08796,
    ),
}


@pytest.fixture(autouse=True)
def seed():
    pg.manual_seed(0)


@pytest.mark.parametrize("name", UNIFORM)
def test_uniform_numbers_fill_the_formulas_bounds(name):
    draw, bound = UNIFORM[name]
    values = draw()
    assert values.shape == SHAPE
    assert values.dtype == np.float32
    assert 0.999 * bound < np.abs(values).max() <= bound * (1 + 1e-6)
    assert values.mean() == pytest.approx(0.0, abs=0.02 * bound)
    assert values.std() == pytest.approx(bound / np.sqrt(3), rel=0.02)


@pytest.mark.parametrize("name", NORMAL)
def test_normal_numbers_have_the_formulas_mean_and_deviation(name):
    draw, mean, std = NORMAL[name]
    values = draw()
    assert values.shape == SHAPE
    assert values.dtype == np.float32
    assert values.mean() == pytest.approx(mean, abs=0.03 * std)
    assert values.std() == pytest.approx(std, rel=0.02)


def test_truncated_numbers_stay_inside_also_far_from_the_mean():
    values = init.trunc_normal((1000,), low=2.5, high=2.6)
    assert values.min() >= 2.5
    assert values.max() <= 2.6


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (6, 2, 3, 3), (5, 5)])
def test_orthogonal_rows_or_columns(shape):
    matrix = init.orthogonal(shape, gain=2.0).reshape(shape[0], -1).astype(float)
    product = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    np.testing.assert_allclose(product, 4.0 * np.eye(len(product)), atol=1e-5)


@pytest.mark.parametrize(
    ("nonlinearity", "gain"),
    [("linear", 1), ("conv2d", 1), ("sigmoid", 1), ("tanh", 5 / 3), ("relu", 2**0.5),
     ("leaky_relu", (2 / (1 + 0.01**2)) ** 0.5), ("selu", 0.75)],
)  # fmt: skip
def test_gains_are_pytorchs(nonlinearity, gain):
    assert init.calculate_gain(nonlinearity) == pytest.approx(gain)


def test_a_seed_repeats_a_model_whatever_the_device():
    def build():
        return nn.Sequential(nn.Linear(3, 4), nn.Conv1d(2, 3, 2), nn.LSTM(3, 2), nn.Embedding(5, 2))

    pg.manual_seed(3)
    first = build().state_dict()
    pg.manual_seed(3)
    with pg.device("reference"):
        second = build().state_dict()
    other = build().state_dict()
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value)
        assert not np.array_equal(other[name], value)


def test_another_generator_leaves_the_default_one_alone():
    before = pg.random.default_generator.state()
    first = init.normal((3,), generator=pg.Generator(5))
    np.testing.assert_array_equal(init.normal((3,), generator=pg.Generator(5)), first)
    assert pg.random.default_generator.state() == before


@pytest.mark.parametrize(
    ("layer", "bound"),
    [
        (lambda: nn.Linear(400, 30), 1 / 20),
        (lambda: nn.Conv2d(16, 30, 5, groups=2), (8 * 25) ** -0.5),
        (lambda: nn.ConvTranspose2d(16, 16, 5, groups=2), (8 * 25) ** -0.5),
        (lambda: nn.LSTM(30, 100), 1 / 10),
    ],
)
def test_layers_start_as_pytorchs(layer, bound):
    for parameter in layer().parameters():
        values = np.abs(parameter.numpy())
        assert 0.8 * bound < values.max() <= bound * (1 + 1e-6)


def test_attention_starts_as_pytorchs():
    layer = nn.MultiheadAttention(64, 4)
    bound = np.sqrt(6 / (64 + 3 * 64))
    assert 0.99 * bound < np.abs(layer.in_proj_weight.numpy()).max() <= bound
    assert 0.99 / 8 < np.abs(layer.out_proj.weight.numpy()).max() <= 1 / 8
    assert not layer.in_proj_bias.numpy().any()
    assert not layer.out_proj.bias.numpy().any()


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        (lambda: init.normal((2,), std=-1.0), pg.SettingError, "normal: std must be in"),
        (lambda: init.uniform((2,), low=1.0, high=0.0), pg.SettingError, "low must not be above"),
        (lambda: init.trunc_normal((2,), low=9.0, high=10.0), pg.SettingError, "must hold some"),
        (lambda: init.kaiming_normal((2, 2), mode="fan"), pg.SettingError, "mode must be 'fan_in'"),
        (
            lambda: init.kaiming_uniform((2, 2), nonlinearity="swish"),
            pg.SettingError,
            "nonlinearity must be one of linear, .*; got 'swish'",
        ),
        (lambda: init.xavier_normal((2,)), pg.ShapeError, r"needs a weight of at least two axes"),
        (lambda: init.orthogonal((2,)), pg.ShapeError, r"orthogonal: needs a weight of at least"),
    ],
)
def test_settings_out_of_range_are_refused(draw, error, message):
    with pytest.raises(error, match=message):
        draw()
