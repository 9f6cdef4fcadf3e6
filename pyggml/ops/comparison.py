"""Comparisons as masks of 0 and 1, and choices between elements.

A Python number among the inputs becomes part of the recorded structure, as in arithmetic; use a 0-d
tensor for one that changes from step to step.
"""

from __future__ import annotations

from math import inf, isinf, isnan

import numpy as np

from .._ffi import lib
from ..checks import plain_number
from ..dtypes import int32
from ..errors import SettingError
from ..graph import Op
from ..lowering import GgmlTensor, Lowering
from ..tensor import Tensor, TensorLike, record
from .elementwise import full
from .rules import broadcasting, same


def keep_nan(b: Lowering, value: GgmlTensor, *inputs: GgmlTensor) -> GgmlTensor:
    """Return value, but NaN where an input is: many of ggml's comparisons lose it."""
    for x in inputs:
        zero = lib.ggml_scale(b.ctx, lib.ggml_sigmoid(b.ctx, b.contiguous(x)), 0.0)
        value = b.binary(lib.ggml_add, value, zero, commutative=True)
    return value


def constants(*values: TensorLike) -> tuple[TensorLike, ...]:
    """Return the values, Python numbers among them as tensors that are part of the structure."""
    like = next((value for value in values if isinstance(value, Tensor)), None)
    device = None if like is None else like.device
    return tuple(
        full((), value, device=device) if isinstance(value, (int, float)) else value
        for value in values
    )


# ---- step, greater, less, equal ------------------------------------------------------------------

STEP = Op(
    "step",
    shape=same("step"),
    lower=lambda b, x: lib.ggml_step(b.ctx, b.contiguous(x)),
    differentiable=False,
    reference=lambda x: (x > 0).astype(float),
)


def step(x: TensorLike) -> Tensor:
    """Return 1 where x > 0 and 0 elsewhere. No gradient flows through it.

    >>> ag.step([-1.0, 0.0, 2.0]).numpy()
    array([0., 0., 1.], dtype=float32)
    """
    return record(STEP, x)


def _lower_greater(b: Lowering, x: GgmlTensor, y: GgmlTensor) -> GgmlTensor:
    if b.own_kernels:
        return lib.pg_greater(b.ctx, b.contiguous(x), b.contiguous(y))
    return lib.ggml_step(b.ctx, b.binary(lib.ggml_sub, x, y, commutative=False))


GREATER = Op(
    "greater",
    shape=broadcasting("greater"),
    lower=_lower_greater,
    differentiable=False,
    reference=lambda x, y: (x > y).astype(float),
)


def greater(x: TensorLike, y: TensorLike) -> Tensor:
    """Return 1 where x > y and 0 elsewhere, elementwise. No gradient flows through it.

    >>> ag.greater([1.0, 2.0, 3.0], 2.0).numpy()
    array([0., 0., 1.], dtype=float32)
    """
    return record(GREATER, *constants(x, y))


def less(x: TensorLike, y: TensorLike) -> Tensor:
    """Return 1 where x < y and 0 elsewhere, elementwise. No gradient flows through it.

    >>> ag.less([1.0, 2.0, 3.0], 2.0).numpy()
    array([1., 0., 0.], dtype=float32)
    """
    return record(GREATER, *constants(y, x))


def _lower_equal(b: Lowering, x: GgmlTensor, y: GgmlTensor) -> GgmlTensor:
    if b.own_kernels:
        return lib.pg_equal(b.ctx, b.contiguous(x), b.contiguous(y))
    # 1 unless one is greater; but 0 for NaN, which ggml's step takes for not positive
    first, second = (lib.ggml_sigmoid(b.ctx, b.contiguous(t)) for t in (x, y))
    both = b.binary(lib.ggml_add, first, second, commutative=True)
    result = lib.ggml_step(b.ctx, lib.ggml_scale_bias(b.ctx, both, 1.0, 1.0))
    for p, q in ((x, y), (y, x)):
        result = lib.ggml_sub(b.ctx, result, _lower_greater(b, p, q))
    return result


