"""Threads: how many there are by default, more than there are cores, and several of Python's."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import child

import pyggml as pg
from pyggml import _ffi, ag, optim
from pyggml.cpus import cpu_quota, default_num_threads

# ---- how many there are --------------------------------------------------------------------------


def system(tmp_path, files):
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return tmp_path


TOP = "sys/fs/cgroup"
QUOTAS = {
    "no control groups": ({}, None),
    "a container without a bound": ({f"{TOP}/cpu.max": "max 100000"}, None),
    "a container with one": ({f"{TOP}/cpu.max": "150000 100000"}, 1.5),
    "a container that cannot read which group it is in": (
        {"proc/self/cgroup": "", f"{TOP}/cpu.max": "50000 100000"},
        None,
    ),
    "a group inside another": (
        {
            "proc/self/cgroup": "0::/user.slice/job.scope",
            f"{TOP}/user.slice/cpu.max": "300000 100000",
            f"{TOP}/user.slice/job.scope/cpu.max": "max 100000",
        },
        3.0,
    ),
    "the smallest of several": (
        {
            "proc/self/cgroup": "0::/a/b",
            f"{TOP}/a/cpu.max": "200000 100000",
            f"{TOP}/a/b/cpu.max": "700000 100000",
        },
        2.0,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "9:memory:/job\n4:cpu,cpuacct:/job\n1:name=systemd:/",
            f"{TOP}/cpu,cpuacct/job/cpu.cfs_quota_us": "250000",
            f"{TOP}/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
        },
        2.5,
    ),
    "version 1 in a container, which is told its path outside": (
        {
            "proc/self/cgroup": "4:cpu:/docker/abc",
            f"{TOP}/cpu/cpu.cfs_quota_us": "400000",
            f"{TOP}/cpu/cpu.cfs_period_us": "100000",
        },
        4.0,
    ),
    "version 1 without a bound": (
        {
            "proc/self/cgroup": "4:cpu:/",
            f"{TOP}/cpu/cpu.cfs_quota_us": "-1",
            f"{TOP}/cpu/cpu.cfs_period_us": "100000",
        },
        None,
    ),
    "both versions": (
        {
            "proc/self/cgroup": "4:cpu:/a\n0::/b",
            f"{TOP}/cpu/a/cpu.cfs_quota_us": "400000",
            f"{TOP}/cpu/a/cpu.cfs_period_us": "100000",
            f"{TOP}/unified/b/cpu.max": "300000 100000",
        },
        3.0,
    ),
    "rubbish": ({"proc/self/cgroup": "0::/a", f"{TOP}/a/cpu.max": "many few"}, None),
    "a period of zero": ({f"{TOP}/cpu.max": "100000 0"}, None),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_the_quota_of_a_container_is_read(tmp_path, name):
    files, quota = QUOTAS[name]
    assert cpu_quota(system(tmp_path, files)) == quota


def test_threads_by_default_are_bounded_by_quota_and_affinity_and_never_none(tmp_path):
    usable = len(os.sched_getaffinity(0))
    for text, expected in (("max 1", usable), ("30000 100000", 1), ("99900000 100000", usable)):
        assert default_num_threads(system(tmp_path, {f"{TOP}/cpu.max": text})) == expected


def test_a_process_on_one_core_uses_one_thread_and_trains():
    printed = child("""
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        import numpy as np
        import pyggml as pg
        from pyggml import ag
        w = ag.param(np.ones((200, 200)))
        with ag.grad_tape():
            loss = ag.mean(w @ w)
        ag.backward(loss)
        print(pg.get_num_threads(), w.grad.numpy().sum().round())
    """)
    assert printed == "1 400.0\n"


def test_more_threads_than_cores_give_the_right_numbers_also_on_one_core():
    printed = child("""
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        import numpy as np
        import pyggml as pg
        from pyggml import ag
        pg.set_num_threads(6)
        a = np.random.default_rng(0).standard_normal((200, 200))
        y = ag.tanh(ag.tensor(a) @ ag.tensor(a)).numpy()
        print(pg.get_num_threads(), abs(y - np.tanh(a @ a)).max() < 1e-4)
    """)
    assert printed == "6 True\n"


def test_ggmls_threads_offer_the_core_to_others_while_they_wait():
    libraries = Path(_ffi.__file__).with_name("lib").glob("libggml-cpu*")
    assert all(b"sched_yield" in library.read_bytes() for library in libraries)


# ---- several of Python's threads -----------------------------------------------------------------


def train(seed, steps=15, wide=False):
    """Return losses and weights of a small model trained on its own data."""
    generator = np.random.default_rng(seed)
    width = 160 if wide else 16  # the wide one is shared among ggml's workers
    first = generator.standard_normal((8, width)) / 3, generator.standard_normal((width, 3)) / 3
    weights = [ag.param(w) for w in first]
    opt = optim.AdamW(weights, lr=1e-2)
    losses = []
    for _ in range(steps):
        x, y = generator.standard_normal((32, 8)), generator.integers(0, 3, 32)
        with ag.grad_tape():
            loss = ag.softmax_cross_entropy(ag.tanh(ag.tensor(x) @ weights[0]) @ weights[1], y)
        opt.zero_grad()
        ag.backward(loss)
        opt.step()
        losses.append(loss.item())
    return losses, [w.numpy().tobytes() for w in weights]


def in_threads(*functions):
    """Run functions at the same time; return what each returned or raised."""
    results = [None] * len(functions)
    ready = threading.Barrier(len(functions))

    def run(i):
        ready.wait()
        try:
            results[i] = functions[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_two_models_trained_at_once_are_equal_to_each_trained_alone():
    alone = [train(1), train(2, wide=True)]
    assert in_threads(lambda: train(1), lambda: train(2, wide=True)) == alone


def test_training_beside_numpys_matrix_products_gives_equal_bits():
    alone = train(3)
    done = threading.Event()
    a = np.random.default_rng(0).standard_normal((150, 150))
    expected = a @ a

    def multiply():
        products = 0
        while not done.is_set() or not products:
            assert np.array_equal(a @ a, expected)
            products += 1
        return products

    def train_then_stop():
        try:
            return train(3)
        finally:
            done.set()

    products, trained = in_threads(multiply, train_then_stop)
    assert trained == alone
    assert products >= 1


def test_plans_are_dropped_in_one_thread_while_another_computes():
    alone = train(4)
    done = threading.Event()

    def clear():
        while not done.is_set():
            pg.devices()[0].clear_plans()
            time.sleep(0.001)

    def train_then_stop():
        try:
            return train(4)
        finally:
            done.set()

    cleared, trained = in_threads(clear, train_then_stop)
    assert (cleared, trained) == (None, alone)


def test_tape_no_grad_and_device_belong_to_the_thread_that_set_them():
    w = ag.param([2.0])
    inside, looked = threading.Event(), threading.Event()

    def on_a_tape():
        with ag.grad_tape(), pg.device("reference"):
            inside.set()
            looked.wait(20)
            return ag.tensor(1.0).device.name, ag.param([1.0]).requires_grad

    def without():
        inside.wait(20)
        try:
            y = ag.sum(w * w)
            with ag.no_grad():
                z = ag.sum(w * w)
            return y.requires_grad, z.requires_grad, y.device.name
        finally:
            looked.set()

    assert in_threads(on_a_tape, without) == [("reference", True), (False, False, "cpu")]
    with ag.no_grad():
        assert in_threads(lambda: _grad_of_square(w)) == [4.0]


def _grad_of_square(w):
    with ag.grad_tape():
        loss = ag.sum(w * w)
    return ag.backward(loss)[w].item()


def test_generators_of_their_own_draw_the_same_masks_at_once_as_alone():
    def masks(seed):
        x, generator = ag.tensor(np.ones(50)), pg.Generator(seed)
        return [ag.dropout(x, p=0.5, generator=generator).tolist() for _ in range(20)]

    alone = [masks(1), masks(2)]
    assert in_threads(lambda: masks(1), lambda: masks(2)) == alone
