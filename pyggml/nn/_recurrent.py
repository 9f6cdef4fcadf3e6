"""Recurrent layers: LSTM and GRU, in PyTorch's formulas and with its parameters.

The input's projection does not depend on the state, so it is one product for all steps; a step is
then one product and about ten small operations. Within a step, states are (1, 1, batch, hidden) and
gates (1, gates, batch, hidden): each gate is then a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

from ..checks import positive_integer, share
from ..ops import (
    add,
    concat,
    dropout,
    full,
    matmul,
    mul,
    permute,
    reshape,
    sigmoid,
    split,
    sub,
    tanh,
    transpose,
)
from ..tensor import Parameter, Tensor, TensorLike
from . import init
from ._module import Module
from ._support import input_of, misfit, parameter


class _Recurrent(Module):
    """What LSTM and GRU share: parameters, layers and directions.

    A subclass says how many gates and states there are, and what a step does.
    """

    gates = 0
    states = 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0.0,
        bidirectional: bool = False,
    ) -> None:
        name = type(self).__name__
        self.input_size = positive_integer(name, "input_size", input_size)
        self.hidden_size = positive_integer(name, "hidden_size", hidden_size)
        self.num_layers = positive_integer(name, "num_layers", num_layers)
        self.bias = bool(bias)
        self.batch_first = bool(batch_first)
        self.dropout = share(name, "dropout", dropout)
        self.bidirectional = bool(bidirectional)
        bound, rows = 1.0 / sqrt(self.hidden_size), self.gates * self.hidden_size
        for layer in range(self.num_layers):
            width = self.input_size if layer == 0 else self.hidden_size * (1 + self.bidirectional)
            for suffix in self._suffixes(layer):
                shapes: dict[str, tuple[int, ...]] = {
                    "weight_ih": (rows, width),
                    "weight_hh": (rows, self.hidden_size),
                }
                if bias:
                    shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
                for start, shape in shapes.items():
                    value = init.uniform(shape, low=-bound, high=bound)
                    setattr(self, start + suffix, parameter(value))

    def _suffixes(self, layer: int) -> list[str]:
        """Return how the names of a layer's parameters end, for each direction."""
        return [f"_l{layer}", f"_l{layer}_reverse"][: 1 + self.bidirectional]

    def _parameter(self, name: str) -> Parameter:
        return getattr(self, name)

    def _run(
        self, x: TensorLike, first: Sequence[TensorLike] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the last layer's output for all steps, and each state after the last step."""
        x = input_of(self, x, self._parameter("weight_ih_l0"))
        if x.ndim != 3 or x.shape[2] != self.input_size:
            axes = ("batch", "steps") if self.batch_first else ("steps", "batch")
            raise misfit(self, f"({axes[0]}, {axes[1]}, {self.input_size})", x)
        batch = x.shape[0 if self.batch_first else 1]
        starts = self._first_states(x, batch, first)
        finals: list[tuple[Tensor, ...]] = []
        batch_first = self.batch_first
        for layer in range(self.num_layers):
            if layer and self.dropout:
                x = dropout(x, p=self.dropout, training=self.training)
            directions = []
            for reverse, suffix in enumerate(self._suffixes(layer)):
                steps = self._projected(x, suffix, batch_first)
                outputs, final = self._direction(steps, starts[len(finals)], suffix, bool(reverse))
                finals.append(final)
                directions.append(concat(outputs))  # (steps, 1, batch, hidden)
            x = concat(directions, axis=-1)
            x = reshape(x, (x.shape[0], *x.shape[2:]))
            batch_first = False
        output = transpose(x, 0, 1) if self.batch_first else x
        shape = (len(finals), batch, self.hidden_size)
        return output, [reshape(concat(state), shape) for state in zip(*finals, strict=True)]

    def _first_states(
        self, x: Tensor, batch: int, first: Sequence[TensorLike] | None
    ) -> list[tuple[Tensor, ...]]:
        """Return the states that each layer and direction starts with: given ones, or zeros."""
        count = self.num_layers * (1 + self.bidirectional)
        if first is None:
            zeros = full((1, 1, batch, self.hidden_size), 0.0, device=x.device)
            return [(zeros,) * self.states] * count
        given = []
        shape = (count, batch, self.hidden_size)
        for state in first:
            state = input_of(self, state, x)
            if state.shape != shape:
                raise misfit(self, f"first states (layers * directions, batch, hidden) = {shape}",
                             state)  # fmt: skip
            given.append(split(reshape(state, (count, 1, *shape[1:])), count))
        return list(zip(*given, strict=True))

    def _projected(self, x: Tensor, suffix: str, batch_first: bool) -> list[Tensor]:
        """Return the input's part of the gates for each step: (1, gates, batch, hidden)."""
        gates = matmul(x, transpose(self._parameter("weight_ih" + suffix)))
        if self.bias:
            gates = add(gates, self._input_bias(suffix))
        gates = reshape(gates, (*x.shape[:2], self.gates, self.hidden_size))
        batch, steps = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
        gates = permute(gates, (1, 2, 0, 3) if batch_first else (0, 2, 1, 3))
        # A reshape puts the elements in order, once: then each step is a view.
        return _rows(reshape(reshape(gates, -1), (steps, self.gates, batch, self.hidden_size)))

    def _input_bias(self, suffix: str) -> Tensor:
        raise NotImplementedError

    def _recurrent_weight(self, suffix: str) -> Tensor:
        """Return the weight by which a state is multiplied: (gates, hidden, hidden)."""
        shape = (self.gates, self.hidden_size, self.hidden_size)
        return transpose(reshape(self._parameter("weight_hh" + suffix), shape), 1, 2)

    def _direction(
        self, steps: list[Tensor], first: tuple[Tensor, ...], suffix: str, reverse: bool
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return the outputs of all steps, in their order, and the states after the last one."""
        outputs = []
        prepared = self._prepared(suffix)
        state = first
        for step in reversed(steps) if reverse else steps:
            state = self._step(step, state, prepared)
            outputs.append(state[0])
        return outputs[::-1] if reverse else outputs, state

    def _prepared(self, suffix: str) -> Any:
        raise NotImplementedError

    def _step(self, gates: Tensor, state: tuple[Tensor, ...], prepared: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def extra_repr(self) -> str:
        said = f"{self.input_size}, {self.hidden_size}"
        for name, default in (("num_layers", 1), ("bias", True), ("batch_first", True),
                              ("dropout", 0.0), ("bidirectional", False)):  # fmt: skip
            value = getattr(self, name)
            said += "" if value == default else f", {name}={value}"
        return said


def _rows(x: Tensor) -> list[Tensor]:
    """Return the entries of the first axis, each with that axis, by cutting in halves.

    The gradient of a part is as large as what it was cut from: cut in one go, n parts would have
    n gradients of the whole.
    """
    count = x.shape[0]
    if count == 1:
        return [x]
    first, second = split(x, (count // 2, count - count // 2))
    return _rows(first) + _rows(second)


class LSTM(_Recurrent):
    """Long short-term memory over sequences (B, T, input_size): (B, T, hidden_size).

    i, f, o = sigmoid and g = tanh of weight_ih x + bias_ih + weight_hh h + bias_hh; c = f c + i g;
    h = o tanh(c) (Hochreiter and Schmidhuber 1997). Calling it returns the outputs of all steps and
    the last states: ``output, (h, c) = lstm(x)``. States are (num_layers * directions, B,
    hidden_size) and zeros at first, or given: ``lstm(x, (h, c))``.

    Layers read the outputs of the one below, in training dropped with probability ``dropout``.
    ``bidirectional`` adds a second one that reads from the end; outputs are then twice as wide.
    ``batch_first=False`` takes and returns (T, B, ...). Parameters, weight_ih_l0 and so on, start
    uniform in +-1 / sqrt(hidden_size). Raises SettingError for settings out of range, ShapeError
    for inputs that do not fit.

    >>> lstm = nn.LSTM(3, 8, num_layers=2, bidirectional=True)
    >>> output, (h, c) = lstm(np.ones((2, 5, 3)))
    >>> output.shape, h.shape, c.shape
    ((2, 5, 16), (4, 2, 8), (4, 2, 8))
    """

    gates = 4
    states = 2

    def forward(
        self, x: TensorLike, states: tuple[TensorLike, TensorLike] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, (h, c) = self._run(x, states)
        return output, (h, c)

    def _input_bias(self, suffix: str) -> Tensor:
        return add(self._parameter("bias_ih" + suffix), self._parameter("bias_hh" + suffix))

    def _prepared(self, suffix: str) -> Tensor:
        return self._recurrent_weight(suffix)

    def _step(self, gates: Tensor, state: tuple[Tensor, ...], prepared: Any) -> tuple[Tensor, ...]:
        h, c = state
        gates = add(gates, matmul(h, prepared))
        entering, g, o = split(gates, (2, 1, 1), axis=1)
        i, f = split(sigmoid(entering), 2, axis=1)
        c = add(mul(f, c), mul(i, tanh(g)))
        return mul(sigmoid(o), tanh(c)), c


class GRU(_Recurrent):
    """Gated recurrent units over sequences (B, T, input_size): (B, T, hidden_size).

    r, z = sigmoid of weight_ih x + bias_ih + weight_hh h + bias_hh; n = tanh(weight_ih x + bias_ih
    + r (weight_hh h + bias_hh)); h = (1 - z) n + z h (Cho et al. 2014). Calling it returns the
    outputs of all steps and the last state: ``output, h = gru(x)``, or ``gru(x, h)`` with a first
    state (num_layers * directions, B, hidden_size). Settings are those of LSTM.

    >>> output, h = nn.GRU(3, 8)(np.ones((2, 5, 3)))
    >>> output.shape, h.shape
    ((2, 5, 8), (1, 2, 8))
    """

    gates = 3

    def forward(self, x: TensorLike, state: TensorLike | None = None) -> tuple[Tensor, Tensor]:
        output, (h,) = self._run(x, None if state is None else (state,))
        return output, h

    def _input_bias(self, suffix: str) -> Tensor:
        # The state's bias for n stands inside r (...), so it cannot be added here.
        outside, _ = split(self._parameter("bias_hh" + suffix), self._parts())
        zeros = full((self.hidden_size,), 0.0, device=outside.device)
        return add(self._parameter("bias_ih" + suffix), concat([outside, zeros]))

    def _parts(self) -> tuple[int, int]:
        return 2 * self.hidden_size, self.hidden_size

    def _prepared(self, suffix: str) -> tuple[Tensor, Tensor | None]:
        weight = self._recurrent_weight(suffix)
        if not self.bias:
            return weight, None
        return weight, split(self._parameter("bias_hh" + suffix), self._parts())[1]

    def _step(self, gates: Tensor, state: tuple[Tensor, ...], prepared: Any) -> tuple[Tensor, ...]:
        (h,) = state
        weight, bias = prepared
        entering, new = split(gates, (2, 1), axis=1)
        recurrent, inner = split(matmul(h, weight), (2, 1), axis=1)
        if bias is not None:
            inner = add(inner, bias)
        r, z = split(sigmoid(add(entering, recurrent)), 2, axis=1)
        n = tanh(add(new, mul(r, inner)))
        return (add(n, mul(z, sub(h, n))),)
