"""Modules made of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..checkpoint import checkpoint as segment
from ..checks import positive_integer, shown
from ..errors import DTypeError, IndexRangeError
from ._module import Module

Layer = Callable[..., Any]


class Sequential(Module):
    """Call layers one after another: modules, or functions such as ag.relu.

    ``checkpoint_every=k`` puts each k of them in one checkpointed segment: see ag.checkpoint.
    Raises DTypeError for a layer that cannot be called.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2), checkpoint_every=2)
    >>> model(ag.tensor(np.ones((3, 4)))).shape
    (3, 2)
    >>> model
    Sequential(
      checkpoint_every=2
      (0): Linear(in_features=4, out_features=8)
      (1): ReLU()
      (2): Linear(in_features=8, out_features=2)
    )
    """

    def __init__(self, *layers: Layer, checkpoint_every: int | None = None) -> None:
        for i, layer in enumerate(layers):
            if not callable(layer):
                hint = "; write Sequential(*layers)" if isinstance(layer, (list, tuple)) else ""
                raise DTypeError(
                    f"Sequential: layers must be callable; layer {i} is a "
                    f"{type(layer).__name__}{hint}"
                )
        self.layers = list(layers)
        self.checkpoint_every = checkpoint_every
        if checkpoint_every is not None:
            positive_integer("Sequential", "checkpoint_every", checkpoint_every)

    def forward(self, x: Any) -> Any:
        size = self.checkpoint_every
        if size is None:
            return _run(self.layers, x)
        for start in range(0, len(self.layers), size):
            x = segment(_run, self.layers[start : start + size], x)
        return x

    def _members(self) -> Iterator[tuple[str, Any]]:
        yield from ((str(i), layer) for i, layer in enumerate(self.layers))
        yield from ((name, value) for name, value in vars(self).items() if name != "layers")

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.layers[index]
        except (IndexError, TypeError):
            raise IndexRangeError(
                f"Sequential: needs the number of one of {len(self.layers)} layers; got "
                f"{shown(index)}"
            ) from None


def _run(layers: Sequence[Layer], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


class Checkpointed(Module):
    """A module whose inner values the backward pass recomputes; made by nn.checkpoint."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return segment(self.module, *args, **kwargs)

    def _members(self) -> Iterator[tuple[str, Any]]:
        yield "", self.module  # names are those of the module

    def __repr__(self) -> str:
        return f"checkpoint({self.module!r})"


def checkpoint(module: Module) -> Checkpointed:
    """Return a module that computes the same in one checkpointed segment: see ag.checkpoint.

    It has the parameters of the module, under the same names.

    >>> layer = nn.checkpoint(nn.Linear(4, 2))
    >>> sorted(layer.state_dict())
    ['bias', 'weight']
    """
    if not isinstance(module, Module):
        raise DTypeError(
            f"checkpoint: needs a module; got {shown(module)}; for a function use ag.checkpoint"
        )
    return Checkpointed(module)
