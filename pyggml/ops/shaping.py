"""The same elements in another arrangement."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from .._ffi import lib
from ..checks import as_list, positive_integer
from ..errors import ShapeError
from ..graph import MAX_DIMS, SOURCE, Op, Shape, Spec
from ..lowering import GgmlTensor, Lowering
from ..tensor import Tensor, TensorLike, as_tensor, passing, pending, record
from .elementwise import constant
from .rules import (
    as_shape,
    broadcast_shapes,
    check_ndim,
    need_axes,
    normalize_axes,
    normalize_axis,
    split_at,
)

# ---- reshape -------------------------------------------------------------------------------------


def _reshape_shape(x: Spec, *, shape: Shape) -> Spec:
    check_ndim("reshape", shape)
    if prod(shape) != prod(x.shape):
        raise ShapeError(
            f"reshape: {x.shape} has {prod(x.shape)} elements, {shape} has {prod(shape)}"
        )
    return Spec(shape, x.dtype)


RESHAPE = Op(
    "reshape",
    shape=_reshape_shape,
    lower=lambda b, x, shape: b.reshape(x, shape),
    alias=True,
    grad=lambda g, out, x, shape: reshape(g, x.shape),
    reference=lambda x, shape: np.reshape(x, shape),
    fold=lambda x, shape: constant(x, shape),
)


def reshape(x: TensorLike, shape: int | Sequence[int]) -> Tensor:
    """Return the same elements in another shape; one size may be -1.

    Raises ShapeError if the number of elements differs.

    >>> ag.reshape([[1.0, 2.0], [3.0, 4.0]], -1).numpy()
    array([1., 2., 3., 4.], dtype=float32)
    """
    x = as_tensor(x, op="reshape", dtype=None)
    sizes = as_shape("reshape", shape, unknown=True)
    if -1 in sizes:
        if sizes.count(-1) > 1:
            raise ShapeError(f"reshape: sizes must be positive, one of them may be -1; got {sizes}")
        rest = -prod(sizes)
        if prod(x.shape) % rest:
            raise ShapeError(
                f"reshape: {x.shape} has {prod(x.shape)} elements, which {sizes} cannot hold"
            )
        sizes = tuple(prod(x.shape) // rest if size == -1 else size for size in sizes)
    return record(RESHAPE, x, shape=sizes)


# ---- permute and transpose -----------------------------------------------------------------------


def _lower_permute(b: Lowering, x: GgmlTensor, *, axes: tuple[int, ...]) -> GgmlTensor:
    target = list(range(MAX_DIMS))  # where each of ggml's axes goes
    for axis, origin in enumerate(axes, start=-len(axes)):
        target[-1 - origin] = -1 - axis
    return lib.ggml_permute(b.ctx, x, *target)


def _permute_shape(x: Spec, *, axes: tuple[int, ...]) -> Spec:
    need_axes("permute", x, axes)
    if len(axes) != len(x.shape):
        raise ShapeError(f"permute: each of the {len(x.shape)} axes exactly once; got {axes}")
    return Spec(tuple(x.shape[a] for a in axes), x.dtype)


PERMUTE = Op(
    "permute",
    shape=_permute_shape,
    lower=_lower_permute,
    alias=True,
    grad=lambda g, out, x, axes: permute(g, np.argsort([a % len(axes) for a in axes]).tolist()),
    reference=lambda x, axes: np.transpose(x, axes),
)


def permute(x: TensorLike, axes: Sequence[int]) -> Tensor:
    """Return x with its axes in another order: axis i of the result is axis axes[i] of x.

    >>> ag.permute([[1.0, 2.0], [3.0, 4.0]], (1, 0)).numpy()
    array([[1., 3.],
           [2., 4.]], dtype=float32)
    """
    x = as_tensor(x, op="permute", dtype=None)
    listed = axes if type(axes) is tuple else as_list("permute", "axes", axes, "integers")
    order = tuple(normalize_axis("permute", axis, x.ndim) for axis in listed)
    if sorted(order) != list(range(-x.ndim, 0)):
        raise ShapeError(f"permute: each of the {x.ndim} axes exactly once; got {tuple(listed)}")
    return _permuted(x, order)


def _permuted(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Record a permutation; two in a row are one, and one that changes nothing is none."""
    frame, node = x._at
    if node.op is not PERMUTE or frame.ended:
        return record(PERMUTE, x, axes=axes)
    inner, first = node.inputs[0], dict(node.settings)["axes"]
    combined = tuple(first[axis] for axis in axes)
    # A leaf is not handed out again: what follows a permutation is a result, not the parameter.
    if combined == tuple(range(-len(axes), 0)) and inner.op is not SOURCE:
        return pending(inner, frame)
    return record(PERMUTE, passing(inner, frame), axes=combined)


