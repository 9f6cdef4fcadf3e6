"""The MLPs in PyTorch on the device of torchvulkan; the fused AdamW would run on the CPU."""

from __future__ import annotations

import os

# What the device cannot run is an error then, and not the CPU's. Read when it is imported.
os.environ.setdefault("TORCHVULKAN_STRICT", "1")

import numpy as np
import torch
import torchvulkan
from with_torch import NETS
from workloads import LEARNING_RATE, WEIGHT_DECAY, Mlp, Weights

VERSION = f"{torchvulkan.__version__}, PyTorch {torch.__version__}"


class TorchVulkanEngine:
    """An MLP in training on the torchvulkan device of that name.

    Raises LookupError if there is none.
    """

    def __init__(self, net: Mlp, weights: Weights, device_name: str) -> None:
        count = torchvulkan.device_count()
        indices = {torchvulkan.get_device_name(index): index for index in range(count)}
        self.device = torch.device(f"vulkan:{indices[device_name]}")
        self.model = NETS[type(net)](net)
        self.model.load_state_dict({name: torch.tensor(w) for name, w in weights.items()})
        self.model.to(self.device)
        self.opt = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
        )

    def step(self, x: np.ndarray, labels: np.ndarray) -> float:
        """Train on one batch and return its loss."""
        self.opt.zero_grad()
        logits = self.model(torch.from_numpy(x).to(self.device))
        target = torch.from_numpy(labels).to(self.device)
        loss = torch.nn.functional.cross_entropy(logits, target)
        loss.backward()
        self.opt.step()
        return loss.item()

    def weights(self) -> Weights:
        """Return the weights that there are now."""
        return {name: tensor.cpu().numpy() for name, tensor in self.model.state_dict().items()}
