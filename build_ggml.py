"""Build the native part of pyggml: ggml's libraries and the compiled module pyggml._ffi._ggml.

By hand, in a source tree: `python build_ggml.py` (see --help). It is also the PEP 517 backend of
pyproject.toml: each hook builds the native part into pyggml/_ffi and hands over to setuptools.

The steps, in the order of this file: options, cache, tools, Vulkan, ggml's sources, ggml's
libraries, the declarations generated from ggml's headers, the module, the hooks. Every result is
cached under a hash of all that went into it, and written beside its place and renamed, so two
builds may run at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

GGML_VERSION = "0.20.2"
GGML_COMMIT = "8c63e70982c95ceb862e3a1073a2c1beef75d60a"
# A PyPI source package whose folder ggml/ is that commit's tree, for where there is no submodule.
SDIST_NAME, SDIST_VERSION = "libggml-python", "0.20.2.post1"
SDIST_SHA256 = "e47ff53506342959ffb3ce15380b82828fea10ec5f208f9ef6915895f1a7a176"

# Their declarations become pyggml._ffi.lib. The headers of backends follow, where these are built.
HEADERS = ("ggml.h", "ggml-alloc.h", "ggml-backend.h", "ggml-cpu.h", "ggml-opt.h", "gguf.h")
OLDEST_VULKAN_HEADERS = (1, 3, 275)

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "pyggml" / "_ffi"
KERNELS = PACKAGE / "kernels"
RELAX = KERNELS / "ggml_relax.h"  # included in front of ggml's C files
MODULE_FILE = "_ggml.abi3.so"
STABLE_ABI = "cp310"  # the module uses only what every Python from 3.10 on has
IS_MAC = sys.platform == "darwin"


class BuildError(Exception):
    """Say what stops the build, and what to do about it."""


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"pyggml: {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------- options

OPTION_HELP = {
    "vulkan": "auto: the Vulkan backend is built where its tools are present (default); on; off",
    "cpu": "native: code for this CPU only (default); portable: ggml picks its code at run time",
    "cmake-args": 'more arguments for ggml\'s CMake: --cmake-args="-DGGML_RPC=ON"',
    "vulkan-include": "folder of vulkan/vulkan_core.h, where the system's headers are too old",
    "verbose": "1: show what CMake and the compilers print",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Hold what a person can choose; OPTION_HELP says what each means."""

    vulkan: str = "auto"
    cpu: str = "native"
    cmake_args: tuple[str, ...] = ()
    vulkan_include: str = ""
    verbose: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("vulkan", ("auto", "on", "off")), ("cpu", ("native", "portable"))):
            given = getattr(self, name)
            if given not in allowed:
                raise BuildError(f"{name}={given!r}: must be one of {', '.join(allowed)}")


def environment_name(option: str) -> str:
    """Name the environment variable of an option."""
    return "PYGGML_" + option.upper().replace("-", "_")


def read_options(settings: Mapping[str, Any] | None, environ: Mapping[str, str]) -> Options:
    """Read options from config settings (`vulkan`), else the environment (`PYGGML_VULKAN`)."""
    settings = settings or {}
    # Settings that start with "--" are setuptools' own.
    unknown = [name for name in settings if name not in OPTION_HELP and not name.startswith("--")]
    if unknown:
        raise BuildError(f"unknown config setting {unknown[0]!r}; known: {', '.join(OPTION_HELP)}")

    def value(name: str) -> str:
        given = settings.get(name, environ.get(environment_name(name), ""))
        return " ".join(given) if isinstance(given, list) else str(given)

    return Options(
        vulkan=value("vulkan").lower() or "auto",
        cpu=value("cpu").lower() or "native",
        cmake_args=tuple(shlex.split(value("cmake-args"))),
        vulkan_include=value("vulkan-include"),
        verbose=value("verbose") not in ("", "0"),
    )


