"""Ops that change parameters in place: what optimizers end in. They run after everything else in a
program.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._ffi import lib
from ..errors import ShapeError
from ..graph import Op, Spec
from ..lowering import GgmlTensor, Lowering

# ---- assign --------------------------------------------------------------------------------------


def _assign_shape(target: Spec, value: Spec) -> Spec:
    if target.shape != value.shape:
        raise ShapeError(
            f"assign: target and value must have one shape; got {target.shape} and {value.shape}"
        )
    return Spec(target.shape, target.dtype)


ASSIGN = Op(
    "assign",
    shape=_assign_shape,
    lower=lambda b, target, value: lib.ggml_cpy(b.ctx, value, target),
    reference=lambda target, value: (value,),
    differentiable=False,
    mutates=(0,),
)

# ---- accumulate ----------------------------------------------------------------------------------


ACCUMULATE = Op(
    "accumulate",
    shape=_assign_shape,
    lower=lambda b, target, value: lib.ggml_add_inplace(b.ctx, target, b.contiguous(value)),
    reference=lambda target, value: (target + value,),
    differentiable=False,
    mutates=(0,),
)

# ---- AdamW (Loshchilov and Hutter 2019) ----------------------------------------------------------
# hyper = [learning rate, beta1, beta2, epsilon, weight decay, 1 / (1 - beta1^t), 1 / (1 - beta2^t)]


def _adamw_shape(parameter: Spec, gradient: Spec, m: Spec, v: Spec, hyper: Spec) -> Spec:
    assert parameter.shape == gradient.shape == m.shape == v.shape and hyper.shape == (7,)
    return Spec(parameter.shape, parameter.dtype)


def _lower_adamw(
    b: Lowering,
    parameter: GgmlTensor,
    gradient: GgmlTensor,
    m: GgmlTensor,
    v: GgmlTensor,
    hyper: GgmlTensor,
) -> GgmlTensor:
    if b.own_kernels:
        return lib.pg_adamw(b.ctx, parameter, b.contiguous(gradient), m, v, hyper)
    lib.ggml_set_param(parameter)
    return lib.ggml_opt_step_adamw(b.ctx, parameter, b.contiguous(gradient), m, v, hyper)


def _reference_adamw(w: Any, g: Any, m: Any, v: Any, hyper: Any) -> tuple[np.ndarray, ...]:
    lr, beta1, beta2, epsilon, decay, scale1, scale2 = hyper
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    return w * (1 - lr * decay) - lr * (m * scale1) / (np.sqrt(v * scale2) + epsilon), m, v


ADAMW = Op(
    "adamw",
    shape=_adamw_shape,
    lower=_lower_adamw,
    reference=_reference_adamw,
    differentiable=False,
    mutates=(0, 2, 3),
)
