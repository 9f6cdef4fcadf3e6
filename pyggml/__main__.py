"""Print what a bug report needs: `python -m pyggml`."""

import os
import platform
import sys
from collections.abc import Iterator

from pyggml._ffi import ffi, lib
from pyggml._version import __version__


def _cpu_model() -> str:
    """Return the CPU's name as the system states it."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.lower().startswith(("model name", "cpu model")):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _cpu_features() -> str:
    """List the instruction sets that ggml's CPU code was built with."""
    prefix = "ggml_cpu_has_"
    names = [name for name in dir(lib) if name.startswith(prefix) and getattr(lib, name)()]
    return " ".join(name[len(prefix) :] for name in names) or "none"


def _devices() -> Iterator[tuple[str, str]]:
    """Yield a label and a description of each device that ggml offers."""
    for i in range(lib.ggml_backend_dev_count()):
        device = lib.ggml_backend_dev_get(i)
        backend = lib.ggml_backend_reg_name(lib.ggml_backend_dev_backend_reg(device))
        name, description = (
            lib.ggml_backend_dev_name(device),
            lib.ggml_backend_dev_description(device),
        )
        free, total = ffi.new("size_t *"), ffi.new("size_t *")
        lib.ggml_backend_dev_memory(device, free, total)
        text = " / ".join(
            ffi.string(part).decode(errors="replace") for part in (backend, name, description)
        )
        yield f"device {i}", f"{text}, {free[0] / 2**30:.1f} of {total[0] / 2**30:.1f} GiB free"


def report() -> Iterator[tuple[str, str]]:
    """Yield the lines of the report: (label, text)."""
    version, commit = (ffi.string(f()).decode() for f in (lib.ggml_version, lib.ggml_commit))
    affinity = getattr(os, "sched_getaffinity", None)
    threads = len(affinity(0)) if affinity else os.cpu_count()
    yield "pyggml", __version__
    yield "ggml", f"{version} (commit {commit})"
    yield "Python", f"{platform.python_implementation()} {sys.version.split()[0]}"
    yield "platform", platform.platform()
    yield "CPU", _cpu_model()
    yield "CPU features", _cpu_features()
    yield "BLAS", ffi.string(lib.pg_blas_description()).decode()
    yield "threads", f"{threads} usable of {os.cpu_count()}"
    yield from _devices()


if __name__ == "__main__":
    for label, text in report():
        print(f"{label + ':':<14}{text}")
