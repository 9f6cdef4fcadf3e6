"""What optimizers keep and how it is saved; groups of parameters; clipping.

Every method continues to the last bit, and windows equal batches.
"""

from __future__ import annotations

import numpy as np
import pytest
from test_optim import CASES, METHODS

import pyggml as pg
from pyggml import ag, nn, optim

SHAPES = [(3, 4), (5,), (2, 3, 2)]


def make(method, **common):
    """Return an optimizer of a method and its parameters."""
    generator = np.random.default_rng(7)
    params = [ag.param(generator.standard_normal(shape)) for shape in SHAPES]
    opt = CASES[method](params)
    for name, value in common.items():
        setattr(opt, name, value)
    return opt, params


def batch(seed, rows=4):
    """Return inputs for the loss below."""
    return np.random.default_rng(seed).standard_normal((rows, 1))


def backward(params, x, without=()):
    """Add the gradients of a mean over the rows of x, which is not linear in the parameters."""
    with ag.grad_tape():
        losses = [
            ag.mean(ag.sqr(ag.reshape(w, (1, -1)) * ag.tensor(x) + ag.tensor(x**2)))
            for w in params
            if w not in without
        ]
        loss = sum(losses[1:], losses[0])
    ag.backward(loss)


def as_values(params):
    return [w.numpy() for w in params]


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("method", CASES)
def test_saving_and_loading_continues_to_the_last_bit(method, device):
    """In the middle of a window, with a parameter that had fewer updates than the others."""
    with pg.device(device):
        opt, params = make(method, accumulate_steps=3)
        seeds = iter(range(100))

        def micro_batches(opt, params, count, **which):
            return [
                backward(params, batch(next(seeds)), **which) or opt.step() for _ in range(count)
            ]

        micro_batches(opt, params, 3, without={params[1]})
        opt.lr *= 0.5
        micro_batches(opt, params, 3 + 2)
        weights, state = as_values(params), opt.state_dict()
        rest = batch(50), batch(51)

        def finish(opt, params):
            done = []
            for x in (*rest, *rest):
                backward(params, x)
                done.append(opt.step())
            return done

        again, others = make(method, accumulate_steps=3)
        for w, value in zip(others, weights, strict=True):
            w.assign(value)
        again.load_state_dict(state)
        assert (again.t, again.lr) == (opt.t, opt.lr)
        assert finish(opt, params) == finish(again, others) == [True, False, False, True]
        for a, b in zip(as_values(params), as_values(others), strict=True):
            np.testing.assert_array_equal(a, b)
        for name, value in opt.state_dict().items():
            np.testing.assert_array_equal(again.state_dict()[name], value)


@pytest.mark.parametrize("method", CASES)
def test_k_micro_batches_equal_one_batch(method, every_device):
    whole, params = make(method)
    windowed, others = make(method, accumulate_steps=4)
    for seed in range(4):
        x = batch(seed, rows=8)
        whole.zero_grad()
        backward(params, x)
        whole.step()
        for i in range(4):
            backward(others, x[2 * i : 2 * i + 2])
            assert windowed.step() is (i == 3)
    assert whole.t == windowed.t == 4
    tolerance = 1e-9 if every_device.double else 2e-5
    for a, b in zip(as_values(params), as_values(others), strict=True):
        np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance)


def test_an_open_window_keeps_its_counts():
    w = ag.param(0.0)
    opt = optim.SGD([w], lr=1.0, accumulate_steps=3)

    def micro_batch(opt, w, x):
        with ag.grad_tape():
            loss = ag.sum(w * ag.tensor(x))
        ag.backward(loss)
        return opt.step(count=len(x))

    micro_batch(opt, w, [4.0])
    micro_batch(opt, w, [0.0, 0.0, 0.0])
    state = opt.state_dict()
    assert state["window"].tolist() == [1, 3]
    v = ag.param(0.0)
    again = optim.SGD([v], lr=1.0, accumulate_steps=3)
    again.load_state_dict(state)
    assert micro_batch(again, v, [1.0])
    assert v.item() == -1.0


