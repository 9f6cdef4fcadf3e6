"""From pending values to a program, and from a program to a plan that is kept and run again.

A Program is the list of steps in the order in which they will run. A device compiles it to a Plan,
which is cached under the identity of the program's last nodes: the next step with the same
structure finds it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from . import graph
from .deadline import check_deadline
from .errors import StaleError
from .graph import Frame, Node, Source, source_index

if TYPE_CHECKING:
    from .tensor import Tensor


class Step:
    """One node to run, and the steps whose results it takes.

    A node of a checkpointed segment may have several steps: ``version`` 0 is the forward pass, the
    higher ones are its recomputations, one for each segment around it.
    """

    __slots__ = ("node", "inputs", "version")

    def __init__(self, node: Node, inputs: tuple[Step, ...] = (), version: int = 0) -> None:
        self.node = node
        self.inputs = inputs
        self.version = version

    def __repr__(self) -> str:
        return (
            f"Step({self.node}, version={self.version})" if self.version else f"Step({self.node})"
        )


Versioned = tuple[Node, int]
Segments = Callable[[Node], tuple[int, ...]]


def recorded_segments(node: Node) -> tuple[int, ...]:
    """Return the segments in which a node was recorded."""
    return node.mode.segment


class Program:
    """What one run does: sources and given values in, steps in order, outputs out, effects last.

    Effects are nodes that change sources in place (Op.mutates). They come after every other step,
    so whatever reads a parameter reads the value it was recorded with. Only an effect whose result
    another step takes stands before that; nothing else may read its source.

    Checkpointing (Griewank and Walther 2000; Chen et al. 2016) happens here, on finished nodes:
    what the backward pass reads from inside a segment is a later version of the node, whose step
    stands just before its first use. Values that cross the border of a segment are kept.
    """

    def __init__(
        self,
        outputs: Sequence[Node],
        effects: Sequence[Node],
        given: Sequence[Node],
        segments: Segments = recorded_segments,
    ) -> None:
        self.segments = segments
        made: dict[Versioned, Step] = {(node, 0): Step(node) for node in given}
        self.given = list(made.values())
        self.sources: list[tuple[int, Step]] = []
        self.steps: list[Step] = []
        self.effects: list[Step] = []
        order = graph_order([*outputs, *effects], stop=set(given))
        self._read = {parent for node in order for parent in node.inputs}
        self._kept = self._kept_versions(order, {*outputs, *effects, *given})
        for node in just_in_time(order, {*outputs, *effects}):
            if node.op is graph.SOURCE:
                step = made[node, 0] = Step(node)
                self.sources.append((source_index(node), step))
            elif (node, 0) not in made:
                self._emit((node, 0), made)
        self.outputs = [made[node, 0] for node in outputs]

    def _kept_versions(self, order: list[Node], kept: set[Node]) -> dict[Node, int]:
        """Return the version that the backward pass reads of each node in a segment.

        A node used outside of a segment, or held by somebody, is kept in the version outside of it.
        """
        versions = {}
        for node in order:
            if node.op is not graph.SOURCE and (path := self.segments(node)):
                versions[node] = 0 if node in kept else len(path)
        if versions:
            for node in order:
                for parent in node.inputs:
                    if parent in versions and not self._is_backward_of(node, parent):
                        common = self._common_segments(node, parent)
                        versions[parent] = min(versions[parent], common)
        return versions

    def _is_backward_of(self, node: Node, parent: Node) -> bool:
        """Tell whether a node belongs to the backward pass through a segment of its input."""
        return node.mode.backward and len(self.segments(node)) < len(self.segments(parent))

    def _common_segments(self, node: Node, parent: Node) -> int:
        """Return how many segments two nodes share."""
        mine, other = self.segments(node), self.segments(parent)
        count = 0
        while count < min(len(mine), len(other)) and mine[count] == other[count]:
            count += 1
        return count

    def _input_version(self, node: Node, version: int, parent: Node) -> int:
        kept = self._kept.get(parent, 0)
        if not kept or self._is_backward_of(node, parent):
            return kept
        return min(kept, version, self._common_segments(node, parent))

    def _emit(self, wanted: Versioned, made: dict[Versioned, Step]) -> None:
        """Append the step of a node, after those of the recomputed values that it reads."""
        missing = {wanted}
        stack = [wanted]
        while stack:
            node, version = stack.pop()
            for parent in node.inputs:
                key = (parent, self._input_version(node, version, parent))
                if key not in made and key not in missing:
                    missing.add(key)
                    stack.append(key)
        for node, version in sorted(missing, key=lambda item: item[0].order):
            inputs = tuple(made[i, self._input_version(node, version, i)] for i in node.inputs)
            step = made[node, version] = Step(node, inputs, version)
            is_last = node.op.mutates and node not in self._read
            (self.effects if is_last else self.steps).append(step)


class Plan(Protocol):
    """A compiled program."""

    @property
    def fallbacks(self) -> Sequence[Step]:
        """The steps that the device leaves to the CPU, in whole or in part."""

    def run(self, sources: Sequence[Source], given: Sequence[Source]) -> list[Any]:
        """Run once; return the storage of each output."""

    @property
    def working_bytes(self) -> int:
        """Memory for what lies between inputs and outputs."""

    @property
    def held_bytes(self) -> int:
        """Memory that the plan itself takes for as long as it is kept."""

    def close(self) -> None:
        """Free what the plan holds; harmless when repeated."""


def graph_order(roots: Iterable[Node], stop: Any = ()) -> list[Node]:
    """Return the roots and all that they depend on, inputs first, in the order of recording.

    Does not look behind ``stop``.
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


