"""What all tests share."""

import os
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag, ggml_plan
from pyggml.device import CpuDevice, Device

# ggml offers a software driver of Vulkan, such as Mesa's, only where this names it.
os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "0")
NO_VULKAN = "no Vulkan device, or a build without Vulkan; PYGGML_REQUIRE_VULKAN=1 fails instead"

# In CI a skip fails the run, for a test that never runs looks like one that passes. A skip whose
# reason stands here is wanted.
IS_VULKAN_REQUIRED = os.environ.get("PYGGML_REQUIRE_VULKAN") == "1"
ALLOWED_SKIPS: frozenset[str] = frozenset(() if IS_VULKAN_REQUIRED else (NO_VULKAN,))

_unwanted_skips: list[str] = []


def _note_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if reason.removeprefix("Skipped: ") not in ALLOWED_SKIPS:
            _unwanted_skips.append(f"{report.nodeid}: {reason}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that was skipped."""
    _note_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that was skipped as a whole."""
    _note_skip(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run in CI that skipped what it should not."""
    if os.environ.get("CI") and _unwanted_skips and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which skips failed the run."""
    if os.environ.get("CI") and _unwanted_skips:
        terminalreporter.section("skips that are not in ALLOWED_SKIPS (tests/conftest.py)")
        for line in _unwanted_skips:
            terminalreporter.line(line)


@pytest.fixture(params=["cpu", "portable", "reference"])
def every_device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Run a test on each device in turn; "portable" has the lowerings that all others use."""
    if request.param != "portable":
        with pg.device(request.param) as device:
            yield device
        return
    device = CpuDevice(n_threads=1, own_kernels=False)
    with pg.device(device):
        yield device
    device.close()


@pytest.fixture
def on_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[np.ndarray]]:
    """Return a function that runs another on so many threads, however small the work."""

    def run(n_threads: int, fn: Callable[[], Iterable[ag.Tensor]]) -> list[np.ndarray]:
        monkeypatch.setattr(ggml_plan, "threads_worth_starting", lambda graph: n_threads)
        device = CpuDevice(n_threads=n_threads)
        with pg.device(device):
            values = [value.numpy() for value in fn()]
        device.close()
        return values

    return run
