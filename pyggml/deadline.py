"""A bound on the time that computing may take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from . import _ffi
from .checks import number_in
from .errors import DeadlineError
from .graph import state


class Deadline(NamedTuple):
    """When the time of a block is over, by time.monotonic(), and how long it was."""

    end: float
    seconds: float


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise DeadlineError from what computes in this block once so many seconds have passed.

    It counts from the start of the block, for this thread; of blocks inside each other the one that
    ends first counts. A run is stopped between two nodes of its graph, within about 50 ms, as it is
    by Ctrl-C: an update of parameters is made whole or not at all, what was pending stays pending,
    and pyggml can be used on. A Vulkan device looks at the time before a run only. What is not
    computing, such as waiting for data, is not stopped.

    Raises SettingError for seconds that are not a number of at least 0.

    >>> x = ag.tensor(np.ones((100, 100)))
    >>> try:
    ...     with pg.deadline(0.2):
    ...         while True:
    ...             x = ag.tanh(x @ x)
    ...             _ = x.numpy()
    ... except pg.DeadlineError as error:
    ...     print(error)
    deadline: the 0.2 seconds of this block are over
    """
    length = number_in("deadline", "seconds", seconds, 0.0)
    own, outer = Deadline(time.monotonic() + length, length), state.deadline
    state.deadline = own if outer is None or own.end < outer.end else outer
    try:
        yield
    finally:
        state.deadline = outer


def check_deadline() -> None:
    """Raise DeadlineError if the time of this thread's block is over."""
    current = state.deadline
    if current is not None and time.monotonic() >= current.end:
        raise DeadlineError(f"deadline: the {current.seconds:g} seconds of this block are over")


_ffi.check_deadline = check_deadline
