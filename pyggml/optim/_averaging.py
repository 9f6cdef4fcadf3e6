"""Averages of weights over training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from ..checks import need_mapping, number_in
from ..device import Device
from ..errors import DeviceError, DTypeError, GradError, ShapeError
from ..graph import PLAIN, Frame, find_node
from ..ops.update import AVERAGE, Numbers
from ..plan import evaluate
from ..tensor import make_tensor, node_in
from ..transfer import move_to
from ._groups import Parameters, make_groups


class EMA:
    """Exponential moving average of weights (Polyak and Juditsky 1992 for the idea).

    Each update() moves the averages by 1 - decay of the way to the weights, on the device. They
    start as the weights are when the object is made, and take as much memory as these. What is no
    parameter, such as the statistics of a batch norm, is not averaged.

    Args:
        params: the parameters, as a list or a dict.
        decay: how much of an average stays, in [0, 1), or a function from the number of updates
            made to it, such as ``lambda t: min(0.999, (1 + t) / (10 + t))``, which averages over a
            short time at first.

    >>> w = ag.param([1.0])
    >>> ema = optim.EMA([w], decay=0.75)
    >>> w.assign([5.0])  # a step of training
    >>> ema.update()
    >>> with ema.applied():
    ...     print(w.item())
    2.0
    >>> w.item()
    5.0
    """

    def __init__(self, params: Parameters, decay: float | Callable[[int], float] = 0.999) -> None:
        self.params = [p for group in make_groups("EMA", params) for p in group.params]
        kinds = {p._at[1].dtype for p in self.params}
        if any(kind.is_half for kind in kinds):
            listed = ", ".join(sorted(map(str, kinds)))
            raise DTypeError(
                f"EMA: needs float32 parameters; got {listed}, in which an average cannot move"
            )
        self.decay = decay if callable(decay) else number_in("EMA", "decay", decay, 0.0, 1.0)
        self.t = 0
        """Updates made."""
        self._averages = [make_tensor(p.numpy(), device=p.device) for p in self.params]
        self._swapped = False

    def _follow(self) -> Device:
        """Take the averages to where the weights are, in case they were moved."""
        device = self.params[0].device
        for average, parameter in zip(self._averages, self.params, strict=True):
            if parameter.device is not device:
                raise DeviceError(
                    f"EMA: parameters must live on one device; got {device.name} and "
                    f"{parameter.device.name}"
                )
            move_to(average, device)
        return device

    def update(self) -> None:
        """Move the averages towards the weights. Raises GradError while they are swapped."""
        if self._swapped:
            raise GradError(
                "EMA: update() while the weights are the averages would average these; swap back "
                "first"
            )
        decay = self.decay(self.t) if callable(self.decay) else self.decay
        device = self._follow()
        share = make_tensor([[1 - number_in("EMA", "decay", decay, 0.0, 1.0)]], device=device)
        frame = Frame(device)  # numbered from 0, so that equal updates are one plan
        numbers = Numbers(share, 0, AVERAGE.numbers)
        effects = []
        for average, parameter in zip(self._averages, self.params, strict=True):
            op, inputs, settings = AVERAGE(average, parameter, (), numbers)
            nodes = [node_in(tensor, frame) for tensor in inputs]
            effects.append(find_node((op, settings, PLAIN, *nodes)))
        evaluate(frame, effects=tuple(effects))
        self.t += 1

    def swap(self) -> None:
        """Exchange the weights and their averages; a second call exchanges them back.

        Nothing is copied. Values pending on the weights can no longer be computed.
        """
        with self._follow().lock:
            for average, parameter in zip(self._averages, self.params, strict=True):
                a, b = average._source, parameter._source
                assert a is not None and b is not None
                a.storage, b.storage = b.storage, a.storage
                a.version += 1
                b.version += 1
                average._take_place(a)
                parameter._take_place(b)
        self._swapped = not self._swapped

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the weights be the averages for the length of a with block."""
        if self._swapped:
            raise GradError("EMA: the weights are the averages already")
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the count of updates and the averages, by their place in `params`.

        For averages under the names of a module: ``with ema.applied(): model.state_dict()``.
        """
        averages = self.params if self._swapped else self._averages
        values = {str(i): average.numpy() for i, average in enumerate(averages)}
        return {"t": np.array(self.t), **values}

    def load_state_dict(self, values: Mapping[str, np.ndarray]) -> None:
        """Continue from a state. Raises ShapeError, having changed nothing, if it does not fit."""
        shapes = {"t": (), **{str(i): p.shape for i, p in enumerate(self.params)}}
        need_mapping("EMA", "values", values)
        given = {name: np.shape(value) for name, value in values.items()}
        if given != shapes:
            raise ShapeError(f"EMA: load_state_dict needs the shapes {shapes}; got {given}")
        for i, average in enumerate(self.params if self._swapped else self._averages):
            average.assign(values[str(i)])
        self.t = int(values["t"])