def transpose(x: TensorLike, axis1: int | None = None, axis2: int | None = None) -> Tensor:
    """Return x with its axes reversed, or with two of them exchanged.

    >>> ag.transpose([[1.0, 2.0, 3.0]]).shape
    (3, 1)
    """
    x = as_tensor(x, op="transpose", dtype=None)
    if axis1 is None and axis2 is None:
        return _permuted(x, _REVERSED[x.ndim])
    if axis1 is None or axis2 is None:
        raise ShapeError("transpose: give both axes or none")
    order = list(range(-x.ndim, 0))
    i, j = normalize_axis("transpose", axis1, x.ndim), normalize_axis("transpose", axis2, x.ndim)
    order[i], order[j] = order[j], order[i]
    return _permuted(x, tuple(order))


_REVERSED = [tuple(range(-1, -ndim - 1, -1)) for ndim in range(MAX_DIMS + 1)]


# ---- broadcast_to --------------------------------------------------------------------------------


def _broadcast_to_shape(x: Spec, *, shape: Shape) -> Spec:
    check_ndim("broadcast_to", shape)
    if broadcast_shapes("broadcast_to", x.shape, shape) != shape:
        raise ShapeError(f"broadcast_to: {x.shape} cannot grow to {shape}")
    return Spec(shape, x.dtype)


BROADCAST_TO = Op(
    "broadcast_to",
    shape=_broadcast_to_shape,
    lower=lambda b, x, shape: b.broadcast(x, shape),
    grad=lambda g, out, x, shape: g,  # the engine sums it back
    reference=lambda x, shape: np.broadcast_to(x, shape),
    fold=lambda x, shape: constant(x, shape),
)


def broadcast_to(x: TensorLike, shape: Sequence[int]) -> Tensor:
    """Return x repeated along axes of size 1, and along new leading axes, until it has the shape.

    >>> ag.broadcast_to([1.0, 2.0], (2, 2)).numpy()
    array([[1., 2.],
           [1., 2.]], dtype=float32)
    """
    x = as_tensor(x, op="broadcast_to", dtype=None)
    wanted = as_shape("broadcast_to", shape)
    return x if wanted == x.shape else record(BROADCAST_TO, x, shape=wanted)


# ---- squeeze, unsqueeze, repeat, tile: reshapes and broadcasts -----------------------------------


def squeeze(x: TensorLike, *, axis: int | Sequence[int] | None = None) -> Tensor:
    """Return x without axes of size 1: those named, or all of them.

    Raises ShapeError if a named axis has another size.

    >>> ag.squeeze([[[1.0], [2.0]]]).shape, ag.squeeze([[[1.0], [2.0]]], axis=0).shape
    ((2,), (2, 1))
    """
    x = as_tensor(x, op="squeeze", dtype=None)
    sizes = list(enumerate(x.shape, start=-x.ndim))
    if axis is None:
        return reshape(x, [size for _, size in sizes if size != 1])
    axes = normalize_axes("squeeze", axis, x.ndim)
    if any(size != 1 for i, size in sizes if i in axes):
        raise ShapeError(f"squeeze: axes must have size 1; got axis={axis} of shape {x.shape}")
    return reshape(x, [size for i, size in sizes if i not in axes])


def unsqueeze(x: TensorLike, *, axis: int) -> Tensor:
    """Return x with a new axis of size 1, which stands at the given place in the result.

    >>> ag.unsqueeze([1.0, 2.0], axis=0).shape, ag.unsqueeze([1.0, 2.0], axis=-1).shape
    ((1, 2), (2, 1))
    """
    x = as_tensor(x, op="unsqueeze", dtype=None)
    check_ndim("unsqueeze", (*x.shape, 1))
    sizes = list(x.shape)
    sizes.insert(normalize_axis("unsqueeze", axis, x.ndim + 1) + x.ndim + 1, 1)
    return reshape(x, sizes)


def repeat(x: TensorLike, repeats: int, *, axis: int) -> Tensor:
    """Return x with each entry along an axis repeated in place, as numpy.repeat does.

    >>> ag.repeat([1.0, 2.0], 2, axis=0).numpy()
    array([1., 1., 2., 2.], dtype=float32)
    """
    x = as_tensor(x, op="repeat", dtype=None)
    before, size, after = split_at(x.shape, normalize_axis("repeat", axis, x.ndim))
    count = positive_integer("repeat", "repeats", repeats)
    inner = prod(after)
    copies = broadcast_to(reshape(x, (-1, 1, inner)), (prod(before) * size, count, inner))
    return reshape(copies, (*before, size * count, *after))


def tile(x: TensorLike, repeats: int, *, axis: int) -> Tensor:
    """Return that many copies of x, one after the other along an axis.

    >>> ag.tile([1.0, 2.0], 2, axis=0).numpy()
    array([1., 2., 1., 2.], dtype=float32)
    """
    x = as_tensor(x, op="tile", dtype=None)
    before, size, after = split_at(x.shape, normalize_axis("tile", axis, x.ndim))
    count = positive_integer("tile", "repeats", repeats)
    inner = size * prod(after)
    copies = broadcast_to(reshape(x, (-1, 1, inner)), (prod(before), count, inner))
    return reshape(copies, (*before, size * count, *after))
