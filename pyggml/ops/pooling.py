"""Windows of images (N, C, H, W) reduced to one element each."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from .._ffi import lib
from ..dtypes import float32
from ..errors import SettingError, ShapeError
from ..graph import Op, Shape, Spec
from ..lowering import GgmlTensor, Lowering, shape_of
from ..tensor import Tensor, TensorLike, as_tensor, record
from .convolution import Pair, as_sizes, c_settings, unfold, windows
from .rules import need_floats, need_shape
from .slicing import lower_pad

# ---- max pooling ---------------------------------------------------------------------------------
# Two ops, each the gradient of the other: the elements of `values` at the places where x is largest
# in its window, and a gradient put back to these places. max_pool2d(x) takes x for both.


def _pooled(sizes: Sequence[int], kernel: Pair, stride: Pair, padding: Pair) -> Shape:
    return windows("pooling", sizes, kernel, stride, padding)


def _max_pool_shape(values: Spec, x: Spec, *, kernel: Pair, stride: Pair, padding: Pair) -> Spec:
    need_floats("max_pool2d", values, x)
    need_shape("max_pool2d", "the input", x, *(None,) * 4)
    need_shape("max_pool2d", "the values", values, *x.shape)
    return Spec((*x.shape[:2], *_pooled(x.shape[2:], kernel, stride, padding)), float32)


def _lower_max_pool(
    b: Lowering, values: GgmlTensor, x: GgmlTensor, *, kernel: Pair, stride: Pair, padding: Pair
) -> GgmlTensor:
    is_plain = values == x
    values, x = b.contiguous(values), b.contiguous(x)
    if b.own_kernels:  # ggml's runs on one thread, and loses NaN
        sizes = _pooled((x.ne[1], x.ne[0]), kernel, stride, padding)
        return lib.pg_max_pool(b.ctx, values, x, *sizes, c_settings(kernel, stride, padding))
    largest = _pool_2d(b, x, lib.GGML_OP_POOL_MAX, kernel, stride, padding)
    if is_plain:
        return largest
    first = _first_of_each_window(b, x, largest, kernel, stride, padding)
    picked = lib.ggml_mul(b.ctx, first, _covered(b, values, kernel, stride, padding, 0.0))
    return b.reshape(lib.ggml_sum_rows(b.ctx, picked), shape_of(largest))


def _pool_2d(
    b: Lowering, x: GgmlTensor, kind: int, kernel: Pair, stride: Pair, padding: Pair
) -> GgmlTensor:
    pairs = (n for setting in (kernel, stride, padding) for n in reversed(setting))
    return lib.ggml_pool_2d(b.ctx, b.contiguous(x), kind, *pairs)


def _covered(
    b: Lowering, x: GgmlTensor, kernel: Pair, stride: Pair, padding: Pair, outside: float
) -> GgmlTensor:
    """Return what each window covers: (N * C, OH, OW, KH * KW), a value outside of the image."""
    padded = lower_pad(b, x, widths=tuple((p, 1, p) for p in padding), value=outside)
    width, height, channels, images = padded.ne
    planes = b.reshape(padded, (images * channels, 1, height, width))
    return unfold(b, planes, kernel, stride, (0, 0), (1, 1))


def _first_of_each_window(
    b: Lowering, x: GgmlTensor, largest: GgmlTensor, kernel: Pair, stride: Pair, padding: Pair
) -> GgmlTensor:
    """Return 1 at the first place of each window that has its largest element, else 0."""
    covered = _covered(b, x, kernel, stride, padding, -np.inf)
    count, ow, oh, planes = covered.ne
    largest = b.reshape(largest, (planes, oh, ow, 1))
    below = lib.ggml_neg(b.ctx, lib.ggml_sub(b.ctx, covered, largest))
    is_largest = lib.ggml_scale_bias(b.ctx, lib.ggml_step(b.ctx, below), -1.0, 1.0)
    ones = lib.ggml_fill(b.ctx, b.new((count, count), float32), 1.0)
    earlier = lib.ggml_tri(b.ctx, ones, lib.GGML_TRI_TYPE_LOWER)
    windows = b.reshape(is_largest, (planes * oh * ow, count))  # of all planes at once
    before = b.reshape(lib.ggml_mul_mat(b.ctx, earlier, windows), (planes, oh, ow, count))
    is_later = lib.ggml_step(b.ctx, before)  # whether there is one before it
    return lib.ggml_mul(b.ctx, is_largest, lib.ggml_scale_bias(b.ctx, is_later, -1.0, 1.0))


def _reference_places(
    x: np.ndarray, kernel: Pair, stride: Pair, padding: Pair
) -> tuple[np.ndarray, ...]:
    """Return the index in x of each window's largest element, as arrays that index together."""
    index = np.arange(x.size).reshape(x.shape)
    around = ((0, 0), (0, 0), *((p, p) for p in padding))
    values = _reference_windows(np.pad(x, around, constant_values=-np.inf), kernel, stride)
    index = _reference_windows(np.pad(index, around, constant_values=-1), kernel, stride)
    largest = values.max(axis=-1, keepdims=True)
    hit = (index >= 0) & ((values == largest) | np.isnan(values))
    first = np.take_along_axis(index, hit.argmax(axis=-1)[..., None], axis=-1)[..., 0]
    return np.unravel_index(first, x.shape)


