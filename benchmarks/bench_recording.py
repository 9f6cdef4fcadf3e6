"""What Python costs: a recorded op, a plan that is found, and a plan that is made.

A chain x = x * w + w, twice: the first time its nodes and its plan are made, the second time they
are found. Every column should stay level as the chain grows.

Then a program of 200 ops: what looking it up takes, and what planning takes that it does not have
in common with another. Both are the time of the run less the time inside ggml.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from common import begin, flag_parser, positive, quartiles, seconds_in_ggml, spread, write_json

from pyggml import ag

COLUMNS = ["record", "backward", "plan and run", "record again", "backward again", "run again"]
OPS = 200
GOALS = {"record": 2.0, "hit": 50.0, "cold": 2000.0}  # microseconds


def time_chain(length: int) -> list[float]:
    """Return the microseconds of each phase for one of the chain's 2 * length ops."""
    w = ag.param([1.0])
    spent = []
    for _ in range(2):
        w.grad = None
        start = time.perf_counter()
        with ag.grad_tape():
            x: ag.Tensor = w
            for _ in range(length):
                x = x * w + w
        recorded = time.perf_counter()
        ag.backward(x)
        differentiated = time.perf_counter()
        x.item()
        done = time.perf_counter()
        spent += [recorded - start, differentiated - recorded, done - differentiated]
    return [seconds / (2 * length) * 1e6 for seconds in spent]


def time_program(first: float, device: str) -> tuple[float, float]:
    """Record a program of 200 ops and run it; return microseconds an op, and of finding a plan.

    Programs of the same ``first`` number are equal.
    """
    w = ag.tensor([1.0])
    start = time.perf_counter()
    x = w * first
    for _ in range(OPS // 2 - 1):
        x = x * w + w
    x = x + w
    recorded = time.perf_counter()
    with seconds_in_ggml(device) as inside:
        started = time.perf_counter()
        x.item()
        spent = time.perf_counter() - started
    return 1e6 * (recorded - start) / OPS, 1e6 * (spent - sum(inside))


def measure_program(rounds: int, device: str) -> dict[str, Any]:
    """Return the quartiles, in microseconds, of recording an op, of a hit, and of a cold plan."""
    record, hit, cold = [], [], []
    for i in range(rounds):
        cold.append(time_program(1.0 + (i + 1) / 1024, device)[1])
        for _ in range(10):  # the first one finds what the last round used
            an_op, found = time_program(1.0 + (i + 1) / 1024, device)
            record.append(an_op)
            hit.append(found)
    return {
        "ops": OPS,
        "record": quartiles(record),
        "hit": quartiles(hit),
        "cold": quartiles(np.array(cold[1:])),  # the first one starts the device, too
    }


def main() -> None:
    parser = flag_parser(__doc__)
    parser.add_argument("--lengths", type=positive, nargs="+", default=[500, 2_500, 10_000],
                        metavar="N", help="chain lengths, each of two ops")  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=40, metavar="N", help="programs planned")
    args = parser.parse_args()
    about = begin(args)
    print("\nmicroseconds an op\n   ops " + "".join(f"{name:>15}" for name in COLUMNS))
    rows = []
    for length in args.lengths:
        times = time_chain(length)
        rows.append({"ops": 2 * length, **dict(zip(COLUMNS, times, strict=True))})
        print(f"{2 * length:6} " + "".join(f"{value:15.2f}" for value in times), flush=True)

    program = measure_program(args.rounds, args.device)
    print(f"\na program of {OPS} ops, microseconds: median (quartiles)")
    for name, label in (
        ("record", "recording one op again"),
        ("hit", "finding its plan"),
        ("cold", "making its plan"),
    ):
        print(f"{label:<23} {spread(program[name], 1):<28} goal: at most {GOALS[name]:.0f}")
    write_json(args.json, {"about": about, "rows": rows, "program": program, "goals": GOALS})


if __name__ == "__main__":
    main()
