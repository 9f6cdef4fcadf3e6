"""Softmax, its logarithm, and their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._ffi import ffi, lib
from ..errors import ShapeError
from ..graph import Op, Spec
from ..lowering import GgmlTensor, Lowering
from ..tensor import Tensor, TensorLike, as_tensor, record
from .comparison import CLAMP
from .elementwise import EXP, affine, exp, mul, sub
from .reduction import LARGEST, MAX, sum
from .rules import need_axes, need_floats, need_shape, normalize_axis
from .shaping import transpose


def _along_last(op: Op, x: TensorLike, axis: int, **settings: Any) -> Tensor:
    """Record an op that works along the last axis along any axis."""
    x = as_tensor(x, op=op.name)
    axis = normalize_axis(op.name, axis, x.ndim)
    if axis == -1:
        return record(op, x, **settings)
    return transpose(record(op, transpose(x, axis, -1), **settings), axis, -1)


# ---- softmax -------------------------------------------------------------------------------------
# Of scale * x + mask, so that attention is one kernel between two products.


def _softmax_shape(x: Spec, mask: Spec | None = None, *, scale: float, causal: bool) -> Spec:
    need_floats("softmax", x)
    need_axes("softmax", x, (-2, -1) if causal else (-1,))
    if mask is not None:
        need_floats("softmax", mask)
        sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
        if len(mask.shape) > len(x.shape) or any(m not in (1, n) for m, n in sizes):
            raise ShapeError(f"softmax: the mask must broadcast to {x.shape}; got {mask.shape}")
    if causal and x.shape[-2] > x.shape[-1]:
        raise ShapeError(
            f"softmax: causal needs at least as many keys as queries; got {x.shape[-2]} queries, "
            f"{x.shape[-1]} keys"
        )
    return Spec(x.shape, x.dtype)


def _lower_softmax(
    b: Lowering, x: GgmlTensor, mask: GgmlTensor | None = None, *, scale: float, causal: bool
) -> GgmlTensor:
    x = b.contiguous(x)
    if mask is not None:
        rows = mask.ne[1] if b.own_kernels else x.ne[1]  # ggml's repeats over the batch axes only
        mask = b.contiguous(b.broadcast(mask, (mask.ne[3], mask.ne[2], rows, x.ne[0])))
    if b.own_kernels:
        return lib.pg_softmax(b.ctx, x, ffi.NULL if mask is None else mask, scale, causal)
    if causal:
        x = lib.ggml_diag_mask_inf(b.ctx, x, x.ne[0] - x.ne[1])
    if mask is None:
        return lib.ggml_soft_max_ext(b.ctx, x, ffi.NULL, scale, 0.0)
    # A row that is masked throughout is NaN in ggml: keep it finite, and set it to 0 afterwards.
    finite = CLAMP.lower(b, mask, min=-LARGEST, max=LARGEST)
    alive = lib.ggml_step(b.ctx, lib.ggml_scale_bias(b.ctx, mask, 0.5, LARGEST))
    return lib.ggml_mul(b.ctx, lib.ggml_soft_max_ext(b.ctx, x, finite, scale, 0.0), alive)


def _grad_softmax(
    g: Tensor, out: Tensor, x: Tensor, mask: Tensor | None = None, *, scale: float, causal: bool
) -> tuple[Tensor, ...]:
    in_x = record(SOFTMAX_BACK, g, out, scale=scale, causal=causal)
    return (in_x,) if mask is None else (in_x, affine(in_x, scale=1.0 / scale))


def _reference_softmax(
    x: np.ndarray, mask: np.ndarray | None = None, *, scale: float, causal: bool
) -> np.ndarray:
    scores = x * scale if mask is None else x * scale + mask
    if causal:
        queries, keys = x.shape[-2:]
        scores = np.where(np.tri(queries, keys, keys - queries, dtype=bool), scores, -np.inf)
    top = np.max(scores, axis=-1, keepdims=True)
    if mask is None:
        parts = np.exp(scores - top)
        return parts / np.sum(parts, axis=-1, keepdims=True)
    parts = np.exp(scores - np.where(top == -np.inf, 0.0, top))
    total = np.sum(parts, axis=-1, keepdims=True)
    return parts / np.where(total == 0.0, 1.0, total)


SOFTMAX: Op = Op(
    "softmax",
    shape=_softmax_shape,
    lower=_lower_softmax,
    grad=_grad_softmax,
    reference=_reference_softmax,
)


def _softmax_back_shape(g: Spec, y: Spec, *, scale: float, causal: bool) -> Spec:
    need_floats("softmax_back", g, y)
    need_axes("softmax_back", y, (-2, -1) if causal else (-1,))
    need_shape("softmax_back", "the gradient", g, *y.shape)
    return Spec(y.shape, y.dtype)


def _lower_softmax_back(
    b: Lowering, g: GgmlTensor, y: GgmlTensor, *, scale: float, causal: bool
) -> GgmlTensor:
    g, y = b.contiguous(g), b.contiguous(y)
    if b.own_kernels:  # skips the half that causal masks
        return lib.pg_softmax_back(b.ctx, g, y, scale, causal)
    # ggml's allocator may put the result over y, which its CPU kernel still reads then. It takes
    # the first operand that nobody else needs: give it one.
    return lib.ggml_soft_max_ext_back(b.ctx, lib.ggml_scale(b.ctx, g, scale), y, 1.0, 0.0)


def _grad_softmax_back(
    gg: Tensor, out: Tensor, g: Tensor, y: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    dot, weight = (sum(mul(t, y), axis=-1, keepdims=True) for t in (g, gg))
    in_y = affine(sub(mul(gg, sub(g, dot)), mul(g, weight)), scale=scale)
    return record(SOFTMAX_BACK, gg, y, scale=scale, causal=causal), in_y


def _reference_softmax_back(
    g: np.ndarray, y: np.ndarray, *, scale: float, causal: bool
) -> np.ndarray:
    return scale * y * (g - np.sum(g * y, axis=-1, keepdims=True))


SOFTMAX_BACK: Op = Op(
    "softmax_back",
    shape=_softmax_back_shape,
    lower=_lower_softmax_back,
    grad=_grad_softmax_back,
    reference=_reference_softmax_back,
)


def softmax(x: TensorLike, *, axis: int = -1) -> Tensor:
    """Return exp(x) / sum(exp(x)) along an axis, without overflow.

    As in NumPy, NaN makes the whole row NaN, and so does infinity, or -inf throughout.

    >>> ag.softmax([[0.0, 0.0], [1000.0, 0.0]]).numpy()
    array([[0.5, 0.5],
           [1. , 0. ]], dtype=float32)
    """
    return _along_last(SOFTMAX, x, axis, scale=1.0, causal=False)


# ---- log_softmax ---------------------------------------------------------------------------------
# One op: x - logsumexp(x) would lose the logarithm in the rounding of a large x.


def _log_softmax_shape(x: Spec) -> Spec:
    need_floats("log_softmax", x)
    need_axes("log_softmax", x, (-1,))
    return Spec(x.shape, x.dtype)


def _lower_log_softmax(b: Lowering, x: GgmlTensor) -> GgmlTensor:
    x = b.contiguous(x)
    if b.own_kernels:
        return lib.pg_log_softmax(b.ctx, x)
    shifted = lib.ggml_sub(b.ctx, x, MAX.lower(b, x, axes=(-1,), keepdims=True))
    total = lib.ggml_sum_rows(b.ctx, EXP.lower(b, shifted))
    return lib.ggml_sub(b.ctx, shifted, lib.ggml_log(b.ctx, total))


def reference_log_softmax(x: np.ndarray) -> np.ndarray:
    """Return NumPy's log_softmax along the last axis."""
    shifted = x - np.max(x, axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


LOG_SOFTMAX = Op(
    "log_softmax",
    shape=_log_softmax_shape,
    lower=_lower_log_softmax,
    grad=lambda g, out, x: sub(g, mul(exp(out), sum(g, axis=-1, keepdims=True))),
    reference=reference_log_softmax,
)


def log_softmax(x: TensorLike, *, axis: int = -1) -> Tensor:
    """Return the logarithm of softmax along an axis, exact also where softmax rounds to 0.

    >>> ag.log_softmax([0.0, -1000.0]).numpy()
    array([    0., -1000.], dtype=float32)
    """
    return _along_last(LOG_SOFTMAX, x, axis)
