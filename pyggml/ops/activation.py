"""Activation functions."""

from __future__ import annotations

import numpy as np

from .._ffi import lib
from ..graph import Op
from ..lowering import GgmlTensor, Lowering
from ..tensor import Tensor, TensorLike, record
from .elementwise import affine, mul, sub
from .power import sqr
from .rules import same

# ---- relu ----------------------------------------------------------------------------------------


def _lower_relu(b: Lowering, x: GgmlTensor) -> GgmlTensor:
    if b.own_kernels:  # on the CPU, ggml's runs on one thread and makes 0 of NaN
        return lib.pg_relu(b.ctx, b.contiguous(x))
    return lib.ggml_relu(b.ctx, b.contiguous(x))


RELU: Op = Op(
    "relu",
    shape=same("relu"),
    lower=_lower_relu,
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


# ---- tanh, sigmoid -------------------------------------------------------------------------------


def _lower_tanh(b: Lowering, x: GgmlTensor) -> GgmlTensor:
    if b.own_kernels:  # ggml's runs on one thread, a libm call for each element
        return lib.pg_tanh(b.ctx, b.contiguous(x))
    return lib.ggml_tanh(b.ctx, b.contiguous(x))


TANH: Op = Op(
    "tanh",
    shape=same("tanh"),
    lower=_lower_tanh,
    grad=lambda g, out, x: mul(g, affine(sqr(out), scale=-1.0, shift=1.0)),
    reference=np.tanh,
)


def tanh(x: TensorLike) -> Tensor:
    """Return the hyperbolic tangent.

    >>> ag.tanh([0.0, 100.0]).numpy()
    array([0., 1.], dtype=float32)
    """
    return record(TANH, x)


def lower_sigmoid(b: Lowering, x: GgmlTensor) -> GgmlTensor:
    """Lower sigmoid."""
    if b.own_kernels:  # ggml's runs on one thread, a libm call for each element
        return lib.pg_sigmoid(b.ctx, b.contiguous(x))
    return lib.ggml_sigmoid(b.ctx, b.contiguous(x))


def _reference_sigmoid(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


SIGMOID: Op = Op(
    "sigmoid",
    shape=same("sigmoid"),
    lower=lower_sigmoid,
    grad=lambda g, out, x: mul(g, sub(out, sqr(out))),
    reference=_reference_sigmoid,
)


def sigmoid(x: TensorLike) -> Tensor:
    """Return 1 / (1 + exp(-x)).

    >>> ag.sigmoid([0.0, 100.0]).numpy()
    array([0.5, 1. ], dtype=float32)
    """
    return record(SIGMOID, x)
