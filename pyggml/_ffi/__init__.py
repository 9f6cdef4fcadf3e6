"""Load the compiled module: the one place that `ffi` and `lib` are imported from.

Python functions that C calls stand here too. None of them may raise into C: what they meet is
stored, and the caller of the C function picks it up.
"""

import atexit
import collections
import ctypes
import faulthandler
import importlib.util
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyggml._version import __version__

_FOLDER = Path(__file__).resolve().parent
_REBUILD = (
    "To rebuild it: `python build_ggml.py` in a source tree, else `pip install --force-reinstall "
    "--no-cache-dir pyggml`."
)


def _check_interpreter() -> None:
    """Raise in a subinterpreter: ggml calls back into one interpreter, and NumPy works in one."""
    here, main = (
        getattr(ctypes.pythonapi, f"PyInterpreterState_{name}", None) for name in ("Get", "Main")
    )
    if here is None or main is None:  # not CPython
        return
    here.restype = main.restype = ctypes.c_void_p
    if here() != main():
        raise ImportError(
            "pyggml works in the main interpreter only, and this is a subinterpreter: use threads, "
            "or processes (multiprocessing)"
        )


def _check_cpu() -> None:
    """Raise where native code was built for instructions that this CPU lacks: it would crash."""
    recorded = _FOLDER / "lib" / "cpu_flags.txt"  # only native builds on Linux have it
    if not recorded.is_file():
        return
    try:
        with open("/proc/cpuinfo") as file:
            text = file.read(16384)  # the first CPU is enough
    except OSError:
        return
    here = re.search(r"^(?:flags|Features|features)\s*:(.*)$", text, re.MULTILINE)
    lacking = set(recorded.read_text().split()) - set(here.group(1).split() if here else [])
    if here and lacking:
        raise ImportError(
            "pyggml was built for another CPU: this one lacks " + ", ".join(sorted(lacking)) + ". "
            f"{_REBUILD} PYGGML_CPU=portable builds for every CPU of this kind."
        )


def _load_openblas() -> None:
    """Load the BLAS that the module is linked with, wherever this environment keeps it."""
    # Not imported: that costs 30 ms, and all that is needed is the folder.
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        raise ImportError("pyggml needs the package scipy-openblas32: pip install scipy-openblas32")
    suffix = "dylib" if sys.platform == "darwin" else "so"
    ctypes.CDLL(str(Path(spec.origin).with_name("lib") / f"libscipy_openblas.{suffix}"))


def _load_cpu_variant() -> Path | None:
    """In a portable build, load the variant of ggml's CPU backend that suits this CPU best."""
    best, best_score = None, 0
    for path in sorted((_FOLDER / "lib").glob("libggml-cpu-*")):
        score = ctypes.CDLL(str(path)).ggml_backend_score()  # 0: this CPU cannot run it
        if score > best_score:
            best, best_score = path, score
    if best is not None:
        # The module's calls of ggml's CPU functions are bound to the ones made global here.
        ctypes.CDLL(str(best), ctypes.RTLD_GLOBAL)
    return best


_check_interpreter()
_check_cpu()
_load_openblas()
_cpu_variant = _load_cpu_variant()
try:
    from pyggml._ffi._ggml import ffi, lib
except ImportError as error:
    if error.name == "_cffi_backend":
        raise ImportError("pyggml needs the package cffi: pip install cffi") from error
    if isinstance(error, ModuleNotFoundError):
        raise ImportError(
            "pyggml's compiled module is missing. In a source tree, build it with "
            "`python build_ggml.py`; elsewhere install the package with `pip install .`"
        ) from error
    raise ImportError(f"pyggml's compiled module cannot be loaded: {error}. {_REBUILD}") from error


