"""Many elements to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isqrt, prod

import numpy as np

from .._ffi import lib
from ..checks import as_bool, as_index
from ..dtypes import float32, int32
from ..errors import SettingError
from ..graph import MAX_DIMS, Op, Shape, Spec
from ..lowering import GgmlTensor, Lowering, shape_of
from ..tensor import Axis, Tensor, TensorLike, as_tensor, record
from .comparison import clamp, equal, where
from .elementwise import add, affine, detach, div, exp, log, mul, neg, sub
from .power import sqr, sqrt
from .rules import need_axes, need_floats, normalize_axes, normalize_axis, split_at
from .shaping import broadcast_to, reshape

Stage = tuple[int, int, int]


def reduced_shape(shape: Shape, axes: tuple[int, ...], keepdims: bool) -> Shape:
    """Return the shape that is left after reducing axes, which count from the end."""
    sizes = enumerate(shape, start=-len(shape))
    return tuple(1 if i in axes else size for i, size in sizes if keepdims or i not in axes)


def _reducing(op: str) -> Callable[..., Spec]:
    """Return the shape rule of a reduction of floats to floats."""

    def rule(x: Spec, *, axes: tuple[int, ...], keepdims: bool) -> Spec:
        need_floats(op, x)
        need_axes(op, x, axes)
        return Spec(reduced_shape(x.shape, axes, keepdims), x.dtype)

    return rule


def _reduction_stages(sizes: Shape, axes: tuple[int, ...]) -> list[Stage]:
    """Return how to reduce axes in contiguous memory, one after another.

    Each is the middle of (outer, middle, inner). Neighbouring axes are one, and axes of size 1
    belong to either neighbour.
    """
    left = list(sizes)
    stages = []
    first = last = len(sizes)
    while first > 0:
        first = last = first - 1
        while first >= 0 and (first - len(sizes) in axes or left[first] == 1):
            first -= 1
        outer, middle = prod(left[: first + 1]), prod(left[first + 1 : last + 1])
        if middle > 1:
            stages.append((outer, middle, prod(left[last + 1 :])))
            left[first + 1 : last + 1] = [1] * (last - first)
    return stages


PIECES, MANY = 64, 1 << 15  # from MANY elements on, a reduction to one is shared by the workers


def _reduce_in_stages(
    b: Lowering, kernel: Callable[..., GgmlTensor], x: GgmlTensor, stages: Sequence[Stage]
) -> GgmlTensor:
    for outer, middle, inner in stages:
        if outer == inner == 1 and middle >= MANY and middle % PIECES == 0:
            x = kernel(b.ctx, x, PIECES, 1)
        x = kernel(b.ctx, x, outer, inner)
    return x


LONG_ROW = 4096  # elements; ggml's Vulkan backend sums a row in one workgroup, in float32

# ---- sum -----------------------------------------------------------------------------------------


def _parts_of(length: int) -> int:
    """Return the number of equal parts, near the root of it, to sum a long row in; 1 if none."""
    if length < LONG_ROW:
        return 1
    return next(parts for parts in range(isqrt(length), 0, -1) if length % parts == 0)


def _lower_sum(b: Lowering, x: GgmlTensor, *, axes: tuple[int, ...], keepdims: bool) -> GgmlTensor:
    x = b.contiguous(x)
    sizes = shape_of(x)
    result = reduced_shape(sizes, axes, keepdims)
    stages = _reduction_stages(sizes, axes)
    if b.own_kernels:  # ggml's sums run on one thread
        return b.reshape(_reduce_in_stages(b, lib.pg_sum_middle, x, stages), result)
    if len(stages) == 1 and stages[0][2] == 1:
        rows, length, _ = stages[0]
        parts = _parts_of(length)
        if parts > 1:  # sums of sums are more exact, and give a GPU more to do at once
            x = lib.ggml_sum_rows(b.ctx, b.reshape(x, (rows * parts, length // parts)))
            length = parts
        return b.reshape(lib.ggml_sum_rows(b.ctx, b.reshape(x, (rows, length))), result)
    kept = reduced_shape(sizes, axes, keepdims=True)
    return b.reshape(lib.ggml_repeat_back(b.ctx, x, b.new(kept, float32)), result)


def _grad_sum(
    g: Tensor, out: Tensor, x: Tensor, *, axes: tuple[int, ...], keepdims: bool
) -> Tensor:
    return broadcast_to(reshape(g, reduced_shape(x.shape, axes, keepdims=True)), x.shape)


SUM = Op(
    "sum",
    shape=_reducing("sum"),
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
    kept = as_bool("sum", "keepdims", keepdims)
    return record(SUM, x, axes=axes, keepdims=kept) if axes else x


# ---- mean ----------------------------------------------------------------------------------------


def _share(sizes: Shape, axes: tuple[int, ...]) -> float:
    """Return what each element over these axes counts for in their mean."""
    return 1.0 / prod([sizes[axis] for axis in axes])


def _lower_mean(b: Lowering, x: GgmlTensor, *, axes: tuple[int, ...], keepdims: bool) -> GgmlTensor:
    total = _lower_sum(b, x, axes=axes, keepdims=keepdims)
    return lib.ggml_scale(b.ctx, total, _share(shape_of(x), axes))


def _grad_mean(
    g: Tensor, out: Tensor, x: Tensor, *, axes: tuple[int, ...], keepdims: bool
) -> Tensor:
    share = affine(g, scale=_share(x.shape, axes))
    return _grad_sum(share, out, x, axes=axes, keepdims=keepdims)


MEAN = Op(
    "mean",
    shape=_reducing("mean"),
    lower=_lower_mean,
    grad=_grad_mean,
    reference=lambda x, axes, keepdims: np.mean(x, axis=axes, keepdims=keepdims),
)


def mean(x: TensorLike, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the mean over axes; axis is an int, a tuple, or None for all.

    >>> ag.mean([[1.0, 2.0], [3.0, 4.0]]).item()
    2.5
    """
    x = as_tensor(x, op="mean")
    axes = normalize_axes("mean", axis, x.ndim)
    kept = as_bool("mean", "keepdims", keepdims)
    return record(MEAN, x, axes=axes, keepdims=kept) if axes else x


