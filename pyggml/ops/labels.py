"""Integer labels and indices: their checks, and the two ops that losses make of labels.

A label of -1 is ignored.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .._ffi import lib
from ..device import Device
from ..dtypes import float32, int32
from ..errors import DTypeError, IndexRangeError
from ..graph import Op, Spec, state
from ..lowering import GgmlTensor, Lowering
from ..tensor import Tensor, TensorLike, make_tensor, record
from .elementwise import mul
from .rules import need_floats, need_integers, need_shape
from .shaping import reshape


def checked_indices(
    op: str,
    indices: TensorLike | ArrayLike,
    size: int,
    device: Device | str | None,
    *,
    what: str = "indices",
) -> Tensor:
    """Return indices as an int32 tensor, having read them: the kernels trust that they fit.

    Raises DTypeError unless they are integers, IndexRangeError if one is outside [0, size).
    """
    if not isinstance(indices, Tensor):
        array = _integers(op, indices, what)
        # A negative integer is a large one without its sign: one look at the array finds both.
        if array.size and array.view(array.dtype.str.replace("i", "u")).max() >= size:
            _check_range(op, what, int(array.min()), int(array.max()), size)
        array = array.astype(np.int32)  # whose range need not be looked at again
        return make_tensor(array, dtype=int32, device=device, op=op)
    if indices._at[1].dtype is not int32:
        raise DTypeError(f"{op}: {what} must be integers; got a tensor of {indices.dtype}")
    if state.trace is not None:  # nn.compile checks the integers of each call
        state.trace.limit(op, indices, size)
        return indices
    _check_range(op, what, *index_range(indices), size)
    return indices


def _check_range(op: str, what: str, low: int, high: int, size: int) -> None:
    if low < 0 or high >= size:
        raise _out_of_range(op, what, low if low < 0 else high, size)


def index_range(indices: Tensor) -> tuple[int, int]:
    """Return the smallest and the largest element of an int32 tensor, computing it if pending."""
    source = indices._materialized()
    if source.label_range is None:
        source.label_range = source.device.integer_range(source)
    return source.label_range


def _integers(op: str, values: TensorLike | ArrayLike, what: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError as error:  # ragged nested lists
        raise DTypeError(f"{op}: {what} must be a rectangular array; {error}") from None
    if array.dtype.kind not in "iu":
        raise DTypeError(
            f"{op}: {what} must be integers; got {array.dtype}; use .astype(np.int32) if they are "
            "whole"
        )
    return array


def _out_of_range(op: str, what: str, wrong: int, size: int) -> IndexRangeError:
    return IndexRangeError(f"{op}: {what} must be in [0, {size}); got {wrong}")


def integer_labels(
    op: str,
    labels: TensorLike | ArrayLike,
    like: Tensor,
    classes: int,
    ignore_index: int | None = None,
) -> Tensor:
    """Return labels, checked to name a class each, as int32 with the ignored ones set to -1.

    Raises DTypeError unless they are integers, IndexRangeError if one is outside [0, classes).
    """
    if ignore_index is None:
        return checked_indices(op, labels, classes, like.device, what="labels")
    array = _integers(op, labels, "labels")
    ignored = array == ignore_index
    wrong = array[~ignored & ((array < 0) | (array >= classes))]
    if wrong.size:
        raise _out_of_range(op, "labels", wrong[0], classes)
    return make_tensor(np.where(ignored, -1, array), dtype=int32, device=like.device, op=op)


def need_rows_with_labels(op: str, x: Spec, labels: Spec) -> None:
    """Raise an error unless x is (rows, classes), and labels are integers (rows,)."""
    need_floats(op, x)
    need_integers(op, "labels", labels)
    need_shape(op, "the input", x, None, None)
    need_shape(op, "labels", labels, x.shape[0])


def lower_label_numbers(b: Lowering, labels: GgmlTensor) -> GgmlTensor:
    """Return labels (rows,) as a float32 column, exact up to 2^24 classes."""
    return lib.ggml_cast(b.ctx, b.reshape(labels, (labels.ne[0], 1)), float32.ggml)


def lower_known(b: Lowering, numbers: GgmlTensor) -> GgmlTensor:
    """Return 1 for a label and 0 for one that is ignored."""
    return lib.ggml_step(b.ctx, lib.ggml_scale_bias(b.ctx, numbers, 1.0, 0.5))


# ---- one_hot -------------------------------------------------------------------------------------


def _lower_one_hot(b: Lowering, labels: GgmlTensor, *, classes: int) -> GgmlTensor:
    numbers = lib.ggml_arange(b.ctx, 0.0, float(classes), 1.0)
    table = b.broadcast(numbers, (labels.ne[0], classes))
    distance = lib.ggml_abs(b.ctx, lib.ggml_sub(b.ctx, table, lower_label_numbers(b, labels)))
    return lib.ggml_step(b.ctx, lib.ggml_scale_bias(b.ctx, distance, -1.0, 0.5))


def _one_hot_shape(labels: Spec, *, classes: int) -> Spec:
    need_integers("one_hot", "labels", labels)
    need_shape("one_hot", "labels", labels, None)
    return Spec((*labels.shape, classes), float32)


ONE_HOT = Op(
    "one_hot",
    shape=_one_hot_shape,
    lower=_lower_one_hot,
    differentiable=False,
    reference=lambda labels, classes: (labels[:, None] == np.arange(classes)).astype(float),
)


# ---- pick: the element of each row that its label names, 0 where it is ignored -------------------


def _pick_shape(x: Spec, labels: Spec) -> Spec:
    need_rows_with_labels("pick", x, labels)
    return Spec(labels.shape, x.dtype)


def _lower_pick(b: Lowering, x: GgmlTensor, labels: GgmlTensor) -> GgmlTensor:
    x = b.contiguous(x)
    if b.own_kernels:
        return lib.pg_pick(b.ctx, x, b.contiguous(labels))
    rows, classes = x.ne[1], x.ne[0]
    # where there is no label, look up the largest element, which is not -inf, and multiply by 0
    numbers = lower_label_numbers(b, labels)
    known = lower_known(b, numbers)
    best = lower_label_numbers(b, lib.ggml_argmax(b.ctx, x))
    index = lib.ggml_add(
        b.ctx, best, lib.ggml_mul(b.ctx, lib.ggml_sub(b.ctx, numbers, best), known)
    )
    index = b.reshape(lib.ggml_cast(b.ctx, index, int32.ggml), (rows, 1))
    found = lib.ggml_get_rows(b.ctx, b.reshape(x, (rows, classes, 1)), index)
    return b.reshape(lib.ggml_mul(b.ctx, b.reshape(found, (rows, 1)), known), (rows,))


def _grad_pick(g: Tensor, out: Tensor, x: Tensor, labels: Tensor) -> tuple[Tensor, None]:
    table = record(ONE_HOT, labels, classes=x.shape[1])
    return mul(table, reshape(g, (-1, 1))), None


def _reference_pick(x: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.where(labels < 0, 0.0, x[np.arange(len(labels)), labels])


PICK = Op(
    "pick",
    shape=_pick_shape,
    lower=_lower_pick,
    grad=_grad_pick,
    reference=_reference_pick,
)
