"""The cost of a recorded op in Python, against the length of the program.

A chain x = x * w + w, twice: the first time its nodes and its plan are made, the second time they
are found. Every column should stay level as the chain grows.
"""

from __future__ import annotations

import time

from common import begin, flag_parser, positive, write_json

from pyggml import ag

COLUMNS = ["record", "backward", "plan and run", "record again", "backward again", "run again"]


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


def main() -> None:
    parser = flag_parser(__doc__)
    parser.add_argument("--lengths", type=positive, nargs="+", default=[500, 2_500, 10_000],
                        metavar="N", help="chain lengths, each of two ops")  # fmt: skip
    args = parser.parse_args()
    about = begin(args)
    print("microseconds an op\n   ops " + "".join(f"{name:>15}" for name in COLUMNS))
    rows = []
    for length in args.lengths:
        times = time_chain(length)
        rows.append({"ops": 2 * length, **dict(zip(COLUMNS, times, strict=True))})
        print(f"{2 * length:6} " + "".join(f"{value:15.2f}" for value in times), flush=True)
    write_json(args.json, {"about": about, "rows": rows})


if __name__ == "__main__":
    main()
