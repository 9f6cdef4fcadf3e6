"""Install what ggml's Vulkan backend is built and tested with, on Debian and Ubuntu.

That is the shader compiler, the SPIR-V headers, the loader, and Mesa's drivers (a software one is
among them). Where the system's Vulkan headers are too old for ggml, those of its next release are
unpacked into the build's cache, headers only, where build_ggml.py finds them; nothing of that
release is installed. The archive is the one that this machine's apt is set up with.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import build_ggml
from build_ggml import BuildError

PACKAGES = ["glslc", "spirv-headers", "libvulkan-dev", "mesa-vulkan-drivers"]
NEWER = {"bullseye": "trixie", "bookworm": "trixie", "jammy": "noble"}
RELEASE_FILE = Path("/etc/os-release")


def run(*command: str, **arguments: object) -> str:
    """Run a command, showing what it prints, or return it with stdout=PIPE; raise if it fails."""
    done = subprocess.run(command, text=True, **arguments)  # type: ignore[call-overload]
    if done.returncode:
        raise BuildError(f"this command failed: {' '.join(command)}")
    return done.stdout or ""


def install() -> None:
    """Install the packages that are missing."""
    if shutil.which("apt-get") is None:
        raise BuildError("no apt-get here: the README lists the packages of other systems")
    status = ["dpkg-query", "--show", "--showformat", "${db:Status-Status}"]
    missing = [
        name
        for name in PACKAGES
        if subprocess.run([*status, name], text=True, capture_output=True).stdout != "installed"
    ]
    if not missing:
        print("vulkan-deps: installed already:", " ".join(PACKAGES))
        return
    prefix = [] if os.geteuid() == 0 else ["sudo"]
    if prefix and shutil.which("sudo") is None:
        raise BuildError(f"please install, as root: apt-get install {' '.join(missing)}")
    print("vulkan-deps: installing", " ".join(missing), flush=True)
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(*prefix, "apt-get", "update", "-qq", env=quiet)
    options = ["-y", "-qq", "--no-install-recommends"]
    run(*prefix, "apt-get", "install", *options, *missing, env=quiet)


def headers_version() -> tuple[int, int, int] | None:
    """Return the version of the Vulkan headers that a build would use."""
    folders = [str(folder) for folder in [build_ggml.newer_vulkan_headers()] if folder]
    header = build_ggml.find_header(build_ggml.compiler("C"), "vulkan/vulkan_core.h", folders)
    return build_ggml.vulkan_version(header or "")


def codename() -> str:
    """Return the name of this system's release."""
    lines = RELEASE_FILE.read_text(encoding="utf-8").splitlines()
    found = dict(line.split("=", 1) for line in lines if "=" in line)
    return found.get("VERSION_CODENAME", "").strip('"')


def archive_of(release: str, targets: str) -> str:
    """Return the address of the archive that apt has a release's main packages from.

    ``targets`` has a line "release|component|address" for each of apt's indexes.
    """
    for line in targets.splitlines():
        name, component, address = line.strip().split("|", 2)
        if (name, component) == (release, "main"):
            return address
    raise BuildError(f"apt has no source of {release} main; see /etc/apt/sources.list.d")


def get_newer_headers() -> None:
    """Unpack the next release's Vulkan headers into the build's cache."""
    release = codename()
    if release not in NEWER:
        raise BuildError(
            f"the Vulkan headers of {release or 'this system'} are too old, and no newer release "
            "is known here: get them from the Vulkan SDK and name their folder in "
            "PYGGML_VULKAN_INCLUDE"
        )
    fields = "$(RELEASE)|$(COMPONENT)|$(REPO_URI)"
    targets = run(
        "apt-get", "indextargets", "--format", fields, "Created-By: Packages",
        stdout=subprocess.PIPE,
    )  # fmt: skip
    archive = archive_of(release, targets)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # apt checks signatures as always; lists and cache are its own, so the system's stay.
        (folder / "sources.list").write_text(f"deb {archive} {NEWER[release]} main\n")
        (folder / "lists").mkdir()
        (folder / "cache").mkdir()
        settings = {
            "Dir::Etc::SourceList": folder / "sources.list",
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State::Lists": folder / "lists",
            "Dir::Cache": folder / "cache",
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
        }
        options = [f"-o{key}={value}" for key, value in settings.items()]
        print(f"vulkan-deps: getting the Vulkan headers of {NEWER[release]}", flush=True)
        run("apt-get", *options, "update", "-qq")
        run("apt-get", *options, "download", "-qq", "libvulkan-dev", cwd=folder)
        (package,) = folder.glob("libvulkan-dev_*.deb")
        run("dpkg-deb", "--extract", str(package), str(folder / "tree"))
        place = build_ggml.vulkan_headers_folder()
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder / "tree" / "usr" / "include", place)


def main() -> None:
    try:
        install()
        version = headers_version()
        if version is None or version < build_ggml.OLDEST_VULKAN_HEADERS:
            get_newer_headers()
            version = headers_version()
        print(f"vulkan-deps: Vulkan headers {'.'.join(map(str, version or ()))}")
        print("vulkan-deps: done; `make build` or `python build_ggml.py` builds with Vulkan now")
    except BuildError as error:
        sys.exit(f"vulkan-deps: {error}")


if __name__ == "__main__":
    main()