def sum_to(x: Tensor, shape: Shape) -> Tensor:
    """Return x summed over the axes that broadcasting a tensor of the given shape has stretched."""
    lead = x.ndim - len(shape)
    stretched = [i for i in range(lead, x.ndim) if shape[i - lead] == 1 and x.shape[i] != 1]
    axes = (*range(lead), *stretched)
    return reshape(sum(x, axis=axes, keepdims=True), shape) if axes else x


def _checked(op: str, x: TensorLike, axis: Axis) -> tuple[Tensor, tuple[int, ...]]:
    """Return x and axes for a function made of other ops, whose messages would name those."""
    x = as_tensor(x, op=op)
    need_floats(op, Spec(x.shape, x._at[1].dtype))
    return x, normalize_axes(op, axis, x.ndim)


# ---- max, min ------------------------------------------------------------------------------------


def _lower_max(b: Lowering, x: GgmlTensor, *, axes: tuple[int, ...], keepdims: bool) -> GgmlTensor:
    sizes = shape_of(x)
    result = reduced_shape(sizes, axes, keepdims)
    if b.own_kernels:
        stages = _reduction_stages(sizes, axes)
        return b.reshape(_reduce_in_stages(b, lib.pg_max_middle, b.contiguous(x), stages), result)
    rows = rows_of(b, x, axes)
    count, length = rows.ne[1], rows.ne[0]
    best = lib.ggml_argmax(b.ctx, rows)
    table = b.reshape(rows, (count, length, 1))
    top = lib.ggml_get_rows(b.ctx, table, b.reshape(best, (count, 1)))
    # NaN anywhere in a row makes its maximum NaN, but ggml's comparisons pass it over
    zero = lib.ggml_scale(b.ctx, lib.ggml_sum_rows(b.ctx, lib.ggml_sigmoid(b.ctx, rows)), 0.0)
    return b.reshape(lib.ggml_add(b.ctx, b.reshape(top, (count, 1)), zero), result)


def rows_of(b: Lowering, x: GgmlTensor, axes: tuple[int, ...]) -> GgmlTensor:
    """Return the elements as a matrix: what is reduced together in one row."""
    sizes = shape_of(x)
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
    shape=_reducing("max"),
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
    kept = as_bool("max", "keepdims", keepdims)
    return record(MAX, x, axes=axes, keepdims=kept) if axes else x


