"""The methods: what one update does to one parameter."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np

from ..checks import as_list, number_in, plain_number, shown
from ..errors import SettingError
from ..ops import add, div, full, maximum, mean, mul, sqr, sqrt, sub
from ..ops import update as fused
from ..ops.update import Effect, Numbers, assign, factored_step
from ..tensor import Tensor
from ._groups import Parameters, Schedule
from ._optimizer import Optimizer, Update


def _zeros(parameter: Tensor, count: int) -> tuple[np.ndarray, ...]:
    return tuple(np.zeros(parameter.shape, np.float32) for _ in range(count))


def _betas(method: str, betas: tuple[float, float]) -> tuple[float, float]:
    first, second = _pair(method, "betas", betas)
    return (
        number_in(method, "betas[0]", first, 0.0, 1.0),
        number_in(method, "betas[1]", second, 0.0, 1.0),
    )


def _pair(method: str, name: str, value: Any) -> list[Any]:
    pair = as_list(method, name, value, "two numbers")
    if len(pair) != 2:
        raise SettingError(f"{method}: {name} must be two numbers; got {shown(value)}")
    return pair


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum if asked for.

    Momentum is that of Sutskever et al. 2013, in PyTorch's form. Weight decay is added to the
    gradient: g + weight_decay * w. The state is the velocity, if there is momentum. Further
    settings: see Optimizer.

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
        **common: Any,
    ) -> None:
        super().__init__(params, lr, weight_decay=weight_decay, **common)
        self.momentum = number_in("SGD", "momentum", momentum, 0.0, 1.0)
        self.nesterov = bool(nesterov)
        if self.nesterov and not self.momentum:
            raise SettingError("SGD: nesterov needs momentum > 0")

    def init_single(self, parameter: Tensor) -> tuple[np.ndarray, ...]:
        return _zeros(parameter, 1 if self.momentum else 0)

    def numbers(self, update: Update) -> dict[str, float]:
        return {**super().numbers(update), "momentum": self.momentum}

    def update_single(
        self, parameter: Tensor, gradient: Tensor, states: tuple[Tensor, ...], numbers: Numbers
    ) -> list[Effect]:
        return [fused.SGD(parameter, gradient, states, numbers, flag=self.nesterov)]


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    The state is two moments of the gradient, each as large as the parameter. Further settings: see
    Optimizer.

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
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **common: Any,
    ) -> None:
        super().__init__(params, lr, weight_decay=weight_decay, **common)
        name = type(self).__name__
        self.betas = _betas(name, betas)
        self.eps = number_in(name, "eps", eps, 0.0)

    def init_single(self, parameter: Tensor) -> tuple[np.ndarray, ...]:
        return _zeros(parameter, 2)

    def numbers(self, update: Update) -> dict[str, float]:
        # The corrections must belong to the betas that the device really has: 1 - 0.999 in float32
        # is off by 1e-5.
        beta1, beta2 = self.betas
        beta1, beta2 = float(update.float_type(beta1)), float(update.float_type(beta2))
        return {
            "lr": update.lr,
            "beta1": beta1,
            "beta2": beta2,
            "eps": self.eps,
            "weight_decay": update.weight_decay,
            "scale1": 1 / (1 - beta1**update.t),
            "scale2": 1 / (1 - beta2**update.t),
            "coupled": 0.0,
        }

    def update_single(
        self, parameter: Tensor, gradient: Tensor, states: tuple[Tensor, ...], numbers: Numbers
    ) -> list[Effect]:
        return [fused.ADAMW(parameter, gradient, states, numbers)]


class Adam(AdamW):
    """Adam (Kingma and Ba 2015). Weight decay is added to the gradient, unlike in AdamW.

    The state is two moments of the gradient, each as large as the parameter. Further settings: see
    Optimizer.

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
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(params, lr, betas=betas, eps=eps, weight_decay=weight_decay, **common)

    def numbers(self, update: Update) -> dict[str, float]:
        return {**super().numbers(update), "weight_decay": 0.0, "coupled": update.weight_decay}

    def update_single(
        self, parameter: Tensor, gradient: Tensor, states: tuple[Tensor, ...], numbers: Numbers
    ) -> list[Effect]:
        return [fused.ADAMW(parameter, gradient, states, numbers, flag=self.decays)]


