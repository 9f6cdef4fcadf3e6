"""Mixed precision: parameters in half types, their float32 masters, and the loss's scale."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import IS_VULKAN_REQUIRED, NO_VULKAN

import pyggml as pg
from pyggml import ag, nn, optim
from pyggml.device import CpuDevice

HALVES = ["float16", "bfloat16"]
SEED = 3


def vulkan_devices() -> list[str]:
    return [device.name for device in pg.devices() if device.name.startswith("vulkan")][:1]


@pytest.fixture(params=["cpu", "portable", "vulkan"])
def device(request):
    """Run a test on the CPU, on ggml's own ops only, and on the first Vulkan device."""
    if request.param == "vulkan" and not vulkan_devices() and not IS_VULKAN_REQUIRED:
        pytest.skip(NO_VULKAN)
    if request.param == "portable":
        found = CpuDevice(1, own_kernels=False)
    else:
        found = pg.device({"cpu": "cpu", "vulkan": "vulkan0"}[request.param]).device
    with pg.device(found):
        yield found
    if request.param == "portable":
        found.close()


def nearest(array: np.ndarray, kind: str) -> np.ndarray:
    """Round to a half type by arithmetic on exponents: ties to even, no subnormal numbers."""
    digits = {"float16": 11, "bfloat16": 8}[kind]
    mantissa, exponent = np.frexp(np.asarray(array, np.float32).astype(np.float64))
    return np.ldexp(np.rint(np.ldexp(mantissa, digits)), exponent - digits)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(SEED).uniform(0.1, 4.0, shape).astype(np.float32)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HALVES)
def test_values_are_rounded_to_nearest(kind, device):
    x = numbers(50, 7)
    np.testing.assert_array_equal(ag.tensor(x, dtype=kind).numpy(), nearest(x, kind))
    computed = ag.astype(ag.tensor(x) * 1.5, kind)
    np.testing.assert_array_equal(computed.numpy(), nearest(x * np.float32(1.5), kind))


@pytest.mark.parametrize("kind", HALVES)
def test_special_values_survive(kind):
    special = np.array([np.inf, -np.inf, np.nan, -0.0, 0.0], np.float32)
    x = ag.tensor(special, dtype=kind)
    np.testing.assert_array_equal(x.numpy(), special)
    assert np.signbit(x.numpy())[3]
    np.testing.assert_array_equal(ag.astype(x, "float32").numpy(), special)


def test_ties_go_to_even_in_bfloat16():
    ulp = 2.0**-7  # between 1 and 2
    x = ag.tensor([1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp / 2 + 2**-20], dtype="bfloat16")
    np.testing.assert_array_equal(x.numpy(), [1.0, 1 + 2 * ulp, 1 + ulp])


def test_what_float16_cannot_hold_becomes_infinite():
    assert ag.tensor([7e4, -7e4], dtype="float16").tolist() == [np.inf, -np.inf]
    assert ag.tensor(7e4, dtype="bfloat16").item() == nearest(7e4, "bfloat16")


def test_types_have_their_names():
    assert ag.tensor(1.0, dtype="float16").dtype == np.float16
    x = ag.tensor(1.0, dtype="bfloat16")
    assert str(x.dtype) == "bfloat16" and "dtype=bfloat16" in repr(x)
    assert x.numpy().dtype == np.float32
    assert ag.tensor(2.0, dtype=x.dtype).dtype is x.dtype
    with pytest.raises(pg.DTypeError, match="float16, bfloat16"):
        ag.tensor(1.0, dtype="float8")


@pytest.mark.parametrize("kind", HALVES)
def test_half_values_take_half_the_memory(kind):
    x = ag.tensor(numbers(100, 10), dtype=kind)
    report = ag.plan_report(ag.astype(x, "float32") * 2.0)
    assert report.bytes["inputs"] == 2 * x.size


