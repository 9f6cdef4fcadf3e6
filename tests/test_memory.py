"""Leaks: the short form of tests/soak/memory.py, and a leak that it must find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).with_name("soak")


def test_resident_memory_stays_within_the_bound_over_work_of_every_kind():
    done = subprocess.run(
        [sys.executable, FOLDER / "memory.py", "--scale", "0.02"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passes over a loader" in done.stdout


def test_a_leak_shows(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import memory

    kept = []
    _, grown = memory.growth(lambda n: kept.extend(np.ones(12_500) for _ in range(n)), 40, 1)
    assert grown > 3 * 2**20  # of the 4 MB
