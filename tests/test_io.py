"""Weights and training states: what comes back, what is refused, and what a kill leaves."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import stat
import struct
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import safetensors.numpy

import pyggml as pg
from pyggml import ag, io, nn, optim, tensorfile


def child(code, *arguments, check=True):
    """Run code in a new Python and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if check:
        assert done.returncode == 0, done.stderr
    return done.stdout


def refused(read, path, message="is damaged|safetensors file|cut off|has element type"):
    with pytest.raises(pg.FileFormatError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


def same(a, b):
    """Whether two trees of plain values and arrays are equal to the last bit, types included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b or a != a


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


# ---- files that are damaged, foreign, or hostile ----


def read_all(path):
    return io.load_state(path) if path.name.startswith("state") else io.read_weights(path)


@pytest.fixture(params=["state", "weights"])
def whole(request, tmp_path):
    """A file of ours, and what is in it."""
    path = tmp_path / f"{request.param}.safetensors"
    values = {"w": np.arange(5, dtype=np.float32), "n": np.array([3, 4])}
    if request.param == "state":
        io.save_state(path, step=12, tree=values)
    else:
        io.save_weights(path, values)
    return path


def test_a_file_cut_off_anywhere_is_refused(whole):
    data = whole.read_bytes()
    for length in range(len(data)):
        whole.write_bytes(data[:length])
        refused(read_all, whole, "cut off|no safetensors file")


def test_a_file_with_more_at_its_end_is_refused(whole):
    whole.write_bytes(whole.read_bytes() + b"\0")
    refused(read_all, whole, "is damaged")


def test_any_flipped_bit_is_noticed(whole):
    data = bytearray(whole.read_bytes())
    before = read_all(whole)
    for position in range(len(data)):
        for bit in range(0, 8, 1 if position < 40 or position > len(data) - 8 else 3):
            data[position] ^= 1 << bit
            whole.write_bytes(data)
            try:
                assert same(read_all(whole), before), (position, bit)  # blanks between tokens
            except pg.FileFormatError as error:
                assert str(whole) in str(error)
            data[position] ^= 1 << bit


def test_bytes_written_over_at_random_are_noticed(whole):
    data, before, generator = whole.read_bytes(), read_all(whole), random.Random(0)
    for _ in range(300):
        start = generator.randrange(len(data))
        noise = generator.randbytes(generator.randrange(1, 30))
        whole.write_bytes((data[:start] + noise + data[start + len(noise) :])[: len(data)])
        try:
            assert same(read_all(whole), before)
        except pg.FileFormatError:
            pass


def framed(header, data=b""):
    """A safetensors file with any header."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header)) + header + data


def tensor_entry(dtype, shape, start, end):
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}}


