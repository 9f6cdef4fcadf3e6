"""Normalisation to mean 0 and variance 1: over features, groups of channels, or the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from .._ffi import ffi, lib
from ..checks import number_in, positive_integer
from ..errors import SettingError, ShapeError
from ..graph import MAX_DIMS, Op, Shape, Spec
from ..lowering import GgmlTensor, Lowering, shape_of
from ..tensor import Tensor, TensorLike, as_tensor, record
from .elementwise import add, affine, div, mul, neg, sub
from .power import sqr, sqrt
from .reduction import SUM, mean, rows_of
from .rules import need_axes, need_floats, need_shape
from .shaping import reshape

# ---- normalize: (x - mean) / sqrt(variance + eps) over axes, then * weight + bias ----------------
# Two passes over x, and two over x and its gradient, where the composed form takes 16. The axes are
# the last, or all but one: then weight and bias have an element for each channel.


def _normalize_shape(x: Spec, *parameters: Spec, **settings: Any) -> Spec:
    need_floats("normalize", x, *parameters)
    need_axes("normalize", x, settings["axes"])
    for parameter in parameters:
        _need_weight("normalize", parameter.shape, x, settings["axes"])
    return Spec(x.shape, x.dtype)


def _need_weight(op: str, shape: Shape, x: Spec, axes: tuple[int, ...]) -> None:
    """Raise ShapeError unless a weight of a shape is repeated as the kernels know it.

    Its sizes are those of the last axes of x, but 1 from some axis on; and it has every normalised
    axis that lies behind one that is not.
    """
    count = len(shape)
    sizes = x.shape[len(x.shape) - count :]
    fits = any(shape == (*sizes[:k], *[1] * (count - k)) for k in range(1, len(sizes) + 1))
    kept = min((i for i in range(-len(x.shape), 0) if i not in axes), default=-len(x.shape))
    if not fits or any(axis < -count for axis in axes if axis >= kept):
        raise ShapeError(f"{op}: weight and bias of shape {shape} do not fit {x.shape}")


def _layout(x: GgmlTensor, axes: tuple[int, ...]) -> tuple[int, int]:
    """Return how many elements lie before and behind the axes that are not normalised.

    Those axes are neighbours.
    """
    sizes = shape_of(x)
    kept = [i for i in range(MAX_DIMS) if i - MAX_DIMS not in axes and sizes[i] > 1]
    first, last = (kept[0], kept[-1]) if kept else (0, -1)
    return prod(sizes[:first]), prod(sizes[last + 1 :])


def _layout_with_run(
    x: GgmlTensor, axes: tuple[int, ...], sizes: Sequence[int]
) -> tuple[int, int, int]:
    """Return _layout, and how many places in a row one element of a weight of that shape is for."""
    outer, inner = _layout(x, axes)
    run = 1
    for i, size in enumerate([*reversed(sizes), *[1] * MAX_DIMS][:MAX_DIMS]):
        if size != 1 or run == inner:
            break
        run *= x.ne[i]
    return outer, inner, run


def _weight_shape(*weight: GgmlTensor) -> Shape:
    return shape_of(weight[0]) if weight else ()


def _weights(*weight: GgmlTensor) -> int:
    """Return how many elements a weight has, 0 if there is none."""
    return lib.ggml_nelements(weight[0]) if weight else 0


def _statistics(
    b: Lowering, x: GgmlTensor, weights: int, layout: tuple[int, int, int], centered: bool
) -> GgmlTensor:
    """Return mean and variance of each channel, or NULL for rows, whose kernels compute them."""
    outer, inner, run = layout
    if outer == 1 and inner > 1 and (not weights or (run == 1 and weights == inner)):
        return ffi.NULL
    return b.once(lib.pg_norm_statistics, b.ctx, x, outer, inner, centered)


def _sums(
    b: Lowering,
    g: GgmlTensor,
    x: GgmlTensor,
    statistics: GgmlTensor,
    weights: int,
    layout: tuple[int, int, int],
) -> GgmlTensor:
    """Return what the gradients in x and in a weight have in common, or NULL for rows."""
    outer, inner, run = layout
    if statistics == ffi.NULL:
        return ffi.NULL
    return b.once(
        lib.pg_norm_sums, b.ctx, g, x, statistics, outer, inner, run if weights else inner
    )


def _on_rows(
    b: Lowering,
    axes: tuple[int, ...],
    function: Callable[..., GgmlTensor],
    *tensors: GgmlTensor,
) -> GgmlTensor:
    """Apply a function to matrices whose rows are what is normalised together.

    Undoes the rearrangement.
    """
    result = function(*(rows_of(b, x, axes) for x in tensors))
    sizes = shape_of(tensors[0])
    order = [i for i in range(MAX_DIMS) if i - MAX_DIMS not in axes]
    order += [axis + MAX_DIMS for axis in axes]
    result = b.reshape(result, tuple(sizes[i] for i in order))
    target = [0] * MAX_DIMS  # where each of ggml's axes goes
    for place, axis in enumerate(order):
        target[MAX_DIMS - 1 - place] = MAX_DIMS - 1 - axis
    return b.contiguous(lib.ggml_permute(b.ctx, result, *target))


def _lower_normalize(
    b: Lowering,
    x: GgmlTensor,
    *parameters: GgmlTensor,
    axes: tuple[int, ...],
    eps: float,
    centered: bool,
) -> GgmlTensor:
    if b.own_kernels:  # ggml adds up one element after the other
        x = b.contiguous(x)
        given = [*(b.contiguous(t) for t in parameters), ffi.NULL, ffi.NULL][:2]
        layout = _layout_with_run(x, axes, _weight_shape(*parameters[:1]))
        statistics = _statistics(b, x, _weights(*parameters[:1]), layout, centered)
        return lib.pg_norm(b.ctx, x, statistics, *given, *layout, eps, centered)
    norm = lib.ggml_norm if centered else lib.ggml_rms_norm
    y = _on_rows(b, axes, lambda rows: norm(b.ctx, rows, eps), x)
    for parameter, constructor in zip(parameters, (lib.ggml_mul, lib.ggml_add), strict=False):
        y = b.binary(constructor, y, parameter, commutative=True)
    return y


def _grad_normalize(
    g: Tensor, out: Tensor, x: Tensor, *parameters: Tensor, **settings: Any
) -> tuple[Tensor, ...]:
    in_x = record(NORMALIZE_BACK, g, x, *parameters[:1], **settings)
    in_weight = [record(NORMALIZE_DOT, g, x, shape=p.shape, **settings) for p in parameters[:1]]
    return in_x, *in_weight, *(g for _ in parameters[1:])


def _reference_normalize(
    x: np.ndarray, *parameters: np.ndarray, axes: tuple[int, ...], eps: float, centered: bool
) -> np.ndarray:
    if centered:
        x = x - np.mean(x, axis=axes, keepdims=True)
    y = x / np.sqrt(np.mean(x * x, axis=axes, keepdims=True) + eps)
    for parameter, function in zip(parameters, (np.multiply, np.add), strict=False):
        y = function(y, parameter)
    return y


NORMALIZE: Op = Op(
    "normalize",
    shape=_normalize_shape,
    lower=_lower_normalize,
    grad=_grad_normalize,
    reference=_reference_normalize,
)


def _normalize_back_shape(g: Spec, x: Spec, *weight: Spec, **settings: Any) -> Spec:
    _normalize_shape(x, *weight, **settings)
    need_floats("normalize_back", g)
    need_shape("normalize_back", "the gradient", g, *x.shape)
    return Spec(x.shape, x.dtype)


def _lower_normalize_back(
    b: Lowering,
    g: GgmlTensor,
    x: GgmlTensor,
    *weight: GgmlTensor,
    axes: tuple[int, ...],
    eps: float,
    centered: bool,
) -> GgmlTensor:
    if b.own_kernels:
        g, x = b.contiguous(g), b.contiguous(x)
        known = b.contiguous(weight[0]) if weight else ffi.NULL
        layout = _layout_with_run(x, axes, _weight_shape(*weight))
        statistics = _statistics(b, x, _weights(*weight), layout, centered)
        sums = _sums(b, g, x, statistics, _weights(*weight), layout)
        return lib.pg_norm_back(b.ctx, g, x, statistics, sums, known, *layout, eps, centered)

    def center(rows: GgmlTensor) -> GgmlTensor:
        return lib.ggml_sub(b.ctx, rows, lib.ggml_mean(b.ctx, rows)) if centered else rows

    # of the centred x, the norm is the RMS norm; and centring is its own gradient
    g = b.binary(lib.ggml_mul, g, weight[0], commutative=True) if weight else g
    return _on_rows(
        b, axes, lambda g, x: center(lib.ggml_rms_norm_back(b.ctx, g, center(x), eps)), g, x
    )


def _grad_normalize_back(
    gg: Tensor,
    out: Tensor,
    g: Tensor,
    x: Tensor,
    *weight: Tensor,
    axes: tuple[int, ...],
    **settings: Any,
) -> tuple[Tensor, ...]:
    # With h = g weight and r = 1 / sqrt(variance + eps), out = r (h - mean(h) - y mean(h y)) is
    # linear in h; its matrix, which is symmetric, is the derivative of y; that of r is -r^2 y / n.
    h = mul(g, weight[0]) if weight else g
    y = record(NORMALIZE, x, axes=axes, **settings)
    in_h = record(NORMALIZE_BACK, gg, x, axes=axes, **settings)
    along_out, along_h, along_gg = (
        mean(mul(u, v), axis=axes, keepdims=True) for u, v in ((gg, out), (h, y), (gg, y))
    )
    total = add(add(mul(y, along_out), mul(in_h, along_h)), mul(out, along_gg))
    if settings["centered"]:
        x = sub(x, mean(x, axis=axes, keepdims=True))
    variance = affine(mean(sqr(x), axis=axes, keepdims=True), shift=settings["eps"])
    in_x = neg(div(total, sqrt(variance)))
    return (mul(in_h, weight[0]), in_x, mul(in_h, g)) if weight else (in_h, in_x)


def _reference_normalize_back(
    g: np.ndarray,
    x: np.ndarray,
    *weight: np.ndarray,
    axes: tuple[int, ...],
    eps: float,
    centered: bool,
) -> np.ndarray:
    h = g * weight[0] if weight else g
    if centered:
        x, h = (t - np.mean(t, axis=axes, keepdims=True) for t in (x, h))
    variance = np.mean(x * x, axis=axes, keepdims=True) + eps
    return (h - x * np.mean(h * x, axis=axes, keepdims=True) / variance) / np.sqrt(variance)


NORMALIZE_BACK: Op = Op(
    "normalize_back",
    shape=_normalize_back_shape,
    lower=_lower_normalize_back,
    grad=_grad_normalize_back,
    reference=_reference_normalize_back,
)

# The gradient in the weight: g * y, summed over the axes along which the weight is repeated.


def _normalize_dot_shape(g: Spec, x: Spec, *, shape: Shape, **settings: Any) -> Spec:
    _normalize_back_shape(g, x, **settings)
    _need_weight("normalize_dot", shape, x, settings["axes"])
    return Spec(shape, x.dtype)


def _lower_normalize_dot(
    b: Lowering,
    g: GgmlTensor,
    x: GgmlTensor,
    *,
    shape: Shape,
    axes: tuple[int, ...],
    eps: float,
    centered: bool,
) -> GgmlTensor:
    if b.own_kernels:
        g, x = b.contiguous(g), b.contiguous(x)
        layout = _layout_with_run(x, axes, shape)
        statistics = _statistics(b, x, prod(shape), layout, centered)
        if statistics == ffi.NULL:
            dot = lib.pg_norm_dot_rows(b.ctx, g, x, layout[1], eps, centered)
        else:
            sums = _sums(b, g, x, statistics, prod(shape), layout)
            dot = lib.pg_norm_dot(b.ctx, statistics, sums, prod(shape), eps)
        return b.reshape(dot, shape)
    y = _lower_normalize(b, x, axes=axes, eps=eps, centered=centered)
    repeated = _repeated_axes(shape)
    product = lib.ggml_mul(b.ctx, y, b.contiguous(g))
    return b.reshape(SUM.lower(b, product, axes=repeated, keepdims=True), shape)


def _repeated_axes(shape: Shape) -> tuple[int, ...]:
    return tuple(i for i in range(-MAX_DIMS, 0) if i < -len(shape) or shape[i] == 1)


def _grad_normalize_dot(
    gg: Tensor, out: Tensor, g: Tensor, x: Tensor, *, shape: Shape, **settings: Any
) -> tuple[Tensor, Tensor]:
    return mul(gg, record(NORMALIZE, x, **settings)), record(
        NORMALIZE_BACK, mul(g, gg), x, **settings
    )


def _reference_normalize_dot(
    g: np.ndarray, x: np.ndarray, *, shape: Shape, **settings: Any
) -> np.ndarray:
    product = g * _reference_normalize(x, **settings)
    axes = tuple(axis for axis in _repeated_axes(shape) if axis >= -x.ndim)
    return product.sum(axis=axes, keepdims=True).reshape(shape)


NORMALIZE_DOT: Op = Op(
    "normalize_dot",
    shape=_normalize_dot_shape,
    lower=_lower_normalize_dot,
    grad=_grad_normalize_dot,
    reference=_reference_normalize_dot,
)


# ---- batch_statistic: mean, or unbiased variance, of each channel --------------------------------
# One op, because the own kernels find what normalize has computed.


def _batch_statistic_shape(x: Spec, *, axes: tuple[int, ...], variance: bool) -> Spec:
    need_floats("batch_statistics", x)
    need_axes("batch_statistics", x, axes)
    if len(axes) != len(x.shape) - 1 or prod(x.shape[axis] for axis in axes) < 2:
        raise ShapeError(f"batch_statistics: needs two values per channel; got shape {x.shape}")
    return Spec(tuple(x.shape[i] for i in range(-len(x.shape), 0) if i not in axes), x.dtype)


def _lower_batch_statistic(
    b: Lowering, x: GgmlTensor, *, axes: tuple[int, ...], variance: bool
) -> GgmlTensor:
    x = b.contiguous(x)
    outer, inner = _layout(x, axes)
    count = outer * inner
    channels = lib.ggml_nelements(x) // count
    unbiased = count / (count - 1)
    if b.own_kernels:
        statistics = b.once(lib.pg_norm_statistics, b.ctx, x, outer, inner, True)
        first = channels * lib.ggml_element_size(x) if variance else 0
        part = lib.ggml_view_1d(b.ctx, statistics, channels, first)
        return lib.pg_affine(b.ctx, part, unbiased, 0.0) if variance else part
    rows = rows_of(b, x, axes)
    result = lib.ggml_mean(b.ctx, rows)
    if variance:
        squares = lib.ggml_sqr(b.ctx, lib.ggml_sub(b.ctx, rows, result))
        result = lib.ggml_scale(b.ctx, lib.ggml_mean(b.ctx, squares), unbiased)
    return b.reshape(result, (channels,))


BATCH_STATISTIC = Op(
    "batch_statistic",
    shape=_batch_statistic_shape,
    lower=_lower_batch_statistic,
    differentiable=False,
    reference=lambda x, axes, variance: (
        np.var(x, axis=axes, ddof=1) if variance else np.mean(x, axis=axes)
    ),
)


# ---- what layers are made of ---------------------------------------------------------------------


def _parameters(
    op: str, x: Tensor, weight: TensorLike | None, bias: TensorLike | None, shape: Shape
) -> tuple[Tensor | None, Tensor | None]:
    """Return weight and bias as tensors in a shape that broadcasts."""
    tensors = [p if p is None else as_tensor(p, x, op=op) for p in (weight, bias)]
    w, b = (t if t is None or t.shape == shape else reshape(t, shape) for t in tensors)
    return w, b


def _normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, axes: tuple[int, ...], **settings: Any
) -> Tensor:
    given = () if weight is None else (weight,) if bias is None else (weight, bias)
    y = record(NORMALIZE, x, *given, axes=axes, **settings)
    return add(y, bias) if weight is None and bias is not None else y


def _check_parameters(op: str, shape: Shape, **parameters: TensorLike | None) -> None:
    for name, value in parameters.items():
        if value is not None and np.shape(value) != shape:
            raise ShapeError(f"{op}: {name} must have shape {shape}; got {np.shape(value)}")


def _norm_over_last(
    op: str,
    x: TensorLike,
    weight: TensorLike | None,
    bias: TensorLike | None,
    eps: float,
    centered: bool,
) -> Tensor:
    x = as_tensor(x, weight if isinstance(weight, Tensor) else None, op=op)
    shape = next((np.shape(p) for p in (weight, bias) if p is not None), x.shape[-1:])
    if not shape or x.shape[-len(shape) :] != shape:
        raise ShapeError(f"{op}: x {x.shape} must end in the axes to normalise, {shape}")
    _check_parameters(op, shape, weight=weight, bias=bias)
    given = _parameters(op, x, weight, bias, shape)
    axes = tuple(range(-len(shape), 0))
    return _normalized(x, *given, axes, eps=number_in(op, "eps", eps, 0.0), centered=centered)


def layer_norm(
    x: TensorLike,
    weight: TensorLike | None = None,
    bias: TensorLike | None = None,
    *,
    eps: float = 1e-5,
) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last axes, those of weight.

    Without weight and bias the last axis alone is normalised. The variance is that of the
    population (Ba, Kiros and Hinton 2016). Raises ShapeError if x does not end in their shape.

    >>> ag.layer_norm([[1.0, 3.0]], eps=0.0).numpy()
    array([[-1.,  1.]], dtype=float32)
    """
    return _norm_over_last("layer_norm", x, weight, bias, eps, centered=True)


