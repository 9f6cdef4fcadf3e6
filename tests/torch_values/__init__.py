"""Values that PyTorch computed, and the scripts that made them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def load(name: str) -> dict[str, np.ndarray]:
    """Return the arrays in one file by their names."""
    with np.load(Path(__file__).with_name(f"{name}.npz")) as file:
        index, values = json.loads(str(file["index"])), file["values"]
    arrays = {}
    for key, (dtype, shape) in index.items():
        size = int(np.prod(shape))
        arrays[key], values = values[:size].reshape(shape).astype(dtype), values[size:]
    return arrays
