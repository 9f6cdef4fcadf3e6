"""What an op's lowering is written with: ggml constructors on NumPy's shapes.

NumPy's row-major shape (a, b, c) is ggml's ne = [c, b, a, 1]; that reversal stands here, in
`ne_of` and `shape_of`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._ffi import ffi, lib
from .dtypes import DType
from .graph import MAX_DIMS, Shape

ALIGNMENT = 256  # bytes: the largest that a Vulkan device may ask of what a shader is given

GgmlTensor = Any
"""A cffi pointer to a ggml_tensor."""


def ne_of(shape: Shape) -> list[int]:
    """Return ggml's four sizes of a NumPy shape."""
    return [*reversed(shape), *[1] * (MAX_DIMS - len(shape))]


def shape_of(tensor: GgmlTensor) -> Shape:
    """Return the four sizes of a ggml tensor in NumPy's order."""
    return tuple(reversed(list(tensor.ne)))


class Lowering:
    """One ggml graph under construction."""

    def __init__(
        self, context: Any, graph: Any, own_kernels: bool, tiled_copies: bool = True
    ) -> None:
        self.ctx = context
        self.graph = graph
        self.own_kernels = own_kernels  # whether pyggml's own kernels can run on the device
        self.tiled_copies = tiled_copies
        self.made: list[GgmlTensor] = []  # by new()
        self._shared: dict[Any, GgmlTensor] = {}

    def add(self, tensor: GgmlTensor) -> GgmlTensor:
        """Append a tensor, and what it needs that is not there yet, to the graph."""
        lib.ggml_build_forward_expand(self.graph, tensor)
        return tensor

    def new(self, shape: Shape, dtype: DType) -> GgmlTensor:
        """Return a tensor without memory."""
        tensor = lib.ggml_new_tensor(self.ctx, dtype.ggml, MAX_DIMS, ne_of(shape))
        self.made.append(tensor)
        return tensor

    def contiguous(self, tensor: GgmlTensor) -> GgmlTensor:
        """Return the tensor with its elements in order in memory.

        That is the tensor itself if they are, else one copy for all who ask.
        """
        if lib.pg_is_packed(tensor):
            return tensor
        if lib.ggml_is_contiguous(tensor):
            # An axis of size 1 may have any stride there, but not in all of ggml's kernels.
            return lib.ggml_reshape(self.ctx, tensor, tensor)
        return self.once(self._copy, tensor)

    def once(self, constructor: Any, *args: Any) -> GgmlTensor:
        """Return what a constructor makes of the arguments: one tensor for all who ask."""
        key = (constructor, *args)
        if key not in self._shared:
            self._shared[key] = constructor(*args)
        return self._shared[key]

    def _copy(self, tensor: GgmlTensor) -> GgmlTensor:
        if self.own_kernels and lib.ggml_element_size(tensor) == 4:
            return lib.pg_contiguous(self.ctx, tensor)
        if self.tiled_copies:
            return lib.ggml_cont(self.ctx, tensor)
        # ggml's Vulkan backend copies a transpose by tiles only into a tensor of the same shape.
        flat = lib.ggml_cont_1d(self.ctx, tensor, lib.ggml_nelements(tensor))
        return lib.ggml_reshape(self.ctx, flat, tensor)

    def cast(self, tensor: GgmlTensor, dtype: DType) -> GgmlTensor:
        """Return the tensor's values in another type; the tensor itself if it has that type.

        The transpose of a contiguous matrix is still one after it.
        """
        if tensor.type == dtype.ggml:
            return tensor
        if tensor.nb[1] == lib.ggml_element_size(tensor) and tensor.ne[0] > 1:
            copy = lib.ggml_cast(
                self.ctx, self.contiguous(lib.ggml_transpose(self.ctx, tensor)), dtype.ggml
            )
            return lib.ggml_transpose(self.ctx, copy)
        return lib.ggml_cast(self.ctx, self.contiguous(tensor), dtype.ggml)

    def aligned_row(self, table: GgmlTensor, row: int, count: int) -> GgmlTensor:
        """Return a row's first numbers where every device can read them as a tensor: no copy each.

        The table (rows, columns), float32, is copied once, to rows that begin ALIGNMENT apart.
        """
        missing = -table.ne[0] % (ALIGNMENT // lib.ggml_element_size(table))
        padded = self.once(lib.ggml_pad, self.ctx, table, missing, 0, 0, 0)
        return lib.ggml_view_1d(self.ctx, padded, count, row * padded.nb[1])

    def reshape(self, tensor: GgmlTensor, shape: Shape) -> GgmlTensor:
        """Return the same elements in another shape."""
        if list(tensor.ne) == ne_of(shape):  # to ggml, (1, n) and (n,) are one shape
            return self.contiguous(tensor)
        return lib.ggml_reshape_4d(self.ctx, self.contiguous(tensor), *ne_of(shape))

    def broadcast(self, tensor: GgmlTensor, shape: Shape) -> GgmlTensor:
        """Return the tensor repeated along axes of size 1 until it has the shape."""
        ne = ne_of(shape)
        if [tensor.ne[i] for i in range(MAX_DIMS)] == ne:
            return tensor
        return lib.ggml_repeat_4d(self.ctx, self.contiguous(tensor), *ne)

    def binary(
        self, constructor: Any, a: GgmlTensor, b: GgmlTensor, commutative: bool
    ) -> GgmlTensor:
        """Apply ggml's binary op under NumPy's broadcasting rule for both operands.

        ggml itself broadcasts the second one only.
        """
        if lib.ggml_are_same_shape(a, b):
            return constructor(self.ctx, self.contiguous(a), self.contiguous(b))
        sizes_a, sizes_b = list(a.ne), list(b.ne)
        if commutative and any(m < n for m, n in zip(sizes_a, sizes_b, strict=True)):
            a, b, sizes_a, sizes_b = b, a, sizes_b, sizes_a
        ne = [max(m, n) for m, n in zip(sizes_a, sizes_b, strict=True)]
        if sizes_a != ne:
            a = lib.ggml_repeat_4d(self.ctx, self.contiguous(a), *ne)
        return constructor(self.ctx, self.contiguous(a), self.contiguous(b))


def unary(name: str, ggml: str | None = None) -> Callable[[Lowering, GgmlTensor], GgmlTensor]:
    """Return the lowering of an op on one tensor: pyggml's kernel where it can run, else ggml's.

    Both go by the op's name, unless ``ggml`` is ggml's name for it.
    """
    own, other = getattr(lib, f"pg_{name}"), getattr(lib, f"ggml_{ggml or name}")

    def lower(b: Lowering, x: GgmlTensor) -> GgmlTensor:
        return (own if b.own_kernels else other)(b.ctx, b.contiguous(x))

    return lower


__all__ = ["GgmlTensor", "Lowering", "ffi", "lib", "ne_of", "shape_of", "unary"]
