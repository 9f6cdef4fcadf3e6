"""Choose what to recompute so that a recorded program fits a memory budget.

The method is the budgeted segmentation of Chen et al. (2016, "Training deep nets with sublinear
memory cost", algorithm 3): walk the forward pass in order, close a segment whenever the values in
it exceed a limit, and search over limits. Two things differ. Every candidate is judged by the peak
that ggml's own allocator plans for it, not by an estimate; and the candidates include those that
recompute only cheap ops and keep the results of products (selective recomputation, Korthikanti et
al. 2022). Of those that fit, the one with the least repeated work is taken.

It is a search over some twenty candidates, not an optimum: an integer program (Jain et al. 2020,
"Checkmate") can find better plans for irregular graphs, at minutes instead of milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isqrt, prod
from typing import TYPE_CHECKING

from . import graph
from .errors import MemoryBudgetError
from .graph import Budget, Node
from .plan import Program, Segments, graph_order, recorded_segments

if TYPE_CHECKING:
    from .device import Device

LIMITS = 16  # how many segment sizes are tried


def size_of(node: Node) -> int:
    """Return the bytes of a node's value."""
    return prod(node.shape) * node.dtype.size


def work_of(node: Node) -> int:
    """Return roughly how many elementary operations a node takes."""
    if node.op.alias:
        return 0
    if node.op.work is not None:
        return node.op.work(node, *node.inputs)
    if node.op.is_product:
        return 2 * prod(node.shape) * node.inputs[0].shape[-1]
    return 2 * max(prod(value.shape) for value in (node, *node.inputs))


def fit_to_budget(
    outputs: Sequence[Node],
    effects: Sequence[Node],
    given: Sequence[Node],
    budget: Budget,
    device: Device,
) -> Program:
    """Return the program whose planned working memory fits the budget with the least extra work.

    Raises MemoryBudgetError, with the smallest budget that would do, if none fits.
    """

    def program(segments: Segments) -> Program:
        return Program(outputs, effects, given, segments)

    order = graph_order([*outputs, *effects], stop=set(given))
    forward = _forward_nodes(order)
    if budget == "sqrt":
        count = isqrt(len(forward))
        return program(_cut(forward, sum(map(size_of, forward)) // max(count, 1)))
    best: tuple[int, Program] | None = None
    smallest: int | None = None
    for segments in _candidates(forward):
        candidate = program(segments)
        peak = device.working_bytes(candidate)
        smallest = peak if smallest is None else min(smallest, peak)
        extra = sum(work_of(step.node) for step in candidate.steps if step.version)
        if peak <= budget and (best is None or extra < best[0]):
            best = extra, candidate
            if not extra:
                break  # the plain program fits
    if best is None:
        raise MemoryBudgetError(
            f"memory_budget: no plan fits in {budget:,} bytes; the smallest that was found needs "
            f"{smallest:,}"
        )
    return best[1]


def _forward_nodes(order: list[Node]) -> list[Node]:
    """Return the nodes of the forward pass: those before any gradient, an update's among them."""
    later: set[Node] = set()
    for node in order:
        if node.mode.backward or node.op.mutates or any(i in later for i in node.inputs):
            later.add(node)
    return [node for node in order if node.op is not graph.SOURCE and node not in later]


def _candidates(forward: list[Node]) -> Iterator[Segments]:
    yield recorded_segments
    yield _between_products(forward)
    total = sum(map(size_of, forward))
    for i in range(1, LIMITS + 1):
        yield _cut(forward, int(total * (i / LIMITS) ** 2))
    yield _cut(forward, total // max(isqrt(len(forward)), 1))


def _cut(forward: list[Node], limit: int) -> Segments:
    """Return segments of consecutive nodes, each closed as soon as its values exceed the limit.

    The last one is not recomputed: the backward pass needs it at once.
    """
    numbers: dict[Node, int] = {}
    number, held = 1, 0
    for node in forward:
        numbers[node] = number
        held += 0 if node.op.alias else size_of(node)
        if held > limit:
            number, held = number + 1, 0
    last = max(numbers.values(), default=0)
    return lambda node: _nested(node, numbers.get(node, last), last)


def _nested(node: Node, number: int, last: int) -> tuple[int, ...]:
    """Put what the user checkpointed inside of the segment that was chosen; ours are negative."""
    own = node.mode.segment
    return own if number == last or node.mode.backward else (-number, *own)


def _between_products(forward: list[Node]) -> Segments:
    """Return segments that recompute everything but products, which are kept."""
    numbers: dict[Node, int] = {}
    number = 1
    for node in forward:
        if node.op.is_product:
            number += 1
        else:
            numbers[node] = number
    return lambda node: _nested(node, numbers.get(node, 0), 0)
