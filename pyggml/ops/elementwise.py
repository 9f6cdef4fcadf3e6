"""Arithmetic, element by element, with NumPy's broadcasting."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence

import numpy as np

from .._ffi import lib
from ..checks import plain_number
from ..device import Device, resolve_device
from ..dtypes import as_dtype, float32
from ..errors import DTypeError
from ..graph import PLAIN, Node, Op, Shape, Spec, find_node, state
from ..lowering import GgmlTensor, Lowering, unary
from ..tensor import Tensor, TensorLike, as_tensor, pending, record
from .rules import as_shape, broadcasting, check_ndim, same

SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)

# ---- full ----------------------------------------------------------------------------------------


def _full_shape(*, shape: Shape, value: float) -> Spec:
    check_ndim("full", shape)
    return Spec(shape, float32)


FULL = Op(
    "full",
    shape=_full_shape,
    lower=lambda b, shape, value: lib.ggml_fill(b.ctx, b.new(shape, float32), value),
    reference=lambda shape, value: np.full(shape, value),
    differentiable=False,
)


def constant(x: Node, shape: Shape, scale: float = 1.0, shift: float = 0.0) -> Node | None:
    """Return the node of a tensor filled with scale * x + shift, if x is such a constant, too."""
    if x.op is not FULL:
        return None
    value = scale * dict(x.settings)["value"] + shift
    if value == 0:  # of either sign, which settings do not tell apart
        return None
    return filled(shape, value)


def filled(shape: Shape, value: float) -> Node:
    """Return the node of a tensor filled with a number."""
    return find_node((FULL, (("shape", shape), ("value", value)), PLAIN))


def full(shape: Sequence[int], value: float, *, device: Device | str | None = None) -> Tensor:
    """Return a tensor filled with one Python number, which becomes part of the recorded structure.

    >>> ag.full((2,), 0.5).numpy()
    array([0.5, 0.5], dtype=float32)
    """
    value = plain_number("full", "value", value)
    sizes = as_shape("full", shape)
    if value == 0 and math.copysign(1.0, value) < 0:  # equal to 0.0, but not the same setting
        return neg(full(sizes, 0.0, device=device))
    return pending(filled(sizes, value), state.open_frame(resolve_device(device)))


# ---- add, sub, mul, div --------------------------------------------------------------------------


def _arithmetic(name: str, *, commutative: bool) -> Callable[..., GgmlTensor]:
    """Return the lowering of an op on two tensors."""
    own, ggml = getattr(lib, f"pg_{name}"), getattr(lib, f"ggml_{name}")

    def lower(b: Lowering, x: GgmlTensor, y: GgmlTensor) -> GgmlTensor:
        # ggml's can work in place, but is ten times slower where rows of one element are repeated
        if b.own_kernels and x.ne[0] != y.ne[0]:
            return own(b.ctx, b.contiguous(x), b.contiguous(y))
        return b.binary(ggml, x, y, commutative=commutative)

    return lower


ADD = Op(
    "add",
    shape=broadcasting("add"),
    lower=_arithmetic("add", commutative=True),
    grad=lambda g, out, x, y: (g, g),
    reference=np.add,
)


def add(x: TensorLike, y: TensorLike) -> Tensor:
    """Return x + y, elementwise.

    >>> ag.add([1.0, 2.0], 0.5).numpy()
    array([1.5, 2.5], dtype=float32)
    """
    if isinstance(y, (int, float)):
        return affine(x, shift=y)
    if isinstance(x, (int, float)):
        return affine(y, shift=x)
    return record(ADD, x, y)


SUB = Op(
    "sub",
    shape=broadcasting("sub"),
    lower=_arithmetic("sub", commutative=False),
    grad=lambda g, out, x, y: (g, neg(g)),
    reference=np.subtract,
)


def sub(x: TensorLike, y: TensorLike) -> Tensor:
    """Return x - y, elementwise.

    >>> ag.sub([1.0, 2.0], [[1.0], [3.0]]).numpy()
    array([[ 0.,  1.],
           [-2., -1.]], dtype=float32)
    """
    if isinstance(y, (int, float)):
        return affine(x, shift=-y)
    if isinstance(x, (int, float)):
        return affine(y, scale=-1.0, shift=x)
    return record(SUB, x, y)


MUL = Op(
    "mul",
    shape=broadcasting("mul"),
    lower=_arithmetic("mul", commutative=True),
    grad=lambda g, out, x, y: (mul(g, y), mul(g, x)),
    reference=np.multiply,
)


def mul(x: TensorLike, y: TensorLike) -> Tensor:
    """Return x * y, elementwise.

    >>> ag.mul([1.0, 2.0], [3.0, 4.0]).numpy()
    array([3., 8.], dtype=float32)
    """
    if isinstance(y, (int, float)):
        return affine(x, scale=y)
    if isinstance(x, (int, float)):
        return affine(y, scale=x)
    return record(MUL, x, y)


DIV = Op(
    "div",
    shape=broadcasting("div"),
    lower=_arithmetic("div", commutative=False),
    grad=lambda g, out, x, y: (div(g, y), neg(mul(g, div(out, y)))),
    reference=np.divide,
)


def div(x: TensorLike, y: TensorLike) -> Tensor:
    """Return x / y, elementwise.

    >>> ag.div([1.0, 2.0], [4.0, 4.0]).numpy()
    array([0.25, 0.5 ], dtype=float32)
    """
    # 1 / y is finite in float32
    if isinstance(y, (int, float)) and builtins.abs(y) > SMALLEST_NORMAL:
        return affine(x, scale=1.0 / y)
    return record(DIV, x, y)


# ---- affine: the one op behind neg, scale and arithmetic with Python numbers ---------------------


def _lower_affine(b: Lowering, x: GgmlTensor, *, scale: float, shift: float) -> GgmlTensor:
    if b.own_kernels:  # ggml's runs on one thread; adding -0 leaves the sign of a zero
        return lib.pg_affine(b.ctx, b.contiguous(x), scale, shift or -0.0)
    if shift == 0.0:
        return lib.ggml_scale(b.ctx, b.contiguous(x), scale)
    return lib.ggml_scale_bias(b.ctx, b.contiguous(x), scale, shift)


AFFINE = Op(
    "affine",
    shape=same("affine"),
    lower=_lower_affine,
    grad=lambda g, out, x, scale, shift: affine(g, scale=scale),
    reference=lambda x, scale, shift: x * scale + shift,
    fold=lambda x, scale, shift: constant(x, x.shape, scale, shift),
)


def affine(x: TensorLike, *, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """Return scale * x + shift for two Python numbers, which become part of the recorded structure.

    Use a 0-d tensor instead for a number that changes from step to step.

    >>> ag.affine([1.0, 2.0], scale=2.0, shift=1.0).numpy()
    array([3., 5.], dtype=float32)
    """
    scale, shift = plain_number("affine", "scale", scale), plain_number("affine", "shift", shift)
    if scale == 0 and math.copysign(1.0, scale) < 0:  # equal to 0.0, but not the same setting
        return neg(affine(x, scale=0.0, shift=-shift))
    return record(AFFINE, x, scale=scale, shift=shift)


def neg(x: TensorLike) -> Tensor:
    """Return -x.

    >>> ag.neg([1.0, -2.0]).numpy()
    array([-1.,  2.], dtype=float32)
    """
    return affine(x, scale=-1.0)


# ---- exp, log ------------------------------------------------------------------------------------

# ggml's run on one thread, a libm call for each element.
EXP = Op(
    "exp",
    shape=same("exp"),
    lower=unary("exp"),
    grad=lambda g, out, x: mul(g, out),
    reference=np.exp,
)


def exp(x: TensorLike) -> Tensor:
    """Return e to the power of x.

    >>> ag.exp([0.0, 1.0]).numpy()
    array([1.       , 2.7182817], dtype=float32)
    """
    return record(EXP, x)


LOG = Op(
    "log",
    shape=same("log"),
    lower=unary("log"),
    grad=lambda g, out, x: div(g, x),
    reference=np.log,
)


def log(x: TensorLike) -> Tensor:
    """Return the natural logarithm: -inf at 0, NaN below.

    >>> ag.log([1.0, 0.0]).numpy()
    array([  0., -inf], dtype=float32)
    """
    return record(LOG, x)


# ---- abs, sign -----------------------------------------------------------------------------------

ABS = Op(
    "abs",
    shape=same("abs"),
    lower=lambda b, x: lib.ggml_abs(b.ctx, b.contiguous(x)),
    grad=lambda g, out, x: mul(g, sign(x)),
    reference=np.abs,
)


def abs(x: TensorLike) -> Tensor:
    """Return the absolute value. The gradient at 0 is 0.

    >>> ag.abs([-1.0, 2.0]).numpy()
    array([1., 2.], dtype=float32)
    """
    return record(ABS, x)


SIGN = Op(
    "sign",
    shape=same("sign"),
    lower=unary("sign", "sgn"),  # ggml's makes 0 of NaN
    differentiable=False,
    reference=np.sign,
)


def sign(x: TensorLike) -> Tensor:
    """Return -1, 0 or 1: the sign of x. No gradient flows through it.

    >>> ag.sign([-2.0, 0.0, 3.0]).numpy()
    array([-1.,  0.,  1.], dtype=float32)
    """
    return record(SIGN, x)


# ---- sin, cos ------------------------------------------------------------------------------------

SIN = Op(
    "sin",
    shape=same("sin"),
    lower=lambda b, x: lib.ggml_sin(b.ctx, b.contiguous(x)),
    grad=lambda g, out, x: mul(g, cos(x)),
    reference=np.sin,
)


def sin(x: TensorLike) -> Tensor:
    """Return the sine of x in radians.

    >>> ag.sin([0.0, np.pi / 2]).numpy()
    array([0., 1.], dtype=float32)
    """
    return record(SIN, x)


COS = Op(
    "cos",
    shape=same("cos"),
    lower=lambda b, x: lib.ggml_cos(b.ctx, b.contiguous(x)),
    grad=lambda g, out, x: neg(mul(g, sin(x))),
    reference=np.cos,
)


def cos(x: TensorLike) -> Tensor:
    """Return the cosine of x in radians.

    >>> ag.cos([0.0, np.pi]).numpy()
    array([ 1., -1.], dtype=float32)
    """
    return record(COS, x)


# ---- detach --------------------------------------------------------------------------------------


def _detach_shape(x: Spec) -> Spec:
    return Spec(x.shape, x.dtype)


DETACH = Op(
    "detach",
    shape=_detach_shape,
    lower=lambda b, x: x,
    alias=True,
    differentiable=False,
    reference=lambda x: x,
)


def detach(x: TensorLike) -> Tensor:
    """Return the same value; no gradient flows through it.

    >>> ag.detach(ag.param([1.0])).requires_grad
    False
    """
    return record(DETACH, x)


# ---- astype --------------------------------------------------------------------------------------
# Between float types it is a cast, through which the gradient, always float32, passes unchanged.


def _cast_shape(x: Spec, *, dtype: str) -> Spec:
    wanted = as_dtype(dtype)
    if not (x.dtype.is_float and wanted.is_float):
        raise DTypeError(f"cast: needs float types; got {x.dtype} to {wanted}")
    return Spec(x.shape, wanted)


CAST = Op(
    "cast",
    shape=_cast_shape,
    lower=lambda b, x, dtype: b.cast(x, as_dtype(dtype)),
    grad=lambda g, out, x, dtype: g,
    reference=lambda x, dtype: x,  # the device rounds every result to its type
    takes_half=True,
)

ASTYPE = Op(
    "astype",
    shape=lambda x, dtype: Spec(x.shape, as_dtype(dtype)),
    lower=lambda b, x, dtype: b.cast(x, as_dtype(dtype)),
    differentiable=False,
    reference=lambda x, dtype: np.asarray(x, float if as_dtype(dtype).is_float else np.int32),
)


def astype(x: TensorLike, dtype: object) -> Tensor:
    """Return x as "float32", "float16", "bfloat16" or "int32".

    To a float type x is rounded to the nearest value; the gradient, float32 always, passes
    unchanged. To int32 fractions are cut off, and no gradient flows. Half types are for storage:
    every op but ag.matmul takes them as float32. Raises DTypeError for another dtype.

    >>> ag.astype(ag.argmax([1.0, 3.0]), "float32").numpy()
    array(1., dtype=float32)
    """
    x = as_tensor(x, op="astype", dtype=None)
    wanted, given = as_dtype(dtype), x._at[1].dtype
    if given is wanted:
        return x
    if wanted.is_half and not given.is_float:
        x, given = record(ASTYPE, x, dtype="float32"), float32
    return record(CAST if given.is_float and wanted.is_float else ASTYPE, x, dtype=wanted.name)
