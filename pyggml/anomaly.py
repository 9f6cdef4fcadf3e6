"""Find the first NaN or infinity: its op, its shapes, and the line that recorded it."""

from __future__ import annotations

import linecache

import numpy as np

from .errors import AnomalyError
from .graph import SOURCE, Frame, Node, Source, state


class detect_anomaly:
    """Check every result inside for NaN and infinity, and raise AnomalyError at the first.

    Slow: each run computes all values once more and keeps them. Nothing is updated by a step that
    fails the check.

    >>> with ag.detect_anomaly():
    ...     y = ag.log(ag.tensor([1.0, -1.0]))
    ...     y.numpy()
    Traceback (most recent call last):
    pyggml.errors.AnomalyError: detect_anomaly: log made nan at index (1,) of its result...
    """

    def __enter__(self) -> detect_anomaly:
        state.tracing += 1
        for frame in state.frames.values():
            if frame.lines is None:
                frame.lines = {}
        return self

    def __exit__(self, *error: object) -> None:
        state.tracing -= 1
        if not state.tracing:
            for frame in state.frames.values():
                frame.lines = None


def _place(frame: Frame, node: Node) -> str:
    """Return where a node was recorded, in words."""
    if frame.lines is None or node not in frame.lines:
        return "a line outside of detect_anomaly"
    file, line, rule_of = frame.lines[node]
    code = linecache.getline(file, line).strip()
    place = f"{file}:{line}: {code}" if code else f"{file}:{line}"
    if rule_of is None:
        return place
    return f"{place} (in the gradient of {rule_of.op.name}, recorded at {_place(frame, rule_of)})"


def check_finite(frame: Frame, roots: tuple[Node, ...], known: dict[Node, Source]) -> None:
    """Raise AnomalyError at the first node with a value that is not finite."""
    from .plan import graph_order, run

    order = [
        node
        for node in graph_order(roots, stop=known)
        if node.op is not SOURCE and node not in known and not node.op.mutates
    ]
    watched = tuple(node for node in order if node.dtype.is_float)
    if not watched:
        return
    storages = run(frame, watched, (), known)
    for node, storage in zip(watched, storages, strict=True):
        array = frame.device.download(Source(node.shape, node.dtype, frame.device, storage))
        wrong = ~np.isfinite(array)
        if wrong.any():
            index = tuple(int(i) for i in np.argwhere(wrong)[0])
            shapes = ", ".join(str(parent.shape) for parent in node.inputs) or "none"
            raise AnomalyError(
                f"detect_anomaly: {node.op.name} made {array[index]} at index {index} of its "
                f"result, shape {node.shape}, from inputs of shapes {shapes}; recorded at "
                f"{_place(frame, node)}"
            )
