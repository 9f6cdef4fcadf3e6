"""safetensors files that are complete or not there, with a checksum over all that they say.

The library checks and writes the format. What stands here besides is the order of things on the
disk, and what a file that is damaged, foreign or hostile may cost: its sizes are looked at before
anything is read, and each way in which it can be wrong is a FileFormatError.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from ._version import __version__
from .checks import need_path
from .errors import DTypeError, FileFormatError, SettingError

FORMAT = 1
"""The version of what stands in the metadata; files of a later one are refused."""

_ABOUT, _CHECKSUM = "pyggml", "checksum"  # our keys in the metadata
_KINDS = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
)

Path = str | os.PathLike[str]
Arrays = dict[str, np.ndarray]


# ---- writing -------------------------------------------------------------------------------------


def write_arrays(
    path: Path, arrays: Arrays, about: Mapping[str, Any], texts: Mapping[str, str] | None = None
) -> None:
    """Write arrays as a safetensors file, with what ``about`` says (JSON) and texts as metadata.

    Raises OSError, having left the old file as it was, if the new one cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    metadata = dict(texts or {})
    metadata[_ABOUT] = json.dumps({"format": FORMAT, "version": __version__, **about})
    metadata[_CHECKSUM] = _checksum(arrays, metadata)
    with replacing(path) as beside:
        try:
            save_file(arrays, beside, metadata)
        except SafetensorError as error:  # the number of an I/O error stands in its text only
            found = re.search(r"(?:os error|code:) (\d+)", str(error))
            if found is None:
                raise
            number = int(found[1])
            raise OSError(number, os.strerror(number), os.fspath(path)) from None


def writable(op: str, name: str, array: np.ndarray) -> np.ndarray:
    """Return an array as it can be written; raise DTypeError or SettingError if it cannot."""
    if array.dtype.name not in _KINDS:
        raise DTypeError(
            f"{op}: {name} has dtype {array.dtype}, which safetensors has not; convert it"
        )
    if name == "__metadata__":
        raise SettingError(f"{op}: the name {name!r} belongs to the file format; choose another")
    # The library writes memory as it lies there.
    return np.asarray(array, array.dtype.newbyteorder("<"), order="C")


@contextmanager
def replacing(path: Path) -> Iterator[str]:
    """Yield a name to write a file under; at the end that file takes the place of path, complete.

    If the block raises, or the process is killed at any moment, path is what it was before.
    """
    target = os.path.realpath(need_path("save", path))
    folder, name = os.path.split(target)
    _remove_leftovers(folder, name)
    room = tempfile.mkdtemp(".tmp", f"{_ours(name)}{os.getpid()}.", folder)
    try:
        beside = os.path.join(room, name)
        yield beside
        _allow(beside, target)
        _sync(beside)
        os.replace(beside, target)
        _sync(folder)
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _ours(name: str) -> str:
    """Return how the names of this machine's folders beside a file begin; a process id follows."""
    return f".{name}.{platform.node()}."


def _remove_leftovers(folder: str, name: str) -> None:
    """Remove what processes of this machine left that were killed while they wrote this file."""
    pattern = re.compile(re.escape(_ours(name)) + r"(\d+)\..*\.tmp")
    for entry in os.listdir(folder) if os.name == "posix" else ():
        found = pattern.fullmatch(entry)
        if found and not _is_alive(int(found[1])):
            shutil.rmtree(os.path.join(folder, entry), ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        pass
    return True


def _allow(beside: str, target: str) -> None:
    """Give a new file the permissions of the one it replaces, or those of any new file."""
    model = target
    if not os.path.exists(target):
        model = f"{beside}.mode"
        with open(model, "wb"):
            pass
    shutil.copymode(model, beside)


def _sync(path: str) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if os.name == "nt" and os.path.isdir(path):
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(arrays: Arrays, metadata: Mapping[str, str]) -> str:
    """Return a digest of all that a file says."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(sorted(metadata.items())).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(json.dumps([name, array.dtype.name, array.shape]).encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


# ---- reading -------------------------------------------------------------------------------------


def read_arrays(op: str, path: Path) -> tuple[Arrays, dict[str, Any]]:
    """Return the arrays of a safetensors file, and what its ``about`` says: {} if it is not ours.

    Raises FileFormatError for a file that is damaged or something else, OSError if there is none.
    """
    from safetensors import safe_open

    need_path(op, path)
    with blaming(op, path):
        data = _start_of_data(op, path)
        arrays = {}
        with safe_open(path, framework="np") as file:
            metadata = dict(file.metadata() or {})
            for name in file.keys():
                kind = file.get_slice(name).get_dtype()
                if kind == "BF16":
                    arrays[name] = _widened(path, data, name)
                elif kind == "BOOL" or kind in _NUMBERS:
                    arrays[name] = file.get_tensor(name)
                else:
                    raise refusal(op, path, f"{name} has element type {kind}, which NumPy has not")
        if _ABOUT not in metadata:
            return arrays, {}
        if metadata.pop(_CHECKSUM, None) != _checksum(arrays, metadata):
            raise refusal(op, path, "is damaged: its checksum does not match what is in it")
        about = json.loads(metadata[_ABOUT])
        if about["format"] > FORMAT:
            raise refusal(
                op,
                path,
                f"was written by pyggml {about['version']}, in format {about['format']}; pyggml "
                f"{__version__} reads up to {FORMAT}: install a later one",
            )
    return arrays, about


_NUMBERS = {f"{kind}{bits}" for kind in "IU" for bits in (8, 16, 32, 64)} | {"F16", "F32", "F64"}


def refusal(op: str, path: Path, reason: str) -> FileFormatError:
    """Return the error that says what is wrong with a file."""
    return FileFormatError(f"{op}: {os.fspath(path)}: {reason}")


@contextmanager
def blaming(op: str, path: Path) -> Iterator[None]:
    """Turn what goes wrong with the content of a file into a FileFormatError that names it."""
    from safetensors import SafetensorError

    try:
        yield
    except FileFormatError:
        raise
    except RecursionError:
        raise refusal(op, path, "is damaged: nested too deep") from None
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"is damaged, or no safetensors file ({type(error).__name__}: {error})"
        raise refusal(op, path, reason) from None


def _start_of_data(op: str, path: Path) -> int:
    """Return where a file's data begin, having looked at the sizes before reading any more."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise refusal(op, path, "is not a regular file")
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if status.st_size < 8:
            raise refusal(op, path, f"is empty or cut off: {status.st_size} bytes")
        if not 2 <= length <= status.st_size - 8:
            raise refusal(
                op,
                path,
                f"is cut off, or no safetensors file: a header of {length} bytes in a file of "
                f"{status.st_size}",
            )
        if file.read(1) != b"{":
            raise refusal(op, path, "is no safetensors file: its header is no JSON")
    return 8 + length


def _widened(path: Path, data: int, name: str) -> np.ndarray:
    """Return a bfloat16 tensor as float32, exactly: NumPy has no bfloat16."""
    with open(path, "rb") as file:
        file.seek(8)
        entry = json.loads(file.read(data - 8))[name]
        start, end = entry["data_offsets"]
        file.seek(data + start)
        words = np.frombuffer(file.read(end - start), "<u2")
    return (words.astype("<u4") << 16).view("<f4").reshape(entry["shape"])
