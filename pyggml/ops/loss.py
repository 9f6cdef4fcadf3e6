"""Losses: each reduces to one number by default, or to what reduction= says."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
from numpy.typing import ArrayLike

from .._ffi import lib
from ..checks import fraction, number_in
from ..dtypes import float32
from ..errors import SettingError, ShapeError
from ..graph import Op, Spec
from ..lowering import GgmlTensor, Lowering
from ..tensor import Tensor, TensorLike, as_tensor, make_tensor, record
from .activation import softplus
from .comparison import clamp
from .elementwise import abs, add, affine, exp, full, log, mul, neg, sub
from .labels import (
    ONE_HOT,
    PICK,
    integer_labels,
    lower_known,
    lower_label_numbers,
    need_rows_with_labels,
)
from .power import sqr
from .reduction import LARGEST, mean, sum
from .rules import broadcast_shapes, need_floats, need_shape
from .shaping import reshape
from .softmax import LOG_SOFTMAX, SOFTMAX_BACK, log_softmax, reference_log_softmax, softmax


def reduce(op: str, values: Tensor, reduction: str) -> Tensor:
    """Return values themselves ("none"), their "sum", or their "mean"."""
    if reduction == "mean":
        return mean(values)
    if reduction == "sum":
        return sum(values)
    if reduction == "none":
        return values
    raise SettingError(f"{op}: reduction must be 'mean', 'sum' or 'none'; got {reduction!r}")


def _pair(op: str, prediction: TensorLike, target: TensorLike) -> tuple[Tensor, Tensor]:
    """Return both as tensors; raise ShapeError unless they have one shape."""
    prediction = as_tensor(prediction, target if isinstance(target, Tensor) else None, op=op)
    target = as_tensor(target, prediction, op=op)
    if prediction.shape != target.shape:
        raise ShapeError(
            f"{op}: prediction and target must have one shape; got {prediction.shape} and "
            f"{target.shape}; use reshape"
        )
    return prediction, target


# ---- distances -----------------------------------------------------------------------------------


def mse_loss(prediction: TensorLike, target: TensorLike, *, reduction: str = "mean") -> Tensor:
    """Return the squared error, averaged over all elements.

    Both have the same shape; anything else raises ShapeError, since broadcasting here is nearly
    always a mistake.

    >>> ag.mse_loss([1.0, 2.0], [1.0, 4.0]).item()
    2.0
    """
    return reduce("mse_loss", sqr(sub(*_pair("mse_loss", prediction, target))), reduction)


def l1_loss(prediction: TensorLike, target: TensorLike, *, reduction: str = "mean") -> Tensor:
    """Return the absolute error, averaged over all elements. Where it is 0, so is its gradient.

    Raises ShapeError unless both have the same shape.

    >>> ag.l1_loss([1.0, 2.0], [1.0, 4.0]).item()
    1.0
    """
    return reduce("l1_loss", abs(sub(*_pair("l1_loss", prediction, target))), reduction)


def huber_loss(
    prediction: TensorLike, target: TensorLike, *, delta: float = 1.0, reduction: str = "mean"
) -> Tensor:
    """Return error^2 / 2, and delta * (|error| - delta / 2) where |error| > delta, averaged.

    Raises ShapeError unless both have the same shape, SettingError unless delta is positive
    (Huber 1964).

    >>> ag.huber_loss([1.0, 2.0], [0.0, 5.0], delta=1.0, reduction="none").numpy()
    array([0.5, 2.5], dtype=float32)
    """
    op = "huber_loss"
    delta = number_in(op, "delta", delta, 0.0)
    if delta == 0.0:
        raise SettingError(f"{op}: delta must be positive; got {delta!r}")
    error = sub(*_pair(op, prediction, target))
    bounded = clamp(error, min=-delta, max=delta)
    return reduce(op, mul(bounded, sub(error, affine(bounded, scale=0.5))), reduction)


# ---- cross entropy of logits and integer labels --------------------------------------------------
# One kernel each way: no one-hot matrix, no stored probabilities, exact for logits near 1e8.


def _cross_entropy_shape(logits: Spec, labels: Spec, *, smoothing: float) -> Spec:
    need_rows_with_labels("softmax_cross_entropy", logits, labels)
    return Spec(labels.shape, float32)


def _lower_cross_entropy(
    b: Lowering, x: GgmlTensor, labels: GgmlTensor, *, smoothing: float
) -> GgmlTensor:
    x = b.contiguous(x)
    if b.own_kernels:
        return lib.pg_cross_entropy(b.ctx, x, b.contiguous(labels), smoothing)
    log_p = LOG_SOFTMAX.lower(b, x)
    loss = lib.ggml_scale(b.ctx, PICK.lower(b, log_p, labels), smoothing - 1.0)
    if not smoothing:
        return loss
    known = lower_known(b, lower_label_numbers(b, labels))
    uniform = lib.ggml_mul(b.ctx, lib.ggml_mean(b.ctx, log_p), known)
    uniform = lib.ggml_scale(b.ctx, b.reshape(uniform, (labels.ne[0],)), -smoothing)
    return lib.ggml_add(b.ctx, loss, uniform)


def _grad_cross_entropy(
    g: Tensor, out: Tensor, x: Tensor, labels: Tensor, *, smoothing: float
) -> tuple[Tensor, None]:
    return record(CROSS_ENTROPY_BACK, g, x, labels, smoothing=smoothing), None


def _reference_cross_entropy(
    logits: np.ndarray, labels: np.ndarray, *, smoothing: float
) -> np.ndarray:
    log_p = reference_log_softmax(logits)
    loss = -log_p[np.arange(len(labels)), labels]
    if smoothing:
        loss = (1 - smoothing) * loss - smoothing * log_p.mean(axis=1)
    return np.where(labels < 0, 0.0, loss)


CROSS_ENTROPY: Op = Op(
    "softmax_cross_entropy",
    shape=_cross_entropy_shape,
    lower=_lower_cross_entropy,
    grad=_grad_cross_entropy,
    reference=_reference_cross_entropy,
)


def _cross_entropy_back_shape(g: Spec, logits: Spec, labels: Spec, *, smoothing: float) -> Spec:
    need_floats("softmax_cross_entropy_back", g)
    need_rows_with_labels("softmax_cross_entropy_back", logits, labels)
    need_shape("softmax_cross_entropy_back", "the gradient", g, *labels.shape)
    return Spec(logits.shape, float32)


def _lower_cross_entropy_back(
    b: Lowering, g: GgmlTensor, x: GgmlTensor, labels: GgmlTensor, *, smoothing: float
) -> GgmlTensor:
    g, x = b.contiguous(g), b.contiguous(x)
    if b.own_kernels:
        return lib.pg_cross_entropy_back(b.ctx, g, x, b.contiguous(labels), smoothing)
    classes, rows = x.ne[0], x.ne[1]
    target = ONE_HOT.lower(b, labels, classes=classes)
    if smoothing:
        target = lib.ggml_scale_bias(b.ctx, target, 1.0 - smoothing, smoothing / classes)
    known = lower_known(b, lower_label_numbers(b, labels))
    weight = lib.ggml_mul(b.ctx, b.reshape(g, (rows, 1)), known)
    return lib.ggml_mul(b.ctx, lib.ggml_sub(b.ctx, lib.ggml_soft_max(b.ctx, x), target), weight)


def _grad_cross_entropy_back(
    gg: Tensor, out: Tensor, g: Tensor, x: Tensor, labels: Tensor, *, smoothing: float
) -> tuple[Tensor, Tensor, None]:
    rows, classes = x.shape
    ones = full((rows,), 1.0, device=x.device)
    slope = record(CROSS_ENTROPY_BACK, ones, x, labels, smoothing=smoothing)
    known = sum(record(ONE_HOT, labels, classes=classes), axis=1, keepdims=True)
    weighted = mul(gg, mul(reshape(g, (rows, 1)), known))
    in_x = record(SOFTMAX_BACK, weighted, softmax(x), scale=1.0, causal=False)
    return sum(mul(gg, slope), axis=1), in_x, None


def _reference_cross_entropy_back(
    g: np.ndarray, logits: np.ndarray, labels: np.ndarray, *, smoothing: float
) -> np.ndarray:
    target = np.full(logits.shape, smoothing / logits.shape[1])
    target[np.arange(len(labels)), labels] += 1 - smoothing
    slope = np.exp(reference_log_softmax(logits)) - target
    return np.where(labels[:, None] < 0, 0.0, g[:, None] * slope)


CROSS_ENTROPY_BACK: Op = Op(
    "softmax_cross_entropy_back",
    shape=_cross_entropy_back_shape,
    lower=_lower_cross_entropy_back,
    grad=_grad_cross_entropy_back,
    reference=_reference_cross_entropy_back,
)


# ---- losses of classes ---------------------------------------------------------------------------


def _class_loss(
    op: str,
    scores: TensorLike,
    labels: TensorLike | ArrayLike,
    reduction: str,
    ignore_index: int | None,
    label_smoothing: float,
    of_labels: Callable[[Tensor, Tensor, np.ndarray | None], Tensor],
    of_targets: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Reduce the losses of rows.

    of_labels gives them for (rows, classes), labels (rows,), and where there are any: (rows,)
    or None; of_targets for probabilities of the scores' shape.
    """
    scores = as_tensor(scores, labels if isinstance(labels, Tensor) else None, op=op)
    if scores.ndim < 1:
        raise ShapeError(f"{op}: scores need a class axis; got shape ()")
    label_smoothing = fraction(op, "label_smoothing", label_smoothing)
    *batch, classes = scores.shape
    if of_targets is not None and _are_targets(labels, scores.shape):
        if ignore_index is not None:
            raise SettingError(f"{op}: ignore_index is for integer labels; got probabilities")
        targets = as_tensor(labels, scores, op=op)
        if label_smoothing:
            smoothed = label_smoothing / classes
            targets = affine(targets, scale=1.0 - label_smoothing, shift=smoothed)
        return reduce(op, of_targets(scores, targets), reduction)
    numbers = integer_labels(op, labels, scores, classes, ignore_index)
    if numbers.shape != tuple(batch):
        raise ShapeError(
            f"{op}: scores {scores.shape} need labels of shape {tuple(batch)}; got {numbers.shape}"
        )
    rows = prod(batch)
    known = None if ignore_index is None else numbers.numpy().reshape(rows) >= 0
    losses = of_labels(
        scores if scores.ndim == 2 else reshape(scores, (rows, classes)),
        numbers if numbers.ndim == 1 else reshape(numbers, (rows,)),
        known,
    )
    if reduction == "mean" and known is not None:
        count = max(int(known.sum()), 1)
        return mul(sum(losses), make_tensor(1.0 / count, device=scores.device))
    if reduction == "none":
        return reshape(losses, tuple(batch))
    return reduce(op, losses, reduction)


