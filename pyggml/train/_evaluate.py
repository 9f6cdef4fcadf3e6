"""A model over a whole set of data, without gradients: losses, metrics, outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..autograd import no_grad
from ..checks import as_list, need_function, shown
from ..data import DataLoader, batch_length, map_arrays
from ..device import Device
from ..dtypes import check_array
from ..errors import DTypeError, SettingError, ShapeError
from ..nn import Module
from ..tensor import Tensor, make_tensor

Forward = Callable[[Any, Any], tuple[Any, Any]]
Loss = Callable[[Any, Any], Tensor]
Metric = Callable[[Any, Any], float]
Metrics = Mapping[str, Metric] | Iterable[Metric] | Metric | None

_COLUMNS = {"epoch", "loss", "lr", "updates", "skipped", "seconds"}


def evaluate(
    model: Any,
    data: Any,
    *,
    loss: Loss | None = None,
    metrics: Metrics = None,
    forward: Forward | None = None,
) -> dict[str, float]:
    """Return the mean loss over data, and metrics over all of it at once, by name.

    The model is in evaluation mode meanwhile. ``data`` are batches (x, y), as a DataLoader gives
    them; loss, metrics and forward are those of fit. What metrics compare is gathered in memory.

    >>> loader = pg.data.DataLoader((np.eye(3), np.arange(3)), batch_size=2)
    >>> model = lambda x: x * 5.0
    >>> pg.train.evaluate(model, loader, metrics=pg.train.accuracy)
    {'accuracy': 1.0}
    """
    named = named_metrics("evaluate", metrics)
    check_functions("evaluate", model, loss=loss, forward=forward)
    return evaluated(model, data, loss, named, forward or pair_forward("evaluate", model))


def predict(model: Any, data: Any, *, forward: Callable[[Any, Any], Any] | None = None) -> Any:
    """Return the model's outputs over data, in evaluation mode, joined along the first axis.

    ``data`` are batches x or (x, y), of which y is not used; for others give ``forward``, a
    function (model, batch) that returns the outputs.

    >>> loader = pg.data.DataLoader(np.arange(3.0), batch_size=2)
    >>> pg.train.predict(lambda x: x * 2.0, loader)
    array([0., 2., 4.], dtype=float32)
    """

    check_functions("predict", model, forward=forward)
    device = device_of(model)

    def call(model: Any, batch: Any) -> Any:
        inputs = batch[:-1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else (batch,)
        return model(*(as_tensor_on(array, device) for array in inputs))

    with mode(model, training=False), no_grad():
        outputs = [as_arrays((forward or call)(model, b)) for b in batches_of("predict", data)]
    if not outputs:
        raise SettingError("predict: there is no batch in the data")
    return joined("predict", outputs)


def accuracy(outputs: np.ndarray, targets: np.ndarray) -> float:
    """Return the share of targets that the outputs predict: a metric for classifiers.

    ``outputs`` (..., classes) predict the class of the largest value, with integer ``targets``
    (...). Outputs of the shape of the targets are logits of two classes: above 0 predicts 1.

    Raises ShapeError for other shapes.

    >>> pg.train.accuracy(np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([1, 1]))
    0.5
    """
    outputs, _ = check_array(outputs, op="accuracy: outputs")
    targets, _ = check_array(targets, op="accuracy: targets")
    if outputs.shape[:-1] == targets.shape and targets.dtype.kind in "iu":
        return float(np.mean(outputs.argmax(axis=-1) == targets))
    if outputs.shape == targets.shape:
        return float(np.mean((outputs > 0) == (targets > 0.5)))
    raise ShapeError(
        "accuracy: needs outputs (..., classes) with integer targets (...), or two classes with "
        f"one shape; got {outputs.shape} and {targets.shape} of {targets.dtype}"
    )


# ---- what fit needs as well ----------------------------------------------------------------------


def evaluated(
    model: Any,
    data: Any,
    loss: Loss | None,
    metrics: dict[str, Metric],
    forward: Forward,
    after_batch: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return what evaluate returns."""
    total, samples = 0.0, 0
    gathered = []
    with mode(model, training=False), no_grad():
        for batch in batches_of("evaluate", data):
            count = batch_length(batch)
            outputs, targets = pair_of("evaluate", forward, model, batch)
            if loss is not None:  # computes the outputs too: they are still held
                total += float(loss_of("evaluate", loss, outputs, targets).item()) * count
            samples += count
            if metrics:
                gathered.append((as_arrays(outputs), as_arrays(targets)))
            after_batch()
    if not samples:
        raise SettingError("evaluate: there is no batch in the data")
    result = {} if loss is None else {"loss": total / samples}
    if metrics:
        whole = joined("evaluate", gathered)
        result.update(
            {name: value_of("evaluate", name, metric, *whole) for name, metric in metrics.items()}
        )
    return result


