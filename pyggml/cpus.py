"""How many CPUs this process may use: the machine's, its affinity mask, its container's quota."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["cpu_quota", "default_num_threads"]


def default_num_threads(root: str | os.PathLike[str] = "/") -> int:
    """Return the number of CPUs that this process may use, at least 1.

    Its affinity mask and the quotas of its control groups say so, as they stand in the file system
    under ``root``; of a quota of 2.5 CPUs it can keep two busy.
    """
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        count = os.cpu_count() or 1
    quota = cpu_quota(root)
    return count if quota is None else max(1, min(count, int(quota)))


def cpu_quota(root: str | os.PathLike[str] = "/") -> float | None:
    """Return how many CPUs' time the control groups of this process allow it; None: no bound.

    A group is bounded by those around it too, so the smallest quota counts. Both forms are read:
    cgroup v2 (cpu.max) and v1 (cpu.cfs_quota_us), as the kernel's cgroup documentation has them.
    """
    quotas = [quota for folder in _group_folders(Path(root)) if (quota := _quota_in(folder))]
    return min(quotas, default=None)


def _group_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups that bound the CPU, and those around."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = ["0::/"]
    for line in lines:  # number:controllers:path of the group
        found = re.fullmatch(r"\d+:([^:]*):/(.*)", line)
        if found is None:
            continue
        controllers, path = found[1].split(","), PurePosixPath(found[2])
        if controllers == [""]:  # v2; the second place is that of machines with both
            tops = [mount, mount / "unified"]
        elif "cpu" in controllers:
            tops = [mount / "cpu", mount / found[1]]
        else:
            continue
        for top in tops:
            # A container sees its own group as the top one, whatever path it is told.
            yield from (top / group for group in (path, *path.parents))


def _quota_in(folder: Path) -> float | None:
    """Return the quota of one group in CPUs, or None if it has none."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii")
                for name in ("quota", "period")
            )
        if quota == "max" or int(quota) <= 0 or int(period) <= 0:
            return None
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None
