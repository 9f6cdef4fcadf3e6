"""What will run and what it will cost: the plan behind pending values, in words and drawn."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .checks import shown
from .errors import DTypeError, PyggmlError
from .graph import SOURCE, Frame, Node
from .plan import Program, Step, pending_in, program_for
from .remat import size_of
from .tensor import Parameter, Tensor


@dataclass(frozen=True)
class OpLine:
    """One step of the graph."""

    name: str
    shape: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    device: str


@dataclass(frozen=True)
class PlanReport:
    """The graph that a run of pending values executes.

    ``bytes`` has the planned memory by purpose: parameters, inputs (data and optimizer state),
    gradients (values that are some leaf's .grad), outputs (other values that somebody holds), and
    activations: the working buffer for everything in between, in which values share space.
    ``fallbacks`` lists the ops that the device cannot run, in whole or in part, and that the CPU
    takes.
    """

    device: str
    ops: list[OpLine]
    bytes: dict[str, int]
    fallbacks: list[OpLine]
    _steps: list[Step] = field(repr=False, default_factory=list)

    def __str__(self) -> str:
        counts = Counter(line.name for line in self.ops)
        listed = ", ".join(f"{name} {count}" for name, count in counts.most_common())
        sizes = ", ".join(f"{name} {size:,}" for name, size in self.bytes.items())
        fallen = ", ".join(sorted({line.name for line in self.fallbacks})) or "none"
        return (
            f"{len(self.ops)} ops on {self.device}: {listed}\n"
            f"bytes: {sizes}\n"
            f"ops that fall back to the CPU: {fallen}"
        )

    def draw(self) -> Any:
        """Return the graph as a graphviz.Digraph: shown by notebooks, .render() writes a file.

        Needs the package graphviz, and its program dot to render.
        """
        try:
            import graphviz
        except ImportError:
            raise PyggmlError("draw: needs the package graphviz: pip install graphviz") from None
        drawing = graphviz.Digraph("plan", node_attr={"shape": "box", "fontname": "sans-serif"})
        names: dict[Step, str] = {}

        def name_of(step: Step) -> str:
            if step not in names:
                names[step] = f"n{len(names)}"
                is_source = step.node.op is SOURCE
                kind = "parameter" if step.node.requires_grad else "input"
                label = f"{kind if is_source else step.node.op.name}\n{list(step.node.shape)}"
                style = {"style": "rounded"} if is_source else {}
                drawing.node(names[step], label, **style)
            return names[step]

        for step in self._steps:
            for parent in step.inputs:
                drawing.edge(name_of(parent), name_of(step))
        return drawing


def _waiting(op: str, values: tuple[Tensor, ...]) -> tuple[Frame, Program, list[Tensor]]:
    """Return the frame of pending values, the program that a run of it is, and all its handles."""
    for value in values:
        if not isinstance(value, Tensor):
            raise DTypeError(f"{op}: needs tensors; got {shown(value)}")
    waiting = [value for value in values if value._source is None]
    if not waiting:
        raise PyggmlError(f"{op}: nothing is pending; call it before the value is computed")
    frame = waiting[0]._at[0]
    if any(value._at[0] is not frame for value in waiting):
        raise PyggmlError(f"{op}: these values are on several tapes; report on one at a time")
    handles, missing, effects, known = pending_in(frame, waiting[0])
    return frame, program_for(frame, missing, effects, tuple(known)), handles


def plan_report(*values: Tensor) -> PlanReport:
    """Report on the graph that looking at pending values would run.

    The run computes everything pending that somebody holds on the same tape, gradients included, so
    call this after ag.backward to see a whole step. Raises PyggmlError if nothing is pending.

    >>> w = ag.param(np.ones((2, 3)))
    >>> with ag.grad_tape():
    ...     loss = ag.mean(w)
    >>> grads = ag.backward(loss)
    >>> report = ag.plan_report(loss)
    >>> report.bytes["parameters"], report.bytes["gradients"], report.fallbacks
    (24, 24, [])
    """
    frame, program, handles = _waiting("plan_report", values)
    device = frame.device

    owners = [source.owner() if source.owner is not None else None for source in frame.sources]
    gradients = {id(owner.grad) for owner in owners if owner is not None}
    gradient_nodes = {handle._at[1] for handle in handles if id(handle) in gradients}
    accumulated = {s.inputs[0].node for s in program.effects}  # gradients that grow in place
    sizes = dict.fromkeys(("parameters", "inputs", "gradients", "outputs"), 0)
    for index, step in program.sources:
        is_parameter = isinstance(owners[index], Parameter) or step.node.requires_grad
        kind = "gradients" if step.node in accumulated else "inputs"
        sizes["parameters" if is_parameter else kind] += size_of(step.node)
    for step in program.given:
        sizes["inputs"] += size_of(step.node)
    for step in program.outputs:
        sizes["gradients" if step.node in gradient_nodes else "outputs"] += size_of(step.node)
    sizes["activations"] = device.working_bytes(program)
    fallen = set(device.fallbacks(program))

    def line(s: Step) -> OpLine:
        where = "cpu" if s in fallen else device.name
        return OpLine(s.node.op.name, s.node.shape, tuple(i.node.shape for i in s.inputs), where)

    steps = (*program.steps, *program.effects)
    fallbacks = [line(step) for step in steps if step in fallen]
    return PlanReport(device.name, [line(s) for s in steps], sizes, fallbacks, program.steps)


@dataclass(frozen=True)
class SavedTensor:
    """A value of the forward pass that is kept for the backward pass."""

    op: str
    shape: tuple[int, ...]
    bytes: int
    line: str


def saved_tensors(*values: Tensor) -> list[SavedTensor]:
    """List what the forward pass of pending values keeps for their backward pass.

    Call it after ag.backward and before the values are computed. Parameters and data are not
    listed: they are there anyway. The line is where a structure was recorded first.

    >>> w = ag.param(np.ones((2, 3)))
    >>> with ag.grad_tape():
    ...     loss = ag.sum(ag.relu(w * 2.0))
    >>> grads = ag.backward(loss)
    >>> [(kept.op, kept.bytes) for kept in ag.saved_tensors(loss)]
    [('relu', 24)]
    """
    program = _waiting("saved_tensors", values)[1]
    kept: dict[Node, None] = {}
    for step in program.steps:
        if step.version or step.node.mode.backward:
            for kept_step in step.inputs:
                while kept_step.node.op.alias:
                    kept_step = kept_step.inputs[0]
                node = kept_step.node
                if node.inputs and not kept_step.version and not node.mode.backward:
                    kept[node] = None
    return [SavedTensor(n.op.name, n.shape, size_of(n), f"{n.line[0]}:{n.line[1]}") for n in kept]
