"""Training on a Vulkan device: what holds on the CPU holds there. Mesa's software driver does."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import IS_VULKAN_REQUIRED, NO_VULKAN
from op_table import ROWS

import build_ggml
import pyggml as pg
from pyggml import ag, nn, optim
from pyggml.device import Device
from pyggml.report import PlanReport

GPUS = [device for device in pg.devices() if device.name.startswith("vulkan")]
pytestmark = pytest.mark.skipif(not GPUS and not IS_VULKAN_REQUIRED, reason=NO_VULKAN)
SEED = 11


@pytest.fixture(autouse=True)
def gpu():
    """Run a test on the first Vulkan device."""
    assert GPUS, "PYGGML_REQUIRE_VULKAN=1, but ggml finds no Vulkan device"
    with pg.device(GPUS[0]) as device:
        yield device


def run(code: str, *arguments: str, **variables: str) -> str:
    """Run code in a child process that must succeed; return what it printed."""
    head = "import numpy as np, pyggml as pg\nfrom pyggml import ag, nn, optim\n"
    done = subprocess.run(
        [sys.executable, "-c", head + code, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- the device ----------------------------------------------------------------------------------


def test_the_device_says_what_it_is(gpu):
    assert gpu.kind in ("discrete", "integrated", "software")
    assert gpu.description and gpu.memory_bytes > 1 << 20
    assert repr(gpu).startswith("Device('vulkan0', ")
    assert gpu in pg.devices()
    x = ag.tensor([1.0, 2.0])
    assert x.device is gpu and "device='vulkan0'" in repr(x)


def test_the_environment_variable_takes_a_vulkan_device():
    assert run("print(ag.tensor(1.0).device.name)", PYGGML_DEVICE="vulkan0") == "vulkan0"
    software = all(device.kind == "software" for device in GPUS)
    if software:
        assert run("print(ag.tensor(1.0).device.name)", PYGGML_DEVICE="auto") == "cpu"


def test_more_memory_than_the_device_has_is_an_error_and_the_next_value_fits(gpu):
    with pytest.raises(pg.DeviceMemoryError, match=r"vulkan0: no memory for .* MB"):
        ag.tensor(np.broadcast_to(np.float32(0), (gpu.memory_bytes,)))
    assert ag.tensor([2.0]).numpy() == [2.0]


def test_a_closed_device_opens_again():
    code = """
with pg.device("vulkan0") as gpu:
    x = ag.tensor([1.0]); (x + x).numpy()
    gpu.close(); gpu.close()
    try:
        x.numpy()
    except pg.DeviceError as error:
        print(error)
    print((ag.tensor([1.0]) + 2.0).numpy())
