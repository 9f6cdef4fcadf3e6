"""Optimizers: each method against PyTorch's steps and its formula in NumPy, on every device.

Also what a method keeps, and bad settings.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag, graph, optim
from pyggml.device import CpuDevice
from pyggml.ggml_plan import GgmlPlan

DEVICES = ["cpu", "reference"]
TORCH = np.load(Path(__file__).with_name("torch_values") / "optimizers.npz")
NAMES = ["matrix", "vector", "cube", "number"]  # of the parameters in it

# What PyTorch was run with: torch_values/make_optimizers.py. It has no Lion.
CASES = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD, nesterov, decay": lambda p: optim.SGD(
        p, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.1
    ),
    "Adam": lambda p: optim.Adam(p, lr=0.1),
    "Adam, decay": lambda p: optim.Adam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.3),
    "AdamW": lambda p: optim.AdamW(p, lr=0.1, betas=(0.8, 0.95), weight_decay=0.3),
    "AdamW, groups": lambda p: optim.AdamW(
        [{"params": p[:2], "weight_decay": 0.0}, {"params": p[2:], "lr": 0.05}],
        lr=0.1,
        weight_decay=0.2,
    ),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.02),
    "RMSprop, momentum": lambda p: optim.RMSprop(p, lr=0.02, alpha=0.9, momentum=0.5),
    "RMSprop, centered, decay": lambda p: optim.RMSprop(
        p, lr=0.02, alpha=0.9, centered=True, weight_decay=0.1
    ),
    "RMSprop, centered, momentum": lambda p: optim.RMSprop(
        p, lr=0.02, alpha=0.9, eps=1e-2, centered=True, momentum=0.5
    ),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "Adagrad, all settings": lambda p: optim.Adagrad(
        p, lr=0.1, lr_decay=0.1, weight_decay=0.2, initial_accumulator_value=0.5, eps=1e-3
    ),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.1),
    "Adafactor, all settings": lambda p: optim.Adafactor(
        p, lr=0.5, beta2_decay=-0.5, eps=(0.1, 0.5), d=1.5, weight_decay=0.1
    ),
    "Lion": lambda p: optim.Lion(p, lr=0.1, betas=(0.8, 0.9), weight_decay=0.1),
}
IN_TORCH = [name for name in CASES if f"{name}/matrix" in TORCH]


def test_every_optimizer_is_tested():
    classes = {getattr(optim, name) for name in optim.__all__ if name != "Optimizer"}
    methods = {c for c in classes if isinstance(c, type) and issubclass(c, optim.Optimizer)}
    assert {type(make([ag.param([1.0])] * 3)) for make in [*CASES.values()][:6]} < methods
    assert {name.partition(",")[0] for name in CASES} == {c.__name__ for c in methods}
    assert set(CASES) - set(IN_TORCH) == {"Lion"}


def linear_step(opt, gradients):
    """Make an update whose gradients are given, through a loss that is linear in the weights."""
    opt.zero_grad()
    with ag.grad_tape():
        loss = sum(ag.sum(w * ag.tensor(g)) for w, g in gradients.items())
    ag.backward(loss)
    assert opt.step()


@pytest.mark.parametrize("case", IN_TORCH)
def test_ten_updates_are_those_of_pytorch_also_where_a_gradient_is_missing_at_times(
    case, every_device
):
    params = [ag.param(TORCH[f"start/{name}"]) for name in NAMES]
    opt = CASES[case](params)
    tolerance = 1e-10 if every_device.double else 2e-5
    for step in range(10):
        given = {w: TORCH[f"gradients/{n}"][step] for w, n in zip(params, NAMES, strict=True)}
        linear_step(opt, {w: g for w, g in given.items() if not np.isnan(g).any()})
        for w, name in zip(params, NAMES, strict=True):
            np.testing.assert_allclose(
                w.numpy(),
                TORCH[f"{case}/{name}"][step],
                tolerance,
                tolerance,
                err_msg=f"step {step}",
            )


def run(make, gradients, start, device):
    """Return the weight after updates with given gradients."""
    with pg.device(device):
        w = ag.param(start)
        opt = make([w])
        for g in gradients:
            linear_step(opt, {w: g})
        return w.numpy()


def sgd(w, gradients, lr, momentum=0.0, nesterov=False, decay=0.0):
    velocity = None
    for g in gradients:
        g = g + decay * w
        if momentum:
            velocity = g if velocity is None else momentum * velocity + g
            g = g + momentum * velocity if nesterov else velocity
        w = w - lr * g
    return w


def adam(w, gradients, lr, beta1=0.9, beta2=0.999, eps=1e-8, l2=0.0, decoupled=0.0):
    m = v = 0.0
    for t, g in enumerate(gradients, start=1):
        g = g + l2 * w
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        w = w - lr * decoupled * w
        w = w - lr * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
    return w


def lion(w, gradients, lr, beta1, beta2, decay):
    m = np.zeros_like(w)
    for g in gradients:
        update = np.sign(beta1 * m + (1 - beta1) * g)
        w = w - lr * (update + decay * w)
        m = beta2 * m + (1 - beta2) * g
    return w


def rmsprop(w, gradients, lr, alpha=0.99, eps=1e-8, momentum=0.0):
    v = velocity = 0.0
    for g in gradients:
        v = alpha * v + (1 - alpha) * g**2
        velocity = momentum * velocity + g / (np.sqrt(v) + eps)
        w = w - lr * velocity
    return w


def adagrad(w, gradients, lr, eps=1e-10):
    total = 0.0
    for g in gradients:
        total = total + g**2
        w = w - lr * g / (np.sqrt(total) + eps)
    return w


def adafactor(w, gradients, lr, d=1.0, eps=2.0**-23):
    """Algorithm 4 of the paper, with PyTorch's step size; the estimate is R C / (1^T R)."""
    v = r = c = 0.0
    for t, g in enumerate(gradients, start=1):
        keep = 1 - t**-0.8
        if w.ndim == 2:
            r = keep * r + (1 - keep) * (g**2).sum(axis=1)
            c = keep * c + (1 - keep) * (g**2).sum(axis=0)
            v = np.outer(r, c) / r.sum()
        else:
            v = keep * v + (1 - keep) * g**2
        u = g / np.maximum(np.sqrt(v), eps)
        u = u / max(1.0, np.sqrt(np.mean(u**2)) / d)
        w = w - max(1e-3, np.sqrt(np.mean(w**2))) * min(lr, t**-0.5) * u
    return w


