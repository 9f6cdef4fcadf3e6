"""Many elements to one."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from .._ffi import lib
from ..dtypes import float32
from ..graph import MAX_DIMS, Op, Shape, Spec
from ..lowering import GgmlTensor, Lowering
from ..tensor import Tensor, TensorLike, as_tensor, record
from .comparison import clamp, equal, lower_clamp
from .elementwise import affine, div, exp, lower_exp, mul, neg, sub
from .rules import need_floats, normalize_axes
from .shaping import broadcast_to, reshape

Axis = int | Sequence[int] | None


def reduced_shape(shape: Shape, axes: tuple[int, ...], keepdims: bool) -> Shape:
    """Return the shape that is left after reducing axes, which count from the end."""
    sizes = enumerate(shape, start=-len(shape))
    return tuple(1 if i in axes else size for i, size in sizes if keepdims or i not in axes)


# ---- sum -----------------------------------------------------------------------------------------


def _sum_shape(x: Spec, *, axes: tuple[int, ...], keepdims: bool) -> Spec:
    need_floats("sum", x)
    return Spec(reduced_shape(x.shape, axes, keepdims), x.dtype)


def _lower_sum(b: Lowering, x: GgmlTensor, *, axes: tuple[int, ...], keepdims: bool) -> GgmlTensor:
    x = b.contiguous(x)
    sizes = tuple(reversed(list(x.ne)))
    kept = reduced_shape(sizes, axes, keepdims=True)
    summed = [i for i in range(MAX_DIMS) if kept[i] != sizes[i]]  # axes of size 1 need no work
    outer, inner = (
        (prod(sizes[: summed[0]]), prod(sizes[summed[-1] + 1 :])) if summed else (prod(sizes), 1)
    )
    together = summed == list(range(summed[0], summed[-1] + 1)) if summed else True
    if together and outer == inner == 1:
        total = lib.ggml_sum(b.ctx, x)
    elif together and inner == 1:
        total = lib.ggml_sum_rows(b.ctx, b.reshape(x, (outer, prod(sizes) // outer)))
    elif together and b.own_kernels:
        total = lib.pg_sum_middle(b.ctx, x, outer, prod(sizes) // (outer * inner), inner)
    else:
        total = lib.ggml_repeat_back(b.ctx, x, b.new(kept, float32))
    return b.reshape(total, kept if keepdims else reduced_shape(sizes, axes, keepdims=False))


def _grad_sum(
    g: Tensor, out: Tensor, x: Tensor, *, axes: tuple[int, ...], keepdims: bool
) -> Tensor:
    return broadcast_to(reshape(g, reduced_shape(x.shape, axes, keepdims=True)), x.shape)


SUM = Op(
    "sum",
    shape=_sum_shape,
    lower=_lower_sum,
    grad=_grad_sum,
    reference=lambda x, axes, keepdims: np.sum(x, axis=axes, keepdims=keepdims),
)


def sum(x: TensorLike, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the sum over axes; axis is an int, a tuple, or None for all.

    >>> ag.sum([[1.0, 2.0], [3.0, 4.0]], axis=0).numpy()
    array([4., 6.], dtype=float32)
    """
    x = as_tensor(x, op="sum")
    return _sum(x, normalize_axes("sum", axis, x.ndim), keepdims)