FOREIGN = {
    "nothing": b"",
    "seven bytes": b"1234567",
    "a text": b"#!/usr/bin/env python3\nprint('hello')\n" * 10,
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "a zip, as torch.save makes": b"PK\3\4" + bytes(200),
    "a pickle": b"\x80\x04\x95\x1e\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "zeros": bytes(1000),
    "ones": b"\xff" * 1000,
    "a header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "a header that is no JSON": framed(b"{" * 100_000),
    "a header that is a list": framed([]),
    "a header nested deep": framed(b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "a header in another encoding": framed(b'{"\xff\xfe": 1}'),
    "offsets outside": framed(tensor_entry("F32", [2], 0, 800), bytes(8)),
    "offsets backwards": framed(tensor_entry("F32", [2], 8, 0), bytes(8)),
    "a hole": framed(tensor_entry("F32", [1], 4, 8), bytes(8)),
    "a shape that does not fit": framed(tensor_entry("F32", [3], 0, 8), bytes(8)),
    "a negative shape": framed(tensor_entry("F32", [-2], 0, 8), bytes(8)),
    "a shape that overflows": framed(tensor_entry("F32", [2**62, 8], 0, 8), bytes(8)),
    "an unknown type": framed(tensor_entry("Q7", [2], 0, 8), bytes(8)),
    "a type that NumPy has not": framed(tensor_entry("F8_E4M3", [8], 0, 8), bytes(8)),
    "metadata that is no JSON": framed({"__metadata__": {"pyggml": "{", "checksum": ""}}),
    "metadata of another shape": framed({"__metadata__": {"pyggml": "[]"}}),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("read", [io.read_weights, io.load_state])
def test_a_foreign_file_is_refused(path, name, read):
    path.write_bytes(FOREIGN[name])
    refused(read, path)


def forged(about):
    """A file whose checksum fits, whatever it says about itself."""
    metadata = {"pyggml": json.dumps(about) if not isinstance(about, str) else about}
    arrays = {"w": np.zeros(1, np.float32)}
    metadata["checksum"] = tensorfile._checksum(arrays, metadata)
    return safetensors.numpy.save(arrays, metadata)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"format": 2, "version": "9.9"}, "by pyggml 9.9, in format 2; pyggml .* reads up to 1"),
        ({"kind": "state", "version": "0"}, "KeyError"),
        ({"format": 1, "kind": "state"}, "KeyError"),
        ({"format": 1, "kind": "state", "tree": {"parts": 3}}, "is damaged"),
        ({"format": 1, "kind": "weights", "aliases": {"v": "no"}}, "no training state"),
        ("[" * 200_000, "nested too deep"),
        ("7", "is damaged"),
        (
            {"format": 1, "kind": "state", "tree": {"parts": {"model": {"$array": 1}}}},
            "is damaged",
        ),
    ],
)
def test_a_file_that_says_odd_things_about_itself_is_refused(path, about, message):
    path.write_bytes(forged(about))
    refused(io.load_state, path, message)


def test_nothing_in_a_file_is_executed(path):
    marker = path.parent / "executed"
    command = f"touch {marker}".encode()
    path.write_bytes(b"cposix\nsystem\n(S'" + command + b"'\ntR.")
    for read in (io.read_weights, io.load_state):
        refused(read, path)
    assert not marker.exists()


