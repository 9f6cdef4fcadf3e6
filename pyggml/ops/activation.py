"""Activation functions.

Those with exponentials have kernels of their own: ggml's run on one thread, call libm for each
element, or, as its GELU does on the CPU, look up a table of half-precision numbers.
"""

from __future__ import annotations

from math import erfc, pi, sqrt

import numpy as np

from .._ffi import lib
from ..checks import one_of, plain_number
from ..graph import Op
from ..lowering import GgmlTensor, Lowering, unary
from ..tensor import Tensor, TensorLike, record
from .comparison import clamp, step, where
from .elementwise import add, affine, exp, mul, sub
from .power import sqr
from .rules import same

# ---- relu ----------------------------------------------------------------------------------------

RELU: Op = Op(
    "relu",
    shape=same("relu"),
    lower=unary("relu"),  # on the CPU, ggml's runs on one thread and makes 0 of NaN
    grad=lambda g, out, x: record(RELU_BACK, g, out),  # from out: x need not be kept
    reference=lambda x: np.maximum(x, 0.0),
)


def _lower_relu_back(b: Lowering, g: GgmlTensor, out: GgmlTensor) -> GgmlTensor:
    g, out = b.contiguous(g), b.contiguous(out)
    if b.own_kernels:
        return lib.pg_relu_back(b.ctx, g, out)
    return lib.ggml_mul(b.ctx, g, lib.ggml_step(b.ctx, out))


RELU_BACK: Op = Op(
    "relu_back",
    shape=same("relu_back"),
    lower=_lower_relu_back,
    grad=lambda gg, _, g, out: (record(RELU_BACK, gg, out), None),
    reference=lambda g, out: np.where(out > 0, g, 0.0),
)


def relu(x: TensorLike) -> Tensor:
    """Return max(x, 0), elementwise. The gradient at 0 is 0.

    >>> ag.relu([-1.0, 2.0]).numpy()
    array([0., 2.], dtype=float32)
    """
    return record(RELU, x)


# ---- leaky_relu ----------------------------------------------------------------------------------


def _lower_leaky_relu(b: Lowering, x: GgmlTensor, *, negative_slope: float) -> GgmlTensor:
    if b.own_kernels:  # on the CPU, ggml's runs on one thread and makes 0 of NaN
        return lib.pg_leaky_relu(b.ctx, b.contiguous(x), negative_slope)
    return lib.ggml_leaky_relu(b.ctx, b.contiguous(x), negative_slope, False)


def _grad_leaky_relu(g: Tensor, out: Tensor, x: Tensor, *, negative_slope: float) -> Tensor:
    above = step(out if negative_slope >= 0 else x)  # from out if possible: x need not be kept
    return mul(g, affine(above, scale=1.0 - negative_slope, shift=negative_slope))


LEAKY_RELU = Op(
    "leaky_relu",
    shape=same("leaky_relu"),
    lower=_lower_leaky_relu,
    grad=_grad_leaky_relu,
    reference=lambda x, negative_slope: np.where(x >= 0, x, x * negative_slope),
)


def leaky_relu(x: TensorLike, *, negative_slope: float = 0.01) -> Tensor:
    """Return x where it is positive and negative_slope * x elsewhere.

    The gradient at 0 is negative_slope.

    >>> ag.leaky_relu([-1.0, 2.0], negative_slope=0.25).numpy()
    array([-0.25,  2.  ], dtype=float32)
    """
    return record(
        LEAKY_RELU, x, negative_slope=plain_number("leaky_relu", "negative_slope", negative_slope)
    )


# ---- elu -----------------------------------------------------------------------------------------


def _lower_elu(b: Lowering, x: GgmlTensor, *, alpha: float) -> GgmlTensor:
    x = b.contiguous(x)
    if b.own_kernels:
        return lib.pg_elu(b.ctx, x, alpha)
    if alpha == 1.0:
        return lib.ggml_elu(b.ctx, x)
    below = lib.ggml_neg(b.ctx, lib.ggml_relu(b.ctx, lib.ggml_neg(b.ctx, x)))
    below = lib.ggml_scale(b.ctx, lib.ggml_elu(b.ctx, below), alpha)
    return lib.ggml_add(b.ctx, lib.ggml_relu(b.ctx, x), below)


def _grad_elu(g: Tensor, out: Tensor, x: Tensor, *, alpha: float) -> Tensor:
    slope = affine(exp(clamp(x, max=0.0)), scale=alpha)
    return mul(g, slope if alpha == 1.0 else where(step(x), 1.0, slope))