FORMULAS = {
    "SGD": lambda w, g: sgd(w, g, 0.1),
    "SGD, momentum": lambda w, g: sgd(w, g, 0.1, 0.9),
    "SGD, nesterov, decay": lambda w, g: sgd(w, g, 0.1, 0.8, True, 0.1),
    "Adam": lambda w, g: adam(w, g, 0.1),
    "Adam, decay": lambda w, g: adam(w, g, 0.1, 0.8, 0.95, eps=1e-3, l2=0.3),
    "AdamW": lambda w, g: adam(w, g, 0.1, 0.8, 0.95, decoupled=0.3),
    "Lion": lambda w, g: lion(w, g, 0.1, 0.8, 0.9, 0.1),
    "RMSprop": lambda w, g: rmsprop(w, g, 0.02),
    "RMSprop, momentum": lambda w, g: rmsprop(w, g, 0.02, 0.9, momentum=0.5),
    "Adagrad": lambda w, g: adagrad(w, g, 0.1),
    "Adafactor": lambda w, g: adafactor(w, g, 0.1),
}


@pytest.mark.parametrize("method", FORMULAS)
@pytest.mark.parametrize("shape", [(), (3, 5), (17,), (2, 1000)])
def test_ten_updates_equal_the_methods_formula(method, shape, every_device):
    generator = np.random.default_rng(0)
    start = generator.standard_normal(shape)
    gradients = [generator.standard_normal(shape) for _ in range(10)]
    tolerance = 1e-10 if every_device.double else 1e-5
    np.testing.assert_allclose(
        run(CASES[method], gradients, start, every_device),
        FORMULAS[method](start, gradients),
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize("method", CASES)
def test_the_result_does_not_depend_on_the_number_of_threads(method):
    generator = np.random.default_rng(1)
    start = {"w": generator.standard_normal((300, 333)), "b": generator.standard_normal(1001)}
    results = []
    for threads in (1, 2, 5):
        device = pg.device(CpuDevice(n_threads=threads))
        with device:
            params = [ag.param(value) for value in start.values()]
            opt = CASES[method](params)
            for seed in range(3):
                noise = np.random.default_rng(seed)
                opt.step({w: ag.tensor(noise.standard_normal(w.shape)) for w in params})
            results.append([w.numpy() for w in params])
        device.device.close()
    for result in results[1:]:
        for a, b in zip(results[0], result, strict=True):
            np.testing.assert_array_equal(a, b)


def test_rmsprop_centered_survives_a_constant_gradient():
    """Its variance is 0, and rounding takes it below."""
    w = ag.param(np.zeros(100))
    opt = optim.RMSprop([w], lr=1e-3, alpha=0.5, centered=True, eps=1e-3)
    gradient = ag.tensor(np.linspace(0.1, 3.0, 100))
    for _ in range(100):
        opt.step({w: gradient})
    assert np.isfinite(w.numpy()).all()


# ---- what a method keeps -------------------------------------------------------------------------

STATE_SHAPES = {  # of a (3, 5) and of a (7,)
    "SGD": ([], []),
    "SGD, momentum": ([(3, 5)], [(7,)]),
    "Adam": ([(3, 5)] * 2, [(7,)] * 2),
    "AdamW": ([(3, 5)] * 2, [(7,)] * 2),
    "RMSprop": ([(3, 5)], [(7,)]),
    "RMSprop, momentum": ([(3, 5)] * 2, [(7,)] * 2),
    "RMSprop, centered, decay": ([(3, 5)] * 2, [(7,)] * 2),
    "RMSprop, centered, momentum": ([(3, 5)] * 3, [(7,)] * 3),
    "Adagrad": ([(3, 5)], [(7,)]),
    "Adafactor": ([(3, 1), (1, 5)], [(7,)]),
    "Lion": ([(3, 5)], [(7,)]),
}


@pytest.mark.parametrize("method", STATE_SHAPES)
def test_the_state_is_as_large_as_the_method_says(method):
    params = [ag.param(np.ones((3, 5))), ag.param(np.ones(7))]
    opt = CASES[method](params)
    opt.step({w: ag.tensor(np.ones(w.shape)) for w in params})
    values = opt.state_dict()
    for i, expected in enumerate(STATE_SHAPES[method]):
        shapes = [v.shape for n, v in values.items() if n.startswith(f"{i}.") and n != f"{i}.t"]
        assert shapes == expected


def test_adafactor_keeps_rows_and_columns_of_the_last_two_axes():
    w = ag.param(np.ones((2, 3, 4, 5)))
    opt = optim.Adafactor([w])
    opt.step({w: ag.tensor(np.ones(w.shape))})
    values = opt.state_dict()
    assert (values["0.0"].shape, values["0.1"].shape) == ((2, 3, 4, 1), (2, 3, 1, 5))


@pytest.mark.parametrize("method", CASES)
def test_an_update_takes_no_more_working_memory_for_more_parameters(method, monkeypatch):
    """At most a few values as large as the largest parameter, however many there are."""
    sizes = []
    run_plan = GgmlPlan.run

    def spy(plan, *args):
        sizes.append(plan.working_bytes)
        return run_plan(plan, *args)

    monkeypatch.setattr(GgmlPlan, "run", spy)
    for count in (3, 30):
        params = [ag.param(np.ones((64, 64))) for _ in range(count)]
        gradient = ag.tensor(np.ones((64, 64)))
        CASES[method](params).step(dict.fromkeys(params, gradient))
    assert sizes[0] <= 4 * 64 * 64 * 4
    assert sizes[1] <= sizes[0] + 27 * 4 * 64 * 4  # a row, a column and a few numbers each


def plans_made_by(function):
    cpu = pg.devices()[0]
    cpu.clear_plans()
    function()
    return len(cpu.plans)


@pytest.mark.parametrize("method", CASES)
def test_numbers_and_counters_that_change_plan_nothing_anew(method):
    params = [ag.param(np.ones((4, 4))), ag.param(np.ones(4)), ag.param(np.ones(4))]
    opt = CASES[method](params)
    opt.weight_decay = 0.5
    everything = {w: ag.tensor(np.ones(w.shape)) for w in params}
    opt.step({params[0]: everything[params[0]]})  # a count of its own
    opt.step(everything)

    def train():
        for i in range(5):
            opt.lr = 0.1 / (1 + i)
            opt.weight_decay = 0.1 * (1 + i)
            opt.groups[0].lr_scale = 1 + i
            opt.groups[-1].lr = 0.1 * (1 + i)
            opt.groups[-1].weight_decay = 0.1 * (1 + i)
            opt.step(everything)

    nodes = len(graph._nodes)
    assert plans_made_by(train) == 1
    assert len(graph._nodes) == nodes


def test_a_parameter_without_gradients_keeps_its_own_count():
    """Its first update, at t = 5, moves it by the learning rate: Adam's first step has size 1."""
    a, b = ag.param(0.0), ag.param(0.0)
    opt = optim.Adam([a, b], lr=0.1)
    for _ in range(4):
        opt.step({a: ag.tensor(1.0)})
    assert b.item() == 0.0
    opt.step({a: ag.tensor(1.0), b: ag.tensor(7.0)})
    assert b.item() == pytest.approx(-0.1, rel=1e-6)
    assert a.item() == pytest.approx(-0.5, rel=1e-6)
    assert opt.t == 5


def test_a_step_that_fails_counts_nothing(monkeypatch):
    w = ag.param(0.0)
    opt = optim.SGD([w], lr=1.0, accumulate_steps=2)

    def backward():
        with ag.grad_tape():
            loss = ag.sum(w * 1.0)
        ag.backward(loss)

    backward()
    opt.step(count=3)
    backward()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(CpuDevice, "compute", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        opt.step(count=5)
    assert opt.t == 0
    assert opt.step(count=5) is True
    assert w.item() == -2 / 8


# ---- step, windows -------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_step_reads_the_accumulated_gradient_or_takes_explicit_ones(device):
    with pg.device(device):
        values = []
        for explicit in (False, True):
            w = ag.param([1.0])
            opt = optim.SGD([w], lr=0.1)
            with ag.grad_tape():
                loss = ag.sum(w * w)
            grads = ag.backward(loss)
            assert opt.step(grads if explicit else None) is True
            values.append(w.item())
        assert values[0] == values[1] == pytest.approx(0.8)


@pytest.mark.parametrize("device", DEVICES)
def test_a_window_updates_on_its_last_step_and_changes_nothing_before(device):
    with pg.device(device):
        w = ag.param([1.0])
        opt = optim.SGD([w], lr=1.0, accumulate_steps=3)
        for i, g in enumerate([1.0, 2.0, 6.0]):
            with ag.grad_tape():
                loss = ag.sum(w * g)
            ag.backward(loss)
            assert opt.step() is (i == 2)
            assert w.item() == (1.0 if i < 2 else -2.0)  # 1 - mean(1, 2, 6)
        assert opt.t == 1
        assert w.grad is None


def test_the_sum_instead_of_the_mean_moves_k_times_as_far():
    moved = []
    for average in (True, False):
        w = ag.param([0.0])
        opt = optim.SGD([w], lr=1.0, accumulate_steps=4, average=average)
        for _ in range(4):
            with ag.grad_tape():
                loss = ag.sum(w * 1.0)
            ag.backward(loss)
            opt.step()
        moved.append(w.item())
    assert moved == [-1.0, -4.0]


def test_explicit_gradients_in_a_window_are_an_error_that_explains_itself():
    w = ag.param([1.0])
    opt = optim.SGD([w], lr=1.0, accumulate_steps=2)
    with ag.grad_tape():
        loss = ag.sum(w * w)
    grads = ag.backward(loss)
    with pytest.raises(
        pg.GradError, match=r"SGD: step\(grads\) would use the last micro-batch only"
    ):
        opt.step(grads)


def test_micro_batches_share_one_plan_each_and_memory_does_not_grow_with_the_window():
    cpu = pg.devices()[0]
    cpu.clear_plans()
    w = ag.param(np.zeros((8, 8)))
    opt = optim.SGD([w], lr=1.0, accumulate_steps=6)
    for _ in range(12):
        with ag.grad_tape():
            loss = ag.mean(ag.tensor(np.ones((4, 8))) @ w)
        ag.backward(loss)
        opt.step()
    assert len(cpu.plans) <= 3  # the first of a window, those between, and the last


def test_no_gradient_is_not_a_zero_gradient():
    for gradient, expected in ((None, 1.0), (0.0, 0.9)):
        w = ag.param([1.0])
        opt = optim.SGD([w], lr=1.0, weight_decay=0.1)
        if gradient is not None:
            with ag.grad_tape():
                loss = ag.sum(w * gradient)
            ag.backward(loss)
        opt.step()
        assert w.item() == pytest.approx(expected)


def test_a_parameter_listed_twice_is_updated_once():
    w = ag.param([1.0])
    opt = optim.SGD([w, w], lr=1.0)
    with ag.grad_tape():
        loss = ag.sum(w * 1.0)
    ag.backward(loss)
    opt.step()
    assert w.item() == 0.0


def test_two_optimizers_can_share_a_loss():
    a, b = ag.param([1.0]), ag.param([1.0])
    first, second = optim.SGD([a], lr=1.0), optim.AdamW([b], lr=0.1, weight_decay=0.0)
    with ag.grad_tape():
        loss = ag.sum(a * b)
    ag.backward(loss)
    first.step()
    second.step()
    assert a.item() == 0.0
    assert b.item() == pytest.approx(0.9)


METHODS = sorted({name.partition(",")[0] for name in CASES})


@pytest.mark.parametrize("method", [getattr(optim, name) for name in METHODS])
@pytest.mark.parametrize("wrong", [0, -2, 1.5, True, "3"])
def test_accumulate_steps_must_be_a_positive_integer(method, wrong):
    with pytest.raises(pg.SettingError, match="accumulate_steps must be a positive integer"):
        method([ag.param([1.0])], accumulate_steps=wrong)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: optim.SGD(p, lr=-1.0), r"SGD: lr must be in \[0.0, inf\); got -1.0"),
        (lambda p: optim.SGD(p, lr=float("nan")), "SGD: lr must be"),
        (lambda p: optim.SGD(p, lr=0.1, momentum=1.0), "SGD: momentum must be"),
        (lambda p: optim.SGD(p, lr=0.1, nesterov=True), "SGD: nesterov needs momentum"),
        (lambda p: optim.AdamW(p, betas=(0.9, 1.0)), r"AdamW: betas\[1\] must be"),
        (lambda p: optim.Adam(p, eps=-1e-8), "Adam: eps must be"),
        (lambda p: optim.Lion(p, betas=(-0.1, 0.9)), r"Lion: betas\[0\] must be"),
        (lambda p: optim.RMSprop(p, alpha=1.0), "RMSprop: alpha must be"),
        (lambda p: optim.RMSprop(p, momentum=-0.5), "RMSprop: momentum must be"),
        (lambda p: optim.Adagrad(p, lr_decay=-1.0), "Adagrad: lr_decay must be"),
        (lambda p: optim.Adafactor(p, d=0.5), r"Adafactor: d must be in \[1.0, inf\)"),
        (lambda p: optim.Adafactor(p, eps=(None, -1.0)), r"Adafactor: eps\[1\] must be"),
        (lambda p: optim.Adafactor(p, beta2_decay=0.8), "Adafactor: beta2_decay must be at most 0"),
        (lambda p: optim.Adam([]), "Adam: needs at least one parameter"),
        (lambda p: optim.Adam([1.0]), "Adam: needs parameters made with ag.param; got 1.0"),
        (
            lambda p: optim.Adam([p[0] * 2.0]),
            "Adam: needs parameters made with ag.param; got a tensor of shape",
        ),
    ],
)
def test_a_setting_out_of_range_is_refused(make, message):
    with pytest.raises(pg.SettingError, match=message):
        make([ag.param([1.0])])
