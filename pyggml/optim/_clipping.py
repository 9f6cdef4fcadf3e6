"""Keep gradients in bounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import numpy as np

from ..checks import as_list, number_in, shown
from ..errors import DTypeError, GradError
from ..ops import abs, add, clamp, div, max, maximum, mul, sqrt, sum
from ..tensor import Tensor, make_tensor


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all gradients together, which squaring does not overflow."""
    # Divided by their largest value, gradients lie in [-1, 1]; all zeros are divided by 1e-38.
    tiny = float(np.finfo(np.float32).tiny)
    unit = maximum(max(abs(gradients[0])), tiny)
    for gradient in gradients[1:]:
        unit = maximum(unit, max(abs(gradient)))
    parts = [div(gradient, unit) for gradient in gradients]
    total = sum(mul(parts[0], parts[0]))
    for part in parts[1:]:
        total = add(total, sum(mul(part, part)))
    return mul(unit, sqrt(total))


def _leaves(op: str, params: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return tensors with a .grad, each once."""
    listed = [params] if isinstance(params, Tensor) else as_list(op, "params", params, "parameters")
    for value in listed:
        if not isinstance(value, Tensor) or not isinstance(value.grad, (Tensor, type(None))):
            wrong = value.grad if isinstance(value, Tensor) else value
            raise DTypeError(f"{op}: needs parameters and tensors as .grad; got {shown(wrong)}")
    return list(dict.fromkeys(listed))


def clip_grad_norm(params: Iterable[Tensor], max_norm: float) -> float:
    """Scale all gradients together so that their norm is at most max_norm; return it from before.

    The norm is Euclidean. The clipped gradients replace .grad, and show in what ag.backward
    returned. In an accumulation window this limits the sum so far: use the optimizer's clip_norm
    instead, which limits the mean once, and skips a step whose norm is not finite. The gradients of
    a loss that ``loss_scale`` has scaled are scaled, too: there as well use clip_norm. Raises
    GradError, having changed nothing, if the norm is not finite; SettingError for a negative limit.

    >>> w = ag.param([3.0, 4.0])
    >>> with ag.grad_tape():
    ...     loss = ag.sum(w * w) * 0.5
    >>> grads = ag.backward(loss)
    >>> optim.clip_grad_norm([w], 1.0), w.grad.numpy()
    (5.0, array([0.6, 0.8], dtype=float32))
    """
    params = _leaves("clip_grad_norm", params)
    limit = max_norm if max_norm == inf else number_in("clip_grad_norm", "max_norm", max_norm, 0.0)
    gradients = [p.grad for p in params if p.grad is not None]
    if not gradients:
        return 0.0
    norm = gradient_norm(gradients).item()
    if not np.isfinite(norm):
        raise GradError(
            f"clip_grad_norm: the gradients' norm is not finite, {norm}; skip the update"
        )
    if norm > limit:
        factor = make_tensor(limit / norm, device=gradients[0].device)
        for gradient in gradients:
            gradient._become(mul(gradient, factor))
    return float(norm)


def clip_grad_value(params: Iterable[Tensor], max_value: float) -> None:
    """Limit every element of every gradient to [-max_value, max_value]; NaN stays.

    In an accumulation window this limits the sum so far: use the optimizer's clip_value instead,
    which limits the mean once. Raises SettingError for a negative limit.

    >>> w = ag.param([3.0, 4.0])
    >>> with ag.grad_tape():
    ...     loss = ag.sum(w * w) * 0.5
    >>> grads = ag.backward(loss)
    >>> optim.clip_grad_value([w], 3.5)
    >>> w.grad.numpy()
    array([3. , 3.5], dtype=float32)
    """
    limit = number_in("clip_grad_value", "max_value", max_value, 0.0)
    for parameter in _leaves("clip_grad_value", params):
        if parameter.grad is not None:
            parameter.grad._become(clamp(parameter.grad, min=-limit, max=limit))
