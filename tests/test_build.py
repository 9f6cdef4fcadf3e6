"""What must hold of build_ggml.py: options, cache keys, what it says is missing, and the wheel."""

import dataclasses
import io
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import build_ggml
from build_ggml import BuildError, Options
from pyggml._version import __version__

ROOT = Path(build_ggml.__file__).resolve().parent

# ----------------------------------------------------------------------------------- options


def test_options_have_defaults():
    assert build_ggml.read_options(None, {}) == Options("auto", "native", (), "", False)


def test_options_come_from_the_environment():
    environ = {
        "PYGGML_VULKAN": "OFF",
        "PYGGML_CPU": "portable",
        "PYGGML_CMAKE_ARGS": '-DGGML_RPC=ON "-DA=b c"',
        "PYGGML_VULKAN_INCLUDE": "/headers",
        "PYGGML_VERBOSE": "1",
    }
    expected = Options("off", "portable", ("-DGGML_RPC=ON", "-DA=b c"), "/headers", True)
    assert build_ggml.read_options({}, environ) == expected


def test_config_settings_win_over_the_environment():
    settings = {"vulkan": "on", "cmake-args": ["-DA=1", "-DB=2"], "--build-option": "x"}
    options = build_ggml.read_options(settings, {"PYGGML_VULKAN": "off"})
    assert (options.vulkan, options.cmake_args) == ("on", ("-DA=1", "-DB=2"))


def test_a_value_or_a_setting_that_does_not_exist_is_refused():
    with pytest.raises(BuildError, match=r"vulkan='maybe': must be one of auto, on, off"):
        build_ggml.read_options({"vulkan": "maybe"}, {})
    with pytest.raises(BuildError, match=r"cpu='fast': must be one of native, portable"):
        build_ggml.read_options({}, {"PYGGML_CPU": "fast"})
    with pytest.raises(BuildError, match=r"unknown config setting 'vulcan'; known: vulkan, cpu"):
        build_ggml.read_options({"vulcan": "on"}, {})


def test_options_become_cmake_arguments():
    native = build_ggml.cmake_arguments(Options(), False, "abcdefghij")
    assert {"-DGGML_NATIVE=ON", "-DGGML_VULKAN=OFF", "-DGGML_BACKEND_DL=OFF"} <= set(native)
    assert {"-DGGML_OPENMP=OFF", "-DGGML_BUILD_COMMIT=abcdefg"} <= set(native)
    options = Options(cpu="portable", cmake_args=("-DGGML_RPC=ON",), vulkan_include="/headers")
    portable = build_ggml.cmake_arguments(options, True, "abcdefghij")
    assert {"-DGGML_NATIVE=OFF", "-DGGML_VULKAN=ON", "-DVulkan_INCLUDE_DIR=/headers"} <= set(
        portable
    )
    assert {"-DGGML_CPU_ALL_VARIANTS=ON", "-DGGML_BACKEND_DL=ON"} <= set(portable)
    assert portable[-1] == "-DGGML_RPC=ON"  # the last one wins


def test_kernels_keep_nan_and_are_native_only_in_native_builds():
    assert "-ffast-math" not in build_ggml.kernel_flags("native")
    assert build_ggml.NATIVE_FLAG in build_ggml.kernel_flags("native")
    assert build_ggml.NATIVE_FLAG not in build_ggml.kernel_flags("portable")


# --------------------------------------------------------------------------------- the cache


WITHOUT_VULKAN = Options(vulkan="off")


@pytest.fixture
def plan_with(monkeypatch):
    """Return a function that makes a plan in which some inputs differ from this machine's."""
    tree = build_ggml.ggml_source()[0]
    inputs = {
        "ggml_source": (tree, "hash", "commit"),
        "cpu_features": {"macros": ["A"], "flags": ["avx"], "name": [""]},
        "choose_vulkan": [],
        "run": "compiler 1",
    }

    def make(options=WITHOUT_VULKAN, environ=None, **changed):
        with monkeypatch.context() as patch:
            for name, value in {**inputs, **changed}.items():
                patch.setattr(build_ggml, name, lambda *a, value=value, **k: value)
            for name, value in (environ or {}).items():
                patch.setenv(name, value)
            return build_ggml.make_plan(options)

    return make


