"""A module as a plain function of arrays, recorded once for each shape of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..autograd import no_grad
from ..deadline import check_deadline
from ..device import resolve_device
from ..dtypes import check_array
from ..errors import DTypeError, IndexRangeError, PyggmlError, SettingError
from ..graph import PLAIN, SOURCE, Frame, Source, source_index, state
from ..plan import Program
from ..tensor import Tensor, make_tensor, node_in
from ._module import Module

MAX_TRACES = 64  # shapes that are kept; the oldest goes first


def compile(model: Module) -> Compiled:
    """Return a module, in evaluation mode, as a quick function of arrays.

    The function records the model once for each combination of input shapes, and from then on only
    runs what was recorded, with the values that parameters and buffers have at that moment. It
    takes arrays and returns arrays, in the structure that the model returns: one, a tuple, a list
    or a dict. No gradient flows through it.

    So the Python code of ``forward`` runs once for a shape; what it does by the values of its
    inputs would stay as it was. Raises SettingError for a model in training mode, and PyggmlError
    for one that draws random numbers or reads a value that it computes.

    >>> model = nn.Linear(2, 1).eval()
    >>> model.load_state_dict({"weight": [[1.0, 2.0]], "bias": [0.5]})
    Leftover(missing=[], unexpected=[], misshaped=[])
    >>> predict = nn.compile(model)
    >>> predict([[1.0, 1.0], [2.0, 0.0]])
    array([[3.5],
           [2.5]], dtype=float32)
    """
    if not isinstance(model, Module):
        raise DTypeError(f"compile: needs a module; got {type(model).__name__}")
    return Compiled(model)


class Compiled:
    """A module as a function of arrays; see compile."""

    def __init__(self, model: Module) -> None:
        self.model = model
        self._traces: dict[tuple, Trace] = {}

    def __repr__(self) -> str:
        return f"compile({self.model!r})"

    def __call__(self, *inputs: ArrayLike) -> Any:
        """Return the model's output for arrays (or tensors) as arrays."""
        arrays = [
            value.numpy() if isinstance(value, Tensor) else np.asarray(value) for value in inputs
        ]
        key = tuple((array.shape, array.dtype.kind in "fb") for array in arrays)
        trace = self._traces.get(key)
        if trace is None or not trace.is_current():
            trace = self._traces[key] = Trace(self.model, arrays)
            if len(self._traces) > MAX_TRACES:
                del self._traces[next(iter(self._traces))]
        return trace.run(arrays)


class Trace:
    """What a module records for inputs of certain shapes."""

    def __init__(self, model: Module, arrays: Sequence[np.ndarray]) -> None:
        if any(module.training for module in model.modules()):
            raise SettingError("compile: the model is in training mode; call model.eval() first")
        for buffer in model.buffers():
            buffer.settled().numpy()
        self.model = model
        tensors = [*model.parameters(), *model.buffers()]
        self.state = [(tensor, tensor._source) for tensor in tensors]
        self.device = tensors[0].device if tensors else resolve_device(None)
        self.limits: dict[Source, tuple[str, int]] = {}  # of integer inputs: an op, and its size
        frame = Frame(self.device)
        inputs = [make_tensor(array, device=self.device, op="compile") for array in arrays]
        self.kinds = [tensor._at[1].dtype for tensor in inputs]
        given = [tensor._source for tensor in inputs]
        with no_grad(), state.inside(frame, PLAIN):
            state.trace = self
            try:
                result = model(*inputs)
            finally:
                state.trace = None
        outputs: list[Tensor] = []
        self.structure = _flatten(result, outputs)
        nodes = tuple(node_in(tensor, frame) for tensor in outputs)
        self.specs = [(node.shape, node.dtype) for node in nodes]
        self.key = (nodes, (), (), None)
        self.sources = frame.sources
        self.places = [frame.sources.index(s) if s in frame.nodes else None for s in given]
        self.input_limits = [self.limits.get(s) for s in given]  # type: ignore[arg-type]

    def is_current(self) -> bool:
        """Tell whether the module still holds what it held, in evaluation mode."""
        return not self.model.training and all(t._source is s for t, s in self.state)

    def limit(self, op: str, indices: Tensor, size: int) -> None:
        """Note that an op takes these integers as indices below a size."""
        frame, node = indices._at
        while node.op.alias:
            node = node.inputs[0]
        if node.op is not SOURCE:
            raise PyggmlError(
                f"{op}: compile cannot check integers that the model computes; call the model "
                "itself, or compile a part of it"
            )
        source = indices._source or frame.sources[source_index(node)]
        _check_limit(source, op, size)
        if source not in self.limits or size < self.limits[source][1]:
            self.limits[source] = op, size

    def run(self, arrays: Sequence[np.ndarray]) -> Any:
        """Run what was recorded on other inputs."""
        device = self.device
        with device.lock:
            sources = self.sources.copy()
            for place, limit, array, kind in zip(
                self.places, self.input_limits, arrays, self.kinds, strict=True
            ):
                if place is not None:
                    array, _ = check_array(array, kind, op="compile")
                    sources[place] = Source(array.shape, kind, device, device.upload(array, kind))
                    if limit is not None:
                        _check_limit(sources[place], *limit)
            plan = device.plan_for(self.key, lambda: Program(self.key[0], (), ()))
            check_deadline()
            storages = plan.run(sources, ())
            results = [
                device.download(Source(shape, dtype, device, storage))
                for (shape, dtype), storage in zip(self.specs, storages, strict=True)
            ]
        return _rebuild(self.structure, results)


def _check_limit(source: Source, op: str, size: int) -> None:
    low, high = source.device.integer_range(source)
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise IndexRangeError(f"{op}: indices must be in [0, {size}); got {wrong}")


def _flatten(result: Any, outputs: list[Tensor]) -> Any:
    """Append the tensors in a result to outputs; return its structure, with their places."""
    if isinstance(result, Tensor):
        outputs.append(result)
        return len(outputs) - 1
    if isinstance(result, dict):
        return {name: _flatten(value, outputs) for name, value in result.items()}
    if type(result) in (tuple, list):
        return type(result)(_flatten(value, outputs) for value in result)
    raise PyggmlError(
        f"compile: the model must return tensors, or tuples, lists or dicts of them; got a "
        f"{type(result).__name__}"
    )


def _rebuild(structure: Any, results: list[np.ndarray]) -> Any:
    if isinstance(structure, int):
        return results[structure]
    if isinstance(structure, dict):
        return {name: _rebuild(value, results) for name, value in structure.items()}
    return type(structure)(_rebuild(value, results) for value in structure)