def _sum(x: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    return record(SUM, x, axes=axes, keepdims=bool(keepdims)) if axes else x


def mean(x: TensorLike, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the mean over axes; axis is an int, a tuple, or None for all.

    >>> ag.mean([[1.0, 2.0], [3.0, 4.0]]).item()
    2.5
    """
    x = as_tensor(x, op="mean")
    shape = x.shape
    axes = normalize_axes("mean", axis, len(shape))
    count = prod([shape[a] for a in axes])
    return affine(_sum(x, axes, keepdims), scale=1.0 / count)


def sum_to(x: Tensor, shape: Shape) -> Tensor:
    """Return x summed over the axes that broadcasting a tensor of the given shape has stretched."""
    lead = x.ndim - len(shape)
    stretched = [i for i in range(lead, x.ndim) if shape[i - lead] == 1 and x.shape[i] != 1]
    axes = (*range(lead), *stretched)
    return reshape(sum(x, axis=axes, keepdims=True), shape) if axes else x


# ---- max, min ------------------------------------------------------------------------------------


def _max_shape(x: Spec, *, axes: tuple[int, ...], keepdims: bool) -> Spec:
    need_floats("max", x)
    return Spec(reduced_shape(x.shape, axes, keepdims), x.dtype)


def _lower_max(b: Lowering, x: GgmlTensor, *, axes: tuple[int, ...], keepdims: bool) -> GgmlTensor:
    sizes = tuple(reversed(list(x.ne)))
    result = reduced_shape(sizes, axes, keepdims)
    if b.own_kernels:
        left = sizes
        for axis in axes:
            x = lib.pg_max_middle(b.ctx, b.contiguous(x), *split_at(left, axis))
            left = reduced_shape(left, (axis,), keepdims=True)
        return b.reshape(x, result)
    rows = rows_of(b, x, axes)
    count, length = rows.ne[1], rows.ne[0]
    best = lib.ggml_argmax(b.ctx, rows)
    table = b.reshape(rows, (count, length, 1))
    top = lib.ggml_get_rows(b.ctx, table, b.reshape(best, (count, 1)))
    # NaN anywhere in a row makes its maximum NaN, but ggml's comparisons pass it over
    zero = lib.ggml_scale(b.ctx, lib.ggml_sum_rows(b.ctx, lib.ggml_sigmoid(b.ctx, rows)), 0.0)
    return b.reshape(lib.ggml_add(b.ctx, b.reshape(top, (count, 1)), zero), result)


def split_at(sizes: Shape, axis: int) -> tuple[int, int, int]:
    """Return the number of elements before an axis, on it, and behind it."""
    axis %= len(sizes)
    return prod(sizes[:axis]), sizes[axis], prod(sizes[axis + 1 :])


def rows_of(b: Lowering, x: GgmlTensor, axes: tuple[int, ...]) -> GgmlTensor:
    """Return the elements as a matrix: what is reduced together in one row."""
    sizes = tuple(reversed(list(x.ne)))
    kept = [axis for axis in range(-MAX_DIMS, 0) if axis not in axes]
    target = [0] * MAX_DIMS  # where each of ggml's axes goes
    for place, axis in enumerate((*kept, *axes), start=-MAX_DIMS):
        target[-1 - axis] = -1 - place
    length = prod(sizes[axis] for axis in axes)
    return b.reshape(lib.ggml_permute(b.ctx, x, *target), (prod(sizes) // length, length))


def _grad_max(
    g: Tensor, out: Tensor, x: Tensor, *, axes: tuple[int, ...], keepdims: bool
) -> Tensor:
    shape = reduced_shape(x.shape, axes, keepdims=True)
    ties = equal(x, reshape(out, shape))
    return mul(ties, div(reshape(g, shape), _sum(ties, axes, True)))


MAX = Op(
    "max",
    shape=_max_shape,
    lower=_lower_max,
    grad=_grad_max,
    reference=lambda x, axes, keepdims: np.max(x, axis=axes, keepdims=keepdims),
)


def max(x: TensorLike, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the largest element over axes; axis is an int, a tuple, or None for all.

    NaN where there is one. The gradient is shared evenly among elements that are equally large.

    >>> ag.max([[1.0, 2.0], [4.0, 3.0]], axis=1).numpy()
    array([2., 4.], dtype=float32)
    """
    x = as_tensor(x, op="max")
    axes = normalize_axes("max", axis, x.ndim)
    return record(MAX, x, axes=axes, keepdims=bool(keepdims)) if axes else x


def min(x: TensorLike, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the smallest element over axes; axis is an int, a tuple, or None for all.

    NaN where there is one. The gradient is shared evenly among elements that are equally small.

    >>> ag.min([[1.0, 2.0], [4.0, 3.0]], axis=1).numpy()
    array([1., 3.], dtype=float32)
    """
    return neg(max(neg(x), axis=axis, keepdims=keepdims))


# ---- logsumexp -----------------------------------------------------------------------------------
# One op, so that its gradient is the softmax of x: finite where the composed rule divides by 0.

LARGEST = float(np.finfo(np.float32).max)


def _logsumexp_shape(x: Spec, *, axes: tuple[int, ...], keepdims: bool) -> Spec:
    need_floats("logsumexp", x)
    return Spec(reduced_shape(x.shape, axes, keepdims), x.dtype)


def _lower_logsumexp(
    b: Lowering, x: GgmlTensor, *, axes: tuple[int, ...], keepdims: bool
) -> GgmlTensor:
    # the shift is finite, so that infinity minus infinity does not occur
    top = lower_clamp(b, _lower_max(b, x, axes=axes, keepdims=True), min=-LARGEST, max=LARGEST)
    parts = lower_exp(b, b.binary(lib.ggml_sub, x, top, commutative=False))
    total = lib.ggml_log(b.ctx, _lower_sum(b, parts, axes=axes, keepdims=True))
    sizes = tuple(reversed(list(x.ne)))
    return b.reshape(lib.ggml_add(b.ctx, total, top), reduced_shape(sizes, axes, keepdims))


def _grad_logsumexp(
    g: Tensor, out: Tensor, x: Tensor, *, axes: tuple[int, ...], keepdims: bool
) -> Tensor:
    shape = reduced_shape(x.shape, axes, keepdims=True)
    finite = clamp(reshape(out, shape), min=-LARGEST)
    return mul(reshape(g, shape), exp(sub(x, finite)))


def _reference_logsumexp(x: np.ndarray, axes: tuple[int, ...], keepdims: bool) -> np.ndarray:
    top = np.clip(np.max(x, axis=axes, keepdims=True), -LARGEST, LARGEST)
    total = np.log(np.sum(np.exp(x - top), axis=axes, keepdims=True)) + top
    return np.reshape(total, reduced_shape(x.shape, axes, keepdims))


LOGSUMEXP = Op(
    "logsumexp",
    shape=_logsumexp_shape,
    lower=_lower_logsumexp,
    grad=_grad_logsumexp,
    reference=_reference_logsumexp,
)


def logsumexp(x: TensorLike, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return log(sum(exp(x))) over axes without overflow; axis is an int, a tuple, or None for all.

    Where all elements are -inf the result is -inf and the gradient 0.

    >>> ag.logsumexp([1000.0, 1000.0]).item() - 1000.0  # the logarithm of 2
    0.69317626953125
    """
    x = as_tensor(x, op="logsumexp")
    axes = normalize_axes("logsumexp", axis, x.ndim)
    return record(LOGSUMEXP, x, axes=axes, keepdims=bool(keepdims)) if axes else x
