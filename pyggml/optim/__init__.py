"""Optimizers: their updates run on the device, in the same graph as the step's forward and backward
pass.
"""

from ._optimizers import SGD, Adam, AdamW, Optimizer

__all__ = ["SGD", "Adam", "AdamW", "Optimizer"]
