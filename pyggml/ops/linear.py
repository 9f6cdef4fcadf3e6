"""Matrix products."""

from __future__ import annotations

from math import prod

import numpy as np

from .._ffi import ffi, lib
from ..dtypes import float16, float32
from ..errors import ShapeError
from ..graph import Op, Spec
from ..lowering import GgmlTensor, Lowering, shape_of
from ..tensor import Tensor, TensorLike, as_tensor, record
from .reduction import sum
from .rules import broadcast_shapes, need_floats
from .shaping import PERMUTE, reshape, transpose

# ---- matmul --------------------------------------------------------------------------------------


def _matmul_shape(a: Spec, b: Spec) -> Spec:
    need_floats("matmul", a, b)
    if min(len(a.shape), len(b.shape)) < 2:
        raise ShapeError(f"matmul: needs two axes or more; got {a.shape} @ {b.shape}")
    if a.shape[-1] != b.shape[-2]:
        hint = "; did you mean b.T?" if len(b.shape) == 2 and a.shape[-1] == b.shape[-1] else ""
        raise ShapeError(
            f"matmul: inner sizes must agree; got {a.shape} @ {b.shape}, {a.shape[-1]} != "
            f"{b.shape[-2]}{hint}"
        )
    batch = broadcast_shapes("matmul", a.shape[:-2], b.shape[:-2])
    return Spec((*batch, a.shape[-2], b.shape[-1]), float32)


def has_unit_stride(t: GgmlTensor) -> bool:
    """Tell whether the last two axes are a matrix as BLAS wants it.

    One of them is contiguous and the other strides over it.
    """
    width = ffi.sizeof("float")
    return (t.nb[0] == width and t.nb[1] >= width * t.ne[0]) or (
        t.nb[1] == width and t.nb[0] >= width * t.ne[1]
    )


def _lower_matmul(b: Lowering, x: GgmlTensor, y: GgmlTensor) -> GgmlTensor:
    if b.own_kernels:
        x, y = b.cast(x, float32), b.cast(y, float32)
        x, y = (t if has_unit_stride(t) else b.contiguous(t) for t in (x, y))
        return lib.pg_matmul(b.ctx, x, y)
    # ggml_mul_mat(p, q) is q @ p.T for p (n, k) and q (m, k), and broadcasts p over q's batch axes
    batch = [max(x.ne[i], y.ne[i]) for i in (3, 2)]
    x = b.cast(x, float32)
    if y.type != float16.ggml or batch != [1, 1]:  # what every backend has a product for
        y = b.cast(y, float32)
    y = b.contiguous(lib.ggml_transpose(b.ctx, y))
    if [x.ne[3], x.ne[2]] != batch:
        x = b.broadcast(x, (*batch, x.ne[1], x.ne[0]))
    if y.ne[3] != batch[0]:  # ggml's Vulkan backend broadcasts the other batch axis only
        y = b.broadcast(y, (batch[0], y.ne[2], y.ne[1], y.ne[0]))
    return _times_transposed(b, b.contiguous(x), y)


def _times_transposed(b: Lowering, x: GgmlTensor, y: GgmlTensor) -> GgmlTensor:
    """Return x @ y.T by ggml's product, of contiguous x (..., m, k) and y (..., n, k)."""
    product = lib.ggml_mul_mat(b.ctx, y, x)
    lib.ggml_mul_mat_set_prec(product, lib.GGML_PREC_F32)
    return product


