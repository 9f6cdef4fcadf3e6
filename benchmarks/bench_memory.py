"""Show that training holds its memory: the process's resident memory after more and more steps.

Python's cyclic garbage collector is off, so whatever a step leaves in a reference cycle stays and
shows. Below the table stands the memory that ggml planned for the step's graph.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from pathlib import Path

from common import MIDDLE, PyggmlTrainer, describe, flag_parser, positive, write_json

import pyggml as pg
from pyggml.device import CpuDevice


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM; where only the peak is known, that."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize()
    except OSError:  # not Linux
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak


def main() -> None:
    parser = flag_parser("Show the resident memory after more and more training steps.")
    parser.add_argument("--steps", type=positive, nargs="+", default=[100, 1_000, 10_000],
                        metavar="N", help="when to look")  # fmt: skip
    args = parser.parse_args()
    pg.set_num_threads(args.threads)
    about = describe(args.threads)
    gc.disable()

    trainer = PyggmlTrainer(MIDDLE.weights())
    batches = MIDDLE.batches(8)
    print(f"MLP {MIDDLE.name}, batches of {MIDDLE.batch}, AdamW; garbage collector off")
    print(f"{'steps':>8} {'resident MiB':>13} {'since the first look, KiB':>26} {'seconds':>8}")
    rows: list[dict[str, float]] = []
    start = time.perf_counter()
    done = 0
    for steps in sorted(set(args.steps)):
        while done < steps:
            trainer.step(*batches[done % len(batches)])
            done += 1
        now = resident_bytes()
        rows.append({"steps": steps, "resident_bytes": now})
        grown = (now - rows[0]["resident_bytes"]) / 2**10
        seconds = time.perf_counter() - start
        print(f"{steps:>8} {now / 2**20:>13.1f} {grown:>26.0f} {seconds:>8.1f}", flush=True)

    device = trainer.model.parameters()[0].device
    assert isinstance(device, CpuDevice)
    working = max(plan.working_bytes for plan in device.plans.values())  # plans share it
    weights = sum(4 * parameter.size for parameter in trainer.model.parameters())
    print(f"\nplans: {len(device.plans)}, with {working / 2**10:.0f} KiB of working memory")
    print(f"weights: {weights / 2**10:.0f} KiB; AdamW's averages: {2 * weights / 2**10:.0f} KiB")
    numbers = {"rows": rows, "working_bytes": working, "weight_bytes": weights}
    write_json(args.json, {"about": about, "mlp": MIDDLE.name, "batch": MIDDLE.batch, **numbers})


if __name__ == "__main__":
    main()
