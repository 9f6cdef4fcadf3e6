"""What transformers attend with: rotary positions and scaled dot products."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, sqrt

import numpy as np

from .._ffi import ffi, lib
from ..checks import number_in
from ..dtypes import float32, int32
from ..errors import DTypeError, SettingError, ShapeError
from ..graph import Op, Shape, Spec
from ..lowering import GgmlTensor, Lowering
from ..tensor import Tensor, TensorLike, as_tensor, make_tensor, record
from .dropout import dropout
from .linear import MATMUL, has_unit_stride, matmul
from .rules import need_floats
from .shaping import reshape, transpose
from .softmax import SOFTMAX

# ---- rope ----------------------------------------------------------------------------------------


def _rope_shape(
    x: Spec, positions: Spec | None = None, *, base: float, interleaved: bool, inverse: bool
) -> Spec:
    need_floats("rope", x)
    if len(x.shape) not in (3, 4) or x.shape[-1] % 2:
        raise ShapeError(
            f"rope: needs (batch, tokens, heads, width) with an even width; got {x.shape}"
        )
    tokens = x.shape[-3]
    if positions is not None and positions.dtype is not int32:
        raise DTypeError(f"rope: positions must be integers; got a tensor of {positions.dtype}")
    if positions is not None and positions.shape != (tokens,):
        raise ShapeError(
            f"rope: x {x.shape} needs positions of shape {(tokens,)}; got {positions.shape}"
        )
    return Spec(x.shape, x.dtype)


def _lower_rope(
    b: Lowering,
    x: GgmlTensor,
    positions: GgmlTensor | None = None,
    *,
    base: float,
    interleaved: bool,
    inverse: bool,
) -> GgmlTensor:
    x = b.contiguous(x)
    if b.own_kernels:  # ggml's angles are products of float32 factors: off by 1e-3 at position 1e4
        known = ffi.NULL if positions is None else positions
        return lib.pg_rope(b.ctx, x, known, base, interleaved, inverse)
    if positions is None:  # 0, 1, ...; exact in float32 up to 2^24
        counted = lib.ggml_arange(b.ctx, 0.0, float(x.ne[2]), 1.0)
        positions = lib.ggml_cast(b.ctx, counted, int32.ggml)
    constructor = lib.ggml_rope_ext_back if inverse else lib.ggml_rope_ext
    mode = lib.GGML_ROPE_TYPE_NORMAL if interleaved else lib.GGML_ROPE_TYPE_NEOX
    unscaled = (0, base, 1.0, 0.0, 1.0, 0.0, 0.0)  # no context extension
    return constructor(b.ctx, x, positions, ffi.NULL, x.ne[0], mode, *unscaled)


def _grad_rope(
    g: Tensor,
    out: Tensor,
    x: Tensor,
    positions: Tensor | None = None,
    *,
    base: float,
    interleaved: bool,
    inverse: bool,
) -> tuple[Tensor | None, ...]:
    inputs = (g,) if positions is None else (g, positions)
    back = record(ROPE, *inputs, base=base, interleaved=interleaved, inverse=not inverse)
    return (back,) if positions is None else (back, None)


def _reference_rope(
    x: np.ndarray,
    positions: np.ndarray | None = None,
    *,
    base: float,
    interleaved: bool,
    inverse: bool,
) -> np.ndarray:
    width = x.shape[-1]
    tokens = np.arange(x.shape[-3]) if positions is None else positions
    angle = np.multiply.outer(tokens, base ** (-np.arange(0, width, 2) / width))
    turn = np.exp((-1j if inverse else 1j) * angle)[:, None, :]  # (tokens, 1, width / 2)
    if interleaved:
        turned = (x[..., ::2] + 1j * x[..., 1::2]) * turn
        return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
    turned = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


ROPE: Op = Op(
    "rope",
    shape=_rope_shape,
    lower=_lower_rope,
    grad=_grad_rope,
    reference=_reference_rope,
)


def rope(
    x: TensorLike,
    *,
    positions: TensorLike | None = None,
    base: float = 10000.0,
    interleaved: bool = False,
) -> Tensor:
    """Return x (batch, tokens, heads, width), pairs of elements turned by their token's position.

    Pair k of a token at position t turns by the angle t * base^(-2k / width): elements k and
    k + width / 2, or 2k and 2k + 1 if interleaved (RoFormer, Su et al. 2021). positions are
    integers of shape (tokens,), by default 0, 1, ...; the batch axis may be missing. Raises
    ShapeError for an odd width.

    >>> ag.rope([[[1.0, 0.0]], [[1.0, 0.0]]]).numpy()[:, 0].round(3)  # by 0 and by 1 radian
    array([[1.   , 0.   ],
           [0.54 , 0.841]], dtype=float32)
    """
    x = as_tensor(x, positions if isinstance(positions, Tensor) else None, op="rope")
    inputs = (x,) if positions is None else (x, as_tensor(positions, x, op="rope", dtype=None))
    base = float(np.float32(number_in("rope", "base", base, 1.0, 2.0**127)))  # what kernels take
    return record(ROPE, *inputs, base=base, interleaved=bool(interleaved), inverse=False)


# ---- products with a lower triangle --------------------------------------------------------------
# Scores and weights of causal attention are square, and 0 above the diagonal. These products leave
# that half out; the gradients of each are the other two.


def _triangle_rule(op: str, shape: Callable[[Shape, Shape], Shape]) -> Callable[[Spec, Spec], Spec]:
    def rule(x: Spec, y: Spec) -> Spec:
        need_floats(op, x, y)
        of_product = op == "lower_of_product"
        square = of_product or x.shape[-1:] == x.shape[-2:-1]
        wanted = x.shape if of_product else (*x.shape[:-1], *y.shape[-1:])
        if min(len(x.shape), len(y.shape)) < 2 or not square or y.shape != wanted:
            raise ShapeError(f"{op}: shapes do not fit; got {x.shape} and {y.shape}")
        return Spec(shape(x.shape, y.shape), float32)

    return rule


def _lower_triangle(kind: int, other: Callable[..., GgmlTensor]) -> Callable[..., GgmlTensor]:
    """Return a lowering: pyggml's kernel where it can run, else a product of whole matrices."""

    def lower(b: Lowering, x: GgmlTensor, y: GgmlTensor) -> GgmlTensor:
        if not b.own_kernels:
            return other(b, x, y)
        x, y = b.cast(x, float32), b.cast(y, float32)
        x, y = (t if has_unit_stride(t) else b.contiguous(t) for t in (x, y))
        return lib.pg_lower_matmul(b.ctx, x, y, kind)

    return lower


