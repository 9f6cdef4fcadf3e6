"""The workloads: networks, their data and weights, the work in them, and their form in pyggml.

Each network maps a batch to logits, (batch, ..., classes); its loss is the mean cross entropy, its
optimizer AdamW. Weights are named as pyggml's and PyTorch's state_dict name them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

import pyggml as pg
from pyggml import ag, nn, optim

# A larger rate would amplify differences of rounding, which the engines are compared by.
LEARNING_RATE, WEIGHT_DECAY = 3e-4, 1e-2

Batch = tuple[np.ndarray, np.ndarray]  # inputs, and labels (int64)
Weights = dict[str, np.ndarray]


class Mlp(NamedTuple):
    """Linear layers with relu between them: (B, features) -> (B, classes)."""

    sizes: tuple[int, ...]

    def batch(self, rng: np.random.Generator, count: int) -> Batch:
        """Return random inputs and labels."""
        x = rng.standard_normal((count, self.sizes[0]), np.float32)
        return x, rng.integers(self.sizes[-1], size=count)

    def flops(self, batch: int) -> tuple[int, int]:
        """Return a forward pass's operations in products; of those, what has no input gradient."""
        layers = [2 * batch * inputs * outputs for inputs, outputs in pairwise(self.sizes)]
        return sum(layers), layers[0]

    def build(self) -> nn.Module:
        """Return the network in pyggml."""
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(self.sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


class Gpt(NamedTuple):
    """A GPT, norm first, with gelu: tokens (B, context) -> logits (B, context, vocabulary)."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = 65

    def batch(self, rng: np.random.Generator, count: int) -> Batch:
        """Return random tokens, and the same ones shifted by one place."""
        text = rng.integers(self.vocabulary, size=(count, self.context + 1))
        return text[:, :-1].astype(np.int32), text[:, 1:]

    def flops(self, batch: int) -> tuple[int, int]:
        """Return a forward pass's operations in products; of those, what has no input gradient."""
        tokens = batch * self.context
        layer = 2 * tokens * 12 * self.width**2 + 4 * tokens * self.context * self.width
        return self.layers * layer + 2 * tokens * self.width * self.vocabulary, 0

    def build(self) -> nn.Module:
        """Return the network in pyggml."""
        return _Gpt(self)


class Cnn(NamedTuple):
    """Two of convolution, batch norm, relu and pool, then two linear layers: (B, 1, size, size)."""

    size: int = 28
    channels: tuple[int, int] = (32, 64)
    hidden: int = 128
    classes: int = 10

    def batch(self, rng: np.random.Generator, count: int) -> Batch:
        """Return random images and labels."""
        x = rng.standard_normal((count, 1, self.size, self.size), np.float32)
        return x, rng.integers(self.classes, size=count)

    @property
    def flat(self) -> int:
        """How many numbers the convolutions leave of an image."""
        return self.channels[1] * (self.size // 4) ** 2

    def flops(self, batch: int) -> tuple[int, int]:
        """Return a forward pass's operations in products; of those, what has no input gradient."""
        first, second = self.channels
        layers = [
            2 * batch * 9 * first * self.size**2,
            2 * batch * 9 * first * second * (self.size // 2) ** 2,
            2 * batch * self.flat * self.hidden,
            2 * batch * self.hidden * self.classes,
        ]
        return sum(layers), layers[0]

    def build(self) -> nn.Module:
        """Return the network in pyggml."""
        first, second = self.channels
        return nn.Sequential(
            nn.Conv2d(1, first, 3, padding=1), nn.BatchNorm2d(first), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(first, second, 3, padding=1), nn.BatchNorm2d(second), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(self.flat, self.hidden), nn.ReLU(), nn.Linear(self.hidden, self.classes),
        )  # fmt: skip


class Lstm(NamedTuple):
    """An LSTM and a linear layer on its last output: (B, steps, features) -> (B, classes)."""

    features: int = 32
    hidden: int = 128
    steps: int = 50
    classes: int = 10

    def batch(self, rng: np.random.Generator, count: int) -> Batch:
        """Return random sequences and labels."""
        x = rng.standard_normal((count, self.steps, self.features), np.float32)
        return x, rng.integers(self.classes, size=count)

    def flops(self, batch: int) -> tuple[int, int]:
        """Return a forward pass's operations in products; of those, what has no input gradient."""
        inputs = 2 * batch * self.steps * self.features * 4 * self.hidden
        a_state = 2 * batch * self.hidden * 4 * self.hidden
        head = 2 * batch * self.hidden * self.classes
        return inputs + self.steps * a_state + head, inputs + a_state

    def build(self) -> nn.Module:
        """Return the network in pyggml."""
        return _Lstm(self)


Net = Mlp | Gpt | Cnn | Lstm


class _Gpt(nn.Module):
    def __init__(self, net: Gpt) -> None:
        self.token = nn.Embedding(net.vocabulary, net.width)
        self.place = nn.Embedding(net.context, net.width)
        for table in (self.token, self.place):
            table.weight.assign(nn.init.normal(table.weight.shape, std=0.02))
        self.layers = [
            nn.TransformerEncoderLayer(
                net.width, net.heads, 4 * net.width, dropout=0.0, activation="gelu", norm_first=True
            )
            for _ in range(net.layers)
        ]
        self.norm = nn.LayerNorm(net.width)
        self.head = nn.Linear(net.width, net.vocabulary)

    def forward(self, x: ag.Tensor) -> ag.Tensor:
        h = self.token(x) + self.place(np.arange(x.shape[1]))  # (B, T, width)
        for layer in self.layers:
            h = layer(h, causal=True)
        return self.head(self.norm(h))


class _Lstm(nn.Module):
    def __init__(self, net: Lstm) -> None:
        self.lstm = nn.LSTM(net.features, net.hidden)
        self.head = nn.Linear(net.hidden, net.classes)

    def forward(self, x: ag.Tensor) -> ag.Tensor:
        _, (h, _) = self.lstm(x)
        return self.head(h[0])


@dataclass(frozen=True)
class Workload:
    """A network and a batch size.

    Goals are ratios, the fastest peer's time to ours: of training at this batch size, and of
    inference at batch 1.
    """

    title: str
    net: Net
    batch: int
    training_goal: float
    inference_goal: float

    def batches(self, count: int = 8) -> list[Batch]:
        """Return the same batches of random numbers every time."""
        rng = np.random.default_rng(1)
        return [self.net.batch(rng, self.batch) for _ in range(count)]

    def weights(self) -> Weights:
        """Return the same first weights every time."""
        pg.manual_seed(0)
        return self.net.build().state_dict()

    def training_flops(self) -> int:
        """Return the operations of the products in a step: each has two in the backward pass."""
        forward, first = self.net.flops(self.batch)
        return 3 * forward - first


WORKLOADS = {
    "mlp-large": Workload("MLP 784-512-512-10", Mlp((784, 512, 512, 10)), 128, 1.1, 1.0),
    "mlp-middle": Workload("MLP 64-256-256-10", Mlp((64, 256, 256, 10)), 256, 1.3, 2.0),
    "mlp-small": Workload("MLP 64-128-10", Mlp((64, 128, 10)), 32, 1.6, 2.0),
    "gpt-small": Workload("GPT 4 x 128, context 64", Gpt(4, 128, 4, 64), 12, 1.15, 2.0),
    "gpt-medium": Workload("GPT 6 x 384, context 256", Gpt(6, 384, 6, 256), 8, 1.05, 1.0),
    "cnn": Workload("CNN 28 x 28, 32-64 channels", Cnn(), 64, 1.0, 2.0),
    "lstm": Workload("LSTM 128, 50 steps", Lstm(), 32, 1.5, 2.0),
}


class PyggmlEngine:
    """A network in pyggml, for training or for inference, compiled as in the other libraries."""

    def __init__(self, net: Net, weights: Weights, *, training: bool = True) -> None:
        self.model = net.build()
        self.model.load_state_dict(weights)
        if training:
            self.opt = optim.AdamW(
                self.model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
            )
            self.train = optim.compile(self.loss, self.opt)
        else:
            self.predict = nn.compile(self.model.eval())

    def loss(self, x: ag.Tensor, labels: ag.TensorLike) -> ag.Tensor:
        """Return the mean cross entropy of one batch."""
        return ag.softmax_cross_entropy(self.model(x), labels)

    def record(self, x: np.ndarray, labels: np.ndarray) -> ag.Tensor:
        """Record forward and backward pass of one batch; return the loss, which is pending."""
        self.opt.zero_grad()
        with ag.grad_tape():
            loss = self.loss(ag.tensor(x), labels)
        ag.backward(loss)
        return loss

    def step(self, x: np.ndarray, labels: np.ndarray) -> float:
        """Train on one batch and return its loss."""
        return self.train(x, labels)

    def run(self, x: np.ndarray) -> np.ndarray:
        """Return the logits of one batch."""
        return self.predict(x)


class PyggmlLoop(PyggmlEngine):
    """A network in pyggml whose steps are recorded anew each time."""

    def step(self, x: np.ndarray, labels: np.ndarray) -> float:
        loss = self.record(x, labels)
        self.opt.step()
        return float(loss.item())
