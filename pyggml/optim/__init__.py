"""Optimizers: their updates run on the device, in the graph of the step's gradients."""

from ..ops.update import assign
from ._averaging import EMA
from ._clipping import clip_grad_norm, clip_grad_value
from ._compile import compile
from ._groups import Group, decay_groups
from ._methods import SGD, Adafactor, Adagrad, Adam, AdamW, Lion, RMSprop
from ._mixed import LossScale
from ._optimizer import Optimizer
from ._schedules import (
    ReduceOnPlateau,
    constant,
    cosine_decay,
    cosine_restarts,
    linear_decay,
    one_cycle,
    polynomial_decay,
    step_decay,
    warmup,
)

__all__ = [
    "EMA",
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Group",
    "Lion",
    "LossScale",
    "Optimizer",
    "RMSprop",
    "ReduceOnPlateau",
    "assign",
    "clip_grad_norm",
    "clip_grad_value",
    "compile",
    "constant",
    "cosine_decay",
    "cosine_restarts",
    "decay_groups",
    "linear_decay",
    "one_cycle",
    "polynomial_decay",
    "step_decay",
    "warmup",
]
