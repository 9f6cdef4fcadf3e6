"""Weights and training states: what comes back, what is refused, and what a kill leaves."""

from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest
import safetensors.numpy
from helpers import child, same

import pyggml as pg
from pyggml import ag, io, nn, optim


def refused(read, path, message="is damaged|safetensors file|cut off|has element type"):
    with pytest.raises(pg.FileFormatError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.safetensors"


# ---- weights ----


def test_weights_come_back_into_a_module(path):
    first, second = (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(2))
    first(ag.tensor(np.random.default_rng(0).standard_normal((5, 3)))).numpy()  # moves statistics
    io.save_weights(path, first)
    assert io.load_weights(path, second) == ([], [], [])
    assert same(first.state_dict(), second.state_dict())


def test_safetensors_itself_reads_what_is_saved_and_the_other_way_round(path):
    values = {
        "float": np.arange(6, dtype=np.float32).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "reversed": np.arange(5)[::-2],
        "big-endian": np.arange(3, dtype=">i4"),
        "number": np.array(7, np.int64),
        "flags": np.array([True, False]),
        "half": np.array([1.5], np.float16),
        "empty": np.zeros((0, 2), np.float32),
    }
    io.save_weights(path, values)
    read = safetensors.numpy.load_file(path)
    assert read.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(read[name], value)
        assert read[name].dtype == value.dtype.newbyteorder("=")
    safetensors.numpy.save_file({"w": values["float"]}, path, {"format": "pt"})
    assert same(io.read_weights(path), {"w": values["float"]})


def test_tied_weights_are_in_the_file_once_and_still_tied_after_loading(path):
    def make():
        layer = nn.Linear(3, 3)
        return nn.Sequential(layer, nn.ReLU(), layer)

    first, second = make(), make()
    io.save_weights(path, first)
    assert sorted(safetensors.numpy.load_file(path)) == ["0.bias", "0.weight"]
    io.load_weights(path, second)
    assert second[0].weight is second[2].weight
    assert same(first.state_dict(), second.state_dict())

    w = ag.param([1.0, 2.0])
    io.save_weights(path, {"a": w, "b": ag.param([3.0]), "c": w})
    assert sorted(safetensors.numpy.load_file(path)) == ["a", "b"]
    read = io.read_weights(path)
    assert read["a"] is read["c"]
    target = ag.param([0.0, 0.0])
    io.load_weights(path, {"a": target, "b": ag.param([0.0]), "c": target})
    assert target.tolist() == [1.0, 2.0]


def test_weights_that_do_not_fit_are_listed_with_the_file_and_nothing_changes(path):
    io.save_weights(path, {"weight": np.zeros((2, 2)), "other": np.zeros(1)})
    module = nn.Linear(3, 2)
    tensors = dict(module.named_parameters())
    before = module.state_dict()
    for target in (module, tensors):
        with pytest.raises(pg.ShapeError) as caught:
            io.load_weights(path, target)
        for part in (
            str(path),
            "missing bias",
            "unexpected other",
            "weight has shape (2, 2), not (2, 3)",
        ):
            assert part in str(caught.value)
        left = io.load_weights(path, target, strict=False)
        assert left == (["bias"], ["other"], ["weight"])
    assert same(module.state_dict(), before)


def test_weights_of_a_training_state_can_be_read_alone(path):
    model = nn.Linear(2, 2)
    io.save_state(path, model=model, step=3)
    assert same(io.read_weights(path), model.state_dict())
    other = nn.Linear(2, 2)
    io.load_weights(path, other)
    assert same(other.state_dict(), model.state_dict())
    io.save_state(path, net=model, step=3)
    refused(io.read_weights, path, "a training state without a part 'model'; it has net")


def test_bfloat16_is_widened_exactly(path):
    header = json.dumps(
        {
            "a": {"dtype": "I8", "shape": [2], "data_offsets": [0, 2]},
            "w": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [2, 10]},
        }
    ).encode()
    words = struct.pack("<4H", 0x3F80, 0xC020, 0x7F80, 0x0001)
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\1\2" + words)
    read = io.read_weights(path)["w"]
    assert read.dtype == np.float32
    assert read.tolist() == [[1.0, -2.5], [np.inf, 2.0**-133]]


def test_what_it_is_about_goes_into_the_metadata(path):
    io.save_weights(path, {"w": np.zeros(1)}, about={"format": "pt", "trained": "yes"})
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert metadata["trained"] == "yes"
    assert json.loads(metadata["pyggml"])["version"] == pg.__version__


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ({"w": np.array(["a"])}, pg.DTypeError, "w has dtype <U1, which safetensors has not"),
        ({"w": np.array([1j])}, pg.DTypeError, "complex128"),
        ({"w": 1.0}, pg.DTypeError, "needs arrays by name; got float under 'w'"),
        ({1: np.zeros(1)}, pg.DTypeError, "got ndarray under 1"),
        ({"__metadata__": np.zeros(1)}, pg.SettingError, "belongs to the file format"),
        ([1.0], pg.SettingError, "needs a module or a dict of tensors; got list"),
    ],
)
def test_what_is_no_weight_is_refused_and_no_file_is_made(path, weights, error, message):
    with pytest.raises(error, match=message):
        io.save_weights(path, weights)
    assert os.listdir(path.parent) == []


# ---- training states ----


