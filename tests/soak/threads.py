"""Show what more threads than cores cost: the time of a program with more and more of them.

python tests/soak/threads.py
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import pyggml as pg
from pyggml import ag
from pyggml.cpus import default_num_threads


def main() -> None:
    parser = argparse.ArgumentParser(description="Show what more threads than cores cost.")
    parser.add_argument("--runs", type=int, default=10, metavar="N", help="runs of each")
    args = parser.parse_args()
    usable = default_num_threads()
    a = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32) / 16
    print(f"20 products and tanh of (256, 256), {usable} usable cores")
    print(f"{'threads':>8} {'ms':>8} {'CPU ms':>8}  equal bits")
    first = None
    for n_threads in sorted({1, usable, 2 * usable, 4 * usable, 8 * usable, 32 * usable}):
        pg.set_num_threads(n_threads)
        best = float("inf"), float("inf")
        for _ in range(args.runs):
            started, cpu = time.perf_counter(), time.process_time()
            x = y = ag.tensor(a)
            for _ in range(20):
                y = ag.tanh(y @ x)
            result = y.numpy()
            best = min(best, (time.perf_counter() - started, time.process_time() - cpu))
        first = result if first is None else first
        equal = "yes" if np.array_equal(first, result) else "no"
        print(f"{n_threads:>8} {1e3 * best[0]:>8.1f} {1e3 * best[1]:>8.1f}  {equal}", flush=True)


if __name__ == "__main__":
    main()
