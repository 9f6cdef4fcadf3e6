"""Taking values from one device to another, through the CPU."""

from __future__ import annotations

from weakref import ref

from .device import Device, resolve_device
from .dtypes import DType
from .errors import GradError
from .graph import Source
from .tensor import Tensor, make_tensor


def copy_to(tensor: Tensor, device: Device | str) -> Tensor:
    """Return the tensor itself if it lives on the device, else a new leaf of its kind there.

    Raises GradError for a value with a gradient behind it, and DeviceError for an unknown device.
    """
    where = resolve_device(device)
    if tensor.device is where:
        return tensor
    if tensor.requires_grad and not tensor.is_leaf:
        raise GradError(
            "to: no gradient flows from one device to another; use .detach().to(...), or move the "
            "parameters and inputs before recording"
        )
    kind = tensor._at[1].dtype
    copy = make_tensor(
        tensor.numpy(), dtype=kind, device=where, requires_grad=tensor.requires_grad,
        cls=type(tensor), op="to"
    )  # fmt: skip
    copy.name = tensor.name
    return copy


def move_to(tensor: Tensor, device: Device | str, dtype: DType | None = None) -> None:
    """Let a parameter or buffer, and its gradient, live on a device from now on.

    It gets the type, if one is given. What is pending on the old value can no longer be computed,
    as after an update.
    """
    where = resolve_device(device)
    kind = dtype or tensor._at[1].dtype
    if tensor.device is not where or tensor._at[1].dtype is not kind:
        old = tensor._materialized()
        storage = where.upload(old.device.download(old), kind)
        new = Source(old.shape, kind, where, storage, old.requires_grad)
        if old.owner is not None:
            new.owner = ref(tensor)
        old.version += 1
        tensor._take_place(new)
    if tensor.grad is not None:
        tensor.grad = copy_to(tensor.grad, where)


def source_on(source: Source, device: Device) -> Source:
    """Return a copy of a source's value on a device; the source itself if it is there."""
    if source.device is device:
        return source
    storage = device.upload(source.device.download(source), source.dtype)
    return Source(source.shape, source.dtype, device, storage, source.requires_grad)
