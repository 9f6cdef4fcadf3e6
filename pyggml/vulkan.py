"""Vulkan devices: any GPU with a Vulkan driver, through ggml's Vulkan backend.

Values stay in device memory; a training step moves the batch up and the loss down. A program whose
ops the backend has runs there as one graph. What it lacks, the CPU takes, through ggml's scheduler.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._ffi import ffi, lib
from .device import GgmlDevice, default_num_threads
from .device_memory import DeviceMemory, DeviceStorage, check_open
from .dtypes import DType
from .errors import DeviceError
from .ggml_plan import GgmlPlan
from .graph import Source
from .lowering import GgmlTensor
from .plan import Program, Step

# Drivers that compute on the CPU. ggml calls every device that is not integrated a GPU.
SOFTWARE = ("llvmpipe", "lavapipe", "SwiftShader", "Microsoft Basic Render")

# Mesa's lavapipe (seen in 22.3) goes on using a buffer that was bound to a shader after it was
# freed. So what a software device has allocated stays allocated until the process ends.

# Read by ggml when it opens a device.
SETTINGS = {
    # The scheduler would let it reorder a graph without regard to what is changed in place.
    "GGML_VK_DISABLE_GRAPH_OPTIMIZE": "1",
}
# Its f32 products otherwise round their operands to f16, which ends at 65504: in its shaders, and,
# whatever those do, in the matrix units of cards that have them.
FULL_PRECISION = {
    "GGML_VK_DISABLE_F16": "1",
    "GGML_VK_DISABLE_COOPMAT": "1",
    "GGML_VK_DISABLE_COOPMAT2": "1",
}
HALF = "PYGGML_VULKAN_HALF"  # the environment's leave to round so


MESSAGE_SIZE = 500  # bytes for what a driver says


@dataclass
class Traffic:
    """Bytes that went to and from a device's memory."""

    up: int = 0
    down: int = 0


