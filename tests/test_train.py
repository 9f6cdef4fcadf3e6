"""fit: the same numbers as a loop written by hand, and what it adds to one."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import math
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag, io, nn, optim, train
from pyggml.data import DataLoader

X = np.random.default_rng(0).standard_normal((22, 3)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5]]) + 0.3).astype(np.float32)


def make(seed=0, batch_size=5, hidden=4, dropout=0.0, **window):
    """A small regression: model, optimizer, loader."""
    pg.manual_seed(seed)
    layers = [nn.Linear(3, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, 1)]
    model = nn.Sequential(*layers)
    opt = optim.AdamW(model.parameters(), lr=0.05, **window)
    return model, opt, DataLoader((X, Y), batch_size=batch_size, shuffle=True, seed=seed)


def run(epochs=3, made=None, **settings):
    """Fit the small regression and return the history and what was made."""
    model, opt, loader = made or make()
    settings = {"loss": ag.mse_loss, "optimizer": opt, "epochs": epochs, **settings}
    return train.fit(model, loader, **settings), model, opt, loader


def weights(model):
    return np.concatenate([value.ravel() for value in model.state_dict().values()])


def without_times(history):
    return [{n: v for n, v in row.items() if n != "seconds"} for row in history]


# ---- the loop ----


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_fit_equals_a_loop_written_by_hand(device):
    with pg.device(device):
        history, model, opt, _ = run()
        other, other_opt, loader = make()
        losses = []
        for _ in range(3):
            total = 0.0
            for x, y in loader:
                with ag.grad_tape():
                    loss = ag.mse_loss(other(ag.tensor(x)), y)
                other_opt.zero_grad()
                ag.backward(loss)
                other_opt.step()
                total += loss.item() * len(x)
            losses.append(total / len(X))
    assert history["loss"] == losses
    np.testing.assert_array_equal(weights(model), weights(other))
    assert history["epoch"] == [1, 2, 3]
    assert history["updates"] == [5, 10, 15]
    assert history["lr"] == [0.05] * 3
    assert opt.t == other_opt.t


def test_the_forward_pass_runs_once_in_a_step(monkeypatch):
    cpu = pg.devices()[0]
    model, opt, loader = make(batch_size=11)
    run(1, (model, opt, loader))
    cpu.clear_plans()
    train.fit(model, loader, loss=ag.mse_loss, optimizer=opt, epochs=2)
    assert len(cpu.plans) == 1  # forward, backward, update: one graph, found again each time


def test_an_epoch_ends_with_the_window_it_left_open():
    """22 samples in batches of 5: five steps, in windows of 3 and 2."""
    _, _, opt, _ = run(2, make(accumulate_steps=3))
    assert opt.t == 4
    _, _, opt, _ = run(2, make(accumulate_steps=3), flush=False)
    assert opt.t == 3  # 10 steps: three whole windows, one step left


def test_unequal_batches_of_a_window_weigh_as_many_as_their_samples():
    """One window over the whole of the data is one full-batch step."""
    made = make(accumulate_steps=5)
    assert [len(x) for x, _ in make()[2]] == [5, 5, 5, 5, 2]
    run(1, made)
    full = make(batch_size=22)
    run(1, full)
    np.testing.assert_allclose(weights(made[0]), weights(full[0]), rtol=1e-5, atol=1e-7)
    summed = make(accumulate_steps=5, average=False)
    run(1, summed)
    assert not np.allclose(weights(summed[0]), weights(full[0]), rtol=1e-3)


def test_gradients_left_from_before_do_not_enter_the_first_window():
    made, clean = make(accumulate_steps=2), make(accumulate_steps=2)
    with ag.grad_tape():
        loss = ag.mse_loss(made[0](ag.tensor(X * 100)), Y)
    ag.backward(loss)
    run(1, made)
    run(1, clean)
    np.testing.assert_array_equal(weights(made[0]), weights(clean[0]))


def test_modes_are_set_for_training_and_validation_and_put_back():
    seen = []

    class Watch(nn.Module):
        def __init__(self):
            self.w = ag.param(1.0)
            self.inner = nn.Dropout(0.5)

        def forward(self, x):
            seen.append((self.training, self.inner.training, ag.is_recording()))
            return x * self.w

    model = Watch().eval()
    opt = optim.SGD(model.parameters(), lr=0.0)
    run(1, (model, opt, [(Y[:4], Y[:4])]), validation=(Y, Y))
    assert seen == [(True, True, True), (False, False, False)]
    assert model.training is False
    assert model.inner.training is False


def test_validation_is_over_all_samples_and_changes_nothing():
    plain = run()
    history, model, *_ = run(validation=(X[:9], Y[:9]))
    np.testing.assert_array_equal(weights(model), weights(plain[1]))
    error = model(ag.tensor(X[:9])).numpy() - Y[:9]
    assert history["val_loss"][-1] == pytest.approx(float(np.mean(error**2)), rel=1e-5)
    loader = DataLoader((X[:9], Y[:9]), batch_size=4)
    again, *_ = run(validation=loader)
    assert again["val_loss"] == pytest.approx(history["val_loss"], rel=1e-5)


def test_metrics_are_means_of_batches_in_training_and_of_everything_in_validation():
    calls = []

    def spread(outputs, targets):
        assert type(outputs) is type(targets) is np.ndarray
        assert outputs.shape == targets.shape
        calls.append(len(outputs))
        return np.ptp(targets)

    data = [(X[:4], Y[:4]), (X[4:5], Y[4:5])]
    history, *_ = run(1, (*make()[:2], data), metrics=[spread], validation=data)
    assert calls == [4, 1, 5]
    assert history["spread"] == [pytest.approx(np.ptp(Y[:4]) * 4 / 5)]
    assert history["val_spread"] == [pytest.approx(np.ptp(Y[:5]))]


def test_a_classifier_learns_and_its_accuracy_is_told():
    rng = np.random.default_rng(1)
    labels = rng.integers(3, size=120)
    x = np.eye(3)[labels] + 0.1 * rng.standard_normal((120, 3))
    pg.manual_seed(0)
    model = nn.Linear(3, 3)
    history = train.fit(
        model,
        DataLoader((x, labels), batch_size=16, shuffle=True, seed=0),
        loss=ag.softmax_cross_entropy,
        optimizer=optim.Adam(model.parameters(), lr=0.1),
        epochs=10,
        validation=(x, labels),
        metrics={"accuracy": train.accuracy},
    )
    assert history["val_accuracy"][-1] == 1.0
    assert history["accuracy"][-1] > 0.95
    predicted = train.predict(model, DataLoader((x, labels), batch_size=50)).argmax(axis=1)
    np.testing.assert_array_equal(predicted, labels)


def test_forward_takes_batches_of_any_kind():
    loader = DataLoader({"features": X, "answer": Y}, batch_size=11)

    def forward(model, batch):
        return model(ag.tensor(batch["features"])), batch["answer"]

    model, opt, _ = make()
    history, *_ = run(2, (model, opt, loader), forward=forward, validation=loader)
    plain, *_ = run(2, (*make()[:2], DataLoader((X, Y), batch_size=11)))
    assert history["loss"] == plain["loss"]
    assert train.evaluate(model, loader, loss=ag.mse_loss, forward=forward) == {
        "loss": history["val_loss"][-1]
    }


def test_a_model_may_be_a_function_and_take_several_inputs():
    w = ag.param(1.0)
    opt = optim.SGD([w], lr=0.1)
    batches = [(X[:, :1], X[:, 1:2], Y)]
    history = train.fit(lambda a, b: a * w + b, batches, loss=ag.mse_loss, optimizer=opt, epochs=30)
    assert history["loss"][-1] < history["loss"][0]


# ---- losses that are not finite ----


def poisoned(at, batches=5):
    """Batches of which one has an infinite value."""
    data = [(X[i : i + 4].copy(), Y[i : i + 4]) for i in range(batches)]
    data[at][0][0, 0] = np.inf
    return data


def test_a_loss_that_is_not_finite_raises_and_says_where():
    model, opt, _ = make()
    with pytest.raises(
        pg.NonFiniteLossError,
        match=r"the loss is nan in epoch 1, step 3 of the epoch .*ag\.detect_anomaly.*skip",
    ):
        run(1, (nn.Linear(3, 1), opt, poisoned(2)), loss=lambda out, y: ag.mse_loss(out - out, y))


@pytest.mark.parametrize("window", [1, 2])
def test_skip_leaves_out_the_step_and_its_window_and_nothing_else(window):
    class Normed(nn.Module):
        def __init__(self):
            self.norm = nn.BatchNorm1d(3)
            self.linear = nn.Linear(3, 1)

        def forward(self, x):
            return self.linear(self.norm(x))

    def trained(data):
        pg.manual_seed(0)
        model = Normed()
        opt = optim.AdamW(model.parameters(), lr=0.1, accumulate_steps=window)
        history, *_ = run(1, (model, opt, data), on_nonfinite="skip")
        return history, model, opt

    history, model, opt = trained(poisoned(4))
    clean, other, _ = trained(poisoned(4)[:4])
    np.testing.assert_array_equal(weights(model), weights(other))
    assert history["loss"] == clean["loss"]
    assert history["skipped"] == [1]
    assert clean["skipped"] == [0]
    assert opt.t == 4 // window


def test_skip_sees_a_gradient_that_is_not_finite_under_a_finite_loss():
    w = ag.param([1.0, 0.0])
    opt = optim.SGD([w], lr=0.1)
    roots = [(np.array([[1.0, 1.0]]), np.zeros((1, 1)))]  # the root has no slope at 0
    with pytest.raises(pg.NonFiniteLossError, match="all 1 steps of epoch 1 were left out"):
        train.fit(
            lambda x: ag.sqrt(w) * x,
            roots,
            loss=lambda out, y: ag.mean(out),
            optimizer=opt,
            epochs=1,
            on_nonfinite="skip",
        )
    assert w.tolist() == [1.0, 0.0]


def test_steps_that_clipping_left_out_are_counted():
    def huge(outputs, targets):
        return ag.mean(outputs * 1e30) * 1e30

    model, opt, _ = make(clip_norm=1.0)
    before = weights(model)
    with pytest.raises(pg.NonFiniteLossError):
        run(1, (model, opt, [(X, Y)]), loss=huge)
    assert opt.skipped == 1
    np.testing.assert_array_equal(weights(model), before)


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


# ---- saving, stopping, going on ----

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
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
opt = optim.Adam(model.parameters(), lr=optim.cosine_decay(0.05, steps=20), accumulate_steps=3)
if kind == "loader":
    loader = DataLoader((x, y), batch_size=4, shuffle=True)
else:
    loader = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 23, 4)]

class Stop(train.Callback):
    def on_step_end(self, state):
        if state.step == stop_at:
            os.kill(os.getpid(), signal.SIGINT)

rates = train.LearningRateLogger()
early = train.EarlyStopping(patience=3)
history = train.fit(
    model, loader, loss=ag.mse_loss, optimizer=opt, epochs=5, validation=(x, y),
    metrics={"bias": lambda o, t: np.mean(o - t)}, state_path=path, resume=True,
    callbacks=[rates, early, Stop()])
for row in history:
    print({name: value for name, value in row.items() if name != "seconds"})
print(history.stopped, rates.rates, early.state_dict()["best"])
print(hashlib.sha256(b"".join(v.tobytes() for v in model.state_dict().values())).hexdigest())
"""


