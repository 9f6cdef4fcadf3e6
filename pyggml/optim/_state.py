"""An optimizer's state as a flat dict of arrays, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ShapeError
from ..tensor import make_tensor
from ._groups import SETTINGS, Group
from ._mixed import Master

if TYPE_CHECKING:
    from ._optimizer import Optimizer

# t           updates made
# window      one number for each backward pass in the open window: its count, or 0 for none given
# settings    a row for the optimizer and for each group: lr, lr_scale, weight_decay; NaN for none
# lr.0.NAME   the state of the schedule in row 0 of these
# 3.t         updates of the parameter at place 3
# 3.0         its first state
# 3.master    its float32 value, if it is of a half type
# loss_scale  the scale, and the updates since it changed
# 3.grad      its gradient so far in the open window


def _rows(optimizer: Optimizer) -> list[Group]:
    return [optimizer._own, *optimizer.groups]


def _schedules(optimizer: Optimizer) -> list[tuple[str, Any]]:
    """Return the schedules that have a state, and the beginning of its names."""
    rows = enumerate(_rows(optimizer))
    return [(f"lr.{i}.", row.lr) for i, row in rows if hasattr(row.lr, "state_dict")]


def _settings(optimizer: Optimizer) -> np.ndarray:
    """Return the numbers that may be changed at any time, NaN where there is none."""
    values = [[getattr(row, name) for name in SETTINGS] for row in _rows(optimizer)]
    return np.array(
        [[np.nan if v is None or callable(v) else v for v in row] for row in values], np.float64
    )


def save_state(optimizer: Optimizer) -> dict[str, np.ndarray]:
    """Return an optimizer's state."""
    counts = optimizer._counted or [0] * optimizer._gathered
    values = {
        "t": np.array(optimizer.t),
        "window": np.array(counts, np.int64),
        "settings": _settings(optimizer),
    }
    if optimizer.loss_scale is not None:
        values["loss_scale"] = np.array([optimizer.loss_scale.value, optimizer.loss_scale.streak])
    for start, schedule in _schedules(optimizer):
        values.update((start + name, value) for name, value in schedule.state_dict().items())
    for i, parameter in enumerate(optimizer.params):
        if parameter in optimizer._counts:
            values[f"{i}.t"] = np.array(optimizer._counts[parameter])
        for j, source in enumerate(optimizer._state.get(parameter, ())):
            values[f"{i}.{j}"] = source.device.download(source)
        if parameter in optimizer._masters and parameter._at[1].dtype.is_half:
            master = optimizer._masters[parameter].value
            values[f"{i}.master"] = master.device.download(master)
        if optimizer._gathered and parameter.grad is not None:
            values[f"{i}.grad"] = parameter.grad.numpy()
    return values


def load_state(optimizer: Optimizer, values: Mapping[str, np.ndarray]) -> None:
    """Take over a state, or raise ShapeError before anything has changed."""
    window = np.atleast_1d(values.get("window", ()))
    _check(values, _expected_shapes(optimizer, values, is_open=len(window) > 0))
    states, counts, grads, masters = {}, {}, {}, {}
    for i, parameter in enumerate(optimizer.params):
        if f"{i}.t" in values:
            names = [f"{i}.{j}" for j in range(len(optimizer.init_single(parameter)))]
            states[parameter] = optimizer._sources(parameter, [values[name] for name in names])
            counts[parameter] = int(values[f"{i}.t"])
        if f"{i}.master" in values:
            (master,) = optimizer._sources(parameter, [values[f"{i}.master"]])
            masters[parameter] = Master(master, master, 0)  # to be compared with the parameter
        if f"{i}.grad" in values:
            grads[parameter] = make_tensor(
                values[f"{i}.grad"], dtype="float32", device=parameter.device
            )
    for start, schedule in _schedules(optimizer):
        names = [name for name in values if name.startswith(start)]
        schedule.load_state_dict({name.removeprefix(start): values[name] for name in names})
    for row, numbers in zip(_rows(optimizer), values.get("settings", ()), strict=False):
        for name, number in zip(SETTINGS, numbers, strict=True):
            if not np.isnan(number) and not callable(getattr(row, name)):
                setattr(row, name, float(number))
    if optimizer.loss_scale is not None and "loss_scale" in values:
        scale, streak = values["loss_scale"]
        optimizer.loss_scale.value, optimizer.loss_scale.streak = float(scale), int(streak)
    if optimizer._gathered or grads:
        for parameter in optimizer.params:
            parameter.grad = grads.get(parameter)
    optimizer.t = int(values["t"])
    optimizer._state, optimizer._counts, optimizer._masters = states, counts, masters
    optimizer._gathered = len(window)
    if optimizer.loss_scale is not None:  # the scale of the gradients in the window
        optimizer._scale = optimizer.loss_scale.value
    optimizer._counted = [int(count) for count in window if count]


def _expected_shapes(
    optimizer: Optimizer, values: Mapping[str, np.ndarray], is_open: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays of a state; of what may be missing, for those given."""
    shapes: dict[str, tuple[int, ...]] = {"t": ()}
    if "window" in values:
        shapes["window"] = np.atleast_1d(values["window"]).shape
    if "settings" in values:
        shapes["settings"] = _settings(optimizer).shape
    if optimizer.loss_scale is not None and "loss_scale" in values:
        shapes["loss_scale"] = (2,)
    for start, schedule in _schedules(optimizer):
        shapes.update((start + k, np.shape(v)) for k, v in schedule.state_dict().items())
    for i, parameter in enumerate(optimizer.params):
        first = optimizer.init_single(parameter)
        own = {f"{i}.{j}": array.shape for j, array in enumerate(first)} | {f"{i}.t": ()}
        if any(name in values for name in own):  # it has been updated
            shapes.update(own)
        if parameter._at[1].dtype.is_half and f"{i}.master" in values:
            shapes[f"{i}.master"] = parameter.shape
        if is_open and f"{i}.grad" in values:
            shapes[f"{i}.grad"] = parameter.shape
    return shapes


def _check(values: Mapping[str, np.ndarray], shapes: dict[str, tuple[int, ...]]) -> None:
    if "t" not in values or set(values) - set(shapes):
        raise ShapeError(
            f"load_state_dict: needs t and no names but {sorted(shapes)}; got {sorted(values)}"
        )
    for name, shape in shapes.items():
        if name not in values or np.shape(values[name]) != shape:
            raise ShapeError(
                f"load_state_dict: {name} must have shape {shape}; got "
                f"{np.shape(values[name]) if name in values else 'nothing'}"
            )
