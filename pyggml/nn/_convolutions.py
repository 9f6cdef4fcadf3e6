"""Convolutions and pooling, over sequences (N, C, L) and images (N, C, H, W)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from ..checks import positive_integer
from ..errors import SettingError
from ..ops import avg_pool2d, conv1d, conv2d, conv_transpose2d, max_pool2d, mean, reshape
from ..tensor import Parameter, Tensor, TensorLike
from ._module import Module
from ._support import fan_in_uniform, input_of, misfit, sizes

Size = int | Sequence[int]


class _Convolution(Module):
    """What convolutions share: settings, and first weights uniform in +-1 / sqrt(fan in)."""

    ndim = 2
    weight: Parameter
    bias: Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        *,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        name = type(self).__name__
        self.in_channels = positive_integer(name, "in_channels", in_channels)
        self.out_channels = positive_integer(name, "out_channels", out_channels)
        self.kernel_size = sizes(name, "kernel_size", kernel_size, self.ndim)
        self.stride = sizes(name, "stride", stride, self.ndim)
        self.padding = sizes(name, "padding", padding, self.ndim, lowest=0)
        self.dilation = sizes(name, "dilation", dilation, self.ndim)
        self.groups = positive_integer(name, "groups", groups)
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise SettingError(
                f"{name}: groups must divide in_channels and out_channels; got {groups}, "
                f"{in_channels} and {out_channels}"
            )
        shape = self._weight_shape()
        fan_in = prod(shape[1:])
        self.weight = fan_in_uniform(shape, fan_in)
        self.bias = fan_in_uniform((self.out_channels,), fan_in) if bias else None

    def _weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels // self.groups, *self.kernel_size)

    def _checked(self, x: TensorLike) -> Tensor:
        x = input_of(self, x, self.weight)
        if x.ndim != self.ndim + 2 or x.shape[1] != self.in_channels:
            axes = ("length",) if self.ndim == 1 else ("height", "width")
            raise misfit(self, f"(batch, {', '.join((str(self.in_channels), *axes))})", x)
        return x

    def extra_repr(self) -> str:
        said = f"{self.in_channels}, {self.out_channels}, kernel_size={_short(self.kernel_size)}"
        for name, default in (("stride", 1), ("padding", 0), ("output_padding", 0),
                              ("dilation", 1), ("groups", 1)):  # fmt: skip
            value = _short(getattr(self, name, default))
            said += "" if value == default else f", {name}={value}"
        return said + ("" if self.bias is not None else ", bias=False")


def _short(value: int | tuple[int, ...]) -> int | tuple[int, ...]:
    """Return equal sizes as one number."""
    return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value


class Conv1d(_Convolution):
    """Cross-correlate sequences (N, in_channels, L) with learned kernels: (N, out_channels, L').

    See ag.conv1d for L' and the settings. Weight, (out_channels, in_channels / groups,
    kernel_size), and bias start uniform in +-1 / sqrt(in_channels / groups * kernel_size). Raises
    SettingError for settings out of range, ShapeError for an input that does not fit.

    >>> nn.Conv1d(3, 8, 5, padding=2)(np.ones((2, 3, 10))).shape
    (2, 8, 10)
    """

    ndim = 1

    def forward(self, x: TensorLike) -> Tensor:
        return conv1d(
            self._checked(x), self.weight, self.bias, stride=self.stride[0],
            padding=self.padding[0], dilation=self.dilation[0], groups=self.groups,
        )  # fmt: skip


class Conv2d(_Convolution):
    """Cross-correlate images (N, in_channels, H, W) with learned kernels.

    The result is (N, out_channels, H', W'). See ag.conv2d for H' and W'. Sizes are one number for
    both axes or a pair. Weight, (out_channels, in_channels / groups, KH, KW), and bias start
    uniform in +-1 / sqrt(in_channels / groups * KH * KW). Raises SettingError for settings out of
    range, ShapeError for an input that does not fit.

    >>> nn.Conv2d(3, 8, 3, stride=2, padding=1)(np.ones((2, 3, 10, 12))).shape
    (2, 8, 5, 6)
    """

    def forward(self, x: TensorLike) -> Tensor:
        return conv2d(
            self._checked(x), self.weight, self.bias, stride=self.stride, padding=self.padding,
            dilation=self.dilation, groups=self.groups,
        )  # fmt: skip


class ConvTranspose2d(_Convolution):
    """The transpose of Conv2d, which makes images larger.

    (N, in_channels, H, W) -> (N, out_channels, H', W'), where H' = (H - 1) stride - 2 padding +
    dilation (KH - 1) + output_padding + 1. The weight is (in_channels, out_channels / groups, KH,
    KW). Raises SettingError unless output_padding is less than stride.

    >>> nn.ConvTranspose2d(8, 3, 2, stride=2)(np.ones((2, 8, 5, 6))).shape
    (2, 3, 10, 12)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        *,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding,
            dilation=dilation, groups=groups, bias=bias,
        )  # fmt: skip
        self.output_padding = sizes(
            "ConvTranspose2d", "output_padding", output_padding, self.ndim, lowest=0
        )
        if any(extra >= step for extra, step in zip(self.output_padding, self.stride, strict=True)):
            raise SettingError(
                f"ConvTranspose2d: output_padding must be less than stride; got {output_padding}, "
                f"{stride}"
            )

    def _weight_shape(self) -> tuple[int, ...]:
        return (self.in_channels, self.out_channels // self.groups, *self.kernel_size)

    def forward(self, x: TensorLike) -> Tensor:
        return conv_transpose2d(
            self._checked(x), self.weight, self.bias, stride=self.stride, padding=self.padding,
            output_padding=self.output_padding, dilation=self.dilation, groups=self.groups,
        )  # fmt: skip


class _Pool2d(Module):
    """What pooling layers share."""

    def __init__(self, kernel_size: Size, *, stride: Size | None = None, padding: Size = 0) -> None:
        name = type(self).__name__
        self.kernel_size = sizes(name, "kernel_size", kernel_size, 2)
        self.stride = self.kernel_size if stride is None else sizes(name, "stride", stride, 2)
        self.padding = sizes(name, "padding", padding, 2, lowest=0)
        if any(2 * p > k for p, k in zip(self.padding, self.kernel_size, strict=True)):
            raise SettingError(
                f"{name}: padding must be at most half of kernel_size; got {padding}, {kernel_size}"
            )

    def _pool(self, function: Callable[..., Tensor], x: TensorLike) -> Tensor:
        x = input_of(self, x)
        if x.ndim != 4:
            raise misfit(self, "(batch, channels, height, width)", x)
        return function(x, self.kernel_size, stride=self.stride, padding=self.padding)

    def extra_repr(self) -> str:
        said = f"{_short(self.kernel_size)}"
        said += "" if self.stride == self.kernel_size else f", stride={_short(self.stride)}"
        return said + ("" if not any(self.padding) else f", padding={_short(self.padding)}")


class MaxPool2d(_Pool2d):
    """The largest element of each window of images (N, C, H, W): see ag.max_pool2d.

    stride is by default the kernel's size.

    >>> nn.MaxPool2d(2)(np.ones((2, 3, 8, 6))).shape
    (2, 3, 4, 3)
    """

    def forward(self, x: TensorLike) -> Tensor:
        return self._pool(max_pool2d, x)


class AvgPool2d(_Pool2d):
    """The mean of each window of images (N, C, H, W), padding counted as zeros: see ag.avg_pool2d.

    stride is by default the kernel's size.

    >>> nn.AvgPool2d(2)(np.ones((2, 3, 8, 6))).shape
    (2, 3, 4, 3)
    """

    def forward(self, x: TensorLike) -> Tensor:
        return self._pool(avg_pool2d, x)


class AdaptiveAvgPool1d(Module):
    """The means of so many equal parts of sequences: (N, C, L) -> (N, C, output_size).

    AdaptiveAvgPool1d(1) is global pooling: the mean over all of L. Raises ShapeError unless
    output_size divides L.

    >>> nn.AdaptiveAvgPool1d(1)(np.ones((2, 3, 8))).shape
    (2, 3, 1)
    """

    def __init__(self, output_size: int) -> None:
        self.output_size = positive_integer("AdaptiveAvgPool1d", "output_size", output_size)

    def forward(self, x: TensorLike) -> Tensor:
        x = input_of(self, x)
        if x.ndim != 3 or x.shape[2] % self.output_size:
            raise misfit(self, f"(batch, channels, a multiple of {self.output_size})", x)
        parts = (*x.shape[:2], self.output_size, x.shape[2] // self.output_size)
        return mean(reshape(x, parts), axis=-1)


class AdaptiveAvgPool2d(Module):
    """The means of so many equal parts of images: (N, C, H, W) -> (N, C, *output_size).

    AdaptiveAvgPool2d(1) is global pooling: the mean over all of H and W. Raises ShapeError unless
    the output sizes divide H and W.

    >>> nn.AdaptiveAvgPool2d(1)(np.ones((2, 3, 8, 6))).shape
    (2, 3, 1, 1)
    """

    def __init__(self, output_size: Size) -> None:
        self.output_size = sizes("AdaptiveAvgPool2d", "output_size", output_size, 2)

    def forward(self, x: TensorLike) -> Tensor:
        x = input_of(self, x)
        height, width = self.output_size
        if x.ndim != 4 or x.shape[2] % height or x.shape[3] % width:
            multiples = f"a multiple of {height}, a multiple of {width}"
            raise misfit(self, f"(batch, channels, {multiples})", x)
        if self.output_size == (1, 1):
            return mean(x, axis=(2, 3), keepdims=True)
        return avg_pool2d(x, (x.shape[2] // height, x.shape[3] // width))