def run_child(path, kind, stop_at=-1):
    return subprocess.run(
        [sys.executable, "-c", RUN, str(path), kind, str(stop_at)],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("kind", ["loader", "list"])
def test_a_run_stopped_by_ctrl_c_goes_on_to_the_last_bit_in_a_new_process(tmp_path, kind):
    """At the first step, inside a window, at the last step of an epoch, and inside of another."""
    whole = run_child(tmp_path / "whole", kind)
    assert whole.returncode == 0, whole.stderr
    path = tmp_path / "state.safetensors"
    for stop_at in (1, 5, 6, 15):
        stopped = run_child(path, kind, stop_at)
        assert stopped.returncode in (1, -signal.SIGINT, 130)
        assert stopped.stderr.rstrip().splitlines()[-1] == (
            f"KeyboardInterrupt: fit: stopped by Ctrl-C after {(stop_at - 1) // 6} epochs and "
            f"{(stop_at - 1) % 6 + 1} steps; the state is in {path}: call fit with resume=True to "
            "go on"
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


# ---- evaluate, predict, accuracy ----


@pytest.mark.parametrize("size", [1, 4, 22])
def test_evaluate_does_not_depend_on_the_size_of_the_batches(size):
    model, *_ = make()
    found = train.evaluate(
        model,
        DataLoader((X, Y), batch_size=size),
        loss=ag.mse_loss,
        metrics={"worst": lambda o, t: np.max(np.abs(o - t))},
    )
    error = model(ag.tensor(X)).numpy() - Y
    assert found["loss"] == pytest.approx(float(np.mean(error**2)), rel=1e-5)
    assert found["worst"] == pytest.approx(float(np.abs(error).max()), rel=1e-5)


def test_predict_joins_outputs_of_any_structure():
    outputs = train.predict(
        lambda x: {"twice": x * 2.0, "both": (x, x + 1.0)}, DataLoader(np.arange(5.0), batch_size=2)
    )
    assert outputs["twice"].tolist() == [0, 2, 4, 6, 8]
    assert outputs["both"][1].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("outputs", "targets", "expected"),
    [
        ([[0.1, 0.9], [0.8, 0.2]], [1, 1], 0.5),
        ([[[0.0, 1.0], [1.0, 0.0]]], [[1, 0]], 1.0),
        ([[2.0], [-1.0], [3.0], [0.0]], [[1.0], [0.0], [0.0], [0.0]], 0.75),
        ([1.0, -1.0], [1, 1], 0.5),
    ],
)
def test_accuracy_of_classes_and_of_logits(outputs, targets, expected):
    assert train.accuracy(np.array(outputs), np.array(targets)) == expected


def test_accuracy_refuses_shapes_that_do_not_belong_together():
    with pytest.raises(pg.ShapeError, match=r"got \(2, 3\) and \(3,\)"):
        train.accuracy(np.zeros((2, 3)), np.zeros(3, int))


# ---- mistakes ----


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"epochs": 0}, pg.SettingError, "fit: epochs must be a positive integer; got 0"),
        ({"on_nonfinite": "ignore"}, pg.SettingError, "must be 'raise' or 'skip'; got 'ignore'"),
        ({"resume": True}, pg.SettingError, "fit: resume needs state_path="),
        ({"save_every": 5}, pg.SettingError, "fit: save_every needs state_path="),
        ({"loader": (X, Y)}, pg.SettingError, r"got tuple; make a loader .*DataLoader\(\(x, y\)"),
        ({"loader": 3}, pg.SettingError, "needs batches to loop over; got int"),
        ({"loader": []}, pg.SettingError, "epoch 1 had no batches"),
        ({"loader": iter([(X, Y)])}, pg.SettingError, "epoch 2 had no batches; a generator can"),
        ({"loader": [X]}, pg.SettingError, r"a batch must be a tuple \(x, y\); got ndarray; give"),
        ({"loader": [{"x": X}]}, pg.SettingError, "got dict; give forward="),
        ({"metrics": [lambda o, t: 0, lambda o, t: 1]}, pg.SettingError, "names of their own"),
        ({"metrics": {"loss": abs}}, pg.SettingError, "'loss' is no name for a metric"),
        ({"loss": lambda o, t: o}, pg.ShapeError, "needs a value of one element"),
        ({"validation": 5}, pg.SettingError, "evaluate: needs batches"),
        ({"validation": []}, pg.SettingError, "evaluate: there is no batch in the data"),
    ],
)
def test_a_mistake_is_named_with_what_to_do(settings, error, message):
    model, opt, loader = make()
    settings = {"loader": loader, "epochs": 2, "loss": ag.mse_loss, **settings}
    with pytest.raises(error, match=message):
        train.fit(model, settings.pop("loader"), optimizer=opt, **settings)


def test_outputs_of_unequal_shape_cannot_be_joined():
    with pytest.raises(pg.ShapeError, match=r"one shape to be joined; got \(2,\), \(3,\)"):
        train.predict(lambda x: x, [np.ones((1, 2)), np.ones((1, 3))])
