"""From pending values to a program, and from a program to a plan that is kept and run again.

A Program is the list of steps in the order in which they will run. A device compiles it to a Plan,
which is cached under the identity of the program's last nodes: the next step with the same
structure finds it at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from . import graph
from .graph import Frame, Node, Source, source_index

if TYPE_CHECKING:
    from .tensor import Tensor


class Step:
    """One node to run, and the steps whose results it takes."""

    __slots__ = ("node", "inputs")

    def __init__(self, node: Node, inputs: tuple[Step, ...] = ()) -> None:
        self.node = node
        self.inputs = inputs

    def __repr__(self) -> str:
        return f"Step({self.node})"


class Program:
    """What one run does: sources and given values in, steps in order, outputs out, effects last.

    Effects are nodes that change sources in place (Op.mutates). They come after every other step,
    so whatever reads a parameter reads the value it was recorded with.
    """

    def __init__(
        self, outputs: Sequence[Node], effects: Sequence[Node], given: Sequence[Node]
    ) -> None:
        made: dict[Node, Step] = {node: Step(node) for node in given}
        self.given = list(made.values())
        self.sources: list[tuple[int, Step]] = []
        self.steps: list[Step] = []
        self.effects: list[Step] = []
        for node in graph_order([*outputs, *effects], stop=made):
            if node.op is graph.SOURCE:
                step = made[node] = Step(node)
                self.sources.append((source_index(node), step))
            elif node not in made:
                step = made[node] = Step(node, tuple(made[i] for i in node.inputs))
                (self.effects if node.op.mutates else self.steps).append(step)
        self.outputs = [made[node] for node in outputs]


class Plan(Protocol):
    """A compiled program."""

    def run(self, sources: Sequence[Source], given: Sequence[Source]) -> list[Any]:
        """Run once; return the storage of each output."""

    @property
    def working_bytes(self) -> int:
        """Memory for what lies between inputs and outputs."""

    def close(self) -> None:
        """Free what the plan holds; harmless when repeated."""


def graph_order(roots: Iterable[Node], stop: Any = ()) -> list[Node]:
    """Return the roots and all that they depend on, inputs first, in the order of recording; do not
    look behind ``stop``.
    """
    seen = set(roots)
    stack = list(seen)
    while stack:
        node = stack.pop()
        if node in stop:
            continue
        for parent in node.inputs:
            if parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return sorted(seen, key=_order_of)


def _order_of(node: Node) -> int:
    return node.order


_mutated = graph.DerivedCache()


def _mutated_sources(effects: tuple[Node, ...]) -> tuple[int, ...]:
    """Return the numbers of the sources that effects change."""
    found = _mutated.get(effects)
    if found is None:
        found = _mutated[effects] = tuple(
            source_index(node.inputs[i]) for node in effects for i in node.op.mutates
        )
    return found


class Pending(NamedTuple):
    """What a run of a frame would compute, and from what."""

    handles: list[Tensor]  # those without a value
    missing: tuple[Node, ...]  # the nodes to compute
    known: dict[Node, Source]  # nodes of living handles that have a value


def pending_in(frame: Frame, wanted: Tensor | None = None) -> Pending:
    """Return what somebody holds in a frame, computed or not."""
    handles: list[Tensor] = []
    missing: dict[Node, None] = {}
    known: dict[Node, Source] = {}
    living = []
    for reference in frame.handles:
        tensor = reference()
        if tensor is None:
            continue
        living.append(reference)
        if tensor._source is None:
            handles.append(tensor)
            missing[tensor._at[1]] = None
        else:
            known[tensor._at[1]] = tensor._source
    frame.handles = living
    if wanted is not None and wanted._source is None and wanted._at[1] not in missing:
        handles.append(wanted)
        missing[wanted._at[1]] = None
    for node in known:  # a second handle of something that has been computed
        missing.pop(node, None)
    return Pending(handles, tuple(missing), known)


def evaluate(frame: Frame, wanted: Tensor | None = None, effects: tuple[Node, ...] = ()) -> None:
    """Compute what is pending in a frame and held by somebody, then apply effects, in one run.

    Handles keep their place on the tape as long as one of them can be differentiated; then, or
    after effects, the frame ends.
    """
    frame.check_current()
    handles, missing, known = pending_in(frame, wanted)
    if frame.lines is not None:
        check_finite(frame, (*missing, *effects), known)
    if missing or effects:
        storages = run(frame, missing, effects, known)
        for node, storage in zip(missing, storages, strict=True):
            known[node] = Source(node.shape, node.dtype, frame.device, storage)
    for tensor in handles:
        tensor._source = known[tensor._at[1]]

    if effects:
        for index in _mutated_sources(effects):
            frame.sources[index].version += 1
        frame.end("its parameters have been updated since")
    elif not any(node.requires_grad for node in known):
        frame.end("it was computed outside of a tape")


def run(
    frame: Frame, outputs: tuple[Node, ...], effects: tuple[Node, ...], known: dict[Node, Source]
) -> list[Any]:
    """Run one program on a frame's sources; return the storage of each output."""
    device = frame.device
    given = tuple(known)
    with device.lock:
        plan = device.plan_for((outputs, effects, given), lambda: Program(outputs, effects, given))
        return plan.run(frame.sources, tuple(known.values()))


from .anomaly import check_finite  # noqa: E402  (at the end: it is built on run)
