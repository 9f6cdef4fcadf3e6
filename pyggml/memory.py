"""Host memory that NumPy and ggml's CPU backend share.

Large blocks are used again: a training step frees and asks for the same sizes as the one before,
and fresh pages from the system cost more than many kernels do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import numpy as np

from ._ffi import ffi
from .errors import DeviceMemoryError

ALIGNMENT = 64  # bytes: one cache line, one AVX-512 register
LARGE = 1 << 16  # bytes: aligning and pooling a smaller block costs more than it gains
MAX_IDLE = 1 << 28  # bytes of free blocks that are kept for the next step

next_serial = itertools.count(1).__next__
_idle: dict[int, list[np.ndarray]] = {}
_ADDRESS = ffi.typeof("uintptr_t")


@contextmanager
def asking_for_memory(op: str, shape: tuple[int, ...]) -> Iterator[None]:
    """Turn NumPy's MemoryError in the block into a DeviceMemoryError that says what asked."""
    try:
        yield
    except MemoryError:
        raise DeviceMemoryError(
            f"{op}: no memory for numbers of shape {shape}; make it smaller"
        ) from None


class HostStorage:
    """The memory of one value. NumPy owns it.

    ``serial`` is never used twice, unlike an address: a plan remembers by it what it is bound to.
    """

    __slots__ = ("array", "pointer", "serial")

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.pointer = ffi.from_buffer(array)
        self.serial = next_serial()


class _LargeStorage(HostStorage):
    """Memory that goes back to the free blocks with its last user."""

    __slots__ = ("block",)

    def __init__(self, array: np.ndarray, block: np.ndarray) -> None:
        super().__init__(array)
        self.block = block

    def __del__(self) -> None:
        keep_idle(self.block)


def keep_idle(block: np.ndarray) -> None:
    """Keep a block for the next request of its size; let go of the sizes not asked for lately."""
    if block.nbytes > MAX_IDLE:
        return
    _idle.setdefault(block.nbytes, []).append(block)
    try:
        while idle_bytes() > MAX_IDLE:
            oldest = next(iter(_idle))
            if _idle[oldest]:
                _idle[oldest].pop()
            else:
                del _idle[oldest]
    except (KeyError, IndexError, StopIteration, RuntimeError):
        pass  # another thread was at the same: what is left over goes next time


def idle_bytes() -> int:
    """Return the bytes of free blocks that are kept."""
    return sum(size * len(blocks) for size, blocks in list(_idle.items()))


def size_class(nbytes: int) -> int:
    """Return nbytes rounded up by at most an eighth, so that nearly equal requests share blocks."""
    step = 1 << max(nbytes.bit_length() - 4, 6)
    return -(-nbytes // step) * step


def release_idle() -> None:
    """Give the free blocks back to the system."""
    _idle.clear()


def allocate(shape: tuple[int, ...], dtype: np.dtype) -> HostStorage:
    """Return storage with uninitialised elements. Raises DeviceMemoryError if there is no room."""
    nbytes = prod(shape) * dtype.itemsize
    if nbytes < LARGE:
        return HostStorage(np.empty(shape, dtype))
    size = size_class(nbytes + ALIGNMENT)
    blocks = _idle.pop(size, [])
    if blocks:
        _idle[size] = blocks  # the size asked for last
    try:
        block = blocks.pop()
    except IndexError:
        try:
            block = np.empty(size, np.uint8)
        except MemoryError:
            raise DeviceMemoryError(
                f"cpu: no memory for {nbytes / 2**20:,.1f} MB, shape {shape}"
            ) from None
    start = -int(ffi.cast(_ADDRESS, ffi.from_buffer(block))) % ALIGNMENT
    return _LargeStorage(block[start : start + nbytes].view(dtype).reshape(shape), block)
