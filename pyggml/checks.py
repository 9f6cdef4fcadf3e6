"""Checks of arguments that many functions and classes share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

from .errors import DTypeError, SettingError


def shown(value: object) -> str:
    """Return a value as messages show it: its repr if that is short, else its kind."""
    try:
        text = repr(value)
    except Exception:  # a repr that fails, or an integer of too many digits
        text = ""
    if text and len(text) <= 100 and "\n" not in text:
        return text
    shape = getattr(value, "shape", None)
    return type(value).__name__ + (f" of shape {shape}" if isinstance(shape, tuple) else "")


def as_index(value: object) -> int | None:
    """Return an integer of any kind as an int, and None for anything else, booleans too."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def as_float(value: object) -> float | None:
    """Return a Python number as a float, and None for anything else; one too large is infinite."""
    if type(value) is not float and not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")  # type: ignore[operator]


LARGEST = 2**63 - 1  # of integers where nothing else bounds them


def positive_integer(op: str, name: str, value: object, highest: int = LARGEST) -> int:
    """Return value, an integer of any kind, as an int.

    Raises SettingError unless it is positive, and at most highest.
    """
    number = as_index(value)
    if number is None or not 1 <= number <= highest:
        raise SettingError(
            f"{op}: {name} must be a positive integer{_limit(number, highest)}; got {shown(value)}"
        )
    return number


def natural_number(op: str, name: str, value: object, highest: int = LARGEST) -> int:
    """Return value, an integer of any kind, as an int.

    Raises SettingError unless it is at least 0, and at most highest.
    """
    number = as_index(value)
    if number is None or not 0 <= number <= highest:
        raise SettingError(
            f"{op}: {name} must be an integer of at least 0{_limit(number, highest)}; got "
            f"{shown(value)}"
        )
    return number


def _limit(number: int | None, highest: int) -> str:
    is_said = highest < LARGEST or (number is not None and number > highest)
    return f", at most {highest}" if is_said else ""


def one_of(op: str, name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return value, or raise SettingError unless it is one of some words."""
    if not isinstance(value, str) or value not in allowed:
        *first, last = map(repr, allowed)
        raise SettingError(f"{op}: {name} must be {', '.join(first)} or {last}; got {shown(value)}")
    return value


def plain_number(op: str, name: str, value: object) -> float:
    """Return value as a float, or raise DTypeError unless it is a Python number.

    A tensor would lose its gradient, and be read in the middle of recording.
    """
    number = as_float(value)
    if number is None:
        is_tensor = hasattr(value, "requires_grad")
        hint = "; for a tensor use operators, which broadcast and carry its gradient"
        raise DTypeError(
            f"{op}: {name} must be a Python number; got {type(value).__name__}"
            f"{hint if is_tensor else ''}"
        )
    return number


def number_in(op: str, name: str, value: object, low: float, below: float = float("inf")) -> float:
    """Return value as a float, or raise SettingError unless low <= value < below."""
    number = None if isinstance(value, bool) else as_float(value)
    if number is None or not float(low) <= number < below:
        raise SettingError(f"{op}: {name} must be in [{low}, {below}); got {shown(value)}")
    return number


def fraction(op: str, name: str, value: object) -> float:
    """Return value as a float, or raise SettingError unless it lies in [0, 1]."""
    number = None if isinstance(value, bool) else as_float(value)
    if number is None or not 0.0 <= number <= 1.0:
        raise SettingError(f"{op}: {name} must be in [0, 1]; got {shown(value)}")
    return number


def as_bool(op: str, name: str, value: object) -> bool:
    """Return a setting as a bool; raise SettingError for what is neither true nor false."""
    try:
        return bool(value)
    except (TypeError, ValueError):  # an array
        raise SettingError(f"{op}: {name} must be True or False; got {shown(value)}") from None


def need_function(op: str, name: str, value: Any) -> Callable[..., Any]:
    """Return value, or raise DTypeError unless it can be called."""
    if not callable(value):
        raise DTypeError(f"{op}: {name} must be a function; got {shown(value)}")
    return value


def need_mapping(op: str, name: str, value: Any) -> Mapping[Any, Any]:
    """Return value, or raise DTypeError unless it is a dict."""
    if not isinstance(value, Mapping):
        raise DTypeError(f"{op}: {name} must be a dict; got {shown(value)}")
    return value


def need_keys(op: str, state: Any, names: Iterable[str]) -> None:
    """Raise SettingError unless a state, a dict, has all these names."""
    missing = [name for name in names if name not in need_mapping(op, "state", state)]
    if missing:
        raise SettingError(f"{op}: the state is of another kind: it has no {', '.join(missing)}")


def as_list(op: str, name: str, value: Any, of: str) -> list[Any]:
    """Return what an iterable has as a list; raise DTypeError for a text, and for anything else."""
    if not isinstance(value, (str, bytes)) and isinstance(value, Iterable):
        try:
            return list(value)
        except TypeError:  # an array without axes
            pass
    raise DTypeError(f"{op}: {name} must be a list of {of}; got {shown(value)}")


def need_path(op: str, value: Any) -> Any:
    """Return value, or raise DTypeError unless it names a file."""
    is_path = isinstance(value, str) or hasattr(value, "__fspath__")
    if not is_path or "\0" in str(value):
        raise DTypeError(f"{op}: needs the path of a file; got {shown(value)}")
    return value
