"""The layers that an MLP needs."""

from __future__ import annotations

import numpy as np

from ..checks import positive_integer
from ..ops import add, matmul, relu, transpose
from ..tensor import Parameter, Tensor, make_tensor
from ._module import Module


class Linear(Module):
    """x @ weight.T + bias, for x of shape (..., in_features).

    Weight and bias start uniform in +-1/sqrt(in_features), as in PyTorch; ``seed`` makes them
    repeatable.

    >>> nn.Linear(3, 2)(ag.tensor(np.ones((5, 3)))).shape
    (5, 2)
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, seed: int | None = None
    ) -> None:
        in_features = positive_integer("Linear", "in_features", in_features)
        out_features = positive_integer("Linear", "out_features", out_features)
        generator = np.random.default_rng(seed)
        bound = 1.0 / np.sqrt(in_features)
        self.weight = _parameter(generator.uniform(-bound, bound, (out_features, in_features)))
        self.bias = _parameter(generator.uniform(-bound, bound, out_features)) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        product = matmul(x, transpose(self.weight))
        return product if self.bias is None else add(product, self.bias)


def _parameter(value: np.ndarray) -> Parameter:
    made = make_tensor(value, dtype="float32", requires_grad=True, cls=Parameter)
    assert isinstance(made, Parameter)
    return made


class ReLU(Module):
    """max(x, 0), elementwise."""

    def __call__(self, x: Tensor) -> Tensor:
        return relu(x)