# ---- ops -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HALVES)
def test_every_op_takes_a_half_tensor_as_the_float32_of_its_value(kind, device):
    x, y = numbers(4, 6), numbers(6)
    halves = [ag.tensor(value, dtype=kind) for value in (x, y)]
    wide = [ag.tensor(nearest(value, kind)) for value in (x, y)]
    for op in (ag.add, ag.mul, lambda a, b: ag.layer_norm(a, b), lambda a, b: ag.softmax(a) + b[0]):
        np.testing.assert_array_equal(op(*halves).numpy(), op(*wide).numpy())
    assert (halves[0] + halves[1]).dtype == np.float32


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("rows", [1, 40])
def test_products_with_half_weights_are_exact_and_add_up_in_float32(kind, rows, device):
    x = np.random.default_rng(0).standard_normal((rows, 96)).astype(np.float32)
    w = np.random.default_rng(1).standard_normal((48, 96)).astype(np.float32)
    exact = x.astype(float) @ nearest(np.abs(w), kind).T
    found = x @ ag.tensor(np.abs(w), dtype=kind).T
    # ggml's own kernel for the CPU rounds the other operand, too.
    is_rounded = isinstance(device, CpuDevice) and not device.own_kernels and kind == "float16"
    tolerance = 2.0**-11 if is_rounded else 1e-6
    scale = np.abs(x).astype(float) @ np.abs(w).T
    assert np.max(np.abs(found.numpy() - exact) / scale) < tolerance


@pytest.mark.parametrize("kind", HALVES)
def test_gradients_of_half_parameters_are_float32_and_those_of_the_rounded_value(kind, device):
    x, w = numbers(5, 8), numbers(3, 8)
    layer = nn.Linear(8, 3, bias=False)
    layer.load_state_dict({"weight": w})
    layer.to(dtype=kind)
    data = ag.tensor(x, requires_grad=True)
    with ag.grad_tape():
        loss = ag.sum(ag.sqr(layer(data)))
    grads = ag.backward(loss)
    assert grads[layer.weight].dtype == np.float32
    rounded = nearest(w, kind)
    output = x @ rounded.T
    tolerance = 2e-3 if isinstance(device, CpuDevice) and not device.own_kernels else 1e-5
    np.testing.assert_allclose(grads[layer.weight].numpy(), 2 * output.T @ x, rtol=tolerance)
    np.testing.assert_allclose(grads[data].numpy(), 2 * output @ rounded, rtol=tolerance)


@pytest.mark.parametrize("kind", HALVES)
def test_the_gradient_passes_a_cast_unchanged(kind):
    x = ag.param(numbers(4))
    with ag.grad_tape():
        loss = ag.sum(ag.astype(x * 3.0, kind) * [1.0, 2.0, 3.0, 4.0])
    np.testing.assert_array_equal(ag.grad(loss, x).numpy(), [3.0, 6.0, 9.0, 12.0])


def test_integers_become_halves_and_halves_integers():
    assert ag.astype(ag.tensor([1, 2]), "bfloat16").tolist() == [1.0, 2.0]
    assert ag.astype(ag.tensor([1.75, -2.5], dtype="float16"), "int32").tolist() == [1, -2]


# ---- training ------------------------------------------------------------------------------------


def model_of(kind: str) -> nn.Module:
    generator = np.random.default_rng(SEED)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))
    shapes = {name: p.shape for name, p in model.named_parameters()}
    model.load_state_dict(
        {name: generator.uniform(-0.5, 0.5, shape) for name, shape in shapes.items()}
    )
    return model.to(dtype=kind)


