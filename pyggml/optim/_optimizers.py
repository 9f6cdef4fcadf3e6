"""The optimizer base and the methods built on it.

The base owns the counters, the accumulation window and the run; a method is what one parameter
needs: `init_single`, its state, and `update_single`, the effects that change parameter and state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ..checks import number_in, positive_integer
from ..dtypes import float32
from ..errors import GradError, SettingError
from ..graph import PLAIN, DerivedCache, Frame, Node, Op, Source, find_node, state
from ..ops import add, affine, mul, reshape, sub
from ..ops.update import ADAMW, ASSIGN
from ..plan import evaluate
from ..tensor import Tensor, node_in, passing


class Optimizer:
    """Base of all optimizers.

    Args:
        params: the parameters, as a list, a dict, or what module.parameters() returns.
        lr: the learning rate; may be changed at any time.
        accumulate_steps: how many backward passes make one update.
        average: whether the update uses the mean of their gradients, or the sum.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Mapping[str, Tensor],
        *,
        lr: float,
        accumulate_steps: int = 1,
        average: bool = True,
    ) -> None:
        name = type(self).__name__
        listed = list(params.values()) if isinstance(params, Mapping) else list(params)
        self.params: list[Tensor] = list(dict.fromkeys(listed))  # a tied parameter is updated once
        if not self.params:
            raise SettingError(f"{name}: needs at least one parameter; got none")
        for parameter in self.params:
            if (
                not isinstance(parameter, Tensor)
                or parameter._source is None
                or not parameter.is_leaf
            ):
                raise SettingError(
                    f"{name}: needs parameters made with ag.param; got {type(parameter).__name__}"
                )
        self.accumulate_steps = positive_integer(name, "accumulate_steps", accumulate_steps)
        self.lr = lr
        self.average = bool(average)
        self.t = 0
        """Updates made; calls of step() that only filled the window do not count."""
        self._gathered = 0  # backward passes in the open window
        self._state: dict[Tensor, tuple[Source, ...]] = {}
        self._effects = DerivedCache()  # nodes of a step -> the nodes of its update

    @property
    def lr(self) -> float:
        """The learning rate. Changing it plans nothing anew."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._lr = number_in(type(self).__name__, "lr", value, 0.0)

    # ---- what a method defines ----

    def init_single(self, parameter: Tensor) -> tuple[np.ndarray, ...]:
        """Return the first state of one parameter."""
        return ()

    def hyper(self, float_type: type[np.floating]) -> list[float]:
        """Return the numbers of this update: inputs of the graph, so changing them plans nothing
        anew.

        ``float_type`` is what the device computes in.
        """
        raise NotImplementedError

    def update_single(
        self, parameter: Tensor, gradient: Tensor, states: tuple[Tensor, ...], hyper: Tensor
    ) -> list[tuple[Op, tuple[Tensor, ...]]]:
        """Return the effects that update one parameter and its state."""
        raise NotImplementedError

    # ---- what people call ----

    def zero_grad(self) -> None:
        """Set every parameter's gradient to None."""
        for parameter in self.params:
            parameter.grad = None

    def step(self, grads: Mapping[Tensor, Tensor] | None = None) -> bool:
        """Update the parameters from their accumulated gradients, or from the ones given; return
        whether it did.

        With accumulate_steps=k the first k - 1 calls compute and keep the gradients and return
        False; the k-th updates, empties the gradients, and returns True. Everything pending on the
        same tape is computed in the same run, and its tape ends. A parameter without a gradient is
        left alone.
        """
        name = type(self).__name__
        if grads is not None and self.accumulate_steps > 1:
            raise GradError(
                f"{name}: step(grads) would use the last micro-batch only; with "
                f"accumulate_steps={self.accumulate_steps} "
                "call step(), which reads the sum in .grad"
            )
        pairs = [
            (parameter, gradient)
            for parameter in self.params
            if (gradient := parameter.grad if grads is None else grads.get(parameter)) is not None
        ]
        self._gathered += 1
        if self._gathered < self.accumulate_steps:
            for _, gradient in pairs:
                gradient._materialized()  # the first computes them all, in one run
            return False
        count, self._gathered = self._gathered, 0
        if pairs:
            self.t += 1
            self._update(pairs, 1.0 / count if self.average else 1.0)
        if self.accumulate_steps > 1:
            self.zero_grad()
        return True

    # ---- the run ----

    def _update(self, pairs: list[tuple[Tensor, Tensor]], scale: float) -> None:
        frame = self._frame_of(pairs)
        device = frame.device
        float_type = device.numpy_dtype(float32).type
        numbers = np.array(self.hyper(float_type), float_type)
        hyper = frame.bind(Source(numbers.shape, float32, device, device.upload(numbers, float32)))
        for parameter, _ in pairs:
            if parameter not in self._state:
                self._state[parameter] = tuple(
                    Source(
                        a.shape, float32, device, device.upload(a.astype(parameter.dtype), float32)
                    )
                    for a in self.init_single(parameter)
                )
        nodes = [
            (node_in(p, frame), node_in(g, frame), *[frame.bind(s) for s in self._state[p]])
            for p, g in pairs
        ]
        key = (hyper, scale, *nodes)
        effects = self._effects.get(key)
        if effects is None:
            with state.inside(frame, PLAIN):
                effects = self._effects[key] = self._record_update(frame, nodes, hyper, scale)
        evaluate(frame, effects=effects)

    def _record_update(
        self, frame: Frame, nodes: list[tuple], hyper: Node, scale: float
    ) -> tuple[Node, ...]:
        effects = []
        for parameter, gradient, *states in nodes:
            mean = passing(gradient, frame)
            if scale != 1.0:
                mean = affine(mean, scale=scale)
            handles = tuple(passing(node, frame) for node in states)
            for op, inputs in self.update_single(
                passing(parameter, frame), mean, handles, passing(hyper, frame)
            ):
                effects.append(
                    find_node((op, (), PLAIN, *(node_in(tensor, frame) for tensor in inputs)))
                )
        return tuple(effects)

    def _frame_of(self, pairs: list[tuple[Tensor, Tensor]]) -> Frame:
        """Return the frame where the gradients wait; of several, compute all but the last."""
        frames = list(dict.fromkeys(g._at[0] for _, g in pairs if g._source is None))
        for frame in frames[:-1]:
            evaluate(frame)
        return frames[-1] if frames else state.new_frame(pairs[0][0].device)


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum if asked for (Sutskever et al. 2013, in PyTorch's
    form).

    Weight decay is added to the gradient: g + weight_decay * w.

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
        params: Iterable[Tensor] | Mapping[str, Tensor],
        lr: float = 1e-2,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        accumulate_steps: int = 1,
        average: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, accumulate_steps=accumulate_steps, average=average)
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
    ) -> list[tuple[Op, tuple[Tensor, ...]]]:
        effects: list[tuple[Op, tuple[Tensor, ...]]] = []
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
        params: Iterable[Tensor] | Mapping[str, Tensor],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        weight_decay: float = 1e-2,
        accumulate_steps: int = 1,
        average: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, accumulate_steps=accumulate_steps, average=average)
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
        decay = self.weight_decay
        return [
            self.lr,
            beta1,
            beta2,
            self.epsilon,
            decay,
            1 / (1 - beta1**self.t),
            1 / (1 - beta2**self.t),
        ]

    def update_single(
        self, parameter: Tensor, gradient: Tensor, states: tuple[Tensor, ...], hyper: Tensor
    ) -> list[tuple[Op, tuple[Tensor, ...]]]:
        return [(ADAMW, (parameter, gradient, *states, hyper))]


class Adam(AdamW):
    """Adam (Kingma and Ba 2015). Weight decay is added to the gradient, unlike in AdamW.

    >>> w = ag.param([1.0])
    >>> opt = optim.Adam([w], lr=0.5)
    >>> opt.t
    0
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Mapping[str, Tensor],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
        accumulate_steps: int = 1,
        average: bool = True,
    ) -> None:
        super().__init__(
            params, lr, betas=betas, epsilon=epsilon, weight_decay=weight_decay,
            accumulate_steps=accumulate_steps, average=average,
        )  # fmt: skip

    def hyper(self, float_type: type[np.floating]) -> list[float]:
        values = super().hyper(float_type)
        values[4] = 0.0
        return values

    def update_single(
        self, parameter: Tensor, gradient: Tensor, states: tuple[Tensor, ...], hyper: Tensor
    ) -> list[tuple[Op, tuple[Tensor, ...]]]:
        if self.weight_decay:
            gradient = add(gradient, affine(parameter, scale=self.weight_decay))
        return super().update_single(parameter, gradient, states, hyper)