class Lion(Optimizer):
    """Lion, which moves every weight by the learning rate, up or down.

    Chen et al. 2023, algorithm 2. The sign of a mean of momentum and gradient decides. Weight decay
    is decoupled, as in AdamW. The authors advise a learning rate 3 to 10 times smaller than
    AdamW's, and a weight decay as many times larger. The state is the momentum. Further settings:
    see Optimizer.

    >>> w = ag.param([1.0, -1.0])
    >>> opt = optim.Lion([w], lr=0.25)
    >>> with ag.grad_tape():
    ...     loss = ag.sum(w * w)
    >>> _ = ag.backward(loss)
    >>> opt.step(), w.numpy()
    (True, array([ 0.75, -0.75], dtype=float32))
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Schedule = 1e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(params, lr, weight_decay=weight_decay, **common)
        self.betas = _betas("Lion", betas)

    def init_single(self, parameter: Tensor) -> tuple[np.ndarray, ...]:
        return _zeros(parameter, 1)

    def numbers(self, update: Update) -> dict[str, float]:
        share1, share2 = (1 - beta for beta in self.betas)
        return {**super().numbers(update), "share1": share1, "share2": share2}

    def update_single(
        self, parameter: Tensor, gradient: Tensor, states: tuple[Tensor, ...], numbers: Numbers
    ) -> list[Effect]:
        return [fused.LION(parameter, gradient, states, numbers)]


class RMSprop(Optimizer):
    """RMSprop (Tieleman and Hinton 2012, lecture 6.5), in PyTorch's form.

    The gradient is divided by the root of a running mean of its square, or, if centered, of its
    variance (Graves 2013); eps is added outside of the root. A variance that rounding has taken
    below 0 counts as 0. Weight decay is added to the gradient. The state is the mean square, and,
    where asked for, the mean and the velocity. Further settings: see Optimizer.

    >>> w = ag.param([1.0])
    >>> opt = optim.RMSprop([w], lr=0.25, alpha=0.75)
    >>> with ag.grad_tape():
    ...     loss = ag.sum(w * w)
    >>> _ = ag.backward(loss)
    >>> opt.step(), w.numpy()
    (True, array([0.5], dtype=float32))
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Schedule = 1e-2,
        *,
        alpha: float = 0.99,
        eps: float = 1e-8,
        momentum: float = 0.0,
        centered: bool = False,
        weight_decay: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(params, lr, weight_decay=weight_decay, **common)
        self.alpha = number_in("RMSprop", "alpha", alpha, 0.0, 1.0)
        self.eps = number_in("RMSprop", "eps", eps, 0.0)
        self.momentum = number_in("RMSprop", "momentum", momentum, 0.0, 1.0)
        self.centered = bool(centered)

    def init_single(self, parameter: Tensor) -> tuple[np.ndarray, ...]:
        return _zeros(parameter, 1 + self.centered + bool(self.momentum))

    def numbers(self, update: Update) -> dict[str, float]:
        own = {"share": 1 - self.alpha, "eps": self.eps, "momentum": self.momentum}
        return {**super().numbers(update), **own}

    def update_single(
        self, parameter: Tensor, gradient: Tensor, states: tuple[Tensor, ...], numbers: Numbers
    ) -> list[Effect]:
        return [fused.RMSPROP(parameter, gradient, states, numbers, flag=self.centered)]


