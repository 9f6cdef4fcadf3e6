"""Train neural networks on ggml: on the CPU, and on any Vulkan GPU.

>>> from pyggml import ag, nn, optim
"""

from . import _ffi as _ffi  # first: it says where pyggml cannot run
from . import ag, data, io, nn, optim, train
from ._version import __version__
from .deadline import deadline
from .device import Device, device, devices, get_num_threads, set_device, set_num_threads
from .errors import (
    AnomalyError,
    DeadlineError,
    DeviceError,
    DeviceMemoryError,
    DTypeError,
    FileFormatError,
    GradCheckError,
    GradError,
    IndexRangeError,
    MemoryBudgetError,
    NonFiniteLossError,
    PyggmlError,
    SettingError,
    ShapeError,
    StaleError,
)
from .random import Generator, manual_seed

__all__ = [
    "AnomalyError",
    "DTypeError",
    "DeadlineError",
    "Device",
    "DeviceError",
    "DeviceMemoryError",
    "FileFormatError",
    "Generator",
    "GradCheckError",
    "GradError",
    "IndexRangeError",
    "MemoryBudgetError",
    "NonFiniteLossError",
    "PyggmlError",
    "SettingError",
    "ShapeError",
    "StaleError",
    "__version__",
    "ag",
    "data",
    "deadline",
    "device",
    "devices",
    "get_num_threads",
    "io",
    "manual_seed",
    "nn",
    "optim",
    "set_device",
    "set_num_threads",
    "train",
]
