"""Mixed precision: float32 masters of parameters that are stored in half, and the loss's scale."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..checks import number_in, positive_integer
from ..dtypes import float32
from ..graph import Source
from ..tensor import Tensor
from ..transfer import source_on

SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), 2.0**127


class LossScale:
    """What the loss is multiplied by, so that small gradients are not lost in a half type.

    Micikevicius et al. 2018, section 3.2. The optimizer divides the gradients by it. Where a
    gradient is not finite the update is skipped, and the scale divided by ``factor``; after
    ``growth_interval`` updates without that it is multiplied by it. With None it never changes.

    >>> scale = optim.LossScale(1024.0, growth_interval=1)
    >>> scale.adapt(finite=False)
    >>> scale.value
    512.0
    >>> scale.adapt(finite=True)
    >>> scale.value
    1024.0
    """

    def __init__(
        self,
        value: float = 2.0**15,
        *,
        factor: float = 2.0,
        growth_interval: int | None = 2000,
    ) -> None:
        self.value = number_in("LossScale", "value", value, SMALLEST, LARGEST)
        self.factor = number_in("LossScale", "factor", factor, 1.0)
        self.growth_interval = growth_interval
        if growth_interval is not None:
            positive_integer("LossScale", "growth_interval", growth_interval)
        self.streak = 0
        """Updates since the scale changed."""

    def __repr__(self) -> str:
        return f"LossScale({self.value:g})"

    def adapt(self, finite: bool) -> None:
        """Learn whether the gradients of an update were finite."""
        if self.growth_interval is None:
            return
        self.streak = self.streak + 1 if finite else 0
        if not finite:
            self.value = max(self.value / self.factor, SMALLEST)
        elif self.streak >= self.growth_interval:  # a state may come from a longer interval
            self.value = min(self.value * self.factor, LARGEST / 2)
            self.streak = 0


def as_loss_scale(method: str, value: LossScale | float | None) -> LossScale | None:
    """Return the setting as a LossScale: a number is a scale that stays."""
    if value is None or isinstance(value, LossScale):
        return value
    number = number_in(method, "loss_scale", value, SMALLEST, LARGEST)
    return LossScale(number, growth_interval=None)


class Master(NamedTuple):
    """The float32 value behind a parameter of a half type."""

    value: Source
    rounded: Source  # the parameter's
    version: int  # of that, when it was the master rounded


def current_master(parameter: Tensor, known: Master | None) -> Master:
    """Return the master of a parameter: the known one, unless the parameter got another value."""
    source = parameter._source
    assert source is not None
    if known is not None and known.rounded is source and known.version == source.version:
        return known
    device = source.device
    value = device.download(source)
    if known is not None:  # moved, loaded, or assigned
        master = known.value.device.download(known.value)
        rounded = source.dtype.decode(source.dtype.encode(master))
        if np.array_equal(rounded, value, equal_nan=True):
            return Master(source_on(known.value, device), source, source.version)
    copy = Source(source.shape, float32, device, device.upload(value, float32))
    return Master(copy, source, source.version)
