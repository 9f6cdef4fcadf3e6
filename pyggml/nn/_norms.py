"""Layers that normalise: over the batch, over features, over groups of channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..checks import fraction, number_in, positive_integer
from ..errors import SettingError
from ..graph import state
from ..ops import (
    add,
    affine,
    batch_norm,
    batch_statistics,
    group_norm,
    layer_norm,
    mul,
    reshape,
    rms_norm,
    sub,
)
from ..tensor import Parameter, Tensor, TensorLike, make_tensor
from . import init
from ._module import Buffer, Module, buffer
from ._support import input_of, misfit, parameter, sizes

FLOAT32_EPS = float(np.finfo(np.float32).eps)


class _BatchNorm(Module):
    """What BatchNorm1d and BatchNorm2d share; a subclass says which shapes it takes."""

    ndims: tuple[int, ...] = ()
    expected = ""

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        name = type(self).__name__
        self.num_features = positive_integer(name, "num_features", num_features)
        self.eps = number_in(name, "eps", eps, 0.0)
        self.momentum = momentum
        if momentum is not None:
            self.momentum = fraction(name, "momentum", momentum)
        shape = (self.num_features,)
        self.weight = parameter(init.ones(shape)) if affine else None
        self.bias = parameter(init.zeros(shape)) if affine else None
        self.running_mean: Buffer | None = None
        self.running_var: Buffer | None = None
        self.num_batches_tracked: Buffer | None = None
        if track_running_stats:
            self.running_mean = buffer(init.zeros(shape))
            self.running_var = buffer(init.ones(shape))
            self.num_batches_tracked = buffer(0)

    def forward(self, x: TensorLike) -> Tensor:
        x = input_of(self, x, self.weight if self.weight is not None else self.running_mean)
        if x.ndim not in self.ndims or x.shape[1] != self.num_features:
            raise misfit(self, self.expected.format(self.num_features), x)
        mean, var = self.running_mean, self.running_var
        if mean is None or var is None:
            return batch_norm(x, self.weight, self.bias, training=True, eps=self.eps)
        if not self.training:
            return batch_norm(
                x, self.weight, self.bias, running_mean=mean.settled(), running_var=var.settled(),
                eps=self.eps,
            )  # fmt: skip
        out = batch_norm(x, self.weight, self.bias, training=True, eps=self.eps)
        self._track(x, mean.settled(), var.settled())
        return out

    def _track(self, x: Tensor, mean: Buffer, var: Buffer) -> None:
        """Record the new running statistics: they are computed in the run that the step makes."""
        for running, batch in zip((mean, var), batch_statistics(x), strict=True):
            if self.momentum is not None:
                kept = affine(running, scale=1.0 - self.momentum)
                running.assign(add(kept, affine(batch, scale=self.momentum)))
            else:  # the mean over all batches; the count is an input, so one plan serves all
                part = make_tensor(1.0 / (self._batches() + 1), device=x.device)
                running.assign(add(running, mul(sub(batch, running), part)))
        if state.trace is not None:
            state.trace.after_run(self._count)
        else:
            self._count()

    def _batches(self) -> int:
        assert self.num_batches_tracked is not None
        return int(self.num_batches_tracked.item())

    def _count(self) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.assign(self._batches() + 1)

    def extra_repr(self) -> str:
        said = f"num_features={self.num_features}, eps={self.eps}, momentum={self.momentum}"
        said += "" if self.weight is not None else ", affine=False"
        return said + ("" if self.running_mean is not None else ", track_running_stats=False")


class BatchNorm1d(_BatchNorm):
    """Normalise each of num_features channels of x (N, C) or (N, C, L) over the other axes.

    In training by mean and variance of the batch, which are added, with weight ``momentum``, to
    the running statistics; in evaluation by those (Ioffe and Szegedy 2015). The running variance
    is the unbiased one. With momentum=None the running statistics are the mean over all batches.
    Parameters are weight and bias; buffers are running_mean, running_var and num_batches_tracked.
    Raises ShapeError in training for a batch with one value per channel, and leaves the
    statistics as they are.

    >>> layer = nn.BatchNorm1d(2)
    >>> layer([[1.0, 5.0], [3.0, 9.0]]).numpy().round(2)
    array([[-1., -1.],
           [ 1.,  1.]], dtype=float32)
    >>> layer.running_mean.numpy()
    array([0.2, 0.7], dtype=float32)
    """

    ndims = (2, 3)
    expected = "(batch, {0}) or (batch, {0}, length)"


class BatchNorm2d(_BatchNorm):
    """Normalise each of num_features channels of x (N, C, H, W) over the other axes.

    See BatchNorm1d.

    >>> nn.BatchNorm2d(3)(np.ones((2, 3, 4, 4))).shape
    (2, 3, 4, 4)
    """

    ndims = (4,)
    expected = "(batch, {0}, height, width)"


class _NormOverLast(Module):
    """What LayerNorm and RMSNorm share: the axes that they normalise over."""

    normalized_shape: tuple[int, ...]

    def _set_shape(self, value: int | Sequence[int]) -> None:
        name = type(self).__name__
        listed: Any = tuple(value) if isinstance(value, Sequence) else (value,)
        if not listed:
            raise SettingError(f"{name}: normalized_shape must name at least one axis; got ()")
        self.normalized_shape = sizes(name, "normalized_shape", listed, len(listed))

    def _checked(self, x: TensorLike, weight: Parameter | None) -> Tensor:
        x = input_of(self, x, weight)
        shape = self.normalized_shape
        if x.shape[-len(shape) :] != shape:
            raise misfit(self, f"(..., {', '.join(map(str, shape))})", x)
        return x

    def _plain(self, x: Tensor, function: Callable[..., Tensor], eps: float) -> Tensor:
        """Normalise without parameters: the functions then take one axis only."""
        lead = x.shape[: -len(self.normalized_shape)]
        return reshape(function(reshape(x, (*lead, -1)), eps=eps), x.shape)


class LayerNorm(_NormOverLast):
    """Normalise x over its last axes, whose sizes are normalized_shape, an int or a tuple.

    (x - mean) / sqrt(variance + eps) * weight + bias (Ba, Kiros and Hinton 2016).

    >>> nn.LayerNorm(2)([[1.0, 3.0]]).numpy().round(3)
    array([[-1.,  1.]], dtype=float32)
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
    ) -> None:
        self._set_shape(normalized_shape)
        self.eps = number_in("LayerNorm", "eps", eps, 0.0)
        self.elementwise_affine = bool(elementwise_affine)
        shape = self.normalized_shape
        self.weight = parameter(init.ones(shape)) if elementwise_affine else None
        self.bias = parameter(init.zeros(shape)) if elementwise_affine and bias else None

    def forward(self, x: TensorLike) -> Tensor:
        x = self._checked(x, self.weight)
        if self.weight is None:
            return self._plain(x, layer_norm, self.eps)
        return layer_norm(x, self.weight, self.bias, eps=self.eps)


