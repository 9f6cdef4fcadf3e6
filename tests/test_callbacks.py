"""What is hung into fit: callbacks; and what it shows: history, plots, the progress bar."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import math
import os
import pty
import struct
import subprocess
import sys
import termios

import numpy as np
import pytest
from small_fit import X, Y, make, run, weights

import pyggml as pg
from pyggml import io, optim, train

# ---- callbacks ----


class Script(train.Callback):
    """Gives the monitored column the values of a list."""

    def __init__(self, values):
        self.values = values

    def on_epoch_end(self, state):
        state.row["val_loss"] = self.values[state.epoch - 1]


def test_hooks_are_called_in_order_with_the_state():
    calls = []

    class Watch(train.Callback):
        def on_step_end(self, state):
            calls.append(("step", state.epoch, state.step, state.batch, state.updated))
            assert math.isfinite(state.loss)

        def on_epoch_end(self, state):
            calls.append(("epoch", state.epoch, state.row["epoch"]))

        def on_fit_end(self, state):
            calls.append(("fit", state.epoch))

    run(2, make(batch_size=11, accumulate_steps=2), callbacks=[Watch()])
    assert calls == [
        ("step", 0, 1, 1, False),
        ("step", 0, 2, 2, True),
        ("epoch", 1, 1),
        ("step", 1, 3, 1, False),
        ("step", 1, 4, 2, True),
        ("epoch", 2, 2),
        ("fit", 2),
    ]


def test_a_callback_can_end_the_run_after_a_step():
    class Stop(train.Callback):
        def on_step_end(self, state):
            if state.step == 7:
                state.stop = "enough"

    history, _, opt, _ = run(9, callbacks=[Stop()])
    assert opt.t == 7
    assert len(history) == 2
    assert history.stopped == "enough"


def test_early_stopping_ends_after_patience_and_gives_the_best_weights_back():
    kept = {}

    class Keep(train.Callback):
        def on_epoch_end(self, state):
            kept[state.epoch] = weights(state.model)

    values = [3.0, 2.0, float("nan"), 2.0, 2.5, 1.0]
    stop = train.EarlyStopping(patience=3)
    history, model, *_ = run(6, callbacks=[Script(values), Keep(), stop])
    assert len(history) == 5
    assert (stop.best, stop.best_epoch) == (2.0, 2)
    assert "val_loss has not improved for 3 epochs; the best was 2.0 in epoch 2" in history.stopped
    np.testing.assert_array_equal(weights(model), kept[2])


def test_early_stopping_keeps_the_last_weights_if_asked_to():
    stop = train.EarlyStopping(patience=1, restore_best=False)
    history, model, *_ = run(6, callbacks=[Script([1.0, 2.0, 0.0]), stop])
    plain = run(2)
    np.testing.assert_array_equal(weights(model), weights(plain[1]))
    assert len(history) == 2


def test_early_stopping_counts_only_improvements_larger_than_min_delta():
    stop = train.EarlyStopping(patience=2, min_delta=0.5)
    history, *_ = run(9, callbacks=[Script([3.0, 2.6, 2.4, 2.2, 2.0]), stop])
    assert len(history) == 5
    assert stop.best_epoch == 3


@pytest.mark.parametrize(
    ("monitor", "mode", "expected"),
    [
        ("val_loss", None, "min"),
        ("val_accuracy", None, "max"),
        ("val_r2", "max", "max"),
    ],
)
def test_which_way_a_column_improves_is_known_or_asked_for(monitor, mode, expected):
    assert train.EarlyStopping(monitor=monitor, mode=mode).mode == expected
    if mode:
        with pytest.raises(pg.SettingError, match="say mode='min' or mode='max' for 'val_r2'"):
            train.SaveBest("x", monitor=monitor)


def test_a_column_that_there_is_not_is_named():
    with pytest.raises(pg.SettingError, match="EarlyStopping: no column 'val_loss'; there are ep"):
        run(1, callbacks=[train.EarlyStopping()])


def test_save_best_writes_the_weights_of_the_best_epoch(tmp_path):
    path = tmp_path / "best.safetensors"
    kept = {}

    class Keep(train.Callback):
        def on_epoch_end(self, state):
            kept[state.epoch] = state.model.state_dict()

    run(4, callbacks=[Script([3.0, 1.0, 2.0, 1.0]), train.SaveBest(path), Keep()])
    best = io.read_weights(path)
    for name, value in kept[2].items():
        np.testing.assert_array_equal(best[name], value)


def test_csv_logger_keeps_the_history_in_full_precision(tmp_path):
    path = tmp_path / "log.csv"
    history, *_ = run(3, callbacks=[train.CSVLogger(path)], validation=(X, Y))
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["epoch", "loss", "lr", "updates", "skipped", "val_loss", "seconds"]
    assert [float(row["val_loss"]) for row in rows] == history["val_loss"]


def test_tensorboard_logger_writes_events_that_can_be_read(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    history, *_ = run(3, callbacks=[train.TensorBoardLogger(tmp_path)], validation=(X, Y))
    (file,) = tmp_path.iterdir()
    data, found = file.read_bytes(), {}
    while data:  # records: length, its checksum, content, its checksum
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        for value in event.summary.value:
            found.setdefault(value.tag, {})[event.step] = value.simple_value
        data = data[16 + length :]
    for name in ("loss", "val_loss", "lr"):
        assert found[name] == {
            epoch: pytest.approx(value) for epoch, value in enumerate(history[name], start=1)
        }


def test_a_missing_tensorboardx_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(pg.SettingError, match=r"pip install 'pyggml\[tensorboard\]'"):
        train.TensorBoardLogger("x")


def test_learning_rates_of_all_updates_are_logged():
    log = train.LearningRateLogger()
    model, _, loader = make()
    opt = optim.SGD(
        model.parameters(), lr=optim.step_decay(1e-2, every=2, factor=0.5), accumulate_steps=2
    )
    run(2, (model, opt, loader), callbacks=[log])
    # Five steps in an epoch: two windows, and one of a single step that its end applies.
    assert log.rates == [1e-2, 1e-2, 5e-3, 5e-3 / 2]
    assert opt.t == 6


# ---- history ----


def test_history_gives_columns_rows_and_a_table():
    history = train.History([{"epoch": 1, "loss": 2.0}, {"epoch": 2, "loss": 1.0, "f1": 0.5}])
    assert len(history) == 2
    assert history["loss"] == [2.0, 1.0]
    assert math.isnan(history["f1"][0])
    assert list(history.to_dict()) == ["epoch", "loss", "f1"]
    assert repr(history) == "History(2 epochs; epoch=2, loss=1, f1=0.5)"
    with pytest.raises(pg.SettingError, match="no column 'acc'; there are epoch, loss, f1"):
        history["acc"]


def test_history_plots_training_and_validation_in_a_panel_each(tmp_path):
    history, *_ = run(4, validation=(X, Y), metrics={"bias": lambda o, t: np.mean(o - t)})
    figure = history.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    loss, bias = figure.axes
    assert (loss.get_ylabel(), bias.get_ylabel()) == ("loss", "bias")
    for axes, name in ((loss, "loss"), (bias, "bias")):
        lines = {line.get_label(): line.get_ydata().tolist() for line in axes.lines}
        assert lines == {"training": history[name], "validation": history[f"val_{name}"]}
    with pytest.raises(pg.SettingError, match="has no rows yet"):
        train.History().plot()


# ---- the progress bar ----


def test_nothing_is_printed_where_there_is_no_terminal(capfd):
    run(2)
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


PROGRESS = """
import numpy as np
from pyggml import ag, nn, optim, train
from pyggml.data import DataLoader
x = np.ones((8, 2))
model = nn.Linear(2, 1)
train.fit(model, DataLoader((x, x[:, :1]), batch_size=4), loss=ag.mse_loss, epochs=3,
          optimizer=optim.SGD(model.parameters()), validation=(x, x[:, :1]), progress=%s)
"""


@pytest.mark.parametrize("progress", [True, False])
def test_a_terminal_shows_one_bar_for_the_run(progress):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", PROGRESS % progress], stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # Linux says so that the other end is closed
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert process.wait(60) == 0, shown
    if not progress:
        assert shown == b""
        return
    assert shown.count(b"\n") == 1
    assert b"epoch 3/3" in shown
    assert b"6/6" in shown
    assert b"val_loss=" in shown
