"""First weights: arrays of random numbers whose spread depends on the layer's size.

Each function takes the shape of a weight, outputs first as in Linear and the convolutions, and
returns a new float32 array; ``ag.param(nn.init.orthogonal((8, 8)))`` makes a parameter of it, and
``layer.weight.assign(nn.init.orthogonal(layer.weight.shape))`` overwrites one. Numbers come from
the default generator, so pg.manual_seed makes a model repeatable, or from another, given as
``generator``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import erf, prod, sqrt

import numpy as np

from ..checks import number_in, one_of, plain_number, shown
from ..dtypes import float32
from ..errors import SettingError, ShapeError
from ..graph import check_size
from ..memory import asking_for_memory
from ..ops.dropout import draw
from ..ops.rules import as_shape
from ..random import Generator

Shape = Sequence[int]
LARGEST = float(np.finfo(np.float32).max)

__all__ = [
    "calculate_gain",
    "kaiming_normal",
    "kaiming_uniform",
    "normal",
    "ones",
    "orthogonal",
    "trunc_normal",
    "uniform",
    "xavier_normal",
    "xavier_uniform",
    "zeros",
]


def zeros(shape: Shape) -> np.ndarray:
    """Return zeros.

    >>> nn.init.zeros((2,))
    array([0., 0.], dtype=float32)
    """
    return _filled("zeros", shape, 0.0)


def ones(shape: Shape) -> np.ndarray:
    """Return ones.

    >>> nn.init.ones((2,))
    array([1., 1.], dtype=float32)
    """
    return _filled("ones", shape, 1.0)


def _filled(op: str, shape: Shape, value: float) -> np.ndarray:
    sizes = as_shape(op, shape)
    check_size(op, sizes, float32)
    with asking_for_memory(op, sizes):
        return np.full(sizes, value, np.float32)


def uniform(
    shape: Shape, *, low: float = 0.0, high: float = 1.0, generator: Generator | None = None
) -> np.ndarray:
    """Return numbers uniform in [low, high). Raises SettingError unless low <= high.

    >>> nn.init.uniform((2, 3), low=-1.0).shape
    (2, 3)
    """
    low, high = plain_number("uniform", "low", low), plain_number("uniform", "high", high)
    if not -LARGEST <= low <= high <= LARGEST:
        raise SettingError(
            f"uniform: low must not be above high, and both in float32; got {low} and {high}"
        )
    return draw(
        "uniform", shape, generator, lambda numpy, size: _float32(numpy.uniform(low, high, size))
    )


def _float32(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # the largest of normal numbers may become infinite
        return values.astype(np.float32)


def normal(
    shape: Shape, *, mean: float = 0.0, std: float = 1.0, generator: Generator | None = None
) -> np.ndarray:
    """Return normal numbers of a mean and a standard deviation. Raises SettingError for std < 0.

    >>> nn.init.normal((2, 3), std=0.02).shape
    (2, 3)
    """
    std = number_in("normal", "std", std, 0.0)
    mean = plain_number("normal", "mean", mean)
    return draw(
        "normal", shape, generator, lambda numpy, size: _float32(numpy.normal(mean, std, size))
    )


def trunc_normal(
    shape: Shape,
    *,
    mean: float = 0.0,
    std: float = 1.0,
    low: float = -2.0,
    high: float = 2.0,
    generator: Generator | None = None,
) -> np.ndarray:
    """Return normal numbers, drawn again until they lie in [low, high].

    The bounds are values, not multiples of std. Raises SettingError for std < 0, and for bounds
    that leave less than a thousandth of the distribution.

    >>> bool(np.abs(nn.init.trunc_normal((100,))).max() <= 2)
    True
    """
    std = number_in("trunc_normal", "std", std, np.finfo(np.float32).tiny)
    mean = plain_number("trunc_normal", "mean", mean)
    low = plain_number("trunc_normal", "low", low)
    high = plain_number("trunc_normal", "high", high)
    inside = (erf((high - mean) / (std * sqrt(2))) - erf((low - mean) / (std * sqrt(2)))) / 2
    if not inside >= 1e-3:
        raise SettingError(
            f"trunc_normal: [low, high] must hold some of the distribution; got [{low}, {high}] "
            f"with mean {mean} and std {std}"
        )

    def drawn(numpy: np.random.Generator, sizes: Sequence[int]) -> np.ndarray:
        values = numpy.normal(mean, std, prod(sizes))
        while True:
            outside = np.flatnonzero((values < low) | (values > high))
            if not outside.size:
                return _float32(values).reshape(sizes)
            values[outside] = numpy.normal(mean, std, outside.size)

    return draw("trunc_normal", shape, generator, drawn)


def calculate_gain(nonlinearity: str, negative_slope: float = 0.01) -> float:
    """Return the factor by which a nonlinearity shrinks the spread of what goes through it.

    1 for "linear", "conv1d", "conv2d" and "sigmoid", 5/3 for "tanh", sqrt(2) for "relu",
    sqrt(2 / (1 + negative_slope^2)) for "leaky_relu", 3/4 for "selu". Raises SettingError for
    another name.

    >>> nn.init.calculate_gain("relu") ** 2
    2.0000000000000004
    """
    slope = plain_number("calculate_gain", "negative_slope", negative_slope)
    gains = {
        "linear": 1.0,
        "conv1d": 1.0,
        "conv2d": 1.0,
        "sigmoid": 1.0,
        "tanh": 5.0 / 3.0,
        "relu": sqrt(2.0),
        "leaky_relu": sqrt(2.0 / (1.0 + slope * slope)),
        "selu": 0.75,
    }
    if not isinstance(nonlinearity, str) or nonlinearity not in gains:
        raise SettingError(
            f"calculate_gain: nonlinearity must be one of {', '.join(gains)}; got "
            f"{shown(nonlinearity)}"
        )
    return gains[nonlinearity]


def _fans(op: str, shape: Shape) -> tuple[int, int]:
    """Return how many inputs each output of a weight sees, and how many outputs each input."""
    sizes = as_shape(op, shape)
    if len(sizes) < 2:
        raise ShapeError(
            f"{op}: needs a weight of at least two axes, (outputs, inputs, ...); got "
            f"{sizes}; use uniform or normal"
        )
    window = prod(sizes[2:])
    return sizes[1] * window, sizes[0] * window


def _kaiming_std(op: str, shape: Shape, a: float, mode: str, nonlinearity: str) -> float:
    one_of(op, "mode", mode, ("fan_in", "fan_out"))
    fan = _fans(op, shape)[mode == "fan_out"]
    return calculate_gain(nonlinearity, a) / sqrt(fan)


def kaiming_uniform(
    shape: Shape,
    *,
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> np.ndarray:
    """Return numbers uniform in +-gain * sqrt(3 / fan) (He et al. 2015).

    Layers with ReLU then keep the spread of their inputs, or with mode="fan_out" of the gradients.
    ``a`` is the slope of leaky_relu for negative numbers. Raises ShapeError for fewer than two
    axes, SettingError for another mode or nonlinearity.

    >>> bool(np.abs(nn.init.kaiming_uniform((4, 6))).max() <= 1)
    True
    """
    bound = sqrt(3.0) * _kaiming_std("kaiming_uniform", shape, a, mode, nonlinearity)
    return uniform(shape, low=-bound, high=bound, generator=generator)


def kaiming_normal(
    shape: Shape,
    *,
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> np.ndarray:
    """Return normal numbers of deviation gain / sqrt(fan): see kaiming_uniform (He et al. 2015).

    >>> nn.init.kaiming_normal((4, 6), nonlinearity="relu").shape
    (4, 6)
    """
    std = _kaiming_std("kaiming_normal", shape, a, mode, nonlinearity)
    return normal(shape, std=std, generator=generator)


def xavier_uniform(
    shape: Shape, *, gain: float = 1.0, generator: Generator | None = None
) -> np.ndarray:
    """Return numbers uniform in +-gain * sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio 2010).

    Linear layers then keep the spread of inputs and of gradients about the same. Raises ShapeError
    for fewer than two axes.

    >>> bool(np.abs(nn.init.xavier_uniform((2, 4))).max() <= 1)
    True
    """
    bound = plain_number("xavier_uniform", "gain", gain) * sqrt(
        6.0 / sum(_fans("xavier_uniform", shape))
    )
    return uniform(shape, low=-bound, high=bound, generator=generator)


def xavier_normal(
    shape: Shape, *, gain: float = 1.0, generator: Generator | None = None
) -> np.ndarray:
    """Return normal numbers of deviation gain * sqrt(2 / (fan_in + fan_out)): see xavier_uniform.

    >>> nn.init.xavier_normal((2, 4)).shape
    (2, 4)
    """
    std = plain_number("xavier_normal", "gain", gain) * sqrt(
        2.0 / sum(_fans("xavier_normal", shape))
    )
    return normal(shape, std=std, generator=generator)


def orthogonal(
    shape: Shape, *, gain: float = 1.0, generator: Generator | None = None
) -> np.ndarray:
    """Return gain times a matrix with orthonormal rows, or columns where it is higher than wide.

    Axes after the first count as one (Saxe et al. 2013). Raises ShapeError for fewer than two axes.

    >>> matrix = nn.init.orthogonal((2, 3))
    >>> np.allclose(matrix @ matrix.T, np.eye(2), atol=1e-6)
    True
    """
    factor = plain_number("orthogonal", "gain", gain)
    _fans("orthogonal", shape)

    def drawn(numpy: np.random.Generator, sizes: Sequence[int]) -> np.ndarray:
        rows, columns = sizes[0], prod(sizes[1:])
        high, wide = max(rows, columns), min(rows, columns)
        basis, triangle = np.linalg.qr(numpy.standard_normal((high, wide)))
        basis *= np.where(np.diag(triangle) < 0, -1.0, 1.0)  # makes all such equally likely
        matrix = basis if rows >= columns else basis.T
        return _float32(factor * matrix).reshape(sizes)

    return draw("orthogonal", shape, generator, drawn)
