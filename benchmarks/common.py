"""What the benchmarks share: flags, peers, the schedule of turns, and the file of numbers."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import pyggml as pg
from pyggml.__main__ import report
from pyggml.device import Device, resolve_device

WARM_UP_STEPS = 5  # at most, at the start of each turn: caches filled, threads awake
PAUSE = 0.02  # seconds before each turn: the other's idle threads stop looking for work

# Of each peer: the module with its engines, the engine's name, and what installs it.
PEERS = {
    "PyTorch": ("with_torch", "TorchEngine", "pip install torch"),
    "torch.compile": ("with_torch", "CompiledEngine", "pip install torch"),
    "JAX": ("with_jax", "JaxEngine", "pip install jax optax"),
}


# ---- flags ---------------------------------------------------------------------------------------


def flag_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--threads", type=positive, default=pg.get_num_threads(), metavar="N", help="CPU threads"
    )
    parser.add_argument("--device", default="cpu", metavar="NAME",
                        help="where pyggml computes; peers only on the CPU")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    return parser


def peer_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that chooses peers."""
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS),
                        metavar="NAME", help=f"which of {', '.join(PEERS)} to measure")  # fmt: skip


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; got {text!r}")
    return int(text)


def begin(args: argparse.Namespace) -> dict[str, str]:
    """Set device and threads as the flags say; print and return what the numbers depend on."""
    pg.set_device(args.device)
    pg.set_num_threads(args.threads)
    known = dict(report())
    labels = "pyggml", "ggml", "BLAS", "Python", "platform", "CPU"
    about = {label: known[label] for label in labels}
    about["threads"] = f"{args.threads} used, {known['threads']}"
    about["device"] = args.device
    for label, text in about.items():
        print(f"{label + ':':<15}{text}")
    return about


def find_peers(args: argparse.Namespace, about: dict[str, str]) -> dict[str, Any]:
    """Return the engine of each wanted peer that is installed, and say which ones are not."""
    peers = {}
    for name in args.peers if args.device == "cpu" else []:
        module_name, engine, how = PEERS[name]
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            print(f"{name + ':':<15}left out, for {error.name} is not installed: {how}")
            continue
        module.set_threads(args.threads)
        peers[name] = getattr(module, engine)
        about[name] = module.VERSION
        print(f"{name + ':':<15}{module.VERSION}")
    print(flush=True)
    return peers


# ---- time ----------------------------------------------------------------------------------------


def take_turns(
    actions: dict[str, Callable[[int], Any]], *, rounds: int, turn: float, budget: float
) -> dict[str, list[np.ndarray]]:
    """Time actions in short turns, in an order that changes in each round.

    An action gets the number of the call. A turn lasts about ``turn`` seconds, and has a few calls
    before it that are not counted. There are fewer rounds, but at least three, where all would take
    longer than ``budget`` seconds. Returns each action's turns, in seconds a call.
    """
    calls, warm_up = {}, {}
    a_round = 0.0
    for name, action in actions.items():
        action(0)
        start = time.perf_counter()
        action(1)
        seconds = time.perf_counter() - start
        calls[name] = min(1000, max(1, round(turn / seconds)))
        warm_up[name] = min(WARM_UP_STEPS, calls[name])
        a_round += PAUSE + seconds * (calls[name] + warm_up[name])
    rounds = min(rounds, max(3, int(budget / a_round)))

    taken: dict[str, list[np.ndarray]] = {name: [] for name in actions}
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        for name in rng.permutation(list(actions)):
            time.sleep(PAUSE)
            seconds_each = []
            for i in range(-warm_up[name], calls[name]):
                start = time.perf_counter()
                actions[name](i)
                seconds_each.append(time.perf_counter() - start)
            taken[name].append(np.array(seconds_each[warm_up[name] :]))
    return taken


def quartiles(values: Any, scale: float = 1.0) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return [scale * float(value) for value in np.percentile(values, [25, 50, 75])]


def times(turns: list[np.ndarray]) -> list[float]:
    """Return the quartiles of all calls of an action, in microseconds."""
    return quartiles(np.concatenate(turns), 1e6)


def ratios(ours: list[np.ndarray], theirs: list[np.ndarray]) -> list[float]:
    """Return the quartiles of their time over ours, taken in each round."""
    pairs = zip(ours, theirs, strict=True)
    return quartiles([np.median(their) / np.median(our) for our, their in pairs])


def spread(values: list[float] | None, digits: int = 0) -> str:
    """Write quartiles as: median (lower to upper)."""
    if values is None:
        return "-"
    low, middle, high = (f"{value:.{digits}f}" for value in values)
    return f"{middle} ({low} to {high})"


@contextmanager
def seconds_in_ggml(device: Device | str) -> Iterator[list[float]]:
    """Yield a list that gets the seconds of every run of a ggml graph on a device."""
    seconds: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                seconds.append(time.perf_counter() - start)

        return call

    kind = type(resolve_device(device))
    with ExitStack() as stack:
        for name in "compute", "compute_scheduled":
            if hasattr(kind, name):
                stack.enter_context(patch.object(kind, name, timed(getattr(kind, name))))
        yield seconds


# ---- memory --------------------------------------------------------------------------------------


def status_of(name: str) -> int:
    """Return a size of this process in bytes, from Linux's /proc."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(text.split(f"{name}:")[1].split()[0])


def forget_peak() -> int:
    """Let the resident peak, VmHWM, count from now on; return the bytes resident now.

    (getrusage would not do: its peak is inherited from the process that started this one.)
    """
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return status_of("VmRSS")


# ---- files ---------------------------------------------------------------------------------------


def write_json(path: Path | None, numbers: dict[str, Any]) -> None:
    """Write numbers beside path, then put the complete file in its place."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{os.getpid()}-{path.name}")
        beside.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
        os.replace(beside, path)
