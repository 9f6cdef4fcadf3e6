"""Files: weights, and training states that go on to the last bit in a new process.

Both are safetensors files, so that other programs read them; nothing is ever unpickled. A training
state is a tree of numbers, texts and arrays: the arrays are the file's tensors, the rest is JSON in
the file's metadata. How they come safely to the disk and back stands in tensorfile.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from .checks import need_mapping, shown
from .errors import DTypeError, FileFormatError, PyggmlError, SettingError, ShapeError
from .nn._module import Leftover, Module
from .optim import Optimizer
from .tensor import Tensor, make_tensor
from .tensorfile import Arrays, Path, blaming, read_arrays, refusal, writable, write_arrays

__all__ = ["load_state", "load_weights", "read_weights", "save_state", "save_weights"]

Weights = Module | Mapping[str, Tensor]

_ARRAY = "$array"  # stands in the tree where an array was


# ---- weights -------------------------------------------------------------------------------------


def save_weights(
    path: Path,
    weights: Module | Mapping[str, Tensor | np.ndarray],
    *,
    about: Mapping[str, str] | None = None,
) -> None:
    """Write the weights of a module, or a dict of tensors or arrays, as a safetensors file.

    A tensor that has several names is written once. ``about``, texts by name, goes into the file's
    metadata. The old file stays until the new one is complete.

    Raises DTypeError for what is not an array of numbers, OSError if the file cannot be written.

    >>> import tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "w.safetensors")
    >>> pg.io.save_weights(path, {"w": ag.param([1.0, 2.0])})
    >>> pg.io.read_weights(path)
    {'w': array([1., 2.], dtype=float32)}
    """
    values = weights.state_dict() if isinstance(weights, Module) else weights
    if not isinstance(values, Mapping):
        kind = type(weights).__name__
        raise SettingError(f"save_weights: needs a module or a dict of tensors; got {kind}")
    about = dict(need_mapping("save_weights", "about", about or {}))
    if not all(isinstance(text, str) for text in (*about, *about.values())):
        raise SettingError(f"save_weights: about must hold texts; got {about!r}")
    packer = _Packer("save_weights")
    places = {name: packer.place(value, name) for name, value in values.items()}
    aliases = {name: place for name, place in places.items() if place != name}
    write_arrays(path, packer.arrays, {"kind": "weights", "aliases": aliases}, about)


def read_weights(path: Path) -> Arrays:
    """Return the arrays of a safetensors file, of any program, by name.

    Of a training state it is the part "model". bfloat16 becomes float32. Raises FileFormatError for
    a file that is damaged or something else, OSError if there is none.
    """
    return _weights_in("read_weights", path)


def load_weights(path: Path, weights: Weights, *, strict: bool = True) -> Leftover:
    """Read a safetensors file, of any program, into a module or a dict of tensors.

    With ``strict=False`` what does not fit is left out, and its names returned. Raises ShapeError,
    having changed nothing, that lists all names that are missing, unexpected or of another shape;
    FileFormatError for a file that is damaged or something else, OSError if there is none.

    >>> import tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "w.safetensors")
    >>> first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> pg.io.save_weights(path, first)
    >>> pg.io.load_weights(path, second)
    Leftover(missing=[], unexpected=[], misshaped=[])
    >>> bool(np.all(first.weight.numpy() == second.weight.numpy()))
    True
    """
    arrays = _weights_in("load_weights", path)
    where = f"load_weights: {os.fspath(path)}"
    if isinstance(weights, Module):
        with _saying(where):
            return weights.load_state_dict(arrays, strict=strict)
    if not _is_dict_of_tensors(weights):
        kind = type(weights).__name__
        raise SettingError(f"{where}: needs a module or a dict of tensors; got {kind}")
    return _load_into_dict(where, weights, arrays, strict)


def _weights_in(op: str, path: Path) -> Arrays:
    arrays, about = read_arrays(op, path)
    with blaming(op, path):
        if about.get("kind") != "state":
            aliases = about.get("aliases", {})
            return {**arrays, **{name: arrays[place] for name, place in aliases.items()}}
        parts = about["tree"]["parts"]
        if "model" in parts:
            return _unpack(parts["model"], arrays)
    listed = ", ".join(parts) or "none at all"
    raise refusal(op, path, f"is a training state without a part 'model'; it has {listed}")


def _load_into_dict(
    where: str, tensors: Mapping[str, Tensor], arrays: Arrays, strict: bool
) -> Leftover:
    """Assign arrays to tensors by name."""
    left = Leftover(
        [name for name in tensors if name not in arrays],
        [name for name in arrays if name not in tensors],
        [name for name in tensors if name in arrays and arrays[name].shape != tensors[name].shape],
    )
    if strict and any(left):
        problems = [f"missing {name}" for name in left.missing]
        problems += [f"unexpected {name}" for name in left.unexpected]
        problems += [
            f"{name} has shape {arrays[name].shape}, not {tensors[name].shape}"
            for name in left.misshaped
        ]
        raise ShapeError(f"{where}: {'; '.join(problems)}; strict=False loads what fits")
    for name, tensor in tensors.items():
        if name not in left.missing and name not in left.misshaped:
            tensor.assign(arrays[name])
    return left


# ---- training states -----------------------------------------------------------------------------


def save_state(path: Path, **values: Any) -> None:
    """Write all that a training run needs to go on, as one safetensors file.

    Each value is one of

    - an object with state_dict() and load_state_dict(): a module, an optimizer, a DataLoader, ...;
    - one with state() and set_state(): a Generator;
    - a dict of tensors (parameters made by hand);
    - a number, text, array or None, or a dict or list of such.

    An open accumulation window is part of an optimizer's state. The old file stays until the new
    one is complete. Raises OSError if it cannot be written, DTypeError for a value of another kind.

    >>> import tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "run.safetensors")
    >>> model = nn.Linear(2, 1)
    >>> opt = optim.Adam(model.parameters())
    >>> pg.io.save_state(path, model=model, optimizer=opt, step=7, best=0.25)
    >>> pg.io.load_state(path, model=model, optimizer=opt)
    {'step': 7, 'best': 0.25}
    """
    packer = _Packer("save_state")
    parts, plain = {}, {}
    for name, value in values.items():
        if _is_part(value):
            parts[name] = packer.pack(_state_of(value), name)
        else:
            plain[name] = packer.pack(value, name)
    tree = {"parts": parts, "values": plain}
    write_arrays(path, packer.arrays, {"kind": "state", "tree": tree})


def load_state(path: Path, **parts: Any) -> dict[str, Any]:
    """Read a training state into the objects given, under the names it was saved with.

    Returns its plain values. Parts that are not asked for are passed over.

    Raises FileFormatError for a file that is damaged, something else, or without a part that is
    asked for; OSError if there is none; and what an object raises that its part does not fit. Then
    nothing has changed.
    """
    arrays, about = read_arrays("load_state", path)
    if about.get("kind") != "state":
        raise refusal("load_state", path, "is no training state; read it with load_weights")
    with blaming("load_state", path):
        tree = about["tree"]
        saved = {name: _unpack(part, arrays) for name, part in tree["parts"].items()}
        plain = {name: _unpack(value, arrays) for name, value in tree["values"].items()}
    for name, part in parts.items():
        if name not in saved:
            listed = ", ".join(saved) or "none at all"
            raise refusal("load_state", path, f"has no part {name!r}; it has {listed}")
        if not _is_part(part):
            raise SettingError(
                f"load_state: {name} must be an object with a state, or a dict of tensors; got "
                f"{shown(part)}"
            )
    before: dict[str, Any] = {}
    try:
        for name, part in parts.items():
            before[name] = _state_of(part)
            with _saying(f"load_state: {os.fspath(path)}: {name}"):
                _set_state(part, saved[name])
    except BaseException:
        for name in reversed(before):  # one object may have two names
            _set_state(parts[name], before[name])
        raise
    return plain


class _saying:
    """A with block that says in an error from inside where it happened."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, PyggmlError):
            raise type(error)(f"{self.where}: {error}") from None
        if isinstance(error, (KeyError, TypeError, AttributeError)):  # the state of another thing
            raise FileFormatError(
                f"{self.where}: does not fit this object; {type(error).__name__}: {error}"
            ) from error


