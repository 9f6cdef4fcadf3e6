"""What is recorded: ops, nodes, and the frames that number a node's inputs.

A table makes equal nodes one object. A Node is a frozen record of one operation. Equal records are
the same object (hash-consing, Ershov 1958), so the structure of a whole program is known by the
identity of its last nodes: looking up a plan costs one dictionary access, however many ops were
recorded, and recording an op that was recorded before costs one too.

For that to hold from step to step, a node must not mention its data. Data live in Sources; a Frame
numbers the Sources that a program reads, in the order in which they were first used, and the leaf
nodes carry only that number.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .dtypes import DType
from .errors import DeviceMemoryError, ShapeError, StaleError

if TYPE_CHECKING:
    from .deadline import Deadline
    from .device import Device
    from .tensor import Tensor
    from .trace import Trace

MAX_DIMS = 4  # ggml's limit

Shape = tuple[int, ...]
Budget = int | Literal["sqrt"]


class Spec(NamedTuple):
    """The shape and element type of a value: what a shape rule returns."""

    shape: Shape
    dtype: DType


@dataclass(frozen=True, eq=False)
class Op:
    """One operation: four rules under one name.

    Inputs are positional, settings keyword-only, in each of them.

    - shape(*inputs, **settings) -> Spec: the type checker. Raises on all that the matching ggml
      constructor would assert.
    - lower(b, *inputs, **settings) -> ggml tensor: the graph node or nodes; b is a
      lowering.Lowering.
    - grad(g, out, *inputs, **settings) -> a Tensor, or a tuple with a Tensor or None for each
      input: written in ops, so it is recorded like any other computation. Summing a broadcast
      gradient back is the engine's work, not the rule's.
    - reference(*inputs, **settings) -> ndarray: NumPy's formula in float64.

    ``grad=None`` says that no rule is written (an error when asked for); ``differentiable=False``
    that the result does not depend smoothly on anything. ``mutates`` lists the inputs that the op
    changes in place. ``alias`` says that the result is another view of the first input's memory.
    Inputs of a half type come as float32, unless the op ``takes_half``, as every alias does.
    ``fold(*inputs, **settings)`` may give a simpler node of equal value, or None. ``work(out,
    *inputs)``, from their types, says how many elementary operations a product takes, if not two
    for each element of the result and of the first input's last axis. Workers share
    the result along its ``shared_axis``, if it names one, and no other.
    """

    name: str
    shape: Callable[..., Spec]
    lower: Callable[..., Any]
    reference: Callable[..., Any]
    grad: Callable[..., Any] | None = None
    differentiable: bool = True
    mutates: tuple[int, ...] = ()
    alias: bool = False
    is_product: bool = False
    takes_half: bool = False
    fold: Callable[..., Node | None] | None = None
    work: Callable[..., int] | None = None
    shared_axis: int | None = None

    def __post_init__(self) -> None:
        OPS[self.name] = self

    def __repr__(self) -> str:
        return self.name


OPS: dict[str, Op] = {}
"""Every op by name."""


@dataclass(frozen=True, eq=False)
class Mode:
    """How ops are recorded at the moment; equal modes are one object (mode_of).

    - taped: on a tape, so that the results can be differentiated.
    - segment: the numbers of the checkpointed segments around it, outermost first.
    - backward: by a gradient rule.
    """

    taped: bool
    segment: tuple[int, ...]
    backward: bool


_modes: dict[tuple[bool, tuple[int, ...], bool], Mode] = {}


def mode_of(taped: bool, segment: tuple[int, ...] = (), backward: bool = False) -> Mode:
    """Return the one Mode with these values."""
    key = (taped, segment, backward)
    return _modes.get(key) or _modes.setdefault(key, Mode(*key))


PLAIN = mode_of(False)


class Node:
    """One recorded operation; equal ones are one object.

    ``order`` grows with creation, so inputs come first by it.
    """

    __slots__ = (
        "op",
        "inputs",
        "settings",
        "mode",
        "shape",
        "dtype",
        "requires_grad",
        "order",
        "line",
    )

    def __init__(
        self,
        op: Op,
        inputs: tuple[Node, ...],
        settings: tuple,
        mode: Mode,
        spec: Spec,
        requires_grad: bool,
    ) -> None:
        self.op = op
        self.inputs = inputs
        self.settings = settings
        self.mode = mode
        self.shape, self.dtype = spec
        self.requires_grad = requires_grad
        self.order = next(_order)
        self.line = calling_line()

    def __repr__(self) -> str:
        return f"{self.op.name}{list(self.shape)}"


_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


def calling_line() -> tuple[str, int]:
    """Return file and number of the innermost line outside of pyggml."""
    caller = sys._getframe(1)
    while caller.f_back is not None and caller.f_code.co_filename.startswith(_PACKAGE):
        caller = caller.f_back
    return caller.f_code.co_filename, caller.f_lineno


_order = itertools.count()
_nodes: dict[tuple, Node] = {}
MAX_NODES = 1 << 18
"""Bound on the table of nodes; when it is full, the table and all that is derived from it start
anew.
"""


class DerivedCache(dict):
    """A dictionary that is emptied together with the table of nodes."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self) -> None:
        _derived.add(self)


