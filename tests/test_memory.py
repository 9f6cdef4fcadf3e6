"""Leaks: the short form of tests/soak/memory.py, and a leak that it must find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from helpers import child

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


def test_a_leak_shows():
    grown = child(
        """
        import sys
        import numpy as np
        sys.path.insert(0, sys.argv[1])
        import memory
        kept = []
        work = lambda count: kept.extend(np.ones(12_500) for _ in range(count))
        print(memory.growth(work, 40, 1)[1])
        """,
        FOLDER,
    )
    assert int(grown) > 3 * 2**20  # of the 4 MB
