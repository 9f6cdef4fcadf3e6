"""The `reference` device: every op's NumPy formula in float64, run over the same tape.

Slow, and right: the oracle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from .deadline import check_deadline
from .device import Device
from .dtypes import DType
from .graph import Source
from .memory import asking_for_memory
from .plan import Program, Step


class ReferenceStorage:
    """A float64 (or integer) array."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        self.array = array


class ReferenceDevice(Device):
    """NumPy in double precision."""

    name = "reference"
    kind = "reference"
    description = "NumPy in double precision: slow, and right"
    double = True

    def numpy_dtype(self, dtype: DType) -> np.dtype:
        return np.dtype(np.float64) if dtype.is_float else dtype.numpy

    def upload(self, array: np.ndarray, dtype: DType) -> ReferenceStorage:
        return ReferenceStorage(
            np.array(_rounded(array, dtype), self.numpy_dtype(dtype), order="C")
        )

    def download(self, source: Source) -> np.ndarray:
        return source.storage.array.copy()

    def write(self, source: Source, array: np.ndarray) -> None:
        with self.lock:
            source.storage.array[...] = _rounded(array, source.dtype)

    def compile(self, program: Program) -> ReferencePlan:
        return ReferencePlan(program, self)


BYTES_PER_STEP = 500  # of a program's Python objects, roughly


def _rounded(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Return the nearest values that a half type has; for other types the array itself."""
    return dtype.decode(dtype.encode(array)) if dtype.is_half else array


class ReferencePlan:
    """A program as a list of NumPy calls; a value is dropped after its last use."""

    fallbacks: Sequence[Step] = ()

    def __init__(self, program: Program, device: ReferenceDevice) -> None:
        self.program = program
        self.device = device
        self.uses = Counter(i for step in [*program.steps, *program.effects] for i in step.inputs)
        self.uses.update(program.outputs)

    def run(self, sources: Sequence[Source], given: Sequence[Source]) -> list[Any]:
        program = self.program
        values: dict[Step, np.ndarray] = {
            step: sources[index].storage.array for index, step in program.sources
        }
        values.update(
            (step, source.storage.array) for step, source in zip(program.given, given, strict=True)
        )
        left = self.uses.copy()
        largest = max((step.node.shape for step in program.steps), key=prod, default=())
        with np.errstate(all="ignore"), asking_for_memory("reference", largest):
            for step in program.steps:
                check_deadline()
                self._run(step, values)
                for parent in step.inputs:
                    left[parent] -= 1
                    if not left[parent]:
                        del values[parent]
            outputs = [ReferenceStorage(np.array(values[step])) for step in program.outputs]
            for step in program.effects:
                self._run(step, values)
        return outputs

    def _run(self, step: Step, values: dict[Step, np.ndarray]) -> None:
        node = step.node
        result = node.op.reference(*(values[i] for i in step.inputs), **dict(node.settings))
        if node.op.mutates:
            for index, changed in zip(node.op.mutates, result, strict=True):
                target = step.inputs[index]
                values[target][...] = _rounded(changed, target.node.dtype)
            values[step] = values[step.inputs[node.op.mutates[0]]]
            return
        result = np.asarray(result)
        assert result.shape == node.shape, f"{node.op.name}: {result.shape} is not {node.shape}"
        result = _rounded(result, node.dtype)
        values[step] = result.astype(self.device.numpy_dtype(node.dtype), copy=False)

    @property
    def working_bytes(self) -> int:
        return sum(
            prod(step.node.shape) * self.device.numpy_dtype(step.node.dtype).itemsize
            for step in self.program.steps
        )

    @property
    def held_bytes(self) -> int:
        return BYTES_PER_STEP * (len(self.program.steps) + len(self.program.effects))

    def close(self) -> None:
        pass
