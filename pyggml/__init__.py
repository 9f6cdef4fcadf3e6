"""Train neural networks on ggml: on the CPU, and on any Vulkan GPU.

>>> from pyggml import ag, nn, optim
"""

from . import ag, nn, optim
from ._version import __version__
from .device import Device, device, devices, get_num_threads, set_device, set_num_threads
from .errors import (
    AnomalyError,
    DeviceError,
    DeviceMemoryError,
    DTypeError,
    GradCheckError,
    GradError,
    IndexRangeError,
    MemoryBudgetError,
    PyggmlError,
    SettingError,
    ShapeError,
    StaleError,
)
from .random import Generator, manual_seed

__all__ = [
    "AnomalyError",
    "DTypeError",
    "Device",
    "DeviceError",
    "DeviceMemoryError",
    "Generator",
    "GradCheckError",
    "GradError",
    "IndexRangeError",
    "MemoryBudgetError",
    "PyggmlError",
    "SettingError",
    "ShapeError",
    "StaleError",
    "__version__",
    "ag",
    "device",
    "devices",
    "get_num_threads",
    "manual_seed",
    "nn",
    "optim",
    "set_device",
    "set_num_threads",
]
