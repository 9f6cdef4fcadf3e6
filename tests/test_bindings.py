"""What must hold of pyggml._ffi: all of ggml can be called; its log and signals reach Python."""

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import build_ggml
import pyggml.__main__
import pyggml._ffi as native
from pyggml._ffi import ffi, lib
from pyggml._version import __version__

ROOT = Path(build_ggml.__file__).resolve().parent
LIBRARIES = Path(native.__file__).parent / "lib"


def functions_declared(header: Path) -> list[str]:
    """List the functions that a header exports, read in another way than build_ggml.py does."""
    text = re.sub(
        r"/\*.*?\*/|//[^\n]*|^[ \t]*#(?:\\\n|[^\n])*", "", header.read_text(), flags=re.S | re.M
    )
    exported = re.findall(r"\b(?:GGML|GGUF)(?:_BACKEND)?_API\b([^;{]*);", text)
    # The name is the last word before the first '(': `GGML_CALL const char * name(…)`.
    return [re.match(r"[^(]*?(\w+)\s*\(", declaration).group(1) for declaration in exported]


def functions_defined() -> set[str]:
    """List the functions that the built libraries define."""
    names = set()
    for library in LIBRARIES.glob("lib*"):
        listing = subprocess.run(
            ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
        )
        names |= {line.split()[-1] for line in listing.stdout.splitlines()}
    return names


HEADERS = ("ggml", "ggml-alloc", "ggml-backend", "ggml-cpu", "ggml-opt", "gguf")


@pytest.mark.parametrize("name", HEADERS)
def test_every_exported_function_of_ggml_can_be_called(name):
    headers = build_ggml.ggml_source()[0] / "include"
    declared = functions_declared(headers / f"{name}.h")
    assert len(declared) > 10
    defined = functions_defined()
    undefined = [function for function in declared if function not in defined]
    lacking = [f for f in declared if f in defined and not callable(getattr(lib, f, None))]
    assert lacking == []
    # What ggml declares and defines nowhere: if this list changes, its release notes say why.
    assert undefined == (["ggml_threadpool_get_n_threads"] if name == "ggml-cpu" else [])


def test_constants_and_types_come_from_the_headers():
    assert lib.GGML_MAX_DIMS == 4
    assert lib.GGML_TYPE_F32 == 0
    assert lib.GGML_FILE_MAGIC == 0x67676D6C
    assert lib.GGML_TENSOR_SIZE == ffi.sizeof("struct ggml_tensor")
    assert ffi.typeof("struct ggml_tensor").fields


def test_kernels_are_there():
    assert ffi.string(lib.pg_blas_description()).startswith(b"OpenBLAS")


def test_log_lines_are_kept_and_errors_are_taken_once():
    native.last_errors()
    lib.ggml_backend_load(b"/no such file")
    assert any("no such file" in text for _, text in native.log_lines)
    assert "no such file" in native.last_errors()[0]
    assert native.last_errors() == []


def test_the_continuation_of_a_log_line_is_joined_to_it():
    native.last_errors()
    log = ffi.addressof(lib, "pg_on_log")
    log(lib.GGML_LOG_LEVEL_ERROR, ffi.new("char[]", b"the first half"), ffi.NULL)
    log(lib.GGML_LOG_LEVEL_CONT, ffi.new("char[]", b" and \xff the second\n"), ffi.NULL)
    assert native.last_errors() == ["the first half and \N{REPLACEMENT CHARACTER} the second"]


