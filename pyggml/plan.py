"""From pending values to a program, and from a program to a plan that is kept and run again.

A Program is the list of steps in the order in which they will run. A device compiles it to a Plan,
which is cached under the identity of the program's last nodes: the next step with the same
structure finds it at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

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


def evaluate(frame: Frame, wanted: Tensor | None = None, effects: tuple[Node, ...] = ()) -> None:
    """Compute what is pending in a frame and held by somebody, then apply effects; everything in
    one run.

    Handles keep their place on the tape as long as one of them can be differentiated; then, or
    after effects, the frame ends.
    """
    frame.check_current()
    handles: list[Tensor] = []
    outputs: dict[Node, Source | None] = {}
    given: dict[Node, Source] = {}
    living = []
    for reference in frame.handles:
        tensor = reference()
        if tensor is None:
            continue
        living.append(reference)
        if tensor._source is None:
            handles.append(tensor)
            outputs[tensor._at[1]] = None
        else:
            given[tensor._at[1]] = tensor._source
    if wanted is not None and wanted._source is None and wanted._at[1] not in outputs:
        handles.append(wanted)
        outputs[wanted._at[1]] = None
    for node in given:
        if node in outputs:  # a second handle of something that has been computed
            outputs[node] = given[node]

    device = frame.device
    missing = tuple(node for node, source in outputs.items() if source is None)
    if missing or effects:
        key = (missing, effects, tuple(given))
        with device.lock:
            plan = device.plan_for(key, lambda: Program(missing, effects, tuple(given)))
            storages = plan.run(frame.sources, tuple(given.values()))
        for node, storage in zip(missing, storages, strict=True):
            outputs[node] = Source(node.shape, node.dtype, device, storage)
    for tensor in handles:
        tensor._source = outputs[tensor._at[1]]

    if effects:
        for index in _mutated_sources(effects):
            frame.sources[index].version += 1
        frame.end("its parameters have been updated since")
        return
    frame.handles = living
    if not any(node.requires_grad for node in (*outputs, *given)):
        frame.end("it was computed outside of a tape")


__all__ = ["Plan", "Program", "Step", "evaluate", "graph_order"]
