"""Random numbers are functions of seed and draw: the same for every device, thread and replay."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag
from pyggml.device import CpuDevice
from pyggml.random import Generator, default_generator, philox

# From the authors' distribution (Random123, kat_vectors): counter, key, words.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, expected):
    found = philox(tuple(words(key)), np.array(words(counter), np.uint64)[:, None])
    assert found[:, 0].tolist() == words(expected)


# ---- dropout ----


def dropped(size, *, seed=3, p=0.3):
    return ag.dropout(np.ones(size), p=p, generator=Generator(seed)).numpy()


def test_every_device_drops_the_same_elements(every_device):
    with pg.device("reference"):
        right = dropped((3, 1001))
    np.testing.assert_allclose(dropped((3, 1001)), right, rtol=1e-6)


def test_the_mask_has_the_same_bits_for_any_number_of_threads():
    masks = []
    for n_threads in (1, 2, 3):
        device = CpuDevice(n_threads=n_threads)
        with pg.device(device):
            masks.append(dropped(1_000_003))
        device.close()
    assert (masks[0] == masks[1]).all()
    assert (masks[0] == masks[2]).all()


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.9])
def test_a_share_p_is_dropped_and_the_rest_scaled_by_its_inverse(p):
    y = dropped(100_000, p=p)
    kept = y != 0.0
    assert abs(kept.mean() - (1 - p)) < 5 * np.sqrt(p * (1 - p) / y.size)
    np.testing.assert_allclose(y[kept], 1 / (1 - p), rtol=1e-6)


def test_neighbouring_elements_draws_and_seeds_are_independent():
    generator = Generator(0)
    masks = [ag.dropout(np.ones(100_000), generator=generator).numpy() > 0 for _ in range(2)]
    masks.append(dropped(100_000, seed=1, p=0.5) > 0)
    masks += [np.roll(masks[0], shift) for shift in (1, 16, 64, 256)]
    for other in masks[1:]:
        assert abs((masks[0] == other).mean() - 0.5) < 5 * 0.5 / np.sqrt(100_000)


def test_p_of_one_gives_zeros_whatever_comes_in(every_device):
    assert ag.dropout([1.0, -2.0], p=1.0).tolist() == [0.0, 0.0]


def test_dropping_nan_and_infinity_leaves_zeros():
    assert ag.dropout([np.nan, np.inf], p=1.0).tolist() == [0.0, 0.0]


def test_outside_of_training_and_for_p_of_zero_the_input_itself_is_returned():
    x = ag.tensor([1.0, 2.0])
    before = default_generator.state()
    assert ag.dropout(x, training=False) is x
    assert ag.dropout(x, p=0.0) is x
    assert default_generator.state() == before


def test_the_gradient_goes_where_the_value_went(every_device):
    w = ag.param(np.ones(1000))
    with ag.grad_tape():
        y = ag.dropout(w, p=0.5)
    (gradient,) = ag.grad(y, [w], seed=ag.tensor(np.ones(1000, np.float32)))
    assert (gradient.numpy() == y.numpy()).all()
    assert set(y.tolist()) == {0.0, 2.0}


def test_a_checkpoint_replays_the_mask_and_does_not_disturb_the_generator():
    outputs, following = [], []
    for wrap in (lambda fn, *args: fn(*args), ag.checkpoint):
        pg.manual_seed(12)
        w, x = ag.param(np.ones(1000)), ag.tensor(np.ones(1000))
        with ag.grad_tape():
            y = wrap(lambda w, x: ag.dropout(w * x, p=0.5), w, x)
            loss = ag.sum(y)
        ag.backward(loss)
        assert (w.grad.numpy() == y.numpy()).all()
        outputs.append(y.numpy())
        following.append(default_generator.numpy().random())
    assert (outputs[0] == outputs[1]).all()
    assert following[0] == following[1]


def test_another_draw_and_another_seed_hit_the_same_plan():
    device = CpuDevice()
    masks = []
    with pg.device(device):
        w = ag.param(np.ones(64))
        for step in range(5):
            pg.manual_seed(step // 2)
            with ag.grad_tape():
                loss = ag.sum(ag.dropout(w) * ag.dropout(w))
            masks.append(ag.grad(loss, w).numpy())
            if step == 1:
                plans = len(device.plans)
    assert len(device.plans) == plans
    assert (masks[0] == masks[1]).all()
    assert (masks[0] != masks[2]).any()
    device.close()


# ---- generators ----


def test_a_seed_repeats_the_sequence_and_draws_differ():
    pg.manual_seed(1)
    first = [ag.dropout(np.ones(50)).tolist() for _ in range(3)]
    pg.manual_seed(1)
    assert [ag.dropout(np.ones(50)).tolist() for _ in range(3)] == first
    assert first[0] != first[1] != first[2]


def test_a_generator_goes_on_from_a_saved_state():
    generator = Generator(2**64 - 1)
    generator.key()
    state = generator.state()
    assert state == {"seed": 2**64 - 1, "draws": 1}
    following = generator.key().tolist(), generator.numpy().random(3).tolist()
    resumed = Generator(0)
    resumed.set_state(state)
    assert (resumed.key().tolist(), resumed.numpy().random(3).tolist()) == following


def test_an_own_generator_leaves_the_default_one_alone():
    before = default_generator.state()
    ag.dropout(np.ones(3), generator=Generator(0))
    ag.rand((2,), generator=Generator(0))
    assert default_generator.state() == before


def test_generators_without_a_seed_differ():
    assert Generator().state() != Generator().state()


def test_threads_that_share_a_generator_never_get_the_same_draw():
    generator = Generator(0)
    keys = [[] for _ in range(4)]

    def take(own):
        for _ in range(1000):
            own.append(tuple(generator.key()))

    threads = [threading.Thread(target=take, args=(own,)) for own in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({key for own in keys for key in own}) == 4000
    assert generator.state()["draws"] == 4000


def test_random_tensors_have_the_asked_shape_device_and_moments():
    x = ag.randn((100, 100), generator=Generator(0), device="reference")
    assert (x.shape, x.device.name, x.dtype) == ((100, 100), "reference", np.float64)
    assert abs(x.numpy().mean()) < 0.05
    assert abs(x.numpy().std() - 1.0) < 0.05
    y = ag.rand((10_000,), generator=Generator(0)).numpy()
    assert 0.0 <= y.min() < 0.01 < 0.99 < y.max() < 1.0


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "1", True, None])
def test_a_seed_that_is_no_64_bit_integer_is_refused(seed):
    with pytest.raises(pg.SettingError, match=r"generator: seed must be"):
        pg.manual_seed(seed)


def test_a_state_without_its_parts_is_refused_and_changes_nothing():
    generator = Generator(5)
    with pytest.raises(pg.SettingError, match=r"generator: draws must be an integer; got None"):
        generator.set_state({"seed": 1})
    assert generator.state() == {"seed": 5, "draws": 0}