"""
    lines = run(code).splitlines()
    assert "the device was closed" in lines[0] and lines[1] == "[3.]"


def test_plans_come_and_go_without_a_trace(gpu):
    """Working buffers grow and are freed between runs of many graphs (Mesa's driver minds)."""
    x = ag.param(np.ones((3, 4)))
    b = ag.tensor(np.full((1, 4), 2.0))
    for size in range(1, 60):
        with ag.grad_tape():
            loss = ag.sum(x * b * x / b)
        np.testing.assert_array_equal(ag.grad(loss, x).numpy(), np.full((3, 4), 2.0))
        wide = ag.tensor(np.ones((size, 40)))
        assert ag.sum((wide * 2.0) * 3.0).item() == size * 240
        if size % 5 == 0:
            gpu.clear_plans()


# ---- ops -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_op_agrees_with_reference(row, gpu):
    ag.gradcheck(
        row.fn, row.inputs(SEED), device=gpu, seed=SEED, directions=1,
        device_tolerance=row.tolerance
    )  # fmt: skip


def test_products_are_of_float32_and_not_of_halves():
    generator = np.random.default_rng(0)
    a = generator.uniform(0.5, 1.5, (32, 96)) * 1e5  # beyond a half's 65504
    b = generator.uniform(0.5, 1.5, (96, 40))
    found = ag.matmul(a, b).numpy()
    exact = a.astype(np.float32).astype(float) @ b.astype(np.float32).astype(float)
    np.testing.assert_allclose(found, exact, rtol=1e-6)


def test_products_may_round_to_halves_where_the_environment_says_so():
    code = """
a, b = (np.random.default_rng(i).standard_normal((64, 64)).astype(np.float32) for i in (0, 1))
with pg.device("vulkan0"):
    off = np.abs((ag.tensor(a) @ ag.tensor(b)).numpy() - a.astype(float) @ b)
print(off.max() / np.abs(a @ b).max())
"""
    assert float(run(code)) < 1e-6
    # A driver without float16 stays exact: then there is nothing to round.
    assert float(run(code, PYGGML_VULKAN_HALF="1")) < 2e-3


def test_what_a_person_holds_is_not_fused_away():
    x = ag.tensor(np.random.default_rng(1).standard_normal((4, 32)))
    weight = ag.tensor(np.full(32, 2.0))
    normed = ag.rms_norm(x)
    scaled = normed * weight
    np.testing.assert_allclose(scaled.numpy(), 2.0 * normed.numpy(), rtol=1e-6)
    rms = np.sqrt(np.mean(x.numpy() ** 2, axis=-1, keepdims=True))
    np.testing.assert_allclose(normed.numpy(), x.numpy() / rms, rtol=1e-4)


# ---- models --------------------------------------------------------------------------------------


class Gpt(nn.Module):
    """A decoder of one block."""

    def __init__(self, vocabulary: int = 13, length: int = 6, width: int = 16, heads: int = 2):
        self.heads = heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = ag.param(np.random.default_rng(0).normal(0, 0.1, (length, width)))
        self.norms = [nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)]
        self.qkv = [nn.Linear(width, width) for _ in range(3)]
        self.joined = nn.Linear(width, width)
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places  # (batch, length, width)
        h = self.norms[0](x)
        q, k, v = (
            ag.transpose(ag.reshape(f(h), (*h.shape[:2], self.heads, -1)), 1, 2) for f in self.qkv
        )
        mixed = ag.transpose(ag.scaled_dot_product_attention(q, k, v, causal=True), 1, 2)
        x = x + self.joined(ag.reshape(mixed, h.shape))
        x = x + self.inner(self.norms[1](x))
        return self.norms[2](x) @ self.tokens.weight.T  # (batch, length, vocabulary), tied


def make_mlp():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, lambda g: (g.standard_normal((6, 8)), g.integers(0, 4, 6))


def make_cnn():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip
    return model, lambda g: (g.standard_normal((5, 1, 8, 8)), g.integers(0, 4, 5))


def make_gpt():
    return Gpt(), lambda g: (g.integers(0, 13, (3, 6)), g.integers(0, 13, (3, 6)))


MODELS = {"mlp": make_mlp, "cnn": make_cnn, "gpt": make_gpt}


def train(name: str, device: Device | str, steps: int = 4) -> tuple[list, dict, PlanReport]:
    """Return the losses and weights of a short training run, and the report of its step."""
    with pg.device(device):
        pg.manual_seed(SEED)
        model, batch = MODELS[name]()
        optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        generator = np.random.default_rng(SEED)
        losses = []
        for _ in range(steps):
            x, y = batch(generator)
            with ag.grad_tape():
                loss = ag.softmax_cross_entropy(model(ag.tensor(x)), y)
            ag.backward(loss)
            report = ag.plan_report(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model.state_dict(), report


@pytest.mark.parametrize("name", MODELS)
def test_a_training_run_equals_the_cpus_and_nothing_falls_back(name, gpu):
    losses, weights, report = train(name, gpu)
    expected_losses, expected, _ = train(name, "cpu")
    assert report.device == "vulkan0" and report.fallbacks == []
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-5)
    assert losses[-1] != losses[0]
    for key, value in expected.items():
        np.testing.assert_allclose(weights[key], value, rtol=1e-3, atol=2e-5, err_msg=key)