def rms_norm(x: TensorLike, weight: TensorLike | None = None, *, eps: float = 1e-5) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axes, those of weight.

    Without weight the last axis alone is normalised (Zhang and Sennrich 2019). Raises ShapeError
    if x does not end in weight's shape.

    >>> ag.rms_norm([[3.0, -3.0]], eps=0.0).numpy()
    array([[ 1., -1.]], dtype=float32)
    """
    return _norm_over_last("rms_norm", x, weight, None, eps, centered=False)


def _channels(op: str, x: Tensor) -> tuple[int, Shape]:
    """Return the number of channels of x (N, C, ...), and the shape in which they broadcast."""
    if x.ndim < 2:
        raise ShapeError(f"{op}: needs (batch, channels, ...); got shape {x.shape}")
    return x.shape[1], (x.shape[1], *[1] * (x.ndim - 2))


def group_norm(
    x: TensorLike,
    weight: TensorLike | None = None,
    bias: TensorLike | None = None,
    *,
    groups: int,
    eps: float = 1e-5,
) -> Tensor:
    """Return x (N, C, ...) normalised over each of the groups of channels, * weight + bias, (C,).

    One group is a layer norm over all but N, C groups an instance norm (Wu and He 2018). Raises
    ShapeError if groups does not divide C.

    >>> ag.group_norm([[1.0, 3.0, 10.0, 30.0]], groups=2, eps=0.0).numpy()
    array([[-1.,  1., -1.,  1.]], dtype=float32)
    """
    op = "group_norm"
    x = as_tensor(x, weight if isinstance(weight, Tensor) else None, op=op)
    channels, _ = _channels(op, x)
    groups = positive_integer(op, "groups", groups)
    if channels % groups:
        raise ShapeError(f"{op}: groups must divide the channels; got {groups}, {channels}")
    _check_parameters(op, (channels,), weight=weight, bias=bias)
    each = channels // groups
    w, b = _parameters(op, x, weight, bias, (groups, each, 1))
    parts = reshape(x, (x.shape[0], groups, each, -1))
    y = _normalized(parts, w, b, (-2, -1), eps=number_in(op, "eps", eps, 0.0), centered=True)
    return reshape(y, x.shape)


def _batch_axes(op: str, x: Tensor) -> tuple[int, ...]:
    """Return all axes but that of the channels, having checked that each has two values."""
    _channels(op, x)
    if x.size == x.shape[1]:
        raise ShapeError(
            f"{op}: training needs more than one value per channel; got {x.shape}; use a larger "
            "batch, or the running statistics"
        )
    return tuple(axis for axis in range(-x.ndim, 0) if axis != 1 - x.ndim)


def batch_norm(
    x: TensorLike,
    weight: TensorLike | None = None,
    bias: TensorLike | None = None,
    *,
    running_mean: TensorLike | None = None,
    running_var: TensorLike | None = None,
    training: bool = False,
    eps: float = 1e-5,
) -> Tensor:
    """Return x (N, C, ...), each channel normalised over the other axes, * weight + bias, (C,).

    In training by the statistics of this batch, through which gradients flow, so they sum to zero
    over the batch; else by the running ones, (C,) each (Ioffe and Szegedy 2015). The statistics
    that a layer adds to its running ones are those of batch_statistics. Raises ShapeError in
    training if a channel has one value only, SettingError otherwise without running statistics.

    >>> ag.batch_norm([[1.0, 5.0], [3.0, 9.0]], training=True, eps=0.0).numpy()
    array([[-1., -1.],
           [ 1.,  1.]], dtype=float32)
    """
    op = "batch_norm"
    x = as_tensor(x, weight if isinstance(weight, Tensor) else None, op=op)
    channels, shape = _channels(op, x)
    _check_parameters(
        op, (channels,), weight=weight, bias=bias, running_mean=running_mean,
        running_var=running_var,
    )  # fmt: skip
    eps = number_in(op, "eps", eps, 0.0)
    w, b = _parameters(op, x, weight, bias, shape)
    if training:
        return _normalized(x, w, b, _batch_axes(op, x), eps=eps, centered=True)
    if running_mean is None or running_var is None:
        raise SettingError(f"{op}: outside of training, give running_mean= and running_var=")
    center, variance = (reshape(as_tensor(t, x, op=op), shape) for t in (running_mean, running_var))
    scale = div(1.0, sqrt(affine(variance, shift=eps)))
    y = mul(sub(x, center), scale if w is None else mul(scale, w))
    return y if b is None else add(y, b)


def batch_statistics(x: TensorLike) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased variance of each channel of x (N, C, ...): (C,) and (C,), detached.

    What batch_norm in training normalises by, but for the variance, which is divided by the count
    less one. Raises ShapeError if a channel has one value only.

    >>> [statistic.numpy().tolist() for statistic in ag.batch_statistics([[1.0], [3.0]])]
    [[2.0], [2.0]]
    """
    x = as_tensor(x, op="batch_statistics")
    axes = _batch_axes("batch_statistics", x)
    center = record(BATCH_STATISTIC, x, axes=axes, variance=False)
    return center, record(BATCH_STATISTIC, x, axes=axes, variance=True)
