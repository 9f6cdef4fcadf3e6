"""No user's mistake ends the process: each one is tried in a child process and must be a Python
exception.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

MISTAKES = {
    # name: (statement, exception, part of the message)
    "inner sizes": (
        "ag.tensor(np.ones((2, 3))) @ ag.tensor(np.ones((2, 3)))",
        "ShapeError",
        "matmul: inner sizes must agree; got (2, 3) @ (2, 3), 3 != 2; did you mean b.T?",
    ),
    "batch sizes": (
        "np.ones((2, 3, 4)) @ ag.tensor(np.ones((3, 4, 5)))",
        "ShapeError",
        "matmul: shapes must match or be 1",
    ),
    "matmul by a number": ("ag.tensor([1.0]) @ 2.0", "ShapeError", "use * to scale"),
    "shapes that do not broadcast": (
        "ag.tensor(np.ones((2, 3))) + ag.tensor(np.ones((2, 4)))",
        "ShapeError",
        "add: shapes must match or be 1 axis by axis, from the last; got (2, 3) and (2, 4), 3 != 4",
    ),
    "a multiple that ggml would repeat": (
        "ag.tensor(np.ones((2, 4))) * ag.tensor(np.ones((2, 2)))",
        "ShapeError",
        "mul: shapes must match or be 1",
    ),
    "reshape to another count": (
        "ag.tensor(np.ones((2, 3))).reshape(4)",
        "ShapeError",
        "reshape: (2, 3) has 6 elements, (4,) has 4",
    ),
    "reshape with two unknowns": (
        "ag.tensor(np.ones(4)).reshape(-1, -1)",
        "ShapeError",
        "one of them may be -1",
    ),
    "reshape with an indivisible unknown": (
        "ag.tensor(np.ones(6)).reshape(4, -1)",
        "ShapeError",
        "cannot hold",
    ),
    "reshape to nothing": (
        "ag.tensor(np.ones(6)).reshape(0, 6)",
        "ShapeError",
        "sizes must be positive",
    ),
    "reshape to a fraction": ("ag.reshape(ag.tensor(np.ones(6)), 2.5)", "TypeError", ""),
    "reshape to five dimensions": (
        "ag.tensor(np.ones(2)).reshape(1, 1, 1, 1, 2)",
        "ShapeError",
        "at most 4 dimensions",
    ),
    "five dimensions": ("ag.tensor(np.ones((1,) * 5))", "ShapeError", "at most 4 dimensions"),
    "five dimensions from a product": (
        "ag.broadcast_to(ag.tensor([1.0]), (1, 1, 1, 1, 1))",
        "ShapeError",
        "at most 4 dimensions",
    ),
    "broadcast to fewer": (
        "ag.broadcast_to(ag.tensor(np.ones((2, 3))), (3,))",
        "ShapeError",
        "cannot grow",
    ),
    "an axis that is not there": (
        "ag.sum(ag.tensor([1.0]), axis=1)",
        "ShapeError",
        "axis 1 does not exist in 1 dimensions",
    ),
    "an axis twice": (
        "ag.sum(ag.tensor([[1.0]]), axis=(0, -2))",
        "ShapeError",
        "each axis at most once",
    ),
    "an axis that is no integer": (
        "ag.sum(ag.tensor([1.0]), axis=0.5)",
        "DTypeError",
        "axis must be an integer",
    ),
    "permute with a repeated axis": (
        "ag.permute(ag.tensor([[1.0]]), (0, 0))",
        "ShapeError",
        "each of the 2 axes exactly once",
    ),
    "transpose with one axis": (
        "ag.transpose(ag.tensor([[1.0]]), 0)",
        "ShapeError",
        "give both axes or none",
    ),
    "an unknown dtype": (
        "ag.tensor([1.0], dtype='float8')",
        "DTypeError",
        "pyggml has float32, int32",
    ),
    "complex data": ("ag.tensor([1j])", "DTypeError", "needs real numbers"),
    "integers in arithmetic": ("ag.relu(ag.tensor([1, 2]))", "DTypeError", "relu: needs float32"),
    "labels below 0": (
        "ag.softmax_cross_entropy(np.ones((2, 3)), [0, -1])",
        "IndexRangeError",
        "softmax_cross_entropy: labels must be in [0, 3); got -1",
    ),
    "labels too high": (
        "ag.softmax_cross_entropy(np.ones((2, 3)), [0, 3])",
        "IndexRangeError",
        "got 3",
    ),
    "labels far too high": (
        "ag.softmax_cross_entropy(np.ones((2, 3)), [0, 999999])",
        "IndexRangeError",
        "got 999999",
    ),
    "labels as tensor too high": (
        "ag.softmax_cross_entropy(np.ones((2, 3)), ag.tensor([0, 3]))",
        "IndexRangeError",
        "got 3",
    ),
    "labels that are fractions": (
        "ag.softmax_cross_entropy(np.ones((2, 3)), [0.0, 1.0])",
        "DTypeError",
        "must be integers",
    ),
    "labels of another shape": (
        "ag.softmax_cross_entropy(np.ones((2, 3)), [0, 1, 2])",
        "ShapeError",
        "need labels of shape (2,)",
    ),
    "logits without classes": (
        "ag.softmax_cross_entropy(1.0, [0])",
        "ShapeError",
        "need a class axis",
    ),
    "an unknown reduction": (
        "ag.mse_loss([1.0], [1.0], reduction='avg')",
        "SettingError",
        "must be 'mean', 'sum' or 'none'",
    ),
    "smoothing above 1": (
        "ag.softmax_cross_entropy(np.ones((2, 3)), [0, 1], label_smoothing=2)",
        "SettingError",
        "label_smoothing must be in [0, 1]",
    ),
    "losses of two shapes": (
        "ag.mse_loss(np.ones((2, 1)), np.ones(2))",
        "ShapeError",
        "must have one shape",
    ),
    "backward of a constant": (
        "ag.backward(ag.tensor(1.0))",
        "GradError",
        "does not depend on a parameter on a tape",
    ),
    "backward of a number": (
        "ag.backward(1.0)",
        "DTypeError",
        "backward: needs a Tensor; got float",
    ),
    "a tensor made by hand": ("ag.Tensor()", "TypeError", "make one with ag.tensor"),
    "a layer without inputs": (
        "nn.Linear(0, 3)",
        "SettingError",
        "Linear: in_features must be a positive integer",
    ),
    "input that does not fit a layer": (
        "nn.Linear(3, 2)(ag.tensor(np.ones((5, 4))))",
        "ShapeError",
        "matmul: inner sizes",
    ),
    "weights of another model": (
        "nn.Linear(3, 2).load_state_dict({'weight': np.ones((2, 4)), 'scale': 1.0})",
        "ShapeError",
        "load_state_dict: missing bias; unexpected scale; weight has shape (2, 4), not (2, 3)",
    ),
    "an unknown device": (
        "pg.set_device('cuda')",
        "DeviceError",
        "this process has cpu, reference",
    ),
}

CHILD = """
import sys
import numpy as np
import pyggml as pg
from pyggml import ag, nn, optim
try:
    {statement}