_derived: weakref.WeakSet[DerivedCache] = weakref.WeakSet()


def clear_nodes() -> None:
    """Forget all recorded structure. Tensors stay valid; the next step is planned anew."""
    _nodes.clear()
    for cache in list(_derived):
        cache.clear()


MAX_AXIS = 2**31 - 1  # what BLAS and several of ggml's kernels can count
MAX_BYTES = 2**46  # far beyond any memory, and far below what overflows


def check_size(op: str, shape: Shape, dtype: DType) -> None:
    """Raise ShapeError for an axis that is empty or too long, MemoryError for too many bytes."""
    nbytes = prod(shape) * dtype.size
    if any(size < 1 for size in shape):
        raise ShapeError(f"{op}: every axis needs at least one element; got shape {shape}")
    if nbytes > MAX_BYTES:
        raise DeviceMemoryError(f"{op}: shape {shape} would take {nbytes >> 30:,} GB")
    if max(shape, default=1) > MAX_AXIS:
        raise ShapeError(f"{op}: an axis may have {MAX_AXIS:,} elements; got shape {shape}")


def make_node(key: tuple) -> Node:
    """Create the node for a key that the table lacks; the shape rule checks it.

    The key is (op, settings, mode, *inputs).
    """
    op, settings, mode, *inputs = key
    if not (op.takes_half or op.alias) and any(node.dtype.is_half for node in inputs):
        widened = (widened_node(node, mode) for node in inputs)
        return _nodes.setdefault(key, find_node((op, settings, mode, *widened)))
    spec = op.shape(*inputs, **dict(settings))
    check_size(op.name, spec.shape, spec.dtype)
    requires_grad = mode.taped and op.differentiable and any(node.requires_grad for node in inputs)
    if op.fold is not None and (simpler := op.fold(*inputs, **dict(settings))) is not None:
        return _nodes.setdefault(key, simpler)
    if len(_nodes) >= MAX_NODES:
        clear_nodes()
    if mode.taped and not requires_grad:  # the tape makes no difference: share the untaped node
        node = find_node((op, settings, mode_of(False, mode.segment, mode.backward), *inputs))
    else:
        node = Node(op, tuple(inputs), settings, mode, spec, requires_grad)
    return _nodes.setdefault(key, node)


def find_node(key: tuple) -> Node:
    """Return the one node for a key (op, settings, mode, *inputs)."""
    return _nodes.get(key) or make_node(key)


def widened_node(node: Node, mode: Mode) -> Node:
    """Return a node's value as float32 if it has a half type, else the node."""
    if not node.dtype.is_half:
        return node
    return find_node((OPS["cast"], (("dtype", "float32"),), mode, node))


def _leaf_shape(*, index: int, shape: Shape, dtype: DType, requires_grad: bool) -> Spec:
    raise NotImplementedError("source nodes are made by source_node")


SOURCE = Op("source", _leaf_shape, _leaf_shape, _leaf_shape)


def source_node(index: int, shape: Shape, dtype: DType, requires_grad: bool) -> Node:
    """Return the leaf node for the index-th source of a frame."""
    key = (SOURCE, index, shape, dtype, requires_grad)
    node = _nodes.get(key)
    if node is None:
        settings = (("index", index),)
        node = _nodes.setdefault(
            key, Node(SOURCE, (), settings, PLAIN, Spec(shape, dtype), requires_grad)
        )
    return node


