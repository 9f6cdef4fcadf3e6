"""Entries named by integers: gathering, scattering, and x[key]."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .._ffi import lib
from ..checks import as_index, positive_integer, shown
from ..dtypes import float32, int32
from ..errors import DTypeError, IndexRangeError, ShapeError
from ..graph import Op, Spec
from ..lowering import GgmlTensor, Lowering, shape_of
from ..tensor import Tensor, TensorLike, as_tensor, record
from .labels import ONE_HOT, checked_indices, index_range
from .rules import (
    check_ndim,
    need_axes,
    need_floats,
    need_integers,
    need_shape,
    normalize_axes,
    normalize_axis,
    split_at,
)
from .shaping import reshape
from .slicing import Range, sliced

# ---- take and scatter, each the gradient of the other --------------------------------------------


def _take_shape(x: Spec, indices: Spec, *, axis: int) -> Spec:
    need_axes("take", x, (axis,))
    need_integers("take", "indices", indices)
    need_shape("take", "indices", indices, None)
    sizes = list(x.shape)
    sizes[axis] = indices.shape[0]
    return Spec(tuple(sizes), x.dtype)


def _sizes_around(x: GgmlTensor, axis: int) -> tuple[int, int, int]:
    """Return the number of entries before an axis, along it, and in each entry after it."""
    before, size, after = split_at(shape_of(x), axis)
    return prod(before), size, prod(after)


def _lower_take(b: Lowering, x: GgmlTensor, indices: GgmlTensor, *, axis: int) -> GgmlTensor:
    x, indices = b.contiguous(x), b.contiguous(indices)
    if b.own_kernels:  # ggml's runs on one thread
        return lib.pg_take(b.ctx, x, indices, -1 - axis)
    outer, size, inner = _sizes_around(x, axis)
    count = indices.ne[0]
    sizes = list(x.ne)
    sizes[-1 - axis] = count
    rows = b.reshape(x, (outer, size, inner))
    taken = lib.ggml_get_rows(b.ctx, rows, b.broadcast(indices, (outer, count)))
    return b.reshape(taken, tuple(reversed(sizes)))


TAKE: Op = Op(
    "take",
    shape=_take_shape,
    lower=_lower_take,
    grad=lambda g, out, x, indices, axis: (
        record(SCATTER, g, indices, axis=axis, size=x.shape[axis]),
        None,
    ),
    reference=lambda x, indices, axis: np.take(x, indices, axis=axis),
)


def _scatter_shape(g: Spec, indices: Spec, *, axis: int, size: int) -> Spec:
    need_floats("scatter", g)
    need_axes("scatter", g, (axis,))
    need_integers("scatter", "indices", indices)
    need_shape("scatter", "indices", indices, g.shape[axis])
    sizes = list(g.shape)
    sizes[axis] = size
    return Spec(tuple(sizes), g.dtype)


def _lower_scatter(
    b: Lowering, g: GgmlTensor, indices: GgmlTensor, *, axis: int, size: int
) -> GgmlTensor:
    g, indices = b.contiguous(g), b.contiguous(indices)
    if b.own_kernels:  # ggml's runs on one thread
        return lib.pg_scatter(b.ctx, g, indices, -1 - axis, size)
    # ggml_get_rows_back adds rows of one matrix: the axis goes to the front and back again
    outer, count, inner = _sizes_around(g, axis)
    sizes = list(g.ne)
    sizes[-1 - axis] = size
    entries = lib.ggml_permute(b.ctx, b.reshape(g, (outer, count, inner)), 0, 2, 1, 3)
    like = b.new((size, outer * inner), float32)  # only its shape is used
    summed = lib.ggml_get_rows_back(
        b.ctx, b.reshape(entries, (count, outer * inner)), indices, like
    )
    back = lib.ggml_permute(b.ctx, b.reshape(summed, (size, outer, inner)), 0, 2, 1, 3)
    return b.reshape(back, tuple(reversed(sizes)))


def _reference_scatter(g: np.ndarray, indices: np.ndarray, *, axis: int, size: int) -> np.ndarray:
    out = np.zeros((size, *np.delete(g.shape, axis)))
    np.add.at(out, indices, np.moveaxis(g, axis, 0))
    return np.moveaxis(out, 0, axis)


SCATTER: Op = Op(
    "scatter",
    shape=_scatter_shape,
    lower=_lower_scatter,
    grad=lambda gg, out, g, indices, axis, size: (record(TAKE, gg, indices, axis=axis), None),
    reference=_reference_scatter,
)


def take(x: TensorLike, indices: TensorLike | ArrayLike, *, axis: int = 0) -> Tensor:
    """Return the entries of x along an axis that integers name; their shape replaces the axis.

    In the gradient, the parts of entries taken more than once add up. Raises IndexRangeError for an
    index outside [0, size), at once.

    >>> ag.take([[1.0, 2.0], [3.0, 4.0]], [1, 1, 0]).numpy()
    array([[3., 4.],
           [3., 4.],
           [1., 2.]], dtype=float32)
    """
    return _take("take", as_tensor(x, op="take", dtype=None), indices, axis)


def embedding(weight: TensorLike, indices: TensorLike | ArrayLike) -> Tensor:
    """Return the rows of a table that integers name.

    weight (rows, width), indices (...) -> (..., width). Raises IndexRangeError for an index outside
    [0, rows), at once.

    >>> ag.embedding([[1.0, 2.0], [3.0, 4.0]], [1, 0]).numpy()
    array([[3., 4.],
           [1., 2.]], dtype=float32)
    """
    weight = as_tensor(weight, op="embedding")
    if weight.ndim != 2:
        raise ShapeError(f"embedding: weight must be (rows, width); got shape {weight.shape}")
    return _take("embedding", weight, indices, 0)


def _take(op: str, x: Tensor, indices: TensorLike | ArrayLike, axis: int) -> Tensor:
    axis = normalize_axis(op, axis, x.ndim)
    places = checked_indices(op, indices, x.shape[axis], x.device)
    i = axis + x.ndim
    shape = (*x.shape[:i], *places.shape, *x.shape[i + 1 :])
    check_ndim(op, shape)
    if places.ndim == 1:
        return record(TAKE, x, places, axis=axis)
    return reshape(record(TAKE, x, reshape(places, -1), axis=axis), shape)


def flip(x: TensorLike, *, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Return x with the entries of axes in reverse order: of an int, of several, or None (all).

    >>> ag.flip([[1.0, 2.0], [3.0, 4.0]], axis=1).numpy()
    array([[2., 1.],
           [4., 3.]], dtype=float32)
    """
    x = as_tensor(x, op="flip", dtype=None)
    for i in normalize_axes("flip", axis, x.ndim):
        x = _take("flip", x, np.arange(x.shape[i])[::-1], i)
    return x


