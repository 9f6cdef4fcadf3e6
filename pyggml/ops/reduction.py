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
from .elementwise import affine
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
