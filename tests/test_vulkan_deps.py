"""`make vulkan-deps`: what it decides, without installing anything."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEADER = """#define VK_HEADER_VERSION 309
#define VK_HEADER_VERSION_COMPLETE VK_MAKE_API_VERSION(0, 1, 4, VK_HEADER_VERSION)
"""


@pytest.fixture
def deps(monkeypatch, tmp_path):
    """Return the script as a module, with a cache and a system of its own."""
    spec = importlib.util.spec_from_file_location("vulkan_deps", ROOT / "tools" / "vulkan_deps.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("PYGGML_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "RELEASE_FILE", tmp_path / "os-release")
    return module


def put_headers(folder: Path) -> Path:
    place = folder / "vulkan-headers"
    (place / "vulkan").mkdir(parents=True)
    (place / "vulkan" / "vulkan_core.h").write_text(HEADER)
    return place


def test_the_archive_is_the_one_that_apt_is_set_up_with(deps):
    targets = "sid|main|mirror:/other\nbookworm|contrib|mirror:/a\nbookworm|main|mirror:/b\n"
    assert deps.archive_of("bookworm", targets) == "mirror:/b"
    with pytest.raises(deps.BuildError, match=r"apt has no source of trixie main"):
        deps.archive_of("trixie", targets)


def test_the_release_is_read_and_an_unknown_one_refused(deps):
    deps.RELEASE_FILE.write_text('NAME="Debian"\nVERSION_CODENAME="bookworm"\n')
    assert deps.codename() == "bookworm"
    deps.RELEASE_FILE.write_text("NAME=Other\n")
    with pytest.raises(deps.BuildError, match=r"this system are too old, .* PYGGML_VULKAN_INCLUDE"):
        deps.get_newer_headers()


def test_without_apt_the_readme_is_named(deps, monkeypatch):
    monkeypatch.setattr(deps.shutil, "which", lambda name: None)
    with pytest.raises(deps.BuildError, match=r"no apt-get here: the README lists"):
        deps.install()


def test_a_build_finds_the_headers_that_were_got(deps, tmp_path):
    build_ggml = deps.build_ggml
    assert build_ggml.newer_vulkan_headers() == ""
    place = put_headers(tmp_path)
    assert build_ggml.newer_vulkan_headers() == str(place)
    assert deps.headers_version() == (1, 4, 309)
    options = build_ggml.Options(vulkan="on")
    arguments = build_ggml.cmake_arguments(options, True, "0" * 40)
    assert f"-DVulkan_INCLUDE_DIR={place}" in arguments
    given = build_ggml.Options(vulkan="on", vulkan_include="/mine")
    assert "-DVulkan_INCLUDE_DIR=/mine" in build_ggml.cmake_arguments(given, True, "0" * 40)


def test_no_address_is_written_in_the_script(deps):
    text = Path(deps.__file__).read_text(encoding="utf-8")
    assert not re.search(r"https?:|\.(org|com|net)\b", text)
