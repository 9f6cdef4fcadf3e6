"""The base of all layers: what it holds is what its attributes are.

Parameters, buffers and modules are found among a module's attributes, and in lists, tuples and
dicts that are attributes. There is no register beside them, so a subclass need not call
``super().__init__()``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from ..checks import need_function, need_mapping
from ..device import Device, resolve_device
from ..dtypes import as_dtype, check_array
from ..errors import DeviceError, DTypeError, ShapeError
from ..graph import pin, state
from ..ops import detach
from ..tensor import Parameter, Tensor, TensorLike, make_tensor
from ..transfer import move_to

Kind = TypeVar("Kind")
Self = TypeVar("Self", bound="Module")


class Buffer(Tensor):
    """A tensor that belongs to a module but is not trained; made by nn.buffer."""

    __slots__ = ()

    def assign(self, value: TensorLike) -> None:
        """Take another value of the same shape. One that is pending is computed with the next run.

        What was recorded with the old value keeps it, unlike with a parameter.
        """
        if not isinstance(value, Tensor):
            value = make_tensor(value, dtype=self._at[1].dtype, device=self.device, op="assign")
        elif value.is_leaf:  # of its own, since a leaf can be overwritten in place
            value = make_tensor(value, device=self.device, op="assign")
        if value.shape != self.shape or value._at[1].dtype is not self._at[1].dtype:
            raise ShapeError(
                f"assign: the buffer needs the shape {self.shape} of {self.dtype}; got "
                f"{value.shape} of {value.dtype}"
            )
        if value.device is not self.device:
            raise DeviceError(
                f"assign: the buffer is on {self.device.name}; the value on {value.device.name}"
            )
        if state.trace is not None:
            state.trace.note_buffer(self)
        self._become(detach(value) if value.requires_grad else value)
        pin(self)  # no later change of a parameter makes it stale

    def settled(self) -> Buffer:
        """Return the buffer, having computed a value that waits on a tape before the open one.

        A layer that replaces its buffers in each call reads them through this: else calls whose
        results nobody looked at would pile up, and the weights could change under them.
        """
        if self._source is None and self._at[0] is not state.frames.get(self.device):
            self._materialized()
        if self._source is not None and not self.is_leaf:
            self._take_place(self._source)  # an input like any other, so plans are found again
        return self


def buffer(data: TensorLike, *, dtype: object = None) -> Buffer:
    """Copy data into a buffer: part of a module's state_dict, but not of its parameters.

    As an attribute of a module it stays the buffer that it is: assigning a tensor replaces its
    value. Floats become float32, integers int32.

    >>> class Mean(nn.Module):
    ...     def __init__(self):
    ...         self.mean = nn.buffer(0.0)
    ...     def forward(self, x):
    ...         self.mean = self.mean * 0.9 + ag.mean(x) * 0.1
    ...         return x - self.mean
    >>> layer = Mean()
    >>> layer([1.0, 3.0]).numpy(), layer.state_dict()
    (array([0.8, 2.8], dtype=float32), {'mean': array(0.2, dtype=float32)})
    """
    made = make_tensor(data, dtype=dtype, cls=Buffer, op="buffer")
    assert isinstance(made, Buffer)
    return made


class Leftover(NamedTuple):
    """The names that load_state_dict left out.

    They are absent from the values, absent from the module, or of another shape.
    """

    missing: list[str]
    unexpected: list[str]
    misshaped: list[str]


class Module:
    """Base of all layers: set parameters, buffers and modules as attributes, and define forward.

    >>> class Scale(nn.Module):
    ...     def __init__(self):
    ...         self.factor = ag.param([2.0])
    ...     def forward(self, x):
    ...         return x * self.factor
    >>> [name for name, _ in Scale().named_parameters()]
    ['factor']
    >>> Scale()(ag.tensor([1.0, 2.0])).numpy()
    array([2., 4.], dtype=float32)
    """

    training = True
    """Whether layers that behave differently in training do so: see train and eval."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's result; calling the module calls this."""
        raise NotImplementedError(f"{type(self).__name__}: define forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if state.trace is not None:
            state.trace.called[id(self)] = self
        result = self.forward(*args, **kwargs)
        if _watch.calls is not None:
            _watch.calls.append((self, result))
        return result

    def __setattr__(self, name: str, value: Any) -> None:
        before = self.__dict__.get(name)
        if isinstance(before, Buffer) and not (value is None or isinstance(value, Buffer)):
            before.assign(value)
            return
        if isinstance(before, Parameter) and not (value is None or isinstance(value, Parameter)):
            raise DTypeError(
                f"{type(self).__name__}: {name} is a parameter, which a {type(value).__name__} in "
                f"its place would not be; use {name}.assign(value), or ag.param(value)"
            )
        object.__setattr__(self, name, value)

    # ---- what it is made of ----

    def _members(self) -> Iterator[tuple[str, Any]]:
        yield from vars(self).items()

    def _found(self, kind: type[Kind]) -> Iterator[tuple[str, Kind]]:
        """Yield what there is of a kind among the attributes, with names."""
        for name, value in self._members():
            yield from _find(name, value, kind)

    def _walk(self, prefix: str = "", path: tuple[int, ...] = ()) -> Iterator[tuple[str, Module]]:
        """Yield this module and all inside of it, as often as there are ways to them."""
        yield prefix, self
        path = (*path, id(self))
        for name, child in self.named_children():
            if id(child) not in path:  # a module may know its parent
                yield from child._walk(_join(prefix, name), path)

    def _tensors(self, *kinds: type[Kind]) -> Iterator[tuple[str, Kind]]:
        """Yield all tensors of some kinds, as often as there are names for them."""
        for prefix, module in self._walk():
            for kind in kinds:
                for name, tensor in module._found(kind):
                    yield _join(prefix, name), tensor

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield the modules directly inside, with their names."""
        yield from self._found(Module)

    def children(self) -> list[Module]:
        """Return the modules directly inside."""
        return [child for _, child in self.named_children()]

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """Yield this module, named "", and each one inside of it once, with its dotted name."""
        yield from _once(self._walk())

    def modules(self) -> list[Module]:
        """Return this module and each one inside of it once."""
        return [module for _, module in self.named_modules()]

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield every parameter once, with its dotted name."""
        yield from _once(self._tensors(Parameter))

    def parameters(self) -> list[Parameter]:
        """Return every parameter once."""
        return [parameter for _, parameter in self.named_parameters()]

    def named_buffers(self) -> Iterator[tuple[str, Buffer]]:
        """Yield every buffer once, with its dotted name."""
        yield from _once(self._tensors(Buffer))

    def buffers(self) -> list[Buffer]:
        """Return every buffer once."""
        return [found for _, found in self.named_buffers()]

    # ---- modes ----

    def train(self: Self, mode: bool = True) -> Self:
        """Set training mode, or evaluation mode, here and in all modules inside; return self."""
        for module in self.modules():
            module.training = bool(mode)
        return self

    def eval(self: Self) -> Self:
        """Set evaluation mode here and in all modules inside; return self."""
        return self.train(False)

    def to(self: Self, device: Device | str | None = None, *, dtype: object = None) -> Self:
        """Move all parameters, with their gradients, and buffers to a device; return self.

        ``dtype`` is a float type to store the parameters in: "float32", "float16" or "bfloat16"; an
        optimizer keeps a float32 master of each half one. Back in float32 a parameter is what it
        was rounded to. Buffers and gradients stay float32.

        They stay the same objects, so optimizers go on with them and take their state along. Raises
        DeviceError or DTypeError, having changed nothing, if there is no such device or type.

        >>> layer = nn.Linear(2, 1).to("reference")
        >>> layer.weight.device
        Device('reference')
        >>> layer.to("cpu", dtype="bfloat16").weight.dtype
        bfloat16
        """
        where = None if device is None else resolve_device(device)
        kind = None if dtype is None else as_dtype(dtype)
        if kind is not None and not kind.is_float:
            raise DTypeError(f"to: parameters need a float type; got {kind}")
        for waiting in self.buffers():
            waiting.settled()  # before the weights that it waits on move away
            waiting.numpy()
        for tensor in self.parameters():
            move_to(tensor, where or tensor.device, kind)
        for buffer in self.buffers():
            move_to(buffer, where or buffer.device)
        return self

    def requires_grad_(self: Self, value: bool = True) -> Self:
        """Free all parameters for training, or with False freeze them; return self.

        A frozen parameter gets no gradient, and optimizers leave it alone.

        >>> model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['1.weight', '1.bias']
        """
        for parameter in self.parameters():
            parameter.requires_grad = bool(value)
        return self

    def apply(self: Self, function: Callable[[Module], object]) -> Self:
        """Call a function with each module inside, and then with this one; return self.

        >>> def clear(module):
        ...     if isinstance(module, nn.Linear):
        ...         module.bias.assign(nn.init.zeros(module.bias.shape))
        >>> nn.Sequential(nn.Linear(2, 3), nn.ReLU()).apply(clear)[0].bias.numpy()
        array([0., 0., 0.], dtype=float32)
        """
        self._apply(need_function("apply", "function", function), set())
        return self

    def _apply(self, function: Callable[[Module], object], seen: set[int]) -> None:
        seen.add(id(self))
        for child in self.children():
            if id(child) not in seen:
                child._apply(function, seen)
        function(self)

    # ---- values in and out ----

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return a copy of every parameter's and buffer's value by dotted name.

        Tied weights are there once, under their first name.
        """
        named = _once(self._tensors(Parameter, Buffer))
        return {name: tensor.numpy() for name, tensor in named}

    def load_state_dict(self, values: Mapping[str, ArrayLike], *, strict: bool = True) -> Leftover:
        """Overwrite every parameter and buffer; tied ones may come under any of their names.

        Raises ShapeError, before changing anything, that lists all names that are missing,
        unexpected, or of another shape. With strict=False those are left out and returned. Raises
        DTypeError for values that are not numbers.

        >>> nn.Linear(2, 1).load_state_dict({"weight": np.ones((1, 2))}, strict=False)
        Leftover(missing=['bias'], unexpected=[], misshaped=[])
        """
        need_mapping(f"{type(self).__name__}.load_state_dict", "values", values)
        fitting, left, own = self._sort_values(values)
        if strict and any(left):
            problems = [f"missing {name}" for name in left.missing]
            problems += [f"unexpected {name}" for name in left.unexpected]
            problems += [
                f"{name} has shape {np.shape(values[name])}, not {own[name].shape}"
                for name in left.misshaped
            ]
            raise ShapeError(
                f"{type(self).__name__}.load_state_dict: {'; '.join(problems)}; strict=False loads "
                "what fits"
            )
        for tensor, array in fitting:
            tensor.assign(array)
        return left

    def _sort_values(
        self, values: Mapping[str, ArrayLike]
    ) -> tuple[list[tuple[Tensor, np.ndarray]], Leftover, dict[str, Tensor]]:
        """Return the tensors that values fit, with them; what does not fit; all tensors by name."""
        own = dict(self._tensors(Parameter, Buffer))
        names: dict[int, list[str]] = {}
        for name, tensor in own.items():
            names.setdefault(id(tensor), []).append(name)
        left = Leftover([], [name for name in values if name not in own], [])
        fitting = []
        for listed in names.values():
            tensor = own[listed[0]]
            given = []
            for name in listed:
                if name in values:
                    op, kind = f"load_state_dict: {name}", tensor._at[1].dtype
                    array, _ = check_array(values[name], kind, op=op)
                    given.append((name, array))
            left.misshaped.extend(name for name, array in given if array.shape != tensor.shape)
            given = [(name, array) for name, array in given if array.shape == tensor.shape]
            if given:
                first, value = given[0]
                for name, array in given[1:]:
                    if not np.array_equal(value, array, equal_nan=True):
                        raise ShapeError(
                            f"{type(self).__name__}.load_state_dict: {first} and {name} are one "
                            "parameter here, but their values differ"
                        )
                fitting.append((tensor, value))
            elif not any(name in values for name in listed):
                left.missing.append(listed[0])
        return fitting, left, own

    # ---- what people see ----

    def summary(self, *inputs: Any, **settings: Any) -> None:
        """Print every layer with its shape of output and its number of parameters.

        The shapes are those for a call with the given inputs, arrays or tensors, which is recorded
        but not computed. Without inputs there are none. A parameter used twice counts once.

        >>> nn.Sequential(nn.Linear(4, 8), nn.ReLU()).summary(np.zeros((32, 4)))
        name  layer                                  output   parameters
        0     Linear(in_features=4, out_features=8)  (32, 8)          40
        1     ReLU()                                 (32, 8)           0
        40 parameters, 40 of them trained
        """
        from ._summary import summarize

        print(summarize(self, inputs, settings))

    def extra_repr(self) -> str:
        """Return what stands between the parentheses: the attributes that are plain values."""
        return ", ".join(
            f"{name}={value!r}"
            for name, value in vars(self).items()
            if name != "training" and not name.startswith("_") and _is_plain(value)
        )

    def __repr__(self) -> str:
        lines = [
            f"({name}): {child!r}".replace("\n", "\n  ") for name, child in self.named_children()
        ]
        settings = self.extra_repr()
        if not lines:
            return f"{type(self).__name__}({settings})"
        inner = "\n  ".join([*([settings] if settings else []), *lines])
        return f"{type(self).__name__}(\n  {inner}\n)"


class _Watch(threading.local):
    """The calls of modules that somebody watches in this thread, in the order of their ends."""

    calls: list[tuple[Module, Any]] | None = None


_watch = _Watch()


def _find(name: str, value: Any, kind: type[Kind]) -> Iterator[tuple[str, Kind]]:
    if isinstance(value, kind):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _find(f"{name}.{i}", item, kind)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _find(f"{name}.{key}", item, kind)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _once(named: Iterator[tuple[str, Kind]]) -> Iterator[tuple[str, Kind]]:
    seen = set()
    for name, value in named:
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, (bool, int, float, str))