def _reference_windows(padded: np.ndarray, kernel: Pair, stride: Pair) -> np.ndarray:
    view = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=(2, 3))
    view = view[:, :, :: stride[0], :: stride[1]]
    return view.reshape(*view.shape[:4], -1)


MAX_POOL: Op = Op(
    "max_pool",
    shape=_max_pool_shape,
    lower=_lower_max_pool,
    grad=lambda g, out, values, x, **settings: (record(MAX_POOL_BACK, g, x, **settings), None),
    reference=lambda values, x, **settings: values[_reference_places(x, **settings)],
)


def _max_pool_back_shape(g: Spec, x: Spec, **settings: Any) -> Spec:
    need_floats("max_pool_back", g)
    need_shape("max_pool_back", "the gradient", g, *_max_pool_shape(x, x, **settings).shape)
    return Spec(x.shape, float32)


def _lower_max_pool_back(
    b: Lowering, g: GgmlTensor, x: GgmlTensor, *, kernel: Pair, stride: Pair, padding: Pair
) -> GgmlTensor:
    g, x = b.contiguous(g), b.contiguous(x)
    if b.own_kernels:
        return lib.pg_max_pool_back(b.ctx, g, x, c_settings(kernel, stride, padding))
    if kernel != stride or padding != (0, 0):
        pairs = (n for setting in (kernel, stride, padding) for n in reversed(setting))
        return lib.ggml_pool_2d_back(b.ctx, g, x, lib.GGML_OP_POOL_MAX, *pairs)
    # Windows that do not overlap need no sum, so ggml's op, which only its CPU backend has, is not
    # needed.
    largest = _pool_2d(b, x, lib.GGML_OP_POOL_MAX, kernel, stride, padding)
    first = _first_of_each_window(b, x, largest, kernel, stride, padding)
    count, ow, oh, planes = first.ne
    parts = lib.ggml_mul(b.ctx, first, b.reshape(g, (planes, oh, ow, 1)))
    parts = b.reshape(parts, (planes * oh, ow, *kernel))
    rows = lib.ggml_permute(b.ctx, parts, 0, 2, 1, 3)  # (planes * oh, kh, ow, kw)
    width, height, channels, images = x.ne
    inner = b.reshape(rows, (images, channels, oh * kernel[0], ow * kernel[1]))
    rest = ((0, 1, height - oh * kernel[0]), (0, 1, width - ow * kernel[1]))
    return lower_pad(b, inner, widths=rest, value=0.0)


def _reference_max_pool_back(g: np.ndarray, x: np.ndarray, **settings: Any) -> np.ndarray:
    out = np.zeros(x.shape)
    np.add.at(out, _reference_places(x, **settings), g)
    return out


MAX_POOL_BACK: Op = Op(
    "max_pool_back",
    shape=_max_pool_back_shape,
    lower=_lower_max_pool_back,
    grad=lambda gg, out, g, x, **settings: (record(MAX_POOL, gg, x, **settings), None),
    reference=_reference_max_pool_back,
)


def max_pool2d(
    x: TensorLike,
    kernel_size: int | Sequence[int],
    *,
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
) -> Tensor:
    """Return the largest element of each window of images: (N, C, H, W) -> (N, C, OH, OW).

    OH = floor((H + 2 padding - kernel) / stride) + 1; stride is the kernel size by default. Padding
    never wins; NaN does. The gradient goes to the first of several largest elements. Raises
    ShapeError if the kernel does not fit, SettingError for padding beyond half of it.

    >>> ag.max_pool2d([[[[1.0, 2.0, 5.0], [4.0, 3.0, 6.0]]]], 2).numpy()
    array([[[[4.]]]], dtype=float32)
    """
    x, settings = _settings("max_pool2d", x, kernel_size, stride, padding)
    return record(MAX_POOL, x, x, **settings)


