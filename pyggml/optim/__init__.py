"""Optimizers: their updates run on the device, in the graph of the step's gradients."""

from ._clipping import clip_grad_norm, clip_grad_value
from ._methods import SGD, Adam, AdamW
from ._optimizer import Optimizer
from ._schedules import cosine_decay, step_decay

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Optimizer",
    "clip_grad_norm",
    "clip_grad_value",
    "cosine_decay",
    "step_decay",
]
