"""The one table between NumPy's element types and ggml's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ._ffi import lib
from .errors import DTypeError


@dataclass(frozen=True, eq=False)
class DType:
    """An element type: its name, NumPy's type for it, ggml's, and its size in bytes."""

    name: str
    numpy: np.dtype
    ggml: int
    size: int
    is_float: bool

    def __repr__(self) -> str:
        return self.name


float32 = DType("float32", np.dtype(np.float32), lib.GGML_TYPE_F32, 4, True)
int32 = DType("int32", np.dtype(np.int32), lib.GGML_TYPE_I32, 4, False)

DTYPES = {dtype.name: dtype for dtype in (float32, int32)}
_INT32 = np.iinfo(np.int32)


def as_dtype(value: object) -> DType:
    """Return the DType named by a DType, a string, or a NumPy type.

    >>> as_dtype("float32")
    float32
    """
    if isinstance(value, DType):
        return value
    try:
        return DTYPES[np.dtype(value).name]  # type: ignore[call-overload]
    except (KeyError, TypeError):
        raise DTypeError(
            f"dtype: pyggml has {', '.join(DTYPES)}; got {value!r}; convert the data first"
        ) from None


def check_array(
    value: object, dtype: DType | None = None, *, op: str = "tensor"
) -> tuple[np.ndarray, DType]:
    """Return value as an array of real numbers, of any layout, and the DType to store it in.

    Floats and booleans become float32, integers int32. An integer outside int32, a complex number
    or an object raises DTypeError: nothing is ever reinterpreted. The array may be value itself.
    """
    try:
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
    except ValueError as error:  # ragged nested lists
        raise DTypeError(f"{op}: needs a rectangular array of numbers; {error}") from None
    kind = array.dtype.kind
    if kind not in "fiub":
        raise DTypeError(
            f"{op}: needs real numbers; got an array of dtype {array.dtype}; convert it first"
        )
    if dtype is None:
        dtype = float32 if kind in "fb" else int32
    if dtype.is_float:
        return array, dtype
    if kind == "f":
        raise DTypeError(
            f"{op}: needs integers; got {array.dtype}; use .astype(np.int32) if they are whole"
        )
    if array.dtype != dtype.numpy and array.dtype.itemsize >= 4 and array.size:  # could be too big
        low, high = array.min(), array.max()
        if low < _INT32.min or high > _INT32.max:
            raise DTypeError(f"{op}: integers must fit in int32; got values from {low} to {high}")
    return array, dtype
