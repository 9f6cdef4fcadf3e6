"""A bound on the time of computing: what it stops, and what is left behind."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from helpers import child

import pyggml as pg
from pyggml import ag, nn, optim


def much_work(count=3_000):
    """Return a value that takes long to compute."""
    x = ag.tensor(np.ones((512, 512)) / 512)
    y = x
    for _ in range(count):
        y = y @ x
    return y


def test_a_long_run_is_stopped_and_pyggml_works_afterwards():
    y = much_work()
    with pytest.raises(
        pg.DeadlineError, match=r"^deadline: the 0\.2 seconds of this block are over"
    ):
        with pg.deadline(0.2):
            y.numpy()
    assert (ag.tensor([1.0]) * 2.0).tolist() == [2.0]


def test_a_loop_of_short_runs_is_stopped_too(every_device):
    x = ag.tensor(np.ones((20, 20)))
    with pytest.raises(TimeoutError), pg.deadline(0.1):
        while True:
            ag.tanh(x @ x).numpy()
    assert ag.sum(x).item() == 400.0


def test_what_was_pending_can_be_computed_after_the_block():
    w = ag.param([3.0])
    with ag.grad_tape():
        loss = ag.sum(w * w)
    with pytest.raises(pg.DeadlineError), pg.deadline(0):
        loss.item()
    assert loss.item() == 9.0
    ag.backward(loss)
    assert w.grad.item() == 6.0


def test_recording_and_reading_what_is_known_take_no_computing():
    known = ag.tensor([1.0, 2.0])
    with pg.deadline(0):
        pending = known + 1.0
        assert known.tolist() == [1.0, 2.0]
    assert pending.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("outer, inner, named", [(0, 60, "the 0 s"), (60, 0, "the 0 s")])
def test_of_blocks_inside_each_other_the_one_that_ends_first_counts(outer, inner, named):
    with pg.deadline(outer):
        with pytest.raises(pg.DeadlineError, match=named), pg.deadline(inner):
            (ag.tensor([1.0]) + 1.0).numpy()
        if outer:
            assert (ag.tensor([1.0]) + 1.0).tolist() == [2.0]
    assert (ag.tensor([1.0]) + 1.0).tolist() == [2.0]


def test_a_compiled_module_keeps_the_deadline_too():
    double = nn.compile(nn.Linear(2, 2).eval())
    with pytest.raises(pg.DeadlineError), pg.deadline(0):
        double(np.ones((1, 2)))
    assert double(np.ones((1, 2))).shape == (1, 2)


def test_a_deadline_is_the_threads_own():
    results = []
    with pg.deadline(0):
        other = threading.Thread(target=lambda: results.append((ag.tensor([1.0]) + 1.0).tolist()))
        other.start()
        other.join()
    assert results == [[2.0]]


@pytest.mark.parametrize("wrong", [-1, "1", None, True, float("nan"), float("inf")])
def test_seconds_that_are_no_duration_are_refused(wrong):
    with pytest.raises(pg.SettingError, match=r"deadline: seconds must be in \[0"):
        with pg.deadline(wrong):
            pass


def test_an_update_is_made_whole_or_not_at_all():
    """The update of many parameters is stopped at a random moment of its time, again and again."""
    generator = np.random.default_rng(0)

    def step(seconds):
        params = [ag.param(np.ones((100, 100))) for _ in range(30)]
        opt = optim.SGD(params, lr=1.0)
        with ag.grad_tape():
            loss = ag.sum(ag.exp(much_work(3)))
            for p in params:
                loss = loss + ag.sum(p * 1.0)
        ag.backward(loss)
        started = time.monotonic()
        try:
            with pg.deadline(seconds):
                opt.step()
        except pg.DeadlineError:
            pass
        taken = time.monotonic() - started
        (value,) = {float(p.numpy().flat[0]) for p in params}
        assert opt.t == (value == 0.0)
        if value == 1.0:
            opt.step()  # nothing is lost
            assert {float(p.numpy().flat[-1]) for p in params} == {0.0}
        return taken, value

    taken, value = step(60)
    assert value == 0.0
    assert step(0)[1] == 1.0
    for _ in range(6):
        step(generator.uniform(0, taken))


def test_the_time_of_a_run_in_a_child_process_of_one_thread_is_bounded():
    printed = child("""
        import numpy as np
        import pyggml as pg
        from pyggml import ag
        pg.set_num_threads(1)
        x = ag.tensor(np.ones((256, 256)) / 256)
        y = x
        for _ in range(5_000):
            y = y @ x
        for _ in range(3):
            try:
                with pg.deadline(0.1):
                    y.numpy()
            except pg.DeadlineError:
                print("stopped")
    """)
    assert printed == "stopped\n" * 3
