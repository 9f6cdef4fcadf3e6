"""Powers and roots."""

from __future__ import annotations

import numpy as np

from .._ffi import lib
from ..graph import Op
from ..lowering import GgmlTensor, Lowering
from ..tensor import Tensor, TensorLike, record
from .elementwise import affine, div, mul
from .rules import same

# ---- sqr, sqrt -----------------------------------------------------------------------------------


def lower_sqr(b: Lowering, x: GgmlTensor) -> GgmlTensor:
    """Lower sqr: as a product, since ggml_sqr runs on one thread."""
    x = b.contiguous(x)
    return lib.ggml_mul(b.ctx, x, x)


SQR = Op(
    "sqr",
    shape=same("sqr"),
    lower=lower_sqr,
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