def test_a_signal_stops_a_long_run_and_its_exception_is_kept():
    size, count = 512, 2000  # some seconds of work
    parameters = {"mem_size": 64 << 20, "mem_buffer": ffi.NULL, "no_alloc": True}
    context = lib.ggml_init(ffi.new("struct ggml_init_params *", parameters)[0])
    a = lib.ggml_new_tensor_2d(context, lib.GGML_TYPE_F32, size, size)
    node = a
    graph = lib.ggml_new_graph_custom(context, 2 * count, False)
    for _ in range(count):
        node = lib.ggml_mul_mat(context, a, node)
    lib.ggml_build_forward_expand(graph, node)
    device = lib.ggml_backend_dev_by_type(lib.GGML_BACKEND_DEVICE_TYPE_CPU)
    backend = lib.ggml_backend_dev_init(device, ffi.NULL)
    allocator = lib.ggml_gallocr_new(lib.ggml_backend_get_default_buffer_type(backend))
    try:
        assert lib.ggml_gallocr_alloc_graph(allocator, graph)
        lib.ggml_backend_tensor_memset(a, 0, 0, lib.ggml_nbytes(a))
        poll = ffi.addressof(lib, "pg_poll")
        lib.ggml_backend_cpu_set_abort_callback(backend, poll, ffi.cast("void *", 5))
        # Python's own handler of SIGINT, so that an alarm does what Ctrl-C does.
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        status = lib.ggml_backend_graph_compute(backend, graph)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    finally:
        lib.ggml_gallocr_free(allocator)
        lib.ggml_backend_free(backend)
        lib.ggml_free(context)
    assert status == lib.GGML_STATUS_ABORTED
    assert isinstance(native.take_pending_exception(), KeyboardInterrupt)
    assert native.take_pending_exception() is None


def run_python(code: str, **arguments):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **arguments)


def test_a_process_that_logs_while_it_ends_ends_well():
    code = (
        "import atexit\nfrom pyggml._ffi import lib\nlib.ggml_backend_load(b'/none')\nprint('end')"
    )
    done = run_python(code, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


@pytest.fixture
def copy(tmp_path):
    """Copy the package's import point without anything that was built; return its folder."""
    folder = tmp_path / "pyggml" / "_ffi"
    (folder / "lib").mkdir(parents=True)
    (tmp_path / "pyggml" / "__init__.py").touch()
    shutil.copy(ROOT / "pyggml" / "_version.py", folder.parent)
    shutil.copy(ROOT / "pyggml" / "_ffi" / "__init__.py", folder)
    return folder


def import_error_of(copy: Path, *options: str) -> str:
    command = [sys.executable, *options, "-c", "import pyggml._ffi"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=copy.parent.parent)
    return done.stderr.splitlines()[-1]


def test_a_missing_module_says_how_to_build_it(copy):
    assert "build it with `python build_ggml.py`" in import_error_of(copy)


def test_a_missing_library_says_how_to_rebuild(copy):
    shutil.copy(native.__file__.replace("__init__.py", build_ggml.MODULE_FILE), copy)
    assert "libggml" in import_error_of(copy)
    assert "To rebuild it: `python build_ggml.py`" in import_error_of(copy)


def test_a_missing_dependency_says_how_to_install_it(copy):
    assert "pip install scipy-openblas32" in import_error_of(copy, "-S")


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="only Linux lists the CPU's flags")
def test_native_code_for_another_cpu_is_refused(copy):
    (copy / "lib" / "cpu_flags.txt").write_text("avx9000 sse2")
    error = import_error_of(copy)
    assert "built for another CPU: this one lacks avx9000" in error
    assert "PYGGML_CPU=portable" in error


def test_the_report_for_bugs_tells_the_versions_and_the_devices():
    printed = dict(pyggml.__main__.report())
    assert printed["pyggml"] == __version__
    assert build_ggml.GGML_VERSION in printed["ggml"]
    assert printed["BLAS"].startswith("OpenBLAS")
    assert printed["device 0"]


def test_another_version_of_the_package_is_refused():
    code = "import pyggml._version as v; v.__version__ = '9.9'\nimport pyggml._ffi"
    # pyggml's own __init__ must not come first, so a bare package stands in for it.
    stand_in = (
        "import sys, types; p = types.ModuleType('pyggml'); "
        f"p.__path__ = [{str(ROOT / 'pyggml')!r}]; sys.modules['pyggml'] = p\n"
    )
    done = run_python(stand_in + code)
    assert (
        f"ImportError: pyggml is 9.9, its compiled module {__version__}. To rebuild it"
        in done.stderr
    )