def _lower_half(b: Lowering, x: GgmlTensor) -> GgmlTensor:
    x = b.contiguous(b.cast(x, float32))
    return lib.ggml_tri(b.ctx, x, lib.GGML_TRI_TYPE_LOWER_DIAG)


LOWER_OF_PRODUCT: Op = Op(
    "lower_of_product",
    shape=_triangle_rule("lower_of_product", lambda x, y: (*x[:-1], y[-2])),
    lower=_lower_triangle(
        lib.PG_LOWER_OF_PRODUCT,
        lambda b, x, y: _lower_half(b, MATMUL.lower(b, x, lib.ggml_transpose(b.ctx, y))),
    ),
    is_product=True,
    grad=lambda g, out, x, y: (record(LOWER_TIMES, g, y), record(LOWER_TRANSPOSED_TIMES, g, x)),
    reference=lambda x, y: np.tril(x @ np.swapaxes(y, -1, -2)),
)

LOWER_TIMES: Op = Op(
    "lower_times",
    shape=_triangle_rule("lower_times", lambda x, y: y),
    lower=_lower_triangle(
        lib.PG_LOWER_TIMES, lambda b, x, y: MATMUL.lower(b, _lower_half(b, x), y)
    ),
    is_product=True,
    grad=lambda g, out, x, y: (
        record(LOWER_OF_PRODUCT, g, y),
        record(LOWER_TRANSPOSED_TIMES, x, g),
    ),
    reference=lambda x, y: np.tril(x) @ y,
)

