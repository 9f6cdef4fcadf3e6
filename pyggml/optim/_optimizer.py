"""The base of all optimizers: counters, the accumulation window, clipping, and the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ..checks import number_in, positive_integer
from ..dtypes import float32
from ..errors import DeviceError, GradError, SettingError, ShapeError
from ..graph import PLAIN, DerivedCache, Frame, Node, Op, Source, find_node, state
from ..ops import mul
from ..plan import evaluate
from ..tensor import Tensor, node_in, passing
from ..transfer import source_on
from ._clipping import gradient_norm

Parameters = Iterable[Tensor] | Mapping[str, Tensor]
Schedule = Callable[[int], float]
Effect = tuple[Op, tuple[Tensor, ...]]


class Optimizer:
    """Base of all optimizers. A method adds `init_single` and `update_single`, for one parameter.

    Args:
        params: the parameters, as a list, a dict, or what module.parameters() returns.
        lr: the learning rate, or a function from the number of updates made to it (a schedule).
            May be changed at any time.
        accumulate_steps: how many backward passes make one update.
        average: whether the update uses the mean of their gradients, or the sum.
        clip_norm: the largest norm that the gradient of an update, averaged first, may have.

    Schedules, clipping, weight decay and Adam's corrections see updates, not backward passes.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Schedule,
        *,
        accumulate_steps: int = 1,
        average: bool = True,
        clip_norm: float | None = None,
    ) -> None:
        name = type(self).__name__
        listed = list(params.values()) if isinstance(params, Mapping) else list(params)
        self.params: list[Tensor] = list(dict.fromkeys(listed))  # a tied one is updated once
        if not self.params:
            raise SettingError(f"{name}: needs at least one parameter; got none")
        for parameter in self.params:
            is_leaf = isinstance(parameter, Tensor) and parameter.is_leaf
            if not is_leaf or parameter._source is None:
                kind = type(parameter).__name__
                raise SettingError(f"{name}: needs parameters made with ag.param; got {kind}")
        self.accumulate_steps = positive_integer(name, "accumulate_steps", accumulate_steps)
        self.lr = lr
        self.average = bool(average)
        self.clip_norm = None
        if clip_norm is not None:
            self.clip_norm = number_in(name, "clip_norm", clip_norm, np.finfo(np.float32).tiny)
        self.t = 0
        """Updates made; calls of step() that only filled the window do not count."""
        self.skipped = 0
        """Updates that were left out because the gradient's norm was not finite (clip_norm)."""
        self._gathered = 0  # backward passes in the open window
        self._counted: list[int] = []  # what step(count=) was given in it
        self._state: dict[Tensor, tuple[Source, ...]] = {}
        self._effects = DerivedCache()  # nodes of a step -> the nodes of its update

    @property
    def lr(self) -> float:
        """The learning rate of the next update. Changing it plans nothing anew."""
        return self._lr if self._schedule is None else self._checked(self._schedule(self.t))

    @lr.setter
    def lr(self, value: float | Schedule) -> None:
        self._schedule = value if callable(value) else None
        if not callable(value):
            self._lr = self._checked(value)

    def _checked(self, value: float) -> float:
        return number_in(type(self).__name__, "lr", value, 0.0)

    # ---- what a method defines ----

    def init_single(self, parameter: Tensor) -> tuple[np.ndarray, ...]:
        """Return the first state of one parameter."""
        return ()

    def hyper(self, float_type: type[np.floating]) -> list[float]:
        """Return the numbers of this update: graph inputs, so changing them plans nothing anew.

        ``float_type`` is what the device computes in.
        """
        raise NotImplementedError

    def update_single(
        self, parameter: Tensor, gradient: Tensor, states: tuple[Tensor, ...], hyper: Tensor
    ) -> list[Effect]:
        """Return the effects that update one parameter and its state."""
        raise NotImplementedError

    # ---- what people call ----

    def zero_grad(self, *, discard_window: bool = False) -> None:
        """Set every parameter's gradient to None.

        Raises GradError in the middle of an accumulation window, whose gradients it would lose,
        unless discard_window says that this is meant.
        """
        if self._gathered and not discard_window:
            raise GradError(
                f"{type(self).__name__}: zero_grad would lose {self._gathered} of "
                f"{self.accumulate_steps} micro-batches; leave it out, since step() empties the "
                "gradients when it updates, or pass discard_window=True"
            )
        self._close_window()
        for parameter in self.params:
            parameter.grad = None

    def step(
        self,
        grads: Mapping[Tensor, Tensor] | None = None,
        *,
        count: int | None = None,
        flush: bool = False,
    ) -> bool:
        """Update the parameters from their gradients; return whether it did.

        Without ``grads`` the accumulated .grad is read. With accumulate_steps=k the first k - 1
        calls compute the gradients, keep them and return False; the k-th updates with their mean
        (or sum), empties them, and returns True. ``flush`` updates at once with what the window
        holds: the way to end an epoch. Everything pending on the same tape is computed in the same
        run, and its tape ends. A parameter without a gradient is left alone.

        For micro-batches of unequal size let the loss be a sum, and give ``count``, the number of
        terms in it: the update then divides by the terms of the whole window.

        Returns False as well when clip_norm is set and the norm is not finite: then nothing
        changes, but for `skipped`. Raises GradError for grads in a window of several.

        >>> w = ag.param([1.0])
        >>> opt = optim.SGD([w], lr=1.0, accumulate_steps=2)
        >>> for x in ([4.0], [0.0, 0.0, 0.0]):
        ...     with ag.grad_tape():
        ...         loss = ag.sum(w * x)
        ...     grads = ag.backward(loss)
        ...     updated = opt.step(count=len(x))
        >>> updated, w.item()
        (True, 0.0)
        """
        name = type(self).__name__
        if grads is not None and self.accumulate_steps > 1:
            raise GradError(
                f"{name}: step(grads) would use the last micro-batch only; with accumulate_steps="
                f"{self.accumulate_steps} call step(), which reads the sum in .grad"
            )
        if count is not None:
            self._counted.append(positive_integer(name, "count", count))
        self._gathered += 1
        return self._finish(grads, full=flush or self._gathered >= self.accumulate_steps)

    def flush(self) -> bool:
        """Update with what an incomplete window holds; return whether there was anything."""
        return bool(self._gathered) and self._finish(None, full=True)

    def _finish(self, grads: Mapping[Tensor, Tensor] | None, full: bool) -> bool:
        pairs = [
            (parameter, gradient)
            for parameter in self.params
            if (gradient := parameter.grad if grads is None else grads.get(parameter)) is not None
        ]
        if not full:
            for _, gradient in pairs:
                gradient._materialized()  # the first computes them all, in one run
            return False
        if self._counted and len(self._counted) != self._gathered:
            raise GradError(
                f"{type(self).__name__}: give count= to every step() of a window or to none; got "
                f"{len(self._counted)} of {self._gathered}"
            )
        scale = 1.0 / (sum(self._counted) or self._gathered) if self.average else 1.0
        windowed = self.accumulate_steps > 1
        self._close_window()
        updated = True
        if pairs and self.clip_norm is not None:
            norm = gradient_norm([gradient for _, gradient in pairs]).item() * scale
            updated = bool(np.isfinite(norm))
            scale *= min(1.0, self.clip_norm / norm) if norm > 0.0 else 1.0
        if pairs and updated:
            self._update(pairs, scale)
            self.t += 1
        self.skipped += not updated
        if windowed:
            self.zero_grad()
        return updated

    def _close_window(self) -> None:
        self._gathered = 0
        self._counted = []

    # ---- saving ----

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the update count and each parameter's state, by its place in the list."""
        values = {"t": np.array(self.t)}
        for i, parameter in enumerate(self.params):
            for j, source in enumerate(self._state.get(parameter, ())):
                values[f"{i}.{j}"] = source.device.download(source)
        return values

    def load_state_dict(self, values: Mapping[str, np.ndarray]) -> None:
        """Continue from a state. Raises ShapeError, having changed nothing, if it does not fit."""
        loaded: dict[Tensor, tuple[Source, ...]] = {}
        expected = {"t"}
        for i, parameter in enumerate(self.params):
            first = self.init_single(parameter)
            names = [f"{i}.{j}" for j in range(len(first))]
            if not any(name in values for name in names):
                continue  # a parameter that was never updated
            expected.update(names)
            for name, array in zip(names, first, strict=True):
                if name not in values or np.shape(values[name]) != array.shape:
                    raise ShapeError(
                        f"load_state_dict: {name} must have shape {array.shape}; got "
                        f"{np.shape(values[name]) if name in values else 'nothing'}"
                    )
            loaded[parameter] = self._sources(parameter, [values[name] for name in names])
        if "t" not in values or set(values) - expected:
            raise ShapeError(
                f"load_state_dict: needs t and no names but {sorted(expected)}; got "
                f"{sorted(values)}"
            )
        self.t = int(values["t"])
        self._state = loaded
        self._close_window()

    # ---- the run ----

    def _sources(self, parameter: Tensor, arrays: Iterable[Any]) -> tuple[Source, ...]:
        device, kind = parameter.device, parameter.dtype
        copies = [np.array(array, kind, order="C") for array in arrays]
        return tuple(Source(a.shape, float32, device, device.upload(a, float32)) for a in copies)

    def _update(self, pairs: list[tuple[Tensor, Tensor]], scale: float) -> None:
        frame = self._frame_of(pairs)
        device = frame.device
        float_type = device.numpy_dtype(float32).type

        def bind_number(value: float | list[float]) -> Node:
            array = np.array(value, float_type)
            return frame.bind(Source(array.shape, float32, device, device.upload(array, float32)))

        hyper = bind_number(self.hyper(float_type))
        # The factor of the gradients is an input as well, so that clipping plans nothing anew.
        is_scaled = scale != 1.0 or self.clip_norm is not None
        factor = bind_number(scale) if is_scaled else None
        for parameter, _ in pairs:
            if parameter.device is not device:
                raise DeviceError(
                    f"{type(self).__name__}: parameters must live on one device; got "
                    f"{device.name} and {parameter.device.name}; use an optimizer for each"
                )
            states = self._state.get(parameter)
            if states is None:
                self._state[parameter] = self._sources(parameter, self.init_single(parameter))
            elif states and states[0].device is not device:  # the parameter was moved
                self._state[parameter] = tuple(source_on(state, device) for state in states)
        nodes = [
            (node_in(p, frame), node_in(g, frame), *[frame.bind(s) for s in self._state[p]])
            for p, g in pairs
        ]
        key = (hyper, factor, *nodes)
        effects = self._effects.get(key)
        if effects is None:
            with state.inside(frame, PLAIN):
                effects = self._effects[key] = self._record(frame, nodes, hyper, factor)
        evaluate(frame, effects=effects)

    def _record(
        self, frame: Frame, nodes: list[tuple], hyper: Node, factor: Node | None
    ) -> tuple[Node, ...]:
        effects = []
        numbers = passing(hyper, frame)
        for parameter, gradient, *states in nodes:
            g = passing(gradient, frame)
            if factor is not None:
                g = mul(g, passing(factor, frame))
            handles = tuple(passing(node, frame) for node in states)
            for op, inputs in self.update_single(passing(parameter, frame), g, handles, numbers):
                inner = (node_in(tensor, frame) for tensor in inputs)
                effects.append(find_node((op, (), PLAIN, *inner)))
        return tuple(effects)

    def _frame_of(self, pairs: list[tuple[Tensor, Tensor]]) -> Frame:
        """Return the frame where the gradients wait; of several, compute all but the last."""
        frames = list(dict.fromkeys(g._at[0] for _, g in pairs if g._source is None))
        for frame in frames[:-1]:
            evaluate(frame)
        return frames[-1] if frames else state.new_frame(pairs[0][0].device)