def train(model: nn.Module, opt: optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    losses = []
    for i in range(first, first + steps):
        generator = np.random.default_rng(i)
        x, y = generator.standard_normal((8, 6)), generator.integers(3, size=8)
        with ag.grad_tape():
            loss = ag.softmax_cross_entropy(model(x), y)
        opt.backward(loss)
        opt.step()
        opt.zero_grad(discard_window=True)
        losses.append(loss.item())
    return losses


METHODS = {
    "SGD": lambda p, **k: optim.SGD(p, lr=0.1, momentum=0.9, **k),
    "AdamW": lambda p, **k: optim.AdamW(p, lr=0.01, **k),
    "Adafactor": lambda p, **k: optim.Adafactor(p, lr=0.01, **k),
}


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("method", METHODS)
def test_training_agrees_with_the_reference_device(kind, method, device):
    losses = []
    for where in (device, "reference"):
        with pg.device(where):
            model = model_of(kind)
            losses.append(train(model, METHODS[method](model.parameters()), 8))
    # One weight that falls on the other side of a rounding moves the loss by this much.
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-3)
    assert losses[0][-1] != losses[0][0]


@pytest.mark.parametrize("kind", HALVES)
def test_updates_too_small_for_the_half_type_add_up_in_the_master(kind, device):
    w = ag.tensor([1.0], dtype=kind, requires_grad=True)
    opt = optim.SGD([w], lr=2.0**-14)
    for _ in range(2**10):
        with ag.grad_tape():
            loss = ag.sum(w)
        ag.backward(loss)
        opt.step()
        opt.zero_grad()
    assert w.item() == 1.0 - 2.0**-4


def test_the_parameter_is_its_master_rounded_and_memory_is_used_in_place(device):
    model = model_of("float16")
    opt = optim.AdamW(model.parameters(), lr=0.01)
    train(model, opt, 5)
    state = opt.state_dict()
    for i, parameter in enumerate(model.parameters()):
        master = state[f"{i}.master"]
        assert master.dtype == np.float32
        np.testing.assert_array_equal(parameter.numpy(), master.astype(np.float16))


@pytest.mark.parametrize("kind", HALVES)
def test_a_saved_state_goes_on_to_the_last_bit(kind, tmp_path):
    model = model_of(kind)
    opt = optim.AdamW(model.parameters(), lr=0.01, loss_scale=optim.LossScale(growth_interval=3))
    train(model, opt, 4)
    pg.io.save_state(tmp_path / "s", model=model, optimizer=opt)
    expected = train(model, opt, 4, first=4)

    again = model_of(kind)
    other = optim.AdamW(again.parameters(), lr=0.01, loss_scale=optim.LossScale())
    other.loss_scale.growth_interval = 3
    pg.io.load_state(tmp_path / "s", model=again, optimizer=other)
    assert train(again, other, 4, first=4) == expected
    assert other.loss_scale.value == opt.loss_scale.value > 2.0**15
    a, b = opt.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_a_value_assigned_to_the_parameter_replaces_its_master():
    w = ag.tensor([1.0], dtype="float16", requires_grad=True)
    opt = optim.SGD([w], lr=0.5)
    for value in (8.0, 32.0):
        w.assign([value])
        with ag.grad_tape():
            loss = ag.sum(w)
        ag.backward(loss)
        opt.step()
        opt.zero_grad()
        assert w.item() == value - 0.5


def test_moving_a_model_keeps_its_masters(device):
    model = model_of("bfloat16")
    opt = optim.SGD(model.parameters(), lr=0.1)
    train(model, opt, 3)
    before = opt.state_dict()["0.master"]
    assert np.abs(before - model[0].weight.numpy()).max() > 1e-4
    model.to("reference")
    opt.lr = 1e-5
    with pg.device("reference"):
        train(model, opt, 1)
    moved = np.abs(opt.state_dict()["0.master"] - before)
    assert 0 < moved.max() < 1e-4  # a master made from the rounded weight is off by more


def test_a_model_can_go_back_to_float32():
    model = model_of("float16")
    opt = optim.AdamW(model.parameters(), lr=0.01)
    train(model, opt, 2)
    model.to(dtype="float32")
    train(model, opt, 2)
    assert model[0].weight.dtype == np.float32
    assert not any("master" in name for name in opt.state_dict())