EQUAL = Op(
    "equal",
    shape=broadcasting("equal"),
    lower=_lower_equal,
    differentiable=False,
    reference=lambda x, y: (x == y).astype(float),
)


def equal(x: TensorLike, y: TensorLike) -> Tensor:
    """Return 1 where x == y and 0 elsewhere, elementwise. No gradient flows through it.

    >>> ag.equal([1.0, 2.0, 3.0], 2.0).numpy()
    array([0., 1., 0.], dtype=float32)
    """
    return record(EQUAL, *constants(x, y))


# ---- where ---------------------------------------------------------------------------------------


def _lower_where(b: Lowering, condition: GgmlTensor, x: GgmlTensor, y: GgmlTensor) -> GgmlTensor:
    if b.own_kernels:
        return lib.pg_where(b.ctx, *(b.contiguous(t) for t in (condition, x, y)))
    # Products with a mask would let NaN through, so elements are looked up: row 0 is y, row 1 is x.
    sizes = zip(*(t.ne for t in (condition, x, y)), strict=True)
    shape = tuple(max(size) for size in sizes)[::-1]
    condition, x, y = (b.broadcast(t, shape) for t in (condition, x, y))
    count = int(np.prod(shape))
    x, y = (b.reshape(t, (1, count, 1)) for t in (x, y))
    table = lib.ggml_permute(b.ctx, lib.ggml_concat(b.ctx, y, x, 2), 0, 2, 1, 3)
    mask = lib.ggml_step(b.ctx, lib.ggml_abs(b.ctx, b.reshape(condition, (count, 1))))
    rows = lib.ggml_get_rows(b.ctx, table, lib.ggml_cast(b.ctx, mask, int32.ggml))
    return b.reshape(rows, shape)


def _grad_where(
    g: Tensor, out: Tensor, condition: Tensor, x: Tensor, y: Tensor
) -> tuple[None, Tensor, Tensor]:
    zero = full((), 0.0, device=g.device)
    return None, record(WHERE, condition, g, zero), record(WHERE, condition, zero, g)


WHERE: Op = Op(
    "where",
    shape=broadcasting("where"),
    lower=_lower_where,
    grad=_grad_where,
    reference=lambda condition, x, y: np.where(condition != 0, x, y),
)


def where(condition: TensorLike, x: TensorLike, y: TensorLike) -> Tensor:
    """Return x where the condition holds and y elsewhere; all three broadcast.

    The condition is an array of booleans or a tensor of 0 and 1, as ag.greater gives; no gradient
    flows into it. NaN or infinity where x or y is not taken reaches neither the value nor the
    gradients of x and y, which are 0 there. If x is computed by a function with a pole, 0 times its
    infinite slope is still NaN: then choose its input too, as in where(c, log(where(c, z, 1)), 0).

    >>> ag.where(np.array([True, False]), [1.0, 2.0], 0.0).numpy()
    array([1., 0.], dtype=float32)
    """
    return record(WHERE, *constants(condition, x, y))


# ---- maximum, minimum ----------------------------------------------------------------------------