def _settings(
    op: str,
    x: TensorLike,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None,
    padding: int | Sequence[int],
) -> tuple[Tensor, dict[str, Shape]]:
    x = as_tensor(x, op=op)
    if x.ndim != 4:
        raise ShapeError(
            f"{op}: needs images (batch, channels, height, width); got shape {x.shape}; "
            "ag.unsqueeze adds an axis"
        )
    kernel = as_sizes(op, "kernel_size", kernel_size, 1)
    pads = as_sizes(op, "padding", padding, 0)
    if any(2 * p > k for p, k in zip(pads, kernel, strict=True)):
        raise SettingError(
            f"{op}: padding must be at most half of the kernel, or a window has nothing in it; "
            f"got padding {pads} and kernel {kernel}"
        )
    steps = kernel if stride is None else as_sizes(op, "stride", stride, 1)
    windows(op, x.shape[2:], kernel, steps, pads)
    return x, {"kernel": kernel, "stride": steps, "padding": pads}


# ---- average pooling -----------------------------------------------------------------------------


def _avg_pool_shape(x: Spec, **settings: Any) -> Spec:
    need_floats("avg_pool2d", x)
    need_shape("avg_pool2d", "the input", x, *(None,) * 4)
    return Spec((*x.shape[:2], *_pooled(x.shape[2:], **settings)), float32)


def _lower_avg_pool(
    b: Lowering, x: GgmlTensor, *, kernel: Pair, stride: Pair, padding: Pair
) -> GgmlTensor:
    x = b.contiguous(x)
    if b.own_kernels:  # ggml's runs on one thread
        sizes = _pooled((x.ne[1], x.ne[0]), kernel, stride, padding)
        return lib.pg_avg_pool(b.ctx, x, *sizes, c_settings(kernel, stride, padding))
    return _pool_2d(b, x, lib.GGML_OP_POOL_AVG, kernel, stride, padding)


def _reference_avg_pool(x: np.ndarray, *, kernel: Pair, stride: Pair, padding: Pair) -> np.ndarray:
    padded = np.pad(x, ((0, 0), (0, 0), *((p, p) for p in padding)))
    return _reference_windows(padded, kernel, stride).mean(axis=-1)


AVG_POOL: Op = Op(
    "avg_pool",
    shape=_avg_pool_shape,
    lower=_lower_avg_pool,
    grad=lambda g, out, x, **settings: record(AVG_POOL_BACK, g, size=x.shape[2:], **settings),
    reference=_reference_avg_pool,
)


def _avg_pool_back_shape(g: Spec, *, size: Pair, **settings: Any) -> Spec:
    need_floats("avg_pool_back", g)
    need_shape("avg_pool_back", "the gradient", g, None, None, *_pooled(size, **settings))
    return Spec((*g.shape[:2], *size), float32)


def _lower_avg_pool_back(
    b: Lowering, g: GgmlTensor, *, size: Pair, kernel: Pair, stride: Pair, padding: Pair
) -> GgmlTensor:
    g = b.contiguous(g)
    if b.own_kernels:
        return lib.pg_avg_pool_back(b.ctx, g, *size, c_settings(kernel, stride, padding))
    # every element sums what its windows got: a window over g, spread by the stride and padded
    around = tuple(
        (k - 1 - p, s, n + p - ((o - 1) * s + 1))
        for n, o, k, s, p in zip(size, (g.ne[1], g.ne[0]), kernel, stride, padding, strict=True)
    )
    spread = lower_pad(b, g, widths=around, value=0.0)
    return _pool_2d(b, spread, lib.GGML_OP_POOL_AVG, kernel, (1, 1), (0, 0))


def _reference_avg_pool_back(
    g: np.ndarray, *, size: Pair, kernel: Pair, stride: Pair, padding: Pair
) -> np.ndarray:
    out = np.zeros((*g.shape[:2], *(n + 2 * p for n, p in zip(size, padding, strict=True))))
    for y, x in np.ndindex(g.shape[2:]):
        top, left = y * stride[0], x * stride[1]
        out[:, :, top : top + kernel[0], left : left + kernel[1]] += g[:, :, y, x, None, None]
    rows, columns = (slice(p, p + n) for n, p in zip(size, padding, strict=True))
    return out[..., rows, columns] / prod(kernel)


AVG_POOL_BACK: Op = Op(
    "avg_pool_back",
    shape=_avg_pool_back_shape,
    lower=_lower_avg_pool_back,
    grad=lambda gg, out, g, size, **settings: record(AVG_POOL, gg, **settings),
    reference=_reference_avg_pool_back,
)


def avg_pool2d(
    x: TensorLike,
    kernel_size: int | Sequence[int],
    *,
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
) -> Tensor:
    """Return the mean of each window of images: (N, C, H, W) -> (N, C, OH, OW).

    Sizes and errors are those of max_pool2d. Padding counts as zeros in the mean.

    >>> ag.avg_pool2d([[[[1.0, 2.0], [4.0, 5.0]]]], 2).numpy()
    array([[[[3.]]]], dtype=float32)
    """
    x, settings = _settings("avg_pool2d", x, kernel_size, stride, padding)
    return record(AVG_POOL, x, **settings)
