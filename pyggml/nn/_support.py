"""What many layers need: their first weights, and errors about their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..checks import natural_number, positive_integer, shown
from ..errors import DTypeError, SettingError, ShapeError
from ..tensor import Parameter, Tensor, TensorLike, as_tensor, make_tensor
from . import init
from ._module import Module


def parameter(value: np.ndarray) -> Parameter:
    """Return a parameter with a copy of a value, on the current device."""
    made = make_tensor(value, dtype="float32", requires_grad=True, cls=Parameter, op="parameter")
    assert isinstance(made, Parameter)
    return made


def fan_in_uniform(shape: Sequence[int], fan_in: int) -> Parameter:
    """Return a parameter uniform in +-1 / sqrt(fan_in): how PyTorch's layers start."""
    bound = fan_in**-0.5
    return parameter(init.uniform(shape, low=-bound, high=bound))


def input_of(layer: Module, x: TensorLike, like: Tensor | None = None) -> Tensor:
    """Return a layer's input as a tensor; a number or an array goes to where ``like`` is."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Module):
        raise DTypeError(f"{type(layer).__name__}: needs a tensor; got a module")
    return as_tensor(x, like, op=type(layer).__name__)


def misfit(layer: Module, expected: str, *inputs: Tensor) -> ShapeError:
    """Return the error for an input that does not fit a layer."""
    shapes = " and ".join(str(x.shape) for x in inputs)
    settings = layer.extra_repr()
    return ShapeError(f"{type(layer).__name__}({settings}): needs {expected}; got {shapes}")


def sizes(layer: str, name: str, value: Any, count: int, lowest: int = 1) -> tuple[int, ...]:
    """Return a setting that is one whole number for all axes, or one for each, as a tuple."""
    listed = tuple(value) if isinstance(value, (tuple, list)) else (value,) * count
    if len(listed) != count:
        raise SettingError(
            f"{layer}: {name} must be a number or {count} of them; got {shown(value)}"
        )
    check = positive_integer if lowest > 0 else natural_number
    return tuple(check(layer, name, n) for n in listed)
