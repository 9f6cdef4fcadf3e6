"""Parts of a tensor, and a tensor from parts."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from .._ffi import lib
from ..checks import as_list, plain_number, positive_integer, shown
from ..dtypes import float32
from ..errors import DTypeError, ShapeError
from ..graph import MAX_DIMS, Op, Spec
from ..lowering import GgmlTensor, Lowering
from ..tensor import Tensor, TensorLike, as_tensor, passing, record
from .elementwise import filled
from .rules import check_ndim, need_axes, need_floats, normalize_axis
from .shaping import unsqueeze

# ---- slice and pad, each the gradient of the other -----------------------------------------------
# A slice is a view, which costs nothing; whoever needs the elements in order copies them.

Range = tuple[int, int, int]
"""Of one axis. In a slice: start, step, count. In a pad: entries before, step, entries after."""


def lower_slice(b: Lowering, x: GgmlTensor, *, ranges: tuple[Range, ...]) -> GgmlTensor:
    """Return a view of the (start, step, count) entries of the last axes."""
    sizes, strides, offset = list(x.ne), list(x.nb), 0
    for i, (start, step, count) in enumerate(reversed(ranges)):
        offset += start * strides[i]
        sizes[i], strides[i] = count, step * strides[i]
    view = lib.ggml_view_4d(b.ctx, x, *sizes, *strides[1:], offset)
    view.nb[0] = strides[0]
    if b.own_kernels or view.view_offs % VIEW_ALIGNMENT == 0:
        return view
    # most of Vulkan's kernels end the process on a misaligned one
    return lib.ggml_cont(b.ctx, view)


VIEW_ALIGNMENT = 256  # bytes: the most that a Vulkan device may ask for


def _grad_slice(g: Tensor, out: Tensor, x: Tensor, *, ranges: tuple[Range, ...]) -> Tensor:
    widths = tuple(
        (start, step, size - start - (count - 1) * step - 1)
        for size, (start, step, count) in zip(x.shape, ranges, strict=True)
    )
    return record(PAD, g, widths=widths, value=0.0)


def _slice_shape(x: Spec, *, ranges: tuple[Range, ...]) -> Spec:
    if len(ranges) != len(x.shape) or any(
        start < 0 or step < 1 or count < 1 or start + (count - 1) * step >= size
        for size, (start, step, count) in zip(x.shape, ranges, strict=True)
    ):
        raise ShapeError(f"slice: (start, step, count) {ranges} do not lie in shape {x.shape}")
    return Spec(tuple(count for _, _, count in ranges), x.dtype)


SLICE: Op = Op(
    "slice",
    shape=_slice_shape,
    lower=lower_slice,
    alias=True,
    grad=_grad_slice,
    reference=lambda x, ranges: x[
        tuple(slice(start, start + step * count, step) for start, step, count in ranges)
    ],
)


def sliced(x: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Return the entries of each axis that its (start, step, count) names; they must exist."""
    if all(wanted == (0, 1, size) for wanted, size in zip(ranges, x.shape, strict=True)):
        return x
    return record(SLICE, x, ranges=tuple(ranges))


def _pad_shape(x: Spec, *, widths: tuple[Range, ...], value: float) -> Spec:
    need_floats("pad", x)
    if len(widths) != len(x.shape) or any(b < 0 or step < 1 or a < 0 for b, step, a in widths):
        raise ShapeError(f"pad: (before, step, after) {widths} do not fit shape {x.shape}")
    sizes = zip(x.shape, widths, strict=True)
    return Spec(tuple(b + (size - 1) * step + 1 + a for size, (b, step, a) in sizes), x.dtype)


