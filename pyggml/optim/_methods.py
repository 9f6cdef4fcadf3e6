"""The methods: what one update does to one parameter."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..checks import number_in
from ..errors import SettingError
from ..ops import add, affine, mul, reshape, sub
from ..ops.update import ADAMW, ASSIGN
from ..tensor import Tensor
from ._optimizer import Effect, Optimizer, Parameters, Schedule


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum if asked for (Sutskever et al. 2013, in PyTorch's
    form).

    Weight decay is added to the gradient: g + weight_decay * w. Further settings: see Optimizer.

    >>> w = ag.param([1.0])
    >>> opt = optim.SGD([w], lr=0.5)
    >>> with ag.grad_tape():
    ...     loss = ag.sum(w * w)
    >>> _ = ag.backward(loss)
    >>> opt.step(), w.numpy()
    (True, array([0.], dtype=float32))
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Schedule = 1e-2,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        **window: Any,
    ) -> None:
        super().__init__(params, lr, **window)
        self.momentum = number_in("SGD", "momentum", momentum, 0.0, 1.0)
        self.weight_decay = number_in("SGD", "weight_decay", weight_decay, 0.0)
        self.nesterov = bool(nesterov)
        if self.nesterov and not self.momentum:
            raise SettingError("SGD: nesterov needs momentum > 0")

    def init_single(self, parameter: Tensor) -> tuple[np.ndarray, ...]:
        return (np.zeros(parameter.shape),) if self.momentum else ()

    def hyper(self, float_type: type[np.floating]) -> list[float]:
        return [self.lr]

    def update_single(
        self, parameter: Tensor, gradient: Tensor, states: tuple[Tensor, ...], hyper: Tensor
    ) -> list[Effect]:
        effects: list[Effect] = []
        if self.weight_decay:
            gradient = add(gradient, affine(parameter, scale=self.weight_decay))
        if self.momentum:
            velocity = add(affine(states[0], scale=self.momentum), gradient)
            effects.append((ASSIGN, (states[0], velocity)))
            gradient = (
                add(affine(velocity, scale=self.momentum), gradient) if self.nesterov else velocity
            )
        return [*effects, (ASSIGN, (parameter, sub(parameter, mul(gradient, reshape(hyper, ())))))]


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    Further settings: see Optimizer.

    >>> w = ag.param([1.0])
    >>> opt = optim.AdamW([w], lr=0.5, weight_decay=0.0)
    >>> with ag.grad_tape():
    ...     loss = ag.sum(w * w)
    >>> _ = ag.backward(loss)
    >>> opt.step(), w.numpy()
    (True, array([0.5], dtype=float32))
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Schedule = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        weight_decay: float = 1e-2,
        **window: Any,
    ) -> None:
        super().__init__(params, lr, **window)
        name = type(self).__name__
        self.betas = (
            number_in(name, "betas[0]", betas[0], 0.0, 1.0),
            number_in(name, "betas[1]", betas[1], 0.0, 1.0),
        )
        self.epsilon = number_in(name, "epsilon", epsilon, 0.0)
        self.weight_decay = number_in(name, "weight_decay", weight_decay, 0.0)

    def init_single(self, parameter: Tensor) -> tuple[np.ndarray, ...]:
        return np.zeros(parameter.shape), np.zeros(parameter.shape)

    def hyper(self, float_type: type[np.floating]) -> list[float]:
        # The corrections must belong to the betas that the device really has: 1 - 0.999 in float32
        # is off by 5e-5.
        beta1, beta2 = (float(float_type(beta)) for beta in self.betas)
        update = self.t + 1  # the number of this one
        corrections = [1 / (1 - beta**update) for beta in (beta1, beta2)]
        return [self.lr, beta1, beta2, self.epsilon, self.weight_decay, *corrections]

    def update_single(
        self, parameter: Tensor, gradient: Tensor, states: tuple[Tensor, ...], hyper: Tensor
    ) -> list[Effect]:
        return [(ADAMW, (parameter, gradient, *states, hyper))]


class Adam(AdamW):
    """Adam (Kingma and Ba 2015). Weight decay is added to the gradient, unlike in AdamW.

    Further settings: see Optimizer.

    >>> w = ag.param([1.0])
    >>> opt = optim.Adam([w], lr=0.5)
    >>> opt.t
    0
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Schedule = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
        **window: Any,
    ) -> None:
        super().__init__(
            params, lr, betas=betas, epsilon=epsilon, weight_decay=weight_decay, **window
        )

    def hyper(self, float_type: type[np.floating]) -> list[float]:
        values = super().hyper(float_type)
        values[4] = 0.0
        return values

    def update_single(
        self, parameter: Tensor, gradient: Tensor, states: tuple[Tensor, ...], hyper: Tensor
    ) -> list[Effect]:
        if self.weight_decay:
            gradient = add(gradient, affine(parameter, scale=self.weight_decay))
        return super().update_single(parameter, gradient, states, hyper)