# ------------------------------------------------------------------------------------------ cache


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return $PYGGML_CACHE, or pyggml's folder in this user's cache."""
    if environ.get("PYGGML_CACHE"):
        return Path(environ["PYGGML_CACHE"]).expanduser().resolve()
    if IS_MAC:
        return Path.home() / "Library" / "Caches" / "pyggml"
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyggml"


def key_of(parts: Mapping[str, Any]) -> str:
    """Hash named inputs into a cache key."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def hash_of(*paths: Path) -> str:
    """Hash files, and the names and contents of all files under folders."""
    total = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                content = file.read_bytes()
                name = f"{path.name}/{file.relative_to(path).as_posix()}"
                total.update(f"{name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


def cached(kind: str, key: str, make: Callable[[Path], None]) -> Path:
    """Return the cache's folder for this key; where there is none, let `make` fill it first."""
    place = cache_folder() / kind / key
    if not place.is_dir():
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BuildError(f"the cache cannot be written: {error}; set PYGGML_CACHE") from None
        with tempfile.TemporaryDirectory(prefix=f".{key}-", dir=place.parent) as beside:
            made = Path(beside) / "made"
            made.mkdir()
            make(made)
            try:
                made.rename(place)
            except OSError:  # another build was faster, and its folder is as good
                if not place.is_dir():
                    raise
    os.utime(place)  # used now
    forget_old(place.parent)
    return place


def forget_old(folder: Path, keep: int = 12) -> None:
    """Delete all but the entries that were used last, and what a killed build left a day ago."""
    ages = {}
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another build may be deleting too
            ages[entry] = time.time() - entry.stat().st_mtime
    finished = sorted((e for e in ages if not e.name.startswith(".")), key=lambda e: ages[e])
    killed = [entry for entry in ages if entry.name.startswith(".") and ages[entry] > 86400]
    for entry in finished[keep:] + killed:
        shutil.rmtree(entry, ignore_errors=True)


def install(folder: Path, files: Iterable[Path]) -> None:
    """Copy files into a folder, each beside its place and then renamed: nobody sees half a file."""
    folder.mkdir(exist_ok=True)
    for file in files:
        beside = folder / f".{file.name}.{os.getpid()}"
        shutil.copyfile(file, beside)
        beside.chmod(0o755)
        beside.replace(folder / file.name)


# ------------------------------------------------------------------------------------------ tools

GET_COMPILERS = (
    "apt install build-essential (Debian, Ubuntu), dnf install gcc gcc-c++ (Fedora), "
    "pacman -S base-devel (Arch), xcode-select --install (macOS)"
)
IS_X86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
NATIVE_FLAG = "-march=native" if IS_X86 else "-mcpu=native"
# Of the flags in /proc/cpuinfo, those for instructions that compiled code may hold.
INSTRUCTIONS = re.compile(
    r"(avx|amx|s?sse|fma|f16c|bmi|abm|movbe|popcnt|gfni|vaes|v?pclmul|aes|sha|adx"
    r"|asimd|sve|sme(?!p)|fphp|i8mm|bf16|crc32|atomics|neon|vfp|vx)\w*"
)


def missing(tool: str, purpose: str, get: str) -> BuildError:
    """Make the error for a tool that is not there."""
    return BuildError(f"{tool} not found: needed to {purpose}. To get it: {get}.")


def run(command: list[str], *, show: bool = False, **arguments: Any) -> str:
    """Run a command and return what it printed, or show it; raise with the end of it on failure."""
    output = sys.stderr if show else subprocess.PIPE
    arguments = {"stdout": output, "stderr": subprocess.STDOUT, **arguments}
    done = subprocess.run(command, text=True, errors="replace", **arguments)
    if done.returncode:
        end = "\n".join((done.stdout or "").splitlines()[-40:])
        raise BuildError(f"this command failed:\n  {shlex.join(command)}\n{end}")
    return done.stdout or ""


def compiler(language: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the command of the C or C++ compiler: $CC or $CXX, else the system's."""
    variable, names = {
        "C": ("CC", ["cc", "gcc", "clang"]),
        "C++": ("CXX", ["c++", "g++", "clang++"]),
    }[language]
    chosen = shlex.split(environ.get(variable, ""))
    for name in chosen[:1] or names:
        if shutil.which(name, path=environ.get("PATH", os.defpath)):
            return chosen or [name]
    detail = f" ({variable}={chosen[0]})" if chosen else ""
    raise missing(
        f"{language} compiler{detail}", "compile ggml and pyggml's kernels", GET_COMPILERS
    )


def cmake_command() -> list[str]:
    """Return the command of CMake: PyPI's for this Python, else the system's."""
    if importlib.util.find_spec("cmake"):
        return [sys.executable, "-m", "cmake"]
    if shutil.which("cmake"):
        return ["cmake"]
    raise missing("CMake", "configure ggml's build", f"{sys.executable} -m pip install cmake")


def ninja_command() -> str:
    """Return the path of Ninja: PyPI's for this Python, else the system's."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("ninja") or ():
            if file.name == "ninja" and "bin" in file.parts:
                return str(Path(str(file.locate())).resolve())
    found = shutil.which("ninja")
    if found is None:
        raise missing("Ninja", "run ggml's build", f"{sys.executable} -m pip install ninja")
    return found


def python_headers() -> Path:
    """Return the folder of Python.h."""
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").is_file():
        get = "apt install python3-dev (Debian, Ubuntu), dnf install python3-devel (Fedora)"
        raise missing(f"Python.h (in {folder})", "compile the module that Python loads", get)
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise BuildError("free-threaded Python is not supported yet: use a Python with the GIL")
    return folder


def python_package(name: str, purpose: str) -> tuple[Path, str]:
    """Return the folder and version of a package that the build itself needs."""
    spec = importlib.util.find_spec(name)
    project = name.replace("_", "-")
    if spec is None or spec.origin is None:
        raise missing(project, purpose, f"{sys.executable} -m pip install {project}")
    return Path(spec.origin).parent, importlib.metadata.version(project)


def cpu_flags(cpuinfo: str) -> list[str]:
    """Return the instruction sets that the text of /proc/cpuinfo lists for the first CPU."""
    found = re.search(r"^(?:flags|Features|features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return sorted(filter(INSTRUCTIONS.fullmatch, found.group(1).split() if found else []))


def cpu_features(cc: list[str]) -> dict[str, list[str]]:
    """Return what native code depends on: the compiler's macros for this CPU, the CPU's flags."""
    macros = run([*cc, NATIVE_FLAG, "-dM", "-E", "-x", "c", os.devnull]).splitlines()
    try:
        flags = cpu_flags(Path("/proc/cpuinfo").read_text())
    except OSError:
        flags = []  # not Linux
    return {"macros": sorted(macros), "flags": flags, "name": [platform.processor()]}


# ----------------------------------------------------------------------------------------- Vulkan


def vulkan_version(header: str) -> tuple[int, int, int] | None:
    """Read the version that the text of vulkan_core.h states."""
    patch = re.search(r"#define\s+VK_HEADER_VERSION\s+(\d+)", header)
    whole = re.search(r"#define\s+VK_HEADER_VERSION_COMPLETE\s+VK_MAKE\w*\(([\d\s,]*)", header)
    if patch is None or whole is None:
        return None
    major, minor = [int(number) for number in re.findall(r"\d+", whole.group(1))][-2:]
    return major, minor, int(patch.group(1))


def find_header(cc: list[str], name: str, folders: list[str]) -> str | None:
    """Return the text of a header that the compiler finds, or None."""
    command = [*cc, *(f"-I{folder}" for folder in folders), "-E", "-x", "c", "-"]
    found = subprocess.run(command, input=f"#include <{name}>\n", text=True, capture_output=True)
    line = re.search(rf'^# \d+ "(.*{re.escape(name)})"', found.stdout, re.MULTILINE)
    if line is None or found.returncode:
        return None
    return Path(line.group(1)).read_text(errors="replace")


def can_link(cc: list[str], flags: list[str]) -> bool:
    """Try to link an empty library with the given flags."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.c")
        source.touch()
        command = [*cc, "-shared", str(source), "-o", f"{folder}/out", *flags]
        return subprocess.run(command, capture_output=True).returncode == 0


def vulkan_headers_folder() -> Path:
    """Return the folder for Vulkan headers that `make vulkan-deps` gets where they are too old."""
    return cache_folder() / "vulkan-headers"


def newer_vulkan_headers() -> str:
    """Return the folder of Vulkan headers that `make vulkan-deps` got, or an empty text."""
    folder = vulkan_headers_folder()
    return str(folder) if (folder / "vulkan" / "vulkan_core.h").is_file() else ""


def inspect_vulkan(options: Options, cc: list[str]) -> tuple[list[str], list[BuildError]]:
    """Return what was found of the Vulkan backend's tools, and an error for each that was not."""
    kit = os.environ.get("VULKAN_SDK", "")
    include = options.vulkan_include or newer_vulkan_headers()
    folders = [f for f in (include, kit and f"{kit}/include") if f]
    found, errors = [], []
    glslc = shutil.which("glslc", path=f"{kit}/bin{os.pathsep}{os.environ.get('PATH', '')}")
    if glslc:
        found.append(run([glslc, "--version"]))
    else:
        get = "apt install glslc, dnf install glslc, pacman -S shaderc, or the Vulkan SDK"
        errors.append(missing("glslc", "compile the shaders of ggml's Vulkan backend", get))
    if find_header(cc, "spirv/unified1/spirv.hpp", folders) is None:
        get = "apt install spirv-headers, dnf install spirv-headers-devel, pacman -S spirv-headers"
        errors.append(missing("SPIRV-Headers", "compile ggml's Vulkan backend", get))
    header = find_header(cc, "vulkan/vulkan_core.h", folders)
    version = vulkan_version(header or "")
    found.append(str(version))
    if version is None or version < OLDEST_VULKAN_HEADERS:
        name = f"Vulkan headers {'.'.join(map(str, OLDEST_VULKAN_HEADERS))} or newer"
        if version:
            name += f" (these are {'.'.join(map(str, version))})"
        get = (
            "make vulkan-deps (Debian, Ubuntu), dnf install vulkan-headers, "
            "pacman -S vulkan-headers; "
            f"newer ones than the system's are named by {environment_name('vulkan-include')}"
        )
        errors.append(missing(name, "compile ggml's Vulkan backend", get))
    loader = ["-lvulkan", *([f"-L{kit}/lib"] if kit else [])]
    given = any(argument.startswith("-DVulkan_LIBRARY") for argument in options.cmake_args)
    if not given and not can_link(cc, loader):
        get = "apt install libvulkan-dev, dnf install vulkan-loader-devel, "
        get += "pacman -S vulkan-icd-loader"
        errors.append(missing("Vulkan loader (libvulkan)", "link ggml's Vulkan backend", get))
    return found, errors


def choose_vulkan(options: Options, cc: list[str]) -> list[str]:
    """Return the tools that the Vulkan backend is built with; none where it is left out.

    Where it is left out for want of a tool, say so in one line; where it was asked for, raise.
    """
    if options.vulkan == "off":
        return []
    found, errors = inspect_vulkan(options, cc)
    if errors and options.vulkan == "on":
        raise BuildError("vulkan=on: " + "\n".join(map(str, errors)))
    if errors:
        lacking = ", ".join(str(error).partition(" not found")[0] for error in errors)
        say(f"the Vulkan backend is left out, for these are missing: {lacking}")
        return []
    return found


# --------------------------------------------------------------------------------- ggml's sources


def ggml_source() -> tuple[Path, str, str]:
    """Return ggml's source tree, a hash of what is in it, and its commit."""
    tree = ROOT / "ggml"  # the submodule
    if (tree / "CMakeLists.txt").is_file():
        commit = GGML_COMMIT
        if (tree / ".git").exists():  # else git would answer for the repository around it
            with contextlib.suppress(OSError, BuildError):
                commit = run(["git", "-C", str(tree), "rev-parse", "HEAD"]).strip()
        parts = [tree / name for name in ("CMakeLists.txt", "cmake", "include", "src")]
        return tree, hash_of(*parts), commit
    tree = cached("source", SDIST_SHA256[:24], fetch_source) / "ggml"
    return tree, SDIST_SHA256, GGML_COMMIT


def fetch_source(target: Path) -> None:
    """Download ggml's tree as a source package through pip, check its hash, unpack it."""
    say(f"getting ggml {GGML_VERSION} ({SDIST_NAME} {SDIST_VERSION}) through pip")
    with tempfile.TemporaryDirectory() as folder:
        archive = download(Path(folder))
        check_archive(archive)
        with tarfile.open(archive) as tar:
            members = list(ggml_members(tar))
            if hasattr(tarfile, "data_filter"):
                tar.extractall(target, members, filter="data")
            else:  # Python before 3.10.12; the hash vouches for the archive
                tar.extractall(target, members)


def check_archive(archive: Path) -> None:
    """Raise unless the archive is the one that pyggml was made with."""
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SDIST_SHA256:
        raise BuildError(
            f"{archive.name} is not the file that pyggml was made with: its sha256 is {found}, "
            f"must be {SDIST_SHA256}. Check which package index pip uses, or check out the "
            "submodule instead: git submodule update --init"
        )


def ggml_members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the archive's members under ggml/, without the archive's own top folder."""
    for member in tar.getmembers():
        inner = member.name.partition("/")[2]
        if inner.startswith("ggml/") and ".." not in inner.split("/") and not member.isdev():
            member.name = inner
            yield member


# pip asks the source package's own build backend for metadata, and would first install that
# backend, CMake and Ninja to do so: half a minute. This stand-in for it answers at once.
STAND_IN = f"""
from pathlib import Path

def prepare_metadata_for_build_wheel(directory, config_settings=None):
    info = Path(directory, "{SDIST_NAME.replace("-", "_")}-{SDIST_VERSION}.dist-info")
    info.mkdir()
    lines = "Metadata-Version: 2.1", "Name: {SDIST_NAME}", "Version: {SDIST_VERSION}", ""
    (info / "METADATA").write_text("\\n".join(lines))
    return info.name
"""


def download(folder: Path) -> Path:
    """Download the source package as this user's pip is set up: index, proxy, certificates."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", SDIST_NAME]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(folder)]
    command += [f"{SDIST_NAME}=={SDIST_VERSION}"]
    backend = folder / "stand-in" / "scikit_build_core"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build.py").write_text(STAND_IN)
    search = [str(backend.parent), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search))}
    try:
        run([*command, "--no-build-isolation"], env=environ)
    except BuildError:
        try:
            run(command)
        except BuildError as error:
            raise BuildError(
                f"could not get ggml's sources: {error}\nWithout a package index, check out the "
                "submodule instead: git submodule update --init"
            ) from None
    return next(folder.glob("*.tar.gz"))