def test_a_huge_file_of_rubbish_is_refused_at_once_in_little_memory(path):
    """Ten gigabytes of holes, with a header that seems to fit: 300 MB of address space must do."""
    for header in (5 * 10**9, 10**10 - 8):
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", header) + b"{")
            file.truncate(10**10)
        printed = child(
            """
            import resource, sys
            from pyggml import io, FileFormatError
            import safetensors
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            limit = used + 300 * 10**6 + 10**10  # the file itself may be mapped
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            try:
                io.read_weights(sys.argv[1])
            except FileFormatError as error:
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                print("refused", peak < 400_000)
            """,
            path,
        )
        assert printed == "refused True\n"


def test_what_is_no_regular_file_is_refused_without_waiting(path):
    refused(io.read_weights, path.parent, "is not a regular file")
    os.mkfifo(path)
    refused(io.load_state, path, "is not a regular file")


def test_a_missing_file_is_the_usual_error(path):
    for read in (io.read_weights, io.load_state):
        with pytest.raises(FileNotFoundError, match="file.safetensors"):
            read(path)


# ---- the order of things on the disk ----


def test_the_new_file_is_synced_before_it_takes_the_name_and_the_folder_after(path, monkeypatch):
    calls = []
    real = {name: getattr(os, name) for name in ("fsync", "replace")}

    def fsync(descriptor):
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        calls.append((f"sync {kind}", path.exists()))
        real["fsync"](descriptor)

    def replace(source, target):
        calls.append(("replace", path.exists()))
        real["replace"](source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    io.save_state(path, step=1)
    assert calls == [("sync file", False), ("replace", False), ("sync folder", True)]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_at_any_point_leaves_the_old_file_and_no_litter(path, monkeypatch, call):
    io.save_state(path, step=1)

    def fail(*arguments):
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="the disk is broken"):
        io.save_state(path, step=2)
    monkeypatch.undo()
    assert io.load_state(path) == {"step": 1}
    assert os.listdir(path.parent) == [path.name]


def test_a_full_disk_leaves_the_old_file_and_is_an_os_error(path):
    """A limit on the size of files stands for the disk: writing stops in the middle."""
    io.save_state(path, step=1, array=np.zeros(10))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match="file.safetensors") as caught:
            io.save_state(path, step=2, array=np.zeros(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert io.load_state(path)["step"] == 1
    assert os.listdir(path.parent) == [path.name]


def test_a_folder_that_is_not_there_is_the_usual_error(path):
    with pytest.raises(FileNotFoundError):
        io.save_state(path.parent / "no" / "file", step=1)


def test_a_file_has_usual_permissions_and_keeps_those_it_had(path):
    before = os.umask(0o027)
    try:
        io.save_state(path, step=1)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        io.save_state(path, step=2)
        assert stat.S_IMODE(path.stat().st_mode) == 0o604
    finally:
        os.umask(before)


def test_a_link_stays_a_link(path):
    link = path.parent / "latest"
    link.symlink_to(path)
    io.save_state(link, step=1)
    io.save_state(link, step=2)
    assert link.is_symlink()
    assert io.load_state(path) == {"step": 2}


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(path):
    node = os.uname().nodename
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = {
        "dead": f".{path.name}.{node}.{gone.pid}.abc.tmp",
        "alive": f".{path.name}.{node}.{os.getppid()}.abc.tmp",
        "other machine": f".{path.name}.elsewhere.{gone.pid}.abc.tmp",
        "other file": f".x{path.name}.{node}.{gone.pid}.abc.tmp",
    }
    for name in names.values():
        (path.parent / name).mkdir()
        (path.parent / name / "half").write_bytes(b"x")
    io.save_state(path, step=1)
    left = set(os.listdir(path.parent))
    assert left == {path.name, *names.values()} - {names["dead"]}


SAVER = """
import sys
import numpy as np
from pyggml import io
path, step = sys.argv[1], int(sys.argv[2])
while True:
    step += 1
    io.save_state(path, step=step, array=np.full(2000, step))
    print(step, flush=True)
"""


def test_killing_the_process_at_any_moment_leaves_the_old_file_or_the_new_one(path):
    """200 kills at random moments of a loop that saves: the file is always whole.

    One child is forked for each kill, from a process that has imported everything.
    """
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    printed = child(KILLER, path, seed)
    kills, interrupted = map(int, printed.split())
    assert kills == 200
    assert interrupted > 20  # many a kill met a save half done
    io.save_state(path, step=0)
    assert os.listdir(path.parent) == [path.name]


KILLER = """
import os, random, signal, sys, time
import numpy as np
from pyggml import io
import safetensors.numpy

path, generator = sys.argv[1], random.Random(int(sys.argv[2]))
last, interrupted = 0, 0
io.save_state(path, step=0, array=np.zeros(2000))
for kill in range(200):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        step = last
        while True:
            step += 1
            os.write(write, b"<")
            io.save_state(path, step=step, array=np.full(2000, step))
            os.write(write, b">")
    os.close(write)
    os.read(read, 1)  # the first save has begun
    time.sleep(generator.random() * 0.03)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    marks = b"<"
    while part := os.read(read, 65536):
        marks += part
    os.close(read)
    done = marks.count(b">")
    interrupted += marks.endswith(b"<")
    state = io.load_state(path)  # whole, or this raises
    assert np.all(state["array"] == state["step"]), state
    assert last + done <= state["step"] <= last + done + 1, (last, done, state["step"])
    last = state["step"]
print(200, interrupted)
"""


def test_two_processes_that_save_the_same_file_leave_a_whole_one(path):
    io.save_state(path, step=0, array=np.zeros(2000))
    children = [
        subprocess.Popen(
            [sys.executable, "-c", SAVER, str(path), str(start)], stdout=subprocess.DEVNULL
        )
        for start in (0, 10**6)
    ]
    try:
        end, seen = time.monotonic() + 30, set()
        while len(seen) < 2 and time.monotonic() < end:
            state = io.load_state(path)
            assert np.all(state["array"] == state["step"])
            if state["step"]:
                seen.add(state["step"] > 10**6)
    finally:
        for process in children:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert seen == {True, False}
    state = io.load_state(path)
    assert np.all(state["array"] == state["step"])