class VulkanDevice(GgmlDevice):
    """One device of ggml's Vulkan backend, opened when it is first used.

    ``traffic`` counts the bytes that it has exchanged with the CPU.
    """

    def __init__(self, handle: Any, index: int) -> None:
        super().__init__()
        self.name = f"vulkan{index}"
        self.description = ffi.string(lib.ggml_backend_dev_description(handle)).decode()
        self.kind = _kind_of(handle, self.description)
        self.keeps_buffers = self.kind == "software"  # see above
        # Tiles keep neighbouring threads at neighbouring addresses, of which a CPU has no use: it
        # spends five times as long on their barriers.
        self.tiled_copies = self.kind != "software"
        self.traffic = Traffic()
        self._handle = handle
        self._pid = os.getpid()
        self._memory: DeviceMemory | None = None
        self._backend: Any = None
        self._cpu: Any = None
        self._failure: str | None = None  # what the driver said when it failed
        self._message = ffi.new("char[]", MESSAGE_SIZE)

    def __repr__(self) -> str:
        size = f"{self.memory_bytes / 2**30:.1f} GB"
        return f"Device({self.name!r}, {self.kind}, {self.description!r}, {size})"

    @property
    def memory_bytes(self) -> int:
        sizes = ffi.new("size_t[2]")
        lib.ggml_backend_dev_memory(self._handle, sizes, sizes + 1)
        return sizes[1]

    # ---- values ----

    def upload(self, array: np.ndarray, dtype: DType) -> DeviceStorage:
        storage = self.empty(array.shape, dtype)
        self._set(storage, array, dtype)
        if not dtype.is_float:
            storage.bounds = int(array.min()), int(array.max())
        return storage

    def download(self, source: Source) -> np.ndarray:
        array = np.empty(source.shape, source.dtype.stored)
        storage = source.storage
        with self.lock:
            header = self._header_at(storage)
            self._call(lib.pg_tensor_get, header, ffi.from_buffer(array), array.nbytes)
            self.traffic.down += array.nbytes
        return source.dtype.decode(array)

    def write(self, source: Source, array: np.ndarray) -> None:
        self._set(source.storage, np.broadcast_to(array, source.shape), source.dtype)
        source.storage.bounds = None

    def integer_range(self, source: Source) -> tuple[int, int]:
        return source.storage.bounds or super().integer_range(source)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> DeviceStorage:
        with self.lock:
            return self.memory.allocate(int(np.prod(shape, dtype=np.int64)) * dtype.size)

    @property
    def memory(self) -> DeviceMemory:
        """What hands out the memory of values."""
        self._open()
        assert self._memory is not None
        return self._memory

    def _set(self, storage: DeviceStorage, array: np.ndarray, dtype: DType) -> None:
        array = np.ascontiguousarray(dtype.encode(array), dtype.stored)
        with self.lock:
            header = self._header_at(storage)
            self._call(lib.pg_tensor_set, header, ffi.from_buffer(array), array.nbytes)
            self.traffic.up += array.nbytes

    def _header_at(self, storage: DeviceStorage) -> GgmlTensor:
        """Return a tensor of bytes that begins at a storage: what ggml copies from and to."""
        check_open(storage)
        self._header.buffer = storage.block.buffer
        self._header.data = storage.pointer
        return self._header

    # ---- programs ----

    def compile(self, program: Program) -> VulkanPlan:
        self._open()
        return VulkanPlan(program, self)

    def fallbacks(self, program: Program) -> Sequence[Step]:
        with self.lock:
            plan = self.compile(program)
            try:
                return plan.fallbacks
            finally:
                plan.close()

    def compute(self, graph: Any) -> None:
        self._run(lib.pg_graph_compute, self._backend, graph)

    def compute_scheduled(self, scheduler: Any, graph: Any) -> None:
        """Run a graph of which the CPU takes a part."""
        self._run(lib.pg_sched_graph_compute, scheduler, graph)

    def _run(self, function: Any, *arguments: Any) -> None:
        # ggml's Vulkan backend cannot be told to stop. A graph cut into parts would wait for the
        # GPU after each, and lose what is fused across the cuts. So signals and deadlines wait.
        lib.pg_begin_run(ffi.NULL)
        try:
            self._call(function, *arguments)
        finally:  # Python raises KeyboardInterrupt as soon as the call returns
            self.has_committed = lib.pg_has_committed()

    def _call(self, function: Any, *arguments: Any) -> None:
        """Call a function that returns a status, in which the driver may fail."""
        self._check_usable()
        status = function(*arguments, self._message, MESSAGE_SIZE)
        if self._message[0] != b"\0":
            self._failure = ffi.string(self._message).decode(errors="replace")
            self._check_usable()
        self.check_status(status)

    def can_run(self, node: GgmlTensor) -> bool:
        """Tell whether the backend has a graph's node."""
        return bool(lib.ggml_backend_dev_supports_op(self._handle, node))

    def new_scheduler(self, size: int) -> Any:
        """Return a scheduler for graphs of that many tensors, between this device and the CPU."""
        if self._cpu is None:
            self._cpu = lib.ggml_backend_cpu_init()
            lib.ggml_backend_cpu_set_n_threads(self._cpu, default_num_threads())
        backends = ffi.new("ggml_backend_t[]", [self._backend, self._cpu])
        scheduler = lib.ggml_backend_sched_new(backends, ffi.NULL, 2, size, False, False)
        if scheduler == ffi.NULL:
            raise DeviceError(f"{self.name}: ggml could not make a scheduler")
        return scheduler

    @property
    def buffer_type(self) -> Any:
        return lib.ggml_backend_dev_buffer_type(self._handle)

    def clear_plans(self) -> None:
        with self.lock:
            if self.keeps_buffers:
                self.retire_allocator()
            super().clear_plans()
            if self._memory is not None and not self.keeps_buffers:
                self._memory.trim()

    def retire_allocator(self) -> None:
        """Start a new working buffer without freeing the one there is."""
        self._allocator = None
        self.epoch += 1

    # ---- opening and closing ----

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise DeviceError(
                f"{self.name}: the driver failed: {self._failure}; values on this device are lost, "
                "and this process cannot use it any more; start again from what was saved"
            )
        if self._pid != os.getpid():
            raise DeviceError(
                f"{self.name}: a Vulkan device cannot be used after os.fork(); use the start "
                "method 'spawn' (multiprocessing.set_start_method), or the cpu in this process"
            )

    def _open(self) -> None:
        self._check_usable()
        if self._backend is not None:
            return
        half = os.environ.get(HALF, "").strip() == "1"
        with self.lock, _environment(SETTINGS if half else SETTINGS | FULL_PRECISION):
            self._backend = lib.ggml_backend_dev_init(self._handle, ffi.NULL)
            if self._backend == ffi.NULL:
                self._backend = None
                raise DeviceError(f"{self.name}: ggml could not open {self.description}")
            parameters = {"mem_size": 2 * lib.ggml_tensor_overhead(), "no_alloc": True}
            context = lib.ggml_init(ffi.new("struct ggml_init_params *", parameters)[0])
            self._context = ffi.gc(context, lib.ggml_free)
            self._header = lib.ggml_new_tensor_1d(self._context, lib.GGML_TYPE_I8, 1 << 48)
            self._memory = DeviceMemory(self.buffer_type, self.name)
            atexit.register(self.close)

    def close(self) -> None:
        """Free all that the device holds; values on it are lost. It opens again when it is used."""
        with self.lock:
            if self._backend is None or self._failure is not None or self._pid != os.getpid():
                return
            self.clear_plans()
            assert self._memory is not None
            self._memory.close(free=not self.keeps_buffers)
            lib.ggml_backend_free(self._backend)
            if self._cpu is not None:
                lib.ggml_backend_free(self._cpu)
            self._backend = self._cpu = self._memory = None
            atexit.unregister(self.close)