def keys(plan):
    libraries = build_ggml.key_of(plan.libraries)
    return libraries, build_ggml.key_of({**plan.module, "libraries": libraries})


LIBRARY_INPUTS = [
    {"ggml_source": (None, "another hash", "commit")},
    {"ggml_source": (None, "hash", "another commit")},
    {"cpu_features": {"macros": ["A"], "flags": ["avx", "avx2"], "name": [""]}},
    {"cpu_features": {"macros": ["A", "B"], "flags": ["avx"], "name": [""]}},
    {"choose_vulkan": ["glslc 1", "(1, 3, 275)"]},
    {"run": "compiler 2"},
    {"environ": {"CFLAGS": "-g"}},
    {"environ": {"CXXFLAGS": "-g"}},
    {"environ": {"LDFLAGS": "-g"}},
    {"options": Options(vulkan="off", cpu="portable")},
    {"options": Options(vulkan="off", cmake_args=("-DGGML_RPC=ON",))},
]


@pytest.mark.parametrize("change", LIBRARY_INPUTS, ids=str)
def test_each_input_of_the_libraries_changes_both_keys(plan_with, change):
    same = plan_with()
    if "ggml_source" in change:
        change = {"ggml_source": (same.source, *change["ggml_source"][1:])}
    other = plan_with(**change)
    assert keys(same) == keys(plan_with())
    assert keys(other)[0] != keys(same)[0]
    assert keys(other)[1] != keys(same)[1]


@pytest.mark.parametrize("name", ["sources", "record", "cffi", "openblas", "python"])
def test_each_input_of_the_module_changes_its_key_alone(plan_with, name):
    plan = plan_with()
    other = dataclasses.replace(plan, module={**plan.module, name: "other"})
    assert keys(other)[0] == keys(plan)[0]
    assert keys(other)[1] != keys(plan)[1]


def test_a_portable_build_does_not_depend_on_the_cpu(plan_with):
    options = Options(vulkan="off", cpu="portable")
    other = plan_with(options, cpu_features={"macros": ["another CPU"]})
    assert keys(plan_with(options)) == keys(other)


