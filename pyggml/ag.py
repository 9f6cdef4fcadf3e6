"""The `ag.*` namespace: tensors, the tape, and every operation."""

from __future__ import annotations

from .anomaly import detect_anomaly
from .autograd import backward, grad, grad_tape, is_recording, no_grad
from .checkpoint import checkpoint
from .device import Device
from .gradcheck import gradcheck
from .ops import *  # noqa: F403
from .ops import __all__ as _ops
from .report import plan_report, saved_tensors
from .tensor import Parameter, Tensor, TensorLike, make_tensor


def tensor(
    data: TensorLike,
    *,
    dtype: object = None,
    device: Device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Copy data into a tensor: floats and booleans become float32, integers int32.

    Raises DTypeError for data that is not real numbers, ShapeError beyond four dimensions or
    without elements.

    >>> ag.tensor([[1, 2], [3, 4]], dtype="float32").shape
    (2, 2)
    """
    return make_tensor(data, dtype=dtype, device=device, requires_grad=requires_grad)


def param(data: TensorLike, *, device: Device | str | None = None) -> Parameter:
    """Copy data into a float32 parameter: a leaf that gradients flow into and optimizers change.

    >>> ag.param([1, 2]).requires_grad
    True
    """
    made = make_tensor(
        data, dtype="float32", device=device, requires_grad=True, cls=Parameter, op="param"
    )
    assert isinstance(made, Parameter)
    return made


__all__ = [
    "Parameter",
    "Tensor",
    "backward",
    "checkpoint",
    "detect_anomaly",
    "grad",
    "grad_tape",
    "gradcheck",
    "is_recording",
    "no_grad",
    "param",
    "plan_report",
    "saved_tensors",
    "tensor",
    *(name for name in _ops if name not in ("update", "sum_to")),
]
