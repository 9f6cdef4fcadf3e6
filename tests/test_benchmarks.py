"""The benchmarks run, count what they should, and the check against floors can fail."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pyggml import ag

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks"
MEASURED = {
    "load": 0.5,
    "threads": 1,
    "peak": {"1": {"about": {}, "peak": {"pyggml": 100.0, "PyTorch": 90.0}}},
    "models": {
        "about": {"pyggml": "0", "CPU": "a CPU", "threads": "1", "PyTorch": "2"},
        "results": [
            {
                "workload": "mlp-small",
                "title": "MLP 64-128-10",
                "mode": "training",
                "batch": 32,
                "flops": 2_000_000,
                "times": {"pyggml": [90.0, 100.0, 110.0], "PyTorch": [240.0, 250.0, 260.0]},
                "ratios": {"PyTorch": [2.4, 2.5, 2.6]},
                "best": "PyTorch",
                "goal": 1.6,
            }
        ],
    },
}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The benchmarks' modules that need no peer."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = "common", "workloads", "run", "bench_scaling"
    return {name: importlib.import_module(name) for name in names}


def run(name: str, *flags: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a file of benchmarks/ in a child process that finds this source tree."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, str(FOLDER / name), "--threads", "1", *map(str, flags)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        (
            "bench_models.py",
            ["--peers", "PyTorch", "--workloads", "mlp-small", "lstm", "--budget", "0.1"],
            "LSTM 128, 50 steps",
        ),
        (
            "bench_memory.py",
            ["--peers", "--steps", "5", "10", "--largest", "mlp-small"],
            "working memory",
        ),
        ("bench_recording.py", ["--lengths", "10", "--rounds", "2"], "making its plan"),
        ("bench_startup.py", ["--peers", "--rounds", "1"], "first step of the digits example"),
        ("bench_peak.py", ["--peers", "--sizes", "64", "--rounds", "1", "--turn", "0.01"], "peak:"),
        (
            "bench_scaling.py",
            ["--peers", "--axes", "batch", "--points", "2", "--rounds", "1", "--turn", "0.01"],
            "exponent",
        ),
    ],
)
def test_benchmark_runs(tmp_path: Path, name: str, flags: list[str], said: str) -> None:
    done = run(name, "--json", "out.json", *flags, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert json.loads((tmp_path / "out.json").read_text())


@pytest.mark.parametrize("name", ["mlp-small", "gpt-small"])
def test_flops_are_those_of_the_products_in_the_recorded_step(
    modules: dict[str, ModuleType], name: str
) -> None:
    workloads = modules["workloads"]
    workload = workloads.WORKLOADS[name]
    engine = workloads.PyggmlEngine(workload.net, workload.weights())
    loss = engine.record(*workload.batches(1)[0])
    ops = ag.plan_report(loss).ops
    named = "matmul", "linear", "lower_of_product", "lower_times", "lower_transposed_times"
    products = [line for line in ops if line.name in named]  # halves count as wholes
    counted = sum(2 * math.prod(line.shape) * line.inputs[0][-1] for line in products)
    assert workload.training_flops() == counted


def test_flops_of_an_lstm_use_each_weight_in_every_step(modules: dict[str, ModuleType]) -> None:
    workload = modules["workloads"].WORKLOADS["lstm"]
    sizes = {name: w.size for name, w in workload.weights().items() if "weight" in name}
    in_a_step = sizes["lstm.weight_ih_l0"] + sizes["lstm.weight_hh_l0"]
    forward, _ = workload.net.flops(batch=3)
    assert forward == 2 * 3 * (workload.net.steps * in_a_step + sizes["head.weight"])


def test_a_workload_has_the_same_weights_and_batches_every_time(
    modules: dict[str, ModuleType],
) -> None:
    workload = modules["workloads"].WORKLOADS["cnn"]
    first, second = workload.weights(), workload.weights()
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)
    for one, other in zip(workload.batches(2), workload.batches(2), strict=True):
        assert np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])


def test_turns_call_every_action_equally_often_in_changing_order(
    modules: dict[str, ModuleType],
) -> None:
    called: list[str] = []
    actions = {name: lambda i, name=name: called.append(name) for name in "ab"}
    taken = modules["common"].take_turns(actions, rounds=8, turn=1e-9, budget=100.0)
    assert {name: len(turns) for name, turns in taken.items()} == {"a": 8, "b": 8}
    measured = "".join(called[4:])  # after two calls of each, to see how long one takes
    turns = {measured[i : i + 4] for i in range(0, len(measured), 4)}  # a warm-up call and one more
    assert turns == {"aabb", "bbaa"}


def test_exponent_is_that_of_a_power(modules: dict[str, ModuleType]) -> None:
    sizes = [1, 2, 4, 8]
    assert modules["bench_scaling"].exponent(sizes, [3.0 * n**1.5 for n in sizes]) == pytest.approx(
        1.5
    )


def test_ratios_are_taken_in_each_round(modules: dict[str, ModuleType]) -> None:
    ours, theirs = [np.array([1.0]), np.array([4.0])], [np.array([2.0]), np.array([8.0])]
    assert modules["common"].ratios(ours, theirs) == [2.0, 2.0, 2.0]


def judge(folder: Path, *flags: object) -> subprocess.CompletedProcess[str]:
    """Let run.py look at made-up numbers."""
    (folder / "numbers.json").write_text(json.dumps(MEASURED))
    return run("run.py", "--from", "numbers.json", *flags, folder=folder)


@pytest.mark.parametrize(
    ("floors", "problem"),
    [
        ({"training mlp-small": {"PyTorch": 2.4, "JAX": 9.0}}, None),
        ({"training mlp-small": {"PyTorch": 2.6}}, "PyTorch / pyggml is 2.50, its floor 2.60"),
        ({"training lstm": {"PyTorch": 2.6}}, "nothing to check"),
    ],
)
def test_check_fails_below_a_floor_or_without_one(
    tmp_path: Path, floors: dict[str, Any], problem: str | None
) -> None:
    (tmp_path / "floors.json").write_text(json.dumps(floors))
    done = judge(tmp_path, "--check", "floors.json")
    assert (done.returncode == 0) == (problem is None), done.stderr
    assert problem is None or problem in done.stderr


def test_floors_that_are_written_hold_for_the_same_numbers(tmp_path: Path) -> None:
    assert judge(tmp_path, "--write-floors", "floors.json").returncode == 0
    assert json.loads((tmp_path / "floors.json").read_text()) == {
        "training mlp-small": {"PyTorch": 2.12}  # 0.85 of 2.5, rounded
    }
    assert judge(tmp_path, "--check", "floors.json").returncode == 0


def test_page_and_picture_show_the_numbers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- numbers: run.py -->\nold\n<!-- /numbers -->\nafter\n")
    for _ in range(2):  # the marks are still there for the next run
        done = judge(tmp_path, "--page", "page.md", "--png", "out.png")
        assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert "old" not in text and text.startswith("before") and text.endswith("after\n")
    assert "| MLP 64-128-10, 32 | 100 | 250 | 2.50 |" in text
    assert "| MLP 64-128-10 | 20% |" in text  # 2e6 operations in 100 us, of 100e9 a second
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_every_floor_is_of_a_workload_and_a_peer_that_there_are(
    modules: dict[str, ModuleType],
) -> None:
    for name, floors in json.loads((FOLDER / "floors.json").read_text()).items():
        mode, workload = name.split()
        assert mode in ("training", "inference", "memory")
        assert workload in modules["workloads"].WORKLOADS
        assert floors.keys() <= modules["common"].PEERS.keys()


def test_a_vulkan_device_that_is_not_there_is_named(tmp_path):
    done = run("bench_vulkan.py", "--device", "vulkan99", folder=tmp_path)
    if done.returncode == 0:
        assert "there is no Vulkan device" in done.stdout
    else:
        assert "no Vulkan device 'vulkan99'; there are: ['vulkan0'" in done.stderr
