"""How long it takes to import pyggml, and from there to the end of the first training step.

Each look is a process of its own. The first step is that of the network of examples/digits.py:
making it, its optimizer, and all that is started or planned on first use. Beside it PyTorch and JAX
do the same.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

import numpy as np
from common import (
    begin,
    find_peers,
    flag_parser,
    peer_flag,
    positive,
    quartiles,
    spread,
    write_json,
)
from workloads import Mlp, PyggmlEngine

import pyggml as pg

GOALS = {"import": 0.25, "first_step": 0.1}  # seconds
PACKAGES = {"pyggml": "pyggml", "PyTorch": "torch", "JAX": "jax, optax"}
DIGITS, BATCH = Mlp((64, 256, 256, 10)), 64

TIME_IMPORT = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


def first_step(name: str, args: argparse.Namespace) -> float:
    """Return the seconds that the first step takes in this process."""
    rng = np.random.default_rng(0)
    x, labels = DIGITS.batch(rng, BATCH)
    weights = {}  # made without pyggml, which must do nothing before the clock starts
    for i, (inputs, outputs) in enumerate(pairwise(DIGITS.sizes)):
        weights[f"{2 * i}.weight"] = rng.uniform(-0.1, 0.1, (outputs, inputs)).astype(np.float32)
        weights[f"{2 * i}.bias"] = np.zeros(outputs, np.float32)
    if name == "pyggml":
        kind = PyggmlEngine
        pg.set_device(args.device)
        pg.set_num_threads(args.threads)
    else:
        args.peers = [name]
        kind = find_peers(args, {})[name]
    start = time.perf_counter()
    kind(DIGITS, weights).step(x, labels)
    return time.perf_counter() - start


def in_new_process(*arguments: str) -> float:
    """Return the number that a new Python prints last."""
    done = subprocess.run(
        [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = flag_parser("Time the import and the first training step.")
    peer_flag(parser)
    parser.add_argument("--rounds", type=positive, default=9, metavar="N", help="processes of each")
    parser.add_argument("--first-step-of", choices=list(PACKAGES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.first_step_of:
        print(first_step(args.first_step_of, args))
        return

    about = begin(args)
    engines = ["pyggml", *(peer for peer in find_peers(args, about) if peer in PACKAGES)]
    flags = ["--threads", str(args.threads), "--device", args.device]
    looks: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for i in range(args.rounds):
        for name in engines[:: 1 if i % 2 else -1]:
            imported = in_new_process("-c", TIME_IMPORT.format(PACKAGES[name]))
            step = in_new_process(__file__, "--first-step-of", name, *flags)
            looks[name].append((imported, step))

    print("seconds: median (quartiles)")
    print(f"{'engine':<10} {'import':<22} first step of the digits example")
    rows: dict[str, Any] = {}
    for name in engines:
        imports, steps = zip(*looks[name], strict=True)
        row = rows[name] = {"import": quartiles(imports), "first_step": quartiles(steps)}
        print(f"{name:<10} {spread(row['import'], 3):<22} {spread(row['first_step'], 3)}")
    print(f"goals for pyggml: at most {GOALS['import']} and {GOALS['first_step']}")
    write_json(args.json, {"about": about, "engines": rows, "goals": GOALS})


if __name__ == "__main__":
    main()