def lower_pad(b: Lowering, x: GgmlTensor, *, widths: tuple[Range, ...], value: float) -> GgmlTensor:
    """Return x with entries of one value around its last axes, and step - 1 zeros between x's."""
    full = [*reversed(widths), *[(0, 1, 0)] * (MAX_DIMS - len(widths))]  # ggml's order
    if b.own_kernels:
        ne = [before + (n - 1) * s + 1 + a for n, (before, s, a) in zip(x.ne, full, strict=True)]
        return lib.pg_pad(b.ctx, x, ne, [w[0] for w in full], [w[1] for w in full], value)
    for i, (_, step, _) in enumerate(full):
        x = _spread(b, x, i, step)
    if value == 0.0:
        x = b.contiguous(x)
        return lib.ggml_pad_ext(
            b.ctx, x, *(n for before, _, after in full for n in (before, after))
        )
    for i, (before, _, after) in enumerate(full):
        for count, is_first in ((before, True), (after, False)):
            if count:
                sizes = [count if k == i else x.ne[k] for k in range(MAX_DIMS)]
                edge = lib.ggml_fill(b.ctx, b.new(tuple(reversed(sizes)), float32), value)
                x = lib.ggml_concat(b.ctx, *((edge, x) if is_first else (x, edge)), i)
    return x


def _spread(b: Lowering, x: GgmlTensor, i: int, step: int) -> GgmlTensor:
    """Return x with step - 1 zeros between the entries of ggml's axis i."""
    if step == 1 or x.ne[i] == 1:
        return x
    sizes = list(x.ne)
    inner, outer = prod(sizes[:i]), prod(sizes[i + 1 :])
    entries = b.reshape(x, (outer, sizes[i], 1, inner))
    padded = lib.ggml_pad_ext(b.ctx, entries, 0, 0, 0, step - 1, 0, 0, 0, 0)
    sizes[i] *= step
    whole = b.reshape(padded, tuple(reversed(sizes)))
    sizes[i] -= step - 1
    return lib.ggml_view_4d(b.ctx, whole, *sizes, *list(whole.nb)[1:], 0)


def _grad_pad(
    g: Tensor, out: Tensor, x: Tensor, *, widths: tuple[Range, ...], value: float
) -> Tensor:
    return sliced(g, [(b, step, n) for n, (b, step, _) in zip(x.shape, widths, strict=True)])


def _reference_pad(x: np.ndarray, *, widths: tuple[Range, ...], value: float) -> np.ndarray:
    shape = [b + (n - 1) * step + 1 + a for n, (b, step, a) in zip(x.shape, widths, strict=True)]
    out = np.full(shape, value)
    places = zip(shape, widths, strict=True)
    out[tuple(slice(b, size - a, step) for size, (b, step, a) in places)] = x
    return out


PAD: Op = Op("pad", shape=_pad_shape, lower=lower_pad, grad=_grad_pad, reference=_reference_pad)


def pad(
    x: TensorLike,
    widths: int | tuple[int, int] | Sequence[tuple[int, int]],
    *,
    value: float = 0.0,
) -> Tensor:
    """Return x with entries of one value put around it; widths are as in numpy.pad.

    They are ((before, after), ...), one pair for each axis; one pair or one number serves all axes.
    Raises ShapeError for a negative width or another number of pairs.

    >>> ag.pad([[1.0, 2.0]], ((0, 1), (1, 0)), value=9.0).numpy()
    array([[9., 1., 2.],
           [9., 9., 9.]], dtype=float32)
    """
    x = as_tensor(x, op="pad")
    try:
        pairs = np.asarray(widths)
    except ValueError:  # pairs of several lengths
        raise ShapeError(f"pad: widths must be pairs (before, after); got {widths!r}") from None
    if pairs.dtype.kind not in "iu":
        raise DTypeError(f"pad: widths must be integers; got {widths!r}")
    if pairs.shape not in ((), (2,), (x.ndim, 2)):
        raise ShapeError(f"pad: widths must be {x.ndim} pairs (before, after); got {widths!r}")
    if pairs.min(initial=0) < 0:
        raise ShapeError(f"pad: widths must not be negative; got {widths!r}; slice to shorten")
    pairs = np.broadcast_to(pairs, (x.ndim, 2)).tolist()
    if not any(before or after for before, after in pairs):
        return x
    value = plain_number("pad", "value", value)
    return record(PAD, x, widths=tuple((before, 1, after) for before, after in pairs), value=value)