def min(x: TensorLike, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the smallest element over axes; axis is an int, a tuple, or None for all.

    NaN where there is one. The gradient is shared evenly among elements that are equally small.

    >>> ag.min([[1.0, 2.0], [4.0, 3.0]], axis=1).numpy()
    array([1., 3.], dtype=float32)
    """
    x, axes = _checked("min", x, axis)
    return neg(max(neg(x), axis=axes, keepdims=keepdims))


# ---- logsumexp -----------------------------------------------------------------------------------

LARGEST = float(np.finfo(np.float32).max)


def logsumexp(x: TensorLike, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return log(sum(exp(x))) over axes without overflow; axis is an int, a tuple, or None for all.

    Where all elements are -inf the result is -inf and the gradient 0.

    >>> ag.logsumexp([1000.0, -np.inf]).item()
    1000.0
    """
    x, axes = _checked("logsumexp", x, axis)
    # The largest element moves to 0; it is finite, so that infinity less infinity does not occur.
    top = detach(clamp(max(x, axis=axes, keepdims=True), min=-LARGEST, max=LARGEST))
    total = sum(exp(sub(x, top)), axis=axes, keepdims=keepdims)
    none = equal(total, 0.0)  # there log(0 + 1), whose slope is finite
    logarithm = add(log(add(total, none)), reshape(top, total.shape))
    return where(none, -inf, logarithm)


# ---- argmax --------------------------------------------------------------------------------------


def _argmax_shape(x: Spec, *, axis: int, keepdims: bool) -> Spec:
    need_floats("argmax", x)
    need_axes("argmax", x, (axis,))
    return Spec(reduced_shape(x.shape, (axis,), keepdims), int32)


def _lower_argmax(b: Lowering, x: GgmlTensor, *, axis: int, keepdims: bool) -> GgmlTensor:
    sizes = shape_of(x)
    result = reduced_shape(sizes, (axis,), keepdims)
    if b.own_kernels:
        before, _, after = split_at(sizes, axis)
        best = lib.pg_argmax_middle(b.ctx, b.contiguous(x), prod(before), prod(after))
        return b.reshape(best, result)
    # ggml_argmax gives any of equal elements, the last one on the CPU. So the largest are marked,
    # the first of them with the largest number (numbers are exact up to 2^24).
    rows = rows_of(b, x, (axis,))
    length = rows.ne[0]
    top = b.reshape(_lower_max(b, rows, axes=(-1,), keepdims=True), (rows.ne[1], 1))
    smaller = lib.ggml_step(b.ctx, b.binary(lib.ggml_sub, top, rows, commutative=False))
    ties = lib.ggml_scale_bias(b.ctx, smaller, -1.0, 1.0)
    numbers = lib.ggml_scale_bias(b.ctx, lib.ggml_arange(b.ctx, 0, length, 1), -1.0, length)
    return b.reshape(lib.ggml_argmax(b.ctx, lib.ggml_mul(b.ctx, ties, numbers)), result)


ARGMAX = Op(
    "argmax",
    shape=_argmax_shape,
    lower=_lower_argmax,
    differentiable=False,
    reference=lambda x, axis, keepdims: np.argmax(x, axis=axis, keepdims=keepdims),
)


def argmax(x: TensorLike, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the int32 index of the largest element along an axis, or among all elements in order.

    The first of equal elements counts. No gradient flows through it.

    >>> ag.argmax([[1.0, 3.0, 2.0], [5.0, 4.0, 5.0]], axis=1).numpy()
    array([1, 0], dtype=int32)
    """
    x = as_tensor(x, op="argmax")
    kept = as_bool("argmax", "keepdims", keepdims)
    if axis is not None:
        axis = normalize_axis("argmax", axis, x.ndim)
        return record(ARGMAX, x, axis=axis, keepdims=kept)
    best = record(ARGMAX, reshape(x, (x.size,)), axis=-1, keepdims=False)
    return reshape(best, (1,) * x.ndim) if kept else best


# ---- norm, var, std ------------------------------------------------------------------------------


def norm(x: TensorLike, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the Euclidean norm over axes: sqrt(sum(x * x)). Its gradient at the zero vector is 0.

    >>> ag.norm([[3.0, 4.0], [0.0, 2.0]], axis=1).numpy()
    array([5., 2.], dtype=float32)
    """
    x, axes = _checked("norm", x, axis)
    return _root(sum(sqr(x), axis=axes, keepdims=keepdims))


def _root(x: Tensor) -> Tensor:
    """Return sqrt(x), but at 0 as sqrt(0 + 1) - 1, whose slope is finite."""
    zero = equal(x, 0.0)
    return sub(sqrt(add(x, zero)), zero)


def var(x: TensorLike, *, axis: Axis = None, keepdims: bool = False, ddof: int = 0) -> Tensor:
    """Return the variance over axes: the squared distance from the mean, summed, / (count - ddof).

    ddof=1 makes it the unbiased estimate. Raises SettingError unless 0 <= ddof < count.

    >>> ag.var([[1.0, 3.0], [2.0, 8.0]], axis=1).numpy()
    array([1., 9.], dtype=float32)
    """
    return _var("var", x, axis, keepdims, ddof)


def std(x: TensorLike, *, axis: Axis = None, keepdims: bool = False, ddof: int = 0) -> Tensor:
    """Return the standard deviation over axes, sqrt(var). Where it is 0, so is its gradient.

    >>> ag.std([[1.0, 3.0], [2.0, 8.0]], axis=1).numpy()
    array([1., 3.], dtype=float32)
    """
    return _root(_var("std", x, axis, keepdims, ddof))


def _var(op: str, x: TensorLike, axis: Axis, keepdims: bool, ddof: int) -> Tensor:
    x, axes = _checked(op, x, axis)
    count = prod([x.shape[a] for a in axes])
    taken = as_index(ddof)
    if taken is None or not 0 <= taken < count:
        raise SettingError(f"{op}: ddof must be in [0, {count}), the elements; got {ddof!r}")
    centered = sub(x, mean(x, axis=axes, keepdims=True))
    return affine(sum(sqr(centered), axis=axes, keepdims=keepdims), scale=1.0 / (count - taken))
