"""Ops that change values in place: what optimizers end in.

They run after everything else in a program.

Each fused update is one formula in NumPy, `formula(w, g, states, n, flag) -> (w, *states)`: the
reference device runs it on arrays, and devices without our kernels on ggml tensors, one ggml op for
each of NumPy's. The CPU has a kernel that does it in one pass (_ffi/kernels/optimizer.c).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._ffi import ffi, lib
from ..errors import ShapeError
from ..graph import Op, Spec
from ..lowering import GgmlTensor, Lowering
from ..tensor import Tensor
from .rules import broadcast_shapes, need_floats
from .shaping import reshape
from .slicing import sliced


class Effect(NamedTuple):
    """A change in place, to be recorded: an op with ``mutates``, its inputs, its settings."""

    op: Op
    inputs: tuple[Tensor, ...]
    settings: tuple[tuple[str, Any], ...] = ()


# ---- assign, accumulate --------------------------------------------------------------------------


def _assign_shape(target: Spec, value: Spec) -> Spec:
    if target.shape != value.shape or target.dtype.is_float != value.dtype.is_float:
        raise ShapeError(
            f"assign: target and value must have one shape and kind; got {target.shape} of "
            f"{target.dtype} and {value.shape} of {value.dtype}"
        )
    return Spec(target.shape, target.dtype)


ASSIGN = Op(
    "assign",
    shape=_assign_shape,
    lower=lambda b, target, value: lib.ggml_cpy(b.ctx, value, target),
    reference=lambda target, value: (value,),
    differentiable=False,
    mutates=(0,),
    takes_half=True,
)

ACCUMULATE = Op(
    "accumulate",
    shape=_assign_shape,
    lower=lambda b, target, value: lib.ggml_add_inplace(b.ctx, target, b.contiguous(value)),
    reference=lambda target, value: (target + value,),
    differentiable=False,
    mutates=(0,),
)


def assign(target: Tensor, value: Tensor) -> Effect:
    """Return the effect that overwrites a parameter or state with a value of the same shape."""
    return Effect(ASSIGN, (target, value))


# ---- numbers: graph inputs, so that changing them plans nothing anew -----------------------------


class Numbers:
    """The numbers of one parameter's update, by name: a row of a table that is a graph input."""

    def __init__(self, table: Tensor, row: int, names: Sequence[str]) -> None:
        self.table = table
        self.row = row
        self.names = names

    def __getitem__(self, name: str) -> Tensor:
        column = self.names.index(name)
        return reshape(sliced(self.table, ((self.row, 1, 1), (column, 1, 1))), ())


def _number(b: Lowering, table: GgmlTensor, row: int, column: int) -> GgmlTensor:
    """Return one of a row's numbers in a tensor of its own.

    Devices without our kernels need it so.
    """
    offset = row * table.nb[1] + column * table.nb[0]
    return lib.ggml_cont(b.ctx, lib.ggml_view_1d(b.ctx, table, 1, offset))


# ---- fused updates -------------------------------------------------------------------------------

Formula = Callable[[Any, Any, Sequence[Any], Sequence[Any], bool], tuple[Any, ...]]


class _Symbol(np.lib.mixins.NDArrayOperatorsMixin):
    """A ggml tensor that NumPy's functions can be called on: each makes the ggml op."""

    def __init__(self, b: Lowering, tensor: GgmlTensor) -> None:
        self.b = b
        self.tensor = tensor

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any) -> _Symbol:
        x, *others = inputs
        if ufunc is np.maximum and others == [0.0]:
            return _Symbol(self.b, lib.ggml_relu(self.b.ctx, x.tensor))
        if not others:
            return _Symbol(self.b, _CONSTRUCTORS[ufunc](self.b.ctx, x.tensor))
        commutative = ufunc in (np.add, np.multiply)
        (y,) = others
        made = self.b.binary(_CONSTRUCTORS[ufunc], x.tensor, y.tensor, commutative=commutative)
        return _Symbol(self.b, made)


_CONSTRUCTORS: dict[Any, Any] = {
    np.add: lib.ggml_add,
    np.subtract: lib.ggml_sub,
    np.multiply: lib.ggml_mul,
    np.divide: lib.ggml_div,
    np.sqrt: lib.ggml_sqrt,
    np.sign: lib.ggml_sgn,
}