def just_in_time(order: list[Node], roots: set[Node]) -> list[Node]:
    """Return nodes with each just before its first use; roots keep their place.

    The order of recording alone will not do: a node may have been recorded long ago, for another
    program that has it in common with this one.
    """
    first_use: dict[Node, int] = {}
    for node in reversed(order):  # whoever uses a node comes before it here
        place = first_use.get(node, node.order)
        if node in roots:
            place = min(place, node.order)
        first_use[node] = place
        for parent in node.inputs:
            first_use[parent] = min(first_use.get(parent, place), place)
    return sorted(order, key=lambda node: (first_use[node], node.order))


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
    effects: tuple[Node, ...]  # those among them that change a source in place
    known: dict[Node, Source]  # nodes of living handles that have a value


def pending_in(frame: Frame, wanted: Tensor | None = None) -> Pending:
    """Return what somebody holds in a frame, computed or not."""
    handles: dict[Tensor, None] = {}  # a handle that changed its place is listed twice
    missing: dict[Node, None] = {}
    known: dict[Node, Source] = {}
    living = []
    count = len(frame.handles)  # another thread may append
    for reference in frame.handles[:count]:
        tensor = reference()
        if tensor is None or tensor._at[0] is not frame:
            continue
        living.append(reference)
        if tensor._source is None:
            handles[tensor] = None
            missing[tensor._at[1]] = None
        else:
            known[tensor._at[1]] = tensor._source
    frame.handles[:count] = living
    if wanted is not None and wanted._source is None and wanted._at[1] not in missing:
        handles[wanted] = None
        missing[wanted._at[1]] = None
    for node in known:  # a second handle of something that has been computed
        missing.pop(node, None)
    effects = tuple(node for node in missing if node.op.mutates)
    return Pending(list(handles), tuple(n for n in missing if not n.op.mutates), effects, known)