def test_loading_into_an_open_window_drops_its_gradients():
    w = ag.param(0.0)
    opt = optim.SGD([w], lr=1.0, accumulate_steps=2)
    state = opt.state_dict()
    with ag.grad_tape():
        loss = w * 3.0
    ag.backward(loss)
    opt.step()
    opt.load_state_dict(state)
    assert w.grad is None
    opt.zero_grad()


def test_the_state_of_a_schedule_is_saved_with_the_optimizers():
    schedule = optim.ReduceOnPlateau(1.0, factor=0.5, patience=0)
    opt = optim.SGD([{"params": [ag.param(0.0)], "lr": schedule}], lr=schedule)
    for loss in (3.0, 4.0, 5.0):
        schedule.update(loss)
    state = opt.state_dict()
    fresh = optim.ReduceOnPlateau(1.0, factor=0.5, patience=0)
    again = optim.SGD([{"params": [ag.param(0.0)], "lr": fresh}], lr=fresh)
    again.load_state_dict(state)
    assert opt.lr == again.lr == 0.25
    assert fresh.best == 3.0
    plain = optim.SGD([ag.param(0.0)], lr=1.0)
    with pytest.raises(pg.ShapeError, match="needs t and no names but"):
        plain.load_state_dict(state)


def test_numbers_that_were_changed_are_restored_and_schedules_stay():
    def optimizer(lr):
        groups = [{"params": [ag.param(0.0)]}, {"params": [ag.param(0.0)], "lr_scale": 0.5}]
        return optim.SGD(groups, lr=lr, weight_decay=0.1)

    opt = optimizer(1.0)
    opt.lr, opt.groups[1].lr_scale, opt.groups[0].weight_decay = 0.3, 0.2, 0.7
    again = optimizer(1.0)
    again.load_state_dict(opt.state_dict())
    assert (again.lr, again.weight_decay) == (0.3, 0.1)
    assert [g.lr_scale for g in again.groups] == [1.0, 0.2]
    assert [g.weight_decay for g in again.groups] == [0.7, None]
    scheduled = optimizer(optim.constant(0.9))
    scheduled.load_state_dict(opt.state_dict())
    assert scheduled.lr == 0.9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("0.t"), r"0.t must have shape \(\); got nothing"),
        (lambda s: s.update({"1.0": np.zeros(5)}), r"1.t must have shape \(\); got nothing"),
        (lambda s: s.update({"0.grad": np.zeros(2)}), "needs t and no names but"),
        (
            lambda s: s.update({"window": np.array([0]), "0.grad": np.zeros(2)}),
            r"0.grad must have shape \(3, 4\); got \(2,\)",
        ),
        (lambda s: s.update(settings=np.ones((3, 3))), r"settings must have shape \(2, 3\); got"),
        (lambda s: s.update({"lr.0.best": np.zeros(())}), "needs t and no names but"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change, message):
    opt, params = make("SGD, momentum")
    opt.step({params[0]: ag.tensor(np.ones(SHAPES[0]))})
    state, before = opt.state_dict(), opt.state_dict()
    change(state)
    with pytest.raises(pg.ShapeError, match=message):
        opt.load_state_dict(state)
    for name, value in opt.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


# ---- groups --------------------------------------------------------------------------------------


def moved(opt, params):
    """Return how far an update with gradients of 1 moves parameters that were 1."""
    opt.step({w: ag.tensor(np.ones(w.shape)) for w in params})
    return [round(1 - float(w.numpy().flat[0]), 6) for w in params]