class Adagrad(Optimizer):
    """Adagrad (Duchi et al. 2011), in PyTorch's form.

    The gradient is divided by the root of the sum of all its squares so far. lr_decay divides the
    learning rate by 1 + lr_decay * (updates of the parameter before this one). Weight decay is
    added to the gradient. The state is the sum. Further settings: see Optimizer.

    >>> w = ag.param([1.0])
    >>> opt = optim.Adagrad([w], lr=0.5)
    >>> with ag.grad_tape():
    ...     loss = ag.sum(w * w)
    >>> _ = ag.backward(loss)
    >>> opt.step(), w.numpy()
    (True, array([0.5], dtype=float32))
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Schedule = 1e-2,
        *,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(params, lr, weight_decay=weight_decay, **common)
        self.lr_decay = number_in("Adagrad", "lr_decay", lr_decay, 0.0)
        self.initial_accumulator_value = number_in(
            "Adagrad", "initial_accumulator_value", initial_accumulator_value, 0.0
        )
        self.eps = number_in("Adagrad", "eps", eps, 0.0)

    def init_single(self, parameter: Tensor) -> tuple[np.ndarray, ...]:
        return (np.full(parameter.shape, self.initial_accumulator_value, np.float32),)

    def numbers(self, update: Update) -> dict[str, float]:
        lr = update.lr / (1 + (update.t - 1) * self.lr_decay)
        return {"lr": lr, "weight_decay": update.weight_decay, "eps": self.eps}

    def update_single(
        self, parameter: Tensor, gradient: Tensor, states: tuple[Tensor, ...], numbers: Numbers
    ) -> list[Effect]:
        return [fused.ADAGRAD(parameter, gradient, states, numbers)]


class Adafactor(Optimizer):
    """Adafactor, whose state for a matrix is a row and a column (Shazeer and Stern 2018).

    In PyTorch's form, which has no momentum: for a parameter of two or more axes the mean square of
    the gradient is kept for each row and for each column of its last two axes, (..., n, 1) and
    (..., 1, m), and the square of an element is estimated as row * column / mean of rows; a vector
    keeps all of its squares. With t the count of updates:

    - a square's running mean moves by t**beta2_decay of the way;
    - the step is gradient / root of the estimate, at least eps[0] (None: float32's), scaled down
      where its root mean square is above d, the clipping threshold;
    - the step size is relative: the root mean square of the weights, at least eps[1], times the
      smaller of lr and 1/sqrt(t);
    - weight decay is decoupled: lr * weight_decay of the weights.

    Further settings: see Optimizer.

    >>> w = ag.param(np.ones((3, 4)))
    >>> opt = optim.Adafactor([w], lr=0.01)
    >>> with ag.grad_tape():
    ...     loss = ag.sum(w * w)
    >>> _ = ag.backward(loss)
    >>> opt.step(), w.numpy()[0, 0].round(4)
    (True, np.float32(0.99))
    >>> {name: value.shape for name, value in opt.state_dict().items() if name in ("0.0", "0.1")}
    {'0.0': (3, 1), '0.1': (1, 4)}
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Schedule = 1e-2,
        *,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(params, lr, weight_decay=weight_decay, **common)
        self.beta2_decay = plain_number("Adafactor", "beta2_decay", beta2_decay)
        if not -inf < self.beta2_decay <= 0:
            raise SettingError(f"Adafactor: beta2_decay must be at most 0; got {beta2_decay!r}")
        first, second = _pair("Adafactor", "eps", eps)
        first = float(np.finfo(np.float32).eps) if first is None else first
        self.eps = (
            number_in("Adafactor", "eps[0]", first, 0.0),
            number_in("Adafactor", "eps[1]", second, 0.0),
        )
        self.d = number_in("Adafactor", "d", d, 1.0)

    def init_single(self, parameter: Tensor) -> tuple[np.ndarray, ...]:
        if parameter.ndim < 2:
            return _zeros(parameter, 1)
        *batch, n, m = parameter.shape
        return np.zeros((*batch, n, 1), np.float32), np.zeros((*batch, 1, m), np.float32)

    def numbers(self, update: Update) -> dict[str, float]:
        return {
            "share": update.t**self.beta2_decay,
            "rate": min(update.lr, update.t**-0.5),
            "keep": 1 - update.lr * update.weight_decay,
            "eps1": self.eps[0],
            "least": max(self.eps[0] ** 2, float(np.finfo(np.float32).tiny)),
            "eps2": self.eps[1],
            "d": self.d,
        }

    def update_single(
        self, parameter: Tensor, gradient: Tensor, states: tuple[Tensor, ...], numbers: Numbers
    ) -> list[Effect]:
        def moved(state: Tensor, value: Tensor) -> Tensor:
            return add(state, mul(numbers["share"], sub(value, state)))

        squares = sqr(gradient)
        if parameter.ndim < 2:
            new = [moved(states[0], squares)]
            row, column = new[0], full((), 1.0, device=parameter.device)
        else:
            new = [
                moved(states[0], mean(squares, axis=-1, keepdims=True)),  # (..., n, 1)
                moved(states[1], mean(squares, axis=-2, keepdims=True)),  # (..., 1, m)
            ]
            total = maximum(mean(new[0], axis=-2, keepdims=True), numbers["eps1"])
            row, column = div(new[0], total), new[1]
        # max(1, rms / d) divides the step; the relative step size multiplies it.
        step_squared = mean(div(squares, maximum(mul(row, column), numbers["least"])))
        clip = maximum(div(sqrt(step_squared), numbers["d"]), 1.0)
        scale = maximum(sqrt(mean(sqr(parameter))), numbers["eps2"])
        step = factored_step(
            parameter, gradient, row, column,
            size=div(mul(scale, numbers["rate"]), clip), keep=numbers["keep"],
            least=numbers["least"]
        )  # fmt: skip
        return [step, *(assign(state, value) for state, value in zip(states, new, strict=True))]