def pair_forward(op: str, model: Any) -> Forward:
    """Return the forward function for batches (x, y): all but the last are inputs."""
    device = device_of(model)

    def forward(model: Any, batch: Any) -> tuple[Any, Any]:
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise SettingError(
                f"{op}: a batch must be a tuple (x, y); got {type(batch).__name__}; give forward=, "
                "a function (model, batch) that returns outputs and targets"
            )
        *inputs, targets = (as_tensor_on(array, device) for array in batch)
        return model(*inputs), targets

    return forward


def device_of(model: Any) -> Device | None:
    """Return where a module's parameters are; None, the current device, if it has none."""
    parameters = model.named_parameters() if isinstance(model, Module) else iter(())
    return next((parameter.device for _, parameter in parameters), None)


def as_tensor_on(value: Any, device: Device | None) -> Tensor:
    """Return an array as a tensor on a device; a tensor as it is."""
    return value if isinstance(value, Tensor) else make_tensor(value, device=device)


def batches_of(op: str, data: Any, batch_size: int = 64) -> Iterable[Any]:
    """Return data as an iterable of batches: arrays become a loader of their own."""
    if isinstance(data, (tuple, Mapping, np.ndarray)):
        return DataLoader(data, batch_size=batch_size)
    if not isinstance(data, Iterable):
        kind = type(data).__name__
        raise SettingError(f"{op}: needs batches, such as a DataLoader gives; got {kind}")
    return data


def as_arrays(values: Any) -> Any:
    """Return NumPy arrays in the place of tensors."""
    return map_arrays(np.asarray, tuple(values) if isinstance(values, list) else values)


def joined(op: str, parts: list[Any]) -> Any:
    """Return arrays of batches as arrays of all samples."""

    def join(*arrays: np.ndarray) -> np.ndarray:
        try:
            return np.concatenate(arrays)
        except ValueError:
            shapes = ", ".join(map(str, dict.fromkeys(array.shape[1:] for array in arrays)))
            raise ShapeError(
                f"{op}: samples of all batches must have one shape to be joined; got {shapes}"
            ) from None

    return map_arrays(join, *parts)


def named_metrics(op: str, metrics: Metrics) -> dict[str, Metric]:
    """Return metrics by name: a function's own, where none is given."""
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping):
        named = dict(metrics)
    else:
        functions = [metrics] if callable(metrics) else as_list(op, "metrics", metrics, "functions")
        named = {getattr(function, "__name__", ""): function for function in functions}
        if len(named) < len(functions) or not all(named):
            raise SettingError(f"{op}: metrics need names of their own; give a dict of functions")
    for name, metric in named.items():
        if not isinstance(name, str):
            raise SettingError(f"{op}: a metric's name must be a text; got {shown(name)}")
        need_function(op, f"metric {name!r}", metric)
        if name in _COLUMNS or name.startswith("val_"):
            raise SettingError(f"{op}: {name!r} is no name for a metric: a column has it; rename")
    return named


def check_functions(op: str, model: Any, **functions: Any) -> None:
    """Raise DTypeError for a model, or another function that was given, that cannot be called."""
    need_function(op, "model", model)
    for name, function in functions.items():
        if function is not None:
            need_function(op, name, function)


def pair_of(op: str, forward: Forward, model: Any, batch: Any) -> tuple[Any, Any]:
    """Return the outputs and targets of a batch."""
    pair = forward(model, batch)
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise DTypeError(f"{op}: forward must return (outputs, targets); got {shown(pair)}")
    return pair[0], pair[1]


def loss_of(op: str, loss: Loss, outputs: Any, targets: Any) -> Tensor:
    """Return a batch's loss, a tensor of one element."""
    value = loss(outputs, targets)
    if not isinstance(value, Tensor):
        raise DTypeError(f"{op}: loss must return a tensor; got {shown(value)}")
    return value


def value_of(op: str, name: str, metric: Metric, outputs: Any, targets: Any) -> float:
    """Return a metric's number."""
    value = metric(outputs, targets)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise DTypeError(
            f"{op}: metric {name!r} must return a number; got {shown(value)}"
        ) from None


@contextmanager
def mode(model: Any, *, training: bool) -> Iterator[None]:
    """Set a module's mode for the length of a with block."""
    modules = model.modules() if isinstance(model, Module) else []
    before = [module.training for module in modules]
    for module in modules:
        module.training = training
    try:
        yield
    finally:
        for module, was in zip(modules, before, strict=True):
            module.training = was
