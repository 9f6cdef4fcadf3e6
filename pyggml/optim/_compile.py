"""A training step as a quick function of arrays, recorded once for each shape of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from ..autograd import grad_tape, leaf_gradients
from ..checks import need_function
from ..deadline import check_deadline
from ..dtypes import float32, int32
from ..errors import DTypeError, GradError, SettingError, ShapeError
from ..graph import Frame, Node, Source, source_index, state
from ..nn._compile import Members
from ..plan import run_counting_changes
from ..tensor import Tensor, make_tensor, node_in, passing
from ..trace import Trace, Traces, value_of
from ._optimizer import Optimizer

if TYPE_CHECKING:
    from ..nn._module import Buffer
    from ..random import Generator


def compile(loss: Callable[..., Tensor], optimizer: Optimizer) -> CompiledStep:
    """Return a whole training step as a quick function of arrays.

    ``loss`` takes tensors and returns a loss of one element. The function takes arrays in their
    place, does the forward pass, the backward pass and the update, and returns the loss as a float:
    what a loop does with a tape, ag.backward and optimizer.step(), to the last bit. ``loss`` is
    called once for each combination of input shapes; from then on what it recorded is run, which
    leaves a fraction of Python's part of a small step. Learning rates and schedules, dropout's
    masks, and running statistics go on as ever; .grad is left alone.

    So the Python code of ``loss`` runs once for a shape, and again when an attribute of a module
    that it calls has been replaced. Raises SettingError for an optimizer that accumulates, clips by
    the norm or scales the loss, and PyggmlError for a ``loss`` that reads a value or draws random
    numbers other than dropout's.

    >>> model = nn.Linear(1, 1)
    >>> opt = optim.Adam(model.parameters(), lr=0.1)
    >>> step = optim.compile(lambda x, y: ag.mse_loss(model(x), y), opt)
    >>> x = np.linspace(-1, 1, 32).reshape(-1, 1)
    >>> for _ in range(300):
    ...     loss = step(x, 3 * x)
    >>> loss < 1e-6, opt.t
    (True, 300)
    """
    need_function("compile", "loss", loss)
    if not isinstance(optimizer, Optimizer):
        raise DTypeError(f"compile: needs an optimizer; got {type(optimizer).__name__}")
    _check_settings(optimizer)
    return CompiledStep(loss, optimizer)


def _check_settings(optimizer: Optimizer) -> None:
    """Raise SettingError for settings that need more than one run."""
    for name, plain in (("accumulate_steps", 1), ("clip_norm", None), ("loss_scale", None)):
        if getattr(optimizer, name) != plain:
            raise SettingError(
                f"compile: cannot make one run of a step with {name}="
                f"{getattr(optimizer, name)!r}; use a loop with a tape"
            )


class CompiledStep:
    """A training step as a function of arrays; see compile."""

    def __init__(self, loss: Callable[..., Tensor], optimizer: Optimizer) -> None:
        self.loss = loss
        self.optimizer = optimizer
        self._traces = Traces()

    def __repr__(self) -> str:
        return f"compile({self.loss!r}, {self.optimizer!r})"

    def __call__(self, *inputs: ArrayLike) -> float:
        """Train on one batch of arrays (or tensors) and return its loss."""
        arrays, key, trace = self._traces.find(inputs)
        found = None if trace is None else trace.run(arrays)
        if found is None:
            trace = self._traces.keep(key, StepTrace(self.loss, self.optimizer, arrays))
            found = trace.run(arrays)
        return found


class StepTrace(Trace):
    """What a loss, its gradients and an update record for inputs of certain shapes."""

    def __init__(
        self, loss: Callable[..., Tensor], optimizer: Optimizer, arrays: Sequence[np.ndarray]
    ) -> None:
        _check_settings(optimizer)
        super().__init__(arrays, optimizer.params[0].device)
        self.optimizer = optimizer
        self._draws: list[tuple[Source, Generator]] = []
        self._buffers: dict[Buffer, Source] = {}  # what they held before the trace
        self._after: list[Callable[[], None]] = []
        try:
            with grad_tape(), self:
                frame = state.new_frame(self.device)
                value = loss(*self.inputs)
            nodes = self._record(frame, value)
            buffers = [(buffer, node_in(buffer, frame)) for buffer in self._buffers]
            self.close(frame)
        finally:
            for buffer, source in self._buffers.items():
                buffer._take_place(source)
            state.leave(frame)
        self.outputs = (nodes, *(node for _, node in buffers))
        self.keys = [(source_index(frame.nodes[source]), g) for source, g in self._draws]
        self.buffers = [
            (buffer, source_index(frame.nodes[source]) if source in frame.nodes else None)
            for buffer, source in self._buffers.items()
        ]
        halves = [p for p, _ in self.pairs if p._at[1].dtype.is_half]
        self.masters = [(source_index(frame.nodes[optimizer._master_of(p)]), p) for p in halves]
        self.held = [(p, p._source, p.requires_grad) for p in optimizer.params]
        used = [(source.owner(), source) for source in frame.sources if source.owner is not None]
        self.used = [(tensor, source) for tensor, source in used if tensor is not None]
        self.members = Members(self.called.values())
        buffers_read = (b for module in self.called.values() for b in module.buffers())
        rest = [buffer for buffer in buffers_read if buffer not in self._buffers]
        self.used += [(buffer, buffer._materialized()) for buffer in rest]
        self.states = [(p, optimizer._state[p]) for p, _ in self.pairs]
        self.settings = self._settings()

    def _settings(self) -> tuple[Any, ...]:
        """Return the optimizer's settings that are part of what is recorded."""
        o = self.optimizer
        return o.clip_value, o.decays, o.clip_norm, o.loss_scale, o.accumulate_steps

    def _record(self, frame: Frame, value: Tensor) -> Node:
        """Record gradients and update of a loss; return its node."""
        if not isinstance(value, Tensor) or value.size != 1:
            shape = f"shape {value.shape}" if isinstance(value, Tensor) else type(value).__name__
            raise ShapeError(f"compile: the loss must be a tensor of one element; got {shape}")
        gradients = dict(leaf_gradients("compile", value)[1])
        params = [p for p in self.optimizer.params if p in gradients]
        self.pairs = [(p, passing(gradients[p], frame)) for p in params]
        if not self.pairs:
            raise GradError("compile: the loss depends on no parameter of the optimizer")
        self.effects, table, self.rows = self.optimizer._effects_of(frame, self.pairs, 1.0)
        self.table_place = source_index(table)
        return node_in(value, frame)

    # ---- what ops tell ----

    def key_of(self, generator: Generator) -> Tensor:
        key = make_tensor(np.zeros(4, np.int32), dtype=int32, device=self.device)
        assert key._source is not None
        self._draws.append((key._source, generator))
        return key

    def note_buffer(self, buffer: Buffer) -> None:
        if buffer not in self._buffers:
            state.trace = None
            source = buffer.settled()._materialized()
            state.trace = self
            self._buffers[buffer] = source

    def after_run(self, function: Callable[[], None]) -> None:
        self._after.append(function)

    # ---- runs ----

    def is_current(self) -> bool:
        """Tell whether parameters and optimizer hold what they held, with settings of one kind."""
        optimizer = self.optimizer
        return (
            all(tensor._source is source for tensor, source in self.used)
            and all(p._source is s and p.requires_grad is free for p, s, free in self.held)
            and all(optimizer._state.get(p) is states for p, states in self.states)
            and all(buffer.device is self.device for buffer, _ in self.buffers)
            and self._settings() == self.settings
            and self.members.are_current()
        )

    def run(self, arrays: Sequence[np.ndarray]) -> float | None:
        """Train on other inputs; return the loss.

        None if the optimizer's counts of updates have grown apart, and nothing was done.
        """
        device, optimizer = self.device, self.optimizer
        with device.lock:
            table, _, rows = optimizer._table(self.pairs, device.numpy_dtype(float32).type)
            if rows != self.rows:
                return None
            frame = Frame(device)
            sources = frame.sources = self.sources_for(arrays)
            uploaded = device.upload(table, float32)
            sources[self.table_place] = Source(table.shape, float32, device, uploaded)
            for place, generator in self.keys:
                key = generator.key()
                sources[place] = Source(key.shape, int32, device, device.upload(key, int32))
            for place, parameter in self.masters:
                sources[place] = optimizer._master_of(parameter)
            for buffer, where in self.buffers:
                if where is not None:
                    sources[where] = buffer.settled()._materialized()
            frame.versions = [source.version for source in sources]
            check_deadline()
            storages, interrupt = optimizer._run_counted(
                self.pairs, lambda: run_counting_changes(frame, self.outputs, self.effects, {})
            )
            for (buffer, _), node, storage in zip(
                self.buffers, self.outputs[1:], storages[1:], strict=True
            ):
                buffer._take_place(Source(node.shape, node.dtype, device, storage))
            for function in self._after:
                function()
            if interrupt is not None:
                raise interrupt
            return float(value_of(self.outputs[0], storages[0], device).item())
