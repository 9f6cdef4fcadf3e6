"""fit: the same numbers as a loop written by hand, and what it adds to one."""

from __future__ import annotations

import numpy as np
import pytest
from small_fit import X, Y, make, run, weights

import pyggml as pg
from pyggml import ag, nn, optim, train
from pyggml.data import DataLoader

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


def test_skip_drops_the_good_batches_of_a_spoilt_window_too():
    data = poisoned(1)
    # batches 0 and 1 fall out; 2 and 3 make one update, 4 the last
    history, model, opt, _ = run(1, (*make(accumulate_steps=2)[:2], data), on_nonfinite="skip")
    _, other, _, _ = run(1, (*make(accumulate_steps=2)[:2], data[2:]))
    np.testing.assert_array_equal(weights(model), weights(other))
    assert (opt.t, history["skipped"]) == (2, [1])


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


# ---- evaluate, predict, accuracy ----


def test_evaluate_names_itself_where_a_batch_has_no_targets():
    with pytest.raises(pg.SettingError, match=r"evaluate: a batch must be a tuple \(x, y\)"):
        train.evaluate(nn.Linear(2, 1), [X], loss=ag.mse_loss)


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
        ({"state_path": "no/such/state"}, pg.SettingError, "needs a folder that is there; make /"),
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