METHODS = [
    found
    for found in vars(optim).values()
    if isinstance(found, type)
    and issubclass(found, optim.Optimizer)
    and found is not optim.Optimizer
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1, "clip_norm": 0.5}], ids=str)
def test_optimizer_does_what_it_does_on_the_cpu(method, settings, gpu):
    start = np.random.default_rng(2).standard_normal((3, 5))

    def three_steps(device):
        with pg.device(device):
            w = ag.param(start)
            optimizer = method([w], **settings)
            for _ in range(3):
                with ag.grad_tape():
                    loss = ag.sum(ag.sin(w) * w)
                ag.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            return w.numpy(), optimizer.state_dict()

    (ours, ours_state), (right, right_state) = three_steps(gpu), three_steps("cpu")
    np.testing.assert_allclose(ours, right, rtol=1e-5, atol=1e-6)
    assert ours_state.keys() == right_state.keys()


# ---- steps, and what they keep -------------------------------------------------------------------


def test_a_training_step_moves_the_batch_up_and_the_loss_down(gpu):
    model, batch = make_mlp()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    generator = np.random.default_rng(0)

    def step():
        x, y = batch(generator)
        with ag.grad_tape():
            loss = ag.softmax_cross_entropy(model(ag.tensor(x)), y)
        ag.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    up, down = gpu.traffic.up, gpu.traffic.down
    step()
    numbers = 4 * 8  # of the updates
    assert gpu.traffic.up - up == 4 * (6 * 8 + 6) + numbers  # batch, labels
    assert gpu.traffic.down - down == 4


def test_memory_stays_flat_over_steps(gpu):
    gc.collect()
    model, batch = make_mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    used = []
    for _ in range(10):
        x, y = batch(np.random.default_rng(0))
        with ag.grad_tape():
            loss = ag.softmax_cross_entropy(model(ag.tensor(x)), y)
        ag.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        del loss
        used.append(gpu.memory.used_bytes())
    assert used[2:] == [used[2]] * 8


def test_micro_batches_add_up_to_the_batch():
    generator = np.random.default_rng(4)
    x, y = generator.standard_normal((12, 8)), generator.standard_normal((12, 3))
    start = generator.standard_normal((8, 3))

    def update(parts):
        w = ag.param(start)
        optimizer = optim.SGD([w], lr=0.1, accumulate_steps=parts)
        for rows in np.split(np.arange(12), parts):
            with ag.grad_tape():
                loss = ag.mse_loss(ag.matmul(x[rows], w), y[rows])
            ag.backward(loss)
            updated = optimizer.step()
        assert updated
        return w.numpy()

    np.testing.assert_allclose(update(4), update(1), rtol=1e-5, atol=1e-6)


CHECKPOINTED = """
with pg.device("vulkan0"):
    generator = np.random.default_rng(0)
    weights = [ag.param(generator.standard_normal((16, 16)) / 4) for _ in range(6)]
    x = ag.tensor(generator.standard_normal((8, 16)))
    def block(h, w):
        return ag.gelu(ag.layer_norm(ag.dropout(h, p=0.2) @ w)) + h
    def gradients(wrap):
        pg.manual_seed(0)
        with ag.grad_tape():
            h = x
            for w in weights:
                h = wrap(h, w)
            loss = ag.sum(h * h)
        ag.backward(loss)
        found = [loss.numpy(), *[w.grad.numpy() for w in weights]]
        for w in weights:
            w.grad = None
        return found
    plain = gradients(block)
    again = gradients(lambda h, w: ag.checkpoint(block, h, w))
    print(max(np.abs(a - b).max() / np.abs(a).max() for a, b in zip(plain, again)))
"""


def test_checkpointing_changes_no_bit_without_fusion():
    assert float(run(CHECKPOINTED, GGML_VK_DISABLE_FUSION="1")) == 0.0


def test_checkpointing_changes_nothing_that_matters_with_fusion():
    assert float(run(CHECKPOINTED)) <= 1e-6


