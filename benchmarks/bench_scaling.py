"""How time and planned memory of a training step grow with a GPT's depth, width, batch, context.

Each table changes one of them. Below it stands the exponent p of size^p, by least squares through
the logarithms: 1 is growth in proportion. Planned memory is what pyggml's plan of forward and
backward pass needs between inputs and outputs; the sizes of a table take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from common import (
    begin,
    find_peers,
    flag_parser,
    peer_flag,
    positive,
    take_turns,
    times,
    write_json,
)
from workloads import Gpt, PyggmlEngine, Workload

from pyggml import ag

BASE, BATCH = Gpt(layers=4, width=128, heads=4, context=64), 8
SIZES = {
    "layers": [1, 2, 4, 8, 16],
    "width": [64, 128, 256, 512],
    "batch": [2, 4, 8, 16, 32],
    "context": [32, 64, 128, 256],
}


def workload_of(axis: str, size: int) -> Workload:
    """Return the base with one of its sizes changed."""
    title = f"{axis} {size}"
    if axis == "batch":
        return Workload(title, BASE, size, 1.0, 1.0)
    return Workload(title, BASE._replace(**{axis: size}), BATCH, 1.0, 1.0)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the p for which sizes^p fits values best, by least squares through the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def measure(axis: str, sizes: list[int], peers: dict[str, Any], args: argparse.Namespace) -> Any:
    """Return the rows of one table, and the exponents of its columns."""
    planned, actions = {}, {}
    for size in sizes:
        workload = workload_of(axis, size)
        weights, batches = workload.weights(), workload.batches()
        for name, kind in {"pyggml": PyggmlEngine, **peers}.items():
            engine = kind(workload.net, weights)
            if name == "pyggml":
                loss = engine.record(*batches[0])
                planned[size] = ag.plan_report(loss).bytes["activations"]
            actions[name, size] = lambda i, engine=engine, batches=batches: engine.step(
                *batches[i % len(batches)]
            )
    keyed = {f"{name} {size}": action for (name, size), action in actions.items()}
    taken = take_turns(keyed, rounds=args.rounds, turn=args.turn, budget=args.budget)
    engines = ["pyggml", *peers]
    rows = [
        {"size": size, "planned_bytes": planned[size]}
        | {name: times(taken[f"{name} {size}"])[1] for name in engines}
        for size in sizes
    ]
    columns = ["planned_bytes", *engines]
    fitted = {key: exponent(sizes, [row[key] for row in rows]) for key in columns}
    return {"axis": axis, "rows": rows, "exponents": fitted}


def main() -> None:
    parser = flag_parser("Measure how time and planned memory grow with the sizes of a GPT.")
    peer_flag(parser)
    parser.set_defaults(peers=["PyTorch"])
    parser.add_argument("--axes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--points", type=positive, default=5, metavar="N", help="sizes of a table")
    parser.add_argument("--rounds", type=positive, default=10, metavar="N", help="turns of each")
    parser.add_argument("--turn", type=float, default=0.1, metavar="S", help="seconds of a turn")
    parser.add_argument("--budget", type=float, default=90, metavar="S", help="seconds of a table")
    args = parser.parse_args()
    about = begin(args)
    peers = find_peers(args, about)
    print(f"GPT of {BASE.layers} layers, width {BASE.width}, context {BASE.context}, batch {BATCH}")
    tables = []
    for axis in args.axes:
        table = measure(axis, SIZES[axis][: args.points], peers, args)
        tables.append(table)
        engines = ["pyggml", *peers]
        print(
            f"\n{axis:>8} {'planned MiB':>12}" + "".join(f"{name + ', us':>20}" for name in engines)
        )
        for row in table["rows"]:
            print(f"{row['size']:>8} {row['planned_bytes'] / 2**20:>12.2f}"
                  + "".join(f"{row[name]:>20.0f}" for name in engines))  # fmt: skip
        fitted = table["exponents"]
        print(f"{'exponent':>8} {fitted['planned_bytes']:>12.2f}"
              + "".join(f"{fitted[name]:>20.2f}" for name in engines), flush=True)  # fmt: skip
    settings = {"net": BASE._asdict(), "batch": BATCH}
    write_json(args.json, {"about": about, **settings, "tables": tables})


if __name__ == "__main__":
    main()
