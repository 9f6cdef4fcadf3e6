"""Time one training step of three MLPs in pyggml, and in PyTorch beside it.

A step is all that a training loop does for a batch: make tensors from NumPy arrays, forward pass,
cross entropy, backward pass, AdamW, read the loss. Both start from the same weights and see the
same batches; their losses must agree over the first steps, or nothing is timed. They take turns in
short rounds, the order changing each time, so that other work on the machine hits both.

The ratio is taken in each round, and its median printed: below 1, pyggml is faster. Python's share
is what is left of pyggml's step when the time inside ggml is taken off.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np
from common import (
    LARGE,
    LEARNING_RATE,
    MIDDLE,
    SMALL,
    WEIGHT_DECAY,
    Batch,
    Mlp,
    PyggmlTrainer,
    Weights,
    describe,
    flag_parser,
    positive,
    write_json,
)

import pyggml as pg
from pyggml.device import CpuDevice

try:
    import torch
except ModuleNotFoundError:
    torch = None  # type: ignore[assignment]

CHECKED_STEPS, TOLERANCE = 20, 1e-4
WARM_UP_STEPS = 5  # at the start of each turn: caches filled, threads awake
PAUSE = 0.02  # seconds before each turn: the other's idle threads stop looking for work


class Trainer(Protocol):
    """A network and its optimizer."""

    def step(self, x: np.ndarray, labels: np.ndarray) -> float:
        """Train on one batch and return its loss."""


class TorchTrainer:
    """An MLP and its optimizer in PyTorch."""

    def __init__(self, weights: Weights) -> None:
        layers: list[torch.nn.Module] = []
        for weight, bias in weights:
            linear = torch.nn.Linear(weight.shape[1], weight.shape[0])
            linear.load_state_dict({"weight": torch.tensor(weight), "bias": torch.tensor(bias)})
            layers += [linear, torch.nn.ReLU()]
        self.model = torch.nn.Sequential(*layers[:-1])
        self.opt = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
        )

    def step(self, x: np.ndarray, labels: np.ndarray) -> float:
        """Train on one batch and return its loss."""
        self.opt.zero_grad()
        output = self.model(torch.from_numpy(x))
        loss = torch.nn.functional.cross_entropy(output, torch.from_numpy(labels))
        loss.backward()
        self.opt.step()
        return loss.item()


@contextmanager
def seconds_in_ggml() -> Iterator[list[float]]:
    """Yield a list that gets the seconds of every run of a ggml graph."""
    seconds: list[float] = []
    compute = CpuDevice.compute

    def timed(self: CpuDevice, graph: Any, n_threads: int) -> None:
        start = time.perf_counter()
        compute(self, graph, n_threads)
        seconds.append(time.perf_counter() - start)

    with patch.object(CpuDevice, "compute", timed):
        yield seconds


def check(trainers: dict[str, Trainer], batches: list[Batch]) -> None:
    """Train each for some steps; end the program if their losses differ."""
    curves = {
        name: np.array([trainer.step(*batches[i % len(batches)]) for i in range(CHECKED_STEPS)])
        for name, trainer in trainers.items()
    }
    if "PyTorch" in curves:
        apart = np.max(np.abs(curves["pyggml"] - curves["PyTorch"]))
        if not apart < TOLERANCE:
            sys.exit(f"bench_mlp.py: the losses differ by up to {apart:.2g}; nothing was timed")


def time_turn(trainer: Trainer, batches: list[Batch], steps: int) -> np.ndarray:
    """Return the seconds that each of some steps took, (steps,)."""
    time.sleep(PAUSE)
    seconds = []
    for i in range(-WARM_UP_STEPS, steps):
        x, labels = batches[i % len(batches)]
        start = time.perf_counter()
        trainer.step(x, labels)
        seconds.append(time.perf_counter() - start)
    return np.array(seconds[WARM_UP_STEPS:])


def measure(mlp: Mlp, rounds: int, steps: int) -> dict[str, Any]:
    """Return the figures for one network: times in microseconds, each as its three quartiles."""
    batches = mlp.batches(8)
    trainers: dict[str, Trainer] = {"pyggml": PyggmlTrainer(mlp.weights())}
    if torch is not None:
        trainers["PyTorch"] = TorchTrainer(mlp.weights())
    check(trainers, batches)

    taken: dict[str, list[np.ndarray]] = {name: [] for name in trainers}
    in_python = []
    order = list(trainers)
    for _ in range(rounds):
        for name in order:
            with seconds_in_ggml() as in_ggml:
                seconds = time_turn(trainers[name], batches, steps)
            taken[name].append(seconds)
            if name == "pyggml":  # one graph a step
                in_python.append(seconds - in_ggml[WARM_UP_STEPS:])
        order.reverse()

    figures: dict[str, Any] = {"mlp": mlp.name, "batch": mlp.batch}
    for name, turns in taken.items():
        figures[name] = quartiles(1e6 * np.concatenate(turns))
    figures["python"] = quartiles(1e6 * np.concatenate(in_python))
    figures["python_share"] = figures["python"][1] / figures["pyggml"][1]
    if torch is not None:
        medians = {name: np.array([np.median(turn) for turn in taken[name]]) for name in taken}
        figures["ratio"] = quartiles(medians["pyggml"] / medians["PyTorch"])
    return figures


def quartiles(values: Any) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return [float(value) for value in np.percentile(values, [25, 50, 75])]


def spread(values: list[float] | None, digits: int = 0) -> str:
    """Write quartiles as: median (lower to upper)."""
    if values is None:
        return "-"
    low, middle, high = (f"{value:.{digits}f}" for value in values)
    return f"{middle} ({low} to {high})"


def main() -> None:
    parser = flag_parser("Time one training step of three MLPs in pyggml and PyTorch.")
    parser.add_argument("--rounds", type=positive, default=20, metavar="N", help="turns of each")
    parser.add_argument("--steps", type=positive, default=50, metavar="N", help="steps in a turn")
    args = parser.parse_args()
    pg.set_num_threads(args.threads)
    if torch is not None:
        torch.set_num_threads(args.threads)
    version = "not installed: pip install torch" if torch is None else torch.__version__
    about = describe(args.threads, PyTorch=version)

    print("One training step in microseconds: median (quartiles)")
    row = "{:<15} {:>5}  {:<22} {:<22} {:<21} {}".format
    print(row("MLP", "batch", "pyggml", "PyTorch", "pyggml / PyTorch", "in Python"))
    results = []
    for mlp in (LARGE, MIDDLE, SMALL):
        figures = measure(mlp, args.rounds, args.steps)
        results.append(figures)
        ratio, python = figures.get("ratio"), figures["python"][1]
        print(
            row(
                figures["mlp"], figures["batch"], spread(figures["pyggml"]),
                spread(figures.get("PyTorch")), spread(ratio, 2),
                f"{python:.0f} ({figures['python_share']:.0%})",
            ),
            flush=True,
        )  # fmt: skip
    settings = {"threads": args.threads, "rounds": args.rounds, "steps": args.steps}
    write_json(args.json, {"about": about, **settings, "results": results})


if __name__ == "__main__":
    main()