def one_hot(indices: TensorLike | ArrayLike, classes: int) -> Tensor:
    """Return float32 rows with a 1 where an integer says and 0 elsewhere: (...) -> (..., classes).

    Raises IndexRangeError for an index outside [0, classes), at once.

    >>> ag.one_hot([1, 0], 3).numpy()
    array([[0., 1., 0.],
           [1., 0., 0.]], dtype=float32)
    """
    width = positive_integer("one_hot", "classes", classes)
    places = checked_indices("one_hot", indices, width, None)
    check_ndim("one_hot", (*places.shape, width))
    rows = record(ONE_HOT, places if places.ndim == 1 else reshape(places, -1), classes=width)
    return rows if places.ndim == 1 else reshape(rows, (*places.shape, width))


# ---- x[key] --------------------------------------------------------------------------------------


def index(x: TensorLike, key: Any) -> Tensor:
    """Return x[key] under NumPy's rules.

    The key has integers, slices of any step, ..., None, and one array of integers. Raises
    IndexRangeError for an integer out of range or too many of them, ShapeError for a result without
    elements, DTypeError for masks: their result's shape would depend on the data.

    >>> ag.index([[1.0, 2.0], [3.0, 4.0]], (slice(None), -1)).numpy()
    array([2., 4.], dtype=float32)
    """
    x = as_tensor(x, op="index", dtype=None)
    entries = _spelled_out(key, x.ndim)
    ranges: list[Range] = []  # of each axis of x
    taken: dict[int, TensorLike] = {}  # the axes whose entries are named one by one
    shape: list[int] = []
    for entry in entries:
        axis = len(ranges)
        if entry is None:
            shape.append(1)
            continue
        size = x.shape[axis]
        whole = (0, 1, size)
        if isinstance(entry, slice):
            wanted = range(*entry.indices(size))
            if not wanted:
                raise ShapeError(
                    f"index: {_written(entry)} leaves nothing of axis {axis}, whose size is {size};"
                    " tensors are never empty"
                )
            shape.append(len(wanted))
            if wanted.step > 0:
                ranges.append((wanted.start, wanted.step, len(wanted)))
            else:
                ranges.append(whole)
                taken[axis] = np.array(wanted)
        elif _is_array(entry):
            taken[axis] = places = _from_the_start(entry, axis, size)
            shape.extend(places.shape)
            ranges.append(whole)
        else:
            ranges.append((_position(entry, axis, size), 1, 1))
    check_ndim("index", shape)
    # The place at which a batch is cut from data is an input of the program, not a part of its
    # structure: cutting elsewhere in each step must not plan each step anew.
    start, step, count = ranges[0] if ranges else (0, 1, 1)
    if x.is_leaf and not x.requires_grad and ranges and count < x.shape[0] and 0 not in taken:
        taken[0] = np.arange(start, start + step * count, step)
    part = x
    if 0 in taken:  # first of all, so that no more than these rows is copied
        part = _take("index", x, _flat(taken.pop(0)), 0)
        ranges[0] = (0, 1, part.shape[0])
    part = sliced(part, ranges)
    for axis, places in taken.items():
        part = _take("index", part, _flat(places), axis)
    return part if part.shape == tuple(shape) else reshape(part, shape)