# ------------------------------------------------------------------------------- ggml's libraries


def cmake_arguments(options: Options, vulkan: bool, commit: str) -> list[str]:
    """Return the arguments that configure ggml."""
    portable = options.cpu == "portable"
    settings: dict[str, bool | str] = {
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": True,
        "CMAKE_BUILD_WITH_INSTALL_RPATH": True,  # the libraries are copied, CMake installs nothing
        "CMAKE_INSTALL_RPATH": "@loader_path" if IS_MAC else "$ORIGIN",
        "GGML_BUILD_TESTS": False,
        "GGML_BUILD_EXAMPLES": False,
        "GGML_CCACHE": shutil.which("ccache") is not None,
        "GGML_OPENMP": False,  # the only thread pool is ggml's own
        "GGML_VULKAN": vulkan,
        "GIT_EXE": "OFF",  # git would answer for whatever repository lies around the sources
        "GGML_BUILD_COMMIT": commit[:7],
        "GGML_NATIVE": not portable,
        # Every variant of the CPU backend, each a plug-in; pyggml/_ffi loads the best of them.
        "GGML_BACKEND_DL": portable,
        "GGML_CPU_ALL_VARIANTS": portable,
    }
    include = options.vulkan_include or newer_vulkan_headers()
    if vulkan and include:
        settings["Vulkan_INCLUDE_DIR"] = str(Path(include).resolve())
    words = {True: "ON", False: "OFF"}
    return [
        *(f"-D{k}={words[v] if isinstance(v, bool) else v}" for k, v in settings.items()),
        *options.cmake_args,
    ]