def _check_versions() -> None:
    """Raise where the Python code, the module and ggml's libraries are not of one build."""
    built, built_ggml = (
        ffi.string(text).decode()
        for text in (lib.PYGGML_BUILT_VERSION, lib.PYGGML_BUILT_GGML_VERSION)
    )
    loaded_ggml = ffi.string(lib.ggml_version()).decode()
    if built != __version__:
        raise ImportError(f"pyggml is {__version__}, its compiled module {built}. {_REBUILD}")
    if loaded_ggml != built_ggml:
        raise ImportError(
            f"pyggml was built with ggml {built_ggml}, but ggml {loaded_ggml} is loaded. {_REBUILD}"
        )


_check_versions()

# What ggml logged lately: (level, text). Bounded, since nobody may ever read it.
log_lines: collections.deque[tuple[int, str]] = collections.deque(maxlen=500)
_errors: collections.deque[str] = collections.deque(maxlen=20)


class _Pending(threading.local):
    exception: BaseException | None = None


_pending = _Pending()  # what stopped this thread's run
check_deadline: Callable[[], None] | None = None
"""Raises when this thread has no time left; set by pyggml.deadline."""


def last_errors() -> list[str]:
    """Return the lines that ggml logged as errors since the last call, oldest first."""
    lines = [line.strip() for line in list(_errors)]
    _errors.clear()
    return lines


def take_pending_exception() -> BaseException | None:
    """Return the exception that stopped a run (such as KeyboardInterrupt), and forget it."""
    taken, _pending.exception = _pending.exception, None
    return taken


def _keep_exception(kind: Any, value: BaseException, traceback: Any) -> None:
    _pending.exception = value


@ffi.def_extern(error=1, onerror=_keep_exception)
def pg_on_poll() -> int:
    """Let Python run its signal handlers, which it does on entry; say whether to stop: no.

    An exception, of a handler or for want of time, stops the run.
    """
    if check_deadline is not None:
        check_deadline()
    return 0


@ffi.def_extern(onerror=_keep_exception)
def pg_on_log(level: int, text: Any, user_data: Any) -> None:
    """Keep one line of ggml's log."""
    line = ffi.string(text).decode(errors="replace")
    if level == lib.GGML_LOG_LEVEL_CONT and log_lines:  # goes on with the line before
        level, start = log_lines.pop()
        line = start + line
        if level == lib.GGML_LOG_LEVEL_ERROR and _errors:
            _errors.pop()
    log_lines.append((level, line))
    if level == lib.GGML_LOG_LEVEL_ERROR:
        _errors.append(line)


describe_work: Callable[[], str | None] | None = None
"""Says what is being built or run, in one line; set by pyggml.ggml_plan."""


_aborting = threading.Lock()


@ffi.def_extern()
def pg_on_abort(message: Any) -> None:
    """Say where the program is: ggml ends the process when this returns."""
    if not _aborting.acquire(blocking=False):
        time.sleep(10)  # another worker failed too: what that one says comes first, and is enough

    def write(line: str) -> None:
        os.write(2, f"pyggml: {line}\n".encode(errors="replace"))  # whatever sys.stderr may be

    write(f"ggml ends this process: {ffi.string(message).decode(errors='replace')}")
    try:
        work = describe_work() if describe_work else None
        if work:
            write(work)
        write("please report these lines, with what `python -m pyggml` prints")
    finally:
        faulthandler.dump_traceback(2, all_threads=True)


def _close() -> None:
    # ggml may log or fail while the process ends, when no Python code can run any more.
    lib.ggml_log_set(ffi.NULL, ffi.NULL)
    lib.ggml_set_abort_callback(ffi.NULL)


def _open() -> None:
    lib.ggml_log_set(lib.pg_on_log, ffi.NULL)
    lib.ggml_set_abort_callback(lib.pg_on_abort)
    atexit.register(_close)
    lib.pg_use_single_threaded_blas()
    if _cpu_variant is not None:  # a portable build: its backends are plug-ins
        lib.ggml_backend_load(str(_cpu_variant).encode())
        for path in sorted((_FOLDER / "lib").glob("libggml-*")):
            if not path.name.startswith(("libggml-cpu-", "libggml-base.")):
                lib.ggml_backend_load(str(path).encode())


_open()

__all__ = ["ffi", "last_errors", "lib", "log_lines", "take_pending_exception"]
