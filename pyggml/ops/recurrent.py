"""LSTM and GRU over a whole sequence.

On the CPU it is one node: as one node for each operation of each step, a sequence spends its time
between nodes, and on products too small for BLAS. On other devices it is unrolled into ops.

Tensors are rows of (batch, size), in the order of time. ``x`` is the input (steps * batch, inputs);
``weight_ih`` (gates * hidden, inputs) and ``weight_hh`` (gates * hidden, hidden) have the gates i,
f, g, o of an LSTM, or r, z, n of a GRU. ``bias`` (4 * hidden,) is what is added for i, f, g, o, or
for q, r, z, n, where q = weight_hh h + bias is what r is multiplied with in n. ``first`` are the
states to start from, (batch, hidden): h and c of an LSTM, h of a GRU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._ffi import ffi, lib
from ..dtypes import float32
from ..errors import DTypeError, ShapeError
from ..graph import Op, Spec, state
from ..lowering import GgmlTensor, Lowering
from ..tensor import Tensor, record
from .activation import _reference_sigmoid, sigmoid, tanh
from .elementwise import add, affine, mul, sub
from .linear import MATMUL, matmul
from .reduction import sum
from .rules import need_floats, need_shape
from .shaping import permute, reshape, transpose
from .slicing import concat, sliced, split

# ---- recurrence: what a sequence gives, and all that its gradient needs --------------------------
# Rows: the states h[0], h[1], ..., h[steps], then c[steps], ..., c[0] of an LSTM; in the opposite
# order where the sequence is read from its end. Then four for each step: the gates (batch, 4,
# hidden), activated, in the order of the bias.

GATES = 4  # that are kept of a step


def _check_shapes(
    weight_hh: Spec, weight_ih: Spec, x: Spec, bias: Spec, *first: Spec
) -> tuple[int, int, int]:
    """Return steps, batch and hidden."""
    need_floats("recurrence", weight_hh, weight_ih, x, bias, *first)
    are_matrices = all(len(t.shape) == 2 for t in (weight_hh, weight_ih, x, *first))
    batch, hidden = first[0].shape if are_matrices else (1, 1)
    width = {1: 3, 2: 4}[len(first)] * hidden
    if (
        not are_matrices
        or weight_hh.shape != (width, hidden)
        or weight_ih.shape != (width, x.shape[1])
        or bias.shape != (GATES * hidden,)
        or x.shape[0] % batch
        or any(h.shape != first[0].shape for h in first)
    ):
        shapes = [t.shape for t in (weight_hh, weight_ih, x, bias, *first)]
        raise ShapeError(
            "recurrence: needs weights (gates * hidden, hidden) and (gates * hidden, inputs), x "
            "(steps * batch, inputs), a bias (4 * hidden,) and one or two states (batch, hidden); "
            f"got {', '.join(map(str, shapes))}"
        )
    return x.shape[0] // batch, batch, hidden


def _recurrence_shape(*inputs: Spec, reverse: bool) -> Spec:
    steps, batch, hidden = _check_shapes(*inputs)
    states = len(inputs) - 4
    return Spec((states * (steps + 1) + GATES * steps, batch, hidden), float32)


def _lower_recurrence(
    b: Lowering,
    weight_hh: GgmlTensor,
    weight_ih: GgmlTensor,
    *inputs: GgmlTensor,
    reverse: bool,
) -> GgmlTensor:
    gates = weight_hh.ne[1] // weight_hh.ne[0]
    panels = [lib.pg_panels(b.ctx, weight, gates) for weight in (weight_hh, weight_ih)]
    x, bias, h, *c = map(b.contiguous, inputs)
    return lib.pg_recurrent(b.ctx, *panels, x, bias, h, c[0] if c else ffi.NULL, reverse)


def _reference_recurrence(
    weight_hh: np.ndarray,
    weight_ih: np.ndarray,
    x: np.ndarray,
    bias: np.ndarray,
    *first: np.ndarray,
    reverse: bool,
) -> np.ndarray:
    batch, hidden = first[0].shape
    entering = (x @ weight_ih.T).reshape(-1, batch, len(weight_ih))
    h, c = [first[0]], [*first[1:]]
    kept: list[Any] = [None] * len(entering)
    for t in range(len(kept))[:: -1 if reverse else 1]:
        product = h[-1] @ weight_hh.T
        if c:
            i, f, g, o = np.split(product + entering[t] + bias, 4, axis=-1)
            i, f, o, g = *map(_reference_sigmoid, (i, f, o)), np.tanh(g)
            c.append(f * c[-1] + i * g)
            h.append(o * np.tanh(c[-1]))
            kept[t] = i, f, g, o
        else:
            r, z, q = np.split(product, 3, axis=-1)
            xr, xz, xn = np.split(entering[t] + bias[hidden:], 3, axis=-1)
            q = q + bias[:hidden]
            r, z = _reference_sigmoid(r + xr), _reference_sigmoid(z + xz)
            n = np.tanh(xn + r * q)
            h.append((1.0 - z) * n + z * h[-1])
            kept[t] = q, r, z, n
    states = [*h, *c[::-1]][:: -1 if reverse else 1]
    together = [np.concatenate(step, axis=-1).reshape(GATES, batch, hidden) for step in kept]
    return np.concatenate([states, *together])


RECURRENCE = Op(
    "recurrence",
    shape=_recurrence_shape,
    lower=_lower_recurrence,
    differentiable=False,  # gradients flow through recurrent_states
    is_product=True,
    reference=_reference_recurrence,
    shared_axis=1,  # items of a batch do not meet
)


# ---- recurrent_states: h after each step, and the last c -----------------------------------------


def _states_shape(kept: Spec, *inputs: Spec, reverse: bool) -> Spec:
    steps, batch, hidden = _check_shapes(*inputs)
    if kept.dtype is not float32:
        raise DTypeError(f"recurrent_states: what is kept must be float32; got {kept.dtype}")
    rows = _recurrence_shape(*inputs, reverse=reverse).shape
    need_shape("recurrent_states", "what is kept", kept, *rows)
    return Spec((steps + len(inputs) - 5, batch, hidden), float32)


def _states_begin(steps: int, states: int, reverse: bool) -> int:
    """Return the row of what is kept where they begin: the last c stands beside the last h."""
    return 1 if not reverse else 0 if states == 1 else steps


def _lower_states(b: Lowering, kept: GgmlTensor, *inputs: GgmlTensor, reverse: bool) -> GgmlTensor:
    _, _, x, _, *first = inputs
    steps = x.ne[1] // kept.ne[1]
    begin = _states_begin(steps, len(first), reverse)
    rows = steps + len(first) - 1
    return lib.ggml_view_3d(
        b.ctx, kept, kept.ne[0], kept.ne[1], rows, kept.nb[1], kept.nb[2], begin * kept.nb[2]
    )


def _reference_states(kept: np.ndarray, *inputs: np.ndarray, reverse: bool) -> np.ndarray:
    _, _, x, _, *first = inputs
    steps = len(x) // len(first[0])
    begin = _states_begin(steps, len(first), reverse)
    return kept[begin : begin + steps + len(first) - 1]


def _grad_states(
    g: Tensor, out: Tensor, kept: Tensor, *inputs: Tensor, reverse: bool
) -> tuple[Tensor | None, ...]:
    weight_hh, weight_ih, x, _, *first = inputs
    rows, (batch, hidden) = x.shape[0], first[0].shape
    steps = rows // batch
    if state.mode.taped:  # to be differentiated again
        before, d, d_first = _unrolled_gradients(g, *inputs, reverse=reverse)
    else:
        # The states before each step are those after it, one row to the side.
        begin = _states_begin(steps, len(first), reverse) + (len(first) if reverse else -1)
        before = reshape(_rows(kept, begin, steps), (rows, hidden))
        back = record(RECURRENCE_BACK, weight_hh, g, kept, states=len(first), reverse=reverse)
        d = reshape(_rows(back, 0, GATES * steps), (rows, GATES * hidden))
        d_first = [
            reshape(_rows(back, GATES * steps + i, 1), (batch, hidden)) for i in range(len(first))
        ]
    if len(first) == 2:
        d_x = d
        d_hh = record(MATMUL, transpose(d), before)
    else:
        d_x = sliced(d, ((0, 1, rows), (hidden, 1, 3 * hidden)))
        d_h = sliced(d, ((0, 1, rows), (0, 1, 3 * hidden)))
        q, others = split(record(MATMUL, transpose(d_h), before), (hidden, 2 * hidden))
        d_hh = concat([others, q])
    d_ih = record(MATMUL, transpose(d_x), x)
    return (None, d_hh, d_ih, record(MATMUL, d_x, weight_ih), sum(d, axis=0), *d_first)


def _rows(x: Tensor, begin: int, count: int) -> Tensor:
    return sliced(x, ((begin, 1, count), (0, 1, x.shape[1]), (0, 1, x.shape[2])))


RECURRENT_STATES = Op(
    "recurrent_states",
    shape=_states_shape,
    lower=_lower_states,
    alias=True,
    grad=_grad_states,
    reference=_reference_states,
)


# ---- recurrence_back -----------------------------------------------------------------------------
# From the gradient in recurrent_states: rows of those in what was activated, and in q, as (steps,
# batch, 4 * hidden), then of those in the first states.


def _back_shape(weight_hh: Spec, g: Spec, kept: Spec, *, states: int, reverse: bool) -> Spec:
    need_floats("recurrence_back", weight_hh, g, kept)
    need_shape("recurrence_back", "the gradient", g, None, None, None)
    rows, batch, hidden = g.shape
    steps = rows - (states - 1)
    need_shape("recurrence_back", "the weight", weight_hh, (states + 2) * hidden, hidden)
    need_shape(
        "recurrence_back", "what is kept", kept, states * (steps + 1) + GATES * steps, batch, hidden
    )
    return Spec((GATES * steps + states, batch, hidden), float32)


def _lower_back(
    b: Lowering,
    weight_hh: GgmlTensor,
    g: GgmlTensor,
    kept: GgmlTensor,
    *,
    states: int,
    reverse: bool,
) -> GgmlTensor:
    panels = lib.pg_panels(b.ctx, lib.ggml_transpose(b.ctx, weight_hh), 1)
    return lib.pg_recurrent_back(b.ctx, panels, b.contiguous(g), kept, states, reverse)


def _reference_back(
    weight_hh: np.ndarray, g: np.ndarray, kept: np.ndarray, *, states: int, reverse: bool
) -> np.ndarray:
    steps, hidden = len(g) - (states - 1), weight_hh.shape[1]
    known = kept[: states * (steps + 1)][:: -1 if reverse else 1]
    gates = kept[len(known) :].reshape(steps, -1, GATES, hidden).swapaxes(1, 2)
    dh, dc = np.zeros_like(g[0]), g[0 if reverse else -1]
    grads = g[reverse and states == 2 :][:steps]
    d_gates: list[Any] = [None] * steps
    for step in range(steps)[::-1]:
        t = steps - 1 - step if reverse else step
        d = dh + grads[t]
        if states == 2:
            (i, f, g_, o), c, squashed = gates[t], known[-1 - step], np.tanh(known[-2 - step])
            e = dc + d * o * (1.0 - squashed**2)
            parts = [
                e * g_ * i * (1.0 - i), e * c * f * (1.0 - f), e * i * (1.0 - g_**2),
                d * squashed * o * (1.0 - o),
            ]  # fmt: skip
            dh, dc = np.concatenate(parts, axis=-1) @ weight_hh, e * f
        else:
            (q, r, z, n), h = gates[t], known[step]
            e = d * (1.0 - z) * (1.0 - n**2)
            parts = [e * r, e * q * r * (1.0 - r), d * (h - n) * z * (1.0 - z), e]
            dh = d * z + np.concatenate([*parts[1:3], parts[0]], axis=-1) @ weight_hh
        d_gates[t] = np.concatenate(parts, axis=-1).reshape(GATES, -1, hidden)
    return np.concatenate([*d_gates, [dh, dc][:states]])


RECURRENCE_BACK = Op(
    "recurrence_back",
    shape=_back_shape,
    lower=_lower_back,
    is_product=True,
    reference=_reference_back,
    shared_axis=1,  # items of a batch do not meet
)


# ---- unrolled: for devices without the kernel, and for gradients of gradients --------------------
# Within a step, states are (1, 1, batch, hidden) and gates (1, gates, batch, hidden): each gate is
# then a view.


def _gate_rows(x: Tensor, batch: int, hidden: int) -> tuple[Tensor, ...]:
    """Return the gates of each step from those of all, (steps * batch, gates * hidden)."""
    gates = x.shape[1] // hidden
    x = permute(reshape(x, (-1, batch, gates, hidden)), (0, 2, 1, 3))
    # A reshape puts the elements in order, once: then each step is a view.
    x = reshape(reshape(x, -1), (-1, gates, batch, hidden))
    return split(x, x.shape[0])


States = tuple[Tensor, ...]


def _lstm_step(x: Tensor, weight: Tensor, _: Tensor, states: States) -> tuple[States, States]:
    h, c = states
    entering, g, o = split(add(x, matmul(h, weight)), (2, 1, 1), axis=1)
    i, f = split(sigmoid(entering), 2, axis=1)
    g, o = tanh(g), sigmoid(o)
    c = add(mul(f, c), mul(i, g))
    return (i, f, g, o), (mul(o, tanh(c)), c)


def _gru_step(x: Tensor, weight: Tensor, bias: Tensor, states: States) -> tuple[States, States]:
    (h,) = states
    entering, new = split(x, (2, 1), axis=1)
    recurrent, q = split(matmul(h, weight), (2, 1), axis=1)
    q = add(q, bias)
    r, z = split(sigmoid(add(entering, recurrent)), 2, axis=1)
    n = tanh(add(new, mul(r, q)))
    return (q, r, z, n), (add(n, mul(z, sub(h, n))),)


def _unrolled(
    weight_hh: Tensor,
    weight_ih: Tensor,
    x: Tensor,
    bias: Tensor,
    *first: Tensor,
    reverse: bool,
) -> tuple[list[States], list[States]]:
    """Return the gates of each step, and the states before the first and after each, as taken."""
    batch, hidden = first[0].shape
    step: Callable[[Tensor, Tensor, Tensor, States], tuple[States, States]] = _lstm_step
    if len(first) == 1:
        step = _gru_step
        bias, outside = split(bias, (hidden, 3 * hidden))
    gates = add(matmul(x, transpose(weight_ih)), bias if len(first) == 2 else outside)
    weight = transpose(reshape(weight_hh, (-1, hidden, hidden)), 1, 2)
    xs = _gate_rows(gates, batch, hidden)
    states: list[States] = [tuple(reshape(x, (1, 1, batch, hidden)) for x in first)]
    kept = []
    for entering in reversed(xs) if reverse else xs:
        activated, after = step(entering, weight, bias, states[-1])
        kept.append(activated)
        states.append(after)
    return kept, states


def _lstm_back(dh: Tensor, dc: Any, gates: States, before: States, after: States) -> Any:
    (i, f, g, o), squashed = gates, tanh(after[1])
    e = add(dc, mul(mul(dh, o), _tanh_slope(squashed)))
    parts = [
        mul(mul(e, g), _sigmoid_slope(i)),
        mul(mul(e, before[1]), _sigmoid_slope(f)),
        mul(mul(e, i), _tanh_slope(g)),
        mul(mul(dh, squashed), _sigmoid_slope(o)),
    ]
    return parts, parts, None, mul(e, f)


def _gru_back(dh: Tensor, _: Any, gates: States, before: States, after: States) -> Any:
    q, r, z, n = gates
    e = mul(mul(dh, affine(z, scale=-1.0, shift=1.0)), _tanh_slope(n))
    dr, dz = mul(mul(e, q), _sigmoid_slope(r)), mul(mul(dh, sub(before[0], n)), _sigmoid_slope(z))
    dq = mul(e, r)
    return [dq, dr, dz, e], [dr, dz, dq], mul(dh, z), None


def _sigmoid_slope(y: Tensor) -> Tensor:
    return mul(y, affine(y, scale=-1.0, shift=1.0))


def _tanh_slope(y: Tensor) -> Tensor:
    return affine(mul(y, y), scale=-1.0, shift=1.0)


def _unrolled_gradients(
    g: Tensor, weight_hh: Tensor, *inputs: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the h before each step, and what recurrence_back returns, all differentiable."""
    _, _, *first = inputs[1:]
    batch, hidden = first[0].shape
    kept, states = _unrolled(weight_hh, *inputs, reverse=reverse)
    steps = len(kept)
    grads = [reshape(x, (1, 1, batch, hidden)) for x in split(g, len(g))]
    dc = None if len(first) == 1 else grads.pop(0 if reverse else -1)
    if reverse:
        grads.reverse()
    dh = None
    weight = reshape(weight_hh, (-1, hidden, hidden))
    back = _lstm_back if len(first) == 2 else _gru_back
    d: list[Tensor] = []
    for step in reversed(range(steps)):
        total = grads[step] if dh is None else add(grads[step], dh)
        parts, to_products, past, dc = back(total, dc, kept[step], states[step], states[step + 1])
        d.append(concat(parts, axis=1))
        dh = sum(matmul(concat(to_products, axis=1), weight), axis=1, keepdims=True)
        dh = dh if past is None else add(dh, past)
    order = 1 if reverse else -1
    before = concat([h for h, *_ in states[:-1]][::-order])
    together = permute(concat(d[::order]), (0, 2, 1, 3))
    return (
        reshape(before, (steps * batch, hidden)),
        reshape(together, (steps * batch, GATES * hidden)),
        [reshape(x, (batch, hidden)) for x in (dh, dc) if x is not None],
    )


