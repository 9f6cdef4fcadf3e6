"""Devices: which there are, how one is chosen, how values move, the memory they hand out.

Vulkan itself is tested in test_vulkan.py; the device that is tested here is the same class on
ggml's CPU backend, so that every machine runs it.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag, nn, optim
from pyggml._ffi import lib
from pyggml.device_memory import FIRST_BLOCK, DeviceMemory
from pyggml.vulkan import VulkanDevice


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a child process with these environment variables."""
    return subprocess.run(
        [sys.executable, "-c", "import os\nimport numpy as np, pyggml as pg\n" + code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def printed(code: str, **variables: str) -> str:
    """Run code that must succeed, and return what it printed."""
    done = run(code, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def gpu():
    """Return a device whose memory is ggml's own, as a GPU's is, and whose backend is the CPU's."""
    handle = lib.ggml_backend_dev_by_type(lib.GGML_BACKEND_DEVICE_TYPE_CPU)
    device = VulkanDevice(handle, 7)
    device._open()
    lib.ggml_backend_cpu_set_n_threads(device._backend, 1)
    yield device
    device.close()


def labelled_batches(count):
    generator = np.random.default_rng(3)
    for _ in range(count):
        yield generator.standard_normal((16, 8), np.float32), generator.integers(0, 4, 16)


def train(model, optimizer, batches):
    """Return the losses of one step for each batch."""
    losses = []
    for x, y in batches:
        with ag.grad_tape():
            loss = ag.softmax_cross_entropy(model(ag.tensor(x)), y)
        ag.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def small_model():
    pg.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


# ---- which there are, and which is used ----------------------------------------------------------


def test_the_cpu_is_always_there_and_the_default():
    names = [device.name for device in pg.devices()]
    assert names[:2] == ["cpu", "reference"]
    assert all(name.startswith("vulkan") for name in names[2:])
    cpu = pg.devices()[0]
    assert (cpu.kind, cpu.memory_bytes) == ("cpu", None)
    assert "ggml" in cpu.description
    assert printed("print(pg.ag.tensor(1.0).device)", PYGGML_DEVICE="") == "Device('cpu')"


def test_making_a_tensor_on_the_cpu_looks_for_no_driver():
    code = "pg.ag.tensor(1.0).item(); print(pg.device.__module__, pg._ffi.log_lines)"
    assert printed(code) == "pyggml.device deque([], maxlen=500)"


def test_an_unknown_device_is_refused_with_the_ones_there_are_and_what_to_do():
    rule = r"device: there is no 'vulkan9'; this process has cpu, reference.*; .*[Vv]ulkan"
    for choose in (pg.set_device, pg.device, lambda name: ag.tensor(1.0, device=name)):
        with pytest.raises(pg.DeviceError, match=rule):
            choose("vulkan9")


def test_without_a_vulkan_driver_the_cpu_runs_and_asking_for_vulkan_is_an_error():
    output = printed(
        """
print([device.name for device in pg.devices()])
try:
    pg.set_device("vulkan0")
except pg.DeviceError as error:
    print(error)
print((pg.ag.tensor([2.0]) * 3.0).numpy())
""",
        VK_ICD_FILENAMES="/nonexistent",
        VK_DRIVER_FILES="/nonexistent",
    ).splitlines()
    assert output[0] == "['cpu', 'reference']"
    assert "there is no 'vulkan0'; this process has cpu, reference; " in output[1]
    assert output[2] == "[6.]"


def test_the_environment_variable_chooses_the_default():
    show = "print(pg.ag.tensor(1.0).device.name)"
    assert printed(show, PYGGML_DEVICE="reference") == "reference"
    assert printed("pg.set_device('cpu'); " + show, PYGGML_DEVICE="reference") == "cpu"


def test_auto_takes_the_cpu_where_there_is_no_gpu_and_says_so_in_the_log():
    code = """
import logging
logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
print(pg.ag.tensor(1.0).device.name, pg.ag.tensor(1.0).device.name)
"""
    done = run(code, PYGGML_DEVICE="auto", VK_ICD_FILENAMES="/none", VK_DRIVER_FILES="/none")
    assert done.stdout == "cpu cpu\n"
    assert done.stderr == "pyggml: PYGGML_DEVICE=auto: using Device('cpu')\n"


def test_a_wrong_environment_variable_is_named_in_the_error():
    done = run("pg.ag.tensor(1.0)", PYGGML_DEVICE="gpu")
    assert "DeviceError: PYGGML_DEVICE=gpu: device: there is no 'gpu'" in done.stderr


def test_the_current_device_is_per_thread_and_restored_after_an_exception():
    seen = []
    with pytest.raises(KeyError), pg.device("reference"):
        thread = threading.Thread(target=lambda: seen.append(ag.tensor(1.0).device.name))
        thread.start()
        thread.join()
        seen.append(ag.tensor(1.0).device.name)
        raise KeyError
    assert [*seen, ag.tensor(1.0).device.name] == ["cpu", "reference", "cpu"]


# ---- from one to another -------------------------------------------------------------------------


def test_a_value_moves_as_a_new_leaf_and_the_current_device_stays(gpu):
    x = ag.tensor([[1.5, -2.0]])
    there = x.to(gpu)
    back = there.to("cpu")
    assert (there.device, back.device, ag.tensor(0.0).device) == (gpu, x.device, x.device)
    np.testing.assert_array_equal(back.numpy(), x.numpy())
    assert x.to("cpu") is x
    labels = ag.tensor([1, 2]).to(gpu)
    assert labels.dtype == np.int32
    w = ag.param([1.0])
    w.name = "w"
    copy = w.to(gpu)
    assert copy.requires_grad and copy.name == "w" and type(copy) is type(w)
    assert w.device.name == "cpu"


def test_a_value_with_a_gradient_behind_it_does_not_move(gpu):
    w = ag.param([1.0])
    with ag.grad_tape():
        y = w * 2.0
    with pytest.raises(pg.GradError, match=r"to: no gradient flows from one device to another"):
        y.to(gpu)
    assert y.detach().to(gpu).numpy() == [2.0]


def test_mixing_devices_is_refused(gpu):
    with pytest.raises(pg.DeviceError, match=r"add: all inputs must live on one device; got cpu"):
        ag.tensor([1.0]) + ag.tensor([1.0], device=gpu)
    here, there = ag.param([1.0]), ag.param([1.0], device=gpu)
    optimizer = optim.SGD([here, there], lr=1.0)
    grads = {w: ag.tensor([1.0], device=w.device) for w in (here, there)}
    with pytest.raises(pg.DeviceError, match=r"SGD: parameters must live on one device; got"):
        optimizer.step(grads)


def test_a_moved_model_has_the_same_parameters_and_its_optimizer_goes_on(gpu):
    batches = list(labelled_batches(6))
    stay, move = small_model(), small_model()
    expected = train(stay, optim.AdamW(stay.parameters(), lr=1e-2), batches)

    parameters = move.parameters()
    optimizer = optim.AdamW(parameters, lr=1e-2)
    losses = train(move, optimizer, batches[:2])
    assert move.to(gpu) is move
    assert all(a is b for a, b in zip(move.parameters(), parameters, strict=True))
    with pg.device(gpu):
        losses += train(move, optimizer, batches[2:4])
    move.to("cpu")
    losses += train(move, optimizer, batches[4:])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for a, b in zip(stay.parameters(), parameters, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6)


def test_gradients_and_buffers_move_with_a_model(gpu):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with ag.grad_tape():
        loss = ag.sum(model(ag.tensor(np.eye(3))))
    ag.backward(loss)
    before = model[0].bias.grad.numpy(), model[1].running_var.numpy()
    model.to(gpu)
    after = model[0].bias.grad, model[1].running_var
    assert [t.device for t in after] == [gpu, gpu]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b.numpy())


def test_moving_a_parameter_makes_what_is_pending_on_it_stale(gpu):
    layer = nn.Linear(2, 2)
    with ag.grad_tape():
        loss = ag.sum(layer(ag.tensor([[1.0, 2.0]])))
    layer.to(gpu)
    with pytest.raises(pg.StaleError):
        ag.backward(loss)


# ---- a device with memory of its own -------------------------------------------------------------


def test_a_training_step_moves_the_batch_up_and_the_loss_down(gpu):
    with pg.device(gpu):
        model = small_model()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        batches = list(labelled_batches(4))
        train(model, optimizer, batches[:2])
        up, down = gpu.traffic.up, gpu.traffic.down
        train(model, optimizer, batches[2:])
        batch, loss = 4 * (16 * 8 + 16), 4
        numbers = 4 * 8  # of the updates
        assert gpu.traffic.up - up == 2 * (batch + numbers)
        assert gpu.traffic.down - down == 2 * loss


def test_memory_stays_flat_over_steps(gpu):
    gc.collect()
    with pg.device(gpu):
        model = small_model()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        used = []
        for _ in range(20):
            train(model, optimizer, labelled_batches(1))
            used.append(gpu.memory.used_bytes())
    assert used[1:] == [used[1]] * 19
    assert gpu.memory.reserved_bytes() == FIRST_BLOCK


def test_values_are_written_and_read_back_whatever_their_layout(gpu):
    array = np.arange(24, dtype=np.float64).reshape(2, 3, 4)
    for layout in (array, array.T, array[:, ::-1], array[1], np.asfortranarray(array)):
        np.testing.assert_array_equal(ag.tensor(layout, device=gpu).numpy(), layout)
    w = ag.param(np.zeros((4, 3)), device=gpu)
    w.assign(array[0].T)
    np.testing.assert_array_equal(w.numpy(), array[0].T)


def test_labels_are_checked_without_reading_them_back(gpu):
    logits = ag.tensor(np.zeros((2, 3)), device=gpu)
    with pytest.raises(pg.IndexRangeError, match=r"got 3"):
        ag.softmax_cross_entropy(logits, ag.tensor([0, 3], device=gpu))
    assert gpu.traffic.down == 0
    found = ag.argmax(logits, axis=-1)
    assert ag.softmax_cross_entropy(logits, found).item() == pytest.approx(np.log(3))


def test_a_closed_device_opens_again_and_old_values_are_an_error(gpu):
    x = ag.tensor([1.0, 2.0], device=gpu)
    assert (x + x).numpy().tolist() == [2.0, 4.0]
    gpu.close()
    gpu.close()
    for read in (x.numpy, (x + 1.0).numpy):
        with pytest.raises(pg.DeviceError, match=r"the device was closed, and this value went"):
            read()
    del x, read
    y = ag.tensor([3.0], device=gpu)
    assert (y * 2.0).numpy() == [6.0]


def test_a_forked_child_gets_an_error_and_no_hang():
    code = """
import warnings; warnings.simplefilter("ignore", DeprecationWarning)
from pyggml._ffi import lib
from pyggml.vulkan import VulkanDevice
gpu = VulkanDevice(lib.ggml_backend_dev_by_type(lib.GGML_BACKEND_DEVICE_TYPE_CPU), 0)
x = pg.ag.tensor([1.0], device=gpu)
if os.fork() == 0:
    for use in (x.numpy, lambda: pg.ag.tensor(1.0, device=gpu), lambda: (x + 1.0).numpy()):
        try:
            use()
        except pg.DeviceError as error:
            print(error, flush=True)
    os._exit(0)
os.wait()
print((x + 1.0).numpy())
"""
    lines = printed(code).splitlines()
    assert lines[3:] == ["[2.]"]
    assert all("cannot be used after os.fork(); use the start method" in line for line in lines[:3])


# ---- the ranges of memory ------------------------------------------------------------------------


@pytest.fixture
def memory():
    found = DeviceMemory(lib.ggml_backend_cpu_buffer_type(), "here")
    yield found
    found.close()


def test_ranges_are_aligned_and_never_overlap(memory):
    generator = np.random.default_rng(0)
    held = []
    for _ in range(2000):
        if held and generator.random() < 0.45:
            held.pop(generator.integers(len(held)))
        else:
            held.append(memory.allocate(int(generator.integers(1, 1 << 18))))
    ranges = sorted((id(s.block), s.offset, s.offset + s.nbytes) for s in held)
    for (block, start, end), (next_block, next_start, _) in zip(ranges, ranges[1:], strict=False):
        assert start % memory.alignment == 0
        assert block != next_block or end <= next_start
    assert memory.used_bytes() == sum(s.size for s in held)
    held.clear()
    assert memory.used_bytes() == 0


def test_freed_neighbours_make_room_for_something_larger(memory):
    quarters = [memory.allocate(FIRST_BLOCK // 4) for _ in range(4)]
    for i in (1, 3, 2):
        quarters[i] = None
    whole = memory.allocate(3 * FIRST_BLOCK // 4)
    assert (len(memory.blocks), whole.offset) == (1, FIRST_BLOCK // 4)
    memory.allocate(FIRST_BLOCK // 2)
    assert len(memory.blocks) == 2


def test_trimming_gives_back_what_holds_nothing(memory):
    kept = memory.allocate(100)
    large = memory.allocate(2 * FIRST_BLOCK)
    assert memory.reserved_bytes() == 3 * FIRST_BLOCK
    del large
    memory.trim()
    assert memory.reserved_bytes() == FIRST_BLOCK
    assert kept.block.buffer is not None


def test_a_range_given_back_after_close_is_of_no_consequence(memory):
    storage = memory.allocate(100)
    memory.close()
    memory.close()
    assert storage.block.buffer is None
    del storage
    again = memory.allocate(100)
    assert again.block.buffer is not None and memory.used_bytes() == again.size


def test_ranges_come_back_from_any_thread(memory):
    def work():
        for i in range(2000):
            memory.allocate(64 * (i % 7 + 1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.used_bytes() == 0 and len(memory.blocks) == 1


def test_more_than_there_is_raises_and_the_next_request_works(memory):
    with pytest.raises(pg.DeviceMemoryError, match=r"here: no memory for .* MB; values on it take"):
        memory.allocate(1 << 60)
    assert memory.allocate(64).block.buffer is not None


def test_ctrl_c_while_a_device_runs_that_cannot_stop_comes_after_a_whole_update(gpu):
    def record():
        with ag.grad_tape():
            y = w
            for _ in range(100):
                y = y @ w
            loss = ag.sum(w) + 0.0 * ag.sum(y)
        optimizer.zero_grad()
        ag.backward(loss)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pg.device(gpu):
            w = ag.param(np.ones((300, 300)) / 300)
            optimizer = optim.SGD([w], lr=0.001)
            record()
            optimizer.step()  # planned
            record()
            signal.setitimer(signal.ITIMER_REAL, 0.03)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
                time.sleep(60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert optimizer.t == 2
    np.testing.assert_allclose(w.numpy(), 1 / 300 - 0.002, rtol=1e-4)
