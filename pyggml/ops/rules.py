"""Shape rules that many ops share, and the checks behind their messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..checks import LARGEST, as_index, shown
from ..dtypes import float32, int32
from ..errors import DTypeError, ShapeError
from ..graph import MAX_DIMS, Shape, Spec


def need_floats(op: str, *inputs: Spec) -> None:
    """Raise DTypeError unless every input is floating point."""
    for x in inputs:
        if not x.dtype.is_float:
            raise DTypeError(
                f"{op}: needs float32; got {x.dtype} of shape {x.shape}; pass dtype='float32' "
                "when making the tensor"
            )


def need_integers(op: str, name: str, x: Spec) -> None:
    """Raise DTypeError unless an input is int32."""
    if x.dtype is not int32:
        raise DTypeError(f"{op}: {name} must be integers; got a tensor of {x.dtype}")


def need_shape(op: str, name: str, x: Spec, *shape: int | None) -> None:
    """Raise ShapeError unless an input has a shape, in which None stands for any size."""
    fits = len(x.shape) == len(shape) and all(
        wanted is None or size == wanted for size, wanted in zip(x.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ShapeError(f"{op}: {name} must have shape ({wanted}); got {x.shape}")


def need_axes(op: str, x: Spec, axes: Sequence[int]) -> None:
    """Raise ShapeError unless all axes, which count from the end, are axes of x, each once."""
    if any(not -len(x.shape) <= axis < 0 for axis in axes) or len(set(axes)) < len(axes):
        raise ShapeError(f"{op}: axes {tuple(axes)} are not those of shape {x.shape}")


def same(op: str) -> Callable[..., Spec]:
    """Return the shape rule of an elementwise op: float inputs, all of the shape of the first."""

    def rule(*inputs: Spec, **settings: object) -> Spec:
        need_floats(op, *inputs)
        first = inputs[0]
        for x in inputs[1:]:
            if x.shape != first.shape:
                raise ShapeError(f"{op}: shapes must be equal; got {first.shape} and {x.shape}")
        return Spec(first.shape, first.dtype)

    return rule


def broadcast_shapes(op: str, *shapes: Shape) -> Shape:
    """Return the shape that NumPy's rule gives for shapes used together, or raise ShapeError."""
    ndim = max(len(shape) for shape in shapes)
    padded = [(1,) * (ndim - len(shape)) + tuple(shape) for shape in shapes]
    result = []
    for sizes in zip(*padded, strict=True):
        wanted = {size for size in sizes if size != 1}
        if len(wanted) > 1:
            listed = " and ".join(str(tuple(shape)) for shape in shapes)
            raise ShapeError(
                f"{op}: shapes must match or be 1 axis by axis, from the last; got {listed}, "
                f"{' != '.join(map(str, sorted(wanted)))}"
            )
        result.append(wanted.pop() if wanted else 1)
    return tuple(result)


def broadcasting(op: str) -> Callable[..., Spec]:
    """Return the shape rule of an elementwise op with several float inputs, which broadcast."""

    def rule(*inputs: Spec, **settings: object) -> Spec:
        need_floats(op, *inputs)
        return Spec(broadcast_shapes(op, *(x.shape for x in inputs)), float32)

    return rule


def check_ndim(op: str, shape: Sequence[int]) -> None:
    """Raise ShapeError for more dimensions than ggml has."""
    if len(shape) > MAX_DIMS:
        raise ShapeError(
            f"{op}: at most {MAX_DIMS} dimensions; got {tuple(shape)}; merge some with reshape"
        )


def as_shape(op: str, shape: int | Sequence[int], unknown: bool = False) -> Shape:
    """Return a shape as a tuple of ints; one integer is that of a vector.

    Raises DTypeError unless its sizes are integers, ShapeError unless there are at most four and
    they are positive, or -1 where that stands for an unknown one.
    """
    if type(shape) is tuple and len(shape) <= MAX_DIMS:  # as in most calls of a step
        for size in shape:
            if type(size) is not int or not (0 < size <= LARGEST or (unknown and size == -1)):
                break
        else:
            return shape
    listed: list[Any] = list(shape) if _is_listed(shape) else [shape]  # type: ignore[arg-type]
    if len(listed) == 1 and isinstance(listed[0], (tuple, list)):
        listed = list(listed[0])
    sizes = [as_index(size) for size in listed]
    if any(size is None for size in sizes):
        raise DTypeError(f"{op}: sizes must be integers; got {shown(shape)}")
    result = tuple(size for size in sizes if size is not None)
    check_ndim(op, result)
    if any((size < 1 and not (unknown and size == -1)) or size > LARGEST for size in result):
        raise ShapeError(
            f"{op}: sizes must be positive{', one of them may be -1' if unknown else ''}, and "
            f"below 2^63; got {shown(result)}"
        )
    return result


def _is_listed(value: object) -> bool:
    return not isinstance(value, (str, bytes)) and (
        isinstance(value, Iterable) and getattr(value, "ndim", 1) == 1
    )


def normalize_axis(op: str, axis: int, ndim: int) -> int:
    """Return an axis counted from the end: -1 is the last.

    So it names the same ggml axis in any number of dimensions.
    """
    index = as_index(axis)
    if index is None:
        raise DTypeError(f"{op}: axis must be an integer; got {shown(axis)}")
    if not -ndim <= index < ndim:
        raise ShapeError(f"{op}: axis {index} does not exist in {ndim} dimensions")
    return index - ndim if index >= 0 else index


def split_at(shape: Shape, axis: int) -> tuple[Shape, int, Shape]:
    """Return the sizes before an axis that counts from the end, its own, and those after it."""
    i = axis + len(shape)
    return shape[:i], shape[i], shape[i + 1 :]


ALL_AXES = [tuple(range(-ndim, 0)) for ndim in range(MAX_DIMS + 1)]


def normalize_axes(op: str, axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return sorted axes counted from the end, for an int, several, or None (all).

    Raises ShapeError for repeats.
    """
    if axis is None:
        return ALL_AXES[ndim]
    is_several = isinstance(axis, Sequence) or (isinstance(axis, np.ndarray) and axis.ndim > 0)
    listed: tuple[Any, ...] = tuple(axis) if is_several else (axis,)  # type: ignore[arg-type]
    axes = [normalize_axis(op, a, ndim) for a in listed]
    if len(set(axes)) != len(axes):
        raise ShapeError(f"{op}: each axis at most once; got {tuple(listed)}")
    return tuple(sorted(axes))
