"""The MLPs in computeml; a step is recorded once, by Context.capture, and then replayed."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

import computeml
import numpy as np
from workloads import LEARNING_RATE, WEIGHT_DECAY, Mlp, Weights

VERSION = version("computeml")
MOST_DEVICES = 16  # of one machine


class ComputemlEngine:
    """An MLP in training on the computeml device of that name.

    Raises LookupError if there is none.
    """

    def __init__(self, net: Mlp, weights: Weights, device_name: str) -> None:
        context = open_device(device_name)
        self.names = list(weights)
        arrays = list(weights.values())
        pairs = zip(arrays[::2], arrays[1::2], strict=True)  # of each layer: weight and bias
        activations = ["relu"] * (len(net.sizes) - 2) + [None]
        model = computeml.nn.Sequential(
            *(
                computeml.nn.Linear.from_numpy(context, *pair, activation=activation)
                for pair, activation in zip(pairs, activations, strict=True)
            )
        )
        model.requires_grad_()
        opt = computeml.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

        @context.capture
        def step(x: Any, labels: Any) -> Any:
            loss = computeml.ops.cross_entropy(model(x), labels)
            loss.backward()
            opt.step()
            opt.zero_grad()  # last: the first call records it only where there are gradients
            return loss

        self.model = model
        self.captured = step

    def step(self, x: np.ndarray, labels: np.ndarray) -> float:
        """Train on one batch and return its loss."""
        return float(self.captured(x, labels.astype(np.float32)))

    def weights(self) -> Weights:
        """Return the weights that there are now."""
        arrays = [parameter.numpy() for parameter in self.model.parameters()]
        return dict(zip(self.names, arrays, strict=True))


def open_device(name: str) -> Any:
    """Return a context on the device of that name. Raises LookupError if there is none."""
    for index in range(MOST_DEVICES):
        os.environ["CML_GPU_INDEX"] = str(index)
        try:
            context = computeml.Context()
        except computeml.NoDeviceError:
            break
        if context.device_name == name:
            return context
        context.close()
    raise LookupError(name)