def test_the_hash_of_files_sees_names_and_contents(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        (folder / "tree").mkdir(parents=True)
        (folder / "tree" / "file").write_text("text")
    assert build_ggml.hash_of(one / "tree") == build_ggml.hash_of(two / "tree")
    (two / "tree" / "file").write_text("other")
    assert build_ggml.hash_of(one / "tree") != build_ggml.hash_of(two / "tree")
    (two / "tree" / "file").write_text("text")
    (two / "tree" / "file").rename(two / "tree" / "renamed")
    assert build_ggml.hash_of(one / "tree") != build_ggml.hash_of(two / "tree")


def test_the_cpu_flags_are_those_of_instructions():
    cpuinfo = "processor: 0\nflags\t\t: fpu sse2 avx512f hypervisor fma\nbugs: x\n\nprocessor: 1\n"
    assert build_ggml.cpu_flags(cpuinfo) == ["avx512f", "fma", "sse2"]
    assert build_ggml.cpu_flags("Features\t: fp asimd sve2 cpuid\n") == ["asimd", "sve2"]


def test_the_cache_lies_where_the_environment_says(tmp_path):
    assert build_ggml.cache_folder({"PYGGML_CACHE": str(tmp_path)}) == tmp_path
    if not build_ggml.IS_MAC:
        assert build_ggml.cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/pyggml")
        assert build_ggml.cache_folder({}) == Path.home() / ".cache" / "pyggml"


def test_the_cache_makes_an_entry_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PYGGML_CACHE", str(tmp_path))
    made = []

    def make(folder):
        made.append(folder)
        (folder / "file").write_text("text")

    for _ in range(2):
        assert (build_ggml.cached("kind", "key", make) / "file").read_text() == "text"
    assert len(made) == 1


def test_a_failed_or_overtaken_build_leaves_no_half_entry(tmp_path, monkeypatch):
    monkeypatch.setenv("PYGGML_CACHE", str(tmp_path))

    def fail(folder):
        (folder / "file").write_text("half")
        raise BuildError("no")

    def be_overtaken(folder):
        (folder / "file").write_text("slow")
        faster = tmp_path / "kind" / "key"
        faster.mkdir()
        (faster / "file").write_text("fast")

    with pytest.raises(BuildError):
        build_ggml.cached("kind", "key", fail)
    assert list((tmp_path / "kind").iterdir()) == []
    assert (build_ggml.cached("kind", "key", be_overtaken) / "file").read_text() == "fast"
    assert [entry.name for entry in (tmp_path / "kind").iterdir()] == ["key"]


def test_the_cache_forgets_what_was_used_longest_ago(tmp_path):
    for age in range(5):
        entry = tmp_path / f"entry{age}"
        entry.mkdir()
        os.utime(entry, (1e9 - age, 1e9 - age))
    killed = tmp_path / ".killed"
    killed.mkdir()
    os.utime(killed, (1e9, 1e9))
    (tmp_path / ".running").mkdir()
    build_ggml.forget_old(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".running", "entry0", "entry1"]


# --------------------------------------------------------------------------- what is missing


@pytest.mark.parametrize("language, variable", [("C", "CC"), ("C++", "CXX")])
def test_a_missing_compiler_is_named_with_its_use_and_its_source(language, variable):
    with pytest.raises(BuildError) as caught:
        build_ggml.compiler(language, {"PATH": ""})
    text = str(caught.value)
    assert text.startswith(f"{language} compiler not found: needed to compile ggml")
    for command in ("apt install", "dnf install", "pacman -S", "xcode-select"):
        assert command in text
    with pytest.raises(BuildError, match=rf"\({variable}=nocc\) not found"):
        build_ggml.compiler(language, {variable: "nocc -O2", "PATH": os.environ["PATH"]})


def test_a_compiler_may_come_with_arguments():
    name = "cc" if not os.environ.get("CC") else os.environ["CC"]
    environ = {"CC": f"{name} -pipe", "PATH": os.environ["PATH"]}
    assert build_ggml.compiler("C", environ)[-1] == "-pipe"


def test_a_missing_cmake_or_ninja_is_named(monkeypatch):
    monkeypatch.setattr(build_ggml.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(build_ggml.shutil, "which", lambda name: None)
    monkeypatch.setattr(build_ggml.importlib.metadata, "files", lambda name: None)
    with pytest.raises(
        BuildError, match=r"CMake not found: needed to configure.*pip install cmake"
    ):
        build_ggml.cmake_command()
    with pytest.raises(BuildError, match=r"Ninja not found: needed to run.*pip install ninja"):
        build_ggml.ninja_command()
    with pytest.raises(
        BuildError, match=r"scipy-openblas32 not found: needed to multiply.*pip ins"
    ):
        build_ggml.python_package("scipy_openblas32", "multiply")


def test_missing_python_headers_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(build_ggml.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(BuildError, match=r"Python\.h .*not found.*apt install python3-dev"):
        build_ggml.python_headers()


HEADER = """
#define VK_HEADER_VERSION 239
#define VK_HEADER_VERSION_COMPLETE VK_MAKE_API_VERSION(0, 1, 3, VK_HEADER_VERSION)
"""


def test_the_version_of_vulkan_headers_is_read():
    assert build_ggml.vulkan_version(HEADER) == (1, 3, 239)
    assert build_ggml.vulkan_version(HEADER.replace("239", "309").replace("3, V", "4, V")) == (
        1,
        4,
        309,
    )
    assert build_ggml.vulkan_version("#define VK_HEADER_VERSION 1") is None
    assert build_ggml.vulkan_version("") is None


@pytest.fixture
def bare_machine(monkeypatch, tmp_path):
    """Hide every Vulkan tool of this machine; return a folder of headers that may be filled."""
    monkeypatch.delenv("VULKAN_SDK", raising=False)
    monkeypatch.setenv("PYGGML_CACHE", str(tmp_path / "cache"))  # without newer headers
    which = build_ggml.shutil.which
    monkeypatch.setattr(
        build_ggml.shutil, "which", lambda name, **k: None if name == "glslc" else which(name, **k)
    )
    monkeypatch.setattr(build_ggml, "can_link", lambda cc, flags: False)

    def find(cc, name, folders):
        paths = [Path(folder, name) for folder in folders]
        return next((path.read_text() for path in paths if path.is_file()), None)

    monkeypatch.setattr(build_ggml, "find_header", find)
    return tmp_path


def test_without_vulkan_tools_one_line_says_what_is_left_out(bare_machine, capsys):
    assert build_ggml.choose_vulkan(Options(vulkan="auto"), ["cc"]) == []
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for part in ("Vulkan backend is left out", "glslc", "SPIRV-Headers", "1.3.275", "loader"):
        assert part in said
    assert build_ggml.choose_vulkan(Options(vulkan="off"), ["cc"]) == []
    assert capsys.readouterr().err == ""


def test_vulkan_on_names_a_missing_tool_its_use_and_its_source(bare_machine):
    with pytest.raises(BuildError) as caught:
        build_ggml.choose_vulkan(Options(vulkan="on"), ["cc"])
    text = str(caught.value)
    assert "glslc not found: needed to compile the shaders" in text
    assert "apt install glslc" in text


def test_old_vulkan_headers_are_refused_by_their_version(bare_machine):
    (bare_machine / "vulkan").mkdir()
    (bare_machine / "vulkan" / "vulkan_core.h").write_text(HEADER)
    options = Options(vulkan="on", vulkan_include=str(bare_machine))
    with pytest.raises(BuildError, match=r"1\.3\.275 or newer \(these are 1\.3\.239\) not found"):
        build_ggml.choose_vulkan(options, ["cc"])


def test_a_header_is_found_by_the_compiler(tmp_path):
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "header.h").write_text("#define THERE 1\n")
    cc = build_ggml.compiler("C")
    assert build_ggml.find_header(cc, "some/header.h", [str(tmp_path)]) == "#define THERE 1\n"
    assert build_ggml.find_header(cc, "some/header.h", []) is None
    assert build_ggml.can_link(cc, ["-lm"])
    assert not build_ggml.can_link(cc, ["-lno_such_library"])


# ------------------------------------------------------------------------ ggml's own sources


def test_another_archive_is_refused(tmp_path, monkeypatch):
    archive = tmp_path / "package.tar.gz"
    archive.write_bytes(b"something else")
    with pytest.raises(
        BuildError, match=r"package\.tar\.gz is not the file.*sha256 is [0-9a-f]{64}"
    ):
        build_ggml.check_archive(archive)
    monkeypatch.setattr(build_ggml, "download", lambda folder: archive)
    monkeypatch.setenv("PYGGML_CACHE", str(tmp_path / "cache"))
    with pytest.raises(BuildError, match="submodule update --init"):
        build_ggml.cached("source", "key", build_ggml.fetch_source)
    assert list((tmp_path / "cache" / "source").iterdir()) == []


def test_only_the_folder_ggml_is_unpacked():
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name in ("top/ggml/a", "top/other/b", "top/ggml/../c", "ggml/d", "top/ggml/src/e"):
            tar.addfile(tarfile.TarInfo(name))
    stream.seek(0)
    with tarfile.open(fileobj=stream) as tar:
        names = [member.name for member in build_ggml.ggml_members(tar)]
    assert names == ["ggml/a", "ggml/src/e"]


# ------------------------------------------------------------------------------ declarations


def test_declarations_are_taken_from_preprocessed_headers():
    text = """
#define GGML_MAX_DIMS 4
#define GGML_HEX 0x67u
#define GGML_MINUS (-1)
#define GGML_TEXT "no"
#define GGML_CALL(x) x
#define OTHER 3
typedef struct thing * thing_t;
_Static_assert(sizeof(int) == 4, "no");
struct thing { int a[64 / sizeof(int)]; void (*call)(int x); };
enum kind { A = 1, B = (1 << 3), };
extern int known(const char * text, ...);
extern void unknown(int (*callback)(void *), struct thing * restrict t);
typedef struct thing * thing_t;
static inline int twice(int x) { if (x) { return 2; } return 2 * x; }
typedef void (*callback_t)(int);
static const int SIZE = sizeof(int);
"""
    kept, undefined = build_ggml.declarations(text, {"known"})
    assert undefined == ["unknown"]
    assert kept.splitlines() == [
        "#define GGML_MAX_DIMS ...",
        "#define GGML_HEX ...",
        "#define GGML_MINUS ...",
        "typedef struct thing * thing_t;",
        "struct thing { int a[...]; void (*call)(int x); };",
        "enum kind { A = 1, B = (1 << 3), };",
        "int known(const char * text, ...);",
        "typedef void (*callback_t)(int);",
        "static const int SIZE;",
    ]


# ------------------------------------------------------------------------- the built package


def run(*command, **arguments):
    done = subprocess.run(command, capture_output=True, text=True, **arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_second_build_has_nothing_to_do():
    run(sys.executable, ROOT / "build_ggml.py")
    assert "up to date" in run(sys.executable, ROOT / "build_ggml.py")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build a wheel of this source tree, in the environment that the tests run in."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", folder, ROOT)
    return next(folder.glob("*.whl"))


def test_the_wheel_is_for_this_platform_and_every_python_from_3_10_on(wheel):
    platform_tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name == f"pyggml-{__version__}-cp310-abi3-{platform_tag}.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert "pyggml/_ffi/_ggml.abi3.so" in names
    libraries = {Path(name).name for name in names if name.startswith("pyggml/_ffi/lib/lib")}
    assert libraries == {p.name for p in (ROOT / "pyggml" / "_ffi" / "lib").glob("lib*")}
    assert not [name for name in names if name.startswith(("tests", "build_ggml"))]


CHECK = """
import sys
from pyggml._ffi import ffi, lib
context = lib.ggml_init(ffi.new("struct ggml_init_params *", {"mem_size": 1 << 20})[0])
assert lib.ggml_nelements(lib.ggml_new_tensor_1d(context, lib.GGML_TYPE_F32, 3)) == 3
print(sys.modules["pyggml"].__file__)
"""


def test_the_wheel_works_in_a_new_environment_and_after_that_is_moved(wheel, tmp_path):
    before, after, elsewhere = tmp_path / "before", tmp_path / "after", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", before)
    python = Path("bin", "python")
    run(sys.executable, "-m", "pip", "--python", before / python, "install", "--no-deps", wheel)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = Path("lib", version, "site-packages")
    # The dependencies are those of the environment that the tests run in: no second download.
    (before / site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    bare = {"PATH": "/usr/bin:/bin"}  # no PYTHONPATH, no LD_LIBRARY_PATH
    for folder in (before, after):
        if folder is after:
            before.rename(after)
        printed = run(folder / python, "-c", CHECK, cwd=elsewhere, env=bare)
        assert Path(printed.strip()).parent == folder / site / "pyggml"
        printed = run(folder / python, "-m", "pyggml", cwd=elsewhere, env=bare)
        assert f"pyggml:       {__version__}" in printed


def test_a_source_archive_holds_what_a_build_needs_and_nothing_built(tmp_path):
    code = f"import build_ggml; print(build_ggml.build_sdist({str(tmp_path)!r}))"
    run(sys.executable, "-c", code, cwd=ROOT)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    needed = {"build_ggml.py", "pyproject.toml", "LICENSE", "README.md", "Makefile", "PKG-INFO"}
    needed |= {f"pyggml/{name}" for name in ("_version.py", "_ffi/kernels/kernels.h")}
    needed |= {file.relative_to(ROOT).as_posix() for file in build_ggml.KERNELS.glob("*.c*")}
    assert needed <= names
    assert {"tests/test_build.py", "pyggml/__init__.py"} <= names
    assert not [n for n in names if n.endswith((".so", ".pyc")) or n.startswith("pyggml/_ffi/lib")]
