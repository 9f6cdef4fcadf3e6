"""Recurrent layers: LSTM and GRU, in PyTorch's formulas and with its parameters.

The steps of a layer are ops.recurrence.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt

from ..checks import fraction, positive_integer
from ..ops import add, concat, dropout, full, reshape, split, stack, transpose
from ..ops.recurrent import GATES, recurrence
from ..tensor import Parameter, Tensor, TensorLike
from . import init
from ._module import Module
from ._support import input_of, misfit, parameter


class _Recurrent(Module):
    """What LSTM and GRU share: parameters, layers and directions.

    A subclass says how many gates and states there are, and how its biases add up.
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
        self.num_layers = positive_integer(name, "num_layers", num_layers, 1000)
        self.bias = bool(bias)
        self.batch_first = bool(batch_first)
        self.dropout = fraction(name, "dropout", dropout)
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
        if self.batch_first:
            x = transpose(x, 0, 1)
        batch = x.shape[1]
        starts = self._first_states(x, batch, first)
        finals: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            if layer and self.dropout:
                x = dropout(x, p=self.dropout, training=self.training)
            directions = []
            rows = reshape(x, (prod(x.shape[:2]), x.shape[2]))
            for reverse, suffix in enumerate(self._suffixes(layer)):
                weights = [self._parameter(name + suffix) for name in ("weight_hh", "weight_ih")]
                inputs = (*weights, rows, self._bias(suffix, x), *starts[len(finals)])
                h, final = recurrence(*inputs, reverse=bool(reverse))
                finals.append(final)
                directions.append(h)  # (steps, batch, hidden)
            x = concat(directions, axis=-1)
        output = transpose(x, 0, 1) if self.batch_first else x
        return output, [stack(state) for state in zip(*finals, strict=True)]

    def _first_states(
        self, x: Tensor, batch: int, first: Sequence[TensorLike] | None
    ) -> list[tuple[Tensor, ...]]:
        """Return the states that each layer and direction starts with: given ones, or zeros."""
        count = self.num_layers * (1 + self.bidirectional)
        if first is None:
            zeros = full((batch, self.hidden_size), 0.0, device=x.device)
            return [(zeros,) * self.states] * count
        given = []
        shape = (count, batch, self.hidden_size)
        for state in first:
            state = input_of(self, state, x)
            if state.shape != shape:
                raise misfit(self, f"first states (layers * directions, batch, hidden) = {shape}",
                             state)  # fmt: skip
            given.append([reshape(part, shape[1:]) for part in split(state, count)])
        return list(zip(*given, strict=True))

    def _bias(self, suffix: str, x: Tensor) -> Tensor:
        """Return the sums of both biases of a layer and direction, as ops.recurrence wants them."""
        if not self.bias:
            return full((GATES * self.hidden_size,), 0.0, device=x.device)
        names = ("bias_ih" + suffix, "bias_hh" + suffix)
        return self._bias_sum(*(self._parameter(name) for name in names))

    def _bias_sum(self, inputs: Parameter, states: Parameter) -> Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        said = f"{self.input_size}, {self.hidden_size}"
        for name, default in (("num_layers", 1), ("bias", True), ("batch_first", True),
                              ("dropout", 0.0), ("bidirectional", False)):  # fmt: skip
            value = getattr(self, name)
            said += "" if value == default else f", {name}={value}"
        return said


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

    def _bias_sum(self, inputs: Parameter, states: Parameter) -> Tensor:
        return add(inputs, states)


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

    def _bias_sum(self, inputs: Parameter, states: Parameter) -> Tensor:
        # The state's bias for n stands inside r (...): it comes first, by itself.
        sizes = (2 * self.hidden_size, self.hidden_size)
        (outer, new), (outer_too, inner) = split(inputs, sizes), split(states, sizes)
        return concat([inner, add(outer, outer_too), new])