class RMSNorm(_NormOverLast):
    """Divide x by its root mean square over its last axes, whose sizes are normalized_shape.

    x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019). eps is by default the distance
    of 1 to the next float32, 1.2e-7.

    >>> nn.RMSNorm(2)([[3.0, -3.0]]).numpy().round(3)
    array([[ 1., -1.]], dtype=float32)
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *,
        eps: float | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        self._set_shape(normalized_shape)
        self.eps = FLOAT32_EPS if eps is None else number_in("RMSNorm", "eps", eps, 0.0)
        self.elementwise_affine = bool(elementwise_affine)
        self.weight = parameter(init.ones(self.normalized_shape)) if elementwise_affine else None

    def forward(self, x: TensorLike) -> Tensor:
        x = self._checked(x, self.weight)
        if self.weight is None:
            return self._plain(x, rms_norm, self.eps)
        return rms_norm(x, self.weight, eps=self.eps)


class GroupNorm(Module):
    """Normalise x (N, num_channels, ...) over each of num_groups groups of channels.

    Raises SettingError if num_groups does not divide num_channels (Wu and He 2018).

    >>> nn.GroupNorm(2, 4)(np.ones((3, 4, 5))).shape
    (3, 4, 5)
    """

    def __init__(
        self, num_groups: int, num_channels: int, *, eps: float = 1e-5, affine: bool = True
    ) -> None:
        self.num_groups = positive_integer("GroupNorm", "num_groups", num_groups)
        self.num_channels = positive_integer("GroupNorm", "num_channels", num_channels)
        if self.num_channels % self.num_groups:
            raise SettingError(
                f"GroupNorm: num_groups must divide num_channels; got {num_groups}, {num_channels}"
            )
        self.eps = number_in("GroupNorm", "eps", eps, 0.0)
        self.weight = parameter(init.ones((self.num_channels,))) if affine else None
        self.bias = parameter(init.zeros((self.num_channels,))) if affine else None

    def forward(self, x: TensorLike) -> Tensor:
        x = input_of(self, x, self.weight)
        if x.ndim < 2 or x.shape[1] != self.num_channels:
            raise misfit(self, f"(batch, {self.num_channels}, ...)", x)
        return group_norm(x, self.weight, self.bias, groups=self.num_groups, eps=self.eps)
