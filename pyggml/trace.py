"""What a function of tensors records, kept to be run again on other inputs of the same shapes.

nn.compile and optim.compile are made of it. While a function is traced, state.trace is the Trace:
it is told of what depends on the inputs' values, and refuses what it could not do again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike

from .device import Device, resolve_device
from .dtypes import check_array
from .errors import IndexRangeError, PyggmlError
from .graph import SOURCE, Frame, Node, Source, source_index, state
from .tensor import Tensor, make_tensor, node_in

if TYPE_CHECKING:
    from .nn._module import Buffer, Module
    from .random import Generator

MAX_TRACES = 64  # shapes that are kept; the oldest goes first


class Traces(dict):
    """Traces by the current device, and the shapes and kinds of their inputs."""

    def __init__(self) -> None:
        self._lock = Lock()  # of changes

    def find(self, inputs: Iterable[ArrayLike]) -> tuple[list[np.ndarray], tuple, Any]:
        """Return inputs as arrays, their key, and the trace that fits; None if there is none."""
        arrays = [
            value.numpy() if isinstance(value, Tensor) else np.asarray(value) for value in inputs
        ]
        kinds = [(array.shape, array.dtype.kind in "fb") for array in arrays]
        key = (resolve_device(None), *kinds)
        trace = self.get(key)
        return arrays, key, trace if trace is not None and trace.is_current() else None

    def keep(self, key: tuple, trace: Trace) -> Trace:
        """Keep a new trace, and return it."""
        with self._lock:
            self.pop(key, None)
            self[key] = trace
            if len(self) > MAX_TRACES:
                del self[next(iter(self))]
        return trace


class Trace:
    """A recorded function of arrays. A with block around the function's call traces it."""

    def __init__(self, arrays: Sequence[np.ndarray], device: Device) -> None:
        self.device = device
        self.inputs = [make_tensor(array, device=device, op="compile") for array in arrays]
        self.called: dict[int, Module] = {}  # the modules that the function calls
        # Nodes that ops take as indices: one of these ops, and the size that it indexes.
        self._limits: dict[Node, tuple[str, int]] = {}

    def __enter__(self) -> Trace:
        self._outer, state.trace = state.trace, self
        return self

    def __exit__(self, *error: object) -> None:
        state.trace = self._outer

    # ---- what ops tell ----

    def limit(self, op: str, indices: Tensor, size: int) -> None:
        """Note that an op takes these integers as indices below a size."""
        frame = state.open_frame(self.device)
        node = root = node_in(indices, frame)
        while root.op.alias:
            root = root.inputs[0]
        if root.op is not SOURCE:
            raise PyggmlError(
                f"{op}: compile cannot check integers that are computed; call the function itself, "
                "or compile a part of it"
            )
        if node not in self._limits or size < self._limits[node][1]:
            self._limits[node] = op, size
            check_limit(node, frame.sources, op, size)

    def refuse_reading(self) -> NoReturn:
        """Raise: a value would be kept for other inputs."""
        raise PyggmlError(
            "compile: the function reads a value (numpy(), item() or a comparison), which would be "
            "kept for other inputs; call the function itself, or compile a part of it"
        )

    def key_of(self, generator: Generator) -> Tensor:
        """Return the key of a draw that is made anew in each run."""
        self.refuse_drawing()

    def refuse_drawing(self) -> NoReturn:
        """Raise: numbers would be drawn once for all runs."""
        raise PyggmlError(
            "compile: the function draws random numbers, which would never change; only dropout in "
            "a training step may"
        )

    def note_buffer(self, buffer: Buffer) -> None:
        """Note that a buffer is about to get another value."""
        raise PyggmlError("compile: the model changes a buffer, which would happen only once")

    def after_run(self, function: Callable[[], None]) -> None:
        """Note what is to be done after each run."""
        raise PyggmlError("compile: the model changes a buffer, which would happen only once")

    # ---- its end, and runs ----

    def is_current(self) -> bool:
        """Tell whether what was recorded still fits what it was recorded of."""
        raise NotImplementedError

    def run(self, arrays: Sequence[np.ndarray]) -> Any:
        """Run what was recorded on other inputs."""
        raise NotImplementedError

    def close(self, frame: Frame) -> None:
        """Keep what the traced function has recorded in a frame."""
        given = [tensor._source for tensor in self.inputs]
        # Each call brings inputs of its own, so those of the first one are let go.
        self.sources: list[Any] = [None if s in given else s for s in frame.sources]
        self._given = [
            (source_index(frame.nodes[s]) if s in frame.nodes else None, tensor._at[1].dtype)
            for s, tensor in zip(given, self.inputs, strict=True)
        ]
        self.inputs = []

    def sources_for(self, arrays: Sequence[np.ndarray]) -> list[Source]:
        """Return the frame's sources with other inputs. Raises IndexRangeError as the ops would."""
        sources, device = self.sources.copy(), self.device
        for (place, kind), array in zip(self._given, arrays, strict=True):
            if place is not None:
                array, _ = check_array(array, kind, op="compile")
                sources[place] = Source(array.shape, kind, device, device.lend(array, kind))
        for node, (op, size) in self._limits.items():
            check_limit(node, sources, op, size)
        return sources


def check_limit(node: Node, sources: Sequence[Source], op: str, size: int) -> None:
    """Raise IndexRangeError unless all integers of a source, or a view of one, are in [0, size)."""
    if node.op is SOURCE:
        source = sources[source_index(node)]
        low, high = source.device.integer_range(source)
    else:
        array = _viewed(node, sources)
        low, high = int(array.min()), int(array.max())
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise IndexRangeError(f"{op}: indices must be in [0, {size}); got {wrong}")


def _viewed(node: Node, sources: Sequence[Source]) -> np.ndarray:
    """Return the value of a view of a source."""
    if node.op is SOURCE:
        source = sources[source_index(node)]
        return source.device.download(source)
    return node.op.reference(_viewed(node.inputs[0], sources), **dict(node.settings))


def value_of(node: Node, storage: Any, device: Device) -> np.ndarray:
    """Return the array behind the storage of an output."""
    return device.download(Source(node.shape, node.dtype, device, storage))
