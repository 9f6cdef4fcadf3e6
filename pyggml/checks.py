"""Checks of settings that many classes share."""

from __future__ import annotations

import operator
from numbers import Real

from .errors import SettingError


def positive_integer(op: str, name: str, value: object, highest: int | None = None) -> int:
    """Return value, an integer of any kind, as an int; raise SettingError unless it is positive."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if number < 1 or (highest is not None and number > highest):
        limit = "" if highest is None else f", at most {highest}"
        raise SettingError(f"{op}: {name} must be a positive integer{limit}; got {value!r}")
    return number


def number_in(op: str, name: str, value: object, low: float, below: float = float("inf")) -> float:
    """Return value as a float, or raise SettingError unless low <= value < below."""
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else None
    if number is None or not low <= number < below:
        raise SettingError(f"{op}: {name} must be in [{low}, {below}); got {value!r}")
    return number
