"""Layers: objects that hold parameters and are called."""

from ._module import Module, Sequential
from ._layers import Linear, ReLU

__all__ = ["Linear", "Module", "ReLU", "Sequential"]
