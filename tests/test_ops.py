"""Every row of the op table, on every device: value, gradient, and the gradient of the gradient."""

from __future__ import annotations

import numpy as np
import pytest
from op_table import ROWS, Row

import pyggml as pg
from pyggml import ag, graph
from pyggml.device import CpuDevice
from pyggml.tensor import record

SEED = 20240


@pytest.fixture(scope="module")
def portable_cpu():
    """Run ops with the lowering that other devices use: ggml ops only."""
    device = CpuDevice(n_threads=1, own_kernels=False)
    yield device
    device.close()


def check(row: Row, device: object) -> None:
    ag.gradcheck(
        row.fn, row.inputs(SEED), device=device, order=row.order, seed=SEED,
        device_tolerance=row.tolerance
    )  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_op_agrees_with_central_differences_and_reference(row):
    check(row, "cpu")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_op_lowered_without_own_kernels_agrees_with_reference(row, portable_cpu):
    check(row, portable_cpu)


def test_every_op_has_a_row():
    graph.clear_nodes()  # what other tests have recorded does not count
    for row in ROWS:
        with pg.device("reference"):
            tensors = [ag.tensor(x, requires_grad=x.dtype.kind == "f") for x in row.inputs(SEED)]
            with ag.grad_tape():
                value = row.fn(*tensors)
            if value.requires_grad and value.size:
                ag.backward(value, seed=ag.tensor(np.ones(value.shape)))
    seen = {key[0].name for key in graph._nodes}
    effects = {name for name, op in graph.OPS.items() if op.mutates}  # tested by test_optim.py
    assert set(graph.OPS) - effects - seen == set()


@pytest.fixture
def double_gradient():
    """Return an op whose rule is wrong on purpose: twice the gradient of the identity."""
    op = graph.Op(
        "broken",
        shape=lambda x: graph.Spec(x.shape, x.dtype),
        lower=lambda b, x: b.contiguous(x),
        grad=lambda g, out, x: ag.mul(g, ag.add(ag.step(x), 1.0)),
        reference=lambda x: x,
    )
    yield lambda x: record(op, x)
    del graph.OPS["broken"]


def test_gradcheck_names_input_index_and_both_values_of_a_rule_broken_on_purpose(double_gradient):
    with pytest.raises(
        pg.GradCheckError, match=r"worst in input 0 at index \(1, 0\): the rule gives .*, central"
    ):
        ag.gradcheck(double_gradient, [[[-1.0], [1.0]]])


def test_gradcheck_catches_a_device_that_computes_another_value():
    def wrong_on_cpu(x):
        return x * (2.0 if x.device.name == "cpu" else 2.001)

    with pytest.raises(
        pg.GradCheckError,
        match=r"value .* on cpu differs from the reference, worst at index \(1,\)",
    ):
        ag.gradcheck(wrong_on_cpu, [[0.5, -1.5]])
