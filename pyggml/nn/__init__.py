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
from ._attention import MultiheadAttention, TransformerDecoderLayer, TransformerEncoderLayer
from ._compile import compile
from ._convolutions import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AvgPool2d,
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    MaxPool2d,
)
from ._layers import Dropout, Embedding, Flatten, Linear
from ._module import Module, buffer
from ._norms import BatchNorm1d, BatchNorm2d, GroupNorm, LayerNorm, RMSNorm
from ._recurrent import GRU, LSTM
from ._sequential import Sequential, checkpoint

__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "BatchNorm1d",
    "BatchNorm2d",
    "Conv1d",
    "Conv2d",
    "ConvTranspose2d",
    "Dropout",
    "ELU",
    "Embedding",
    "Flatten",
    "GELU",
    "GRU",
    "GroupNorm",
    "Hardsigmoid",
    "Hardswish",
    "LSTM",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "MaxPool2d",
    "Module",
    "MultiheadAttention",
    "RMSNorm",
    "ReLU",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "buffer",
    "checkpoint",
    "compile",
    "init",
]