def _grad_matmul(g: Tensor, out: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return _product_like(a, g, _swap(b)), _product_like(b, _swap(a), g)


def _swap(x: Tensor) -> Tensor:
    return transpose(x, -1, -2)


def _product_like(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, laid out in memory as x is.

    The gradient of a transposed weight is that of the weight, uncopied.
    """
    if x._at[1].op is PERMUTE:
        return _swap(record(MATMUL, _swap(right), _swap(left)))
    return record(MATMUL, left, right)


MATMUL = Op(
    "matmul",
    shape=_matmul_shape,
    lower=_lower_matmul,
    is_product=True,
    takes_half=True,
    grad=_grad_matmul,
    reference=np.matmul,
)


def matmul(a: TensorLike, b: TensorLike) -> Tensor:
    """Return the matrix product, (..., m, k) @ (..., k, n) -> (..., m, n), with NumPy's rules.

    A 1-D operand is a row on the left and a column on the right, and its axis is dropped from the
    result. Leading axes broadcast. Operands of a half type are multiplied as they are; products and
    sums are float32. Raises ShapeError if the inner sizes differ.

    >>> ag.matmul([[1.0, 2.0]], [[3.0], [4.0]]).numpy()
    array([[11.]], dtype=float32)
    """
    if not isinstance(a, Tensor):
        a = as_tensor(a, b if isinstance(b, Tensor) else None, op="matmul")
    if not isinstance(b, Tensor):
        b = as_tensor(b, a, op="matmul")
    m, n = a.shape, b.shape
    if len(m) == 2 and len(n) == 2:
        return record(MATMUL, a, b)
    if not m or not n:
        raise ShapeError(
            f"matmul: operands need at least one axis; got {m} @ {n}; use * to scale by a number"
        )
    if len(m) == 1 and len(n) == 1:
        return reshape(matmul(reshape(a, (1, -1)), reshape(b, (-1, 1))), ())
    if len(m) == 1:
        product = matmul(reshape(a, (1, -1)), b)
        return reshape(product, (*product.shape[:-2], n[-1]))
    if len(n) == 1:
        product = matmul(a, reshape(b, (-1, 1)))
        return reshape(product, product.shape[:-1])
    if len(n) == 2 and len(m) > 2 and m[-1] == n[0]:  # one large product instead of many small ones
        return reshape(record(MATMUL, reshape(a, (prod(m[:-1]), m[-1])), b), (*m[:-1], n[1]))
    return record(MATMUL, a, b)


# ---- linear --------------------------------------------------------------------------------------


def _linear_shape(x: Spec, weight: Spec, bias: Spec | None = None) -> Spec:
    given = (x, weight) if bias is None else (x, weight, bias)
    need_floats("linear", *given)
    if len(weight.shape) != 2 or not x.shape or x.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"linear: needs x (..., k) and a weight (n, k); got {x.shape} and {weight.shape}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(
            f"linear: the bias of a weight {weight.shape} must have shape {weight.shape[:1]}; got "
            f"{bias.shape}"
        )
    return Spec((*x.shape[:-1], weight.shape[0]), float32)


def _lower_linear(
    b: Lowering, x: GgmlTensor, weight: GgmlTensor, bias: GgmlTensor | None = None
) -> GgmlTensor:
    shape = (*shape_of(x)[:-1], weight.ne[1])
    x = b.reshape(b.cast(x, float32), (prod(shape[:-1]), x.ne[0]))
    bias = None if bias is None else b.contiguous(b.cast(bias, float32))
    if b.own_kernels:
        weight = b.contiguous(b.cast(weight, float32))
        product = lib.pg_linear(b.ctx, x, weight, ffi.NULL if bias is None else bias)
    else:
        if weight.type != float16.ggml:
            weight = b.cast(weight, float32)
        product = _times_transposed(b, x, b.contiguous(weight))
        if bias is not None:
            product = lib.ggml_add(b.ctx, product, bias)
    return b.reshape(product, shape)


def _grad_linear(
    g: Tensor, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    rows = g if g.ndim == 2 else reshape(g, (-1, g.shape[-1]))
    flat = x if x.ndim == 2 else reshape(x, (-1, x.shape[-1]))
    in_x = record(MATMUL, rows, weight)
    in_weight = record(MATMUL, _swap(rows), flat)
    in_x = in_x if x.ndim == 2 else reshape(in_x, x.shape)
    if bias is None:
        return in_x, in_weight
    return in_x, in_weight, sum(rows, axis=0)


def _reference_linear(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | float = 0.0
) -> np.ndarray:
    return x @ weight.T + bias


LINEAR = Op(
    "linear",
    shape=_linear_shape,
    lower=_lower_linear,
    is_product=True,
    takes_half=True,
    grad=_grad_linear,
    reference=_reference_linear,
)


def linear(x: TensorLike, weight: TensorLike, bias: TensorLike | None = None) -> Tensor:
    """Return x @ weight.T + bias, in one pass: x (..., k), weight (n, k), bias (n,): (..., n).

    Raises ShapeError unless the shapes fit.

    >>> ag.linear([[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]], [0.5, 0.0]).numpy()
    array([[11.5, 17. ]], dtype=float32)
    """
    inputs = (x, weight) if bias is None else (x, weight, bias)
    return record(LINEAR, *inputs)


def outer(a: TensorLike, b: TensorLike) -> Tensor:
    """Return the products of all elements of a (m,) with all of b (n,): (m, n).

    Raises ShapeError unless both have one axis.

    >>> ag.outer([1.0, 2.0], [3.0, 4.0]).numpy()
    array([[3., 4.],
           [6., 8.]], dtype=float32)
    """
    a = as_tensor(a, b if isinstance(b, Tensor) else None, op="outer")
    b = as_tensor(b, a, op="outer")
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError(f"outer: needs two vectors; got {a.shape} and {b.shape}; use reshape")
    return record(MATMUL, reshape(a, (-1, 1)), reshape(b, (1, -1)))
