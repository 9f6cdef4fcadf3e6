"""Convolutions, in PyTorch's layouts: images (N, C, H, W), weights (O, C / groups, KH, KW).

Three ops, each linear in both inputs, and each the gradient of the other two: the convolution, its
gradient in the images, which is the transposed convolution, and its gradient in the weight. On the
CPU each is a kernel of ours that unfolds the images tile by tile, into a matrix for sgemm, so that
all of them unfolded never exist, or with stride 1 multiplies them where they lie; elsewhere ggml
unfolds them (ggml_im2col) for one matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from .._ffi import ffi, lib
from ..checks import as_index, positive_integer, shown
from ..dtypes import float32
from ..errors import DTypeError, SettingError, ShapeError
from ..graph import MAX_AXIS, Op, Shape, Spec
from ..lowering import GgmlTensor, Lowering
from ..tensor import Tensor, TensorLike, as_tensor, record
from .elementwise import add
from .reduction import sum
from .rules import need_floats, need_shape
from .shaping import reshape
from .slicing import lower_pad, lower_slice

Pair = tuple[int, int]

# ---- settings and sizes, for pooling too ---------------------------------------------------------


def as_sizes(op: str, name: str, value: int | Sequence[int], least: int, count: int = 2) -> Shape:
    """Return a setting of each spatial axis, given as one integer for all or as one for each."""
    listed = tuple(value) if isinstance(value, Sequence) else (value,) * count
    sizes = tuple(n for n in map(as_index, listed) if n is not None)
    if not len(listed) == len(sizes) == count:
        raise DTypeError(f"{op}: {name} must be an integer, or {count} of them; got {shown(value)}")
    if min(sizes) < least or max(sizes) > MAX_AXIS:
        raise SettingError(
            f"{op}: {name} must be at least {least}, and below 2^31; got {shown(value)}"
        )
    return sizes


def extent(kernel: Sequence[int], dilation: Sequence[int]) -> Shape:
    """Return how much of the input a kernel covers, along each spatial axis."""
    return tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True))


def windows(
    op: str, sizes: Sequence[int], covered: Sequence[int], stride: Shape, padding: Shape
) -> Shape:
    """Return how often a window fits along each axis.

    That is floor((size + 2 padding - covered) / stride) + 1. Raises ShapeError if it does not fit
    once.
    """
    room = [size + 2 * p - c for size, p, c in zip(sizes, padding, covered, strict=True)]
    if min(room) < 0:
        raise ShapeError(
            f"{op}: the kernel must fit into the padded input; it covers {tuple(covered)} of "
            f"{tuple(sizes)} with padding {padding}; use a smaller kernel or more padding"
        )
    return tuple(r // s + 1 for r, s in zip(room, stride, strict=True))


def c_settings(*settings: Shape | int) -> Any:
    """Return settings as the int32 array that the kernels take."""
    return ffi.new(
        "int32_t[]", [n for s in settings for n in (s if isinstance(s, tuple) else (s,))]
    )


# ---- the three ops -------------------------------------------------------------------------------


def _conv2d_shape(
    x: Spec, weight: Spec, bias: Spec | None = None, *, stride: Pair, padding: Pair,
    dilation: Pair, groups: int,
) -> Spec:  # fmt: skip
    need_floats("conv2d", x, weight, *(() if bias is None else (bias,)))
    need_shape("conv2d", "the weight", weight, *(None,) * 4)
    outputs, channels, *kernel = weight.shape
    need_shape("conv2d", "the input", x, None, channels * groups, None, None)
    _need_groups("conv2d", outputs, groups)
    if bias is not None:
        need_shape("conv2d", "the bias", bias, outputs)
    sizes = windows("conv2d", x.shape[2:], extent(kernel, dilation), stride, padding)
    return Spec((x.shape[0], outputs, *sizes), float32)


def _need_groups(op: str, outputs: int, groups: int) -> None:
    if outputs % groups:
        raise ShapeError(f"{op}: groups must divide the outputs; got {groups}, {outputs}")


def _lower_conv2d(
    b: Lowering, x: GgmlTensor, weight: GgmlTensor, bias: GgmlTensor | None = None, *,
    stride: Pair, padding: Pair, dilation: Pair, groups: int,
) -> GgmlTensor:  # fmt: skip
    x, weight = b.contiguous(x), b.contiguous(weight)
    kw, kh, channels, outputs = weight.ne
    images = x.ne[3]
    covered = extent((kh, kw), dilation)
    oh, ow = windows("conv2d", (x.ne[1], x.ne[0]), covered, stride, padding)
    if b.own_kernels:
        settings = c_settings(stride, padding, dilation, groups)
        return lib.pg_conv2d(
            b.ctx, x, weight, ffi.NULL if bias is None else b.contiguous(bias), oh, ow, settings
        )
    rows = channels * kh * kw  # of one group
    unfolded = unfold(b, x, (kh, kw), stride, padding, dilation)
    unfolded = b.reshape(unfolded, (images * oh * ow, groups, rows))
    by_group = lib.ggml_permute(b.ctx, unfolded, 0, 2, 1, 3)  # (groups, positions, rows)
    product = _mul_mat(b, by_group, b.reshape(weight, (groups, outputs // groups, rows)))
    product = b.reshape(product, (outputs, images, oh * ow))
    y = b.reshape(lib.ggml_permute(b.ctx, product, 0, 2, 1, 3), (images, outputs, oh, ow))
    return y if bias is None else lib.ggml_add(b.ctx, y, b.reshape(bias, (outputs, 1, 1)))


def unfold(
    b: Lowering, x: GgmlTensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> GgmlTensor:
    """Return what each window of images (N, C, H, W) covers: (N, OH, OW, C * KH * KW)."""
    like = b.new((1, x.ne[2], *kernel), float32)  # only its shape is used
    pairs = (n for setting in (stride, padding, dilation) for n in reversed(setting))
    return lib.ggml_im2col(b.ctx, like, b.contiguous(x), *pairs, True, lib.GGML_TYPE_F32)


def _mul_mat(b: Lowering, p: GgmlTensor, q: GgmlTensor) -> GgmlTensor:
    """Return q @ p.T: (..., n, k) and (..., m, k) -> (..., m, n)."""
    product = lib.ggml_mul_mat(b.ctx, b.contiguous(p), b.contiguous(q))
    lib.ggml_mul_mat_set_prec(product, lib.GGML_PREC_F32)
    return product


def _grad_conv2d(
    g: Tensor, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, **settings: Any
) -> tuple[Tensor, ...]:
    in_x = record(CONV2D_INPUT, g, weight, size=x.shape[2:], **settings)
    in_weight = record(CONV2D_WEIGHT, x, g, kernel=weight.shape[2:], **settings)
    if bias is None:
        return in_x, in_weight
    return in_x, in_weight, sum(sum(g, axis=(-2, -1)), axis=0)


def _unfolded(
    x: np.ndarray, kernel: Shape, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> np.ndarray:
    """Return a view (N, groups, C / groups, OH, OW, KH, KW) of what each window covers."""
    padded = np.pad(x, ((0, 0), (0, 0), *((p, p) for p in padding)))
    view = np.lib.stride_tricks.sliding_window_view(padded, extent(kernel, dilation), axis=(2, 3))
    view = view[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]
    return view.reshape(x.shape[0], groups, -1, *view.shape[2:])


def _work(product: Spec, weight: Spec) -> int:
    """Return how many operations a convolution to a product takes, or one of its gradients."""
    return 2 * prod(product.shape) * prod(weight.shape[1:])


def _by_group(x: np.ndarray, axis: int, groups: int) -> np.ndarray:
    return x.reshape(*x.shape[:axis], groups, -1, *x.shape[axis + 1 :])


def _reference_conv2d(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    groups: int,
    **settings: Any,
) -> np.ndarray:
    unfolded = _unfolded(x, weight.shape[2:], groups=groups, **settings)
    y = np.einsum("ngcyxij,gocij->ngoyx", unfolded, _by_group(weight, 0, groups), optimize=True)
    y = y.reshape(len(x), len(weight), *y.shape[3:])
    return y if bias is None else y + bias[:, None, None]


CONV2D: Op = Op(
    "conv2d",
    shape=_conv2d_shape,
    lower=_lower_conv2d,
    is_product=True,
    work=lambda out, x, weight, *bias: _work(out, weight),
    grad=_grad_conv2d,
    reference=_reference_conv2d,
)


def _conv2d_input_shape(
    g: Spec, weight: Spec, *, size: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Spec:
    need_floats("conv_transpose2d", g, weight)
    need_shape("conv_transpose2d", "the weight", weight, *(None,) * 4)
    outputs, channels, *kernel = weight.shape
    _need_groups("conv_transpose2d", outputs, groups)
    sizes = windows("conv_transpose2d", size, extent(kernel, dilation), stride, padding)
    need_shape("conv_transpose2d", "the input", g, None, outputs, *sizes)
    return Spec((g.shape[0], channels * groups, *size), float32)


def _lower_conv2d_input(
    b: Lowering, g: GgmlTensor, weight: GgmlTensor, *, size: Pair, stride: Pair, padding: Pair,
    dilation: Pair, groups: int,
) -> GgmlTensor:  # fmt: skip
    if b.own_kernels:
        settings = c_settings(stride, padding, dilation, groups)
        return lib.pg_conv2d_input(b.ctx, b.contiguous(g), b.contiguous(weight), *size, settings)
    # ggml_im2col_back exists on the CPU only. This is the convolution of g, spread by the stride
    # and padded, with the kernel turned round and its two channel axes exchanged.
    kw, kh, channels, outputs = weight.ne
    around, parts = [], []
    for n, whole, k, s, p, d in zip(
        (g.ne[1], g.ne[0]), size, (kh, kw), stride, padding, dilation, strict=True
    ):
        before = d * (k - 1) - p
        after = whole + p - ((n - 1) * s + 1)
        around.append((max(before, 0), s, max(after, 0)))
        parts.append((max(-before, 0), 1, whole + d * (k - 1)))  # negative padding cuts off
    spread = lower_slice(b, lower_pad(b, g, widths=tuple(around), value=0.0), ranges=tuple(parts))
    rows = b.reshape(weight, (outputs * channels, kh * kw))
    rows = b.contiguous(lib.ggml_transpose(b.ctx, rows))
    if kh * kw > 1:
        order = lib.ggml_scale_bias(b.ctx, lib.ggml_arange(b.ctx, 0, kh * kw, 1), -1, kh * kw - 1)
        rows = lib.ggml_get_rows(b.ctx, rows, lib.ggml_cast(b.ctx, order, lib.GGML_TYPE_I32))
    rows = b.reshape(rows, (kh * kw, groups, outputs // groups, channels))
    turned = lib.ggml_permute(b.ctx, rows, 2, 1, 3, 0)  # (groups, channels, outputs of one, k)
    turned = b.reshape(turned, (groups * channels, outputs // groups, kh, kw))
    return _lower_conv2d(
        b, spread, turned, stride=(1, 1), padding=(0, 0), dilation=dilation, groups=groups
    )


def _reference_conv2d_input(
    g: np.ndarray, weight: np.ndarray, *, size: Pair, stride: Pair, padding: Pair, dilation: Pair,
    groups: int,
) -> np.ndarray:  # fmt: skip
    channels, kh, kw = weight.shape[1:]
    whole = [n + 2 * p for n, p in zip(size, padding, strict=True)]
    out = np.zeros((len(g), groups, channels, *whole))
    for i, j in np.ndindex(kh, kw):
        part = np.einsum(
            "ngoyx,goc->ngcyx",
            _by_group(g, 1, groups),
            _by_group(weight, 0, groups)[..., i, j],
            optimize=True,
        )
        y, x = i * dilation[0], j * dilation[1]
        out[
            ...,
            y : y + stride[0] * (g.shape[2] - 1) + 1 : stride[0],
            x : x + stride[1] * (g.shape[3] - 1) + 1 : stride[1],
        ] += part
    rows, columns = (slice(p, p + n) for n, p in zip(size, padding, strict=True))
    return out[..., rows, columns].reshape(len(g), groups * channels, *size)


CONV2D_INPUT: Op = Op(
    "conv2d_input",
    shape=_conv2d_input_shape,
    lower=_lower_conv2d_input,
    is_product=True,
    work=lambda out, g, weight: _work(g, weight),
    grad=lambda gg, out, g, weight, size, **settings: (
        record(CONV2D, gg, weight, **settings),
        record(CONV2D_WEIGHT, gg, g, kernel=weight.shape[2:], **settings),
    ),
    reference=_reference_conv2d_input,
)


def _conv2d_weight_shape(
    x: Spec, g: Spec, *, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Spec:
    need_floats("conv2d_weight", x, g)
    need_shape("conv2d_weight", "the input", x, *(None,) * 4)
    sizes = windows("conv2d_weight", x.shape[2:], extent(kernel, dilation), stride, padding)
    need_shape("conv2d_weight", "the gradient", g, x.shape[0], None, *sizes)
    _need_groups("conv2d_weight", g.shape[1], groups)
    if x.shape[1] % groups:
        raise ShapeError(f"conv2d_weight: groups must divide the channels; got {groups}, {x.shape}")
    return Spec((g.shape[1], x.shape[1] // groups, *kernel), float32)


def _lower_conv2d_weight(
    b: Lowering, x: GgmlTensor, g: GgmlTensor, *, kernel: Pair, stride: Pair, padding: Pair,
    dilation: Pair, groups: int,
) -> GgmlTensor:  # fmt: skip
    if b.own_kernels:
        settings = c_settings(stride, padding, dilation, groups)
        return lib.pg_conv2d_weight(b.ctx, b.contiguous(x), b.contiguous(g), *kernel, settings)
    ow, oh, outputs, images = g.ne
    channels, positions = x.ne[2] // groups, images * oh * ow
    unfolded = unfold(b, x, kernel, stride, padding, dilation)
    unfolded = b.reshape(unfolded, (positions, groups, channels * prod(kernel)))
    by_row = lib.ggml_permute(b.ctx, unfolded, 1, 2, 0, 3)  # (groups, rows, positions)
    g = b.reshape(g, (images, groups, outputs // groups, oh * ow))
    g = lib.ggml_permute(b.ctx, g, 0, 2, 3, 1)  # (groups, outputs of one, images, oh * ow)
    product = _mul_mat(b, by_row, b.reshape(g, (groups, outputs // groups, positions)))
    return b.reshape(product, (outputs, channels, *kernel))


def _reference_conv2d_weight(
    x: np.ndarray, g: np.ndarray, *, kernel: Pair, groups: int, **settings: Any
) -> np.ndarray:
    unfolded = _unfolded(x, kernel, groups=groups, **settings)
    weight = np.einsum("ngcyxij,ngoyx->gocij", unfolded, _by_group(g, 1, groups), optimize=True)
    return weight.reshape(g.shape[1], x.shape[1] // groups, *kernel)


CONV2D_WEIGHT: Op = Op(
    "conv2d_weight",
    shape=_conv2d_weight_shape,
    lower=_lower_conv2d_weight,
    work=lambda out, x, g: _work(g, out),
    grad=lambda gg, out, x, g, kernel, **settings: (
        record(CONV2D_INPUT, g, gg, size=x.shape[2:], **settings),
        record(CONV2D, x, gg, **settings),
    ),
    reference=_reference_conv2d_weight,
)

# ---- what people call ----------------------------------------------------------------------------


def conv2d(
    x: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Return the cross-correlation of images (N, C, H, W) with kernels (O, C / groups, KH, KW).

    The result is (N, O, OH, OW), OH = floor((H + 2 padding - dilation (KH - 1) - 1) / stride) + 1,
    plus a bias (O,). Settings are integers, or pairs for height and width. Each group of outputs
    sees its own channels; groups = C is the depthwise convolution. Raises ShapeError if the kernel
    does not fit into the padded images, or the channels do not fit the weight.

    >>> ag.conv2d(np.ones((1, 1, 3, 3)), np.ones((1, 1, 2, 2)), [0.5], padding=1).numpy()[0, 0, 0]
    array([1.5, 2.5, 2.5, 1.5], dtype=float32)
    """
    return _convolve("conv2d", x, weight, bias, 2, stride, padding, dilation, groups)