def build_libraries(source: Path, arguments: list[str], target: Path, verbose: bool) -> None:
    """Configure and build ggml; put each library into the target, by the name others load."""
    cpus = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(len(cpus))
    environ = {
        **os.environ,
        "CC": shlex.join(compiler("C")),
        "CXX": shlex.join(compiler("C++")),
        "CFLAGS": f"{os.environ.get('CFLAGS', '')} -include {shlex.quote(str(RELAX))}",
    }
    with tempfile.TemporaryDirectory(prefix="pyggml-") as folder:
        ninja = f"-DCMAKE_MAKE_PROGRAM={ninja_command()}"
        configure = ["-S", str(source), "-B", folder, "-G", "Ninja", ninja, *arguments]
        for step in (configure, ["--build", folder, "--parallel", jobs]):
            run([*cmake_command(), *step], show=verbose, env=environ)
        for library in loadable_libraries(Path(folder)):
            shutil.copyfile(library, target / library.name)


def loadable_libraries(folder: Path) -> list[Path]:
    """Pick one name of each built library: of libx.so, libx.so.0 and libx.so.0.20.2 the second.

    That is the SONAME, which others load it by; a wheel keeps no links, so one name has to do.
    """
    names: dict[Path, list[Path]] = {}
    for path in sorted([*folder.glob("src/**/lib*"), *folder.glob("bin/lib*")]):
        if re.search(r"\.(so|dylib)(\.[\d.]+)?$", path.name):
            names.setdefault(path.resolve(), []).append(path)
    soname = re.compile(r".*(\.so\.\d+|[^.\d]\.\d+\.dylib)")
    return [next((p for p in n if soname.fullmatch(p.name)), n[0]) for n in names.values()]