def _spelled_out(key: Any, ndim: int) -> list[Any]:
    """Return the entries of a key, one for each axis and each None.

    `...` and what is missing at the end are written as slices, lists as arrays.
    """
    entries = [_as_entry(entry) for entry in (key if isinstance(key, tuple) else (key,))]
    missing = ndim - sum(entry is not None and entry is not ... for entry in entries)
    if missing < 0:
        raise IndexRangeError(f"index: {ndim - missing} indices for {ndim} axes; got {key!r}")
    dots = [i for i, entry in enumerate(entries) if entry is ...]
    if len(dots) > 1:
        raise IndexRangeError(f"index: one ... at most; got {key!r}")
    at = dots[0] if dots else len(entries)
    entries[at : at + 1] = [slice(None)] * missing
    # NumPy moves the axes of several arrays, and of integers apart from an array, to the front.
    arrays = [i for i, entry in enumerate(entries) if _is_array(entry)]
    chosen = {*arrays, *(i for i, entry in enumerate(entries) if hasattr(entry, "__index__"))}
    if len(arrays) > 1 or (arrays and max(chosen) - min(chosen) + 1 != len(chosen)):
        raise ShapeError(
            "index: one array of integers at most, and integers only next to it; got "
            f"{key!r}; index in two steps"
        )
    return entries


def _as_entry(entry: Any) -> Any:
    """Return one entry of a key, a list as an array; refuse a mask."""
    if isinstance(entry, list):
        try:
            entry = np.asarray(entry)
        except ValueError:  # ragged
            raise DTypeError(f"index: a list must hold integers; got {entry!r}") from None
    kind = entry.dtype.kind if isinstance(entry, (np.ndarray, np.generic)) else ""
    if isinstance(entry, bool) or kind == "b":
        raise DTypeError(
            "index: a mask would give a shape that depends on the data; use "
            "ag.where(mask, x, 0.0), or x[np.flatnonzero(mask)]"
        )
    return entry


def _is_array(entry: Any) -> bool:
    return isinstance(entry, Tensor) or (isinstance(entry, np.ndarray) and entry.ndim > 0)


def _position(entry: Any, axis: int, size: int) -> int:
    """Return an integer of a key, counted from the start."""
    place = as_index(entry)
    if place is None:
        raise DTypeError(f"index: needs integers, slices, ... or None; got {shown(entry)}")
    if not -size <= place < size:
        raise IndexRangeError(f"index: {place} is out of range for axis {axis} of size {size}")
    return place % size


def _from_the_start(entry: Any, axis: int, size: int) -> Any:
    """Return an array of a key with negative integers counted from the start.

    The rest is checked by take.
    """
    if isinstance(entry, Tensor):
        if entry._at[1].dtype is not int32 or index_range(entry)[0] >= 0:
            return entry
        entry = entry.numpy()
    if entry.size == 0:
        raise ShapeError(f"index: an empty list leaves nothing of axis {axis}")
    if entry.dtype.kind == "i":
        low = int(entry.min())
        if low < -size:
            raise IndexRangeError(f"index: {low} is out of range for axis {axis} of size {size}")
        entry = np.where(entry < 0, entry.astype(np.int64) + size, entry)
    return entry


def _flat(places: TensorLike) -> TensorLike:
    return reshape(places, -1) if isinstance(places, Tensor) else np.ravel(places)


def _written(entry: slice) -> str:
    """Return a slice as it is written between brackets."""
    parts = ["" if part is None else str(part) for part in (entry.start, entry.stop, entry.step)]
    return ":".join(parts if parts[2] else parts[:2])
