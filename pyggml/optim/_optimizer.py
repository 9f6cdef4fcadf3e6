"""The base of all optimizers: counters, the accumulation window, clipping, and the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..autograd import backward
from ..checks import need_mapping, number_in, positive_integer
from ..device import Device
from ..dtypes import float32
from ..errors import DeviceError, DTypeError, GradError, SettingError, ShapeError
from ..graph import PLAIN, DerivedCache, Frame, Node, Source, find_node, state
from ..ops import clamp, mul
from ..ops.update import ASSIGN, Effect, Numbers
from ..plan import evaluate
from ..tensor import Tensor, make_tensor, node_in, passing
from ..transfer import source_on
from ._clipping import gradient_norm
from ._groups import Group, Parameters, Schedule, make_groups
from ._mixed import LossScale, Master, as_loss_scale, current_master
from ._state import load_state, save_state


class Update(NamedTuple):
    """What the numbers of one parameter's update may depend on."""

    lr: float
    weight_decay: float
    t: int  # the parameter's own count of updates, this one included
    float_type: type[np.floating]  # what the device computes in


class Optimizer:
    """Base of all optimizers: what they have in common.

    Args:
        params: the parameters, as a list, a dict, or what module.parameters() returns; or a list of
            groups, dicts with "params" and settings of their own: "lr", "lr_scale" (a factor of the
            optimizer's learning rate), "weight_decay". They become `groups`.
        lr: the learning rate, or a function from the number of updates made to it (a schedule).
        weight_decay: how much of itself a parameter loses in each update, times the learning rate.
        accumulate_steps: how many backward passes make one update.
        average: whether the update uses the mean of their gradients, or the sum.
        clip_norm: the largest norm that the gradient of an update, averaged first, may have.
        clip_value: the largest size that an element of it may have.
        loss_scale: for mixed precision, a LossScale or a constant number: `backward` multiplies the
            loss by it, and the update divides the gradients by it. Without finite gradients the
            update is skipped.

    A parameter of a half type is the rounded value of a float32 master, which the optimizer keeps
    and updates.

    The learning rate, weight decay, clipping and the groups' settings may be changed at any time,
    which plans nothing anew, but for clip_value. Schedules, clipping, weight decay and bias
    corrections see updates, not backward passes; corrections count the updates of each parameter.

    A method of your own defines update_single, and init_single if it has state:

    >>> class SignDescent(optim.Optimizer):
    ...     def update_single(self, parameter, gradient, states, numbers):
    ...         return [optim.assign(parameter, parameter - numbers["lr"] * ag.sign(gradient))]
    >>> w = ag.param([1.0, -1.0])
    >>> opt = SignDescent([w], lr=0.5)
    >>> with ag.grad_tape():
    ...     loss = ag.sum(w * w)
    >>> _ = ag.backward(loss)
    >>> opt.step(), w.numpy()
    (True, array([ 0.5, -0.5], dtype=float32))
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Schedule,
        *,
        weight_decay: float = 0.0,
        accumulate_steps: int = 1,
        average: bool = True,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        loss_scale: LossScale | float | None = None,
    ) -> None:
        name = type(self).__name__
        self.groups = make_groups(name, params)
        """The groups of parameters; their settings may be changed."""
        self.params = [parameter for group in self.groups for parameter in group.params]
        self._group_of = {p: group for group in self.groups for p in group.params}
        # what groups default to
        self._own = Group([], lr=lr, weight_decay=weight_decay, method=name)
        self.accumulate_steps = positive_integer(name, "accumulate_steps", accumulate_steps)
        self.average = bool(average)
        self.clip_norm = self.clip_value = None
        if clip_norm is not None:
            self.clip_norm = number_in(name, "clip_norm", clip_norm, np.finfo(np.float32).tiny)
        if clip_value is not None:
            self.clip_value = number_in(name, "clip_value", clip_value, 0.0)
            if clip_norm is not None:
                raise SettingError(f"{name}: give clip_norm or clip_value, not both")
        self.loss_scale = as_loss_scale(name, loss_scale)
        self._has_scaled = False  # whether the gradients since the last step() come from backward()
        self._scale = 1.0  # what backward() multiplies losses by in the open window
        self.t = 0
        """Updates made; calls of step() that only filled the window do not count."""
        self.skipped = 0
        """Updates left out because the gradient's norm was not finite (clip_norm, loss_scale)."""
        self._gathered = 0  # backward passes in the open window
        self._counted: list[int] = []  # what step(count=) was given in it
        self._state: dict[Tensor, tuple[Source, ...]] = {}
        self._masters: dict[Tensor, Master] = {}  # of the parameters of a half type
        self._counts: dict[Tensor, int] = {}  # updates of each parameter
        self._effects = DerivedCache()  # nodes of a step -> the nodes of its update

    @property
    def lr(self) -> float:
        """The learning rate of the next update. Can be set, to a number or a schedule."""
        rate = self._own.rate(self.t)
        assert rate is not None
        return rate

    @lr.setter
    def lr(self, value: float | Schedule) -> None:
        if value is None:
            raise SettingError(f"{type(self).__name__}: lr must be a number or a schedule")
        self._own.lr = value

    @property
    def weight_decay(self) -> float:
        """The weight decay of the next update. Can be set."""
        return self._own.weight_decay or 0.0

    @weight_decay.setter
    def weight_decay(self, value: float) -> None:
        self._own.weight_decay = value

    @property
    def _schedule(self) -> Schedule | None:
        """The schedule of the learning rate, if it is one."""
        return self._own.lr if callable(self._own.lr) else None

    @property
    def decays(self) -> bool:
        """Whether any weight decay is not 0."""
        return bool(self._own.weight_decay) or any(group.weight_decay for group in self.groups)

    def __repr__(self) -> str:
        plural = "s" if len(self.params) > 1 else ""
        groups = f" in {len(self.groups)} groups" if len(self.groups) > 1 else ""
        return (
            f"{type(self).__name__}({len(self.params)} parameter{plural}{groups}, lr={self.lr:g}, "
            f"weight_decay={self.weight_decay:g}, t={self.t})"
        )

    # ---- what a method defines ----

    def init_single(self, parameter: Tensor) -> tuple[np.ndarray, ...]:
        """Return the first state of one parameter."""
        return ()

    def numbers(self, update: Update) -> dict[str, float]:
        """Return the numbers of one parameter's update, under the same names each time."""
        return {"lr": update.lr, "weight_decay": update.weight_decay}

    def update_single(
        self, parameter: Tensor, gradient: Tensor, states: tuple[Tensor, ...], numbers: Numbers
    ) -> list[Effect]:
        """Return the effects that update one parameter and its state.

        They are built from tensors of one element (``numbers[name]``) and tensors of its shape. It
        is called when a step is planned, so it reads from self nothing that changes, but for
        `decays`.
        """
        raise NotImplementedError(f"{type(self).__name__}: define update_single")

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

    def backward(self, loss: Tensor) -> dict[Tensor, Tensor]:
        """Do ag.backward(loss), starting from the loss scale if there is one.

        >>> layer = nn.Linear(2, 1).to(dtype="float16")
        >>> opt = optim.SGD(layer.parameters(), lr=0.1, loss_scale=1024.0)
        >>> with ag.grad_tape():
        ...     loss = ag.sum(layer([[1.0, 2.0]]))
        >>> _ = opt.backward(loss)
        >>> layer.weight.grad.numpy()
        array([[1024., 2048.]], dtype=float32)
        >>> opt.step()
        True
        """
        if self.loss_scale is None:
            return backward(loss)
        if not (self._has_scaled or self._gathered):
            self._scale = self.loss_scale.value  # which may be assigned before the update
        self._has_scaled = True
        seed = np.full(loss.shape, self._scale, np.float32)
        return backward(loss, seed=make_tensor(seed, device=loss.device))

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

        Returns False as well when clip_norm or loss_scale is set and the norm is not finite: then
        nothing changes, but for `skipped` and the scale. Raises GradError for grads in a window of
        several, and for gradients of an unscaled loss where loss_scale is set.

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
        if self.loss_scale is not None and not self._has_scaled:
            raise GradError(
                f"{name}: with loss_scale the gradients must be those of the scaled loss; call "
                "opt.backward(loss) in place of ag.backward(loss)"
            )
        if grads is not None:
            need_mapping(name, "grads", grads)
        before, updates = (self._gathered, self._counted), self.t
        if count is not None:
            self._counted = [*self._counted, positive_integer(name, "count", count)]
        self._gathered += 1
        try:
            updated = self._finish(grads, full=flush or self._gathered >= self.accumulate_steps)
            self._has_scaled = False
            return updated
        except BaseException:
            if self.t == updates:
                self._gathered, self._counted = before
            else:  # the update was made before the exception came
                self._end_window()
            raise

    def flush(self) -> bool:
        """Update with what an incomplete window holds; return whether there was anything."""
        return bool(self._gathered) and self._finish(None, full=True)

    def _finish(self, grads: Mapping[Tensor, Tensor] | None, full: bool) -> bool:
        pairs = [
            (parameter, gradient)
            for parameter in self.params
            if (gradient := parameter.grad if grads is None else grads.get(parameter)) is not None
        ]
        self._check(pairs, grads)
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
        if self.loss_scale is not None:
            scale /= self._scale
        updated = bool(pairs)
        if pairs and (self.clip_norm is not None or self.loss_scale is not None):
            norm = gradient_norm([gradient for _, gradient in pairs]).item() * scale
            updated = bool(np.isfinite(norm))
            if self.clip_norm is not None and norm > 0.0:
                scale *= min(1.0, self.clip_norm / norm)
            if self.loss_scale is not None:
                self.loss_scale.adapt(updated)
        if pairs and updated:
            self._update(pairs, scale)
        self.skipped += bool(pairs) and not updated
        self._end_window()
        return updated

    def _check(
        self, pairs: list[tuple[Tensor, Tensor]], grads: Mapping[Tensor, Tensor] | None
    ) -> None:
        """Raise unless each gradient is a tensor of its parameter's shape and device."""
        name = type(self).__name__
        if grads and not pairs:
            raise GradError(f"{name}: step(grads) needs gradients of its parameters; got others")
        for parameter, gradient in pairs:
            if not isinstance(gradient, Tensor):
                kind = type(gradient).__name__
                raise DTypeError(f"{name}: a gradient must be a Tensor; got {kind}; use ag.tensor")
            if gradient._at[1].shape != parameter._at[1].shape:
                raise ShapeError(
                    f"{name}: the gradient of a {parameter.shape} parameter must have its shape; "
                    f"got {gradient.shape}"
                )
            # A pending gradient meets its parameter's device when the update is recorded.
            if gradient._source is not None and gradient.device is not parameter.device:
                raise DeviceError(
                    f"{name}: a parameter on {parameter.device.name} needs its gradient there; got "
                    f"one on {gradient.device.name}"
                )

    def _end_window(self) -> None:
        self._close_window()
        if self.accumulate_steps > 1:
            self.zero_grad()

    def _close_window(self) -> None:
        self._gathered = 0
        self._counted = []

    # ---- saving ----

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return all that continuing to the last bit needs, as arrays.

        That is: the counts of updates; each parameter's state, by its place in `params`; the open
        accumulation window with its gradients; the numbers that may be changed at any time
        ("settings"); and the state of schedules that have one. Other settings, and schedules that
        are functions of t, are what the constructor is given again.

        >>> w = ag.param([1.0])
        >>> sorted(optim.SGD([w], lr=0.5, momentum=0.9).state_dict())
        ['settings', 't', 'window']
        """
        return save_state(self)

    def load_state_dict(self, values: Mapping[str, np.ndarray]) -> None:
        """Continue from a state.

        Numbers that may be changed at any time become those of the state, but a schedule stays.
        Raises ShapeError, having changed nothing, if the state does not fit.

        >>> w = ag.param([1.0])
        >>> opt = optim.SGD([w], lr=0.5)
        >>> opt.load_state_dict(optim.SGD([w], lr=0.25).state_dict())
        >>> opt.lr
        0.25
        """
        load_state(self, need_mapping(type(self).__name__, "values", values))

    # ---- the run ----

    def _sources(self, parameter: Tensor, arrays: Iterable[Any]) -> tuple[Source, ...]:
        device = parameter.device
        kind = device.numpy_dtype(float32)
        copies = [np.array(array, kind, order="C") for array in arrays]
        return tuple(Source(a.shape, float32, device, device.upload(a, float32)) for a in copies)

    def _table(
        self, pairs: list[tuple[Tensor, Tensor]], float_type: type[np.floating]
    ) -> tuple[np.ndarray, tuple[str, ...], tuple[int, ...]]:
        """Return the numbers of updates, (rows, numbers), their names, and each parameter's row.

        Parameters of one group that were updated as often share a row.
        """
        row_of: dict[tuple[Group, int], int] = {}
        rows: list[tuple[float, ...]] = []
        chosen = []
        for parameter, _ in pairs:
            key = self._group_of[parameter], self._counts.get(parameter, 0)
            row = row_of.get(key)
            if row is None:
                row = row_of[key] = len(rows)
                numbers = self.numbers(self._next_update(*key, float_type))
                rows.append(tuple(numbers.values()))
            chosen.append(row)
        return np.array(rows, float_type), tuple(numbers), tuple(chosen)

    def _next_update(self, group: Group, made: int, float_type: type[np.floating]) -> Update:
        rate, decay = group.rate(self.t), group.weight_decay
        lr = (self.lr if rate is None else rate) * group.lr_scale
        return Update(lr, self.weight_decay if decay is None else decay, made + 1, float_type)

    def _update(self, pairs: list[tuple[Tensor, Tensor]], scale: float) -> None:
        frame = self._frame_of(pairs)
        effects, _, _ = self._effects_of(frame, pairs, scale)
        self._run_counted(pairs, lambda: evaluate(frame, effects=effects))

    def _effects_of(
        self, frame: Frame, pairs: list[tuple[Tensor, Tensor]], scale: float
    ) -> tuple[tuple[Node, ...], Node, tuple[int, ...]]:
        """Return the nodes of an update, that of its table of numbers, and each one's row there."""
        device = frame.device
        float_type = device.numpy_dtype(float32).type
        for parameter, _ in pairs:
            if parameter.device is not device:
                raise DeviceError(
                    f"{type(self).__name__}: parameters must live on one device; got "
                    f"{device.name} and {parameter.device.name}; use an optimizer for each"
                )

        def bind(array: np.ndarray) -> Node:
            return frame.bind(Source(array.shape, float32, device, device.upload(array, float32)))

        table, names, rows = self._table(pairs, float_type)
        table_node = bind(table)
        # The factor of the gradients is an input as well, so that clipping plans nothing anew.
        is_scaled = scale != 1.0 or self.clip_norm is not None
        factor = bind(np.array(scale, float_type)) if is_scaled else None
        parameters = [node_in(parameter, frame) for parameter, _ in pairs]
        gradients = [node_in(gradient, frame) for _, gradient in pairs]
        sources = [self._sources_of(parameter, device) for parameter, _ in pairs]
        states = frame.bind_all([source for listed in sources for source in listed])
        halves = [parameter for parameter, _ in pairs if parameter._at[1].dtype.is_half]
        masters = frame.bind_all([self._master_of(parameter) for parameter in halves])

        nodes = (*parameters, *gradients, *states, *masters)
        key = (table_node, rows, factor, self.clip_value, self.decays, nodes)
        effects = self._effects.get(key)
        if effects is None:
            master_of = dict(zip((node_in(p, frame) for p in halves), masters, strict=True))
            rest = iter(states)
            lists = [[next(rest) for _ in listed] for listed in sources]
            numbered = list(zip(rows, parameters, gradients, lists, strict=True))
            with state.inside(frame, PLAIN):
                effects = self._record(frame, numbered, master_of, table_node, names, factor)
            self._effects[key] = effects
        return effects, table_node, rows

    def _run_counted(self, pairs: list[tuple[Tensor, Tensor]], run: Callable[[], Any]) -> Any:
        """Run an update, and count it if it was made."""
        first = pairs[0][0]._source
        assert first is not None
        version = first.version
        try:
            return run()
        finally:
            if first.version != version:  # updated, though Ctrl-C may have come just after
                self.t += 1
                for parameter, _ in pairs:
                    self._counts[parameter] = self._counts.get(parameter, 0) + 1
                    master = self._masters.get(parameter)
                    if master is not None:
                        self._masters[parameter] = master._replace(version=master.rounded.version)

    def _sources_of(self, parameter: Tensor, device: Device) -> tuple[Source, ...]:
        """Return a parameter's state, which is made at its first update and moves with it."""
        states = self._state.get(parameter)
        if states is None or (states and states[0].device is not device):
            if states is None:
                states = self._sources(parameter, self.init_single(parameter))
            states = tuple(source_on(source, device) for source in states)
            self._state[parameter] = states
        return states

    def _master_of(self, parameter: Tensor) -> Source:
        """Return the float32 value behind a parameter of a half type."""
        master = current_master(parameter, self._masters.get(parameter))
        self._masters[parameter] = master
        return master.value

    def _record(
        self,
        frame: Frame,
        nodes: list[tuple[int, Node, Node, list[Node]]],
        masters: dict[Node, Node],
        table: Node,
        names: tuple[str, ...],
        factor: Node | None,
    ) -> tuple[Node, ...]:
        recorded = []
        for row, parameter, gradient, states in nodes:
            g = passing(gradient, frame)
            if factor is not None:
                g = mul(g, passing(factor, frame))
            if self.clip_value is not None:
                g = clamp(g, min=-self.clip_value, max=self.clip_value)
            numbers = Numbers(passing(table, frame), row, names)
            handles = tuple(passing(node, frame) for node in states)
            target = masters.get(parameter, parameter)
            for op, inputs, settings in self.update_single(
                passing(target, frame), g, handles, numbers
            ):
                inner = (node_in(tensor, frame) for tensor in inputs)
                recorded.append(find_node((op, settings, PLAIN, *inner)))
                if target is not parameter and recorded[-1].inputs[0] is target:
                    rounded = (ASSIGN, (), PLAIN, parameter, recorded[-1])
                    recorded.append(find_node(rounded))
        return tuple(recorded)

    def _frame_of(self, pairs: list[tuple[Tensor, Tensor]]) -> Frame:
        """Return the frame where the gradients wait; of several, compute all but the last."""
        frames = list(dict.fromkeys(g._at[0] for _, g in pairs if g._source is None))
        for frame in frames[:-1]:
            evaluate(frame)
        return frames[-1] if frames else state.new_frame(pairs[0][0].device)
