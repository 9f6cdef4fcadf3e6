"""The module base: parameters are the attributes that are Parameters, in modules that are
attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..checkpoint import checkpoint as segment
from ..checks import positive_integer
from ..errors import ShapeError
from ..tensor import Parameter, Tensor


class Module:
    """Base of all layers: set parameters and sub-modules as plain attributes, and define __call__.

    >>> class Scale(nn.Module):
    ...     def __init__(self):
    ...         self.factor = ag.param([2.0])
    ...     def __call__(self, x):
    ...         return x * self.factor
    >>> [name for name, _ in Scale().named_parameters()]
    ['factor']
    """

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__}: define __call__")

    def children(self) -> Iterator[tuple[str, Module]]:
        """Yield the modules that are attributes, or in lists, tuples and dicts that are, with their
        names.
        """
        for name, value in vars(self).items():
            yield from _modules_in(name, value)

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Yield every parameter once, with its dotted name."""
        seen: set[Parameter] = set()
        for name, parameter in self._named_parameters(prefix):
            if parameter not in seen:
                seen.add(parameter)
                yield name, parameter

    def _named_parameters(self, prefix: str) -> Iterator[tuple[str, Parameter]]:
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield prefix + name, value
        for name, child in self.children():
            yield from child._named_parameters(f"{prefix}{name}.")

    def parameters(self) -> list[Parameter]:
        """Return every parameter once."""
        return [parameter for _, parameter in self.named_parameters()]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return a copy of every parameter's value by dotted name."""
        return {name: parameter.numpy() for name, parameter in self.named_parameters()}

    def load_state_dict(self, values: Mapping[str, ArrayLike]) -> None:
        """Overwrite every parameter. Raises ShapeError, before changing anything, if names or
        shapes do not match.
        """
        own = dict(self.named_parameters())
        problems = [f"missing {name}" for name in own if name not in values]
        problems += [f"unexpected {name}" for name in values if name not in own]
        problems += [
            f"{name} has shape {np.shape(values[name])}, not {parameter.shape}"
            for name, parameter in own.items()
            if name in values and np.shape(values[name]) != parameter.shape
        ]
        if problems:
            raise ShapeError(f"load_state_dict: {'; '.join(problems)}")
        for name, parameter in own.items():
            parameter.assign(values[name])


def _modules_in(name: str, value: Any) -> Iterator[tuple[str, Module]]:
    if isinstance(value, Module):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _modules_in(f"{name}.{i}", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _modules_in(f"{name}.{key}", item)


class Sequential(Module):
    """Call modules one after another.

    ``checkpoint_every=k`` puts each k of them in one checkpointed segment: see ag.checkpoint.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2), checkpoint_every=2)
    >>> model(ag.tensor(np.ones((3, 4)))).shape
    (3, 2)
    """

    def __init__(self, *layers: Module, checkpoint_every: int | None = None) -> None:
        self.layers = list(layers)
        self.checkpoint_every = checkpoint_every
        if checkpoint_every is not None:
            positive_integer("Sequential", "checkpoint_every", checkpoint_every)

    def __call__(self, x: Tensor) -> Tensor:
        size = self.checkpoint_every
        if size is None:
            return _run(self.layers, x)
        for start in range(0, len(self.layers), size):
            x = segment(_run, self.layers[start : start + size], x)
        return x


def _run(layers: list[Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


class Checkpointed(Module):
    """A module whose inner values the backward pass recomputes; made by nn.checkpoint."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return segment(self.module, *args, **kwargs)

    def _named_parameters(self, prefix: str) -> Iterator[tuple[str, Parameter]]:
        return self.module._named_parameters(prefix)


def checkpoint(module: Module) -> Checkpointed:
    """Return a module that computes the same in one checkpointed segment: see ag.checkpoint.

    It has the parameters of the module, under the same names.

    >>> layer = nn.checkpoint(nn.Linear(4, 2))
    >>> sorted(layer.state_dict())
    ['bias', 'weight']
    """
    return Checkpointed(module)
