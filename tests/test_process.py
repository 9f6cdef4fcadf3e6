"""Other processes, other interpreters, and a second copy of the package in one process."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import child

import pyggml

WORKERS = """
import multiprocessing, sys
import numpy as np
import pyggml as pg
from pyggml import ag

def work(seed):
    w = ag.param(np.full((50, 50), seed))
    with ag.grad_tape():
        loss = ag.mean(w @ w)
    return float(ag.backward(loss)[w].numpy().sum())

if __name__ == "__main__":
    alone = [work(seed) for seed in (1.0, 2.0, 3.0)]
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        print(pool.map(work, (1.0, 2.0, 3.0)) == alone)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_worker_processes_compute_what_this_one_does(tmp_path, method):
    program = tmp_path / "workers.py"
    program.write_text(WORKERS)
    done = subprocess.run(
        [sys.executable, program, method], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.parametrize("first", ["", "import pyggml"])
def test_a_subinterpreter_is_refused_and_the_main_one_works_on(first):
    printed = child(
        """
        import sys
        try:
            import _interpreters as interpreters  # Python 3.13
        except ImportError:
            import _xxsubinterpreters as interpreters
        exec(sys.argv[1])
        code = '''
        try:
            import pyggml
        except ImportError as error:
            print(error, flush=True)
        '''
        other = interpreters.create()
        interpreters.run_string(other, code)
        interpreters.destroy(other)
        import pyggml
        print((pyggml.ag.tensor([1.0]) * 2.0).tolist())
        """,
        first,
    )
    refusal, after = printed.splitlines()
    assert refusal.startswith("pyggml works in the main interpreter only")
    assert after == "[2.0]"


def test_two_copies_of_the_package_work_side_by_side(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(pyggml.__file__).parent, tmp_path / "pyggml", ignore=ignored)
    printed = child(
        """
        import sys
        import numpy as np

        def train(pg):
            w = pg.ag.param(np.eye(4))
            with pg.ag.grad_tape():
                loss = pg.ag.mean(w @ w)
            pg.ag.backward(loss)
            pg.optim.SGD([w], lr=0.5).step()
            return w.numpy().tolist()

        import pyggml as first
        alone = train(first)
        for name in [name for name in sys.modules if name.split(".")[0] == "pyggml"]:
            del sys.modules[name]
        sys.path.insert(0, sys.argv[1])
        import pyggml as second
        print(second.__file__ != first.__file__, train(second) == alone, train(first) == alone)
        """,
        tmp_path,
    )
    assert printed == "True True True\n"