def source_index(node: Node) -> int:
    """Return the number that a leaf node carries: the place of its source in a frame."""
    return node.settings[0][1]


class Source:
    """A value that exists: a parameter, a batch, or a result. Its storage belongs to one device."""

    __slots__ = (
        "shape",
        "dtype",
        "device",
        "storage",
        "version",
        "requires_grad",
        "owner",
        "label_range",
        "node",
    )

    def __init__(
        self, shape: Shape, dtype: DType, device: Device, storage: Any, requires_grad: bool = False
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.storage = storage
        self.version = 0  # grows with every change in place
        self.requires_grad = requires_grad
        self.owner: weakref.ref[Tensor] | None = None  # the leaf tensor that collects .grad
        # smallest and largest integer, once somebody asked
        self.label_range: tuple[int, int] | None = None
        self.node: Node | None = None  # the leaf node that stood for it last


class Frame:
    """The sources of one program and the handles to what was recorded on them.

    Sources are numbered in order of first use. A frame ends when all its living handles have values
    and none of them can be differentiated any more.
    """

    __slots__ = (
        "device",
        "sources",
        "versions",
        "nodes",
        "handles",
        "ended",
        "tape_closed",
        "lines",
        "rule_of",
        "memory_budget",
    )

    def __init__(self, device: Device | None, traced: bool = False) -> None:
        self.device: Device = device  # type: ignore[assignment]  # only NOWHERE has none
        self.sources: list[Source] = []
        self.versions: list[int] = []
        self.nodes: dict[Source, Node] = {}
        self.handles: list[weakref.ref[Tensor]] = []
        self.ended: str | None = None  # why, once it has
        self.tape_closed = False  # whether a tape that recorded here has been closed
        # Where each node was recorded first, inside a detect_anomaly block; None elsewhere.
        self.lines: dict[Node, tuple[str, int, Node | None]] | None = {} if traced else None
        self.rule_of: Node | None = None  # the node whose gradient rule is running
        self.memory_budget: Budget | None = None

    def bind(self, source: Source) -> Node:
        """Return the leaf node of a source, numbering it if it is new.

        Raises StaleError if the source has changed since.
        """
        node = self.nodes.get(source)
        if node is not None:
            if not self.is_current(source):
                is_same = self.versions[source_index(node)] == source.version
                raise StaleError(
                    f"the {'requires_grad' if is_same else 'value'} of a {source.shape} parameter "
                    "has changed since it was recorded here; change it before recording, or record "
                    "again"
                )
            return node
        index = len(self.sources)
        node = source.node  # a step like the last one gives it the same number
        if (
            node is None
            or node.settings[0][1] != index
            or node.requires_grad is not source.requires_grad
        ):
            node = source.node = source_node(
                index, source.shape, source.dtype, source.requires_grad
            )
        self.sources.append(source)
        self.versions.append(source.version)
        self.nodes[source] = node
        return node

    def bind_all(self, sources: Iterable[Source]) -> list[Node]:
        """Return the leaf nodes of sources, as bind does for one."""
        found = []
        known, index = self.nodes, len(self.sources)
        for source in sources:
            node = source.node
            if (
                node is None
                or node.settings[0][1] != index
                or node.requires_grad is not source.requires_grad
                or source in known
            ):
                node = self.bind(source)
            else:  # numbered as in the last step
                self.sources.append(source)
                self.versions.append(source.version)
                known[source] = node
            found.append(node)
            index = len(self.sources)
        return found

    def is_current(self, source: Source) -> bool:
        """Tell whether a source is still as it was when it was bound, if it was.

        That is: whether it has the same value and the same need for a gradient.
        """
        node = self.nodes.get(source)
        return node is None or (
            self.versions[source_index(node)] == source.version
            and node.requires_grad == source.requires_grad
        )

    def is_pending(self) -> bool:
        """Tell whether somebody holds a value that has not been computed."""
        return any(
            (tensor := reference()) is not None and tensor._source is None
            for reference in self.handles
        )

    def check_current(self, nodes: Iterable[Node] | None = None) -> None:
        """Raise StaleError if a source has changed since it was bound, of those that nodes need."""
        for index, (source, version) in enumerate(zip(self.sources, self.versions, strict=True)):
            if source.version != version and (nodes is None or _depends(nodes, index)):
                raise StaleError(
                    f"this value was recorded with a {source.shape} parameter that has changed "
                    "since, so it can no longer be computed; read it (for example .item()) before "
                    "the update, or record it again"
                )

    def end(self, reason: str) -> None:
        """Release the frame's data. Its handles keep the values that they have."""
        self.ended = reason
        self.sources = []
        self.versions = []
        self.nodes = {}
        self.handles = []


def _depends(nodes: Iterable[Node], index: int) -> bool:
    """Tell whether nodes are computed from the source with a number."""
    seen = set(nodes)
    stack = list(seen)
    while stack:
        node = stack.pop()
        if node.op is SOURCE and source_index(node) == index:
            return True
        for parent in node.inputs:
            if parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return False


_pinned: dict[int, weakref.ref[Tensor]] = {}


def pin(tensor: Tensor) -> None:
    """See to it that a pending value does not become stale when a parameter changes."""
    _pinned[id(tensor)] = weakref.ref(tensor)


def settle_pinned(changed: list[Source], frame: Frame | None = None) -> None:
    """Compute pinned values that wait on sources about to change, but for the frame's own."""
    if not _pinned:
        return
    for key, reference in list(_pinned.items()):
        tensor = reference()
        if tensor is None or tensor._source is not None:
            _pinned.pop(key, None)
            continue
        at = tensor._at[0]
        if at is not frame and any(source in at.nodes for source in changed):
            tensor._materialized()


NOWHERE = Frame(None)
"""The place of a tensor that no frame has numbered yet."""
NOWHERE.end("it was not recorded on one")


class State(threading.local):
    """What is per thread: current device, recording mode, and the open frame of each device."""

    def __init__(self) -> None:
        self.mode = PLAIN
        # Open grad_tape and no_grad blocks; the last one decides.
        self.blocks: list[tuple[object, bool]] = []
        self.segment: tuple[int, ...] = ()  # the open checkpointed segments, outermost first
        self.segments = 0  # how many there have been on the open tape
        self.memory_budget: Budget | None = None  # of the open tape
        self.tracing = 0  # open detect_anomaly blocks
        self.device: Device | None = None  # None: the process-wide default
        self.frames: dict[Device, Frame] = {}
        self.frame = NOWHERE  # the one used last
        self.deadline: Deadline | None = None  # of the open deadline block that ends first
        self.lowering: Node | None = None  # what is being made into nodes of a ggml graph
        self.trace: Trace | None = None  # what is compiled at the moment

    def open_frame(self, device: Device) -> Frame:
        """Return this thread's frame for a device, a fresh one if the last has ended."""
        frame = self.frames.get(device)
        if frame is None or frame.ended:
            return self.new_frame(device)
        self.frame = frame
        return frame

    def new_frame(self, device: Device) -> Frame:
        """Start a fresh frame for a device. Pending handles of the old one stay readable."""
        frame = self.frame = self.frames[device] = Frame(device, self.tracing > 0)
        frame.memory_budget = self.memory_budget
        return frame

    def leave(self, frame: Frame) -> None:
        """Record what comes next into another frame than this one."""
        if self.frames.get(frame.device) is frame:
            del self.frames[frame.device]
        if self.frame is frame:
            self.frame = NOWHERE

    def inside(self, frame: Frame, mode: Mode) -> _Inside:
        """Record into a given frame, in a given mode, for the length of a with block."""
        return _Inside(self, frame, mode)


class _Inside:
    __slots__ = ("state", "frame", "mode", "before")

    def __init__(self, state: State, frame: Frame, mode: Mode) -> None:
        self.state, self.frame, self.mode = state, frame, mode

    def __enter__(self) -> None:
        state, frame = self.state, self.frame
        self.before = state.frames.get(frame.device, frame), state.frame, state.mode
        state.frames[frame.device] = state.frame = frame
        state.mode = self.mode

    def __exit__(self, *error: object) -> None:
        state = self.state
        state.frames[self.frame.device], state.frame, state.mode = self.before


state = State()