def _are_targets(labels: TensorLike | ArrayLike, shape: tuple[int, ...]) -> bool:
    """Tell whether labels are probabilities of all classes, not integers."""
    if isinstance(labels, Tensor):
        return labels._at[1].dtype.is_float and labels.shape == shape
    try:
        array = np.asarray(labels)
    except ValueError:  # ragged nested lists, which are refused as labels
        return False
    return array.dtype.kind == "f" and array.shape == shape


def softmax_cross_entropy(
    logits: TensorLike,
    labels: TensorLike | ArrayLike,
    *,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return -log softmax(logits)[label], in nats.

    logits (..., classes), integer labels (...). Labels may also be probabilities of the logits'
    shape: the loss is then -sum(labels * log softmax(logits)), in which a class of probability 0
    counts 0, even if its logit is -inf. Label smoothing takes that share of every label and spreads
    it over all classes. The mean is over the labels that are not ignored; if all are, the loss and
    its gradient are 0. Raises IndexRangeError for a label outside [0, classes), at once.

    >>> ag.softmax_cross_entropy([[-431.0, 279.0, 427.0]], [0]).item()
    858.0
    """
    return _class_loss(
        "softmax_cross_entropy", logits, labels, reduction, ignore_index, label_smoothing,
        lambda x, y, known: record(CROSS_ENTROPY, x, y, smoothing=float(label_smoothing)),
        lambda x, targets: _expected_cost(log_softmax(x), targets),
    )  # fmt: skip


def _expected_cost(log_p: Tensor, targets: Tensor) -> Tensor:
    """Return -sum(targets * log_p) over the classes, with 0 * -inf = 0."""
    return neg(sum(mul(targets, clamp(log_p, min=-LARGEST)), axis=-1))


PROBABILITY_FLOOR = 1e-12  # of cross_entropy


def cross_entropy(
    probabilities: TensorLike,
    labels: TensorLike | ArrayLike,
    *,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return -log probabilities[label]: probabilities (..., classes), integer labels (...).

    Labels may also be probabilities of the same shape. Probabilities below 1e-12 count as 1e-12:
    the loss is at most 27.6 for each label, and its gradient there 0. Prefer softmax_cross_entropy
    of logits, which needs no floor. The other settings, and errors, are as there.

    >>> ag.cross_entropy([[0.5, 0.5], [0.25, 0.75]], [0, 0], reduction="none").numpy()
    array([0.6931472, 1.3862944], dtype=float32)
    """

    def of_labels(p: Tensor, numbers: Tensor, known: np.ndarray | None) -> Tensor:
        cost = neg(log(clamp(record(PICK, p, numbers), min=PROBABILITY_FLOOR)))
        if label_smoothing:
            uniform = mean(log(clamp(p, min=PROBABILITY_FLOOR)), axis=-1)
            cost = sub(
                affine(cost, scale=1.0 - label_smoothing), affine(uniform, scale=label_smoothing)
            )
        return cost if known is None else mul(cost, make_tensor(known, device=p.device))

    return _class_loss(
        "cross_entropy", probabilities, labels, reduction, ignore_index, label_smoothing, of_labels,
        lambda p, targets: neg(sum(mul(targets, log(clamp(p, min=PROBABILITY_FLOOR))), axis=-1)),
    )  # fmt: skip


def nll_loss(
    log_probabilities: TensorLike,
    labels: TensorLike | ArrayLike,
    *,
    reduction: str = "mean",
    ignore_index: int | None = None,
) -> Tensor:
    """Return -log_probabilities[label]: log_probabilities (..., classes), integer labels (...).

    The mean is over the labels that are not ignored; if all are, the loss and its gradient are 0.
    Raises IndexRangeError for a label outside [0, classes), at once.

    >>> ag.nll_loss(ag.log_softmax([[0.0, 0.0]]), [1]).item()
    0.6931471824645996
    """
    return _class_loss(
        "nll_loss", log_probabilities, labels, reduction, ignore_index, 0.0,
        lambda x, y, known: neg(record(PICK, x, y)),
    )  # fmt: skip


# ---- losses of probabilities ---------------------------------------------------------------------


def binary_cross_entropy_with_logits(
    logits: TensorLike,
    targets: TensorLike,
    *,
    pos_weight: TensorLike | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return -t log sigmoid(x) * pos_weight - (1 - t) log sigmoid(-x), averaged over all elements.

    Targets are probabilities of the logits' shape; pos_weight broadcasts to it and weighs the
    positive ones. Raises ShapeError for shapes that do not fit.

    >>> ag.binary_cross_entropy_with_logits([1e4, -1e4], [1.0, 1.0], reduction="none").numpy()
    array([    0., 10000.], dtype=float32)
    """
    op = "binary_cross_entropy_with_logits"
    x, t = _pair(op, logits, targets)
    positive = mul(t, softplus(neg(x)))
    if pos_weight is not None:
        weight = as_tensor(pos_weight, x, op=op)
        if broadcast_shapes(op, x.shape, weight.shape) != x.shape:
            raise ShapeError(f"{op}: pos_weight must broadcast to {x.shape}; got {weight.shape}")
        positive = mul(positive, weight)
    return reduce(op, add(positive, mul(sub(1.0, t), softplus(x))), reduction)


SMALLEST = float(np.finfo(np.float32).tiny)


def kl_div(
    log_probabilities: TensorLike,
    targets: TensorLike,
    *,
    log_target: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """Return targets * (log(targets) - log_probabilities), averaged over all elements.

    The divergence of the targets, probabilities or their logarithms (log_target), from a model's
    log-probabilities, of the same shape. A target of 0 counts 0. reduction="batchmean" divides the
    sum by the size of the first axis, which gives the mean divergence of rows. Raises ShapeError
    unless both have the same shape.

    >>> ag.kl_div(np.log([[0.5, 0.5]]), [[1.0, 0.0]], reduction="batchmean").item()
    0.6931471824645996
    """
    op = "kl_div"
    log_p, t = _pair(op, log_probabilities, targets)
    log_p = clamp(log_p, min=-LARGEST)  # 0 * -inf = 0
    if log_target:
        losses = mul(exp(t), sub(clamp(t, min=-LARGEST), log_p))
    else:
        losses = mul(t, sub(log(clamp(t, min=SMALLEST)), log_p))
    if reduction == "batchmean":
        return affine(sum(losses), scale=1.0 / (log_p.shape[0] if log_p.ndim else 1))
    return reduce(op, losses, reduction)
