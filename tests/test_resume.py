"""A run of fit that is stopped: what Ctrl-C does, what is saved, and going on from it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from small_fit import make, run, without_times

import pyggml as pg
from pyggml import io, train

RUN = """
import hashlib, os, signal, sys
import numpy as np
import pyggml as pg
from pyggml import ag, nn, optim, train
from pyggml.data import DataLoader

path, kind, stop_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
pg.manual_seed(5)
pg.set_num_threads(1)
x = np.random.default_rng(0).standard_normal((23, 4))
y = x.sum(1, keepdims=True)

class Stop(nn.Module):  # sends Ctrl-C at some batch of training, or (negative) of validation
    batches = [0, 0]
    def forward(self, x):
        self.batches[self.training] += 1
        if self.batches[self.training] == abs(stop_at) and self.training == (stop_at > 0):
            os.kill(os.getpid(), signal.SIGINT)
        return x

model = nn.Sequential(
    Stop(), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
opt = optim.Adam(model.parameters(), lr=optim.cosine_decay(0.05, steps=20), accumulate_steps=3)
if kind == "loader":
    loader = DataLoader((x, y), batch_size=4, shuffle=True)
else:
    loader = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 23, 4)]

rates = train.LearningRateLogger()
early = train.EarlyStopping(patience=3)
history = train.fit(
    model, loader, loss=ag.mse_loss, optimizer=opt, epochs=5,
    validation=DataLoader((x, y), batch_size=6),
    metrics={"bias": lambda o, t: np.mean(o - t)}, state_path=path, resume=True,
    callbacks=[rates, early])
for row in history:
    print({name: value for name, value in row.items() if name != "seconds"})
print(history.stopped, rates.rates, early.state_dict()["best"])
print(hashlib.sha256(b"".join(v.tobytes() for v in model.state_dict().values())).hexdigest())
"""


def run_child(path, kind, stop_at=0):
    return subprocess.run(
        [sys.executable, "-c", RUN, str(path), kind, str(stop_at)],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("kind", ["loader", "list"])
def test_a_run_stopped_by_ctrl_c_goes_on_to_the_last_bit_in_a_new_process(tmp_path, kind):
    """Each epoch has six steps and four batches of validation.

    Stopped at the first step, inside a window, at the last step of an epoch, inside of another,
    and in the middle of its validation.
    """
    whole = run_child(tmp_path / "whole", kind)
    assert whole.returncode == 0, whole.stderr
    path = tmp_path / "state.safetensors"
    for stop_at, epochs, steps in ((1, 0, 1), (4, 0, 5), (1, 0, 6), (9, 2, 3), (-2, 2, 6)):
        stopped = run_child(path, kind, stop_at)
        assert stopped.returncode in (1, -signal.SIGINT, 130)
        assert stopped.stderr.rstrip().splitlines()[-1] == (
            f"KeyboardInterrupt: fit: stopped by Ctrl-C after {epochs} epochs and {steps} steps; "
            f"the state is in {path}: call fit with resume=True to go on"
        )
        assert "Ctrl-C again stops at once" in stopped.stderr
    resumed = run_child(path, kind)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout == whole.stdout
    again = run_child(path, kind)  # it has reached its end: nothing more to do
    assert again.stdout == whole.stdout


class Interrupt(train.Callback):
    """Sends Ctrl-C to this process at a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, state):
        if state.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_without_a_path_says_that_nothing_was_saved():
    with pytest.raises(KeyboardInterrupt, match="after 0 epochs and 2 steps; nothing was saved"):
        run(3, callbacks=[Interrupt(2)])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_ctrl_c_raises_at_once(tmp_path):
    path = tmp_path / "state"

    class Twice(train.Callback):
        def on_step_end(self, state):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(3, callbacks=[Twice()], state_path=path)
    assert time.monotonic() - started < 50
    assert not path.exists()


def test_ctrl_c_at_the_very_end_is_not_lost():
    class Last(train.Callback):
        def on_epoch_end(self, state):
            os.kill(os.getpid(), signal.SIGINT)

    model, opt, loader = make()
    with pytest.raises(KeyboardInterrupt, match="after 1 epochs and 0 steps"):
        run(1, (model, opt, loader), callbacks=[Last()])
    with pytest.raises(KeyboardInterrupt, match="the run had just ended"):
        with train._fit._Interrupts():
            os.kill(os.getpid(), signal.SIGINT)


def test_a_handler_of_the_programs_own_is_left_alone():
    calls = []
    before = signal.signal(signal.SIGINT, lambda *_: calls.append(1))
    try:
        run(1, callbacks=[Interrupt(1)])
        assert calls == [1]
    finally:
        signal.signal(signal.SIGINT, before)


def test_fit_runs_in_another_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(run(2)[0]))
    thread.start()
    thread.join(60)
    assert len(results[0]) == 2


def test_the_state_is_saved_after_each_epoch_and_every_so_many_steps(tmp_path):
    path, steps = tmp_path / "state", []

    class Watch(train.Callback):
        def on_step_end(self, state):
            steps.append(io.load_state(path)["fit"]["step"] if path.exists() else None)

    run(2, callbacks=[Watch()], state_path=path, save_every=3)
    assert steps == [None, None, None, 3, 3, 5, 6, 6, 6, 9]
    assert io.load_state(path)["fit"]["step"] == 10


def test_resume_without_a_file_starts_anew_and_more_epochs_go_on(tmp_path):
    path = tmp_path / "state"
    whole, *_ = run(4)
    first, *_ = run(2, state_path=path, resume=True)
    assert len(first) == 2
    second, *_ = run(4, state_path=path, resume=True)
    assert without_times(second) == without_times(whole)


def test_a_state_of_another_model_is_refused(tmp_path):
    path = tmp_path / "state"
    run(1, state_path=path)
    with pytest.raises(pg.ShapeError, match=r"load_state: .*state: model: .* has shape"):
        run(2, make(hidden=5), state_path=path, resume=True)
    io.save_state(path, model=make()[0], optimizer=make()[1], loader=make()[2])
    with pytest.raises(pg.FileFormatError, match="has no part 'default_generator'"):
        run(2, state_path=path, resume=True)


def test_a_generator_of_the_models_own_is_part_of_the_state(tmp_path):
    path, generator = tmp_path / "state", pg.Generator(1)
    generator.key()
    run(1, state_path=path, generator=generator)
    other = pg.Generator(2)
    run(1, state_path=path, generator=other, resume=True)
    assert other.state() == {"seed": 1, "draws": 1}


def test_a_run_that_is_killed_twice_ends_as_if_nothing_had_happened():
    soak = Path(__file__).with_name("soak") / "soak.py"
    done = subprocess.run(
        [sys.executable, soak, "--short", "--threads", "1"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" equal\n") == 3
    # A machine that is quick enough reaches the end before the second one.
    assert "\n2 kills; " in done.stdout or "\n1 kills; " in done.stdout
