"""Schedules: functions from the number of updates made to the learning rate.

Being functions of the update count, they have no state of their own to save or to get out of step;
ReduceOnPlateau, which follows a metric, is the exception. An optimizer takes one as its lr.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from ..checks import (
    natural_number,
    need_mapping,
    number_in,
    one_of,
    plain_number,
    positive_integer,
    shown,
)
from ..errors import SettingError, ShapeError
from ._groups import Schedule


def constant(lr: float) -> Schedule:
    """Return a schedule that stays at lr: what warmup can be put in front of.

    >>> optim.constant(0.1)(1000)
    0.1
    """
    lr = number_in("constant", "lr", lr, 0.0)
    return lambda t: lr


def step_decay(lr: float, *, every: int, factor: float) -> Schedule:
    """Return a schedule that multiplies lr by factor after every so many updates.

    >>> schedule = optim.step_decay(1.0, every=2, factor=0.5)
    >>> [schedule(t) for t in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    lr = number_in("step_decay", "lr", lr, 0.0)
    factor = number_in("step_decay", "factor", factor, 0.0)
    every = positive_integer("step_decay", "every", every)

    def schedule(t: int) -> float:
        try:
            return lr * factor ** (t // every)
        except OverflowError:
            raise SettingError(
                f"step_decay: lr {lr} times factor {factor}, {t // every} times, is no number any "
                "more; take a factor below 1"
            ) from None

    return schedule


def linear_decay(lr: float, *, steps: int, floor: float = 0.0) -> Schedule:
    """Return a schedule that falls from lr to floor along a line, and stays there.

    >>> schedule = optim.linear_decay(1.0, steps=10)
    >>> schedule(0), schedule(5), schedule(10), schedule(99)
    (1.0, 0.5, 0.0, 0.0)
    """
    return _decay("linear_decay", lr, steps, floor, lambda left: left)


def polynomial_decay(lr: float, *, steps: int, power: float = 1.0, floor: float = 0.0) -> Schedule:
    """Return a schedule that falls from lr to floor as a power of the share of steps that is left.

    It stays at floor after ``steps`` updates.

    >>> schedule = optim.polynomial_decay(1.0, steps=10, power=2.0)
    >>> schedule(0), schedule(5), schedule(10)
    (1.0, 0.25, 0.0)
    """
    power = number_in("polynomial_decay", "power", power, 0.0)
    return _decay("polynomial_decay", lr, steps, floor, lambda left: left**power)


def cosine_decay(lr: float, *, steps: int, floor: float = 0.0) -> Schedule:
    """Return a schedule that falls from lr to floor along half a cosine.

    After ``steps`` updates it stays at floor (Loshchilov and Hutter 2017).

    >>> schedule = optim.cosine_decay(1.0, steps=10, floor=0.2)
    >>> round(schedule(0), 6), round(schedule(5), 6), round(schedule(10), 6), schedule(99)
    (1.0, 0.6, 0.2, 0.2)
    """
    return _decay("cosine_decay", lr, steps, floor, _half_cosine)


def _half_cosine(left: float) -> float:
    """Return 0 for 0 and 1 for 1, and between them half a cosine."""
    return (1 - math.cos(math.pi * left)) / 2


def _decay(
    name: str, lr: float, steps: int, floor: float, curve: Callable[[float], float]
) -> Callable[[float], float]:
    """Return a schedule along a curve that gives 1 while all is left, and 0 at the end."""
    lr = number_in(name, "lr", lr, 0.0)
    floor = number_in(name, "floor", floor, 0.0)
    steps = positive_integer(name, "steps", steps)

    def schedule(t: float) -> float:
        height = curve(max(1 - t / steps, 0.0))
        return height * lr + (1 - height) * floor

    return schedule


def cosine_restarts(lr: float, *, period: int, growth: float = 1.0, floor: float = 0.0) -> Schedule:
    """Return a schedule that falls from lr to floor along half a cosine, again and again.

    This is SGDR (Loshchilov and Hutter 2017). The first fall takes ``period`` updates, each further
    one ``growth`` times as many as the one before.

    >>> schedule = optim.cosine_restarts(1.0, period=4, growth=2.0)
    >>> [round(schedule(t), 3) for t in (0, 2, 3, 4, 8, 11, 12)]
    [1.0, 0.5, 0.146, 1.0, 0.5, 0.038, 1.0]
    """
    period = positive_integer("cosine_restarts", "period", period)
    growth = number_in("cosine_restarts", "growth", growth, 1.0)
    fall = _decay("cosine_restarts", lr, 1, floor, _half_cosine)

    def schedule(t: int) -> float:
        if growth == 1.0:
            return fall(t % period / period)
        since, length = float(t), float(period)
        while since >= length:
            since -= length
            length *= growth
        return fall(since / length)

    return schedule


def one_cycle(
    lr: float,
    *,
    steps: int,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """Return a schedule that rises to lr and falls to almost nothing.

    This is Smith and Topin's policy (2019) in PyTorch's form. It starts at lr / div_factor, is at
    lr after a share pct_start of the steps, and makes the last of them with lr / div_factor /
    final_div_factor; each way is half a cosine.

    >>> schedule = optim.one_cycle(1.0, steps=10, pct_start=0.4)
    >>> schedule(0), schedule(3), round(schedule(6), 3), round(schedule(9), 6)
    (0.04, 1.0, 0.5, 4e-06)
    """
    lr = number_in("one_cycle", "lr", lr, 0.0)
    steps = positive_integer("one_cycle", "steps", steps)
    pct_start = number_in("one_cycle", "pct_start", pct_start, 0.0, 1.0)
    start = lr / number_in("one_cycle", "div_factor", div_factor, 1.0)
    end = start / number_in("one_cycle", "final_div_factor", final_div_factor, 1.0)
    top = max(pct_start * steps - 1, 0.0)

    def schedule(t: int) -> float:
        if t < top:
            height, low = _half_cosine(t / top), start
        else:
            left = 1 - (t - top) / max(steps - 1 - top, 1.0)
            height, low = _half_cosine(max(left, 0.0)), end
        return height * lr + (1 - height) * low

    return schedule


def warmup(schedule: float | Schedule, *, steps: int, start: float | None = None) -> Schedule:
    """Return a schedule that rises along a line to where another one begins, and goes on with that.

    ``schedule``, or a constant learning rate, begins after ``steps`` updates, as if they had not
    been. ``start`` is the share of its first value that the first update has; None, for 1 /
    (steps + 1), makes all steps of the rise equal, the first included.

    >>> schedule = optim.warmup(optim.cosine_decay(1.0, steps=100), steps=4)
    >>> [round(schedule(t), 2) for t in (0, 1, 2, 3, 4, 54, 104)]
    [0.2, 0.4, 0.6, 0.8, 1.0, 0.5, 0.0]
    """
    steps = positive_integer("warmup", "steps", steps)
    given = schedule if callable(schedule) else constant(schedule)

    def rest(t: int) -> float:
        return number_in("warmup", f"what the schedule gives for {t}", given(t), 0.0)

    first = 1 / (steps + 1) if start is None else number_in("warmup", "start", start, 0.0)
    return lambda t: rest(0) * (first + (1 - first) * t / steps) if t < steps else rest(t - steps)


class ReduceOnPlateau:
    """A schedule that multiplies the learning rate by factor when a metric has stopped improving.

    Give it to an optimizer as lr, and call update(metric) after each validation. Its state is saved
    with the optimizer's.

    Args:
        lr: the learning rate to start from, or a schedule.
        mode: "min" or "max": what improving means.
        factor: what the learning rate is multiplied by.
        patience: how many validations without improvement are let pass.
        threshold: how much better than the best a metric must be to count; NaN never does.
        threshold_mode: "rel": threshold is a share of the best, "abs": an amount.
        cooldown: how many validations after a reduction are not counted.
        floor: the learning rate does not fall below it.

    >>> schedule = optim.ReduceOnPlateau(1.0, factor=0.5, patience=1)
    >>> opt = optim.SGD([ag.param([1.0])], lr=schedule)
    >>> [schedule.update(loss) for loss in (3.0, 2.0, 2.0, 2.5)]
    [False, False, False, True]
    >>> opt.lr
    0.5
    """

    def __init__(
        self,
        lr: float | Schedule,
        *,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        floor: float = 0.0,
    ) -> None:
        name = "ReduceOnPlateau"
        self.base = lr if callable(lr) else constant(lr)
        self.mode = one_of(name, "mode", mode, ("min", "max"))
        self.factor = number_in(name, "factor", factor, 0.0, 1.0)
        self.patience = natural_number(name, "patience", patience)
        self.threshold = number_in(name, "threshold", threshold, 0.0)
        self.threshold_mode = one_of(name, "threshold_mode", threshold_mode, ("rel", "abs"))
        self.cooldown = natural_number(name, "cooldown", cooldown)
        self.floor = number_in(name, "floor", floor, 0.0)
        self.best = math.inf if mode == "min" else -math.inf
        self._scale = 1.0
        self._bad = 0  # validations in a row that were not better
        self._cooling = 0  # validations that are still not counted

    def __call__(self, t: int) -> float:
        """Return the learning rate after t updates."""
        lr = self.base(t)
        return max(lr * self._scale, min(lr, self.floor))

    def update(self, metric: float) -> bool:
        """Take note of a metric; return whether it reduced the learning rate."""
        value = plain_number("ReduceOnPlateau", "metric", metric)
        if self._is_better(value):
            self.best, self._bad = value, 0
        else:
            self._bad += 1
        if self._cooling:
            self._cooling -= 1
            self._bad = 0
        if self._bad <= self.patience:
            return False
        self._scale *= self.factor
        self._cooling, self._bad = self.cooldown, 0
        return True

    def _is_better(self, value: float) -> bool:
        sign = 1.0 if self.mode == "max" else -1.0
        margin = self.threshold
        if self.threshold_mode == "rel":
            margin *= abs(self.best) if math.isfinite(self.best) else 0.0
        return sign * value > sign * self.best + margin

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return what continuing needs, as arrays."""
        return {name: np.array(getattr(self, field)) for name, field in _PLATEAU_STATE.items()}

    def load_state_dict(self, values: Mapping[str, np.ndarray]) -> None:
        """Continue from a state. Raises ShapeError, having changed nothing, if it does not fit."""
        need_mapping("ReduceOnPlateau", "values", values)
        if set(values) != set(_PLATEAU_STATE) or any(np.size(v) != 1 for v in values.values()):
            raise ShapeError(
                f"ReduceOnPlateau: load_state_dict needs one number for each of "
                f"{sorted(_PLATEAU_STATE)}; got {sorted(values)}"
            )
        for name, field in _PLATEAU_STATE.items():
            number = np.asarray(values[name])
            if number.dtype.kind not in "fiu":
                raise ShapeError(f"ReduceOnPlateau: {name} must be a number; got {shown(number)}")
            setattr(self, field, type(getattr(self, field))(number.item()))


_PLATEAU_STATE = {"best": "best", "scale": "_scale", "bad": "_bad", "cooling": "_cooling"}