except Exception as error:
    kinds = [kind.__name__ for kind in type(error).__mro__]
    assert {exception!r} in kinds, (kinds, error)
    assert {message!r} in str(error), error
    assert (ag.tensor([1.0]) * 2.0).tolist() == [2.0]  # the library is usable afterwards
    print("caught")
"""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_exception_on_its_line_and_not_the_end_of_the_process(name):
    statement, exception, message = MISTAKES[name]
    program = textwrap.dedent(CHILD).format(
        statement=statement, exception=exception, message=message
    )
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (child.returncode, child.stdout) == (0, "caught\n"), child.stderr


def test_ctrl_c_in_a_long_run_arrives_within_a_second_and_the_next_step_works():
    program = """
import os, signal, threading, time
import numpy as np
from pyggml import ag
x = ag.tensor(np.ones((512, 512)) / 512)
y = x
for _ in range(20_000):
    y = y @ x
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
started = time.monotonic()
try:
    y.numpy()
except KeyboardInterrupt:
    assert time.monotonic() - started < 1.5, time.monotonic() - started
    assert (ag.tensor([1.0]) * 2.0).tolist() == [2.0]
    print("interrupted")
"""
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (child.returncode, child.stdout) == (0, "interrupted\n"), child.stderr


def test_a_forked_child_can_train_too():
    program = """
import os
import numpy as np
from pyggml import ag
w = ag.param(np.ones((300, 300)))
def loss():
    with ag.grad_tape():
        value = ag.mean(w @ w)
    w.grad = None
    ag.backward(value)
    return value.item(), float(w.grad.numpy().sum())
before = loss()
child = os.fork()
if child == 0:
    assert loss() == before
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert loss() == before
print("both")
"""
    child = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (child.returncode, child.stdout) == (0, "both\n"), child.stderr
