"""Powers and roots."""

from __future__ import annotations

from math import isfinite

import numpy as np

from .._ffi import lib
from ..dtypes import float32
from ..graph import Op
from ..lowering import GgmlTensor, Lowering, shape_of
from ..tensor import Tensor, TensorLike, record
from .comparison import constants, equal, keep_nan, less
from .elementwise import add, affine, div, log, mul
from .rules import broadcasting, same

# ---- sqr, sqrt -----------------------------------------------------------------------------------


def _lower_sqr(b: Lowering, x: GgmlTensor) -> GgmlTensor:
    x = b.contiguous(x)  # a product, since ggml_sqr runs on one thread
    return lib.ggml_mul(b.ctx, x, x)


SQR = Op(
    "sqr",
    shape=same("sqr"),
    lower=_lower_sqr,
    grad=lambda g, out, x: mul(affine(g, scale=2.0), x),
    reference=np.square,
)


def sqr(x: TensorLike) -> Tensor:
    """Return x * x.

    >>> ag.sqr([1.0, -3.0]).numpy()
    array([1., 9.], dtype=float32)
    """
    return record(SQR, x)


SQRT = Op(
    "sqrt",
    shape=same("sqrt"),
    lower=lambda b, x: lib.ggml_sqrt(b.ctx, b.contiguous(x)),
    grad=lambda g, out, x: div(affine(g, scale=0.5), out),
    reference=np.sqrt,
)


def sqrt(x: TensorLike) -> Tensor:
    """Return the square root; NaN for negative x. The gradient at 0 is infinite.

    >>> ag.sqrt([4.0, 9.0]).numpy()
    array([2., 3.], dtype=float32)
    """
    return record(SQRT, x)


# ---- pow -----------------------------------------------------------------------------------------

MAX_FACTORS = 4  # a product of more loses digits; the kernel has the same limit


def _lower_power(b: Lowering, x: GgmlTensor, *, exponent: float) -> GgmlTensor:
    x = b.contiguous(x)
    if b.own_kernels:
        return lib.pg_power(b.ctx, x, exponent)
    count, is_whole = abs(exponent), exponent.is_integer()
    one = lib.ggml_fill(b.ctx, b.new(shape_of(x), float32), 1.0)
    if is_whole and count <= MAX_FACTORS:
        result = one
        for _ in range(int(count)):
            result = lib.ggml_mul(b.ctx, result, x)
    else:
        base = lib.ggml_abs(b.ctx, x) if is_whole else x
        result = lib.ggml_exp(b.ctx, lib.ggml_scale(b.ctx, lib.ggml_log(b.ctx, base), count))
        if is_whole and count % 2:
            result = lib.ggml_mul(b.ctx, result, lib.ggml_sgn(b.ctx, x))
    return lib.ggml_div(b.ctx, one, result) if exponent < 0 else result


def _grad_power(g: Tensor, out: Tensor, x: Tensor, *, exponent: float) -> Tensor:
    if exponent in (0.0, 1.0):
        return affine(g, scale=exponent)
    return mul(g, affine(pow(x, exponent - 1.0), scale=exponent))


POWER = Op(
    "power",
    shape=same("power"),
    lower=_lower_power,
    grad=_grad_power,
    reference=lambda x, exponent: np.power(x, exponent),
)


def _lower_pow(b: Lowering, x: GgmlTensor, y: GgmlTensor) -> GgmlTensor:
    if b.own_kernels:
        return lib.pg_pow(b.ctx, b.contiguous(x), b.contiguous(y))
    # |x|^y = exp(y log|x|), where log 0 is finite, so that 0^0 is 1; for x < 0 the result has the
    # sign of an odd y, and is NaN, the root of -1, for a fraction y.
    x, y = b.contiguous(x), b.contiguous(y)
    logarithm = lib.ggml_clamp(b.ctx, lib.ggml_log(b.ctx, lib.ggml_abs(b.ctx, x)), -1e30, 1e30)
    size = lib.ggml_exp(b.ctx, b.binary(lib.ggml_mul, y, logarithm, commutative=True))
    below = lib.ggml_step(b.ctx, lib.ggml_neg(b.ctx, x))
    half = lib.ggml_floor(b.ctx, lib.ggml_scale(b.ctx, y, 0.5))
    odd = lib.ggml_sub(b.ctx, y, lib.ggml_scale(b.ctx, half, 2.0))
    minus = b.binary(lib.ggml_mul, odd, below, commutative=True)
    sign = lib.ggml_scale_bias(b.ctx, minus, -2.0, 1.0)
    fraction = lib.ggml_step(b.ctx, lib.ggml_sub(b.ctx, y, lib.ggml_floor(b.ctx, y)))
    wrong = b.binary(lib.ggml_mul, fraction, below, commutative=True)
    wrong = lib.ggml_scale(b.ctx, lib.ggml_sqrt(b.ctx, lib.ggml_neg(b.ctx, wrong)), 0.0)
    return keep_nan(b, lib.ggml_add(b.ctx, lib.ggml_mul(b.ctx, size, sign), wrong), x, y)


def _grad_pow(g: Tensor, out: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    # At 0^0 and 0^y the products below would be 0 * inf; a base or exponent of 1 makes them 0.
    zero_base = equal(x, 0.0)
    lower = affine(add(y, mul(zero_base, equal(y, 0.0))), shift=-1.0)
    base = add(x, mul(zero_base, affine(less(y, 0.0), scale=-1.0, shift=1.0)))
    return mul(g, mul(y, pow(x, lower))), mul(g, mul(out, log(base)))


POW = Op(
    "pow",
    shape=broadcasting("pow"),
    lower=_lower_pow,
    grad=_grad_pow,
    reference=np.power,
)


def pow(x: TensorLike, y: TensorLike) -> Tensor:
    """Return x to the power of y, elementwise: numbers or tensors, which broadcast.

    A negative x has powers with whole y, positive or negative, and NaN for others. x**0 is 1, with
    gradient 0. A Python number becomes part of the recorded structure. The gradient in a tensor y
    is NaN for negative x, where there is none, and 0 for x = 0 with y >= 0.

    >>> ag.pow([-2.0, 3.0], 3).numpy()
    array([-8., 27.], dtype=float32)
    >>> ag.pow([-2.0, 4.0], [-1.0, 0.5]).numpy()
    array([-0.5,  2. ], dtype=float32)
    """
    if isinstance(y, (int, float)) and isfinite(y):
        if y == 2:
            return sqr(x)
        if y == 0.5:
            return sqrt(x)
        return record(POWER, x, exponent=float(y))
    return record(POW, *constants(x, y))
