"""A hook of MkDocs: makes the API pages from the docstrings, and a page of the examples.

MkDocs calls on_files when it has read the other pages. What a module's __all__ names is documented,
in the order of the files that define it, so no list has to be kept in step.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

PAGES = {
    "ag": "Tensors, the tape, and every operation.",
    "nn": "Layers: objects that hold parameters and are called.",
    "optim": "Optimizers, schedules, and what keeps gradients in bounds.",
    "data": "Batches of arrays, from whatever holds the samples.",
    "train": "The training loop, and what goes with it.",
    "io": "Files: weights and training states.",
    "pyggml": "Devices, seeds, errors: what stands in the package itself (`import pyggml as pg`).",
}


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to those that MkDocs found."""
    from mkdocs.structure.files import File

    for name in PAGES:
        files.append(File.generated(config, f"api/{name}.md", content=api_page(name)))
    files.append(File.generated(config, "examples.md", content=examples_page()))
    return files


# ---- pages ---------------------------------------------------------------------------------------


def api_page(name: str) -> str:
    """Return the page of a module: a table of all its names, then each with its docstring."""
    module = importlib.import_module("pyggml" if name == "pyggml" else f"pyggml.{name}")
    prefix = "pg" if name == "pyggml" else name
    rows, sections = [], []
    for title, names in grouped(module).items():
        sections.append(f"## {title}\n")
        for public in names:
            thing = getattr(module, public)
            anchor = f"{prefix}.{public}"
            rows.append(f"| [`{anchor}`](#{anchor}) | {summary(thing)} |")
            sections.append(entry(anchor, thing))
    table = "\n".join(["| name | what it is |", "|---|---|", *rows])
    title = "pyggml" if name == "pyggml" else f"pyggml.{name}"
    return f"# {title}\n\n{PAGES[name]}\n\n{table}\n\n" + "\n".join(sections)


def examples_page() -> str:
    """Return the page of the examples: what each one's docstring says."""
    parts = ["# Examples\n\nEach is one file; `--help` explains its flags.\n"]
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert text, f"{path.name} has no docstring"
        first, _, rest = text.partition("\n")
        parts.append(f"## {path.name}\n\n{first}\n{rest}\n")
    return "\n".join(parts)


# ---- what there is -------------------------------------------------------------------------------


def public_names(module: ModuleType) -> list[str]:
    """Return the names that a module offers, without the modules among them."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, thing in vars(module).items()
            if not name.startswith("_") and getattr(thing, "__module__", "") == module.__name__
        ]
    return [
        name
        for name in names
        if not name.startswith("__")
        and (not inspect.ismodule(getattr(module, name)) or name == "init")
    ]


def grouped(module: ModuleType) -> dict[str, list[str]]:
    """Return the names of a module under a title for each file that defines some."""
    groups: dict[str, list[str]] = {}
    for name in public_names(module):
        thing = getattr(module, name)
        home = "init" if inspect.ismodule(thing) else thing.__module__
        title = home.rpartition(".")[2].lstrip("_").replace("_", " ").capitalize()
        groups.setdefault(title, []).append(name)
    return groups


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the documented methods and properties that a class defines itself."""
    for name, thing in vars(cls).items():
        function = thing.fget if isinstance(thing, property) else thing
        function = getattr(function, "__func__", function)
        # Not inspect.getdoc: it would find the docstring of the method that is replaced.
        if not name.startswith("_") and callable(function) and function.__doc__:
            yield name, thing


# ---- Markdown ------------------------------------------------------------------------------------


def entry(anchor: str, thing: Any, level: int = 3) -> str:
    """Return the heading, signature and docstring of a thing, and of a class's methods."""
    parts = [f"{'#' * level} {anchor} {{ #{anchor} }}\n"]
    shown = signature(thing)
    if shown is not None:
        parts.append(f"```python\n{anchor}{shown}\n```\n")
    parts.append(to_markdown(inspect.getdoc(thing) or ""))
    if inspect.ismodule(thing):
        for name in public_names(thing):
            parts.append(entry(f"{anchor}.{name}", getattr(thing, name), level + 1))
    if inspect.isclass(thing) and not issubclass(thing, Exception):
        for name, member in members(thing):
            parts.append(entry(f"{anchor}.{name}", member, level + 1))
    return "\n".join(parts)


class _Shown(str):
    """A text that is shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def signature(thing: Any) -> str | None:
    """Return a signature as it stands in the source, one parameter a line where it is long."""
    if not callable(thing) or (inspect.isclass(thing) and issubclass(thing, Exception)):
        return None
    try:
        found = inspect.signature(thing)
    except ValueError:
        return None
    shown: list[str] = []
    for parameter in found.parameters.values():
        kind = parameter.kind
        if kind is kind.KEYWORD_ONLY and not any(text.startswith("*") for text in shown):
            shown.append("*")
        if parameter.name != "self":
            shown.append(str(parameter.replace(annotation=_shown(parameter.annotation))))
    result = ""
    if not inspect.isclass(thing) and found.return_annotation is not found.empty:
        result = f" -> {found.return_annotation}"
    short = f"({', '.join(shown)}){result}"
    if len(short) <= 80:
        return short
    return "(\n" + "".join(f"    {text},\n" for text in shown) + f"){result}"


def _shown(annotation: Any) -> Any:
    return _Shown(annotation) if isinstance(annotation, str) else annotation


def summary(thing: Any) -> str:
    """Return the first sentence of a docstring, for a table."""
    paragraph = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    return re.split(r"(?<! al)[.:] (?=[A-Z])", paragraph)[0].rstrip(".:").replace("|", "\\|")


def to_markdown(text: str) -> str:
    """Return a docstring as Markdown: doctests become code, and arguments a list."""
    lines: list[str] = []
    state = "text"
    for line in text.splitlines():
        if line.startswith(">>>") and state != "code":
            lines += ["", "```pycon"]
            state = "code"
        elif state == "code" and not line.strip():
            lines.append("```")
            state = "text"
        elif line == "Args:":
            line, state = "", "arguments"
        elif state == "arguments" and line and not line.startswith(" "):
            state = "text"
        if state == "arguments" and line:
            found = re.match(r"    ([*\w, ]+): (.*)", line)
            lines.append(f"- `{found[1]}`: {found[2]}" if found else "  " + line.strip())
        else:
            lines.append(line)
    if state == "code":
        lines.append("```")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(api_page(sys.argv[1]))
