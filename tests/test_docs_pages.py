"""The site: every python block of docs/*.md runs, and the API pages leave out nothing public."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import pyggml as pg

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def api() -> ModuleType:
    """docs/api_pages.py, which makes the generated pages."""
    spec = importlib.util.spec_from_file_location("api_pages", ROOT / "docs" / "api_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_python_blocks_of_a_page_run_in_order(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the files go that the page writes
    text = path.read_text(encoding="utf-8")
    blocks = [found for found in FENCE.finditer(text) if found[1] == "python"]
    names: dict[str, object] = {"__name__": "docs"}
    for block in blocks:
        # Empty lines in front make the line numbers of a traceback those of the page.
        source = "\n" * (text[: block.start()].count("\n") + 1) + block[2]
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(source, str(path), "exec"), names)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_block_says_what_it_is(path: Path) -> None:
    kinds = {found[1] for found in FENCE.finditer(path.read_text(encoding="utf-8"))}
    assert kinds <= {"python", "sh"}  # so no block escapes being run by a misspelt name


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_pages_name_only_what_there_is(path: Path) -> None:
    modules = {"ag": pg.ag, "nn": pg.nn, "optim": pg.optim, "pg": pg}
    text = path.read_text(encoding="utf-8")
    for name, rest in re.findall(r"(?<![\w./])(ag|nn|optim|pg)\.(?!md)(\w+)", text):
        assert hasattr(modules[name], rest), f"{name}.{rest}"
    for name, rest in re.findall(r"(?<![\w./])pg\.(data|train|io)\.(\w+)", text):
        assert hasattr(getattr(pg, name), rest), f"pg.{name}.{rest}"


@pytest.mark.parametrize("name", ["ag", "nn", "optim", "data", "train", "io"])
def test_every_public_name_is_on_its_api_page_with_what_it_does(api: ModuleType, name: str) -> None:
    module = importlib.import_module(f"pyggml.{name}")
    page = api.api_page(name)
    for public in getattr(module, "__all__", None) or ["DataLoader", "stack"]:
        anchor = re.escape(f"{name}.{public}")
        row = re.search(rf"^\| \[`{anchor}`\]\(#{anchor}\) \| (.*) \|$", page, re.MULTILINE)
        assert row and row[1], public
        section = re.search(rf"^### {anchor} .*?(?=^### |\Z)", page, re.DOTALL | re.MULTILINE)
        assert section, public
        for line in pg_doc_lines(getattr(module, public)):
            assert line in section[0], (public, line)


def pg_doc_lines(thing: object) -> list[str]:
    """Return the lines of a docstring's first paragraph."""
    doc = (thing.__doc__ or "").strip().split("\n\n")[0]
    assert doc
    return [line.strip() for line in doc.splitlines()]


def test_doctests_become_code_and_arguments_a_list(api: ModuleType) -> None:
    text = "Do it.\n\nArgs:\n    a: one\n        thing.\n    b: two.\n\n>>> 1 + 1\n2\n\nMore."
    assert [line for line in api.to_markdown(text).splitlines() if line] == [
        "Do it.", "- `a`: one", "  thing.", "- `b`: two.", "```pycon", ">>> 1 + 1", "2", "```",
        "More.",
    ]  # fmt: skip


def test_signatures_are_those_of_the_source(api: ModuleType) -> None:
    def function(x: Path, *, axis: int = 1, mode: str = "a") -> bool:
        raise NotImplementedError

    assert api.signature(function) == "(x: Path, *, axis: int = 1, mode: str = 'a') -> bool"
    long = api.signature(pg.optim.AdamW)
    assert long.startswith(
        "(\n    params: Parameters,\n    lr: float | Schedule = 0.001,\n    *,\n"
    )


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "api" / "ag.html").read_text(encoding="utf-8")
    assert 'id="ag.matmul"' in page
    assert (tmp_path / "site" / "examples.html").exists()