def test_weights_go_to_a_file_and_back(tmp_path):
    for kind in HALVES:
        first, second = model_of(kind), model_of(kind)
        train(first, optim.SGD(first.parameters(), lr=0.1), 2)
        pg.io.save_weights(tmp_path / kind, first)
        pg.io.load_weights(tmp_path / kind, second)
        for a, b in zip(first.parameters(), second.parameters(), strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_averages_of_half_parameters_are_refused():
    with pytest.raises(pg.DTypeError, match="EMA: needs float32 parameters; got float16"):
        optim.EMA(model_of("float16").parameters())


def test_checkpointing_changes_no_bit(device):
    results = []
    for wrap in (lambda f, x: f(x), ag.checkpoint):
        model = model_of("float16")
        with ag.grad_tape():
            loss = ag.sum(ag.sqr(wrap(model, ag.tensor(numbers(4, 6)))))
        grads = ag.backward(loss)
        results.append([grads[p].numpy() for p in model.parameters()])
    for plain, checkpointed in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, checkpointed)


# ---- the loss's scale ----------------------------------------------------------------------------


def test_the_scale_leaves_the_updates_as_they_are(device):
    losses = []
    for scale in (None, 2.0**12, optim.LossScale(2.0**10, growth_interval=2)):
        model = model_of("float32")
        losses.append(train(model, optim.SGD(model.parameters(), lr=0.1, loss_scale=scale), 6))
    assert losses[0] == losses[1] == losses[2]  # powers of two round nothing


def test_a_step_without_finite_gradients_is_skipped_and_halves_the_scale():
    w = ag.param([1.0])
    opt = optim.SGD([w], lr=0.5, loss_scale=optim.LossScale(64.0, growth_interval=2))
    values, scales = [], []
    for factor in (1.0, np.inf, 1.0, 1.0):
        with ag.grad_tape():
            loss = ag.sum(w * np.float32(factor))
        opt.backward(loss)
        opt.step()
        opt.zero_grad()
        values.append(w.item())
        scales.append(opt.loss_scale.value)
    assert values == [0.5, 0.5, 0.0, -0.5]
    assert scales == [64.0, 32.0, 32.0, 64.0]
    assert opt.skipped == 1 and opt.t == 3


def test_a_scale_grows_again_where_its_state_comes_from_a_longer_interval():
    scale = optim.LossScale(64.0, growth_interval=2)
    scale.streak = 5
    scale.adapt(finite=True)
    assert (scale.value, scale.streak) == (128.0, 0)


def test_another_scale_plans_nothing_anew():
    w = ag.param([1.0])
    opt = optim.SGD([w], lr=0.5, loss_scale=optim.LossScale(64.0, growth_interval=1))
    device, counts = pg.device("cpu").device, []
    for _ in range(4):
        with ag.grad_tape():
            loss = ag.sum(w * w)
        opt.backward(loss)
        opt.step()
        opt.zero_grad()
        counts.append(len(device.plans))
    assert counts[1] == counts[3] and opt.loss_scale.value == 1024.0


def test_the_scale_works_with_accumulation_and_clipping():
    results = []
    for scale in (None, 256.0):
        model = model_of("float32")
        opt = optim.SGD(
            model.parameters(), lr=0.1, accumulate_steps=2, clip_norm=0.1, loss_scale=scale
        )
        for i in range(4):
            with ag.grad_tape():
                x = np.random.default_rng(i).standard_normal((8, 6))
                loss = ag.softmax_cross_entropy(model(x), np.arange(8) % 3)
            opt.backward(loss)
            opt.step()
        results.append([p.numpy() for p in model.parameters()])
    for plain, scaled in zip(*results, strict=True):
        np.testing.assert_allclose(plain, scaled, rtol=1e-6, atol=1e-8)


