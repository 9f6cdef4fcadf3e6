"""Shape rules that many ops share, and the checks behind their messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..dtypes import float32
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


def normalize_axis(op: str, axis: int, ndim: int) -> int:
    """Return an axis counted from the end: -1 is the last.

    So it names the same ggml axis in any number of dimensions.
    """
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        raise DTypeError(f"{op}: axis must be an integer; got {axis!r}")
    index = axis.__index__()
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
    listed = axis if isinstance(axis, Sequence) else (axis,)
    axes = [normalize_axis(op, a, ndim) for a in listed]
    if len(set(axes)) != len(axes):
        raise ShapeError(f"{op}: each axis at most once; got {tuple(listed)}")
    return tuple(sorted(axes))
