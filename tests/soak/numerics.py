"""Measure what unusual numbers cost: zeros, denormals, infinities and NaN, against ordinary ones.

Each row is one computation on one thread, and the CPU time it takes with such data in proportion to
ordinary data: the smallest of several runs of each, in turns. A ratio above the bound ends the
script with an error.

    python tests/soak/numerics.py
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np

import pyggml as pg
from pyggml import ag, nn, optim

RNG = np.random.default_rng(0)


def ordinary(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def scaled(factor: float) -> Callable[..., np.ndarray]:
    return lambda *shape: (ordinary(*shape) * np.float32(factor)).astype(np.float32)


def filled(value: float) -> Callable[..., np.ndarray]:
    return lambda *shape: np.full(shape, value, np.float32)


def with_some(value: float) -> Callable[..., np.ndarray]:
    return lambda *shape: np.where(RNG.random(shape) < 0.1, np.float32(value), ordinary(*shape))


KINDS: dict[str, Callable[..., np.ndarray]] = {
    "zeros": filled(0.0),
    "denormal": scaled(1e-40),
    "tiny": scaled(1e-30),  # their products are denormal or 0
    "1e-20": scaled(1e-20),  # their products are denormal
    "some inf": with_some(np.inf),
    "some NaN": with_some(np.nan),
    "all NaN": filled(np.nan),
}

Make = Callable[..., np.ndarray]
Run = Callable[[], object]


def product(make: Make) -> Run:
    a, b = ag.tensor(make(256, 256)), ag.tensor(make(256, 256))
    return lambda: (a @ b).numpy()


def elementwise(make: Make) -> Run:
    a, b = ag.tensor(make(512, 512)), ag.tensor(make(512, 512))
    return lambda: (ag.gelu(a) * b + ag.tanh(a) * ag.exp(-ag.abs(b)) + ag.sqr(a)).numpy()


def normalised(make: Make) -> Run:
    x = ag.tensor(make(512, 512))
    weight, bias = ag.tensor(ordinary(512)), ag.tensor(ordinary(512))
    return lambda: ag.softmax(ag.layer_norm(x, weight, bias)).numpy()


def convolution(make: Make) -> Run:
    x, w = ag.tensor(make(8, 8, 32, 32)), ag.tensor(make(16, 8, 3, 3))
    return lambda: ag.max_pool2d(ag.conv2d(x, w, padding=1), 2).numpy()


def attention(make: Make) -> Run:
    q, k, v = (ag.tensor(make(2, 4, 64, 32)) for _ in range(3))
    return lambda: ag.scaled_dot_product_attention(q, k, v, causal=True).numpy()


def reductions(make: Make) -> Run:
    x = ag.tensor(make(512, 512))
    return lambda: (ag.sum(x, axis=0) + ag.mean(x, axis=1) + ag.max(x, axis=0)).numpy()


def training_step(make: Make) -> Run:
    pg.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 10))
    opt = optim.AdamW(model.parameters(), lr=0.0)
    x, y = make(128, 64), RNG.integers(0, 10, 128)

    def run() -> None:
        opt.zero_grad()
        with ag.grad_tape():
            loss = ag.softmax_cross_entropy(model(ag.tensor(x)), y)
        ag.backward(loss)
        opt.step()

    return run


def step_of_tiny_gradients(make: Make) -> Run:
    w = [ag.param(ordinary(256, 256)) for _ in range(4)]
    grads = {p: ag.tensor(make(256, 256)) for p in w}
    opt = optim.Adam(w, lr=0.0)
    return lambda: opt.step(grads)


COMPUTATIONS: list[Callable[[Make], Run]] = [
    product,
    elementwise,
    normalised,
    convolution,
    attention,
    reductions,
    training_step,
    step_of_tiny_gradients,
]


def seconds(run: Run) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what unusual numbers cost.")
    parser.add_argument("--runs", type=int, default=20, metavar="N", help="runs of each")
    parser.add_argument("--bound", type=float, default=2.0, metavar="X", help="largest ratio")
    args = parser.parse_args()
    pg.set_num_threads(1)
    print("CPU time with such data, in proportion to ordinary data; one thread")
    print(f"{'':<24}{'ms':>7} " + "".join(f"{name:>10}" for name in KINDS))
    slow = []
    for computation in COMPUTATIONS:
        runs = {"": computation(ordinary)}
        runs |= {name: computation(make) for name, make in KINDS.items()}
        best = dict.fromkeys(runs, float("inf"))
        for _ in range(args.runs):
            for name, run in runs.items():
                best[name] = min(best[name], seconds(run))
        title = computation.__name__.replace("_", " ")
        ratios = {name: best[name] / best[""] for name in KINDS}
        shown = "".join(f"{ratio:>10.2f}" for ratio in ratios.values())
        print(f"{title:<24}{1000 * best['']:>7.2f} {shown}", flush=True)
        slow += [f"{title}, {name}" for name, ratio in ratios.items() if ratio > args.bound]
    if slow:
        sys.exit("numerics.py: slower than the bound: " + "; ".join(slow))


if __name__ == "__main__":
    main()
