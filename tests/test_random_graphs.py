"""Random small networks from the whole op table: cpu against reference, value and gradients.

PYGGML_RANDOM_GRAPHS sets how many are tried (200); with it they differ from run to run.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from op_table import ROWS, apart_from_zero, normal, positive

import pyggml as pg
from pyggml import ag

COUNT = int(os.environ.get("PYGGML_RANDOM_GRAPHS", "200"))
TOLERANCE = 2e-4  # of the largest gradient: errors of several ops in a row add up

# Values that flow from op to op are squashed into the domain that the next op wants.
SQUASH = {
    normal: lambda t: t * 1.5,
    positive: lambda t: t * 0.9 + 1.1,
    apart_from_zero: lambda t: t + ag.sign(ag.detach(t)) * 0.2,
}


def fitted(value, shape, domain, generator):
    """Return a value turned into another shape and domain."""
    flat = ag.reshape(value, (1, -1))
    mixer = generator.standard_normal((flat.size, int(np.prod(shape)))) / np.sqrt(flat.size)
    mixed = ag.matmul(flat, ag.tensor(mixer, device=value.device))
    return ag.reshape(SQUASH[domain](ag.tanh(mixed)), shape)


def network(choices, seed):
    """Return a function from fresh parameters to the loss of the network that choices describe."""

    def build():
        generator = np.random.default_rng(seed)
        params, values = [], []
        for row_index, picks in choices:
            row = ROWS[row_index]
            arrays = row.inputs(seed)
            domains = [*row.domains, *[row.domains[-1]] * (len(arrays) - len(row.domains))]
            inputs = []
            for array, domain, pick in zip(arrays, domains, picks, strict=False):
                if array.dtype.kind == "f" and domain in SQUASH and values and pick:
                    source = values[pick % len(values)]
                    inputs.append(fitted(source, array.shape, domain, generator))
                else:
                    is_float = array.dtype.kind == "f"
                    made = ag.tensor(array.astype(np.float32) if is_float else array)
                    made.requires_grad = is_float
                    params += [made] if is_float else []
                    inputs.append(made)
            result = row.fn(*inputs)
            values.append(ag.tanh(result))
        loss = ag.mean(values[0])
        for value in values[1:]:
            loss = loss + ag.mean(value)
        return params, loss

    return build


def evaluate(build, device):
    with pg.device(device):
        with ag.grad_tape():
            params, loss = build()
        if loss.requires_grad:
            ag.backward(loss)
        return loss.item(), [None if p.grad is None else p.grad.numpy() for p in params]


picks = st.lists(st.integers(0, 5), min_size=6, max_size=6)
networks = st.lists(st.tuples(st.integers(0, len(ROWS) - 1), picks), min_size=1, max_size=6)


@settings(
    max_examples=COUNT,
    deadline=None,
    derandomize="PYGGML_RANDOM_GRAPHS" not in os.environ,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(networks, st.integers(0, 10_000))
def test_a_random_network_has_the_references_value_and_gradients(choices, seed):
    note(f"ops: {[ROWS[index].name for index, _ in choices]}, seed {seed}")
    build = network(choices, seed)
    loss, gradients = evaluate(build, "cpu")
    right_loss, right_gradients = evaluate(build, "reference")
    assert loss == pytest.approx(right_loss, rel=TOLERANCE, abs=TOLERANCE, nan_ok=True)
    for ours, right in zip(gradients, right_gradients, strict=True):
        assert (ours is None) == (right is None)
        if ours is not None:
            scale = max(0.1, float(np.abs(right[np.isfinite(right)]).max(initial=0.0)))
            np.testing.assert_allclose(ours, right, rtol=0, atol=TOLERANCE * scale)
