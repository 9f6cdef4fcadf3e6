"""Time training steps of three MLPs on a Vulkan device: pyggml, torchvulkan and computeml.

torchvulkan is a Vulkan backend of PyTorch. Each package is used as its authors' documentation
shows, and all run on the same device. A step is all that a training loop does for a batch: NumPy
arrays to the device, forward pass, cross entropy, backward pass, AdamW, read the loss. All start
from the same weights and see the same batches. After the first steps their weights must give the
same logits, or nothing is timed; a package whose losses differ all the same is named. They take
turns in short rounds, the order changing each time, so that other work on the machine hits all
alike.

Ratios are taken in each round, and their median printed: the peer's time over ours, so above 1
pyggml is faster.

ggml offers a software device such as Mesa's llvmpipe only if GGML_VK_VISIBLE_DEVICES=0 asks for it.
All compute on the CPU then, which says little about a card.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from typing import Any

import numpy as np
from common import (
    begin,
    flag_parser,
    positive,
    ratios,
    spread,
    take_turns,
    times,
    write_json,
)
from workloads import WORKLOADS, PyggmlEngine, Weights, Workload

import pyggml as pg
from pyggml.device import resolve_device
from pyggml.vulkan import what_to_do

# Of each peer: the module with its engine, the engine's name, and what installs it.
PEERS = {
    "torchvulkan": ("with_torchvulkan", "TorchVulkanEngine", "pip install torchvulkan==0.2.1"),
    "computeml": ("with_computeml", "ComputemlEngine", "pip install computeml==0.4.4"),
}
CHECKED_STEPS, LOSS_TOLERANCE = 20, 1e-3
# Of how far logits move. A relu's input that is 0 but for rounding turns the gradients of a row on
# or off, and Adam makes whole steps of them: last bits become some thousandths.
LOGIT_TOLERANCE = 0.03


def find_peers(about: dict[str, str]) -> dict[str, Any]:
    """Return the engine of each peer that is installed, and say which ones are not."""
    peers = {}
    for name, (module_name, engine, how) in PEERS.items():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            about[name] = f"left out, for {error.name} is not installed: {how}"
        else:
            about[name] = module.VERSION
            peers[name] = getattr(module, engine)
        print(f"{name + ':':<15}{about[name]}")
    return peers


def check(engines: dict[str, Any], workload: Workload) -> list[str]:
    """Train each for some steps; end the program if they learn different things.

    What is compared is the logits that pyggml computes of everyone's weights. Returns what there is
    to say of packages that learn the same, but whose losses differ.
    """
    batches = workload.batches()
    steps = [batches[i % len(batches)] for i in range(CHECKED_STEPS)]
    losses = {name: np.array([e.step(*step) for step in steps]) for name, e in engines.items()}
    x = batches[0][0]

    def logits(weights: Weights) -> np.ndarray:
        return PyggmlEngine(workload.net, weights, training=False).run(x)

    ours = logits(engines["pyggml"].model.state_dict())
    moved = np.max(np.abs(ours - logits(workload.weights())))
    remarks = []
    for name, engine in engines.items():
        if name == "pyggml":
            continue
        apart = np.max(np.abs(logits(engine.weights()) - ours))
        if not apart < LOGIT_TOLERANCE * moved:
            sys.exit(
                f"bench_vulkan.py: {workload.title}: after {CHECKED_STEPS} steps the logits of "
                f"pyggml's and {name}'s weights differ by {apart / moved:.2g} of what they moved; "
                "nothing was timed"
            )
        off = np.max(np.abs(losses[name] - losses["pyggml"]))
        if not off < LOSS_TOLERANCE:
            remarks.append(
                f"{workload.title}: {name} has learnt the same after {CHECKED_STEPS} steps, but "
                f"the losses that it returned are off by up to {off:.2g}"
            )
    return remarks


def measure(name: str, peers: dict[str, Any], args: Any) -> dict[str, Any]:
    """Return the figures for one workload: times in microseconds, each as its three quartiles."""
    workload = WORKLOADS[name]
    weights, batches = workload.weights(), workload.batches()
    engines: dict[str, Any] = {"pyggml": PyggmlEngine(workload.net, weights)}
    remarks = []
    for peer, engine in peers.items():
        try:
            engines[peer] = engine(workload.net, weights, resolve_device(args.device).description)
        except LookupError:
            remarks.append(f"{workload.title}: {peer} does not offer this device")
    remarks += check(engines, workload)

    def step(engine: Any, i: int) -> None:
        engine.step(*batches[i % len(batches)])

    turns = take_turns(
        {name: partial(step, engine) for name, engine in engines.items()},
        rounds=args.rounds, turn=args.turn, budget=args.budget,
    )  # fmt: skip
    ours = turns["pyggml"]
    return {
        "title": workload.title,
        "batch": workload.batch,
        "times": {name: times(turn) for name, turn in turns.items()},
        "ratios": {name: ratios(ours, turn) for name, turn in turns.items() if name != "pyggml"},
        "remarks": remarks,
    }


def main() -> None:
    parser = flag_parser("Time training steps of three MLPs on a Vulkan device.")
    parser.set_defaults(device="vulkan0")
    flag = parser.add_argument
    flag("--rounds", type=positive, default=10, metavar="N", help="turns of each, at most")
    flag("--turn", type=float, default=0.5, metavar="SECONDS", help="of one turn, about")
    flag("--budget", type=float, default=60.0, metavar="SECONDS", help="for each network, about")
    args = parser.parse_args()
    names = [device.name for device in pg.devices() if device.name.startswith("vulkan")]
    if not names:
        print("bench_vulkan.py: nothing to measure, for there is no Vulkan device:", what_to_do())
        return
    if args.device not in names:
        sys.exit(f"bench_vulkan.py: no Vulkan device {args.device!r}; there are: {names}")
    about = begin(args)
    about["device"] = f"{args.device}: {resolve_device(args.device).description}"
    print(f"{'':<15}{resolve_device(args.device).description}")
    peers = find_peers(about)

    print("\nOne training step in milliseconds: median (quartiles), and the time of each over ours")
    row = "{:<20} {:>5}  {:<12} {:<26} {}".format
    print(row("network", "batch", "package", "ms", "ratio"))
    results = {}
    for name in ("mlp-large", "mlp-middle", "mlp-small"):
        figures = results[name] = measure(name, peers, args)
        for package, quartiles in figures["times"].items():
            ms = spread([value / 1000 for value in quartiles], 1)
            ratio = spread(figures["ratios"].get(package), 2)
            print(row(figures["title"], figures["batch"], package, ms, ratio), flush=True)
    for figures in results.values():
        for remark in figures["remarks"]:
            print(remark)
    write_json(args.json, {"about": about, "results": results})


if __name__ == "__main__":
    main()