def linked_libraries(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the libraries that the module is linked with, and the CPU backend's plug-ins.

    In a portable build every backend is a plug-in. pyggml/_ffi loads the CPU variant that suits the
    CPU before it loads the module, whose calls of ggml's CPU functions are bound to it then.
    """
    libraries = sorted(p for p in folder.iterdir() if p.name.startswith("lib"))
    variants = [p for p in libraries if p.name.startswith("libggml-cpu-")]
    if variants:
        libraries = [p for p in libraries if re.match(r"libggml(-base)?\.", p.name)]
    return libraries, variants


def defined_symbols(library: Path) -> set[str]:
    """Return the names that a library defines for others."""
    if not shutil.which("nm"):
        raise missing("nm", "list the functions of ggml's libraries", GET_COMPILERS)
    listing = run(["nm", *(["-gU"] if IS_MAC else ["-D", "--defined-only"]), str(library)])
    names = {line.split()[-1].partition("@")[0] for line in listing.splitlines() if line.strip()}
    return {name[1:] for name in names} if IS_MAC else names


# ------------------------------------------------------------------------------- the declarations


def preprocess(cc: list[str], include: Path, headers: Iterable[str]) -> str:
    """Return what stands in the given headers themselves, preprocessed; #define lines are kept."""
    text = run(
        [*cc, f"-I{include}", "-D__attribute__(x)=", "-E", "-dD", "-x", "c", "-"],
        input="".join(f'#include "{header}"\n' for header in headers),
    )
    wanted, keep, lines = set(headers), False, []
    for line in text.splitlines():
        marker = re.match(r'# \d+ "([^"]*)"', line)
        if marker:
            keep = Path(marker.group(1)).name in wanted
        elif keep:
            lines.append(line)
    return "\n".join(lines)


def statements(text: str) -> Iterator[str]:
    """Split C into top-level declarations, blanks folded; a function body ends one, as ';' does."""
    start = depth = 0
    for i, character in enumerate(text):
        depth += {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}.get(character, 0)
        if depth == 0 and character in ";}":
            statement = " ".join(text[start : i + 1].split())
            if character == ";" or re.match(r"[^{=]*\) ?\{", statement):
                yield statement
                start = i + 1


def declarations(text: str, defined: set[str]) -> tuple[str, list[str]]:
    """Turn preprocessed headers into cffi's declarations; list the functions nobody defines."""
    kept: dict[str, None] = {}  # in order, each once: some typedefs stand in two headers
    undefined = []
    constant = r"^#define (GG(?:ML|UF)_\w+) \(?-?(?:0[xX][\da-fA-F]+|\d+)[uUlL]*\)?[ \t]*$"
    for name in re.findall(constant, text, re.MULTILINE):
        kept[f"#define {name} ..."] = None
    for statement in statements(re.sub(r"^#.*$", "", text, flags=re.MULTILINE)):
        if statement.startswith(("_Static_assert", "static_assert")) or statement.endswith("}"):
            continue  # an inline function has no address to call
        statement = re.sub(r"\b(extern|__restrict|restrict|__extension__)\b ?", "", statement)
        statement = re.sub(r"^(static const [^=]*?) ?=.*;", r"\1;", statement)
        statement = re.sub(r"\[[^\]]*sizeof[^\]]*\]", "[...]", statement)  # the compiler knows it
        function = re.match(r"(?!typedef\b)[^({=]*?(\w+) ?\(", statement)
        if function and function.group(1) not in defined:
            undefined.append(function.group(1))
        elif statement != ";":
            kept[statement] = None
    return "\n".join(kept) + "\n", undefined


# ------------------------------------------------------------------------------------- the module

# Called by C, written in Python in pyggml/_ffi/__init__.py.
CALLBACKS = """
extern "Python+C" {
    int pg_on_poll(void);
    void pg_on_abort(const char * message);
    void pg_on_log(enum ggml_log_level level, const char * text, void * user_data);
}
"""


def read_version(path: Path, pattern: str) -> str:
    """Read a version, in one or more groups of a pattern, from a file."""
    found = re.search(pattern, path.read_text(), re.DOTALL)
    if found is None:
        raise BuildError(f"no version found in {path}")
    return ".".join(found.groups())


def kernel_flags(cpu: str) -> list[str]:
    """Return the flags that optimise the kernels; no -ffast-math: NaN and infinity must stay."""
    flags = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"]
    return [*flags, NATIVE_FLAG] if cpu == "native" else flags


@dataclasses.dataclass(frozen=True)
class Plan:
    """Hold all that goes into a build: what it needs, and the cache keys made from it."""

    options: Options
    source: Path
    arguments: list[str]  # CMake's
    record: dict[str, str]  # compiled into the module, and compared when it is imported
    features: dict[str, list[str]]  # of the CPU; empty in a portable build
    libraries: dict[str, Any]  # what ggml's libraries are made from
    module: dict[str, Any]  # what the module is made from, besides these


def make_plan(options: Options) -> Plan:
    """Find the tools and the sources, and gather what the cache keys depend on."""
    cc, cxx = compiler("C"), compiler("C++")
    python_headers()
    vulkan = choose_vulkan(options, cc)
    source, source_hash, commit = ggml_source()
    arguments = cmake_arguments(options, bool(vulkan), commit)
    features = cpu_features(cc) if options.cpu == "native" else {}
    numbers = ".*?".join(rf"GGML_VERSION_{part} (\d+)" for part in ("MAJOR", "MINOR", "PATCH"))
    record = {
        "PYGGML_BUILT_VERSION": read_version(ROOT / "pyggml/_version.py", r'__version__ = "(.*?)"'),
        "PYGGML_BUILT_GGML_VERSION": read_version(source / "CMakeLists.txt", numbers),
        "PYGGML_BUILT_GGML_COMMIT": commit,
    }
    libraries = {
        "source": [source_hash, hash_of(RELAX)],
        "arguments": arguments,
        "features": features,
        "compilers": [run([*command, "--version"]) for command in (cc, cxx)],
        "vulkan": vulkan,
        "flags": [os.environ.get(name, "") for name in ("CFLAGS", "CXXFLAGS", "LDFLAGS")],
        "platform": sysconfig.get_platform(),
        "layout": 1,  # to be raised when build_libraries puts other files there
    }
    module = {
        "sources": hash_of(*sorted(KERNELS.glob("*.[ch]*")), Path(__file__)),
        "record": record,
        "cffi": python_package("cffi", "generate the module that Python loads")[1],
        "openblas": python_package("scipy_openblas32", "multiply matrices fast")[1],
        "python": sysconfig.get_config_var("SOABI"),
    }
    return Plan(options, source, arguments, record, features, libraries, module)


def build_module(plan: Plan, libraries: Path, target: Path) -> None:
    """Generate the module's C, compile it and the kernels, link all with ggml and OpenBLAS."""
    import cffi

    cc, include = compiler("C"), plan.source / "include"
    blas, _ = python_package("scipy_openblas32", "multiply matrices fast")
    linked, variants = linked_libraries(libraries)
    defined = set().union(*map(defined_symbols, linked))
    if variants:  # whichever is loaded has to have them
        defined |= set.intersection(*map(defined_symbols, variants))
    own = [f"{p.name[3:].partition('.')[0]}.h" for p in linked]  # libggml-vulkan.so.0: its header
    headers = [*HEADERS, *(h for h in own if h not in HEADERS and (include / h).is_file())]
    text, undefined = declarations(preprocess(cc, include, headers), defined)
    if undefined:
        say(f"declared by ggml but defined nowhere, so left out: {', '.join(undefined)}")
    ffi = cffi.FFI()
    ffi.cdef(text)
    ffi.cdef((KERNELS / "kernels.h").read_text())
    ffi.cdef(CALLBACKS + "".join(f"extern const char *const {name};\n" for name in plan.record))
    ffi.set_source(
        "pyggml._ffi._ggml",
        "".join(f'#include "{header}"\n' for header in (*headers, "kernels.h"))
        + "".join(f'const char *const {k} = "{v}";\n' for k, v in plan.record.items()),
    )
    with tempfile.TemporaryDirectory(prefix="pyggml-") as folder:
        with contextlib.redirect_stdout(io.StringIO()):  # it says what it writes
            ffi.emit_c_code(f"{folder}/_ggml.c")
        includes = [f"-I{p}" for p in (KERNELS, include, blas / "include", python_headers())]
        c_flags, cpp_flags = (shlex.split(os.environ.get(n, "")) for n in ("CFLAGS", "CXXFLAGS"))
        as_c = [*cc, "-std=gnu11"]
        as_cpp = [*compiler("C++"), "-std=gnu++17", "-O1", "-Wall", *cpp_flags]
        optimised = ["-Wall", *kernel_flags(plan.options.cpu), *c_flags]
        kernels = sorted(KERNELS.glob("*.c*"))
        for file, own_command in (
            # Thin wrappers, some of them of functions that ggml marks as deprecated.
            (Path(folder, "_ggml.c"), [*as_c, "-O1", "-w", *c_flags]),
            *((file, as_cpp if file.suffix == ".cpp" else [*as_c, *optimised]) for file in kernels),
        ):
            command = [*own_command, "-c", "-fPIC", *includes, str(file)]
            sys.stderr.write(run([*command, "-o", f"{folder}/{file.stem}.o"]))
        origin = "@loader_path" if IS_MAC else "$ORIGIN"
        mac_kind = ["-bundle", "-undefined", "dynamic_lookup"]
        run(
            [
                *(compiler("C++") + (mac_kind if IS_MAC else ["-shared", "-Wl,--as-needed"])),
                *(f"{folder}/{name}.o" for name in ("_ggml", *(file.stem for file in kernels))),
                *("-o", str(target / MODULE_FILE), *map(str, linked)),
                *(f"-L{blas / 'lib'}", "-lscipy_openblas", "-lm"),
                *(f"-Wl,-rpath,{origin}/{p}" for p in ("lib", "../../scipy_openblas32/lib")),
                *shlex.split(os.environ.get("LDFLAGS", "")),
            ]
        )


def build(options: Options) -> None:
    """Put ggml's libraries and the module into pyggml/_ffi, from the cache where possible."""
    if sys.platform == "win32":
        raise BuildError("Windows itself is not supported yet; WSL, the Linux in Windows, is")
    plan = make_plan(options)

    def make_libraries(target: Path) -> None:
        version = plan.record["PYGGML_BUILT_GGML_VERSION"]
        say(f"building ggml {version}: about a minute, several with Vulkan; cached from then on")
        build_libraries(plan.source, plan.arguments, target, options.verbose)
        if plan.features.get("flags"):  # compared at import: other CPUs would crash
            (target / "cpu_flags.txt").write_text(" ".join(plan.features["flags"]))

    libraries_key = key_of(plan.libraries)
    libraries = cached("libraries", libraries_key, make_libraries)

    def make_module(target: Path) -> None:
        say("generating and compiling the module")
        build_module(plan, libraries, target)

    module_key = key_of({**plan.module, "libraries": libraries_key})
    module = cached("module", module_key, make_module)
    state = json.dumps({"libraries": libraries_key, "module": module_key})
    folder = PACKAGE / "lib"
    stamp = folder / "build.json"
    files = list(libraries.iterdir())
    there = [folder / file.name for file in files] + [PACKAGE / MODULE_FILE, stamp]
    if all(path.is_file() for path in there) and stamp.read_text() == state:
        say("up to date")
        return
    stamp.unlink(missing_ok=True)  # until all files are of this build
    install(folder, files)
    install(PACKAGE, [module / MODULE_FILE])
    for path in folder.iterdir():  # of an earlier build; ".name" is another build's, half written
        if path not in there and not path.name.startswith("."):
            path.unlink(missing_ok=True)
    stamp.write_text(state)
    say(f"built into {PACKAGE}")


# -------------------------------------------------------------------------- the hooks of PEP 517


@contextlib.contextmanager
def prepared(settings: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Build the native part, then set setuptools to make a wheel for this platform's stable ABI."""
    import setuptools

    try:
        build(read_options(settings, os.environ))
    except BuildError as error:
        sys.exit(f"pyggml: {error}")  # without a traceback: the message says it all
    with tempfile.TemporaryDirectory(prefix="pyggml-") as folder:
        # A build folder of its own, for in the usual one libraries of earlier builds would linger.
        extra = Path(folder, "extra.cfg")
        extra.write_text(
            f"[build]\nbuild_base={folder}/build\n[bdist_wheel]\npy_limited_api={STABLE_ABI}\n"
        )
        before = os.environ.get("DIST_EXTRA_CONFIG")
        os.environ["DIST_EXTRA_CONFIG"] = str(extra)
        # setuptools calls a wheel platform-specific only where it compiled something itself.
        setuptools.Distribution.has_ext_modules = lambda self: True
        try:
            yield {k: v for k, v in (settings or {}).items() if k not in OPTION_HELP}
        finally:
            os.environ.pop("DIST_EXTRA_CONFIG")
            if before is not None:
                os.environ["DIST_EXTRA_CONFIG"] = before


def build_wheel(directory: str, settings: Any = None, metadata: str | None = None) -> str:
    """Build a wheel."""
    from setuptools import build_meta

    with prepared(settings) as rest:
        return build_meta.build_wheel(directory, rest, metadata)


def build_editable(directory: str, settings: Any = None, metadata: str | None = None) -> str:
    """Build an editable wheel, which points at this source tree."""
    from setuptools import build_meta

    with prepared(settings) as rest:
        return build_meta.build_editable(directory, rest, metadata)


def build_sdist(directory: str, settings: Any = None) -> str:
    """Build a source archive: setuptools' own, with what it leaves out, without what was built."""
    from setuptools import build_meta

    rest = {k: v for k, v in (settings or {}).items() if k not in OPTION_HELP}
    name = build_meta.build_sdist(directory, rest)
    made = Path(directory, name)
    beside = made.with_name(f".{name}")
    top = name[: -len(".tar.gz")]
    with tarfile.open(made) as old, tarfile.open(beside, "w:gz") as new:
        for member in old.getmembers():
            if not re.search(r"/_ffi/(lib(/|$)|.*\.so$)", member.name):
                new.addfile(member, old.extractfile(member) if member.isfile() else None)
        present = set(old.getnames())
        folders = ("tests", "examples", "benchmarks", "docs", "tools")
        for part in ("build_ggml.py", "Makefile", *folders):
            for path in sorted([ROOT / part, *(ROOT / part).rglob("*")]):
                inside = f"{top}/{path.relative_to(ROOT).as_posix()}"
                if path.is_file() and path.suffix != ".pyc" and inside not in present:
                    new.add(path, inside, recursive=False)
    beside.replace(made)
    return name


def _delegate(hook: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        from setuptools import build_meta

        return getattr(build_meta, hook)(*arguments)

    call.__name__ = hook
    call.__doc__ = f"Do what setuptools' hook {hook} does."
    return call


get_requires_for_build_wheel = _delegate("get_requires_for_build_wheel")
get_requires_for_build_editable = _delegate("get_requires_for_build_editable")
get_requires_for_build_sdist = _delegate("get_requires_for_build_sdist")
prepare_metadata_for_build_wheel = _delegate("prepare_metadata_for_build_wheel")
prepare_metadata_for_build_editable = _delegate("prepare_metadata_for_build_editable")


def main() -> None:
    """Build from the command line."""
    parser = argparse.ArgumentParser(
        description="Build ggml and the compiled module into pyggml/_ffi.",
        epilog=f"PYGGML_CACHE: where results are kept; here: {cache_folder()}. CC, CXX, CFLAGS, "
        "CXXFLAGS, LDFLAGS: as usual. `pip install . -C vulkan=off` takes the same options.",
    )
    for name, text in OPTION_HELP.items():
        bare: dict[str, Any] = {"nargs": "?", "const": "1"} if name == "verbose" else {}
        parser.add_argument(f"--{name}", help=f"{text} [{environment_name(name)}]", **bare)
    given = {name.replace("_", "-"): value for name, value in vars(parser.parse_args()).items()}
    try:
        build(read_options({k: v for k, v in given.items() if v is not None}, os.environ))
    except BuildError as error:
        sys.exit(f"pyggml: {error}")


if __name__ == "__main__":
    main()
