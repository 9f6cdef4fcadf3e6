"""A program as a ggml graph: built once, its working memory planned once, run many times.

Sources and outputs live in memory of their own, so nothing that a person holds is overwritten by a
later run; everything in between lives in the device's working buffer, which all plans share.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import itemgetter
from sys import getrefcount
from typing import TYPE_CHECKING, Any

from . import _ffi
from ._ffi import ffi, lib
from .device import _devices
from .errors import DeviceMemoryError
from .graph import Node, Source, state
from .lowering import GgmlTensor, Lowering, shape_of
from .memory import LARGE
from .plan import Program, Step
from .remat import work_of

if TYPE_CHECKING:
    from .device import CpuDevice, GgmlDevice

TENSORS_PER_STEP = 4  # a first guess; a program that needs more is built again with twice as many
SPARE_TENSORS = 64  # more than any single op makes
BYTES_PER_STEP = 200  # of Python objects that stand for one, roughly


class _TooSmall(Exception):
    """The ggml context is full."""


class GgmlPlan:
    """A compiled program on one of ggml's backends."""

    fallbacks: Sequence[Step] = ()  # the steps that another backend takes

    def __init__(self, program: Program, device: GgmlDevice) -> None:
        self.device = device
        capacity = (
            TENSORS_PER_STEP * (len(program.steps) + len(program.effects)) + 4 * SPARE_TENSORS
        )
        while True:
            try:
                self._build(program, capacity)
                break
            except _TooSmall:
                capacity *= 2
            finally:
                state.lowering = None
        self.epoch = -1  # of the device's working buffer when this plan got its places in it

    def _build(self, program: Program, capacity: int) -> None:
        size = capacity * lib.ggml_tensor_overhead() + lib.ggml_graph_overhead_custom(
            capacity, False
        )
        parameters = ffi.new("struct ggml_init_params *", {"mem_size": size, "no_alloc": True})
        context = lib.ggml_init(parameters[0])
        if context == ffi.NULL:
            raise DeviceMemoryError(f"plan: no memory for a graph of {capacity} tensors")
        self.context = ffi.gc(context, lib.ggml_free)
        self.graph = lib.ggml_new_graph_custom(self.context, capacity, False)
        full = size - SPARE_TENSORS * lib.ggml_tensor_overhead()

        self.nodes: list[tuple[int, Node]] = []  # and the first place of each in the graph
        self._commits = False  # whether the graph says when it begins to change sources
        b = Lowering(self.context, self.graph, self.device.own_kernels, self.device.tiled_copies)
        made: dict[Step, GgmlTensor] = {}
        self.input_indices = [index for index, _ in program.sources]
        self.input_tensors: list[GgmlTensor] = []
        for step in (*(step for _, step in program.sources), *program.given):
            tensor = made[step] = b.new(step.node.shape, step.node.dtype)
            self.input_tensors.append(tensor)

        def lower(step: Step) -> None:
            if lib.ggml_used_mem(self.context) > full:
                raise _TooSmall
            node = step.node
            if node.op.mutates and not self._commits and self.device.stops_for_signals:
                b.add(lib.pg_commit(self.context))
                self._commits = True
            inputs = [made[i] for i in step.inputs]
            first = lib.ggml_graph_n_nodes(self.graph)
            self.nodes.append((first, node))
            state.lowering = node
            made[step] = b.add(node.op.lower(b, *inputs, **dict(node.settings)))
            self._lowered(step, first)

        for step in program.steps:
            lower(step)
        self.output_specs = [(step.node.shape, step.node.dtype) for step in program.outputs]
        self.output_tensors: list[GgmlTensor] = []
        taken: set[GgmlTensor] = set()
        for step in program.outputs:
            if lib.ggml_used_mem(self.context) > full:
                raise _TooSmall
            tensor = made[step]
            # An output needs memory of its own: views, inputs, and what is an output already are
            # copied.
            is_shared = tensor.view_src != ffi.NULL or tensor.op == lib.GGML_OP_NONE
            if is_shared or tensor in taken or self._is_elsewhere(tensor):
                tensor = b.add(lib.ggml_cont(self.context, tensor))
            lib.ggml_set_output(tensor)  # not to be fused away
            taken.add(tensor)
            self.output_tensors.append(tensor)
        for step in program.effects:
            lower(step)

        self._scratch = b.made[len(self.input_tensors) :]
        external = [*self.input_tensors, *self.output_tensors]
        self._external = ffi.new("struct ggml_tensor *[]", external)
        self._n_external = len(external)
        self._bound = [0] * self._n_external  # serial numbers of storages
        sizes = [prod(shape) * dtype.size for shape, dtype in self.output_specs]
        self._large = [i for i, size in enumerate(sizes) if size >= LARGE]
        self._kept: list[Any] = [None] * len(sizes)  # storage of small outputs
        self._kept_bytes = sum(size for size in sizes if size < LARGE)

    def _lowered(self, step: Step, first: int) -> None:
        """Look at the graph's nodes from the first on, which are what a step became."""

    def _is_elsewhere(self, tensor: GgmlTensor) -> bool:
        """Tell whether another backend computes a tensor, so that it cannot be an output here."""
        return False

    def _bind(self, inputs: list[Any], outputs: list[Any]) -> None:
        """Point every tensor outside the working buffer at its memory."""
        self._point(inputs, outputs)
        if self.epoch != self.device.epoch:
            self._allocate()
        lib.pg_refresh_views(self.graph)

    def _point(self, inputs: list[Any], outputs: list[Any]) -> None:
        bound = self._bound
        for i, storage in enumerate((*inputs, *outputs)):
            if bound[i] != storage.serial:
                self._external[i].data = storage.pointer
                bound[i] = storage.serial

    def _allocate(self) -> None:
        """Give every other tensor its place in the working buffer.

        The buffer grows if this plan needs more than any before.
        """
        allocator = self.device.allocator
        self._forget_addresses()
        size = lib.ggml_gallocr_get_buffer_size(allocator, 0)
        # Reserving is not optional: to ggml a graph with as many nodes, none of them larger, is the
        # graph it knows, and gets the places that were right for the other one's lifetimes.
        reserved = lib.ggml_gallocr_reserve(allocator, self.graph)
        if not reserved or not lib.ggml_gallocr_alloc_graph(allocator, self.graph):
            self.device.epoch += 1
            raise DeviceMemoryError(
                f"{self.device.name}: no memory for the working buffer of this program; use a "
                "smaller batch"
            )
        if lib.ggml_gallocr_get_buffer_size(allocator, 0) != size:
            self.device.epoch += 1
        self.epoch = self.device.epoch

    def _forget_addresses(self) -> None:
        lib.pg_forget_addresses(self.graph, self._external, self._n_external)
        for tensor in self._scratch:
            tensor.data = ffi.NULL
            tensor.buffer = ffi.NULL

    def run(self, sources: Sequence[Source], given: Sequence[Source]) -> list[Any]:
        inputs = [sources[index].storage for index in self.input_indices]
        inputs += [source.storage for source in given]
        outputs = self._new_outputs()
        self._bind(inputs, outputs)
        self.device.outputs = outputs
        self._compute()
        self.device.outputs = ()
        return outputs

    def _new_outputs(self) -> list[Any]:
        """Return storage for the outputs: of the small ones that of the last run, if it is free."""
        kept, empty = self._kept, self.device.empty
        for i, (shape, dtype) in enumerate(self.output_specs):
            if getrefcount(kept[i]) > 2:  # held by more than the list and this call, or None
                kept[i] = empty(shape, dtype)
        outputs = kept.copy()
        for i in self._large:  # the device has them sooner
            kept[i] = None
        return outputs

    def _compute(self) -> None:
        self.device.compute(self.graph)

    @property
    def working_bytes(self) -> int:
        """The working memory that ggml's allocator plans for this program alone."""
        with self.device.lock:
            self._forget_addresses()
            self.epoch = -1  # to be allocated again
            for i in range(self._n_external):  # any address: these are not ggml's to allocate
                self._external[i].data = self._external
            self._bound = [0] * self._n_external
            return self._planned_bytes()

    @property
    def held_bytes(self) -> int:
        graph = lib.ggml_get_mem_size(self.context) + BYTES_PER_STEP * len(self.nodes)
        return graph + self._kept_bytes

    def _planned_bytes(self) -> int:
        """Return what an allocator of its own would reserve for the tensors without address."""
        allocator = lib.ggml_gallocr_new(self.device.buffer_type)
        allocator = ffi.gc(allocator, lib.ggml_gallocr_free)
        size = ffi.new("size_t *")
        lib.ggml_gallocr_reserve_n_size(allocator, self.graph, ffi.NULL, ffi.NULL, size)
        return size[0]

    def close(self) -> None:
        if self.context is not None:
            ffi.release(self.context)
            self.context = self.graph = None


