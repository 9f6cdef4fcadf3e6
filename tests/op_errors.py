"""Print how far each row of the op table is from the reference: python tests/op_errors.py."""

from __future__ import annotations

import numpy as np
from op_table import ROWS, Row

import pyggml as pg
from pyggml import ag
from pyggml.graph import OPS


def results(row: Row, device: str) -> list[np.ndarray]:
    """Return a row's value and gradients on a device, from inputs rounded to float32."""
    with pg.device(device):
        arrays = [a.astype(np.float32) if a.dtype.kind == "f" else a for a in row.inputs(20240)]
        tensors = [ag.tensor(a, requires_grad=a.dtype.kind == "f") for a in arrays]
        with ag.grad_tape():
            value = row.fn(*tensors)
        if value.requires_grad:
            ag.backward(value, seed=np.ones(value.shape))
        return [value.numpy(), *(t.grad.numpy() for t in tensors if t.grad is not None)]


def error(row: Row) -> float:
    """Return the largest difference, relative to the largest value or 1."""
    worst = 0.0
    for ours, right in zip(results(row, "cpu"), results(row, "reference"), strict=True):
        finite = np.isfinite(right)
        if finite.any():
            scale = max(1.0, float(np.abs(right[finite]).max()))
            worst = max(worst, float(np.abs(ours - right)[finite].max()) / scale)
    return worst


if __name__ == "__main__":
    errors = sorted(((error(row), row.name) for row in ROWS), reverse=True)
    print(f"{len(OPS)} ops, {len(ROWS)} rows; median error {errors[len(errors) // 2][0]:.1e}")
    for value, name in errors:
        print(f"{value:.1e} {name}")
