"""Devices: where values live and programs run.

Every C pointer has one Python owner, and closing one twice is harmless.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._ffi import ffi, lib, take_pending_exception
from .checks import positive_integer, shown
from .cpus import default_num_threads
from .dtypes import DType
from .errors import DeviceError, DeviceMemoryError
from .graph import Source, state
from .memory import LARGE, HostStorage, allocate, release_idle

if TYPE_CHECKING:
    from .plan import Plan, Program, Step


class Device:
    """A place where values live and programs run; get one with device(name).

    ``kind`` is cpu, reference, discrete (a card with memory of its own), integrated (a GPU that
    shares the CPU's), or software (a Vulkan driver that computes on the CPU).
    """

    name: str
    kind: str
    description = ""  # the maker's name for it
    double = False  # whether floats are float64
    own_kernels = False  # whether pyggml's own kernels run on it
    has_committed = False  # whether the last run had begun to change sources when it ended
    outputs: Sequence[Any] = ()  # storages that the run in progress computes
    # Plans are kept up to this number and to these bytes; the least recently used ones go first.
    max_plans = 64
    max_plan_bytes = 1 << 28

    def __init__(self) -> None:
        self.lock = threading.RLock()  # one program at a time
        self.plans: OrderedDict[tuple, Plan] = OrderedDict()

    def __repr__(self) -> str:
        return f"Device({self.name!r})"

    @property
    def memory_bytes(self) -> int | None:
        """The memory that the device has; None where it is the machine's."""
        return None

    def numpy_dtype(self, dtype: DType) -> np.dtype:
        """Return the NumPy type that numpy() gives for a value of this type."""
        return dtype.numpy

    def upload(self, array: np.ndarray, dtype: DType) -> Any:
        """Return new storage with the values of an array."""
        raise NotImplementedError

    def lend(self, array: np.ndarray, dtype: DType) -> Any:
        """Return storage for one run with the values of an array: its own memory where that fits.

        No program writes to its inputs, but for what optimizers change. Integers are copied always:
        no other thread may change indices once they have been checked.
        """
        return self.upload(array, dtype)

    def download(self, source: Source) -> np.ndarray:
        """Return a copy of a source's value."""
        raise NotImplementedError

    def write(self, source: Source, array: np.ndarray) -> None:
        """Overwrite a source's value in place."""
        raise NotImplementedError

    def integer_range(self, source: Source) -> tuple[int, int]:
        """Return the smallest and the largest element of an integer source."""
        array = self.download(source)
        return int(array.min()), int(array.max())

    def compile(self, program: Program) -> Plan:
        """Turn a program into a plan that can be run again and again."""
        raise NotImplementedError

    def working_bytes(self, program: Program) -> int:
        """Return the memory that a program's values between inputs and outputs would take."""
        with self.lock:
            plan = self.compile(program)
            try:
                return plan.working_bytes
            finally:
                plan.close()

    def fallbacks(self, program: Program) -> Sequence[Step]:
        """Return the steps of a program that the device cannot run and leaves to the CPU."""
        return ()

    def plan_for(self, key: tuple, make: Any) -> Plan:
        """Return the cached plan under a key; make() gives the program of one that is missing."""
        plan = self.plans.get(key)
        if plan is None:
            plan = self.plans[key] = self.compile(make())
            self._drop_old_plans()
        else:
            self.plans.move_to_end(key)
        return plan

    def _drop_old_plans(self) -> None:
        """Close plans until what is kept is within its bounds; the newest one stays."""
        nbytes = sum(plan.held_bytes for plan in self.plans.values())
        while len(self.plans) > 1 and (
            len(self.plans) > self.max_plans or nbytes > self.max_plan_bytes
        ):
            plan = self.plans.popitem(last=False)[1]
            nbytes -= plan.held_bytes
            plan.close()

    def clear_plans(self) -> None:
        """Free every cached plan and the working memory they share."""
        with self.lock:
            while self.plans:
                self.plans.popitem()[1].close()


class GgmlDevice(Device):
    """A backend of ggml, and one working buffer that all its plans share."""

    stops_for_signals = False  # whether a run can be stopped in the middle
    tiled_copies = True  # whether ggml's own way of copying a transpose is the quick one there

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0  # changes when the working buffer moves
        self._allocator: Any = None

    @property
    def buffer_type(self) -> Any:
        """ggml's type of the memory that programs work in."""
        raise NotImplementedError

    @property
    def allocator(self) -> Any:
        """ggml's graph allocator for the working buffer."""
        if self._allocator is None:
            self._allocator = lib.ggml_gallocr_new(self.buffer_type)
        return self._allocator

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
        """Return uninitialised storage."""
        raise NotImplementedError

    def compute(self, graph: Any) -> None:
        """Run a ggml graph."""
        raise NotImplementedError

    def clear_plans(self) -> None:
        with self.lock:
            super().clear_plans()
            if self._allocator is not None:
                lib.ggml_gallocr_free(self._allocator)
                self._allocator = None
                self.epoch += 1

    def check_status(self, status: int) -> None:
        """Raise unless ggml says that it has run a graph."""
        if status == lib.GGML_STATUS_SUCCESS:
            return
        exception = take_pending_exception()
        if exception is not None:
            raise exception
        if status == lib.GGML_STATUS_ALLOC_FAILED:
            raise DeviceMemoryError(
                f"{self.name}: ggml could not allocate its working memory for this graph"
            )
        raise DeviceError(f"{self.name}: ggml could not run the graph (status {int(status)})")


_INT32_POINTER = ffi.typeof("int32_t *")


class CpuDevice(GgmlDevice):
    """ggml's CPU backend: a thread pool that stays, and one working buffer that all plans share."""

    name = "cpu"
    kind = "cpu"
    stops_for_signals = True
    description = "ggml's CPU backend with pyggml's kernels"

    def __init__(self, n_threads: int | None = None, *, own_kernels: bool = True) -> None:
        super().__init__()
        self.own_kernels = own_kernels  # False: ggml's ops only, the lowering of every other device
        self.n_threads = n_threads or default_num_threads()
        self._backend: Any = None
        self._pool: Any = None
        self._active_threads = 0
        self._pid = 0
        self._working: HostStorage | None = None

    def working_buffer(self, size: int) -> Any:
        """Return the address of a working buffer of at least so many bytes."""
        if self._working is None or self._working.array.nbytes < size:
            self._working = None  # before asking for more
            self.epoch += 1
            self._working = allocate((max(size, 1),), np.dtype(np.uint8))
        return self._working.pointer

    def _drop_old_plans(self) -> None:
        count = len(self.plans)
        super()._drop_old_plans()
        if self._working is not None and len(self.plans) < count:
            needed = max(plan.working_bytes for plan in self.plans.values())
            if 2 * needed < self._working.array.nbytes:  # it was for a plan that is gone
                self._working = None
                self.epoch += 1

    def upload(self, array: np.ndarray, dtype: DType) -> HostStorage:
        encoded = dtype.encode(array)
        if array.size * dtype.size < LARGE:
            return HostStorage(np.array(encoded, dtype.stored, order="C"))
        storage = allocate(array.shape, dtype.stored)
        storage.array[...] = encoded
        return storage

    def lend(self, array: np.ndarray, dtype: DType) -> HostStorage:
        if dtype.is_float and array.dtype == dtype.stored and array.flags.carray:
            return HostStorage(array)
        return self.upload(array, dtype)

    def download(self, source: Source) -> np.ndarray:
        return source.dtype.decode(source.storage.array.copy())

    def write(self, source: Source, array: np.ndarray) -> None:
        with self.lock:
            source.storage.array[...] = source.dtype.encode(array)

    def integer_range(self, source: Source) -> tuple[int, int]:
        bounds = ffi.new("int32_t[2]")
        values = source.storage
        pointer = ffi.cast(_INT32_POINTER, values.pointer)
        lib.pg_range_i32(pointer, values.array.size, bounds, bounds + 1)
        return bounds[0], bounds[1]

    def empty(self, shape: tuple[int, ...], dtype: DType) -> HostStorage:
        """Return uninitialised storage."""
        return allocate(shape, dtype.stored)

    def compile(self, program: Program) -> Plan:
        from .ggml_plan import CpuPlan

        return CpuPlan(program, self)

    @property
    def buffer_type(self) -> Any:
        return lib.ggml_backend_cpu_buffer_type()

    def compute(self, graph: Any, n_threads: int = 1) -> None:
        """Run a ggml graph.

        Signals are looked at between nodes; an exception from their handlers is raised here.
        """
        self._start()
        if n_threads != self._active_threads:
            lib.ggml_backend_cpu_set_n_threads(self._backend, n_threads)
            self._active_threads = n_threads
        lib.pg_begin_run(graph)
        try:
            status = lib.ggml_backend_graph_compute(self._backend, graph)
        finally:  # Python raises KeyboardInterrupt as soon as the call returns
            self.has_committed = lib.pg_has_committed()
        if status != lib.GGML_STATUS_SUCCESS:
            self.check_status(status)

    def set_num_threads(self, n_threads: int) -> None:
        """Use n_threads workers from now on."""
        with self.lock:
            self.n_threads = n_threads
            self._stop()

    def clear_plans(self) -> None:
        with self.lock:
            super().clear_plans()
            self._working = None
            self.epoch += 1
            release_idle()

    def _start(self) -> None:
        if self._pid == os.getpid():
            return
        # A forked child has the parent's memory but none of its worker threads: it starts its own,
        # and leaves the parent's pool alone, since freeing it would wait for threads that are not
        # there.
        backend = lib.ggml_backend_cpu_init()
        if backend == ffi.NULL:
            raise DeviceError("cpu: ggml could not start its CPU backend")
        params = ffi.new("struct ggml_threadpool_params *")
        lib.ggml_threadpool_params_init(params, self.n_threads)
        params.poll = POLL
        pool = lib.ggml_threadpool_new(params)
        lib.ggml_backend_cpu_set_threadpool(backend, pool)
        lib.ggml_backend_cpu_set_abort_callback(
            backend, lib.pg_poll, ffi.cast("void *", SIGNAL_POLL_MS)
        )
        self._backend, self._pool, self._active_threads = backend, pool, 0
        self._pid = os.getpid()

    def _stop(self) -> None:
        if self._pid == os.getpid():
            self._pid = 0
            lib.ggml_backend_free(self._backend)
            lib.ggml_threadpool_free(self._pool)
            self._backend = self._pool = None

    def close(self) -> None:
        """Stop the workers. The device starts them again when it is used."""
        with self.lock:
            self._stop()


SIGNAL_POLL_MS = 50
POLL = 50
"""How eagerly idle workers look for work, 0 (sleep at once) to 100; ggml's own default."""


# ---- the devices of this process ----

VARIABLE = "PYGGML_DEVICE"  # the environment's choice of a default: a name, or auto

_devices: dict[str, Device] = {}
_default: Device | None = None
_found_vulkan = False
_lock = threading.RLock()


def _known() -> dict[str, Device]:
    if not _devices:
        from .reference import ReferenceDevice

        with _lock:
            if not _devices:
                cpu = CpuDevice()
                atexit.register(cpu.close)
                if hasattr(os, "register_at_fork"):
                    os.register_at_fork(after_in_child=_renew_locks)
                _devices.update(cpu=cpu, reference=ReferenceDevice())
    return _devices


def _with_vulkan() -> dict[str, Device]:
    """Return all devices. The first call loads the machine's Vulkan drivers, if there are any."""
    global _found_vulkan
    with _lock:
        if not _found_vulkan:
            from .vulkan import find_devices

            _known().update((device.name, device) for device in find_devices())
            _found_vulkan = True
        return _devices


def _renew_locks() -> None:
    """Take new locks: in a forked child nobody is left to release those that were held."""
    for found in _devices.values():
        found.lock = threading.RLock()


def devices() -> list[Device]:
    """Return the devices of this process: cpu, reference, and a vulkan0, vulkan1, ... for each GPU.

    Each has a name, a kind (see Device), a description, and memory_bytes.

    >>> import pyggml as pg
    >>> [device.name for device in pg.devices()][:2]
    ['cpu', 'reference']
    """
    return list(_with_vulkan().values())


def resolve_device(value: Device | str | None) -> Device:
    """Return the device of a name; None is the current one.

    Raises DeviceError if there is no such device.
    """
    if value is None:
        return state.device or _default or _first_default()
    if isinstance(value, Device):
        return value
    if not isinstance(value, str):
        raise DeviceError(f"device: needs a name or a Device; got {shown(value)}")
    found = _known().get(value) or _with_vulkan().get(value)
    if found is None:
        from .vulkan import what_to_do

        raise DeviceError(
            f"device: there is no {value!r}; this process has {', '.join(_devices)}; {what_to_do()}"
        )
    return found


def _first_default() -> Device:
    """Return the device that the environment asks for, the CPU if it asks for none."""
    global _default
    name = os.environ.get(VARIABLE, "").strip() or "cpu"
    if name == "auto":
        gpus = [d for d in _with_vulkan().values() if d.kind in ("discrete", "integrated")]
        gpus.sort(key=lambda gpu: gpu.kind != "discrete")
        chosen = [*gpus, _devices["cpu"]][0]
        logging.getLogger("pyggml").info("%s=auto: using %r", VARIABLE, chosen)
    else:
        try:
            chosen = resolve_device(name)
        except DeviceError as error:
            raise DeviceError(f"{VARIABLE}={name}: {error}") from None
    _default = chosen
    return chosen


def set_device(value: Device | str) -> None:
    """Make a device the default of this process, for all threads that have not chosen their own.

    The environment variable PYGGML_DEVICE sets the first default: a name, or auto for the first
    discrete or integrated GPU, and the CPU where there is none. Raises DeviceError, which names the
    devices there are, if there is no such device.
    """
    global _default
    _default = resolve_device(value)


class device:
    """Make a device current in this thread for the length of a with block.

    >>> import pyggml as pg
    >>> with pg.device("reference"):
    ...     print(pg.ag.tensor(1.0).dtype)
    float64
    """

    def __init__(self, value: Device | str) -> None:
        self.device = resolve_device(value)
        self._outer: list[Device | None] = []

    def __enter__(self) -> Device:
        self._outer.append(state.device)
        state.device = self.device
        return self.device

    def __exit__(self, *error: object) -> None:
        state.device = self._outer.pop()


def set_num_threads(n_threads: int) -> None:
    """Set how many CPU threads a run may use; small programs use one.

    At first there are as many as cores that this process may use. More of them than cores work too,
    slower: they take turns.

    Raises SettingError unless n_threads is a positive integer.
    """
    count = positive_integer("set_num_threads", "n_threads", n_threads, lib.GGML_MAX_N_THREADS)
    _cpu().set_num_threads(count)


def get_num_threads() -> int:
    """Return how many CPU threads a run may use."""
    return _cpu().n_threads


def _cpu() -> CpuDevice:
    cpu = _known()["cpu"]
    assert isinstance(cpu, CpuDevice)
    return cpu
