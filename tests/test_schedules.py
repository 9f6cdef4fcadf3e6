"""Schedules: against their formulas at the points that matter, and against PyTorch's values."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag, optim

TORCH = np.load(Path(__file__).with_name("torch_values") / "optimizers.npz")

LIKE_PYTORCH = {
    "step": optim.step_decay(1.0, every=4, factor=0.5),
    "linear": optim.linear_decay(1.0, steps=8, floor=0.25),
    "polynomial": optim.polynomial_decay(1.0, steps=8, power=2.5),
    "cosine": optim.cosine_decay(1.0, steps=10, floor=0.1),
    "restarts": optim.cosine_restarts(1.0, period=5, growth=2, floor=0.1),
    "equal restarts": optim.cosine_restarts(1.0, period=5),
    "one cycle": optim.one_cycle(1.0, steps=20),
    "one cycle, settings": optim.one_cycle(
        1.0, steps=15, pct_start=0.5, div_factor=5, final_div_factor=100
    ),
    "warmup, cosine": optim.warmup(optim.cosine_decay(1.0, steps=16), steps=8, start=0.1),
}


def test_every_schedule_of_pytorch_that_we_have_is_compared():
    stored = {name.partition("/")[2] for name in TORCH if name.startswith("schedules/")}
    assert stored == set(LIKE_PYTORCH)


@pytest.mark.parametrize("name", LIKE_PYTORCH)
def test_learning_rates_are_those_of_pytorch(name):
    expected = TORCH[f"schedules/{name}"]
    found = [LIKE_PYTORCH[name](t) for t in range(len(expected))]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "half"),
    [
        (optim.linear_decay, 0.5),
        (optim.cosine_decay, 0.5),
        (lambda lr, **k: optim.polynomial_decay(lr, power=3.0, **k), 0.125),
    ],
)
@pytest.mark.parametrize("floor", [0.0, 0.02])
def test_a_decay_starts_at_lr_is_where_the_formula_says_at_half_and_stays_at_the_floor(
    make, half, floor
):
    schedule = make(0.3, steps=100, floor=floor)
    assert schedule(0) == pytest.approx(0.3)
    assert schedule(50) == pytest.approx(floor + (0.3 - floor) * half)
    assert schedule(100) == floor
    assert schedule(10**9) == floor
    rates = [schedule(t) for t in range(102)]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("t", range(0, 101, 5))
def test_cosine_decay_is_the_formula(t):
    expected = 0.1 + 0.9 * (1 + math.cos(math.pi * t / 100)) / 2
    assert optim.cosine_decay(1.0, steps=100, floor=0.1)(t) == pytest.approx(expected, rel=1e-12)


def test_restarts_fall_to_the_floor_and_begin_anew_each_fall_longer_than_the_last():
    schedule = optim.cosine_restarts(1.0, period=10, growth=3, floor=0.1)
    for start, length in ((0, 10), (10, 30), (40, 90), (130, 270)):
        assert schedule(start) == 1.0
        assert schedule(start + length // 2) == pytest.approx(0.55)
        last = 0.1 + 0.9 * (1 + math.cos(math.pi * (length - 1) / length)) / 2
        assert schedule(start + length - 1) == pytest.approx(last)


def test_restarts_of_one_length_are_periodic():
    schedule = optim.cosine_restarts(1.0, period=7)
    assert [schedule(t) for t in range(7)] == [schedule(t + 7 * 10**6) for t in range(7)]


def test_one_cycle_starts_low_peaks_once_and_ends_lower_than_it_began():
    schedule = optim.one_cycle(2.0, steps=100, pct_start=0.25, div_factor=10, final_div_factor=4)
    rates = [schedule(t) for t in range(100)]
    top = 24  # pct_start * steps - 1, as in PyTorch
    assert (rates[0], rates[top]) == (0.2, 2.0)
    assert rates[99] == schedule(10**9) == 0.05
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_cycle_of_very_few_steps_is_finite_and_ends_at_its_end(steps):
    schedule = optim.one_cycle(1.0, steps=steps, div_factor=2.0, final_div_factor=2.0)
    assert all(0.25 <= schedule(t) <= 1.0 for t in range(steps))
    assert schedule(steps) == 0.25


def test_warmup_rises_in_equal_steps_and_goes_on_with_the_other_schedule():
    after = optim.step_decay(1.0, every=10, factor=0.5)
    schedule = optim.warmup(after, steps=4)
    assert [schedule(t) for t in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert [schedule(4 + t) for t in range(30)] == [after(t) for t in range(30)]


def test_warmup_takes_a_number_and_a_start():
    schedule = optim.warmup(0.5, steps=4, start=0.0)
    assert [schedule(t) for t in (0, 2, 4, 1000)] == [0.0, 0.25, 0.5, 0.5]
    assert optim.warmup(optim.warmup(1.0, steps=1), steps=1)(2) == 1.0


def test_an_optimizer_follows_a_schedule_from_its_first_update():
    w = ag.param(0.0)
    opt = optim.SGD([w], lr=optim.warmup(optim.linear_decay(1.0, steps=2), steps=3))
    rates = []
    for _ in range(6):
        before = w.item()
        rates.append(opt.lr)
        opt.step({w: ag.tensor(1.0)})
        assert before - w.item() == pytest.approx(rates[-1], abs=1e-6)
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.5, 0.0])


# ---- reduce on plateau ---------------------------------------------------------------------------

PLATEAUS = {
    "relative": {"factor": 0.5, "patience": 2},
    "absolute": {
        "factor": 0.1, "patience": 1, "threshold": 0.5, "threshold_mode": "abs", "cooldown": 2,
        "floor": 0.05,
    },
    "max": {"mode": "max", "factor": 0.5, "patience": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", PLATEAUS)
def test_on_a_plateau_the_rate_falls_as_in_pytorch(name):
    schedule = optim.ReduceOnPlateau(1.0, **PLATEAUS[name])
    found = []
    for metric in TORCH["plateau/metrics"]:
        before = schedule(0)
        assert schedule.update(metric) or schedule(0) == before
        found.append(schedule(0))
    np.testing.assert_allclose(found, TORCH[f"plateau/{name}"], rtol=1e-12)


@pytest.mark.parametrize("name", PLATEAUS)
@pytest.mark.parametrize("place", [1, 5, 9, 12])
def test_a_plateau_schedule_goes_on_where_it_was_saved(name, place):
    metrics = TORCH["plateau/metrics"]
    schedule = optim.ReduceOnPlateau(1.0, **PLATEAUS[name])
    for metric in metrics[:place]:
        schedule.update(metric)
    again = optim.ReduceOnPlateau(1.0, **PLATEAUS[name])
    again.load_state_dict(schedule.state_dict())
    for metric in metrics[place:]:
        assert again.update(metric) == schedule.update(metric)
        assert again(0) == schedule(0)


def test_a_plateau_scales_another_schedule():
    schedule = optim.ReduceOnPlateau(optim.warmup(1.0, steps=3), factor=0.5, patience=0)
    assert [schedule.update(loss) for loss in (1.0, 1.0)] == [False, True]
    assert [schedule(t) for t in (0, 1, 3)] == [0.125, 0.25, 0.5]


def test_negative_metrics_improve_downwards():
    schedule = optim.ReduceOnPlateau(1.0, patience=0, threshold=0.1)
    assert schedule.update(-10.0) is False
    assert schedule.update(-10.5) is True  # better, but by less than a tenth
    assert schedule.update(-12.0) is False


def test_a_plateau_state_that_does_not_fit_is_refused():
    schedule = optim.ReduceOnPlateau(1.0)
    state = schedule.state_dict()
    del state["best"]
    with pytest.raises(pg.ShapeError, match="load_state_dict needs one number for each of"):
        schedule.load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.constant(-1.0), "constant: lr must be in"),
        (lambda: optim.step_decay(1.0, every=0, factor=0.5), "every must be a positive integer"),
        (lambda: optim.step_decay(1.0, every=1, factor=-0.5), "step_decay: factor must be in"),
        (lambda: optim.cosine_decay(1.0, steps=1.5), "steps must be a positive integer; got 1.5"),
        (lambda: optim.linear_decay(1.0, steps=5, floor=-1), "linear_decay: floor must be in"),
        (lambda: optim.polynomial_decay(1.0, steps=5, power=-1), "polynomial_decay: power must"),
        (lambda: optim.cosine_restarts(1.0, period=5, growth=0.5), r"growth must be in \[1.0, inf"),
        (lambda: optim.one_cycle(1.0, steps=5, pct_start=1.0), r"pct_start must be in \[0.0, 1.0"),
        (lambda: optim.one_cycle(1.0, steps=5, div_factor=0.5), "div_factor must be in"),
        (lambda: optim.warmup(1.0, steps=0), "warmup: steps must be a positive integer"),
        (lambda: optim.warmup("1", steps=1), "constant: lr must be in"),
        (lambda: optim.warmup(1.0, steps=1, start=-1.0), "warmup: start must be in"),
        (lambda: optim.ReduceOnPlateau(1.0, mode="low"), "mode must be 'min' or 'max'; got 'low'"),
        (
            lambda: optim.ReduceOnPlateau(1.0, threshold_mode="x"),
            "threshold_mode must be 'rel' or 'abs'",
        ),
        (lambda: optim.ReduceOnPlateau(1.0, factor=1.0), "ReduceOnPlateau: factor must be in"),
        (
            lambda: optim.ReduceOnPlateau(1.0, patience=-1),
            "patience must be an integer of at least 0; got -1",
        ),
        (
            lambda: optim.ReduceOnPlateau(1.0, cooldown=0.5),
            "cooldown must be an integer of at least 0; got 0.5",
        ),
    ],
)
def test_a_wrong_setting_is_refused(make, message):
    with pytest.raises(pg.SettingError, match=message):
        make()
