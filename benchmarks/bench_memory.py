"""Show that training holds its memory, and how much a step takes in pyggml, PyTorch and JAX.

First the process's resident memory after more and more steps: Python's cyclic garbage collector is
off, so whatever a step leaves in a reference cycle stays and shows. Below stands the memory that
was planned for the step's graph.

Then the resident peak of training, each engine in a process of its own: what is resident at most
in some steps, less what the imports had taken before the network was built.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import (
    PEERS,
    begin,
    find_peers,
    flag_parser,
    forget_peak,
    peer_flag,
    positive,
    status_of,
    write_json,
)
from workloads import WORKLOADS, PyggmlEngine

import pyggml as pg
from pyggml.device import resolve_device

GROWING, LARGEST = "mlp-middle", "gpt-medium"


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM; where only the peak is known, that."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize()
    except OSError:  # not Linux
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak


def measure_growth(looks: list[int]) -> dict[str, Any]:
    """Train, and look at the resident memory after some numbers of steps."""
    gc.disable()
    workload = WORKLOADS[GROWING]
    engine = PyggmlEngine(workload.net, workload.weights())
    batches = workload.batches()
    print(f"{workload.title}, batches of {workload.batch}, AdamW; garbage collector off")
    print(f"{'steps':>8} {'resident MiB':>13} {'since the first look, KiB':>26} {'us/step':>8}")
    rows: list[dict[str, float]] = []
    done = 0
    for steps in sorted(set(looks)):
        start, before = time.perf_counter(), done
        while done < steps:
            engine.step(*batches[done % len(batches)])
            done += 1
        a_step = 1e6 * (time.perf_counter() - start) / (done - before)
        now = resident_bytes()
        rows.append({"steps": steps, "resident_bytes": now, "microseconds": a_step})
        grown = (now - rows[0]["resident_bytes"]) / 2**10
        print(f"{steps:>8} {now / 2**20:>13.1f} {grown:>26.0f} {a_step:>8.0f}", flush=True)
    gc.enable()

    plans = resolve_device(None).plans
    working = max((plan.working_bytes for plan in plans.values()), default=0)  # plans share it
    weights = sum(4 * parameter.size for parameter in engine.model.parameters())
    print(f"plans: {len(plans)}, with {working / 2**10:.0f} KiB of working memory")
    print(f"weights: {weights / 2**10:.0f} KiB; AdamW's averages: {2 * weights / 2**10:.0f} KiB\n")
    return {"workload": GROWING, "rows": rows, "working_bytes": working, "weight_bytes": weights}


def measure_peak(engine_name: str, name: str, args: argparse.Namespace) -> dict[str, float]:
    """Train for some steps in this process; return the bytes resident before, and at most."""
    about: dict[str, str] = {}
    if engine_name == "pyggml":
        kind = PyggmlEngine
    else:
        args.peers = [engine_name]
        kind = find_peers(args, about)[engine_name]
    workload = WORKLOADS[name]
    weights, batches = workload.weights(), workload.batches(2)
    gc.collect()
    before = forget_peak()
    engine = kind(workload.net, weights)
    losses = [engine.step(*batches[i % 2]) for i in range(4)]
    return {"before": before, "peak": status_of("VmHWM") - before, "loss": losses[-1]}


def measure_peaks(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure each engine in a process of its own."""
    peers = [peer for peer in find_peers(args, {}) if peer != "torch.compile"]
    workload = WORKLOADS[name]
    print(f"{workload.title}, batches of {workload.batch}: MiB")
    print(f"{'engine':<10} {'after the imports':>18} {'more in training':>17}")
    rows = {}
    for engine in ["pyggml", *peers]:
        flags = ["--threads", str(args.threads), "--device", args.device]
        command = [sys.executable, __file__, "--peak-of", engine, "--largest", name, *flags]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        row = rows[engine] = json.loads(done.stdout.splitlines()[-1])
        assert abs(row["loss"] - rows["pyggml"]["loss"]) < 1e-4, rows
        print(f"{engine:<10} {row['before'] / 2**20:>18.0f} {row['peak'] / 2**20:>17.0f}")
    ratios = {peer: rows[peer]["peak"] / rows["pyggml"]["peak"] for peer in peers}
    return {"workload": name, "engines": rows, "ratios": ratios}


def main() -> None:
    parser = flag_parser("Measure the memory of training.")
    peer_flag(parser)
    parser.add_argument("--steps", type=positive, nargs="+", default=[100, 1_000, 10_000],
                        metavar="N", help="when to look")  # fmt: skip
    parser.add_argument("--largest", default=LARGEST, choices=list(WORKLOADS), metavar="NAME",
                        help="whose resident peak is measured")  # fmt: skip
    parser.add_argument("--peak-of", choices=["pyggml", *PEERS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    about = begin(args)
    if args.peak_of:
        print(json.dumps(measure_peak(args.peak_of, args.largest, args)))
        return
    growth = measure_growth(args.steps)
    pg.device(args.device).device.clear_plans()
    peaks = measure_peaks(args.largest, args)
    write_json(args.json, {"about": about, "growth": growth, "peaks": peaks})


if __name__ == "__main__":
    main()