class FusedUpdate:
    """One method's update of a parameter and its state, in one op.

    Args:
        name: of the op.
        numbers: the names of what the formula takes as n, in order.
        formula: see above.
        kernel: what kernels.h calls the method.
        states: how many states there may be.
        lower: the lowering without our kernels, if ggml has an op for it, else None; it may give
            NotImplemented.
    """

    def __init__(
        self,
        name: str,
        numbers: tuple[str, ...],
        formula: Formula,
        kernel: int,
        *,
        states: Sequence[int] = (1,),
        lower: Callable[..., Any] | None = None,
    ) -> None:
        self.name = name
        self.numbers = numbers
        self.formula = formula
        self.kernel = kernel
        self.lower_portable = lower
        self.ops = {
            count: Op(
                f"{name}_{count}" if len(states) > 1 else name,
                shape=self._shape,
                lower=self._lower,
                reference=self._reference,
                differentiable=False,
                mutates=(0, *range(2, 2 + count)),
            )
            for count in states
        }

    def __call__(
        self,
        parameter: Tensor,
        gradient: Tensor,
        states: Sequence[Tensor],
        numbers: Numbers,
        *,
        flag: bool = False,
    ) -> Effect:
        """Return the effect that updates a parameter and its states."""
        assert tuple(numbers.names) == self.numbers, f"{self.name}: wrong numbers"
        inputs = (parameter, gradient, *states, numbers.table)
        return Effect(self.ops[len(states)], inputs, (("row", numbers.row), ("flag", flag)))

    def _shape(self, w: Spec, *others: Spec, row: int, flag: bool) -> Spec:
        need_floats(self.name, w, *others)
        *same, table = others
        if any(x.shape != w.shape for x in same) or table.shape[1:] != (len(self.numbers),):
            shapes = ", ".join(str(x.shape) for x in others)
            raise ShapeError(
                f"{self.name}: gradient and states must have the parameter's shape {w.shape}, and "
                f"the table {len(self.numbers)} columns; got {shapes}"
            )
        return Spec(w.shape, w.dtype)

    def _reference(self, w: Any, g: Any, *others: Any, row: int, flag: bool) -> tuple[Any, ...]:
        *states, table = others
        return self.formula(w, g, states, table[row], flag)

    def _lower(
        self, b: Lowering, w: GgmlTensor, g: GgmlTensor, *others: GgmlTensor, row: int, flag: bool
    ) -> GgmlTensor:
        *states, table = others
        g = b.contiguous(g)
        if b.own_kernels:
            args = ffi.new("struct ggml_tensor *[]", [w, g, *states, table])
            return lib.pg_update(b.ctx, self.kernel, args, len(args), row, flag)
        if self.lower_portable is not None:
            made = self.lower_portable(b, w, g, states, table, row, flag)
            if made is not NotImplemented:
                return made
        count = len(self.numbers)
        n = [_Symbol(b, _number(b, table, row, column)) for column in range(count)]
        symbols = [_Symbol(b, tensor) for tensor in (w, g, *states)]
        results = self.formula(symbols[0], symbols[1], symbols[2:], n, flag)
        return _overwrite(b, (w, *states), results)


def _overwrite(
    b: Lowering, targets: Sequence[GgmlTensor], results: Sequence[_Symbol]
) -> GgmlTensor:
    """Copy results to targets, all of them computed before the first copy; return the first."""
    for result in results:
        b.add(result.tensor)
    pairs = zip(targets, results, strict=True)
    return [b.add(lib.ggml_cpy(b.ctx, new.tensor, old)) for old, new in pairs][0]


# ---- SGD with momentum (Sutskever et al. 2013); flag: Nesterov's ---------------------------------


def _sgd(w: Any, g: Any, states: Sequence[Any], n: Sequence[Any], nesterov: bool) -> tuple:
    lr, decay, momentum = n
    g = g + decay * w
    if not states:
        return (w - lr * g,)
    velocity = momentum * states[0] + g
    return w - lr * (g + momentum * velocity if nesterov else velocity), velocity


def _lower_sgd(
    b: Lowering, w: GgmlTensor, g: GgmlTensor, states: Any, table: Any, row: int, flag: bool
) -> GgmlTensor:
    if states:
        return NotImplemented
    lib.ggml_set_param(w)
    return lib.ggml_opt_step_sgd(b.ctx, w, g, b.aligned_row(table, row, 2))


SGD = FusedUpdate(
    "sgd", ("lr", "weight_decay", "momentum"), _sgd, lib.PG_SGD, states=(0, 1), lower=_lower_sgd
)

# ---- AdamW (Loshchilov and Hutter 2019), and Adam (Kingma and Ba 2015) if "coupled" is not 0 -----
# The first seven numbers are those of ggml's op. scale1 is 1 / (1 - beta1^t), scale2 with beta2.


def _adamw(w: Any, g: Any, states: Sequence[Any], n: Sequence[Any], flag: bool) -> tuple:
    lr, beta1, beta2, eps, decay, scale1, scale2, coupled = n
    g = g + coupled * w
    m = beta1 * states[0] + (1 - beta1) * g
    v = beta2 * states[1] + (1 - beta2) * g * g
    return w * (1 - lr * decay) - lr * (m * scale1) / (np.sqrt(v * scale2) + eps), m, v


