"""Schedules: functions from the number of updates made to the learning rate.

Being functions of the update count, they have no state of their own to save or to get out of step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..checks import number_in, positive_integer


def step_decay(lr: float, *, every: int, factor: float) -> Callable[[int], float]:
    """Return a schedule that multiplies lr by factor after every so many updates.

    >>> schedule = optim.step_decay(1.0, every=2, factor=0.5)
    >>> [schedule(t) for t in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    number_in("step_decay", "lr", lr, 0.0)
    number_in("step_decay", "factor", factor, 0.0)
    every = positive_integer("step_decay", "every", every)
    return lambda t: lr * factor ** (t // every)


def cosine_decay(lr: float, *, steps: int, floor: float = 0.0) -> Callable[[int], float]:
    """Return a schedule that falls from lr to floor along half a cosine (Loshchilov and Hutter
    2017).

    It stays at floor after ``steps`` updates.

    >>> schedule = optim.cosine_decay(1.0, steps=10, floor=0.2)
    >>> round(schedule(0), 6), round(schedule(5), 6), round(schedule(10), 6), schedule(99)
    (1.0, 0.6, 0.2, 0.2)
    """
    number_in("cosine_decay", "lr", lr, 0.0)
    number_in("cosine_decay", "floor", floor, 0.0)
    steps = positive_integer("cosine_decay", "steps", steps)

    def schedule(t: int) -> float:
        return floor + (lr - floor) * (1 + math.cos(math.pi * min(t / steps, 1.0))) / 2

    return schedule
