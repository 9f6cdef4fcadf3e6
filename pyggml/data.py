"""Batches of NumPy arrays, from whatever holds the samples, prepared ahead in a thread.

Where a loader stands is two numbers, epoch and batch: the order of an epoch is a function of
(seed, epoch), so going on in the middle needs nothing else.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from .checks import (
    as_list,
    natural_number,
    need_function,
    need_mapping,
    positive_integer,
    shown,
)
from .errors import DTypeError, SettingError, ShapeError
from .random import default_generator
from .tensor import Tensor

Batch = Any  # an array, or a tuple or dict of batches
Rows = slice | np.ndarray


def map_arrays(function: Callable[..., Any], *trees: Any) -> Any:
    """Return a tuple or dict, however nested, with function applied to what it holds.

    >>> map_arrays(len, ([1, 2], {"a": [3]}))
    (2, {'a': 1})
    """
    first = trees[0]
    if len({_structure(tree) for tree in trees}) > 1:
        raise ShapeError(
            "DataLoader: samples and batches must have one structure; got "
            f"{' and '.join(dict.fromkeys(map(shown, trees)))}"
        )
    if isinstance(first, Mapping):
        return {key: map_arrays(function, *(tree[key] for tree in trees)) for key in first}
    if isinstance(first, tuple):
        parts = [map_arrays(function, *items) for items in zip(*trees, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    return function(*trees)


def _structure(tree: Any) -> Any:
    """Return the keys of a dict or the length of a tuple, and None for what these hold."""
    if isinstance(tree, Mapping):
        return frozenset(tree)
    return len(tree) if isinstance(tree, tuple) else None


def batch_length(batch: Batch) -> int:
    """Return how many samples a batch has: the length of the first array in it."""
    first = batch
    while isinstance(first, (tuple, list, Mapping)) and first:
        first = next(iter(first.values() if isinstance(first, Mapping) else first))
    shape = first.shape if isinstance(first, Tensor) else np.shape(first)
    if not shape or isinstance(first, (tuple, list, Mapping)):
        raise ShapeError(f"batch: needs an array with an axis of samples; got {shown(batch)}")
    return int(shape[0])


class DataLoader:
    """Cut data into batches, in order or shuffled anew in each epoch.

    Args:
        data: an array of samples, or a tuple or dict of arrays of one length, such as (x, y);
            memory-mapped files (np.load(mmap_mode="r"), h5py) are read batch by batch. Or a
            dataset with __len__ and __getitem__ that gives one sample, or any iterable of samples.
        batch_size: samples in a batch; the last of an epoch may have fewer.
        shuffle: whether each epoch has an order of its own.
        seed: decides the orders; without one it is drawn from the default generator, which
            pg.manual_seed sets.
        drop_last: whether to leave out a last batch that is smaller than the others.
        prefetch: how many batches a background thread prepares ahead. 0, no thread, is faster where
            preparing one takes only some ten microseconds: small arrays in memory.
        augment: a function (batch, generator) that returns a changed batch, such as one of images
            moved at random. The NumPy generator is a function of seed, epoch and batch.
        transform: a function that returns a changed batch; called after augment. Both run in the
            thread, on copies of the data.
        collate_fn: makes a batch from a list of samples; by default np.stack, in each place of a
            tuple or dict. For datasets and iterables only.

    Batches are NumPy arrays in the structure of the data, and keep its element types. What goes
    wrong in the thread is raised where the batch is asked for. Each loop over the loader is an
    epoch: one that is left early is not gone on with by the next, but by load_state_dict.

    Raises SettingError for settings that do not fit the data, ShapeError for unequal lengths.

    >>> loader = pg.data.DataLoader((np.arange(5.0), np.arange(5)), batch_size=2)
    >>> for x, y in loader:
    ...     print(x, y)
    [0. 1.] [0 1]
    [2. 3.] [2 3]
    [4.] [4]
    """

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int = 1,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool = False,
        prefetch: int = 2,
        augment: Callable[[Batch, np.random.Generator], Batch] | None = None,
        transform: Callable[[Batch], Batch] | None = None,
        collate_fn: Callable[[list], Batch] | None = None,
    ) -> None:
        self.batch_size = positive_integer("DataLoader", "batch_size", batch_size)
        self.prefetch = natural_number("DataLoader", "prefetch", prefetch, 1024)
        self.shuffle = bool(shuffle)
        self.drop_last = bool(drop_last)
        functions = {"augment": augment, "transform": transform, "collate_fn": collate_fn}
        for name, function in functions.items():
            if function is not None:
                need_function("DataLoader", name, function)
        self.augment = augment
        self.transform = transform
        self._source = _source_of(data, collate_fn)
        self.samples = self._source.length
        """How many samples an epoch has; None where the data do not say."""
        if self.samples is None and self.shuffle:
            raise SettingError(
                "DataLoader: shuffle needs data with __len__ and __getitem__; got "
                f"{type(data).__name__}; put the samples in a list"
            )
        if self.samples is not None and not len(self):
            raise SettingError(
                f"DataLoader: {self.samples} samples leave no batch of {self.batch_size}; "
                + ("take a smaller batch_size" if self.samples else "give at least one sample")
            )
        if seed is None and (self.shuffle or augment is not None):
            seed = int(default_generator.numpy().integers(1 << 63))
        self.seed = _seed(0 if seed is None else seed)
        self._epoch = self._batch = 0
        self._begun = False  # whether an iterator has been made for this epoch
        self._latest: weakref.ref[_Epoch] | None = None  # the iterator whose position counts

    def __len__(self) -> int:
        """Return the number of batches in an epoch. Raises TypeError where the data do not say."""
        if self.samples is None:
            raise TypeError("len: how many batches there are is not known before they are read")
        whole, rest = divmod(self.samples, self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def __iter__(self) -> Iterator[Batch]:
        if self._begun:  # the one before was left early
            self._epoch, self._batch = self._epoch + 1, 0
        self._begun = True
        iterator = _Epoch(self, self._epoch, self._batch)
        self._latest = weakref.ref(iterator)
        return iterator

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0, that the next batch belongs to."""
        return self._epoch

    def state_dict(self) -> dict[str, int | None]:
        """Return the position after the batch handed out last, with what the order depends on.

        >>> loader = pg.data.DataLoader(np.arange(6), batch_size=2)
        >>> batches = iter(loader)
        >>> _ = next(batches)
        >>> state = loader.state_dict()
        >>> state["epoch"], state["batch"]
        (0, 1)
        >>> loader.load_state_dict(state)
        >>> list(loader)
        [array([2, 3]), array([4, 5])]
        """
        return {"epoch": self._epoch, "batch": self._batch, "seed": self.seed, **self._cut()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop give exactly the batches that were left when the state was taken.

        Raises SettingError, having changed nothing, if the data are cut in another way now.
        """
        need_mapping("DataLoader", "state", state)
        for name, here in self._cut().items():
            if state.get(name) != here:
                raise SettingError(
                    f"DataLoader: the state was taken with {name}={state.get(name)}; this loader "
                    f"has {name}={here}; make it as it was"
                )
        seed, epoch, batch = (
            natural_number("DataLoader", name, state.get(name))
            for name in ("seed", "epoch", "batch")
        )
        self.seed, self._epoch, self._batch = seed, epoch, batch
        self._begun, self._latest = False, None

    def _cut(self) -> dict[str, int | None]:
        """Return what decides, with the seed, which samples a batch has."""
        return {
            "samples": self.samples,
            "batch_size": self.batch_size,
            "shuffle": int(self.shuffle),
            "drop_last": int(self.drop_last),
        }

    def _note(self, iterator: _Epoch, epoch: int, batch: int, begun: bool) -> None:
        """Take over the position of an iterator, if it is the latest."""
        if self._latest is not None and self._latest() is iterator:
            self._epoch, self._batch, self._begun = epoch, batch, begun

    def _order(self, epoch: int) -> np.ndarray | None:
        """Return the order of the samples in an epoch, None for the one they have.

        Sorting raw random words, whose stream NumPy keeps for good, gives the same order in every
        version of NumPy; Generator.permutation makes no such promise.
        """
        if not self.shuffle:
            return None
        seed = np.random.SeedSequence(self.seed, spawn_key=(0, epoch))
        return np.argsort(np.random.PCG64(seed).random_raw(self.samples), kind="stable")

    def _prepare(self, epoch: int, start: int) -> Iterator[Batch]:
        """Yield the batches of an epoch from a number on. Runs in the thread."""
        batches = self._source.batches(self, self._order(epoch), start)
        for number, batch in enumerate(batches, start):
            if self.augment is not None:
                seed = np.random.SeedSequence(self.seed, spawn_key=(1, epoch, number))
                batch = self.augment(batch, np.random.Generator(np.random.PCG64(seed)))
            yield batch if self.transform is None else self.transform(batch)


def _seed(value: Any) -> int:
    return natural_number("DataLoader", "seed", value)


# ---- where samples come from ---------------------------------------------------------------------


class _Indexed:
    """Samples that can be taken by number."""

    length: int

    def take(self, rows: Rows) -> Batch:
        raise NotImplementedError

    def batches(self, loader: DataLoader, order: np.ndarray | None, start: int) -> Iterator[Batch]:
        for number in range(start, len(loader)):
            first = number * loader.batch_size
            rows = slice(first, min(first + loader.batch_size, self.length))
            yield self.take(rows if order is None else order[rows])


class _Arrays(_Indexed):
    """Arrays of one length, in a tuple or dict."""

    def __init__(self, data: Any) -> None:
        self.arrays = map_arrays(_as_array_like, data)
        lengths: list[int] = []
        map_arrays(lambda array: lengths.append(array.shape[0]), self.arrays)
        if not lengths or len(set(lengths)) > 1:
            raise ShapeError(
                f"DataLoader: arrays must have one length; got {lengths or 'none at all'}"
            )
        self.length = lengths[0]

    def take(self, rows: Rows) -> Batch:
        return map_arrays(lambda array: _rows_of(array, rows), self.arrays)


class _Dataset(_Indexed):
    """An object that gives one sample by its number."""

    def __init__(self, data: Any, collate: Callable[[list], Batch]) -> None:
        self.data = data
        self.length = len(data)
        self.collate = collate

    def take(self, rows: Rows) -> Batch:
        numbers = range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
        return self.collate([self.data[number] for number in numbers])


class _Stream:
    """An iterable of samples of unknown number."""

    length = None

    def __init__(self, data: Iterable, collate: Callable[[list], Batch]) -> None:
        self.data = data
        self.collate = collate
        self.is_used = False

    def batches(self, loader: DataLoader, order: None, start: int) -> Iterator[Batch]:
        samples = iter(self.data)
        if samples is self.data and self.is_used:
            raise SettingError(
                "DataLoader: an iterator can be read once; give an object whose __iter__ starts "
                "anew, or a list"
            )
        self.is_used = True
        samples = itertools.islice(samples, start * loader.batch_size, None)
        while part := list(itertools.islice(samples, loader.batch_size)):
            if len(part) == loader.batch_size or not loader.drop_last:
                yield self.collate(part)


def _source_of(data: Any, collate: Callable[[list], Batch] | None) -> Any:
    """Return the kind of source that fits the data."""
    is_array = isinstance(data, (tuple, Mapping, Tensor, np.ndarray)) or hasattr(data, "iloc")
    if is_array or _is_array_like(data):
        if collate is not None:
            raise SettingError(
                "DataLoader: collate_fn is for datasets and iterables; use transform for arrays"
            )
        return _Arrays(data)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, str):
        return _Dataset(data, collate or stack)
    if isinstance(data, Iterable) and not isinstance(data, str):
        return _Stream(data, collate or stack)
    raise DTypeError(
        "DataLoader: needs arrays, a dataset with __len__ and __getitem__, or an iterable; got "
        f"{type(data).__name__}"
    )


def _is_array_like(data: Any) -> bool:
    return all(hasattr(data, name) for name in ("shape", "dtype", "__getitem__"))


def _as_array_like(data: Any) -> Any:
    """Return what can be cut in rows: a NumPy array, or an array on disk as it is."""
    if isinstance(data, Tensor):
        array = data.numpy()
    elif isinstance(data, np.ndarray) or (_is_array_like(data) and not hasattr(data, "iloc")):
        array = data
    else:  # lists and tables
        try:
            array = np.asarray(data)
        except ValueError as error:
            raise ShapeError(f"DataLoader: a list must be rectangular; {error}") from None
    if not array.shape:
        raise ShapeError("DataLoader: arrays need an axis of samples; got a single number")
    return array


def _rows_of(array: Any, rows: Rows) -> np.ndarray:
    """Return a copy of some rows: what is done to a batch must not change the data."""
    if isinstance(rows, slice):
        return np.array(array[rows])
    if type(array) is np.ndarray:
        return array[rows]
    # On disk, rows are read in the order in which they lie there (h5py knows no other).
    order = np.argsort(rows, kind="stable")
    read = np.asarray(array[rows[order]])
    batch = np.empty_like(read)
    batch[order] = read
    return batch


def stack(samples: Sequence[Any]) -> Batch:
    """Return samples of one structure as one batch: the default collate_fn.

    >>> pg.data.stack([(1.0, 2), (3.0, 4)])
    (array([1., 3.]), array([2, 4]))
    """

    samples = as_list("stack", "samples", samples, "samples")
    if not samples:
        raise ShapeError("stack: needs at least one sample; got none")

    def stacked(*parts: Any) -> np.ndarray:
        arrays = [np.asarray(part) for part in parts]
        for number, array in enumerate(arrays):
            if array.shape != arrays[0].shape:
                raise ShapeError(
                    f"DataLoader: samples of a batch must have one shape; number {number} has "
                    f"{array.shape}, the first {arrays[0].shape}; give collate_fn=, or the tuple "
                    "(x, y) where the samples are rows of arrays x and y"
                )
        return np.stack(arrays)

    return map_arrays(stacked, *samples)


# ---- the thread ----------------------------------------------------------------------------------

_BATCH, _ERROR, _END = range(3)


class _Epoch:
    """An iterator over the batches of one epoch.

    Two queues join it to its thread: one of free places, in which the thread finds leave to prepare
    one more batch, and one of finished batches. SimpleQueue.put never waits and may be called from
    a finalizer, so letting go of the iterator, anywhere and at any time, ends the thread.
    """

    def __init__(self, loader: DataLoader, epoch: int, start: int) -> None:
        self._loader = loader
        self._epoch = epoch
        self._next = start
        self._ended = False
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._batches = self._loader._prepare(self._epoch, self._next)
        if not self._loader.prefetch:
            return
        self._free: SimpleQueue[bool] = SimpleQueue()
        self._ready: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        for _ in range(self._loader.prefetch):
            self._free.put(True)
        stop: list[bool] = []
        weakref.finalize(self, _stop_thread, stop, self._free)
        threading.Thread(
            target=_fill,
            args=(self._batches, self._free, self._ready, stop),
            name="pyggml-data",
            daemon=True,  # a transform that takes long must not keep the process from ending
        ).start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._ended:
            raise StopIteration
        kind, value = self._take()
        if kind == _BATCH:
            self._next += 1
            self._loader._note(self, self._epoch, self._next, True)
            return value
        self._ended = True
        if kind == _ERROR:
            try:
                raise value
            finally:
                del value  # or it and this frame would keep each other
        self._loader._note(self, self._epoch + 1, 0, False)
        raise StopIteration

    def _take(self) -> tuple[int, Any]:
        if not self._loader.prefetch:
            return _next_of(self._batches)
        if self._process != os.getpid():  # the thread stayed in the process we were forked from
            if isinstance(self._loader._source, _Stream):
                raise SettingError(
                    "DataLoader: an iterable cannot be read on after os.fork(); start a new loop"
                )
            self._start()
        item = self._ready.get()
        self._free.put(True)
        return item


def _next_of(batches: Iterator[Batch]) -> tuple[int, Any]:
    """Return the next batch, the error that came instead, or the end."""
    try:
        return _BATCH, next(batches)
    except StopIteration:
        return _END, None
    except BaseException as error:  # raised again by whoever asks for the batch
        return _ERROR, error


def _fill(batches: Iterator[Batch], free: SimpleQueue, ready: SimpleQueue, stop: list) -> None:
    """Prepare a batch for each free place, until there are no more or nobody wants them."""
    kind = _BATCH
    while kind == _BATCH and free.get() and not stop:
        kind, value = _next_of(batches)
        ready.put((kind, value))
        del value  # the consumer's alone from here on


def _stop_thread(stop: list, free: SimpleQueue) -> None:
    stop.append(True)
    free.put(False)