def _lower_adamw(
    b: Lowering, w: GgmlTensor, g: GgmlTensor, states: Any, table: Any, row: int, flag: bool
) -> GgmlTensor:
    if flag:
        decayed = lib.ggml_mul(b.ctx, w, _number(b, table, row, 7))
        g = lib.ggml_add(b.ctx, g, decayed)
    lib.ggml_set_param(w)
    return lib.ggml_opt_step_adamw(b.ctx, w, g, *states, b.aligned_row(table, row, 7))


ADAMW = FusedUpdate(
    "adamw",
    ("lr", "beta1", "beta2", "eps", "weight_decay", "scale1", "scale2", "coupled"),
    _adamw,
    lib.PG_ADAMW,
    states=(2,),
    lower=_lower_adamw,
)

# ---- Lion (Chen et al. 2023): share1 is 1 - beta1, share2 1 - beta2 ------------------------------


def _lion(w: Any, g: Any, states: Sequence[Any], n: Sequence[Any], flag: bool) -> tuple:
    lr, decay, share1, share2 = n
    (m,) = states
    apart = g - m
    return w - lr * (np.sign(m + share1 * apart) + decay * w), m + share2 * apart


LION = FusedUpdate("lion", ("lr", "weight_decay", "share1", "share2"), _lion, lib.PG_LION)

# ---- RMSprop (Tieleman and Hinton 2012): share is 1 - alpha; flag: centered (Graves 2013) --------


def _rmsprop(w: Any, g: Any, states: Sequence[Any], n: Sequence[Any], centered: bool) -> tuple:
    lr, decay, share, eps, momentum = n
    g = g + decay * w
    v = states[0] + share * (g * g - states[0])
    new, spread = [v], v
    if centered:
        mean = states[1] + share * (g - states[1])
        spread = np.maximum(v - mean * mean, 0.0)  # rounding may take it below
        new.append(mean)
    step = g / (np.sqrt(spread) + eps)
    if len(states) > len(new):
        step = momentum * states[-1] + step
        new.append(step)
    return w - lr * step, *new


RMSPROP = FusedUpdate(
    "rmsprop",
    ("lr", "weight_decay", "share", "eps", "momentum"),
    _rmsprop,
    lib.PG_RMSPROP,
    states=(1, 2, 3),
)

# ---- Adagrad (Duchi et al. 2011) -----------------------------------------------------------------


def _adagrad(w: Any, g: Any, states: Sequence[Any], n: Sequence[Any], flag: bool) -> tuple:
    lr, decay, eps = n
    g = g + decay * w
    total = states[0] + g * g
    return w - lr * g / (np.sqrt(total) + eps), total


ADAGRAD = FusedUpdate("adagrad", ("lr", "weight_decay", "eps"), _adagrad, lib.PG_ADAGRAD)

# ---- a running average: w is the average, g the new value ----------------------------------------


def _average(w: Any, g: Any, states: Sequence[Any], n: Sequence[Any], flag: bool) -> tuple:
    return (w + n[0] * (g - w),)


AVERAGE = FusedUpdate("average", ("share",), _average, lib.PG_AVERAGE, states=(0,))

# ---- Adafactor's step (Shazeer and Stern 2018): the square of an element is about row * column ---


def _factored_shape(w: Spec, g: Spec, row: Spec, column: Spec, *numbers: Spec) -> Spec:
    need_floats("factored_step", w, g, row, column, *numbers)
    for number in numbers:
        if any(size != 1 for size in number.shape):
            raise ShapeError(f"factored_step: needs numbers of one element; got {number.shape}")
    if w.shape != g.shape or broadcast_shapes("factored_step", row.shape, column.shape) != w.shape:
        raise ShapeError(
            f"factored_step: gradient, and row times column, must have the parameter's shape "
            f"{w.shape}; got {g.shape}, {row.shape}, {column.shape}"
        )
    return Spec(w.shape, w.dtype)


def _factored(w: Any, g: Any, row: Any, column: Any, size: Any, keep: Any, least: Any) -> tuple:
    square = np.maximum(row * column - least, 0.0) + least
    return (keep * w - size * g / np.sqrt(square),)


def _lower_factored(b: Lowering, w: GgmlTensor, *others: GgmlTensor) -> GgmlTensor:
    tensors = [w, *(b.contiguous(tensor) for tensor in others)]
    if b.own_kernels:
        return lib.pg_factored_step(b.ctx, ffi.new("struct ggml_tensor *[]", tensors))
    return _overwrite(b, [w], _factored(*(_Symbol(b, tensor) for tensor in tensors)))


FACTORED_STEP = Op(
    "factored_step",
    shape=_factored_shape,
    lower=_lower_factored,
    reference=_factored,
    differentiable=False,
    mutates=(0,),
)


def factored_step(
    parameter: Tensor, gradient: Tensor, row: Tensor, column: Tensor, *, size: Tensor,
    keep: Tensor, least: Tensor
) -> Effect:  # fmt: skip
    """Return the effect of keep * parameter - size * gradient / sqrt(max(row * column, least))."""
    return Effect(FACTORED_STEP, (parameter, gradient, row, column, size, keep, least))