def _describe_work() -> str | None:
    """Say what this thread builds, or else what runs: for the report when ggml ends the process."""
    if state.lowering is not None:
        return f"while building {_describe(state.lowering)}"
    graph, index = lib.pg_running_graph(), lib.pg_running_node()
    if index < 0:
        return None
    tensor = lib.ggml_graph_node(graph, index)
    text = (
        f"while running node {index} of {lib.ggml_graph_n_nodes(graph)}, "
        f"{ffi.string(lib.ggml_op_desc(tensor)).decode()} {shape_of(tensor)}"
    )
    for device in list(_devices.values()):
        for plan in list(device.plans.values()):
            if isinstance(plan, GgmlPlan) and plan.graph == graph:
                node = max((item for item in plan.nodes if item[0] <= index), key=itemgetter(0))[1]
                text += f", of {_describe(node)}"
    return text


def _describe(node: Node) -> str:
    inputs = ", ".join(str(list(parent.shape)) for parent in node.inputs)
    file, line = node.line
    return f"{node.op.name}({inputs}), recorded first in {file}, line {line}"


_ffi.describe_work = _describe_work


class CpuPlan(GgmlPlan):
    """A compiled program on the CPU backend, with pyggml's own placement in the working buffer."""

    device: CpuDevice

    def __init__(self, program: Program, device: CpuDevice) -> None:
        super().__init__(program, device)
        self.most_threads = threads_worth_starting(program)
        self._place()

    def _place(self) -> None:
        for i in range(self._n_external):  # any address: they have no place in the buffer
            self._external[i].data = self._external
        self._leaves = ffi.new("struct ggml_tensor *[]", self._scratch)
        self._node_offsets = ffi.new("int64_t[]", lib.ggml_graph_n_nodes(self.graph))
        self._leaf_offsets = ffi.new("int64_t[]", len(self._scratch))
        self._places = (
            self.graph, self._node_offsets, self._leaves, len(self._scratch), self._leaf_offsets
        )  # fmt: skip
        self._size = lib.pg_place_tensors(*self._places)
        if self._size < 0:
            raise DeviceMemoryError("plan: no memory to plan this program in")

    def _allocate(self) -> None:
        address = self.device.working_buffer(self._size)
        lib.pg_set_addresses(*self._places, address)
        self.epoch = self.device.epoch

    @property
    def working_bytes(self) -> int:
        return self._size

    def _compute(self) -> None:
        self.device.compute(self.graph, min(self.most_threads, self.device.n_threads))


# Sharing a node costs a barrier; it is worth it when a worker's part takes longer than that.
WORK_WORTH_A_THREAD = 200_000  # elementary operations a step, on average


def threads_worth_starting(program: Program) -> int:
    """Return 1 for a program whose steps are too small to share, else as many as there may be."""
    steps = [*program.steps, *program.effects]
    work = sum(work_of(step.node) for step in steps if _can_be_shared(step.node))
    return 1 if work < len(steps) * WORK_WORTH_A_THREAD else lib.GGML_MAX_N_THREADS


def _can_be_shared(node: Node) -> bool:
    axis = node.op.shared_axis
    return axis is None or node.shape[axis] > 1
