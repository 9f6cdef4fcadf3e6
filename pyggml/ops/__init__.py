"""Every op, one file per family; one op is one block: rules, then the public function."""

from . import update
from .elementwise import add, affine, detach, div, full, mul, neg, relu, step, sub
from .linear import matmul
from .loss import mse_loss, softmax_cross_entropy
from .reduction import mean, sum, sum_to
from .shaping import broadcast_to, permute, reshape, transpose

__all__ = [
    "add",
    "affine",
    "broadcast_to",
    "detach",
    "div",
    "full",
    "matmul",
    "mean",
    "mse_loss",
    "mul",
    "neg",
    "permute",
    "relu",
    "reshape",
    "softmax_cross_entropy",
    "step",
    "sub",
    "sum",
    "sum_to",
    "transpose",
    "update",
]
