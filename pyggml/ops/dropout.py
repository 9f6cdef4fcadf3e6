"""Random tensors, and dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .._ffi import lib
from ..checks import fraction
from ..device import Device
from ..dtypes import float32, int32
from ..graph import Op, Shape, Spec, check_size, state
from ..lowering import GgmlTensor, Lowering, shape_of
from ..memory import asking_for_memory
from ..random import KEY_WORDS, Generator, chosen_generator, random_words
from ..tensor import Tensor, TensorLike, as_tensor, make_tensor, record
from .rules import as_shape, need_floats, need_integers, need_shape

# ---- rand, randn ---------------------------------------------------------------------------------
# Made on the host: they are initial values and inputs, not parts of a step.


def draw(
    op: str,
    shape: int | Sequence[int],
    generator: Generator | None,
    make: Callable[[np.random.Generator, Shape], np.ndarray],
) -> np.ndarray:
    """Return an array of random numbers of a shape, which is checked before any is drawn."""
    sizes = as_shape(op, shape)
    check_size(op, sizes, float32)
    source = chosen_generator(op, generator)
    with asking_for_memory(op, sizes):
        return make(source.numpy(), sizes)


def rand(
    shape: int | Sequence[int],
    *,
    generator: Generator | None = None,
    device: Device | str | None = None,
) -> Tensor:
    """Return a tensor of numbers uniform in [0, 1), drawn from the default generator or another.

    >>> ag.rand((2, 3)).shape
    (2, 3)
    """
    values = draw("rand", shape, generator, lambda numpy, size: numpy.random(size, np.float32))
    return make_tensor(values, device=device, op="rand")


def randn(
    shape: int | Sequence[int],
    *,
    generator: Generator | None = None,
    device: Device | str | None = None,
) -> Tensor:
    """Return a tensor of normal numbers, mean 0 and deviation 1.

    They come from the default generator or another.

    >>> ag.randn((2, 3)).shape
    (2, 3)
    """
    values = draw(
        "randn", shape, generator, lambda numpy, size: numpy.standard_normal(size, np.float32)
    )
    return make_tensor(values, device=device, op="randn")


# ---- dropout -------------------------------------------------------------------------------------
# The mask is a function of the key, an input, and the place of the element: the gradient, and a
# replay, draw it again instead of keeping it.

RESOLUTION = 1 << 24  # steps of p: a word's upper 24 bits decide


def _dropout_shape(x: Spec, key: Spec, *, p: float) -> Spec:
    need_floats("dropout", x)
    need_integers("dropout", "the key", key)
    need_shape("dropout", "the key", key, KEY_WORDS)
    return Spec(x.shape, x.dtype)


def _threshold_and_scale(p: float) -> tuple[int, float]:
    return round(p * RESOLUTION), 1.0 / (1.0 - p) if p < 1.0 else 0.0


def _lower_dropout(b: Lowering, x: GgmlTensor, key: GgmlTensor, *, p: float) -> GgmlTensor:
    x = b.contiguous(x)
    if b.own_kernels:
        return lib.pg_dropout(b.ctx, key, x, *_threshold_and_scale(p))
    # ggml has no random numbers: this one node runs on the CPU, wherever its neighbours do. Of x it
    # needs the shape only, so x stays where it is.
    like = b.new(shape_of(x), float32)
    return lib.ggml_mul(b.ctx, x, lib.pg_dropout_mask(b.ctx, key, like, *_threshold_and_scale(p)))


def _reference_dropout(x: np.ndarray, key: np.ndarray, *, p: float) -> np.ndarray:
    threshold, scale = _threshold_and_scale(p)
    kept = random_words(key, x.size).reshape(x.shape) >> 8 >= threshold
    return np.where(kept, x * scale, 0.0)


DROPOUT: Op = Op(
    "dropout",
    shape=_dropout_shape,
    lower=_lower_dropout,
    grad=lambda g, out, x, key, p: (record(DROPOUT, g, key, p=p), None),
    reference=_reference_dropout,
)


def dropout(
    x: TensorLike, *, p: float = 0.5, training: bool = True, generator: Generator | None = None
) -> Tensor:
    """Return x with each element set to 0 with probability p, and the others divided by 1 - p.

    Every call draws anew from the default generator or another; outside of training x itself is
    returned. p is part of the recorded structure, in steps of 2^-24. Raises SettingError for a p
    outside [0, 1] (Srivastava et al. 2014).

    >>> ag.dropout([1.0, 2.0], p=1.0).numpy()
    array([0., 0.], dtype=float32)
    """
    x = as_tensor(x, op="dropout")
    p = fraction("dropout", "p", p)
    if not training or p == 0.0:
        return x
    chosen = chosen_generator("dropout", generator)
    if state.trace is not None:
        return record(DROPOUT, x, state.trace.key_of(chosen), p=p)
    return record(DROPOUT, x, make_tensor(chosen.key(), dtype=int32, device=x.device), p=p)