def test_groups_have_settings_of_their_own_and_else_the_optimizers(every_device):
    params = [ag.param([1.0]) for _ in range(5)]
    groups = [
        {"params": params[:1]},
        {"params": params[1:2], "lr": 0.5},
        {"params": params[2:3], "lr_scale": 0.1},
        {"params": params[3:4], "weight_decay": 0.0},
        {"params": params[4], "lr": optim.constant(0.25), "lr_scale": 2.0, "weight_decay": 3.0},
    ]
    opt = optim.SGD(groups, lr=lambda t: 0.1 * (1 + t), weight_decay=1.0)
    assert moved(opt, params) == [0.2, 1.0, 0.02, 0.1, 2.0]
    for w in params:
        w.assign([1.0])
    assert opt.lr == pytest.approx(0.2)
    opt.groups[1].lr, opt.groups[3].weight_decay = None, 2.0
    assert moved(opt, params) == [0.4, 0.4, 0.04, 0.6, 2.0]


def test_a_groups_schedule_sees_the_updates_of_the_optimizer():
    w = ag.param([0.0])
    schedule = optim.step_decay(1.0, every=1, factor=0.5)
    opt = optim.SGD([{"params": [w], "lr": schedule}], lr=0.0)
    for expected in (-1.0, -1.5, -1.75):
        opt.step({w: ag.tensor([1.0])})
        assert w.item() == expected


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (lambda w: [{"weights": [w]}], r'"params"; got keys \[\'weights\'\]'),
        (lambda w: [{"params": [w]}, w], 'each group must be a dict with "params"; got Parameter'),
        (
            lambda w: [{"params": [w], "momentum": 0.9}],
            "a group has params, lr, lr_scale, weight_d",
        ),
        (lambda w: [{"params": [w]}, {"params": [w]}], r"shape \(2,\) is in two groups"),
        (lambda w: [{"params": [w], "lr": -1.0}], r"SGD: lr must be in \[0.0, inf\); got -1.0"),
        (lambda w: [{"params": [w], "lr_scale": None}], "SGD: lr_scale must be in"),
        (lambda w: [{"params": [w], "weight_decay": -1}], "SGD: weight_decay must be in"),
        (lambda w: [{"params": []}], "SGD: needs at least one parameter"),
        (lambda w: w, r"SGD: needs a list of parameters; got one tensor; write \[w\]"),
        (lambda w: [[w]], "SGD: needs parameters made with ag.param; got"),
    ],
)
def test_a_wrong_group_is_refused(params, message):
    with pytest.raises(pg.SettingError, match=message):
        optim.SGD(params(ag.param([1.0, 2.0])), lr=0.1)


@pytest.mark.parametrize("method", [getattr(optim, name) for name in METHODS])
def test_weight_decay_can_be_switched_on_and_off(method, every_device):
    def weight_after(decays, first):
        w = ag.param([[1.0, -2.0]])
        opt = method([w], lr=0.1, weight_decay=first)
        for decay in decays:
            opt.weight_decay = decay
            opt.step({w: ag.tensor([[0.01, 0.02]])})
        return w.numpy()

    switched = weight_after([0.0, 0.5, 0.0], first=0.0)
    np.testing.assert_array_equal(weight_after([0.0, 0.5, 0.0], first=0.5), switched)
    assert np.abs(weight_after([0.0, 0.0, 0.0], first=0.0) - switched).max() > 1e-3


def test_a_schedule_that_gives_no_learning_rate_is_refused_when_it_is_used():
    w = ag.param([1.0])
    opt = optim.SGD([w], lr=lambda t: -1.0)
    with pytest.raises(pg.SettingError, match="SGD: lr must be in"):
        opt.step({w: ag.tensor([1.0])})
    with pytest.raises(pg.SettingError, match="SGD: lr must be a number or a schedule"):
        opt.lr = None
    with pytest.raises(pg.SettingError, match="SGD: weight_decay must be in"):
        opt.weight_decay = float("nan")


def test_parameters_on_two_devices_are_refused():
    params = [ag.param([1.0], device=name) for name in ("cpu", "reference")]
    opt = optim.SGD(params, lr=0.1)
    with pytest.raises(pg.DeviceError, match="SGD: parameters must live on one device; got cpu"):
        opt.step({w: ag.tensor([1.0], device=w.device) for w in params})
    with pytest.raises(pg.DeviceError, match="EMA: parameters must live on one device; got cpu"):
        optim.EMA(params).update()