def conv1d(
    x: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> Tensor:
    """Return the cross-correlation of sequences (N, C, L) with kernels (O, C / groups, K).

    The result is (N, O, floor((L + 2 padding - dilation (K - 1) - 1) / stride) + 1); the settings
    mean what they mean in conv2d.

    >>> ag.conv1d([[[1.0, 2.0, 4.0]]], [[[-1.0, 1.0]]]).numpy()
    array([[[1., 2.]]], dtype=float32)
    """
    return _convolve("conv1d", x, weight, bias, 1, stride, padding, dilation, groups)


def _convolve(
    op: str, x: TensorLike, weight: TensorLike, bias: TensorLike | None, ndim: int,
    stride: int | Sequence[int], padding: int | Sequence[int], dilation: int | Sequence[int],
    groups: int,
) -> Tensor:  # fmt: skip
    x, weight, *rest = _operands(op, x, weight, bias, ndim, groups)
    outputs, channels, *kernel = weight.shape
    if x.shape[1] != channels * groups or outputs % groups:
        raise ShapeError(
            f"{op}: a weight {weight.shape} with groups={groups} needs {channels * groups} channels"
            f" and a multiple of {groups} as its first size; got an input {x.shape}"
        )
    for offset in rest:
        _check_bias(op, offset, outputs)
    steps = as_sizes(op, "stride", stride, 1, ndim)
    pads = as_sizes(op, "padding", padding, 0, ndim)
    spread = as_sizes(op, "dilation", dilation, 1, ndim)
    windows(op, x.shape[2:], extent(kernel, spread), steps, pads)
    if ndim == 2:
        return record(
            CONV2D, x, weight, *rest, stride=steps, padding=pads, dilation=spread, groups=groups
        )
    x = reshape(x, (*x.shape[:2], 1, x.shape[2]))
    weight = reshape(weight, (outputs, channels, 1, *kernel))
    y = record(
        CONV2D, x, weight, *rest, stride=(1, *steps), padding=(0, *pads), dilation=(1, *spread),
        groups=groups,
    )  # fmt: skip
    return reshape(y, (*y.shape[:2], y.shape[3]))


def _operands(
    op: str, x: TensorLike, weight: TensorLike, bias: TensorLike | None, ndim: int, groups: int
) -> list[Tensor]:
    """Return the tensors, having checked how many axes they have, and that groups is positive."""
    given = [x, weight] if bias is None else [x, weight, bias]
    like = next((value for value in given if isinstance(value, Tensor)), None)
    tensors = [as_tensor(value, like, op=op) for value in given]
    need_floats(op, *(Spec(t.shape, t._at[1].dtype) for t in tensors))
    if any(t.ndim != ndim + 2 for t in tensors[:2]):
        raise ShapeError(
            f"{op}: needs {ndim + 2} axes, (batch, channels, ...) and (outputs, channels, ...); "
            f"got {tensors[0].shape} and {tensors[1].shape}; ag.unsqueeze adds one"
        )
    positive_integer(op, "groups", groups)
    return tensors


def _check_bias(op: str, bias: Tensor, outputs: int) -> None:
    if bias.shape != (outputs,):
        raise ShapeError(f"{op}: bias must have shape ({outputs},); got {bias.shape}")


def conv_transpose2d(
    x: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Return the gradient of conv2d in its images.

    (N, C, H, W), (C, O / groups, KH, KW) -> (N, O, OH, OW), where OH = (H - 1) stride - 2 padding +
    dilation (KH - 1) + output_padding + 1. A strided convolution maps several sizes to one, and
    output_padding, which must be less than stride, says which is meant.

    >>> ag.conv_transpose2d([[[[1.0, 2.0]]]], [[[[1.0, 1.0]]]], stride=2).numpy()
    array([[[[1., 1., 2., 2.]]]], dtype=float32)
    """
    op = "conv_transpose2d"
    x, weight, *rest = _operands(op, x, weight, bias, 2, groups)
    channels, outputs, *kernel = weight.shape
    if x.shape[1] != channels or channels % groups:
        raise ShapeError(
            f"{op}: a weight {weight.shape} needs {channels} channels, a multiple of "
            f"groups={groups}; got an input {x.shape}"
        )
    for offset in rest:
        _check_bias(op, offset, outputs * groups)
    steps = as_sizes(op, "stride", stride, 1)
    pads = as_sizes(op, "padding", padding, 0)
    spread = as_sizes(op, "dilation", dilation, 1)
    extra = as_sizes(op, "output_padding", output_padding, 0)
    if any(e >= s for e, s in zip(extra, steps, strict=True)):
        raise SettingError(f"{op}: output_padding must be less than stride; got {extra}, {steps}")
    size = tuple(
        (n - 1) * s - 2 * p + c + e
        for n, s, p, c, e in zip(
            x.shape[2:], steps, pads, extent(kernel, spread), extra, strict=True
        )
    )
    if min(size) < 1:
        raise ShapeError(f"{op}: padding {pads} leaves nothing of the result, {size}")
    y = record(
        CONV2D_INPUT, x, weight, size=size, stride=steps, padding=pads, dilation=spread,
        groups=groups,
    )  # fmt: skip
    return add(y, reshape(rest[0], (-1, 1, 1))) if rest else y