def test_a_scale_assigned_between_backward_and_step_counts_from_the_next_loss_on():
    w = ag.param([1.0])
    opt = optim.SGD([w], lr=0.5, loss_scale=64.0)
    for value in (1.0, 256.0):
        with ag.grad_tape():
            loss = ag.sum(w)
        opt.backward(loss)
        opt.loss_scale.value = value
        opt.step()
        opt.zero_grad()
    assert w.item() == 0.0


def test_a_window_that_was_saved_open_goes_on_with_the_scale_of_its_gradients():
    results = []
    for resumed in (False, True):
        w = ag.param([1.0])

        def made(w: ag.Parameter) -> optim.Optimizer:
            return optim.SGD([w], lr=1.0, accumulate_steps=2, loss_scale=optim.LossScale(64.0))

        opt = made(w)
        for i in range(2):
            if resumed and i == 1:
                saved = opt.state_dict()
                w = ag.param(w.numpy())
                opt = made(w)
                opt.load_state_dict(saved)
            with ag.grad_tape():
                loss = ag.sum(w * (0.25 + i))
            opt.backward(loss)
            opt.step()
        results.append(w.item())
    assert results == [0.25, 0.25]


def test_gradients_of_an_unscaled_loss_are_refused():
    w = ag.param([1.0])
    opt = optim.SGD([w], lr=0.5, loss_scale=64.0)
    with ag.grad_tape():
        loss = ag.sum(w * w)
    ag.backward(loss)
    with pytest.raises(pg.GradError, match=r"call opt\.backward\(loss\) in place of ag\.backward"):
        opt.step()
    opt.zero_grad()
    with ag.grad_tape():
        loss = ag.sum(w * w)
    opt.backward(loss)
    assert opt.step() and w.item() == 0.0


def test_small_gradients_that_a_half_activation_would_lose_survive():
    """float16 has nothing below 6e-8: a gradient that passes through it unscaled would be 0."""
    x = np.full((1, 1), 2.0**-13, np.float32)
    found = {}
    for scale in (None, 2.0**12):
        w = ag.tensor([[1.0]], dtype="float16", requires_grad=True)
        opt = optim.SGD([w], lr=1.0, loss_scale=scale)
        with ag.grad_tape():
            loss = ag.sum(ag.tensor(x) @ w) * 2.0**-13
        opt.backward(loss)
        found[scale] = ag.astype(w.grad, "float16").item()
    assert found[None] == 0.0
    assert found[2.0**12] == 2.0**-14


def test_fit_trains_in_mixed_precision():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((64, 6))
    y = (x[:, 0] > 0).astype(int) + (x[:, 1] > 0)
    model = model_of("bfloat16")
    opt = optim.AdamW(model.parameters(), lr=0.02, loss_scale=optim.LossScale())
    loader = pg.data.DataLoader((x, y), batch_size=16, shuffle=True, seed=0)
    history = pg.train.fit(
        model, loader, loss=ag.softmax_cross_entropy, optimizer=opt, epochs=15,
        on_nonfinite="skip", progress=False,
    )  # fmt: skip
    assert history["loss"][-1] < 0.3 * history["loss"][0]


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: optim.LossScale(0.0), "LossScale: value"),
        (lambda: optim.LossScale(1e39), "LossScale: value"),
        (lambda: optim.LossScale(growth_interval=0), "LossScale: growth_interval"),
        (lambda: optim.LossScale(factor=0.5), "LossScale: factor"),
        (lambda: optim.SGD([ag.param(1.0)], loss_scale=-1), "SGD: loss_scale"),
        (lambda: optim.SGD([ag.param(1.0)], loss_scale="auto"), "SGD: loss_scale"),
    ],
)
def test_settings_of_the_scale_are_checked(wrong, message):
    with pytest.raises(pg.SettingError, match=message):
        wrong()


def test_parameters_need_a_float_type():
    with pytest.raises(pg.DTypeError, match="to: parameters need a float type; got int32"):
        nn.Linear(2, 1).to(dtype="int32")