ELU = Op(
    "elu",
    shape=same("elu"),
    lower=_lower_elu,
    grad=_grad_elu,
    reference=lambda x, alpha: np.where(x >= 0, x, alpha * np.expm1(np.minimum(x, 0.0))),
)


def elu(x: TensorLike, *, alpha: float = 1.0) -> Tensor:
    """Return x where it is positive and alpha * (exp(x) - 1) elsewhere (Clevert et al. 2015).

    The gradient at 0 is alpha.

    >>> ag.elu([-100.0, 2.0]).numpy()
    array([-1.,  2.], dtype=float32)
    """
    return record(ELU, x, alpha=plain_number("elu", "alpha", alpha))


# ---- tanh ----------------------------------------------------------------------------------------

TANH: Op = Op(
    "tanh",
    shape=same("tanh"),
    lower=unary("tanh"),
    grad=lambda g, out, x: record(TANH_BACK, g, out),
    reference=np.tanh,
)


def _lower_tanh_back(b: Lowering, g: GgmlTensor, out: GgmlTensor) -> GgmlTensor:
    g, out = b.contiguous(g), b.contiguous(out)
    if b.own_kernels:
        return lib.pg_tanh_back(b.ctx, g, out)
    square = lib.ggml_mul(b.ctx, out, out)
    return lib.ggml_mul(b.ctx, g, lib.ggml_scale_bias(b.ctx, square, -1.0, 1.0))


# One pass over memory instead of three: recurrent nets spend their time here.
TANH_BACK: Op = Op(
    "tanh_back",
    shape=same("tanh_back"),
    lower=_lower_tanh_back,
    grad=lambda gg, _, g, out: (
        record(TANH_BACK, gg, out),
        affine(mul(mul(gg, g), out), scale=-2.0),
    ),
    reference=lambda g, out: g * (1.0 - out * out),
)


def tanh(x: TensorLike) -> Tensor:
    """Return the hyperbolic tangent.

    >>> ag.tanh([0.0, 100.0]).numpy()
    array([0., 1.], dtype=float32)
    """
    return record(TANH, x)


# ---- sigmoid -------------------------------------------------------------------------------------


