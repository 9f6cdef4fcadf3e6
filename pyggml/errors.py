"""One exception tree: each error is also the built-in error a caller would expect.

Messages follow one form: the op, the rule, what came, and what to try.
"""

from __future__ import annotations


class PyggmlError(Exception):
    """Base of every error that pyggml raises on purpose."""


class ShapeError(PyggmlError, ValueError):
    """Shapes or axes that an operation cannot take."""


class DTypeError(PyggmlError, TypeError):
    """A value of the wrong kind or element type."""


class SettingError(PyggmlError, ValueError):
    """A keyword setting outside its range."""


class IndexRangeError(PyggmlError, IndexError):
    """A label or index that points outside the axis it indexes."""


class GradError(PyggmlError, RuntimeError):
    """A gradient that cannot be computed, and why."""


class StaleError(GradError):
    """A pending value whose parameters have changed since it was recorded."""


class DeviceError(PyggmlError, RuntimeError):
    """A device that does not exist, does not fit, or failed."""


class DeadlineError(PyggmlError, TimeoutError):
    """Computing that took longer than a pg.deadline block allows."""


class DeviceMemoryError(PyggmlError, MemoryError):
    """A request for more memory than the device can give."""


class GradCheckError(GradError, AssertionError):
    """A gradient that ag.gradcheck found to be wrong."""


class AnomalyError(PyggmlError, ArithmeticError):
    """A NaN or infinity that ag.detect_anomaly found."""


class MemoryBudgetError(PyggmlError, MemoryError):
    """A memory budget that no plan can keep."""


class FileFormatError(PyggmlError, ValueError):
    """A file that is damaged, or not what pyggml.io reads."""


class NonFiniteLossError(PyggmlError, ArithmeticError):
    """A training loss that is NaN or infinite."""