# ---- what the layers call ------------------------------------------------------------------------


def recurrence(
    weight_hh: Tensor,
    weight_ih: Tensor,
    x: Tensor,
    bias: Tensor,
    *first: Tensor,
    reverse: bool = False,
) -> tuple[Tensor, States]:
    """Return h after each step, (steps, batch, hidden) in the order of time, and the last states.

    With two first states (h, c) it is an LSTM, with one a GRU. For the shapes see above.
    """
    inputs = (weight_hh, weight_ih, x, bias, *first)
    device = x.device
    if device.own_kernels or device.double:
        kept = record(RECURRENCE, *inputs, reverse=reverse)
        found = record(RECURRENT_STATES, kept, *inputs, reverse=reverse)
        steps = found.shape[0] - (len(first) - 1)
        h = _rows(found, int(reverse and len(first) == 2), steps)
        last = [_rows(h, 0 if reverse else steps - 1, 1)]
        if len(first) == 2:
            last.append(_rows(found, 0 if reverse else steps, 1))
    else:
        _, states = _unrolled(*inputs, reverse=reverse)
        h = concat([x for x, *_ in states[1:]][:: -1 if reverse else 1])
        h = reshape(h, (h.shape[0], *first[0].shape))
        last = list(states[-1])
    return h, tuple(reshape(x, first[0].shape) for x in last)
