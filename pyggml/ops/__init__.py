"""Every op, one file per family; one op is one block: rules, then the public function."""

from . import update
from .activation import relu, sigmoid, tanh
from .comparison import clamp, equal, greater, less, maximum, minimum, step, where
from .elementwise import (
    abs,
    add,
    affine,
    cos,
    detach,
    div,
    exp,
    full,
    log,
    mul,
    neg,
    sign,
    sin,
    sub,
)
from .linear import matmul
from .loss import mse_loss, softmax_cross_entropy
from .power import sqr, sqrt
from .reduction import logsumexp, max, mean, min, sum, sum_to
from .shaping import broadcast_to, permute, reshape, transpose

__all__ = [
    "abs",
    "add",
    "affine",
    "broadcast_to",
    "clamp",
    "cos",
    "detach",
    "div",
    "equal",
    "exp",
    "full",
    "greater",
    "less",
    "log",
    "logsumexp",
    "matmul",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mse_loss",
    "mul",
    "neg",
    "permute",
    "relu",
    "reshape",
    "sigmoid",
    "sign",
    "sin",
    "softmax_cross_entropy",
    "sqr",
    "sqrt",
    "step",
    "sub",
    "sum",
    "sum_to",
    "tanh",
    "transpose",
    "update",
    "where",
]