def test_decay_groups_decay_matrices_and_leave_biases_and_norms_alone():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model.parameters()[0].requires_grad = False
    groups = optim.decay_groups(model, weight_decay=0.5)
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(1, 0.5), (4, 0.0)]
    assert groups[0]["params"][0].shape == (2, 4)
    only = optim.decay_groups([ag.param([[1.0]])], weight_decay=0.5)
    assert [g["weight_decay"] for g in only] == [0.5]


def test_an_optimizer_says_what_it_is():
    opt = optim.AdamW(optim.decay_groups(nn.Linear(2, 2), weight_decay=0.5), lr=0.1)
    assert repr(opt) == "AdamW(2 parameters in 2 groups, lr=0.1, weight_decay=0.01, t=0)"


# ---- clipping ------------------------------------------------------------------------------------


def linear_step(w, gradient):
    with ag.grad_tape():
        loss = ag.sum(w * ag.tensor(gradient))
    return ag.backward(loss)


def test_clip_value_acts_on_each_element_of_the_averaged_gradient(every_device):
    w = ag.param([0.0, 0.0])
    opt = optim.SGD([w], lr=1.0, accumulate_steps=2, clip_value=2.5)
    for gradient in ([6.0, 1.0], [0.0, -7.0]):  # mean (3, -3)
        linear_step(w, gradient)
        opt.step()
    assert w.tolist() == [-2.5, 2.5]


def test_clipping_functions_act_on_what_the_window_has_gathered():
    """Called before the last step() of a window, clip_grad_norm limits the sum."""
    w = ag.param([0.0, 0.0])
    opt = optim.SGD([w], lr=1.0, accumulate_steps=2)
    linear_step(w, [6.0, 0.0])
    opt.step()
    linear_step(w, [0.0, 8.0])
    assert optim.clip_grad_norm([w], 5.0) == pytest.approx(10.0)
    opt.step()
    np.testing.assert_allclose(w.numpy(), [-1.5, -2.0], rtol=1e-6)


def test_the_norm_is_that_of_all_parameters_together_each_counted_once():
    a, b = ag.param([0.0]), ag.param([0.0])
    with ag.grad_tape():
        loss = ag.sum(a * 3.0 + b * 4.0)
    ag.backward(loss)
    frozen = ag.param([1.0])
    assert optim.clip_grad_norm([a, b, a, frozen], 1.0) == pytest.approx(5.0)
    assert [a.grad.item(), b.grad.item()] == pytest.approx([0.6, 0.8])
    assert optim.clip_grad_norm([frozen], 1.0) == 0.0


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_a_norm_that_is_not_finite_changes_no_gradient(wrong):
    a, b = ag.param([0.0]), ag.param([0.0])
    with ag.grad_tape():
        loss = ag.sum(a * wrong + b * 4.0)
    ag.backward(loss)
    with pytest.raises(pg.GradError, match="norm is not finite"):
        optim.clip_grad_norm([a, b], 1.0)
    assert b.grad.item() == 4.0


def test_both_views_of_a_gradient_show_the_clipped_element():
    w = ag.param([0.0, 0.0])
    returned = linear_step(w, [3.0, -4.0])
    optim.clip_grad_value([w], 3.5)
    assert w.grad.tolist() == returned[w].tolist() == [3.0, -3.5]


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), "1", None])
def test_a_wrong_limit_is_refused(wrong):
    w = ag.param([0.0])
    calls = [
        lambda: optim.clip_grad_norm([w], wrong),
        lambda: optim.clip_grad_value([w], wrong),
    ]
    if wrong is not None:
        calls += [
            lambda: optim.SGD([w], clip_norm=wrong),
            lambda: optim.SGD([w], clip_value=wrong),
        ]
    for call in calls:
        with pytest.raises(pg.SettingError, match="must be in"):
            call()


def test_one_way_of_clipping_at_a_time():
    with pytest.raises(pg.SettingError, match="give clip_norm or clip_value, not both"):
        optim.SGD([ag.param([0.0])], clip_norm=1.0, clip_value=1.0)