def _is_dict_of_tensors(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(item, Tensor) for item in value.values())
    )


def _is_part(value: Any) -> bool:
    if isinstance(value, type):  # a class has no state of its own
        return False
    return _is_dict_of_tensors(value) or hasattr(value, "state_dict") or hasattr(value, "set_state")


def _state_of(part: Any) -> dict[str, Any]:
    """Return a part's state: a dict of numbers, texts and arrays."""
    if isinstance(part, Mapping):
        copies = {tensor: tensor.numpy() for tensor in part.values()}  # a tied one once
        return {name: copies[tensor] for name, tensor in part.items()}
    if isinstance(part, Optimizer):
        return {"state": part.state_dict(), "window": _window_of(part)}
    return dict(part.state_dict() if hasattr(part, "state_dict") else part.state())


def _set_state(part: Any, state: dict[str, Any]) -> None:
    if isinstance(part, Mapping):
        _load_into_dict("the dict of tensors", part, state, True)
    elif isinstance(part, Optimizer):
        part.load_state_dict(state["state"])
        _set_window(part, state["window"])
    elif hasattr(part, "load_state_dict"):
        part.load_state_dict(state)
    else:
        part.set_state(state)


def _window_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return what an optimizer has gathered in an open accumulation window, and its rate."""
    gradients = {}
    if optimizer._gathered:
        for i, parameter in enumerate(optimizer.params):
            if parameter.grad is not None:
                gradients[str(i)] = parameter.grad.numpy()
    return {
        "gathered": optimizer._gathered,
        "counted": list(optimizer._counted),
        "skipped": optimizer.skipped,
        "gradients": gradients,
        # A schedule is a function of the counter; a rate set by hand is not to be found elsewhere.
        "lr": None if optimizer._schedule is not None else optimizer.lr,
    }


def _set_window(optimizer: Optimizer, window: dict[str, Any]) -> None:
    for i, parameter in enumerate(optimizer.params):
        gradient = window["gradients"].get(str(i))
        parameter.grad = None
        if gradient is not None:
            parameter.grad = make_tensor(gradient, device=parameter.device, op="load_state")
    optimizer._gathered = int(window["gathered"])
    optimizer._counted = [int(count) for count in window["counted"]]
    optimizer.skipped = int(window["skipped"])
    if window["lr"] is not None and optimizer._schedule is None:
        optimizer.lr = float(window["lr"])


# ---- trees of arrays and plain values ------------------------------------------------------------


class _Packer:
    """Turns a tree into JSON and a dict of arrays; one object in two places is one array."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.arrays: Arrays = {}
        self._names: dict[int, str] = {}
        self._alive: list[Any] = []  # an id stands for an object only while it lives

    def pack(self, value: Any, name: str) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Mapping):
            if _ARRAY in value or not all(isinstance(key, str) for key in value):
                raise SettingError(f"{self.op}: {name} must have texts as keys, and no {_ARRAY!r}")
            return {key: self.pack(item, f"{name}/{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.pack(item, f"{name}/{i}") for i, item in enumerate(value)]
        if not isinstance(value, (Tensor, np.ndarray, np.generic)):
            raise DTypeError(
                f"{self.op}: {name} must be a number, text or array, or a dict or list of such; "
                f"got {type(value).__name__}"
            )
        return {_ARRAY: self.place(value, name)}

    def place(self, value: Any, name: str) -> str:
        """Return the name under which an array is written."""
        if not isinstance(name, str) or not isinstance(value, (Tensor, np.ndarray, np.generic)):
            kind = type(value).__name__
            raise DTypeError(f"{self.op}: needs arrays by name; got {kind} under {name!r}")
        if id(value) not in self._names:
            array = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
            if name in self.arrays:
                raise SettingError(f"{self.op}: two arrays have the name {name!r}; rename one")
            self.arrays[name] = writable(self.op, name, array)
            self._names[id(value)] = name
            self._alive.append(value)
        return self._names[id(value)]


def _unpack(tree: Any, arrays: Arrays) -> Any:
    if isinstance(tree, dict):
        if _ARRAY in tree:
            return arrays[tree[_ARRAY]]
        return {key: _unpack(item, arrays) for key, item in tree.items()}
    return [_unpack(item, arrays) for item in tree] if isinstance(tree, list) else tree
