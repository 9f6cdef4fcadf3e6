"""Time one training step of three MLPs on a Vulkan device: pyggml, and other packages beside it.

The others are torchvulkan, a Vulkan backend of PyTorch, and computeml. Each is used as its authors'
documentation shows: torchvulkan as a PyTorch device, with the optimizer that it can run there;
computeml with the whole step captured once and replayed. Both are optional.

A step is all that a training loop does for a batch: NumPy arrays to the device, forward pass, cross
entropy, backward pass, AdamW, read the loss. All run on the same device, start from the same
weights and see the same batches. After the first steps their weights must agree, or nothing is
timed; losses that do not are named. They take turns in short rounds, the order changing each time,
so that other work on the machine hits all of them. Ratios are taken in each round, and their median
printed: below 1, pyggml is faster.

ggml offers a software device such as Mesa's llvmpipe only if GGML_VK_VISIBLE_DEVICES=0 asks for it.
There all compute on the CPU, and such a device says little about a card.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from bench_mlp import quartiles, spread
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
from pyggml.device import Device
from pyggml.vulkan import what_to_do

# Before torchvulkan is imported: what it cannot run on the device is an error, not the CPU's.
os.environ.setdefault("TORCHVULKAN_STRICT", "1")
PEER_VERSIONS = {"torchvulkan": "0.2.1", "computeml": "0.4.4"}  # what this was written for
CHECKED_STEPS, LOSS_TOLERANCE = 20, 1e-4
WEIGHT_TOLERANCE = 0.01  # of how far the weights move: Adam's steps magnify the last bits
MOST_DEVICES = 16  # of one machine


class VulkanTrainer(Protocol):
    """A network and its optimizer on a Vulkan device."""

    def step(self, x: np.ndarray, labels: np.ndarray) -> float:
        """Train on one batch and return its loss."""

    def weights(self) -> Weights:
        """Return the weights that there are now."""


class PyggmlOnVulkan(PyggmlTrainer):
    """An MLP and its optimizer in pyggml, on its default device."""

    def weights(self) -> Weights:
        """Return the weights that there are now."""
        return in_layers([parameter.numpy() for parameter in self.model.parameters()])


class TorchVulkanTrainer:
    """An MLP and its optimizer in PyTorch, on torchvulkan's device."""

    def __init__(self, weights: Weights, description: str) -> None:
        import torch
        import torchvulkan

        self.torch = torch
        names = {
            torchvulkan.get_device_name(index): index for index in range(torchvulkan.device_count())
        }
        self.device = torch.device(f"vulkan:{names[description]}")
        layers: list[Any] = []
        for weight, bias in weights:
            linear = torch.nn.Linear(weight.shape[1], weight.shape[0])
            linear.load_state_dict({"weight": torch.tensor(weight), "bias": torch.tensor(bias)})
            layers += [linear, torch.nn.ReLU()]
        self.model = torch.nn.Sequential(*layers[:-1]).to(self.device)
        self.opt = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
        )

    def step(self, x: np.ndarray, labels: np.ndarray) -> float:
        """Train on one batch and return its loss."""
        self.opt.zero_grad()
        output = self.model(self.torch.from_numpy(x).to(self.device))
        target = self.torch.from_numpy(labels).to(self.device)
        loss = self.torch.nn.functional.cross_entropy(output, target)
        loss.backward()
        self.opt.step()
        return float(loss.item())

    def weights(self) -> Weights:
        """Return the weights that there are now."""
        return in_layers([p.detach().cpu().numpy() for p in self.model.parameters()])


class ComputemlTrainer:
    """An MLP and its optimizer in computeml; the step is recorded once and replayed."""

    def __init__(self, weights: Weights, description: str) -> None:
        import computeml

        context = self._open(description)
        layers = [
            computeml.nn.Linear.from_numpy(
                context, weight, bias, activation=None if weight is weights[-1][0] else "relu"
            )
            for weight, bias in weights
        ]
        model = computeml.nn.Sequential(*layers)
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

    @staticmethod
    def _open(description: str) -> Any:
        import computeml

        for index in range(MOST_DEVICES):
            os.environ["CML_GPU_INDEX"] = str(index)
            try:
                context = computeml.Context()
            except computeml.NoDeviceError:
                break
            if context.device_name == description:
                return context
            context.close()
        raise LookupError(description)

    def step(self, x: np.ndarray, labels: np.ndarray) -> float:
        """Train on one batch and return its loss."""
        return float(self.captured(x, labels.astype(np.float32)))

    def weights(self) -> Weights:
        """Return the weights that there are now."""
        return in_layers([parameter.numpy() for parameter in self.model.parameters()])


def in_layers(parameters: list[np.ndarray]) -> Weights:
    """Return weight and bias of each layer."""
    return list(zip(parameters[::2], parameters[1::2], strict=True))


PEERS: dict[str, Callable[[Weights, str], VulkanTrainer]] = {
    "torchvulkan": TorchVulkanTrainer,
    "computeml": ComputemlTrainer,
}


