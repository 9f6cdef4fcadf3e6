"""Check gradients: by central differences, then between devices.

The differences are taken in float64 on the reference device; then the device in use is compared
with the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isnan
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike

from .autograd import grad, grad_tape
from .checks import as_list, natural_number, need_function, number_in, positive_integer, shown
from .device import Device, device, resolve_device
from .dtypes import check_array
from .errors import DTypeError, GradCheckError, SettingError
from .ops import mul, sum
from .tensor import Tensor, make_tensor

Arrays = list[np.ndarray]


def gradcheck(
    fn: Callable[..., Tensor],
    inputs: Sequence[ArrayLike],
    *,
    device: Device | str | None = None,
    order: int = 1,
    directions: int = 3,
    epsilon: float = 1e-5,
    tolerance: float = 1e-6,
    device_tolerance: float = 1e-5,
    seed: int = 0,
) -> None:
    """Raise GradCheckError unless the gradients of fn are right.

    Args:
        fn: takes one tensor for each input and returns one tensor of any shape.
        inputs: arrays; the floating-point ones are differentiated.
        device: also compare value and gradients on this device with the reference (default: the
            current one).
        order: 2 checks the gradient of the gradient too.
        directions: how many random directions to compare along, in each input.
        epsilon: the step of the central differences.
        tolerance: allowed difference from them, relative to the largest gradient or 1.
        device_tolerance: allowed difference between device and reference, relative to the largest
            value or 1.
        seed: of the random directions.

    The message names the worst input, the index in it, and both values.

    >>> ag.gradcheck(lambda x: ag.relu(x) * x, [[[0.5, -1.5]]])
    """
    need_function("gradcheck", "fn", fn)
    inputs = as_list("gradcheck", "inputs", inputs, "arrays, one for each argument of fn")
    order = positive_integer("gradcheck", "order", order, 4)
    directions = positive_integer("gradcheck", "directions", directions, 1000)
    epsilon = number_in("gradcheck", "epsilon", epsilon, 1e-12)
    tolerance = number_in("gradcheck", "tolerance", tolerance, 0.0)
    device_tolerance = number_in("gradcheck", "device_tolerance", device_tolerance, 0.0)
    seed = natural_number("gradcheck", "seed", seed)
    where = resolve_device(device)
    generator = np.random.default_rng(seed)
    # Both devices start from the same numbers, so they are rounded to float32 here.
    arrays = [_rounded(value) for value in inputs]
    floats = [i for i, array in enumerate(arrays) if array.dtype.kind == "f"]
    if order > 1 and not floats:
        raise SettingError("gradcheck: order=2 needs an input of floating-point numbers; got none")
    value = _run(fn, arrays, "reference")
    if not np.array_equal(value, _run(fn, arrays, "reference"), equal_nan=True):
        raise GradCheckError(
            "gradcheck: fn gives other values each time it is called with the same inputs; let it "
            "draw the same numbers each time, as after pg.manual_seed(0) in it"
        )
    weights = generator.standard_normal(value.shape).astype(np.float32)

    def weighted(*tensors: Tensor) -> Tensor:
        return sum(mul(fn(*tensors), make_tensor(weights, device=tensors[0].device)))

    gradients = _gradients(weighted, arrays, floats, "reference")
    for i, gradient in zip(floats, gradients, strict=True):
        if not np.isfinite(gradient).all():
            index = tuple(int(k) for k in np.argwhere(~np.isfinite(gradient))[0])
            raise GradCheckError(
                f"gradcheck: the gradient of input {i} is {gradient[index]} at index {index}, where"
                " no differences can check it; take inputs away from poles"
            )
        for _ in range(directions):
            along = generator.standard_normal(arrays[i].shape)
            expected = _slope(weighted, arrays, i, along, epsilon)
            if not _close(float(np.sum(gradient * along)), expected, gradient, tolerance):
                _report_worst(weighted, arrays, i, gradient, epsilon)
    if where.name != "reference":
        _compare(
            "value",
            _run(fn, arrays, where),
            _run(fn, arrays, "reference"),
            device_tolerance,
            where,
            0,
        )
        for i, ours, right in zip(
            floats, _gradients(weighted, arrays, floats, where), gradients, strict=True
        ):
            _compare("gradient", ours, right, device_tolerance, where, i)
    if order > 1:

        def gradient_sum(*tensors: Tensor) -> Tensor:
            with grad_tape():
                parts = grad(weighted(*tensors), [tensors[i] for i in floats], allow_unused=True)
            # A nonlinear function of the gradients, so that constant ones still count as
            # differentiable.
            total = sum(mul(tensors[floats[0]], 0.0))
            for part in parts:
                if part is not None:
                    total = total + sum(part * part)
            return total

        gradcheck(
            gradient_sum, arrays, device=where, order=order - 1, directions=directions,
            epsilon=epsilon, tolerance=tolerance * 10, device_tolerance=device_tolerance * 10,
            seed=seed + 1,
        )  # fmt: skip


def _rounded(value: ArrayLike) -> np.ndarray:
    array, _ = check_array(value.numpy() if isinstance(value, Tensor) else value, op="gradcheck")
    with np.errstate(over="ignore"):
        return array if array.dtype.kind in "iu" else array.astype(np.float32)


def _tensors(arrays: Arrays) -> list[Tensor]:
    return [make_tensor(a, requires_grad=a.dtype.kind == "f") for a in arrays]


def _run(fn: Callable[..., Tensor], arrays: Arrays, where: Device | str) -> np.ndarray:
    with device(where):
        value = fn(*_tensors(arrays))
        if not isinstance(value, Tensor):
            raise DTypeError(f"gradcheck: fn must return a tensor; got {shown(value)}")
        return value.numpy()


def _gradients(
    fn: Callable[..., Tensor], arrays: Arrays, floats: list[int], where: Device | str
) -> Arrays:
    with device(where):
        tensors = _tensors(arrays)
        with grad_tape():
            value = fn(*tensors)
        wanted = [tensors[i] for i in floats]
        found: list[Any] = (
            grad(value, wanted, allow_unused=True) if value.requires_grad else [None] * len(wanted)
        )
        return [
            np.zeros(t.shape) if g is None else g.numpy()
            for t, g in zip(wanted, found, strict=True)
        ]


def _slope(
    fn: Callable[..., Tensor], arrays: Arrays, i: int, along: np.ndarray, epsilon: float
) -> float:
    """Return the central difference of a scalar fn at input i along a direction."""
    shifted = [
        [*arrays[:i], arrays[i] + sign * epsilon * along, *arrays[i + 1 :]] for sign in (1, -1)
    ]
    ahead, behind = (float(_run(fn, moved, "reference")) for moved in shifted)
    return (ahead - behind) / (2 * epsilon)


def _close(ours: float, right: float, gradient: np.ndarray, tolerance: float) -> bool:
    scale = max(1.0, float(np.abs(gradient).max()), abs(right))
    return bool(abs(ours - right) <= tolerance * scale)


def _report_worst(
    fn: Callable[..., Tensor], arrays: Arrays, i: int, gradient: np.ndarray, epsilon: float
) -> NoReturn:
    """Raise with the element of input i whose gradient is furthest from its central difference."""
    worst = (-1.0, (), 0.0)
    for index in np.ndindex(arrays[i].shape):
        along = np.zeros(arrays[i].shape)
        along[index] = 1.0
        expected = _slope(fn, arrays, i, along, epsilon)
        worst = max(
            worst,
            (abs(float(gradient[index]) - expected), index, expected),
            key=lambda w: inf if isnan(w[0]) else w[0],
        )
    _, index, expected = worst
    raise GradCheckError(
        f"gradcheck: worst in input {i} at index {index}: the rule gives "
        f"{float(gradient[index]):.9g}, central differences {expected:.9g}"
    )


def _compare(
    what: str, ours: np.ndarray, right: np.ndarray, tolerance: float, where: Device, i: int
) -> None:
    finite = np.abs(right[np.isfinite(right)])
    limit = tolerance * max(1.0, float(finite.max()) if finite.size else 1.0)
    same = (ours == right) | (np.isnan(ours) & np.isnan(right))
    distance = np.where(same, 0.0, np.abs(ours - right))
    distance = np.where(np.isnan(distance), np.inf, distance)
    if distance.size and distance.max() > limit:
        index = tuple(int(k) for k in np.unravel_index(np.argmax(distance), distance.shape))
        raise GradCheckError(
            f"gradcheck: {what} of input {i} on {where.name} differs from the reference, worst at "
            f"index {index}: {float(ours[index]):.9g} on {where.name}, "
            f"{float(right[index]):.9g} on reference"
        )