def _choice(name: str, *, larger: bool) -> Op:
    """Return the op that takes the larger of two elements, or the smaller; y in a tie."""
    own = getattr(lib, f"pg_{name}")

    def lower(b: Lowering, x: GgmlTensor, y: GgmlTensor) -> GgmlTensor:
        if b.own_kernels:
            return own(b.ctx, b.contiguous(x), b.contiguous(y))
        takes_x = _lower_greater(b, x, y) if larger else _lower_greater(b, y, x)
        return keep_nan(b, _lower_where(b, takes_x, x, y), x)

    def grad(g: Tensor, out: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return _grad_where(g, out, greater(x, y) if larger else less(x, y), x, y)[1:]

    formula = np.maximum if larger else np.minimum
    return Op(name, shape=broadcasting(name), lower=lower, grad=grad, reference=formula)


MAXIMUM = _choice("maximum", larger=True)


def maximum(x: TensorLike, y: TensorLike) -> Tensor:
    """Return the larger of x and y, elementwise; NaN where either is.

    In a tie the gradient goes to y, so that maximum(x, 0) is relu(x).

    >>> ag.maximum([1.0, 3.0], [2.0, 2.0]).numpy()
    array([2., 3.], dtype=float32)
    """
    if isinstance(y, (int, float)) and not isnan(y):
        return clamp(x, min=y)
    return record(MAXIMUM, *constants(x, y))


MINIMUM = _choice("minimum", larger=False)


def minimum(x: TensorLike, y: TensorLike) -> Tensor:
    """Return the smaller of x and y, elementwise; NaN where either is.

    In a tie the gradient goes to y.

    >>> ag.minimum([1.0, 3.0], [2.0, 2.0]).numpy()
    array([1., 2.], dtype=float32)
    """
    if isinstance(y, (int, float)) and not isnan(y):
        return clamp(x, max=y)
    return record(MINIMUM, *constants(x, y))


# ---- clamp ---------------------------------------------------------------------------------------


def _lower_clamp(b: Lowering, x: GgmlTensor, *, min: float, max: float) -> GgmlTensor:
    if b.own_kernels:
        return lib.pg_clamp(b.ctx, b.contiguous(x), min, max)
    # ggml_clamp works in place, so it gets a copy that nobody else reads.
    return keep_nan(b, lib.ggml_clamp(b.ctx, lib.ggml_cont(b.ctx, x), min, max), x)


CLAMP: Op = Op(
    "clamp",
    shape=same("clamp"),
    lower=_lower_clamp,
    # from out, which lies between the bounds where x does: x need not be kept
    grad=lambda g, out, x, min, max: record(CLAMP_BACK, g, out, min=min, max=max),
    reference=lambda x, min, max: np.clip(x, min, max),
)


def _lower_clamp_back(
    b: Lowering, g: GgmlTensor, out: GgmlTensor, *, min: float, max: float
) -> GgmlTensor:
    g, out = b.contiguous(g), b.contiguous(out)
    if b.own_kernels:
        return lib.pg_clamp_back(b.ctx, g, out, min, max)
    for sign, shift in ((1.0, -min), (-1.0, max)):
        if not isinf(shift):
            above = lib.ggml_step(b.ctx, lib.ggml_scale_bias(b.ctx, out, sign, shift))
            g = lib.ggml_mul(b.ctx, g, above)
    return g


CLAMP_BACK: Op = Op(
    "clamp_back",
    shape=same("clamp_back"),
    lower=_lower_clamp_back,
    grad=lambda gg, _, g, out, min, max: (record(CLAMP_BACK, gg, out, min=min, max=max), None),
    reference=lambda g, out, min, max: np.where((out > min) & (out < max), g, 0.0),
)


def clamp(x: TensorLike, *, min: float | None = None, max: float | None = None) -> Tensor:
    """Return x, but at least min and at most max; None leaves that side open.

    The gradient is that of x strictly between the bounds, and 0 at them, as relu's at 0. The bounds
    become part of the recorded structure; use ag.maximum and ag.minimum for bounds that change.
    Raises SettingError if both are None, if one is NaN, or if min > max.

    >>> ag.clamp([-2.0, 0.5, 2.0], min=-1, max=1).numpy()
    array([-1. ,  0.5,  1. ], dtype=float32)
    """
    if min is None and max is None:
        raise SettingError("clamp: needs min=, max= or both; got neither")
    low = -inf if min is None else plain_number("clamp", "min", min)
    high = inf if max is None else plain_number("clamp", "max", max)
    if not low <= high:
        raise SettingError(f"clamp: min must not be above max; got min={low}, max={high}")
    return record(CLAMP, x, min=low, max=high)