def test_dropout_draws_the_cpus_mask_and_a_replay_draws_it_again(gpu):
    x = w = np.ones(1000)

    def drop(device):
        pg.manual_seed(9)
        with pg.device(device):
            p = ag.param(w)
            with ag.grad_tape():
                y = ag.checkpoint(lambda p: ag.dropout(ag.tensor(x) * p, p=0.5), p)
                loss = ag.sum(y)
            ag.backward(loss)
            report = ag.plan_report(loss)
            return y.numpy(), p.grad.numpy(), report

    y, gradient, report = drop(gpu)
    np.testing.assert_array_equal(y, gradient)
    np.testing.assert_array_equal(y, drop("cpu")[0])
    assert {line.name for line in report.fallbacks} == {"dropout"}
    assert "fall back to the CPU: dropout" in str(report)
    assert {line.device for line in report.ops if line.name != "dropout"} == {"vulkan0"}


def test_what_was_saved_on_one_device_loads_on_another(gpu, tmp_path: Path):
    for first, second in ((gpu, "cpu"), ("cpu", gpu)):
        _, weights, _ = train("mlp", first, steps=2)
        with pg.device(second):
            model, _ = make_mlp()
            model.load_state_dict(weights)
            for name, parameter in model.named_parameters():
                assert parameter.device is pg.device(second).device
                np.testing.assert_array_equal(parameter.numpy(), weights[name])


def test_optimizer_state_loads_on_another_device(gpu):
    w = ag.param([1.0, 2.0])
    optimizer = optim.Adam([w], lr=0.1)
    for _ in range(2):
        optimizer.step({w: ag.tensor([1.0, -1.0])})
    saved = optimizer.state_dict()
    with pg.device("cpu"):
        copy = ag.param(w.numpy())
        other = optim.Adam([copy], lr=0.1)
        other.load_state_dict(saved)
        other.step({copy: ag.tensor([1.0, -1.0])})
    optimizer.step({w: ag.tensor([1.0, -1.0])})
    assert other.t == optimizer.t == 3
    np.testing.assert_allclose(copy.numpy(), w.numpy(), rtol=1e-6)


def test_a_model_moves_there_and_back(gpu):
    with pg.device("cpu"):
        model, batch = make_mlp()
        weights = model.state_dict()
        x = batch(np.random.default_rng(0))[0]
        here = model(ag.tensor(x)).numpy()
        model.to("vulkan0")
        there = model(ag.tensor(x, device="vulkan0"))
        assert there.device is gpu
        np.testing.assert_allclose(there.numpy(), here, rtol=1e-5, atol=1e-6)
        with pytest.raises(pg.DeviceError, match=r"all inputs must live on one device; got cpu, v"):
            model(ag.tensor(x))
        for name, value in model.to("cpu").state_dict().items():
            np.testing.assert_array_equal(value, weights[name])


# ---- when the driver fails -----------------------------------------------------------------------

LOSING = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
pg.set_device("vulkan0")
w = ag.param([1.0, 2.0])
opt = optim.SGD([w], lr=0.5)
def step():
    with ag.grad_tape():
        loss = ag.sum(w * w)
    ag.backward(loss)
    opt.step()
    opt.zero_grad()
step()
np.save(folder / "saved.npy", w.numpy())
(folder / "lost").touch()
for use in (step, lambda: print(w.numpy()), lambda: ag.tensor(1.0) + 1.0):
    try:
        use()
    except pg.DeviceError as error:
        print(error)
print((ag.tensor(np.load(folder / "saved.npy"), device="cpu") + 1.0).numpy())
"""


@pytest.mark.skipif(sys.platform != "linux", reason=NO_VULKAN)
def test_a_lost_device_is_an_exception_and_the_saved_state_stays(tmp_path):
    library = tmp_path / "lose_device.so"
    source = Path(__file__).with_name("lose_device.c")
    compiler = build_ggml.compiler("C")
    subprocess.run([*compiler, "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    variables = {"LD_PRELOAD": str(library), "LOSE_DEVICE": str(tmp_path / "lost")}
    lines = run(LOSING, str(tmp_path), **variables).splitlines()
    assert len(lines) == 4
    for line in lines[:3]:
        assert line.startswith("vulkan0: the driver failed: ") and "DeviceLost" in line
        assert line.endswith("start again from what was saved")
    assert lines[3] == "[1. 1.]"
