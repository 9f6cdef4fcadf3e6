"""The workloads in PyTorch: eager, and compiled by torch.compile; AdamW is the fused one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from workloads import LEARNING_RATE, WEIGHT_DECAY, Cnn, Gpt, Lstm, Mlp, Net, Weights

VERSION = torch.__version__


def set_threads(threads: int) -> None:
    """Let PyTorch use so many threads."""
    torch.set_num_threads(threads)


def _mlp(net: Mlp) -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    for inputs, outputs in pairwise(net.sizes):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def _cnn(net: Cnn) -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    for inputs, outputs in pairwise((1, *net.channels)):
        layers += [torch.nn.Conv2d(inputs, outputs, 3, padding=1), torch.nn.BatchNorm2d(outputs)]
        layers += [torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    layers += [torch.nn.Flatten(), torch.nn.Linear(net.flat, net.hidden), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(net.hidden, net.classes))


class _Block(torch.nn.TransformerEncoderLayer):
    """The parameters of PyTorch's layer; one product for queries, keys and values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        attention = self.self_attn
        batch, tokens, width = x.shape
        qkv = functional.linear(self.norm1(x), attention.in_proj_weight, attention.in_proj_bias)
        qkv = qkv.view(batch, tokens, 3, attention.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, T, width / heads)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attention.out_proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.linear2(functional.gelu(self.linear1(self.norm2(x))))


class _Gpt(torch.nn.Module):
    def __init__(self, net: Gpt) -> None:
        super().__init__()
        self.token = torch.nn.Embedding(net.vocabulary, net.width)
        self.place = torch.nn.Embedding(net.context, net.width)
        blocks = [_Block(net.width, net.heads, 4 * net.width) for _ in range(net.layers)]
        self.layers = torch.nn.ModuleList(blocks)
        self.norm = torch.nn.LayerNorm(net.width)
        self.head = torch.nn.Linear(net.width, net.vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.token(x) + self.place.weight[: x.shape[1]]
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


class _Lstm(torch.nn.Module):
    def __init__(self, net: Lstm) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(net.features, net.hidden, batch_first=True)
        self.head = torch.nn.Linear(net.hidden, net.classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, (h, _) = self.lstm(x)
        return self.head(h[0])


NETS: dict[type, Any] = {Mlp: _mlp, Gpt: _Gpt, Cnn: _cnn, Lstm: _Lstm}


class TorchEngine:
    """A network in PyTorch, for training or for inference."""

    nets = tuple(NETS)

    def __init__(self, net: Net, weights: Weights, *, training: bool = True) -> None:
        # Channels last is the faster order for convolutions on the CPU; other layers have no say.
        self.model = NETS[type(net)](net).to(memory_format=torch.channels_last)
        self.model.load_state_dict({name: torch.tensor(w) for name, w in weights.items()})
        self.model.train(training)
        self.opt = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
        )

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of a batch."""
        logits = self.model(x)
        return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())

    def step(self, x: np.ndarray, labels: np.ndarray) -> float:
        """Train on one batch and return its loss."""
        self.opt.zero_grad()
        loss = self.loss(torch.from_numpy(x), torch.from_numpy(labels))
        loss.backward()
        self.opt.step()
        return loss.item()

    def run(self, x: np.ndarray) -> np.ndarray:
        """Return the logits of one batch."""
        with torch.inference_mode():
            return self.model(torch.from_numpy(x)).numpy()


class CompiledEngine(TorchEngine):
    """The same by torch.compile, which does not compile PyTorch's LSTM."""

    nets = (Mlp, Gpt, Cnn)

    def __init__(self, net: Net, weights: Weights, *, training: bool = True) -> None:
        super().__init__(net, weights, training=training)
        torch.compiler.reset()  # or what earlier engines compiled would count against a limit
        if training:
            self.loss = torch.compile(self.loss, fullgraph=True, dynamic=False)  # type: ignore
        else:
            self.model = torch.compile(self.model, fullgraph=True, dynamic=False)