def make_trainers(mlp: Mlp, device: Device, absent: dict[str, str]) -> dict[str, VulkanTrainer]:
    """Return the trainers that can run on the device, and note why others cannot."""
    trainers: dict[str, VulkanTrainer] = {"pyggml": PyggmlOnVulkan(mlp.weights())}
    for name, kind in PEERS.items():
        try:
            if name not in absent:
                trainers[name] = kind(mlp.weights(), device.description)
        except ModuleNotFoundError:
            absent[name] = f"not installed: pip install {name}=={PEER_VERSIONS[name]}"
        except LookupError:
            absent[name] = f"does not offer {device.description}"
    return trainers


def check(mlp: Mlp, trainers: dict[str, VulkanTrainer], batches: list[Batch]) -> list[str]:
    """Train each for some steps; end the program if they learn different things.

    Returns what was found of packages whose weights agree, but not the losses that they return.
    """
    losses = {
        name: np.array([trainer.step(*batches[i % len(batches)]) for i in range(CHECKED_STEPS)])
        for name, trainer in trainers.items()
    }
    start = flat(mlp.weights())
    weights = {name: flat(trainer.weights()) for name, trainer in trainers.items()}
    moved = np.linalg.norm(weights["pyggml"] - start)
    notes = []
    for name in trainers:
        apart = np.linalg.norm(weights[name] - weights["pyggml"]) / moved
        if not apart < WEIGHT_TOLERANCE:
            sys.exit(
                f"bench_vulkan.py: after {CHECKED_STEPS} steps the weights of {name} and pyggml "
                f"differ by {apart:.2g} of what they moved; nothing was timed"
            )
        apart = np.max(np.abs(losses[name] - losses["pyggml"]))
        if not apart < LOSS_TOLERANCE:
            notes.append(
                f"{name}, {mlp.name}: the weights agree after {CHECKED_STEPS} steps, the losses "
                f"that it returns are off by up to {apart:.2g}"
            )
    return notes


def flat(weights: Weights) -> np.ndarray:
    """Return all numbers of an MLP in one vector."""
    return np.concatenate([part.ravel() for layer in weights for part in layer]).astype(float)


def time_turn(trainer: VulkanTrainer, batches: list[Batch], steps: int) -> np.ndarray:
    """Return the seconds that each of some steps took, (steps,); one before them is not timed."""
    seconds = []
    for i in range(-1, steps):
        x, labels = batches[i % len(batches)]
        start = time.perf_counter()
        trainer.step(x, labels)
        seconds.append(time.perf_counter() - start)
    return np.array(seconds[1:])


def measure(
    mlp: Mlp, device: Device, absent: dict[str, str], rounds: int, steps: int
) -> dict[str, Any]:
    """Return the figures for one network: times in milliseconds, each as its three quartiles."""
    batches = mlp.batches(8)
    trainers = make_trainers(mlp, device, absent)
    notes = check(mlp, trainers, batches)
    taken: dict[str, list[np.ndarray]] = {name: [] for name in trainers}
    order = list(trainers)
    for _ in range(rounds):
        for name in order:
            taken[name].append(1e3 * time_turn(trainers[name], batches, steps))
        order = [*order[1:], order[0]]
    figures: dict[str, Any] = {"mlp": mlp.name, "batch": mlp.batch, "notes": notes}
    medians = {name: np.array([np.median(turn) for turn in turns]) for name, turns in taken.items()}
    for name, turns in taken.items():
        figures[name] = quartiles(np.concatenate(turns))
        if name != "pyggml":
            figures[f"pyggml / {name}"] = quartiles(medians["pyggml"] / medians[name])
    return figures


def main() -> None:
    parser = flag_parser("Time one training step of three MLPs on a Vulkan device.")
    parser.add_argument("--device", default="vulkan0", help="one of pyggml's Vulkan devices")
    parser.add_argument("--rounds", type=positive, default=10, metavar="N", help="turns of each")
    parser.add_argument("--steps", type=positive, default=5, metavar="N", help="steps in a turn")
    args = parser.parse_args()
    gpus = {device.name: device for device in pg.devices() if device.name.startswith("vulkan")}
    if not gpus:
        print("bench_vulkan.py: nothing to measure: there is no Vulkan device;", what_to_do())
        return
    if args.device not in gpus:
        sys.exit(f"bench_vulkan.py: no Vulkan device {args.device!r}; there are: {', '.join(gpus)}")
    device = gpus[args.device]
    pg.set_device(device)
    pg.set_num_threads(args.threads)
    about = describe(args.threads, device=f"{device.name}, {device.kind}, {device.description}")

    print("One training step in milliseconds: median (quartiles), and pyggml's time / the other's")
    row = "{:<15} {:>5}  {:<12} {:<24} {}".format
    print(row("MLP", "batch", "package", "ms", "ratio"))
    absent: dict[str, str] = {}
    results = []
    for mlp in (LARGE, MIDDLE, SMALL):
        figures = measure(mlp, device, absent, args.rounds, args.steps)
        results.append(figures)
        for name in ("pyggml", *PEERS):
            if name in figures:
                ratio = spread(figures.get(f"pyggml / {name}"), 2)
                print(row(mlp.name, mlp.batch, name, spread(figures[name], 1), ratio), flush=True)
    for name, why in absent.items():
        print(f"{name}: {why}")
    for figures in results:
        for note in figures["notes"]:
            print(note)
    settings = {"rounds": args.rounds, "steps": args.steps}
    write_json(args.json, {"about": about, **settings, "absent": absent, "results": results})


if __name__ == "__main__":
    main()
