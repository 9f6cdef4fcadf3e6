"""The handle that people hold: a value that exists, or one computed when somebody looks.

A Tensor points at a place: a frame and a node in it (`_at`). Once it has a value it also has a
Source, and can be taken into any later frame as an input.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Union
from weakref import ref

import numpy as np
from numpy.typing import ArrayLike

from . import graph
from .checks import shown
from .device import Device, resolve_device
from .dtypes import DType, as_dtype, bfloat16, check_array, float32
from .errors import (
    DeviceError,
    DTypeError,
    GradError,
    PyggmlError,
    SettingError,
    ShapeError,
    StaleError,
)
from .graph import (
    MAX_DIMS,
    NOWHERE,
    SOURCE,
    Frame,
    Node,
    Op,
    Source,
    calling_line,
    find_node,
    make_node,
    state,
)

TensorLike = Union["Tensor", ArrayLike]
Axis = int | Sequence[int] | None

_nodes = graph._nodes  # the table itself: record() runs for every op of every step


class Tensor:
    """A value on one device, of up to four dimensions.

    It is computed already, or recorded and computed when looked at. Make one with ag.tensor or
    ag.param. Operators follow NumPy's rules and mean the ag operation of the same name.

    >>> from pyggml import ag
    >>> x = ag.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> (x @ x).numpy()
    array([[ 7., 10.],
           [15., 22.]], dtype=float32)
    """

    __slots__ = ("_at", "_source", "grad", "name", "__weakref__")

    __array_priority__ = 1000  # NumPy's operators give way to ours
    __array_ufunc__ = None

    _at: tuple[Frame, Node]
    _source: Source | None
    grad: Tensor | None
    name: str | None

    def __init__(self) -> None:
        raise TypeError("Tensor: make one with ag.tensor(data) or ag.param(data)")

    # ---- what it is ----

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis, as in NumPy."""
        return self._at[1].shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self._at[1].shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self._at[1].shape)

    @property
    def dtype(self) -> np.dtype | DType:
        """NumPy's name of the element type; pyggml's for bfloat16, which NumPy lacks."""
        kind, device = self._at[1].dtype, self.device
        return kind if kind is bfloat16 and not device.double else device.numpy_dtype(kind)

    @property
    def device(self) -> Device:
        """The device on which the value lives."""
        if self._source is not None:
            return self._source.device
        return self._at[0].device

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow into this tensor.

        Can be set on a leaf, which freezes or frees a parameter.
        """
        return self._at[1].requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        source = self._source
        if source is None or not self.is_leaf:
            raise GradError(
                "requires_grad: can be set on a parameter or a tensor made from data; use "
                "ag.detach here"
            )
        if not isinstance(value, (bool, np.bool_)):
            raise SettingError(f"requires_grad: must be True or False; got {shown(value)}")
        if value and not source.dtype.is_float:
            raise DTypeError(f"requires_grad: needs a float tensor; got {source.dtype}")
        source.requires_grad = bool(value)
        if value and (source.owner is None or source.owner() is None):
            source.owner = ref(self)
        self._take_place(source)

    @property
    def is_leaf(self) -> bool:
        """Whether this tensor was made from data, not by an operation."""
        return self._at[1].op is SOURCE

    # ---- its value ----

    def numpy(self) -> np.ndarray:
        """Return the value as a new NumPy array, computing it first if it is pending."""
        if state.trace is not None:
            state.trace.refuse_reading()
        source = self._source or self._materialized()
        return source.device.download(source)

    def item(self) -> float | int:
        """Return the only element as a Python number.

        Raises ShapeError if there is not exactly one.
        """
        if self.size != 1:
            raise ShapeError(
                f"item: needs exactly one element; got shape {self.shape}; use .numpy()"
            )
        return self.numpy().item()

    def tolist(self) -> Any:
        """Return the value as nested lists of Python numbers."""
        return self.numpy().tolist()

    def detach(self) -> Tensor:
        """Return the same value with no gradient behind it."""
        return ops.detach(self)

    def to(self, device: Device | str) -> Tensor:
        """Return the value on another device, as a new leaf there; self if it is there already.

        Raises GradError if a gradient is behind it: none flows from one device to another.
        """
        return copy_to(self, device)

    def assign(self, value: TensorLike) -> None:
        """Overwrite a leaf's value in place.

        Values pending on the old one can no longer be computed.
        """
        source = self._source
        if source is None or not self.is_leaf:
            raise GradError(
                "assign: only a parameter or a tensor made from data can be overwritten"
            )
        data = value.numpy() if isinstance(value, Tensor) else value
        array, _ = check_array(data, source.dtype, op="assign")
        if array.shape != source.shape:
            raise ShapeError(f"assign: needs the shape {source.shape}; got {array.shape}")
        graph.settle_pinned([source])
        source.version += 1  # before writing: an interrupted write must not go unnoticed
        source.device.write(source, array)
        source.label_range = None
        self._take_place(source)

    def _materialized(self) -> Source:
        if self._source is None:
            frame, node = self._at
            if frame.ended:
                # a handle made by hand
                raise PyggmlError("this value was released before it was computed")
            if state.trace is not None:
                state.trace.refuse_reading()
            evaluate(frame, self)
            assert self._source is not None
        return self._source

    def _become(self, other: Tensor) -> None:
        """Stand for another tensor's value from now on."""
        self._at, self._source = other._at, other._source
        if not self._at[0].ended:
            self._at[0].handles.append(ref(self))

    def _take_place(self, source: Source) -> None:
        """Stand for a source that no frame has numbered yet."""
        self._source = source
        self._at = (NOWHERE, graph.source_node(0, source.shape, source.dtype, source.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a leaf with the same value, need for a gradient, and gradient."""
        kind, trained = self._at[1].dtype, self.requires_grad and self.is_leaf
        copied = make_tensor(
            self, dtype=kind, device=self.device, requires_grad=trained, cls=type(self)
        )
        memo[id(self)] = copied
        copied.name = self.name
        copied.grad = None if self.grad is None else self.grad.__deepcopy__(memo)
        return copied

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a tensor's value is always copied; leave copy=False out")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        own = getattr(Tensor, function.__name__, None)
        if isinstance(own, property) and len(args) == 1 and isinstance(args[0], Tensor):
            return getattr(args[0], function.__name__)  # np.shape: no value is needed
        # np.sum would call our sum with arguments of its own: say so instead of failing there.
        if callable(own):
            raise DTypeError(
                f"np.{function.__name__}: takes arrays; use the tensor's own method, which keeps "
                "the gradient, or tensor.numpy()"
            )
        return function(*_as_arrays(args), **_as_arrays(kwargs))

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __format__(self, spec: str) -> str:
        try:
            return format(self.item() if spec and not self.shape else str(self), spec)
        except ValueError as error:
            raise SettingError(f"format: {error}; got a tensor of shape {self.shape}") from None

    def __reduce__(self) -> Any:
        raise TypeError(
            "a tensor cannot be pickled: it belongs to a device of this process; save it with "
            "pg.io.save_weights, or send tensor.numpy()"
        )

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len: a tensor without axes has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        frame, node = self._at
        head = "param" if self._source is not None and self._source.owner is not None else "tensor"
        about = [f"shape={node.shape}", f"dtype={self.dtype}", f"device={self.device.name!r}"]
        if node.requires_grad:
            about.append("requires_grad=True")
        if self._source is None:
            return f"{head}(<pending {node.op.name}>, {', '.join(about)})"
        if self.size <= 20:
            values = np.array2string(self.numpy(), separator=", ", prefix=f"{head}(")
            return f"{head}({values}, {', '.join(about[1:])})"
        return f"{head}({', '.join(about)})"

    # ---- operators ----

    __hash__ = object.__hash__

    def __add__(self, other: TensorLike) -> Tensor:
        return ops.add(self, other)

    def __radd__(self, other: TensorLike) -> Tensor:
        return ops.add(other, self)

    def __sub__(self, other: TensorLike) -> Tensor:
        return ops.sub(self, other)

    def __rsub__(self, other: TensorLike) -> Tensor:
        return ops.sub(other, self)

    def __mul__(self, other: TensorLike) -> Tensor:
        return ops.mul(self, other)

    def __rmul__(self, other: TensorLike) -> Tensor:
        return ops.mul(other, self)

    def __truediv__(self, other: TensorLike) -> Tensor:
        return ops.div(self, other)

    def __rtruediv__(self, other: TensorLike) -> Tensor:
        return ops.div(other, self)

    def __matmul__(self, other: TensorLike) -> Tensor:
        return ops.matmul(self, other)

    def __rmatmul__(self, other: TensorLike) -> Tensor:
        return ops.matmul(other, self)

    def __pow__(self, exponent: TensorLike) -> Tensor:
        return ops.pow(self, exponent)

    def __rpow__(self, base: TensorLike) -> Tensor:
        return ops.pow(base, self)

    def __neg__(self) -> Tensor:
        return ops.neg(self)

    def __abs__(self) -> Tensor:
        return ops.abs(self)

    def __eq__(self, other: Any) -> Any:
        pair = _comparable(self, other)
        return NotImplemented if pair is None else ops.equal(*pair)

    def __ne__(self, other: Any) -> Any:
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else 1.0 - equal

    def __ge__(self, other: TensorLike) -> Tensor:
        return ops.add(ops.greater(self, other), ops.equal(self, other))

    def __le__(self, other: TensorLike) -> Tensor:
        return ops.add(ops.less(self, other), ops.equal(self, other))

    def __gt__(self, other: TensorLike) -> Tensor:
        return ops.greater(self, other)

    def __lt__(self, other: TensorLike) -> Tensor:
        return ops.less(self, other)

    def __getitem__(self, key: Any) -> Tensor:
        return ops.index(self, key)

    @property
    def T(self) -> Tensor:
        """The tensor with its axes reversed."""
        return ops.transpose(self)

    # ---- ops that read well as methods: each is the ag function of the same name ----

    def reshape(self, *shape: int) -> Tensor:
        """Return ag.reshape(self, shape)."""
        return ops.reshape(self, shape)

    def permute(self, *axes: int) -> Tensor:
        """Return ag.permute(self, axes)."""
        return ops.permute(self, axes)

    def transpose(self, axis1: int | None = None, axis2: int | None = None) -> Tensor:
        """Return ag.transpose(self, axis1, axis2)."""
        return ops.transpose(self, axis1, axis2)

    def sum(self, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
        """Return ag.sum(self, axis=axis, keepdims=keepdims)."""
        return ops.sum(self, axis=axis, keepdims=keepdims)

    def mean(self, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
        """Return ag.mean(self, axis=axis, keepdims=keepdims)."""
        return ops.mean(self, axis=axis, keepdims=keepdims)

    def max(self, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
        """Return ag.max(self, axis=axis, keepdims=keepdims)."""
        return ops.max(self, axis=axis, keepdims=keepdims)

    def min(self, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
        """Return ag.min(self, axis=axis, keepdims=keepdims)."""
        return ops.min(self, axis=axis, keepdims=keepdims)

    def var(self, axis: Axis = None, *, keepdims: bool = False, ddof: int = 0) -> Tensor:
        """Return ag.var(self, axis=axis, keepdims=keepdims, ddof=ddof)."""
        return ops.var(self, axis=axis, keepdims=keepdims, ddof=ddof)

    def argmax(self, axis: int | None = None) -> Tensor:
        """Return ag.argmax(self, axis=axis)."""
        return ops.argmax(self, axis=axis)

    def exp(self) -> Tensor:
        """Return ag.exp(self)."""
        return ops.exp(self)

    def log(self) -> Tensor:
        """Return ag.log(self)."""
        return ops.log(self)

    def sqrt(self) -> Tensor:
        """Return ag.sqrt(self)."""
        return ops.sqrt(self)

    def abs(self) -> Tensor:
        """Return ag.abs(self)."""
        return ops.abs(self)

    def clamp(self, *, min: float | None = None, max: float | None = None) -> Tensor:
        """Return ag.clamp(self, min=min, max=max)."""
        return ops.clamp(self, min=min, max=max)

    def squeeze(self, axis: Axis = None) -> Tensor:
        """Return ag.squeeze(self, axis=axis)."""
        return ops.squeeze(self, axis=axis)

    def unsqueeze(self, axis: int) -> Tensor:
        """Return ag.unsqueeze(self, axis=axis)."""
        return ops.unsqueeze(self, axis=axis)

    def softmax(self, axis: int = -1) -> Tensor:
        """Return ag.softmax(self, axis=axis)."""
        return ops.softmax(self, axis=axis)

    def tanh(self) -> Tensor:
        """Return ag.tanh(self)."""
        return ops.tanh(self)

    def sigmoid(self) -> Tensor:
        """Return ag.sigmoid(self)."""
        return ops.sigmoid(self)

    def astype(self, dtype: object) -> Tensor:
        """Return ag.astype(self, dtype=dtype)."""
        return ops.astype(self, dtype=dtype)


class Parameter(Tensor):
    """A tensor that is trained: gradients flow into it and optimizers change it in place."""

    __slots__ = ()


def _as_arrays(values: Any) -> Any:
    """Return arrays in the place of tensors in lists, tuples and dicts."""
    if isinstance(values, Tensor):
        return values.numpy()
    if isinstance(values, (list, tuple)):
        return type(values)(_as_arrays(value) for value in values)
    if isinstance(values, dict):
        return {name: _as_arrays(value) for name, value in values.items()}
    return values


def _comparable(x: Tensor, other: Any) -> tuple[Tensor, TensorLike] | None:
    """Return two values as ag.equal takes them, or None where they cannot be compared."""
    if other is None or isinstance(other, (str, bytes, dict, set)):
        return None

    def as_float(value: Any) -> TensorLike:
        is_integer = isinstance(value, Tensor) and not value._at[1].dtype.is_float
        return ops.astype(value, "float32") if is_integer else value

    return as_float(x), as_float(other)  # type: ignore[return-value]


# ---- making tensors ----


def _new(at: tuple[Frame, Node], source: Source | None, cls: type[Tensor] = Tensor) -> Tensor:
    tensor = object.__new__(cls)
    tensor._at = at
    tensor._source = source
    tensor.grad = None
    tensor.name = None
    return tensor


def pending(node: Node, frame: Frame) -> Tensor:
    """Return a handle for a recorded node.

    The node is an output of the next run for as long as somebody holds the handle.
    """
    tensor = _new((frame, node), None)
    frame.handles.append(ref(tensor))
    lines = frame.lines
    if lines is not None and node not in lines:  # for detect_anomaly
        lines[node] = (*calling_line(), frame.rule_of)
    return tensor


def passing(node: Node, frame: Frame) -> Tensor:
    """Return a handle that only passes a node on to another op: it does not ask for the value."""
    return _new((frame, node), None)


def from_source(source: Source, cls: type[Tensor] = Tensor) -> Tensor:
    """Return a handle for a value that exists."""
    tensor = _new(
        (NOWHERE, graph.source_node(0, source.shape, source.dtype, source.requires_grad)),
        source,
        cls,
    )
    if source.requires_grad:
        source.owner = ref(tensor)
    return tensor


def make_tensor(
    data: TensorLike,
    *,
    dtype: object = None,
    device: Device | str | None = None,
    requires_grad: bool = False,
    cls: type[Tensor] = Tensor,
    op: str = "tensor",
) -> Tensor:
    """Copy data into a new leaf tensor."""
    if isinstance(data, Tensor):
        data = data.numpy()
    elif isinstance(data, (list, tuple)) and _holds_tensor(data):
        raise DTypeError(f"{op}: a list of tensors is not data; use ag.stack or ag.concat")
    array, kind = check_array(data, as_dtype(dtype) if dtype is not None else None, op=op)
    if array.ndim > MAX_DIMS:
        raise ShapeError(
            f"{op}: at most {MAX_DIMS} dimensions; got shape {array.shape}; merge some with reshape"
        )
    if array.size == 0:
        raise ShapeError(f"{op}: needs at least one element; got shape {array.shape}")
    if not isinstance(requires_grad, (bool, np.bool_)):
        raise SettingError(f"{op}: requires_grad must be True or False; got {shown(requires_grad)}")
    if requires_grad and not kind.is_float:
        raise DTypeError(
            f"{op}: gradients need floating point; got {array.dtype}; pass dtype='float32'"
        )
    where = resolve_device(device)
    source = Source(array.shape, kind, where, where.upload(array, kind), requires_grad)
    return from_source(source, cls)


def _holds_tensor(data: Any) -> bool:
    return any(
        isinstance(item, Tensor) or (isinstance(item, (list, tuple)) and _holds_tensor(item))
        for item in data
    )


# ---- recording ----


def record(op: Op, *inputs: TensorLike, **settings: Any) -> Tensor:
    """Record one operation on tensors and return the handle of its result.

    The shape rule runs at once. All inputs must be on one device; a number or an array is taken as
    a float tensor there.
    """
    frame = state.frame
    if frame.ended:
        return _record_across(op, inputs, settings)
    nodes = []
    try:
        for tensor in inputs:
            at, node = tensor._at  # type: ignore[union-attr]
            if at is not frame:
                source = tensor._source  # type: ignore[union-attr]
                if source is None or source.device is not frame.device or node.op is not SOURCE:
                    return _record_across(op, inputs, settings)
                node = frame.bind(source)
                tensor._at = (frame, node)  # type: ignore[union-attr]
            nodes.append(node)
    except StaleError:  # a source that was bound with an older value
        return _record_across(op, inputs, settings)
    except AttributeError:  # a number or an array
        if all(isinstance(value, Tensor) for value in inputs):
            raise
        return _record_across(op, inputs, settings)
    key = (op, tuple(settings.items()), state.mode, *nodes)
    node = _nodes.get(key) or make_node(key)
    return pending(node, frame)


def _record_across(op: Op, inputs: tuple[Any, ...], settings: dict[str, Any]) -> Tensor:
    """Record an op of which an input is not in the frame used last.

    All inputs are taken into one frame first.
    """
    like = next((value for value in inputs if isinstance(value, Tensor)), None)
    tensors = tuple(as_tensor(value, like, op=op.name) for value in inputs)
    frame = frame_for(tensors, op.name)
    key = (op, tuple(settings.items()), state.mode, *[node_in(tensor, frame) for tensor in tensors])
    return pending(find_node(key), frame)


def frame_for(tensors: tuple[Tensor, ...], op: str) -> Frame:
    """Return this thread's open frame for the one device of the tensors.

    It is fresh if a source has changed under the old one.
    """
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device is not device:
            names = ", ".join(t.device.name for t in tensors)
            raise DeviceError(
                f"{op}: all inputs must live on one device; got {names}; move one with "
                "ag.tensor(x, device=...)"
            )
    frame = state.open_frame(device)
    for tensor in tensors:
        source = tensor._source
        if source is not None and not frame.is_current(source):
            return state.new_frame(device)
    return frame


def node_in(tensor: Tensor, frame: Frame) -> Node:
    """Return the node that stands for a tensor in a frame, taking it in if it is not there yet."""
    at, node = tensor._at
    if at is frame:
        return node
    source = tensor._source
    is_recipe = node.requires_grad and not tensor.is_leaf and state.mode.taped
    if not at.ended and (source is None or is_recipe):
        return _graft(node, at, frame)  # recorded in another frame, and still wanted as a recipe
    if source is None:
        raise PyggmlError("this value was released before it was computed")
    node = frame.bind(source)
    tensor._at = (frame, node)
    return node


def _graft(root: Node, origin: Frame, frame: Frame) -> Node:
    """Record a pending program once more on another frame's numbers, and return its last node."""
    origin.check_current()
    moved: dict[Node, Node] = {}
    for node in graph_order([root]):
        if node.op is SOURCE:
            moved[node] = frame.bind(origin.sources[graph.source_index(node)])
        else:
            moved[node] = find_node(
                (node.op, node.settings, node.mode, *(moved[i] for i in node.inputs))
            )
    return moved[root]


def as_tensor(
    value: TensorLike, like: Tensor | None = None, *, op: str, dtype: DType | None = float32
) -> Tensor:
    """Return value as a Tensor: itself, or a number or array copied to the device of ``like``."""
    if isinstance(value, Tensor):
        return value
    return make_tensor(value, dtype=dtype, device=like.device if like is not None else None, op=op)


# At the end: both modules are built on Tensor and record.
from . import ops  # noqa: E402
from .plan import evaluate, graph_order  # noqa: E402
from .transfer import copy_to  # noqa: E402
