"""Activation functions as layers, for nn.Sequential; each is the ag function of its name."""

from __future__ import annotations

from .. import ops
from ..checks import one_of, plain_number
from ..errors import SettingError
from ..tensor import Tensor, TensorLike
from ._module import Module


class ReLU(Module):
    """max(x, 0), elementwise.

    >>> nn.ReLU()([-1.0, 2.0]).numpy()
    array([0., 2.], dtype=float32)
    """

    def forward(self, x: TensorLike) -> Tensor:
        return ops.relu(x)


class LeakyReLU(Module):
    """x where it is positive, negative_slope * x elsewhere.

    >>> nn.LeakyReLU(0.5)([-1.0, 2.0]).numpy()
    array([-0.5,  2. ], dtype=float32)
    """

    def __init__(self, negative_slope: float = 0.01) -> None:
        self.negative_slope = plain_number("LeakyReLU", "negative_slope", negative_slope)

    def forward(self, x: TensorLike) -> Tensor:
        return ops.leaky_relu(x, negative_slope=self.negative_slope)


class ELU(Module):
    """x where it is positive, alpha * (exp(x) - 1) elsewhere.

    >>> nn.ELU()([-100.0, 2.0]).numpy()
    array([-1.,  2.], dtype=float32)
    """

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = plain_number("ELU", "alpha", alpha)

    def forward(self, x: TensorLike) -> Tensor:
        return ops.elu(x, alpha=self.alpha)


class GELU(Module):
    """x times the normal distribution function of x; approximate="tanh" for that formula.

    Raises SettingError for another approximation than "none" and "tanh".

    >>> nn.GELU()([-100.0, 0.0]).numpy()
    array([0., 0.], dtype=float32)
    """

    def __init__(self, *, approximate: str = "none") -> None:
        self.approximate = one_of("GELU", "approximate", approximate, ("none", "tanh"))

    def forward(self, x: TensorLike) -> Tensor:
        return ops.gelu(x, approximate=self.approximate)


class SiLU(Module):
    """x * sigmoid(x), also known as swish.

    >>> nn.SiLU()([0.0, 100.0]).numpy()
    array([  0., 100.], dtype=float32)
    """

    def forward(self, x: TensorLike) -> Tensor:
        return ops.silu(x)


class Sigmoid(Module):
    """1 / (1 + exp(-x)).

    >>> nn.Sigmoid()([0.0, 100.0]).numpy()
    array([0.5, 1. ], dtype=float32)
    """

    def forward(self, x: TensorLike) -> Tensor:
        return ops.sigmoid(x)


class Tanh(Module):
    """The hyperbolic tangent.

    >>> nn.Tanh()([0.0, 100.0]).numpy()
    array([0., 1.], dtype=float32)
    """

    def forward(self, x: TensorLike) -> Tensor:
        return ops.tanh(x)


class Softplus(Module):
    """log(1 + exp(x)), without overflow.

    >>> nn.Softplus()([0.0, 100.0]).numpy()
    array([  0.6931472, 100.       ], dtype=float32)
    """

    def forward(self, x: TensorLike) -> Tensor:
        return ops.softplus(x)


class Hardswish(Module):
    """x * hardsigmoid(x).

    >>> nn.Hardswish()([0.0, 6.0]).numpy()
    array([0., 6.], dtype=float32)
    """

    def forward(self, x: TensorLike) -> Tensor:
        return ops.hardswish(x)


class Hardsigmoid(Module):
    """x / 6 + 1/2 between -3 and 3, 0 below and 1 above.

    >>> nn.Hardsigmoid()([-3.0, 0.0, 1.5]).numpy()
    array([0.  , 0.5 , 0.75], dtype=float32)
    """

    def forward(self, x: TensorLike) -> Tensor:
        return ops.hardsigmoid(x)


class Softmax(Module):
    """exp(x) / sum(exp(x)) along an axis.

    A classifier's loss takes the numbers before it: see ag.cross_entropy.

    >>> nn.Softmax()([[0.0, 0.0]]).numpy()
    array([[0.5, 0.5]], dtype=float32)
    """

    def __init__(self, *, axis: int = -1) -> None:
        if not isinstance(axis, int) or isinstance(axis, bool):
            raise SettingError(f"Softmax: axis must be an integer; got {axis!r}")
        self.axis = axis

    def forward(self, x: TensorLike) -> Tensor:
        return ops.softmax(x, axis=self.axis)
