"""Linear maps, and layers without parameters."""

from __future__ import annotations

from math import prod

import numpy as np

from ..checks import as_index, fraction, positive_integer, shown
from ..errors import SettingError
from ..ops import (
    detach,
    dropout,
    embedding,
    linear,
    reshape,
    take,
    unsqueeze,
    where,
)
from ..tensor import Tensor, TensorLike, make_tensor
from . import init
from ._module import Module
from ._support import fan_in_uniform, input_of, misfit, parameter


class Linear(Module):
    """x @ weight.T + bias, for x of shape (..., in_features): (..., out_features).

    Weight, (out_features, in_features), and bias start uniform in +-1 / sqrt(in_features).

    >>> nn.Linear(3, 2)(ag.tensor(np.ones((5, 3)))).shape
    (5, 2)
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        self.in_features = positive_integer("Linear", "in_features", in_features)
        self.out_features = positive_integer("Linear", "out_features", out_features)
        self.weight = fan_in_uniform((self.out_features, self.in_features), self.in_features)
        self.bias = fan_in_uniform((self.out_features,), self.in_features) if bias else None

    def forward(self, x: TensorLike) -> Tensor:
        x = input_of(self, x, self.weight)
        if x.shape[-1:] != (self.in_features,):
            raise misfit(self, f"(..., {self.in_features})", x)
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.bias is not None else ", bias=False")


class Embedding(Module):
    """Rows of a learned table that integers name: (...) -> (..., embedding_dim).

    The weight, (num_embeddings, embedding_dim), starts as standard normal numbers. The row
    ``padding_idx`` starts as zeros and gets no gradient. Raises IndexRangeError for an integer
    outside [0, num_embeddings).

    >>> nn.Embedding(10, 4)([[1, 2, 2]]).shape
    (1, 3, 4)
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, padding_idx: int | None = None
    ) -> None:
        self.num_embeddings = positive_integer("Embedding", "num_embeddings", num_embeddings)
        self.embedding_dim = positive_integer("Embedding", "embedding_dim", embedding_dim)
        rows = init.normal((self.num_embeddings, self.embedding_dim))
        if padding_idx is not None:
            row = as_index(padding_idx)
            if row is None or not 0 <= row < self.num_embeddings:
                raise SettingError(
                    f"Embedding: padding_idx must be in [0, {num_embeddings}); got "
                    f"{shown(padding_idx)}"
                )
            rows[row] = 0.0
        self.padding_idx = padding_idx
        self.weight = parameter(rows)
        self._is_trained = None  # by row: 0 for the padding, 1 for the others
        if padding_idx is not None:
            self._is_trained = make_tensor(np.arange(self.num_embeddings) != padding_idx)

    def forward(self, indices: TensorLike) -> Tensor:
        if not isinstance(indices, Tensor):
            indices = make_tensor(indices, device=self.weight.device, op="Embedding")
        rows = embedding(self.weight, indices)
        if self._is_trained is None:
            return rows
        is_trained = unsqueeze(take(self._is_trained, indices), axis=-1)
        return where(is_trained, rows, detach(rows))


class Dropout(Module):
    """In training, set each element to 0 with probability p, and divide the others by 1 - p.

    Raises SettingError for a p outside [0, 1] (Srivastava et al. 2014).

    >>> layer = nn.Dropout(0.5).eval()
    >>> layer(ag.tensor([1.0, 2.0])).numpy()
    array([1., 2.], dtype=float32)
    """

    def __init__(self, p: float = 0.5) -> None:
        self.p = fraction("Dropout", "p", p)

    def forward(self, x: TensorLike) -> Tensor:
        return dropout(input_of(self, x), p=self.p, training=self.training)


class Flatten(Module):
    """Make one axis of the axes from start_axis to end_axis: (N, C, H, W) becomes (N, C * H * W).

    >>> nn.Flatten()(ag.tensor(np.ones((2, 3, 4)))).shape
    (2, 12)
    """

    def __init__(self, start_axis: int = 1, end_axis: int = -1) -> None:
        for name, value in (("start_axis", start_axis), ("end_axis", end_axis)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise SettingError(f"Flatten: {name} must be an integer; got {value!r}")
        self.start_axis = start_axis
        self.end_axis = end_axis

    def forward(self, x: TensorLike) -> Tensor:
        x = input_of(self, x)
        start = self.start_axis + x.ndim if self.start_axis < 0 else self.start_axis
        end = self.end_axis + x.ndim if self.end_axis < 0 else self.end_axis
        if not 0 <= start <= end < x.ndim:
            raise misfit(self, "at least these axes", x)
        return reshape(x, (*x.shape[:start], prod(x.shape[start : end + 1]), *x.shape[end + 1 :]))
