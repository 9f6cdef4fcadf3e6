"""Write optimizers.npz: the steps of PyTorch's optimizers and the values of its schedules, for
tests/test_optim.py and tests/test_schedules.py.

    python tests/torch_values/make_optimizers.py        (needs torch, which the tests do not)

It holds the start and the gradients of four parameters, and for each case the parameters after each
step, all in double precision: start/NAME, gradients/NAME, CASE/NAME, (steps, ...). The vector gets
no gradient in some steps (nan in gradients/vector). schedules/NAME is the learning rate before each
update.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import optim
from torch.optim import lr_scheduler

FILE = Path(__file__).with_name("optimizers.npz")
SEED = 5
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (3, 5), "vector": (5,), "cube": (2, 3, 4), "number": ()
}  # fmt: skip
STEPS = 10
WITHOUT_VECTOR = (2, 5, 6)
FLOAT32_EPS = float(np.finfo(np.float32).eps)

OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD, nesterov, decay": lambda p: optim.SGD(
        p, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.1
    ),
    "Adam": lambda p: optim.Adam(p, lr=0.1),
    "Adam, decay": lambda p: optim.Adam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.3),
    "AdamW": lambda p: optim.AdamW(p, lr=0.1, betas=(0.8, 0.95), weight_decay=0.3),
    "AdamW, groups": lambda p: optim.AdamW(
        [{"params": p[:2], "weight_decay": 0.0}, {"params": p[2:], "lr": 0.05}],
        lr=0.1,
        weight_decay=0.2,
    ),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.02),
    "RMSprop, momentum": lambda p: optim.RMSprop(p, lr=0.02, alpha=0.9, momentum=0.5),
    "RMSprop, centered, decay": lambda p: optim.RMSprop(
        p, lr=0.02, alpha=0.9, centered=True, weight_decay=0.1
    ),
    "RMSprop, centered, momentum": lambda p: optim.RMSprop(
        p, lr=0.02, alpha=0.9, eps=1e-2, centered=True, momentum=0.5
    ),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "Adagrad, all settings": lambda p: optim.Adagrad(
        p, lr=0.1, lr_decay=0.1, weight_decay=0.2, initial_accumulator_value=0.5, eps=1e-3
    ),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.1, eps=(FLOAT32_EPS, 1e-3)),
    "Adafactor, all settings": lambda p: optim.Adafactor(
        p, lr=0.5, beta2_decay=-0.5, eps=(0.1, 0.5), d=1.5, weight_decay=0.1
    ),
}

SCHEDULES: dict[str, tuple[int, Callable[[optim.Optimizer], Any]]] = {
    "step": (12, lambda o: lr_scheduler.StepLR(o, step_size=4, gamma=0.5)),
    "linear": (12, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.25, total_iters=8)),
    "polynomial": (12, lambda o: lr_scheduler.PolynomialLR(o, total_iters=8, power=2.5)),
    "cosine": (11, lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10, eta_min=0.1)),
    "restarts": (
        40, lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=5, T_mult=2, eta_min=0.1)
    ),
    "equal restarts": (
        18, lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=5, T_mult=1)
    ),
    "one cycle": (20, lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=20)),
    "one cycle, settings": (
        15,
        lambda o: lr_scheduler.OneCycleLR(
            o, max_lr=1.0, total_steps=15, pct_start=0.5, div_factor=5, final_div_factor=100
        ),
    ),
    "warmup, cosine": (
        24,
        lambda o: lr_scheduler.SequentialLR(
            o,
            [
                lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=8),
                lr_scheduler.CosineAnnealingLR(o, T_max=16),
            ],
            milestones=[8],
        ),
    ),
}  # fmt: skip

METRICS = [5.0, 4.0, 4.0, 3.9999, 4.1, 3.0, 3.5, 3.5, 3.5, 3.5, 3.5, float("nan"), 2.9, 3, 3, 3, 3]


def steps_of(
    make: Callable[[list[torch.Tensor]], optim.Optimizer],
    start: dict[str, np.ndarray],
    gradients: dict[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Return the parameters after each step of an optimizer."""
    params = {name: torch.nn.Parameter(torch.from_numpy(start[name].copy())) for name in SHAPES}
    optimizer = make(list(params.values()))
    trace: dict[str, list[np.ndarray]] = {name: [] for name in SHAPES}
    for step in range(STEPS):
        for name, parameter in params.items():
            gradient = gradients[name][step]
            is_given = not np.isnan(gradient).any()
            parameter.grad = torch.from_numpy(np.array(gradient)) if is_given else None
        optimizer.step()
        for name, parameter in params.items():
            trace[name].append(parameter.detach().numpy().copy())
    return {name: np.stack(values) for name, values in trace.items()}


def rates_of(count: int, make: Callable[[optim.Optimizer], Any]) -> np.ndarray:
    """Return the learning rates of count updates."""
    optimizer = optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for step in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step < count - 1:
            scheduler.step()
    return np.array(rates)


def rates_on_plateau(**settings: Any) -> np.ndarray:
    """Return the learning rate after each of METRICS."""
    optimizer = optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, **settings)
    rates = []
    for metric in METRICS:
        scheduler.step(metric)
        rates.append(optimizer.param_groups[0]["lr"])
    return np.array(rates)


def main() -> None:
    """Write the file."""
    generator = np.random.default_rng(SEED)
    values = {}
    start = {name: generator.standard_normal(shape) for name, shape in SHAPES.items()}
    # Of different sizes, so that each method's normalisation has something to do.
    scale = np.geomspace(0.05, 3.0, STEPS)[::-1]
    gradients = {
        name: np.stack([s * generator.standard_normal(shape) for s in generator.permutation(scale)])
        for name, shape in SHAPES.items()
    }
    gradients["vector"][list(WITHOUT_VECTOR)] = np.nan
    for name in SHAPES:
        values[f"start/{name}"], values[f"gradients/{name}"] = start[name], gradients[name]
    for case, make in OPTIMIZERS.items():
        for name, trace in steps_of(make, start, gradients).items():
            values[f"{case}/{name}"] = trace
    warnings.simplefilter("ignore")  # SequentialLR calls step() in a way that PyTorch deprecates
    for case, (count, schedule) in SCHEDULES.items():
        values[f"schedules/{case}"] = rates_of(count, schedule)
    values["plateau/metrics"] = np.array(METRICS)
    values["plateau/relative"] = rates_on_plateau(factor=0.5, patience=2)
    values["plateau/absolute"] = rates_on_plateau(
        factor=0.1, patience=1, threshold=0.5, threshold_mode="abs", cooldown=2, min_lr=0.05
    )
    values["plateau/max"] = rates_on_plateau(mode="max", factor=0.5, patience=1)
    np.savez_compressed(FILE, **values)
    print(f"{FILE.name}: {len(values)} arrays, {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
