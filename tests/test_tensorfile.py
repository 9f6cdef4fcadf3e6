"""Files that are damaged, foreign or hostile; and what a kill, or a full disk, leaves of one."""

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
import time

import numpy as np
import pytest
import safetensors.numpy
from helpers import child, same

import pyggml as pg
from pyggml import io, tensorfile


def refused(read, path, message="is damaged|safetensors file|cut off|has element type"):
    with pytest.raises(pg.FileFormatError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.safetensors"


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
        near_an_end = position < 16 or position >= len(data) - 8
        for bit in range(8) if near_an_end else (position % 8,):
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
                # VmHWM, since ru_maxrss is inherited from whoever started this process
                status = open("/proc/self/status").read()
                peak = int(status.split("VmHWM:")[1].split()[0])
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
