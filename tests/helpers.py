"""What several test files use."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time

import numpy as np


def child(code, *arguments):
    """Run code in a new Python, which must end well and in time; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_until(holds, seconds=20.0):
    """Return whether a condition became true before the time was over."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.005)
    return holds()


def loader_threads():
    """Return the threads of all loaders."""
    return [thread for thread in threading.enumerate() if thread.name == "pyggml-data"]


def same(a, b):
    """Tell whether two trees of plain values and arrays are equal to the last bit, types too."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b or a != a
