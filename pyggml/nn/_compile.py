"""A module as a plain function of arrays, recorded once for each shape of its inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import is_
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..autograd import no_grad
from ..deadline import check_deadline
from ..device import resolve_device
from ..errors import DTypeError, PyggmlError, SettingError
from ..graph import PLAIN, Frame, state
from ..plan import Program
from ..tensor import Tensor, node_in
from ..trace import Trace, Traces, value_of
from ._module import Module


def compile(model: Module) -> Compiled:
    """Return a module, in evaluation mode, as a quick function of arrays.

    The function records the model once for each combination of input shapes, and from then on only
    runs what was recorded, with the values that parameters and buffers have at that moment. It
    takes arrays and returns arrays, in the structure that the model returns: one, a tuple, a list
    or a dict. No gradient flows through it.

    So the Python code of ``forward`` runs once for a shape, and again when an attribute of a module
    has been replaced. Raises SettingError for a model in training mode, and PyggmlError for one
    that draws random numbers, changes a buffer, or reads a value.

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
        self._traces = Traces()

    def __repr__(self) -> str:
        return f"compile({self.model!r})"

    def __call__(self, *inputs: ArrayLike) -> Any:
        """Return the model's output for arrays (or tensors) as arrays."""
        arrays, key, trace = self._traces.find(inputs)
        if trace is None:
            trace = self._traces.keep(key, ModuleTrace(self.model, arrays))
        return trace.run(arrays)


class ModuleTrace(Trace):
    """What a module records for inputs of certain shapes."""

    def __init__(self, model: Module, arrays: Sequence[np.ndarray]) -> None:
        if any(module.training for module in model.modules()):
            raise SettingError("compile: the model is in training mode; call model.eval() first")
        for buffer in model.buffers():
            buffer.settled().numpy()
        tensors = [*model.parameters(), *model.buffers()]
        self.held = [(tensor, tensor._source) for tensor in tensors]
        super().__init__(arrays, tensors[0].device if tensors else resolve_device(None))
        frame = Frame(self.device)
        try:
            with no_grad(), state.inside(frame, PLAIN), self:
                result = model(*self.inputs)
        finally:
            state.leave(frame)  # nothing else is to be recorded there
        outputs: list[Tensor] = []
        self.structure = _flatten(result, outputs)
        self.outputs = tuple(node_in(tensor, frame) for tensor in outputs)
        self.close(frame)
        self.members = Members(model.modules())

    def is_current(self) -> bool:
        """Tell whether the module still holds what it held, in evaluation mode."""
        held = all(tensor._source is source for tensor, source in self.held)
        return held and self.members.are_current()

    def run(self, arrays: Sequence[np.ndarray]) -> Any:
        """Run what was recorded on other inputs."""
        device, outputs = self.device, self.outputs
        with device.lock:
            sources = self.sources_for(arrays)
            plan = device.plan_for((outputs, (), (), None), lambda: Program(outputs, (), ()))
            check_deadline()
            storages = plan.run(sources, ())
            results = [
                value_of(node, storage, device)
                for node, storage in zip(outputs, storages, strict=True)
            ]
        return _rebuild(self.structure, results)


class Members:
    """What modules have as attributes at a moment, and in lists, tuples and dicts of parts."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self._views: list[tuple[Collection[Any], list[Any]]] = []  # of each: live, and as it was
        containers: list[Any] = [vars(module) for module in modules]
        for container in containers:
            live = container.values() if isinstance(container, dict) else container
            self._views.append((live, list(live)))
            inner = (value for value in live if isinstance(value, (list, tuple, dict)))
            containers.extend(value for value in inner if _holds_parts(value))

    def are_current(self) -> bool:
        """Tell whether the modules have the same ones still."""
        return all(
            len(live) == len(known) and all(map(is_, live, known)) for live, known in self._views
        )


def _holds_parts(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)):
        return any(map(_holds_parts, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (Module, Tensor))


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
