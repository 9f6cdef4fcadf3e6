"""Show that nothing leaks: resident memory before and after a lot of work of several kinds.

Python's cyclic garbage collector is off, so what is left in a reference cycle stays and shows. Each
kind of work is done for a while first, until caches are full and memory is in use again; then it is
measured. A growth beyond the bound ends the script with an error.

    python tests/soak/memory.py
    python tests/soak/memory.py --scale 0.02    # in some seconds, as the tests do
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

import pyggml as pg
from pyggml import ag, graph, nn, optim
from pyggml.data import DataLoader

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((64, 8), np.float32), RNG.integers(0, 3, 64)


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM (Linux)."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def make(width: int = 16) -> tuple[nn.Module, optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 3))
    return model, optim.AdamW(model.parameters(), lr=1e-3, clip_norm=1.0)


def step(model: nn.Module, opt: optim.Optimizer, rows: int = 32) -> float:
    opt.zero_grad()
    with ag.grad_tape():
        loss = ag.softmax_cross_entropy(model(ag.tensor(X[:rows])), Y[:rows])
    ag.backward(loss)
    opt.step()
    return loss.item()


# ---- the kinds of work: each does something `count` times ----


def small_steps(count: int) -> None:
    model, opt = make()
    for _ in range(count):
        step(model, opt)


def models_made_and_dropped(count: int) -> None:
    for _ in range(count):
        model, opt = make()
        step(model, opt)
        step(model, opt)


def failed_calls(count: int) -> None:
    model, opt = make()

    def stale() -> None:
        with ag.grad_tape():
            loss = ag.mean(model(ag.tensor(X)))
        model[0].weight.assign(model[0].weight.numpy())
        ag.backward(loss)
        opt.step()

    def inside_a_tape() -> None:
        with ag.grad_tape():
            hidden = model(ag.tensor(X))
            hidden @ hidden

    def not_a_file() -> None:
        pg.io.load_weights(__file__, model)

    def interrupted() -> None:
        with ag.grad_tape():
            loss = ag.mean(model(ag.tensor(X)))
            raise KeyboardInterrupt(loss)

    failures: list[Callable[[], object]] = [
        stale,
        inside_a_tape,
        not_a_file,
        interrupted,
        lambda: ag.tensor(X) @ ag.tensor(X),
        lambda: ag.softmax_cross_entropy(ag.tensor(X), np.full(64, 9)),
        lambda: ag.backward(ag.tensor(1.0)),
        lambda: ag.full((1 << 12,) * 4, 1.0),
        lambda: ag.tensor(["a"]),
        lambda: pg.set_device("nowhere"),
        lambda: opt.step({ag.param(1.0): ag.tensor(1.0)}),
    ]
    for i in range(count):
        try:
            failures[i % len(failures)]()
        except (pg.PyggmlError, KeyboardInterrupt) as error:
            error.__traceback__ = None
        else:
            sys.exit(f"failed_calls: call {i % len(failures)} did not fail")
        opt.zero_grad()
    step(model, opt)


def different_shapes(count: int) -> None:
    """Take shapes that come once. Their structure is remembered up to a bound: it is forgotten."""
    for i in range(count):
        model, opt = make(width=16 + i)
        step(model, opt, rows=1 + i % 64)
    graph.clear_nodes()
    pg.devices()[0].clear_plans()


def threads(count: int) -> None:
    for _ in range(count):
        thread = threading.Thread(target=lambda: step(*make()))
        thread.start()
        thread.join()


def changes_of_thread_count(count: int) -> None:
    before = pg.get_num_threads()
    a = ag.tensor(np.ones((300, 300)))
    for i in range(count):
        pg.set_num_threads(1 + i % 3)
        (a @ a).numpy()
    pg.set_num_threads(before)


def saves_and_loads(count: int) -> None:
    model, opt = make()
    step(model, opt)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "state")
        for _ in range(count):
            pg.io.save_state(path, model=model, optimizer=opt)
            pg.io.load_state(path, model=model, optimizer=opt)


def passes_over_a_loader(count: int) -> None:
    loader = DataLoader((X, Y), batch_size=16, shuffle=True, seed=0)
    for i in range(count):
        for number, _ in enumerate(loader):
            if number == i % 4:
                break  # a pass that is given up must leave nothing either


# With how often each is done, and how often before it is measured.
KINDS: list[tuple[Callable[[int], None], int, int]] = [
    (small_steps, 100_000, 1_000),
    (models_made_and_dropped, 1_000, 100),
    (failed_calls, 1_000, 100),
    (different_shapes, 500, 1_000),
    (threads, 1_000, 100),
    (changes_of_thread_count, 500, 50),
    (saves_and_loads, 1_000, 100),
    (passes_over_a_loader, 2_000, 200),
]


def growth(work: Callable[[int], None], count: int, warm_up: int) -> tuple[int, int]:
    """Return the resident bytes before work is done `count` times, and what they grew by."""
    for _ in range(2):
        work(warm_up)
    before = resident_bytes()
    work(count)
    return before, resident_bytes() - before


def main() -> None:
    parser = argparse.ArgumentParser(description="Show that nothing leaks.")
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="share of the work")
    parser.add_argument("--bound", type=float, default=2.0, metavar="MIB", help="allowed growth")
    parser.add_argument("--only", metavar="KIND", help="one kind of work")
    args = parser.parse_args()
    gc.disable()
    pg.manual_seed(0)
    print(f"garbage collector off; bound {args.bound:g} MiB")
    print(f"{'work':<26} {'times':>8} {'MiB before':>11} {'after':>8} {'grown KiB':>10} {'s':>6}")
    leaks = []
    for work, full, warm_up in KINDS:
        name = work.__name__.replace("_", " ")
        if args.only not in (None, name, work.__name__):
            continue
        count = max(20, int(full * args.scale))
        started = time.perf_counter()
        before, grown = growth(work, count, max(20, round(warm_up * min(1, args.scale))))
        seconds = time.perf_counter() - started
        print(
            f"{name:<26} {count:>8,} {before / 2**20:>11.1f} {(before + grown) / 2**20:>8.1f} "
            f"{grown / 2**10:>10.0f} {seconds:>6.1f}",
            flush=True,
        )
        if grown > args.bound * 2**20:
            leaks.append(name)
    if leaks:
        sys.exit(f"memory.py: more than the bound: {', '.join(leaks)}")


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
