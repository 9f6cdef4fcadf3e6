"""The one table between NumPy's element types and ggml's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ._ffi import lib
from .checks import shown
from .errors import DTypeError


@dataclass(frozen=True, eq=False)
class DType:
    """An element type: its name, NumPy's type for it, ggml's, its size in bytes, and how arrays of
    it are stored.

    Half types (float16 and bfloat16) are for storage. NumPy has no bfloat16: what leaves pyggml is
    float32 then, exactly.
    """

    name: str
    numpy: np.dtype
    ggml: int
    size: int
    is_float: bool
    stored: np.dtype

    def __repr__(self) -> str:
        return self.name

    @property
    def is_half(self) -> bool:
        """Whether this is float16 or bfloat16."""
        return self.is_float and self.size == 2

    def encode(self, array: np.ndarray) -> np.ndarray:
        """Return an array that NumPy can assign to a stored one; what is too large is infinite."""
        if self is bfloat16:
            bits = float32.encode(array).astype(np.float32, order="C").view(np.uint32)
            upper = bits >> 16
            nearest = (bits + (0x7FFF + (upper & 1))) >> 16  # ties to even
            return np.where(np.isnan(array), upper | 0x40, nearest).astype(np.uint16)
        if self.is_float and array.dtype.itemsize > self.size:
            with np.errstate(over="ignore"):
                return array.astype(self.stored)
        return array

    def decode(self, stored: np.ndarray) -> np.ndarray:
        """Return a stored array as NumPy's type."""
        if self is not bfloat16:
            return stored
        return (stored.astype(np.uint32) << 16).view(np.float32)


def _dtype(name: str, ggml: int, numpy: Any, stored: Any = None) -> DType:
    kind, inner = np.dtype(numpy), np.dtype(stored or numpy)
    return DType(name, kind, ggml, inner.itemsize, kind.kind == "f", inner)


float32 = _dtype("float32", lib.GGML_TYPE_F32, np.float32)
int32 = _dtype("int32", lib.GGML_TYPE_I32, np.int32)
float16 = _dtype("float16", lib.GGML_TYPE_F16, np.float16)
bfloat16 = _dtype("bfloat16", lib.GGML_TYPE_BF16, np.float32, stored=np.uint16)

DTYPES = {dtype.name: dtype for dtype in (float32, int32, float16, bfloat16)}
_INT32 = np.iinfo(np.int32)


def as_dtype(value: object) -> DType:
    """Return the DType named by a DType, a string, or a NumPy type.

    >>> as_dtype("float32")
    float32
    """
    if isinstance(value, DType):
        return value
    try:
        name = value if isinstance(value, str) and value == "bfloat16" else np.dtype(value).name  # type: ignore[call-overload]
        return DTYPES[name]
    except (KeyError, TypeError, ValueError):
        raise DTypeError(
            f"dtype: pyggml has {', '.join(DTYPES)}; got {shown(value)}; convert the data first"
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
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise DTypeError(f"{op}: a masked array would lose its mask; use .filled(value) first")
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
