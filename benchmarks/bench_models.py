"""Time training steps and inference of seven networks in pyggml, PyTorch and JAX.

A step is all that a training loop does for a batch: make tensors from NumPy arrays, forward pass,
cross entropy, backward pass, AdamW, read the loss. Inference takes one sample and returns the
logits as an array. All start from the same weights and see the same batches; their losses must
agree over the first steps, and their logits, or nothing is timed. They take turns in short rounds,
the order changing each time, so that other work on the machine hits all alike.

Ratios are taken in each round, and their median printed: the peer's time over ours, so above 1
pyggml is faster. Python's share is what is left of pyggml's step when the time inside ggml is taken
off.
"""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Any

import numpy as np
from common import (
    begin,
    find_peers,
    flag_parser,
    peer_flag,
    positive,
    ratios,
    seconds_in_ggml,
    spread,
    take_turns,
    times,
    write_json,
)
from workloads import WORKLOADS, PyggmlEngine, PyggmlLoop, Workload

CHECKED_STEPS, TOLERANCE = 20, 1e-4
MODES = "training", "inference"
LOOP = "pyggml, loop"  # steps written as a loop with a tape, not compiled


def check(results: dict[str, np.ndarray], title: str) -> float:
    """Return how far the results of engines are apart; end the program if it is too much."""
    ours = results["pyggml"]
    apart = {name: float(np.max(np.abs(result - ours))) for name, result in results.items()}
    worst = max(apart, key=lambda name: apart[name])
    if not apart[worst] < TOLERANCE:
        sys.exit(
            f"bench_models.py: {title}: pyggml and {worst} differ by {apart[worst]:.2g}; nothing "
            "was timed"
        )
    return apart[worst]


def measure(name: str, mode: str, peers: dict[str, Any], args: Any) -> dict[str, Any]:
    """Return the figures for one workload: times in microseconds, each as its three quartiles."""
    workload = WORKLOADS[name]
    weights = workload.weights()
    fitting = {peer: kind for peer, kind in peers.items() if type(workload.net) in kind.nets}
    engines = {
        engine: kind(workload.net, weights, training=mode == "training")
        for engine, kind in {"pyggml": PyggmlEngine, **fitting}.items()
    }
    if mode == "training":
        engines[LOOP] = PyggmlLoop(workload.net, weights)
    batches = workload.batches()
    if mode == "training":
        actions = {
            engine: lambda i, engine=engine: engines[engine].step(*batches[i % len(batches)])
            for engine in engines
        }
        results = {
            engine: np.array([action(i) for i in range(CHECKED_STEPS)])
            for engine, action in actions.items()
        }
    else:
        samples = [x[:1] for x, _ in batches]
        actions = {
            engine: lambda i, engine=engine: engines[engine].run(samples[i % len(samples)])
            for engine in engines
        }
        results = {engine: action(0) for engine, action in actions.items()}
    apart = check(results, f"{workload.title}, {mode}")

    taken = take_turns(actions, rounds=args.rounds, turn=args.turn, budget=args.budget)
    in_python: list[float] = []
    with seconds_in_ggml(args.device) as in_ggml:

        def counted(i: int) -> None:
            in_ggml.clear()
            start = perf_counter()
            actions["pyggml"](i)
            in_python.append(perf_counter() - start - sum(in_ggml))

        take_turns({"counted": counted}, rounds=3, turn=args.turn, budget=args.budget / 10)

    figures = summary(name, workload, mode, taken)
    figures["apart"] = apart
    figures["python"] = 1e6 * float(np.median(in_python))
    return figures


def summary(
    name: str, workload: Workload, mode: str, taken: dict[str, list[np.ndarray]]
) -> dict[str, Any]:
    """Return the figures that turns give."""
    compared = {peer: ratios(taken["pyggml"], taken[peer]) for peer in taken if peer != "pyggml"}
    rivals = [peer for peer in compared if peer != LOOP]
    training = mode == "training"
    return {
        "workload": name,
        "title": workload.title,
        "mode": mode,
        "batch": workload.batch if training else 1,
        "flops": workload.training_flops() if training else workload.net.flops(1)[0],
        "rounds": len(taken["pyggml"]),
        "times": {engine: times(turns) for engine, turns in taken.items()},
        "ratios": compared,
        "best": min(rivals, key=lambda peer: compared[peer][1]) if rivals else None,
        "goal": workload.training_goal if training else workload.inference_goal,
    }


def main() -> None:
    parser = flag_parser("Time networks in pyggml, PyTorch and JAX.")
    peer_flag(parser)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS),
                        metavar="NAME", help=f"which of {', '.join(WORKLOADS)}")  # fmt: skip
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--rounds", type=positive, default=20, metavar="N", help="turns of each")
    parser.add_argument("--turn", type=float, default=0.2, metavar="S", help="seconds of a turn")
    parser.add_argument("--budget", type=float, default=90, metavar="S",
                        help="seconds for a workload; fewer rounds if more")  # fmt: skip
    args = parser.parse_args()
    about = begin(args)
    peers = find_peers(args, about)

    print("Microseconds: median (quartiles); ratio: the peer's time over pyggml's")
    row = "{:<32} {:>5}  {:<14} {:<26} {:<20} {}".format
    results = []
    for mode in args.modes:
        print(row(mode, "batch", "engine", "time", "ratio", ""))
        for name in args.workloads:
            figures = measure(name, mode, peers, args)
            results.append(figures)
            for engine, time in figures["times"].items():
                ratio, note = figures["ratios"].get(engine), ""
                if engine == "pyggml":
                    note = f"{figures['python']:.0f} of it in Python; apart {figures['apart']:.1g}"
                elif engine == figures["best"]:
                    note = f"the fastest peer; goal {figures['goal']:.2f}"
                print(row(figures["title"], figures["batch"], engine, spread(time),
                          spread(ratio, 2), note), flush=True)  # fmt: skip
    settings = {"threads": args.threads, "turn": args.turn, "budget": args.budget}
    write_json(args.json, {"about": about, **settings, "results": results})


if __name__ == "__main__":
    main()