# ---- concat, stack, split ------------------------------------------------------------------------

MOST_PARTS = 8  # that one node joins; a ggml node takes at most 10 inputs


def _concat_shape(*parts: Spec, axis: int) -> Spec:
    first = parts[0]
    need_axes("concat", first, (axis,))
    if len(parts) > MOST_PARTS:
        raise ShapeError(f"concat: at most {MOST_PARTS} tensors at a time; got {len(parts)}")
    for x in parts:
        if x.dtype is not first.dtype:
            raise DTypeError(f"concat: dtypes must be equal; got {first.dtype} and {x.dtype}")
        if len(x.shape) != len(first.shape) or any(
            i != axis and m != n
            for i, (m, n) in enumerate(zip(x.shape, first.shape, strict=True), -len(x.shape))
        ):
            raise ShapeError(
                f"concat: shapes must be equal except along axis {axis + len(first.shape)}; got "
                f"{first.shape} and {x.shape}"
            )
    sizes = list(first.shape)
    sizes[axis] = sum(x.shape[axis] for x in parts)
    return Spec(tuple(sizes), first.dtype)


def _lower_concat(b: Lowering, *parts: GgmlTensor, axis: int) -> GgmlTensor:
    if b.own_kernels:  # ggml's looks at each element, and shares out the third axis only
        return lib.pg_concat(b.ctx, [b.contiguous(x) for x in parts], len(parts), -1 - axis)
    joined, *rest = parts
    for x in rest:
        joined = lib.ggml_concat(b.ctx, joined, x, -1 - axis)
    return joined


def _grad_concat(g: Tensor, out: Tensor, *parts: Tensor, axis: int) -> tuple[Tensor, ...]:
    return _cut(g, [x.shape[axis] for x in parts], axis)


CONCAT: Op = Op(
    "concat",
    shape=_concat_shape,
    lower=_lower_concat,
    grad=_grad_concat,
    reference=lambda *parts, axis: np.concatenate(parts, axis=axis),
)


def concat(tensors: Sequence[TensorLike], *, axis: int = 0) -> Tensor:
    """Return tensors joined along an axis; all other sizes must be equal.

    Raises ShapeError if they are not, or if there are no tensors; DTypeError for mixed types.

    >>> ag.concat([[[1.0, 2.0]], [[3.0, 4.0]]], axis=1).numpy()
    array([[1., 2., 3., 4.]], dtype=float32)
    """
    parts = _parts("concat", tensors)
    axis = normalize_axis("concat", axis, parts[0].ndim)
    while len(parts) > 1:
        groups = [parts[i : i + MOST_PARTS] for i in range(0, len(parts), MOST_PARTS)]
        parts = [record(CONCAT, *some, axis=axis) if len(some) > 1 else some[0] for some in groups]
    return parts[0]


def stack(tensors: Sequence[TensorLike], *, axis: int = 0) -> Tensor:
    """Return tensors of one shape joined along a new axis, at the given place in the result.

    >>> ag.stack([[1.0, 2.0], [3.0, 4.0]], axis=1).numpy()
    array([[1., 3.],
           [2., 4.]], dtype=float32)
    """
    parts = _parts("stack", tensors)
    shapes = {x.shape for x in parts}
    if len(shapes) > 1:
        raise ShapeError(f"stack: shapes must be equal; got {' and '.join(map(str, shapes))}")
    check_ndim("stack", (len(parts), *parts[0].shape))
    axis = normalize_axis("stack", axis, parts[0].ndim + 1)
    return concat([unsqueeze(x, axis=axis) for x in parts], axis=axis)


