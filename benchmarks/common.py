"""What the benchmarks share: networks, data, the training step, the machine's name."""

from __future__ import annotations

import argparse
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import pyggml as pg
from pyggml import ag, nn, optim
from pyggml.__main__ import report

LEARNING_RATE, WEIGHT_DECAY = 1e-3, 1e-2

Batch = tuple[np.ndarray, np.ndarray]  # x (batch, features) float32, labels (batch,) int64
Weights = list[tuple[np.ndarray, np.ndarray]]  # of each layer: weight (out, in), bias (out,)


class Mlp(NamedTuple):
    """The sizes of a multi-layer perceptron, and of the batches that it is trained on."""

    sizes: tuple[int, ...]
    batch: int

    @property
    def name(self) -> str:
        """The sizes, as in 64-128-10."""
        return "-".join(map(str, self.sizes))

    def weights(self) -> Weights:
        """Return the same first weights every time."""
        rng = np.random.default_rng(0)
        layers = []
        for inputs, outputs in pairwise(self.sizes):
            bound = inputs**-0.5
            shapes = (outputs, inputs), (outputs,)
            weight, bias = (rng.uniform(-bound, bound, shape) for shape in shapes)
            layers.append((weight.astype(np.float32), bias.astype(np.float32)))
        return layers

    def batches(self, count: int) -> list[Batch]:
        """Return the same batches of random numbers every time."""
        rng = np.random.default_rng(1)
        features, classes = self.sizes[0], self.sizes[-1]
        return [
            (
                rng.standard_normal((self.batch, features), dtype=np.float32),
                rng.integers(classes, size=self.batch),
            )
            for _ in range(count)
        ]


LARGE = Mlp((784, 512, 512, 10), 128)
MIDDLE = Mlp((64, 256, 256, 10), 256)
SMALL = Mlp((64, 128, 10), 32)


class PyggmlTrainer:
    """An MLP and its optimizer in pyggml."""

    def __init__(self, weights: Weights) -> None:
        layers: list[nn.Module] = []
        for weight, bias in weights:
            linear = nn.Linear(weight.shape[1], weight.shape[0])
            linear.load_state_dict({"weight": weight, "bias": bias})
            layers += [linear, nn.ReLU()]
        self.model = nn.Sequential(*layers[:-1])
        self.opt = optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def step(self, x: np.ndarray, labels: np.ndarray) -> float:
        """Train on one batch and return its loss."""
        self.opt.zero_grad()
        with ag.grad_tape():
            loss = ag.softmax_cross_entropy(self.model(ag.tensor(x)), labels)
        ag.backward(loss)
        self.opt.step()
        return float(loss.item())


def flag_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--threads", type=positive, default=pg.get_num_threads(), metavar="N", help="CPU threads"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    return parser


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; got {text!r}")
    return int(text)


def describe(threads: int, **more: str) -> dict[str, str]:
    """Print, and return, what the numbers depend on: versions, CPU, threads, and more."""
    known = dict(report())
    labels = "pyggml", "ggml", "BLAS", "Python", "platform", "CPU"
    about = {label: known[label] for label in labels} | more
    about["threads"] = f"{threads} used, {known['threads']}"
    for label, text in about.items():
        print(f"{label + ':':<10}{text}")
    print()
    return about


def write_json(path: Path | None, numbers: dict[str, Any]) -> None:
    """Write numbers beside path, then put the complete file in its place."""
    if path is not None:
        beside = path.with_name(f".{os.getpid()}-{path.name}")
        beside.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
        os.replace(beside, path)
