"""Losses: each reduces to one number by default, or to what reduction= says."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import ArrayLike

from .._ffi import lib
from ..dtypes import float32, int32
from ..errors import DTypeError, IndexRangeError, SettingError, ShapeError
from ..graph import Op, Spec
from ..lowering import GgmlTensor, Lowering
from ..tensor import Tensor, TensorLike, as_tensor, make_tensor, record
from .elementwise import mul, sub
from .reduction import mean, sum
from .rules import need_floats
from .shaping import reshape


def reduce(op: str, values: Tensor, reduction: str) -> Tensor:
    """Return values themselves ("none"), their "sum", or their "mean"."""
    if reduction == "mean":
        return mean(values)
    if reduction == "sum":
        return sum(values)
    if reduction == "none":
        return values
    raise SettingError(f"{op}: reduction must be 'mean', 'sum' or 'none'; got {reduction!r}")


# ---- mean squared error --------------------------------------------------------------------------


def mse_loss(prediction: TensorLike, target: TensorLike, *, reduction: str = "mean") -> Tensor:
    """Return the squared error, averaged over all elements.

    Both have the same shape; anything else raises ShapeError, since broadcasting here is nearly
    always a mistake.

    >>> ag.mse_loss([1.0, 2.0], [1.0, 4.0]).item()
    2.0
    """
    prediction = as_tensor(
        prediction, target if isinstance(target, Tensor) else None, op="mse_loss"
    )
    target = as_tensor(target, prediction, op="mse_loss")
    if prediction.shape != target.shape:
        raise ShapeError(
            f"mse_loss: prediction and target must have one shape; got {prediction.shape} and "
            f"{target.shape}; use reshape"
        )
    difference = sub(prediction, target)
    return reduce("mse_loss", mul(difference, difference), reduction)


# ---- cross entropy of logits and integer labels --------------------------------------------------
# One kernel each way: no one-hot matrix, no stored probabilities, exact for logits near 1e8.


def _cross_entropy_shape(logits: Spec, labels: Spec, *, smoothing: float) -> Spec:
    need_floats("softmax_cross_entropy", logits)
    return Spec(labels.shape, float32)


def _reference_log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - np.max(logits, axis=1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=1, keepdims=True))


def _reference_cross_entropy(
    logits: np.ndarray, labels: np.ndarray, *, smoothing: float
) -> np.ndarray:
    log_p = _reference_log_softmax(logits)
    loss = -log_p[np.arange(len(labels)), labels]
    if smoothing:
        loss = (1 - smoothing) * loss - smoothing * log_p.mean(axis=1)
    return np.where(labels < 0, 0.0, loss)


CROSS_ENTROPY: Op = Op(
    "softmax_cross_entropy",
    shape=_cross_entropy_shape,
    lower=lambda b, x, labels, smoothing: lib.pg_cross_entropy(
        b.ctx, b.contiguous(x), labels, smoothing
    ),
    grad=lambda g, out, x, labels, smoothing: (
        record(CROSS_ENTROPY_BACK, g, x, labels, smoothing=smoothing),
        None,
    ),
    reference=_reference_cross_entropy,
)


def _cross_entropy_back_shape(g: Spec, logits: Spec, labels: Spec, *, smoothing: float) -> Spec:
    return Spec(logits.shape, float32)


def _lower_cross_entropy_back(
    b: Lowering, g: GgmlTensor, x: GgmlTensor, labels: GgmlTensor, *, smoothing: float
) -> GgmlTensor:
    return lib.pg_cross_entropy_back(b.ctx, b.contiguous(g), b.contiguous(x), labels, smoothing)


def _reference_cross_entropy_back(
    g: np.ndarray, logits: np.ndarray, labels: np.ndarray, *, smoothing: float
) -> np.ndarray:
    target = np.full(logits.shape, smoothing / logits.shape[1])
    target[np.arange(len(labels)), labels] += 1 - smoothing
    weight = np.where(labels < 0, 0.0, g)[:, None]
    return np.where(
        labels[:, None] < 0, 0.0, weight * (np.exp(_reference_log_softmax(logits)) - target)
    )


CROSS_ENTROPY_BACK: Op = Op(
    "softmax_cross_entropy_back",
    shape=_cross_entropy_back_shape,
    lower=_lower_cross_entropy_back,
    reference=_reference_cross_entropy_back,
)


def integer_labels(
    op: str, labels: TensorLike, like: Tensor, classes: int, ignore_index: int | None = None
) -> Tensor:
    """Return labels as an int32 tensor with the ignored ones set to -1, having checked that they
    name a class each.

    Raises DTypeError unless they are integers, IndexRangeError if one is outside [0, classes).
    """
    if not isinstance(labels, Tensor) or ignore_index is not None:
        array = np.asarray(labels)
        if array.dtype.kind not in "iu":
            raise DTypeError(
                f"{op}: labels must be integers; got {array.dtype}; use .astype(np.int32) if they "
                "are whole"
            )
        if ignore_index is not None:
            array = np.where(array == ignore_index, -1, array)
        labels = make_tensor(array, dtype=int32, device=like.device, op=op)
    if labels._at[1].dtype is not int32:
        raise DTypeError(f"{op}: labels must be integers; got a tensor of {labels.dtype}")
    source = labels._materialized()
    if source.label_range is None:
        source.label_range = source.device.integer_range(source)
    low, high = source.label_range
    if low < (0 if ignore_index is None else -1) or high >= classes:
        wrong = low if low < 0 else high
        raise IndexRangeError(f"{op}: labels must be in [0, {classes}); got {wrong}")
    return labels


def softmax_cross_entropy(
    logits: TensorLike,
    labels: TensorLike | ArrayLike,
    *,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return -log softmax(logits)[label]: logits (..., classes), integer labels (...), the loss in
    nats.

    The mean is over the labels that are not ignored; if all are, the loss and its gradient are 0.
    Raises IndexRangeError for a label outside [0, classes), at once.

    >>> ag.softmax_cross_entropy([[-431.0, 279.0, 427.0]], [0]).item()
    858.0
    """
    op = "softmax_cross_entropy"
    logits = as_tensor(logits, labels if isinstance(labels, Tensor) else None, op=op)
    if logits.ndim < 1:
        raise ShapeError(f"{op}: logits need a class axis; got shape ()")
    if not 0.0 <= label_smoothing <= 1.0:
        raise SettingError(f"{op}: label_smoothing must be in [0, 1]; got {label_smoothing!r}")
    *batch, classes = logits.shape
    targets = integer_labels(op, labels, logits, classes, ignore_index)
    if targets.shape != tuple(batch):
        raise ShapeError(
            f"{op}: logits {logits.shape} need labels of shape {tuple(batch)}; got {targets.shape}"
        )
    rows = prod(batch)
    losses = record(
        CROSS_ENTROPY,
        logits if logits.ndim == 2 else reshape(logits, (rows, classes)),
        targets if targets.ndim == 1 else reshape(targets, (rows,)),
        smoothing=float(label_smoothing),
    )
    if reduction == "mean" and ignore_index is not None:
        count = max(int((targets.numpy() >= 0).sum()), 1)
        return mul(sum(losses), make_tensor(1.0 / count, device=logits.device))
    if reduction == "none":
        return reshape(losses, tuple(batch))
    return reduce(op, losses, reduction)
