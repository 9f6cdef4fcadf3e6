"""Layers: objects that hold parameters and are called."""

from ._layers import Linear, ReLU
from ._module import Module, Sequential, checkpoint

__all__ = ["Linear", "Module", "ReLU", "Sequential", "checkpoint"]