def evaluate(frame: Frame, wanted: Tensor | None = None, effects: tuple[Node, ...] = ()) -> None:
    """Compute what is pending in a frame and held by somebody, then apply effects, in one run.

    Handles keep their place on the tape as long as one of them can be differentiated; then, or
    after effects, the frame ends.
    """
    with frame.device.lock:
        if wanted is not None and wanted._source is not None:
            return  # another thread was here first
        if frame.ended:
            raise StaleError(f"this value cannot be computed any more: {frame.ended}")
        try:
            _evaluate(frame, wanted, effects)
        except BaseException:
            graph.state.leave(frame)  # what failed stays pending; new ops do not wait for it
            raise


def _evaluate(frame: Frame, wanted: Tensor | None, effects: tuple[Node, ...]) -> None:
    handles, missing, pending_effects, known = pending_in(frame, wanted)
    frame.check_current((*missing, *pending_effects, *effects))
    interrupt: BaseException | None = None
    if graph.state.tracing and frame.lines is not None:
        check_finite(frame, (*missing, *pending_effects, *effects), known)
    all_effects = (*pending_effects, *effects)
    if missing or all_effects:
        storages, interrupt = run_counting_changes(frame, missing, all_effects, known)
        for node, storage in zip(missing, storages, strict=True):
            known[node] = Source(node.shape, node.dtype, frame.device, storage)
    for node in pending_effects:
        known[node] = frame.sources[source_index(node.inputs[node.op.mutates[0]])]
    for tensor in handles:
        tensor._source = known[tensor._at[1]]
        if tensor._at[1].op.mutates:  # a leaf again, that holds nothing of this tape
            tensor._take_place(tensor._source)

    if effects:
        frame.end("its parameters have been updated since")
    elif not any(node.requires_grad for node in known):
        frame.end("it was computed outside of a tape")
    elif frame.tape_closed:
        graph.state.leave(frame)  # its handles keep it for ag.backward; new ops start a new one
    if interrupt is not None:
        raise interrupt


def run_counting_changes(
    frame: Frame, outputs: tuple[Node, ...], effects: tuple[Node, ...], known: dict[Node, Source]
) -> tuple[Sequence[Any], BaseException | None]:
    """Run a program, and let the versions of the sources tell of its effects whatever happens.

    A run that is stopped before its first effect has changed nothing. Ctrl-C after that finds it
    complete: then the exception is returned with the outputs, to be raised when they are in their
    places. Versions grow before the run, so that no value can be computed from newer parameters
    than it was recorded with.
    """
    interrupt = None
    changed = _mutated_sources(effects)
    graph.settle_pinned([frame.sources[index] for index in changed], frame)
    frame.device.has_committed = False
    for index in changed:
        frame.sources[index].version += 1
    try:
        storages: Sequence[Any] = run(frame, outputs, effects, known)
    except BaseException as exception:
        storages, frame.device.outputs = frame.device.outputs, ()
        if not frame.device.has_committed:
            for index in changed:
                frame.sources[index].version -= 1
            raise
        if len(storages) != len(outputs):
            raise
        interrupt = exception
    for index in changed:
        frame.versions[index] += 1  # the change is this frame's own
    return storages, interrupt


def run(
    frame: Frame, outputs: tuple[Node, ...], effects: tuple[Node, ...], known: dict[Node, Source]
) -> list[Any]:
    """Run one program on a frame's sources; return the storage of each output."""
    device, given = frame.device, tuple(known)
    key = (outputs, effects, given, frame.memory_budget)
    with device.lock:
        plan = device.plan_for(key, lambda: program_for(frame, outputs, effects, given))
        check_deadline()
        return plan.run(frame.sources, tuple(known.values()))


def program_for(
    frame: Frame, outputs: tuple[Node, ...], effects: tuple[Node, ...], given: tuple[Node, ...]
) -> Program:
    """Return the program for a frame: as recorded, or fitted to its tape's memory budget."""
    if frame.memory_budget is None:
        return Program(outputs, effects, given)
    return fit_to_budget(outputs, effects, given, frame.memory_budget, frame.device)


# At the end: both are built on the above.
from .anomaly import check_finite  # noqa: E402
from .remat import fit_to_budget  # noqa: E402