def _parts(op: str, tensors: Sequence[TensorLike]) -> list[Tensor]:
    listed = as_list(op, "tensors", tensors, "tensors")
    if not listed:
        raise ShapeError(f"{op}: needs at least one tensor; got none")
    like = next((x for x in listed if isinstance(x, Tensor)), None)
    dtype = None if like is None else like._at[1].dtype
    return [as_tensor(x, like, op=op, dtype=dtype) for x in listed]


def split(x: TensorLike, sections: int | Sequence[int], *, axis: int = 0) -> tuple[Tensor, ...]:
    """Return x cut along an axis: into so many equal parts, or into parts of the given sizes.

    Raises ShapeError if the axis does not divide so.

    >>> [part.tolist() for part in ag.split([1.0, 2.0, 3.0], (1, 2))]
    [[1.0], [2.0, 3.0]]
    """
    x = as_tensor(x, op="split", dtype=None)
    place = normalize_axis("split", axis, x.ndim)
    size = x.shape[place]
    if isinstance(sections, (Sequence, np.ndarray)):
        sizes = [positive_integer("split", "sizes", part) for part in sections]
    else:
        count = positive_integer("split", "sections", sections)
        sizes = [size // count] * min(count, size + 1)
    if sum(sizes) != size or 0 in sizes:
        raise ShapeError(
            f"split: axis {axis} has size {size}, which {shown(sections)} does not divide"
        )
    return _cut(x, sizes, place)


def _cut(x: Tensor, sizes: Sequence[int], axis: int) -> tuple[Tensor, ...]:
    """Return x cut along an axis, counted from the end, into parts of sizes that add up to it."""
    parts, start = [], 0
    for size in sizes:
        ranges = [(0, 1, n) for n in x.shape]
        ranges[axis] = (start, 1, size)
        parts.append(sliced(x, ranges))
        start += size
    return tuple(parts)


def join_tiles(terms: list[Tensor]) -> list[Tensor]:
    """Return tensors that have the same sum: zero-padded ones side by side become one concat.

    Such are the gradients of the parts that a tensor was cut into.
    """
    tiles: dict[int, list[tuple[int, Tensor]]] = {}  # by axis: where each begins
    for term in terms:
        place = place_of_tile(term)
        if place is not None:
            axis, begin = place
            tiles.setdefault(axis, []).append((begin, term))
    for axis, found in tiles.items():
        joined: list[Tensor] = []
        pieces: list[Tensor] = []
        end = 0
        for begin, term in sorted(found, key=lambda tile: tile[0]):
            if begin < end:  # it overlaps the one before
                continue
            inner = passing(term._at[1].inputs[0], term._at[0])
            pieces += [*_zeros(term, axis, begin - end), inner]
            joined.append(term)
            end = begin + inner.shape[axis]
        if len(joined) > 1:
            pieces += _zeros(terms[0], axis, terms[0].shape[axis] - end)
            others = [term for term in terms if not any(term is tile for tile in joined)]
            return join_tiles([*others, concat(pieces, axis=axis)])
    return terms


def _zeros(like: Tensor, axis: int, size: int) -> list[Tensor]:
    """Return zeros of a tensor's shape but for the size of one axis, or nothing if that is 0."""
    shape = list(like.shape)
    shape[axis] = size
    return [passing(filled(tuple(shape), 0.0), like._at[0])] if size else []


def place_of_tile(x: Tensor) -> tuple[int, int] | None:
    """Return the axis along which zeros stand around something, and where that begins."""
    node = x._at[1]
    if node.op is not PAD:
        return None
    settings = dict(node.settings)
    padded = [(i, w) for i, w in enumerate(settings["widths"], -x.ndim) if w != (0, 1, 0)]
    if settings["value"] != 0.0 or len(padded) != 1 or padded[0][1][1] != 1:
        return None
    axis, (begin, _, _) = padded[0]
    return axis, begin
