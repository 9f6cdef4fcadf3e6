"""What a process says that ggml ends: the assertion, the op, and where the program was."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

HEAD = """
import dataclasses
import numpy as np
import pyggml as pg
from pyggml import ag, graph
from pyggml._ffi import ffi, lib

def broken(name, lower):
    object.__setattr__(graph.OPS[name], "lower", lower)
"""


def killed(code: str) -> str:
    """Run code that ggml must end; return its standard error."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGABRT, (done.returncode, done.stderr)
    assert "please report these lines, with what `python -m pyggml` prints" in done.stderr
    return done.stderr


def test_a_wrong_call_of_a_binding_ends_with_ggmls_message_and_the_python_traceback():
    errors = killed("""
    def wrong_shape():
        context = lib.ggml_init(ffi.new("struct ggml_init_params *", {"mem_size": 1 << 16})[0])
        a = lib.ggml_new_tensor_2d(context, lib.GGML_TYPE_F32, 2, 3)
        lib.ggml_reshape_1d(context, a, 7)
    wrong_shape()
    """)
    assert "pyggml: ggml ends this process: " in errors
    assert "GGML_ASSERT(ggml_nelements(a) == ne0) failed" in errors
    assert "in wrong_shape\n" in errors
    assert "while" not in errors


def test_an_op_that_ggml_refuses_to_build_is_named():
    errors = killed("""
    broken("relu", lambda b, x: lib.ggml_reshape_1d(b.ctx, x, 7))
    y = ag.relu(ag.tensor(np.ones((2, 3))))
    y.numpy()
    """)
    assert "pyggml: while building relu([2, 3]), recorded first in <string>, line " in errors
    assert "in numpy\n" in errors


@pytest.mark.parametrize("n_threads", [1, 3])
def test_an_op_that_ggml_ends_while_it_runs_is_named(n_threads):
    errors = killed(f"""
    pg.set_num_threads({n_threads})
    # Rows that are not there: pyggml checks the numbers before, ggml while it runs.
    broken("relu", lambda b, x: lib.ggml_get_rows(b.ctx, x, rows(b)))
    def rows(b):
        place = lib.ggml_cast(b.ctx, lib.ggml_scale(b.ctx, b.made[1], 1.0), lib.GGML_TYPE_I32)
        return lib.ggml_reshape_1d(b.ctx, place, 300)
    x, far = ag.tensor(np.ones((300, 300))), ag.tensor(np.full(300, 1e6))
    y = ag.relu((x @ x) * far)
    y.numpy()
    """)
    assert "GGML_ASSERT(i01 >= 0 && i01 < ne01) failed" in errors
    assert "GET_ROWS (1, 1, 300, 300), of relu([300, 300])" in errors
    assert "in numpy\n" in errors
