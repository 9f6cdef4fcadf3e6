"""Memory of a ggml device, handed out in ranges of large blocks.

A block is one allocation of the driver, and drivers allow few of them (Vulkan promises 4096), while
a model has thousands of values. Free ranges of a size are kept for the next request of that size:
a training step frees and asks for the same sizes as the one before.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import deque
from typing import Any

from ._ffi import ffi, lib
from .errors import DeviceError, DeviceMemoryError
from .memory import next_serial

FIRST_BLOCK, LARGEST_BLOCK = 1 << 24, 1 << 28  # bytes; blocks grow with what is in use
LEAST_ALIGNMENT = 64  # bytes

_ADDRESS = ffi.typeof("uintptr_t")


class Block:
    """One buffer of ggml, and its free ranges (offset, size), ordered and never touching."""

    __slots__ = ("buffer", "base", "size", "free")

    def __init__(self, buffer: Any, size: int) -> None:
        self.buffer = buffer
        self.base = int(ffi.cast(_ADDRESS, lib.ggml_backend_buffer_get_base(buffer)))
        self.size = size
        self.free = [(0, size)]

    def take(self, size: int) -> int | None:
        """Return the offset of a range of this size, the first there is, or None."""
        for i, (offset, there) in enumerate(self.free):
            if there >= size:
                self.free[i : i + 1] = [(offset + size, there - size)] if there > size else []
                return offset
        return None

    def put_back(self, offset: int, size: int) -> None:
        """Free a range again, and join it with its free neighbours."""
        insort(self.free, (offset, size))
        i = self.free.index((offset, size))
        if i + 1 < len(self.free) and offset + size == self.free[i + 1][0]:
            size += self.free.pop(i + 1)[1]
            self.free[i] = (offset, size)
        if i and sum(self.free[i - 1]) == offset:
            self.free[i - 1 : i + 1] = [(self.free[i - 1][0], self.free[i - 1][1] + size)]

    def close(self) -> None:
        """Give the memory back to the driver; harmless when repeated."""
        if self.buffer is not None:
            lib.ggml_backend_buffer_free(self.buffer)
            self.buffer = None


class DeviceStorage:
    """The memory of one value on a device; it goes back to the block with its last user.

    ``serial`` is never used twice, unlike an address: a plan remembers by it what it is bound to.
    """

    __slots__ = ("memory", "block", "offset", "size", "nbytes", "pointer", "serial", "bounds")

    def __init__(
        self, memory: DeviceMemory, block: Block, offset: int, size: int, nbytes: int
    ) -> None:
        self.memory = memory
        self.block = block
        self.offset = offset
        self.size = size  # nbytes, rounded up
        self.nbytes = nbytes
        self.pointer = ffi.cast("void *", block.base + offset)
        self.serial = next_serial()
        self.bounds: tuple[int, int] | None = None  # of uploaded integers

    def __del__(self) -> None:
        # This may run at any moment, in any thread, even while ranges are handed out: no locks.
        self.memory.returned.append((self.block, self.offset, self.size))


class DeviceMemory:
    """All memory that values take on one device."""

    def __init__(self, buffer_type: Any, name: str) -> None:
        self.name = name
        self.buffer_type = buffer_type
        self.alignment = max(LEAST_ALIGNMENT, lib.ggml_backend_buft_get_alignment(buffer_type))
        self.blocks: list[Block] = []
        self.returned: deque[tuple[Block, int, int]] = deque()
        self._idle: dict[int, list[tuple[Block, int]]] = {}  # free ranges by size
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> DeviceStorage:
        """Return storage with arbitrary contents. Raises DeviceMemoryError if there is no room."""
        size = max(1, -(-nbytes // self.alignment)) * self.alignment
        with self._lock:
            self._gather()
            idle = self._idle.get(size)
            block, offset = idle.pop() if idle else self._take(size)
        return DeviceStorage(self, block, offset, size, nbytes)

    def reserved_bytes(self) -> int:
        """Return the bytes that are taken from the driver."""
        return sum(block.size for block in self.blocks)

    def used_bytes(self) -> int:
        """Return the bytes that values take."""
        with self._lock:
            self._gather()
            idle = sum(size * len(ranges) for size, ranges in self._idle.items())
            free = sum(size for block in self.blocks for _, size in block.free)
            return self.reserved_bytes() - idle - free

    def trim(self) -> None:
        """Give blocks that hold no value back to the driver."""
        with self._lock:
            self._gather()
            self._join()
            self._close_empty_blocks()

    def close(self, *, free: bool = True) -> None:
        """Free everything; harmless when repeated. Storage that is still held is lost.

        With free=False the driver keeps the blocks until the process ends.
        """
        with self._lock:
            for block in self.blocks:
                if not free:
                    block.buffer = None
                block.close()
            self.blocks = []
            self._idle.clear()

    # ---- with the lock held ----

    def _gather(self) -> None:
        while self.returned:
            block, offset, size = self.returned.popleft()
            if block.buffer is not None:
                self._idle.setdefault(size, []).append((block, offset))

    def _join(self) -> None:
        for size, ranges in self._idle.items():
            for block, offset in ranges:
                block.put_back(offset, size)
        self._idle.clear()

    def _take(self, size: int) -> tuple[Block, int]:
        for attempt in ("as it is", "with idle ranges joined"):
            for block in self.blocks:
                offset = block.take(size)
                if offset is not None:
                    return block, offset
            if attempt == "as it is":
                self._join()
        block = self._new_block(size)
        offset = block.take(size)
        assert offset is not None
        return block, offset

    def _new_block(self, size: int) -> Block:
        roomy = min(max(FIRST_BLOCK, self.reserved_bytes()), LARGEST_BLOCK)
        buffer = ffi.NULL
        if size < roomy:
            buffer = lib.ggml_backend_buft_alloc_buffer(self.buffer_type, roomy)
        if buffer == ffi.NULL:
            roomy = size
            buffer = lib.ggml_backend_buft_alloc_buffer(self.buffer_type, size)
        if buffer == ffi.NULL:
            self._close_empty_blocks()
            buffer = lib.ggml_backend_buft_alloc_buffer(self.buffer_type, size)
        if buffer == ffi.NULL:
            raise DeviceMemoryError(
                f"{self.name}: no memory for {size / 2**20:,.1f} MB; values on it take "
                f"{self.reserved_bytes() / 2**20:,.1f} MB; use a smaller batch or model"
            )
        self.blocks.append(Block(buffer, roomy))
        return self.blocks[-1]

    def _close_empty_blocks(self) -> None:
        for block in self.blocks:
            if block.free == [(0, block.size)]:
                block.close()
        self.blocks = [block for block in self.blocks if block.buffer is not None]


def check_open(storage: DeviceStorage) -> None:
    """Raise DeviceError if the device was closed under a value."""
    if storage.block.buffer is None:
        raise DeviceError(
            f"{storage.memory.name}: the device was closed, and this value went with it; copy "
            "values with .numpy() before close()"
        )
