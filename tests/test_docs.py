"""Every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag, nn, optim

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(pg.__path__, "pyggml.")
    if not module.name.startswith("pyggml._ffi") and module.name != "pyggml.__main__"
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_of_a_module_run(name):
    names = {"ag": ag, "nn": nn, "np": np, "optim": optim, "pg": pg}
    flags = doctest.ELLIPSIS
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs=names, optionflags=flags)
    assert result.failed == 0


def test_every_public_name_has_a_docstring_and_every_function_of_ag_an_example():
    missing = [name for name in ag.__all__ if not (getattr(ag, name).__doc__ or "").strip()]
    assert missing == []
    functions = [name for name in ag.__all__ if name not in ("Parameter", "Tensor")]
    assert [name for name in functions if ">>>" not in (getattr(ag, name).__doc__ or "")] == []