LOWER_TRANSPOSED_TIMES: Op = Op(
    "lower_transposed_times",
    shape=_triangle_rule("lower_transposed_times", lambda x, y: y),
    lower=_lower_triangle(
        lib.PG_LOWER_TRANSPOSED_TIMES,
        lambda b, x, y: MATMUL.lower(b, lib.ggml_transpose(b.ctx, _lower_half(b, x)), y),
    ),
    is_product=True,
    grad=lambda g, out, x, y: (record(LOWER_OF_PRODUCT, y, g), record(LOWER_TIMES, x, g)),
    reference=lambda x, y: np.swapaxes(np.tril(x), -1, -2) @ y,
)

# ---- scaled dot product attention ----------------------------------------------------------------


def _attention_mask(mask: TensorLike, like: Tensor) -> Tensor:
    """Return a mask as floats to add: booleans, True for what may be seen, become 0 and -inf."""
    if not isinstance(mask, Tensor):
        array = np.asarray(mask)
        if array.dtype == bool:
            array = np.where(array, 0.0, -inf)
        if array.dtype.kind == "f":
            return make_tensor(array, device=like.device)
        mask = make_tensor(array, device=like.device)
    if not mask._at[1].dtype.is_float:
        raise DTypeError(
            "scaled_dot_product_attention: the mask must be boolean, True for what may be seen, or "
            f"floats to add to the scores; got {mask.dtype}"
        )
    return mask


def scaled_dot_product_attention(
    q: TensorLike,
    k: TensorLike,
    v: TensorLike,
    *,
    mask: TensorLike | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Return softmax(scale * q @ k.T + mask) @ v for q (B, H, T, D), k and v (B, G, S, D).

    G divides H: each key head serves H / G neighbouring query heads. The mask broadcasts to
    (B, H, T, S): a boolean array, True for what may be seen, or floats that are added, which may
    require a gradient. Causal queries are the last T of S tokens and see none behind their own, so
    T may not exceed S. scale is 1 / sqrt(D) by default. A query whose keys are all masked gives
    zeros. Weights are dropped with probability dropout_p, as by ag.dropout. Raises ShapeError for
    shapes that do not fit (Vaswani et al. 2017).

    >>> q = np.ones((1, 1, 2, 4)); v = np.array([[1.0], [3.0]]).reshape(1, 1, 2, 1)
    >>> ag.scaled_dot_product_attention(q, q, v, causal=True).numpy().ravel()
    array([1., 2.], dtype=float32)
    """
    op = "scaled_dot_product_attention"
    like = next((t for t in (q, k, v) if isinstance(t, Tensor)), None)
    q = as_tensor(q, like, op=op)
    k, v = as_tensor(k, q, op=op), as_tensor(v, q, op=op)
    fits = q.ndim == k.ndim == v.ndim == 4 and k.shape[:3] == v.shape[:3]
    if not fits or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ShapeError(
            f"{op}: needs queries (B, H, T, D), keys (B, G, S, D), values (B, G, S, any), H a "
            f"multiple of G; got {q.shape}, {k.shape}, {v.shape}"
        )
    batch, heads, queries, width = q.shape
    key_heads, keys = k.shape[1:3]
    factor = 1.0 / sqrt(width) if scale is None else number_in(op, "scale", scale, 0.0)
    if factor == 0.0:
        raise SettingError(f"{op}: scale must be positive; got {scale!r}")
    # The query heads of one key head are rows of one matrix: keys and values are not repeated.
    rows = (batch, key_heads, heads // key_heads * queries)
    triangle = bool(causal) and heads == key_heads and queries == keys
    if triangle:
        scores = record(LOWER_OF_PRODUCT, q, k)
    else:
        grouped = q if heads == key_heads else reshape(q, (*rows, width))
        scores = matmul(grouped, transpose(k, -1, -2))
        if heads != key_heads:
            scores = reshape(scores, (batch, heads, queries, keys))
    inputs = (scores,) if mask is None else (scores, _attention_mask(mask, q))
    try:
        weights = record(SOFTMAX, *inputs, scale=factor, causal=bool(causal))
    except ShapeError as error:
        raise ShapeError(f"{op}: {str(error).removeprefix('softmax: ')}") from None
    weights = dropout(weights, p=dropout_p)
    if triangle:
        return record(LOWER_TIMES, weights, v)
    if heads == key_heads:
        return matmul(weights, v)
    return reshape(matmul(reshape(weights, (*rows, keys)), v), (batch, heads, queries, v.shape[3]))
