"""Layers: objects that hold parameters and are called."""

from . import init
from ._activations import (
    ELU,
    GELU,
    Hardsigmoid,
    Hardswish,
    LeakyReLU,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)
from ._layers import Dropout, Flatten, Linear
from ._module import Module, buffer
from ._norms import BatchNorm1d, BatchNorm2d, GroupNorm, LayerNorm, RMSNorm
from ._sequential import Sequential, checkpoint

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "Dropout",
    "ELU",
    "Flatten",
    "GELU",
    "GroupNorm",
    "Hardsigmoid",
    "Hardswish",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "Module",
    "RMSNorm",
    "ReLU",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
    "buffer",
    "checkpoint",
    "init",
]