def _reference_sigmoid(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


SIGMOID: Op = Op(
    "sigmoid",
    shape=same("sigmoid"),
    lower=unary("sigmoid"),
    grad=lambda g, out, x: record(SIGMOID_BACK, g, out),
    reference=_reference_sigmoid,
)


def _lower_sigmoid_back(b: Lowering, g: GgmlTensor, out: GgmlTensor) -> GgmlTensor:
    g, out = b.contiguous(g), b.contiguous(out)
    if b.own_kernels:
        return lib.pg_sigmoid_back(b.ctx, g, out)
    slope = lib.ggml_mul(b.ctx, out, lib.ggml_scale_bias(b.ctx, out, -1.0, 1.0))
    return lib.ggml_mul(b.ctx, g, slope)


# One pass over memory instead of three: recurrent nets spend their time here.
SIGMOID_BACK: Op = Op(
    "sigmoid_back",
    shape=same("sigmoid_back"),
    lower=_lower_sigmoid_back,
    grad=lambda gg, _, g, out: (
        record(SIGMOID_BACK, gg, out),
        mul(mul(gg, g), affine(out, scale=-2.0, shift=1.0)),
    ),
    reference=lambda g, out: g * out * (1.0 - out),
)


def sigmoid(x: TensorLike) -> Tensor:
    """Return 1 / (1 + exp(-x)).

    >>> ag.sigmoid([0.0, 100.0]).numpy()
    array([0.5, 1. ], dtype=float32)
    """
    return record(SIGMOID, x)


# ---- silu ----------------------------------------------------------------------------------------


def _reference_silu(x: np.ndarray) -> np.ndarray:
    return np.where(x == -np.inf, 0.0, x * _reference_sigmoid(x))


SILU: Op = Op(
    "silu",
    shape=same("silu"),
    lower=unary("silu"),
    grad=lambda g, out, x: record(SILU_BACK, g, x),
    reference=_reference_silu,
)


def _lower_silu_back(b: Lowering, g: GgmlTensor, x: GgmlTensor) -> GgmlTensor:
    g, x = b.contiguous(g), b.contiguous(x)
    return lib.pg_silu_back(b.ctx, g, x) if b.own_kernels else lib.ggml_silu_back(b.ctx, g, x)


def _grad_silu_back(gg: Tensor, _: Tensor, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    s = sigmoid(x)
    inner = affine(mul(x, affine(s, scale=-2.0, shift=1.0)), shift=2.0)
    return record(SILU_BACK, gg, x), mul(mul(gg, g), mul(sub(s, sqr(s)), inner))


def _reference_silu_back(g: np.ndarray, x: np.ndarray) -> np.ndarray:
    s, finite = _reference_sigmoid(x), np.clip(x, -1e4, 1e4)
    return g * (s + finite * s * _reference_sigmoid(-x))


SILU_BACK: Op = Op(
    "silu_back",
    shape=same("silu_back"),
    lower=_lower_silu_back,
    grad=_grad_silu_back,
    reference=_reference_silu_back,
)


def silu(x: TensorLike) -> Tensor:
    """Return x * sigmoid(x) (Hendrycks and Gimpel 2016), also known as swish.

    >>> ag.silu([0.0, 100.0]).numpy()
    array([  0., 100.], dtype=float32)
    """
    return record(SILU, x)


def swiglu(x: TensorLike, gate: TensorLike) -> Tensor:
    """Return x * silu(gate), elementwise: a gated linear unit (Shazeer 2020).

    x and gate are two projections of one input, of shapes that broadcast; split one projection of
    twice the width before the call.

    >>> ag.swiglu([1.0, 2.0], [0.0, 100.0]).numpy()
    array([  0., 200.], dtype=float32)
    """
    return mul(x, silu(gate))


# ---- gelu ----------------------------------------------------------------------------------------

TANH_SCALE, TANH_CUBE = 2.0 * sqrt(2.0 / pi), 0.044715  # 2 u = TANH_SCALE * (x + TANH_CUBE * x^3)


def _tanh_argument(b: Lowering, x: GgmlTensor) -> GgmlTensor:
    square = lib.ggml_mul(b.ctx, x, x)
    inner = lib.ggml_scale_bias(b.ctx, square, TANH_SCALE * TANH_CUBE, TANH_SCALE)
    return lib.ggml_mul(b.ctx, x, inner)


def _lower_gelu(b: Lowering, x: GgmlTensor, *, approximate: str) -> GgmlTensor:
    x = b.contiguous(x)
    if approximate == "none":
        return lib.pg_gelu(b.ctx, x) if b.own_kernels else lib.ggml_gelu_erf(b.ctx, x)
    if b.own_kernels:
        return lib.pg_gelu_tanh(b.ctx, x)
    return lib.ggml_mul(b.ctx, x, lib.ggml_sigmoid(b.ctx, _tanh_argument(b, x)))


def _normal_tail(x: np.ndarray) -> np.ndarray:
    """Return the probability that a standard normal number is above x."""
    return 0.5 * np.asarray(np.frompyfunc(erfc, 1, 1)(x * sqrt(0.5)), float)


def _tanh_argument_of(x: np.ndarray) -> np.ndarray:
    return TANH_SCALE * (x + TANH_CUBE * x**3)


def _reference_gelu(x: np.ndarray, approximate: str) -> np.ndarray:
    if approximate == "none":
        share = _normal_tail(-x)
    else:
        share = _reference_sigmoid(_tanh_argument_of(x))
    return np.where(x == -np.inf, 0.0, x * share)


GELU: Op = Op(
    "gelu",
    shape=same("gelu"),
    lower=_lower_gelu,
    grad=lambda g, out, x, approximate: record(GELU_BACK, g, x, approximate=approximate),
    reference=_reference_gelu,
)


def _lower_gelu_back(b: Lowering, g: GgmlTensor, x: GgmlTensor, *, approximate: str) -> GgmlTensor:
    g, x = b.contiguous(g), b.contiguous(x)
    if b.own_kernels:
        kernel = lib.pg_gelu_back if approximate == "none" else lib.pg_gelu_tanh_back
        return kernel(b.ctx, g, x)
    square = lib.ggml_mul(b.ctx, x, x)
    if approximate == "none":
        # share = gelu(x) / x, away from 0 / 0; then share + x density(x)
        zero = lib.ggml_scale_bias(
            b.ctx, lib.ggml_abs(b.ctx, lib.ggml_sgn(b.ctx, x)), -1e-30, 1e-30
        )
        apart = lib.ggml_add(b.ctx, x, zero)
        share = lib.ggml_div(b.ctx, lib.ggml_gelu_erf(b.ctx, apart), apart)
        density = lib.ggml_exp(
            b.ctx, lib.ggml_scale_bias(b.ctx, square, -0.5, -0.5 * np.log(2 * pi))
        )
    else:
        # share = sigmoid(2 u); then share + x share (1 - share) 2 u'
        share = lib.ggml_sigmoid(b.ctx, _tanh_argument(b, x))
        density = lib.ggml_mul(b.ctx, share, lib.ggml_scale_bias(b.ctx, share, -1.0, 1.0))
        slope = lib.ggml_scale_bias(b.ctx, square, 3 * TANH_SCALE * TANH_CUBE, TANH_SCALE)
        density = lib.ggml_mul(b.ctx, density, slope)
    slope = lib.ggml_add(b.ctx, share, lib.ggml_mul(b.ctx, x, density))
    return lib.ggml_mul(b.ctx, g, slope)


def _grad_gelu_back(
    gg: Tensor, _: Tensor, g: Tensor, x: Tensor, *, approximate: str
) -> tuple[Tensor, Tensor]:
    square = sqr(x)
    if approximate == "none":
        density = affine(exp(affine(square, scale=-0.5)), scale=1.0 / sqrt(2.0 * pi))
        curvature = mul(density, affine(square, scale=-1.0, shift=2.0))
    else:
        # with s = sigmoid(z), z = 2 u: s (1 - s) (2 z' + x z'' + x z'^2 (1 - 2 s))
        z = mul(x, affine(square, scale=TANH_SCALE * TANH_CUBE, shift=TANH_SCALE))
        first = affine(square, scale=3 * TANH_SCALE * TANH_CUBE, shift=TANH_SCALE)
        s = sigmoid(z)
        straight = affine(square, scale=12 * TANH_SCALE * TANH_CUBE, shift=2 * TANH_SCALE)
        bent = mul(mul(x, sqr(first)), affine(s, scale=-2.0, shift=1.0))
        curvature = mul(sub(s, sqr(s)), add(straight, bent))
    return record(GELU_BACK, gg, x, approximate=approximate), mul(mul(gg, g), curvature)


def _reference_gelu_back(g: np.ndarray, x: np.ndarray, approximate: str) -> np.ndarray:
    x = np.clip(x, -50.0, 50.0)  # where the slope has long been 0 or 1
    if approximate == "none":
        return g * (_normal_tail(-x) + x * np.exp(-0.5 * x * x) / sqrt(2.0 * pi))
    z = _tanh_argument_of(x)
    share, rest = _reference_sigmoid(z), _reference_sigmoid(-z)
    return g * (share + x * share * rest * TANH_SCALE * (1.0 + 3.0 * TANH_CUBE * x * x))


# Fused: transformers spend more time in the gradient of GELU than in any other elementwise op.
GELU_BACK: Op = Op(
    "gelu_back",
    shape=same("gelu_back"),
    lower=_lower_gelu_back,
    grad=_grad_gelu_back,
    reference=_reference_gelu_back,
)


def gelu(x: TensorLike, *, approximate: str = "none") -> Tensor:
    """Return x times the normal distribution function of x (Hendrycks and Gimpel 2016).

    approximate="tanh" is the formula 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), which some
    models were trained with. Raises SettingError for another name.

    >>> ag.gelu([-100.0, 0.0, 1.0]).numpy()
    array([0.       , 0.       , 0.8413447], dtype=float32)
    """
    kind = one_of("gelu", "approximate", approximate, ("none", "tanh"))
    return record(GELU, x, approximate=kind)


# ---- softplus ------------------------------------------------------------------------------------

SOFTPLUS = Op(
    "softplus",
    shape=same("softplus"),
    lower=unary("softplus"),  # ggml's is 0 below x = -17
    grad=lambda g, out, x: mul(g, sigmoid(x)),
    reference=lambda x: np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x))),
)


def softplus(x: TensorLike) -> Tensor:
    """Return log(1 + exp(x)), without overflow.

    >>> ag.softplus([0.0, 100.0]).numpy()
    array([  0.6931472, 100.       ], dtype=float32)
    """
    return record(SOFTPLUS, x)


# ---- hardsigmoid, hardswish ----------------------------------------------------------------------


def hardsigmoid(x: TensorLike) -> Tensor:
    """Return x / 6 + 1/2 between -3 and 3, 0 below and 1 above. The gradient at both ends is 0.

    >>> ag.hardsigmoid([-3.0, 0.0, 1.5]).numpy()
    array([0.  , 0.5 , 0.75], dtype=float32)
    """
    return clamp(affine(x, scale=1.0 / 6.0, shift=0.5), min=0.0, max=1.0)


def hardswish(x: TensorLike) -> Tensor:
    """Return x * hardsigmoid(x) (Howard et al. 2019).

    >>> ag.hardswish([-3.0, 0.0, 6.0]).numpy()
    array([-0.,  0.,  6.], dtype=float32)
    """
    return mul(x, hardsigmoid(x))