def test_plain_values_come_back_as_they_were(path):
    values = {
        "step": 2**100,
        "rate": 0.1,
        "nothing": None,
        "flag": True,
        "text": 'ünï\n"',
        "nan": float("nan"),
        "infinite": -float("inf"),
        "rows": [{"epoch": 1, "loss": 1 / 3}, {}],
        "array": np.arange(3),
        "deep": {"a/b": [np.ones((2, 2), np.float32), {"c": np.array(2.5)}], "$": "x"},
    }
    io.save_state(path, **values)
    assert same(io.load_state(path), values)


def test_one_array_in_two_places_is_written_once_and_one_array_again(path):
    array = np.arange(1000.0)
    io.save_state(path, a=array, b={"c": array})
    assert os.path.getsize(path) < 10_000
    loaded = io.load_state(path)
    assert loaded["a"] is loaded["b"]["c"]


def test_every_kind_of_part_comes_back(path):
    def make(seed):
        pg.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        parts = {
            "model": model,
            "optimizer": optim.Adam(model.parameters(), lr=0.1),
            "loader": pg.data.DataLoader(np.arange(9), batch_size=2, shuffle=True),
            "generator": pg.Generator(seed),
            "tensors": {"w": ag.param([float(seed)]), "v": ag.param([[1.0 * seed]])},
        }
        return parts

    first, second = make(1), make(2)
    first["generator"].key()
    next(iter(first["loader"]))
    first["optimizer"].lr = 0.25
    io.save_state(path, **first, step=1)
    assert io.load_state(path, **second) == {"step": 1}
    for name in ("model", "optimizer", "loader"):
        assert same(second[name].state_dict(), first[name].state_dict())
    assert second["generator"].state() == {"seed": 1, "draws": 1}
    assert second["tensors"]["w"].item() == second["tensors"]["v"].item() == 1.0
    assert second["optimizer"].lr == 0.25


def test_a_part_that_does_not_fit_leaves_all_parts_as_they_were(path):
    small, large = nn.Linear(2, 2), nn.Linear(3, 2)
    io.save_state(path, generator=pg.Generator(1), net=small, model=large, odd={"w": ag.param(1.0)})
    generator, model = pg.Generator(5), nn.Linear(2, 2)
    before = model.state_dict()
    with pytest.raises(pg.ShapeError, match=r"load_state: .*file\.safetensors: model: .*not \(2,"):
        io.load_state(path, generator=generator, net=model, model=model)
    assert generator.state() == {"seed": 5, "draws": 0}
    assert same(model.state_dict(), before)
    with pytest.raises(pg.FileFormatError, match="has no part 'loader'; it has generator, net, mo"):
        io.load_state(path, loader=pg.data.DataLoader(np.arange(3)))
    opt = optim.SGD(model.parameters())
    with pytest.raises(pg.FileFormatError, match="generator: does not fit this object; KeyError"):
        io.load_state(path, generator=opt)
    with pytest.raises(pg.SettingError, match="odd: generator: seed must be an integer"):
        io.load_state(path, odd=generator)


def test_a_value_that_cannot_be_saved_is_named_and_the_old_file_stays(path):
    io.save_state(path, step=1)
    for value, message in (
        (object(), "thing must be a number, text or array, or a dict or list of such; got object"),
        ({"a": [1, {2, 3}]}, "thing/a/1 must be .* got set"),
        ({1: 2}, "thing must have texts as keys"),
        ({"$array": "w"}, "thing must have texts as keys"),
    ):
        with pytest.raises(pg.PyggmlError, match=message):
            io.save_state(path, thing=value)
    assert io.load_state(path) == {"step": 1}
    assert os.listdir(path.parent) == [path.name]


def test_weights_are_no_training_state(path):
    io.save_weights(path, {"w": np.zeros(1)})
    refused(io.load_state, path, "is no training state; read it with load_weights")


RESUME = """
import hashlib, sys
import numpy as np
import pyggml as pg
from pyggml import ag, io, nn, optim

mode, path, device = sys.argv[1:]
pg.set_device(device)
pg.manual_seed(3 if mode == "first" else 4)
pg.set_num_threads(1)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
rate = optim.cosine_decay(0.05, steps=20)
opt = optim.AdamW(model.parameters(), lr=rate, accumulate_steps=3, clip_norm=1.0)
x = np.random.default_rng(0).standard_normal((37, 4))
loader = pg.data.DataLoader((x, x.sum(1, keepdims=True)), batch_size=5, shuffle=True)
generator = pg.random.default_generator

def run(step):
    while step < 20:
        for x, y in loader:
            with ag.grad_tape():
                loss = ag.mse_loss(model(ag.tensor(x)), y)
            ag.backward(loss)
            opt.step()
            step += 1
            print(step, loss.item().hex())
            if mode == "first" and step == 10:
                assert opt._gathered == 1, "the window is to be open"
                io.save_state(path, model=model, optimizer=opt, loader=loader,
                              generator=generator, step=step)
                print("saved")
            if step == 20:
                return

step = 0
if mode != "first":
    step = io.load_state(path, model=model, optimizer=opt, loader=loader,
                         generator=generator)["step"]
run(step)
values = [v.tobytes() for v in model.state_dict().values()]
print(opt.t, opt.lr.hex(), generator.state(), loader.state_dict())
print(hashlib.sha256(b"".join(values)).hexdigest())
"""


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_run_goes_on_to_the_last_bit_in_a_new_process(path, device):
    """With dropout, batch statistics, shuffling, a schedule, clipping, and an open window."""
    whole = child(RESUME, "first", path, device)
    resumed = child(RESUME, "second", path, device)
    assert resumed == whole.split("saved\n")[1]
    assert len(resumed.splitlines()) == 12
