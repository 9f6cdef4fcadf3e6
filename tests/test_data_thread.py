"""The thread in which a DataLoader prepares batches: its errors, its pace, and its end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from helpers import child, loader_threads, wait_until

from pyggml.data import DataLoader

PREFETCH = [0, 1, 2, 5]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    assert wait_until(lambda: not loader_threads()), "a loader's thread outlived its iterator"


@pytest.mark.parametrize("prefetch", [1, 3])
def test_no_more_batches_are_prepared_than_asked_for(prefetch):
    made = []
    loader = DataLoader(np.arange(50), transform=made.append, prefetch=prefetch)
    batches = iter(loader)
    assert wait_until(lambda: len(made) == prefetch)
    time.sleep(0.05)
    assert len(made) == prefetch
    for _ in range(4):
        next(batches)
    assert wait_until(lambda: len(made) == prefetch + 4)
    time.sleep(0.05)
    assert len(made) == prefetch + 4


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_an_exception_in_the_thread_arrives_where_the_batch_is_asked_for(prefetch):
    def fail(batch):
        if batch[0] == 4:
            raise ZeroDivisionError("the fifth")
        return batch

    batches = iter(DataLoader(np.arange(9), transform=fail, prefetch=prefetch))
    assert [int(next(batches)[0]) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ZeroDivisionError, match="the fifth") as caught:
        next(batches)
    assert "fail" in [entry.name for entry in caught.traceback]  # where it really happened
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_stop_iteration_from_a_transform_does_not_end_the_epoch_silently(prefetch):
    def stop(batch):
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(DataLoader(np.arange(3), transform=stop, prefetch=prefetch))


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_the_thread_ends_when_the_loop_is_left(prefetch):
    for _ in DataLoader(np.arange(100), prefetch=prefetch):
        break
    del _
    assert wait_until(lambda: not loader_threads())


def test_the_thread_ends_with_the_epoch():
    loader = DataLoader(np.arange(5))
    batches = iter(loader)
    list(batches)
    assert wait_until(lambda: not loader_threads())
    assert list(batches) == []


def test_the_thread_ends_when_an_iterator_in_a_cycle_is_collected():
    class Holder:
        pass

    holder = Holder()
    holder.itself = holder
    holder.batches = iter(DataLoader(np.arange(100)))
    next(holder.batches)
    assert loader_threads()
    del holder
    gc.collect()
    assert wait_until(lambda: not loader_threads())


def test_an_iterator_collected_in_its_own_thread_ends_it():
    """The collector may run anywhere: here in the thread that the iterator is about to stop."""
    held = []

    def collect(batch):
        held.clear()
        gc.collect()
        return batch

    started = threading.Event()

    def wait_and_collect(batch):
        started.wait(20)
        return collect(batch)

    held.append(iter(DataLoader(np.arange(100), transform=wait_and_collect)))
    started.set()
    assert wait_until(lambda: not loader_threads())


def test_many_iterators_left_early_leave_no_threads_behind():
    loader = DataLoader(np.arange(1000), batch_size=3, shuffle=True, seed=0, prefetch=4)
    for _ in range(200):
        next(iter(loader))
    assert wait_until(lambda: not loader_threads())


def test_two_iterators_of_one_loader_do_not_disturb_each_other():
    loader = DataLoader(np.arange(6), batch_size=2)
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]
    assert pairs == [([0, 1],) * 2, ([2, 3],) * 2, ([4, 5],) * 2]


@pytest.mark.parametrize(
    "end",
    [
        "pass",
        "next(batches)",
        "sys.exit(0)",
        "[next(batches) for _ in range(3)]",
        "slow = iter(DataLoader(np.arange(9), transform=lambda b: time.sleep(300)))",
        "threading.Thread(target=next, args=(batches,)).start()",
    ],
)
def test_the_process_ends_whatever_the_thread_is_doing(end):
    child(
        f"""
        import sys, threading, time
        import numpy as np
        from pyggml.data import DataLoader
        loader = DataLoader(np.arange(1000))
        batches = iter(loader)
        {end}
        """
    )


def test_an_uncaught_exception_in_the_loop_ends_the_process():
    code = """
    import numpy as np
    from pyggml.data import DataLoader
    for batch in DataLoader(np.arange(1000)):
        raise ValueError("in the loop")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: in the loop")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_loop_goes_on_in_a_forked_process():
    printed = child(
        """
        import os, warnings
        import numpy as np
        from pyggml.data import DataLoader
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        loader = DataLoader(np.arange(10), batch_size=2, shuffle=True, seed=0)
        expected = [batch.tolist() for batch in loader]
        loader.load_state_dict({**loader.state_dict(), "epoch": 0})
        batches = iter(loader)
        first = next(batches).tolist()
        child = os.fork()
        rest = [batch.tolist() for batch in batches]
        print([first, *rest] == expected, flush=True)
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        """
    )
    assert printed.split() == ["True", "True"]
