"""How many operations a second the matrix product of each library reaches: the ceiling of a step.

Square float32 matrices, in turns. pyggml's figure is the time inside ggml, for recording and
copying the result are no part of the product. benchmarks/run.py runs this with one thread and with
all, and takes from it the share of the peak that training steps reach.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from common import (
    begin,
    find_peers,
    flag_parser,
    peer_flag,
    positive,
    quartiles,
    seconds_in_ggml,
    spread,
    take_turns,
    write_json,
)

from pyggml import ag

TOLERANCE = 1e-3  # of sums of 2048 products of standard normal numbers


def products(size: int, peers: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return each library's product of the same two matrices, (size, size)."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), np.float32) for _ in range(2))
    ours = ag.tensor(a), ag.tensor(b)
    found: dict[str, Callable[[], Any]] = {"pyggml": lambda: (ours[0] @ ours[1]).numpy()}
    if "PyTorch" in peers:
        import torch

        theirs, out = (torch.from_numpy(a), torch.from_numpy(b)), torch.empty(size, size)
        found["PyTorch"] = lambda: torch.mm(*theirs, out=out)
    if "JAX" in peers:
        import jax

        product, arrays = jax.jit(jax.numpy.matmul), (jax.numpy.array(a), jax.numpy.array(b))
        found["JAX"] = lambda: product(*arrays).block_until_ready()
    expected = a.astype(float) @ b
    for name, run in found.items():
        apart = np.max(np.abs(np.asarray(run()) - expected))
        assert apart < TOLERANCE, f"{name}: the product is off by {apart:.2g}"
    return found


def measure(size: int, peers: dict[str, Any], args: Any) -> dict[str, list[float]]:
    """Return each library's 10^9 operations a second: quartiles, and those of the fastest call."""
    inside: list[float] = []
    actions = {}
    for name, run in products(size, peers).items():
        actions[name] = lambda i, run=run: run()
    plain = actions["pyggml"]

    def ours(i: int) -> None:
        with seconds_in_ggml(args.device) as seconds:
            plain(i)
        inside.extend(seconds)

    actions["pyggml"] = ours
    taken = take_turns(actions, rounds=args.rounds, turn=args.turn, budget=60)
    if inside:  # none on a device that is not ggml's
        taken["pyggml"] = [np.array(inside)]
    work = 2 * size**3 / 1e9
    found = {}
    for name, turns in taken.items():
        rates = work / np.concatenate(turns)
        found[name] = [*quartiles(rates), float(rates.max())]
    return found


def main() -> None:
    parser = flag_parser("Measure the matrix product of each library.")
    peer_flag(parser)
    parser.add_argument("--sizes", type=positive, nargs="+", default=[512, 1024, 2048], metavar="N")
    parser.add_argument("--rounds", type=positive, default=10, metavar="N", help="turns of each")
    parser.add_argument("--turn", type=float, default=0.2, metavar="S", help="seconds of a turn")
    args = parser.parse_args()
    about = begin(args)
    peers = find_peers(args, about)
    print(f"10^9 operations a second, {args.threads} threads: median (quartiles), best")
    rows = []
    for size in args.sizes:
        figures = measure(size, peers, args)
        rows.append({"size": size, "gflops": figures})
        for name, values in figures.items():
            print(
                f"{size:>5} x {size:<5} {name:<10} {spread(values[:3])}, {values[3]:.0f}",
                flush=True,
            )
    peak = {name: max(row["gflops"][name][3] for row in rows) for name in rows[0]["gflops"]}
    print("peak: " + ", ".join(f"{name} {value:.0f}" for name, value in peak.items()))
    write_json(args.json, {"about": about, "threads": args.threads, "rows": rows, "peak": peak})


if __name__ == "__main__":
    main()
