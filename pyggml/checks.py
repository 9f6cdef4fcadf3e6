"""Checks of settings that many classes share."""

from __future__ import annotations

import operator
from numbers import Real

from .errors import DTypeError, SettingError


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


def plain_number(op: str, name: str, value: object) -> float:
    """Return value as a float, or raise DTypeError unless it is a Python number.

    A tensor would lose its gradient, and be read in the middle of recording.
    """
    if type(value) is not float and not isinstance(value, Real):
        raise DTypeError(
            f"{op}: {name} must be a Python number; got {type(value).__name__}; for a tensor use "
            "operators, which broadcast and carry its gradient"
        )
    return float(value)


def number_in(op: str, name: str, value: object, low: float, below: float = float("inf")) -> float:
    """Return value as a float, or raise SettingError unless low <= value < below."""
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else None
    if number is None or not low <= number < below:
        raise SettingError(f"{op}: {name} must be in [{low}, {below}); got {value!r}")
    return number