class VulkanPlan(GgmlPlan):
    """A compiled program on a Vulkan device, and on the CPU where the device lacks an op."""

    device: VulkanDevice

    def __init__(self, program: Program, device: VulkanDevice) -> None:
        self._scheduler: Any = None
        super().__init__(program, device)

    def _build(self, program: Program, capacity: int) -> None:
        self.fallbacks: list[Step] = []
        self._lacking: set[GgmlTensor] = set()
        self._capacity = capacity
        super()._build(program, capacity)

    def _lowered(self, step: Step, first: int) -> None:
        nodes = (
            lib.ggml_graph_node(self.graph, i)
            for i in range(first, lib.ggml_graph_n_nodes(self.graph))
        )
        lacking = [node for node in nodes if not self.device.can_run(node)]
        if lacking:
            self.fallbacks.append(step)
            self._lacking.update(lacking)
        if step.node.op.mutates and any(node.view_src != ffi.NULL for node in lacking):
            # ggml's scheduler ends the process rather than run it elsewhere.
            raise DeviceError(
                f"{step.node.op.name}: {self.device.name} cannot change a value in place by this op"
            )

    def _is_elsewhere(self, tensor: GgmlTensor) -> bool:
        return tensor in self._lacking

    def _point(self, inputs: list[DeviceStorage], outputs: list[DeviceStorage]) -> None:
        bound = self._bound
        for i, storage in enumerate((*inputs, *outputs)):
            if bound[i] != storage.serial:
                check_open(storage)
                tensor = self._external[i]
                tensor.data = storage.pointer
                tensor.buffer = storage.block.buffer
                bound[i] = storage.serial

    def _allocate(self) -> None:
        device = self.device
        if not self._lacking:
            if device.keeps_buffers:
                self._forget_addresses()
                here = lib.ggml_gallocr_get_buffer_size(device.allocator, 0)
                if self._planned_bytes() > here:
                    device.retire_allocator()
            super()._allocate()
        elif self._scheduler is None:
            self._scheduler = device.new_scheduler(2 * self._capacity)
        self.epoch = device.epoch

    def _compute(self) -> None:
        if self._scheduler is None:
            self.device.compute(self.graph)
        else:
            self.device.compute_scheduled(self._scheduler, self.graph)

    @property
    def held_bytes(self) -> int:
        nbytes = super().held_bytes
        if self._scheduler is not None:
            for backend in (self.device._backend, self.device._cpu):
                nbytes += lib.ggml_backend_sched_get_buffer_size(self._scheduler, backend)
        return nbytes

    def close(self) -> None:
        if self._scheduler is not None:
            if not self.device.keeps_buffers:
                lib.ggml_backend_sched_free(self._scheduler)
            self._scheduler = None
        super().close()


# ---- finding them ----


def find_devices() -> Iterator[VulkanDevice]:
    """Yield the Vulkan devices that ggml offers.

    There are none without a driver, or in a build without Vulkan.
    """
    registry = lib.ggml_backend_reg_by_name(b"Vulkan")
    if registry != ffi.NULL:
        for index in range(lib.ggml_backend_reg_dev_count(registry)):
            yield VulkanDevice(lib.ggml_backend_reg_dev_get(registry, index), index)


def is_built() -> bool:
    """Tell whether this build of pyggml has the Vulkan backend."""
    if hasattr(lib, "ggml_backend_vk_reg"):
        return True
    return lib.ggml_backend_reg_by_name(b"Vulkan") != ffi.NULL  # a plug-in of a portable build


def what_to_do() -> str:
    """Return what makes a missing Vulkan device appear."""
    if not is_built():
        return (
            "this build of pyggml is without Vulkan: `make vulkan-deps` gets its tools on Debian "
            "and Ubuntu (the README names other systems'), and `python build_ggml.py --vulkan on` "
            "builds with it"
        )
    return (
        "Vulkan finds what its drivers offer: install the GPU's driver, and see `vulkaninfo "
        "--summary`; GGML_VK_VISIBLE_DEVICES=0 offers a software driver such as Mesa's, too"
    )


def _kind_of(handle: Any, description: str) -> str:
    if any(name.lower() in description.lower() for name in SOFTWARE):
        return "software"
    is_integrated = lib.ggml_backend_dev_type(handle) == lib.GGML_BACKEND_DEVICE_TYPE_IGPU
    return "integrated" if is_integrated else "discrete"


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set environment variables that are not set, for the length of a with block."""
    added = [name for name in settings if name not in os.environ]
    os.environ.update((name, settings[name]) for name in added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
