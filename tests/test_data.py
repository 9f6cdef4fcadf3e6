"""DataLoader: which samples a batch has, the thread that prepares it, going on in the middle."""

from __future__ import annotations

import gc
import threading
from collections import Counter, namedtuple

import numpy as np
import pytest
from helpers import loader_threads, wait_until

import pyggml as pg
from pyggml import ag
from pyggml.data import DataLoader

PREFETCH = [0, 1, 2, 5]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    assert wait_until(lambda: not loader_threads()), "a loader's thread outlived its iterator"


class Squares:
    """A dataset: number i, and its square."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        if not 0 <= i < self.length:
            raise IndexError(i)
        return float(i), i * i


# ---- which samples ----


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_arrays_are_cut_in_order_and_the_last_batch_may_be_smaller(prefetch):
    x, y = np.arange(14.0).reshape(7, 2), np.arange(7)
    batches = list(DataLoader((x, y), batch_size=3, prefetch=prefetch))
    assert [len(part) for part, _ in batches] == [3, 3, 1]
    np.testing.assert_array_equal(np.concatenate([part for part, _ in batches]), x)
    np.testing.assert_array_equal(np.concatenate([part for _, part in batches]), y)


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
@pytest.mark.parametrize("shuffle", [False, True])
def test_drop_last_leaves_out_what_is_smaller_and_len_counts_the_batches(drop_last, sizes, shuffle):
    loader = DataLoader(np.arange(10), batch_size=4, drop_last=drop_last, shuffle=shuffle, seed=1)
    assert [len(batch) for batch in loader] == sizes
    assert len(loader) == len(sizes)


def test_a_batch_has_the_structure_of_the_data_and_its_element_types():
    Pair = namedtuple("Pair", "image label")
    data = {
        "pair": Pair(np.zeros((4, 2), np.uint8), [3, 1, 2, 0]),
        "weight": np.ones(4, np.float16),
        "tensor": ag.tensor([1.0, 2.0, 3.0, 4.0]),
    }
    batch = next(iter(DataLoader(data, batch_size=2)))
    assert isinstance(batch["pair"], Pair)
    assert batch["pair"].image.dtype == np.uint8
    assert batch["pair"].label.dtype.kind == "i"
    assert batch["pair"].label.tolist() == [3, 1]
    assert batch["weight"].dtype == np.float16
    assert batch["tensor"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_each_epoch_has_every_sample_once_in_an_order_of_its_own(prefetch):
    loader = DataLoader(np.arange(100), batch_size=7, shuffle=True, seed=3, prefetch=prefetch)
    orders = [np.concatenate(list(loader)).tolist() for _ in range(4)]
    for order in orders:
        assert Counter(order) == Counter(range(100))
    assert len({tuple(order) for order in orders}) == 4
    assert list(range(100)) not in orders


def test_the_order_is_a_function_of_seed_and_epoch():
    def orders(seed):
        loader = DataLoader(np.arange(50), batch_size=8, shuffle=True, seed=seed)
        return [np.concatenate(list(loader)).tolist() for _ in range(3)]

    assert orders(5) == orders(5)
    assert orders(5) != orders(6)


def test_the_order_is_the_documented_one_in_every_version_of_numpy():
    """Sorted raw words of PCG64 under (seed, epoch): no NumPy release may change them."""
    loader = DataLoader(np.arange(8), batch_size=8, shuffle=True, seed=0)
    orders = [next(iter(loader)).tolist() for _ in range(2)]
    assert orders == [[7, 2, 0, 4, 3, 5, 6, 1], [3, 4, 0, 6, 5, 2, 7, 1]]


def test_without_a_seed_the_default_generator_decides():
    def order():
        pg.manual_seed(7)
        return next(iter(DataLoader(np.arange(30), batch_size=30, shuffle=True))).tolist()

    assert order() == order()
    before = pg.random.default_generator.state()
    DataLoader(np.arange(30))  # nothing to draw
    assert pg.random.default_generator.state() == before


@pytest.mark.parametrize("shuffle", [False, True])
def test_changing_a_batch_does_not_change_the_data(shuffle):
    x = np.arange(6.0)
    for batch in DataLoader(x, batch_size=2, shuffle=shuffle, seed=0):
        batch *= 0
    assert x.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("shuffle", [False, True])
def test_memory_mapped_files_are_read_batch_by_batch(tmp_path, shuffle):
    x = np.arange(40, dtype=np.int16).reshape(20, 2)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    batches = list(DataLoader(mapped, batch_size=6, shuffle=shuffle, seed=2))
    in_memory = list(DataLoader(x, batch_size=6, shuffle=shuffle, seed=2))
    for batch, expected in zip(batches, in_memory, strict=True):
        assert type(batch) is np.ndarray
        assert batch.dtype == np.int16
        np.testing.assert_array_equal(batch, expected)


def test_arrays_on_disk_are_asked_for_rising_rows_only():
    """As h5py demands it."""

    class OnDisk:
        shape, dtype = (10, 1), np.dtype(np.float32)

        def __getitem__(self, rows):
            if not isinstance(rows, slice):
                assert np.all(np.diff(rows) > 0)
            return np.arange(10, dtype=np.float32).reshape(10, 1)[rows]

    expected = np.concatenate(list(DataLoader(np.arange(10), batch_size=4, shuffle=True, seed=0)))
    got = np.concatenate(list(DataLoader(OnDisk(), batch_size=4, shuffle=True, seed=0)))
    assert got[:, 0].tolist() == expected.tolist()


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_dataset_gives_samples_that_are_stacked(shuffle):
    loader = DataLoader(Squares(10), batch_size=4, shuffle=shuffle, seed=1)
    x, y = (np.concatenate(parts) for parts in zip(*loader, strict=True))
    assert x.dtype == np.float64
    assert y.dtype.kind == "i"
    assert sorted(x.tolist()) == list(range(10))
    np.testing.assert_array_equal(y, x**2)


def test_a_list_is_a_dataset_of_dicts():
    samples = [{"x": np.full(2, i), "y": i} for i in range(3)]
    batch = next(iter(DataLoader(samples, batch_size=3)))
    assert batch["x"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch["y"].tolist() == [0, 1, 2]


def test_collate_fn_makes_the_batch_of_samples_of_unequal_length():
    def pad(samples):
        return np.array([sample + [0] * (3 - len(sample)) for sample in samples])

    batch = next(iter(DataLoader([[1], [1, 2], [1, 2, 3]], batch_size=3, collate_fn=pad)))
    assert batch.tolist() == [[1, 0, 0], [1, 2, 0], [1, 2, 3]]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_iterable_is_read_anew_in_each_epoch(prefetch):
    class Stream:
        def __iter__(self):
            yield from range(5)

    loader = DataLoader(Stream(), batch_size=2, prefetch=prefetch)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    with pytest.raises(TypeError, match="how many batches"):
        len(loader)
    assert [len(b) for b in DataLoader(Stream(), batch_size=2, drop_last=True)] == [2, 2]


def test_a_generator_can_be_read_once_and_says_so_the_second_time():
    loader = DataLoader((i for i in range(4)), batch_size=2)
    assert len(list(loader)) == 2
    with pytest.raises(pg.SettingError, match="an iterator can be read once"):
        list(loader)


# ---- what is done to a batch ----


@pytest.mark.parametrize("prefetch", [0, 2])
def test_transform_is_applied_to_each_batch(prefetch):
    loader = DataLoader(
        (np.arange(4.0), np.arange(4)),
        batch_size=2,
        prefetch=prefetch,
        transform=lambda batch: (batch[0] / 2, batch[1]),
    )
    assert [x.tolist() for x, _ in loader] == [[0.0, 0.5], [1.0, 1.5]]


def test_transform_runs_in_the_background_thread():
    names = []
    loader = DataLoader(
        np.arange(4), transform=lambda b: names.append(threading.current_thread().name)
    )
    list(loader)
    assert set(names) == {"pyggml-data"}


def test_augment_draws_the_same_numbers_for_the_same_batch_of_the_same_epoch():
    def draws(prefetch, skip):
        loader = DataLoader(
            np.zeros(6),
            batch_size=2,
            seed=4,
            prefetch=prefetch,
            augment=lambda batch, generator: batch + generator.standard_normal(batch.shape),
        )
        loader.load_state_dict({**loader.state_dict(), "epoch": 1, "batch": skip})
        return np.concatenate(list(loader)).tolist()

    whole = draws(0, 0)
    assert len(set(whole)) == 6
    assert draws(2, 0) == whole
    assert draws(2, 1) == whole[2:]


# ---- going on in the middle ----


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("taken", range(6))
def test_a_loaded_state_gives_exactly_the_remaining_batches(prefetch, shuffle, taken):
    def make(seed):
        data = (np.arange(18.0).reshape(9, 2), np.arange(9))
        return DataLoader(data, batch_size=2, shuffle=shuffle, seed=seed, prefetch=prefetch)

    first = make(seed=11)
    list(first)
    batches = iter(first)
    for _ in range(taken):
        next(batches)
    state = first.state_dict()
    rest = list(batches)
    following = list(first)

    second = make(seed=99)  # the state brings its own
    second.load_state_dict(state)
    for expected in (rest, following):
        got = list(second)
        assert len(got) == len(expected)
        for (x, y), (x2, y2) in zip(got, expected, strict=True):
            np.testing.assert_array_equal(x, x2)
            np.testing.assert_array_equal(y, y2)


def test_the_position_counts_batches_handed_out_not_batches_prepared():
    made = []
    loader = DataLoader(np.arange(20), batch_size=2, prefetch=5, transform=made.append)
    batches = iter(loader)
    next(batches)
    assert wait_until(lambda: len(made) == 6)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (0, 1)
    del batches


def test_a_state_can_be_taken_between_epochs_and_before_the_first():
    loader = DataLoader(np.arange(4), batch_size=2)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (0, 0)
    list(loader)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (1, 0)


def test_leaving_a_loop_early_begins_the_next_epoch():
    loader = DataLoader(np.arange(64), batch_size=8, shuffle=True, seed=0)
    whole = DataLoader(np.arange(64), batch_size=8, shuffle=True, seed=0)
    epochs = [[batch.tolist() for batch in whole] for _ in range(2)]
    assert next(iter(loader)).tolist() == epochs[0][0]  # a look at the first batch
    assert [batch.tolist() for batch in loader] == epochs[1]
    assert loader.epoch == 2


def test_an_old_iterator_does_not_move_the_position_of_a_newer_one():
    loader = DataLoader(np.arange(8), batch_size=2)
    old, new = iter(loader), iter(loader)
    next(new)
    next(old)
    next(old)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (1, 1)
    del old, new


def test_a_stream_goes_on_by_passing_over_what_was_read():
    loader = DataLoader(iter(range(7)), batch_size=2)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    again = DataLoader(iter(range(7)), batch_size=2)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == [[2, 3], [4, 5], [6]]
    del batches


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 3}, "taken with batch_size=2; this loader has batch_size=3"),
        ({"shuffle": False}, "taken with shuffle=1; this loader has shuffle=0"),
        ({"drop_last": True}, "taken with drop_last=0"),
        ({"data": np.arange(9)}, "taken with samples=8; this loader has samples=9"),
    ],
)
def test_a_state_of_another_cut_is_refused(change, message):
    settings = {"data": np.arange(8), "batch_size": 2, "shuffle": True, "seed": 0}
    state = DataLoader(**settings).state_dict()
    with pytest.raises(pg.SettingError, match=message):
        DataLoader(**{**settings, **change}).load_state_dict(state)


# ---- mistakes ----


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: DataLoader(np.arange(3), batch_size=0), pg.SettingError, "batch_size must be a"),
        (
            lambda: DataLoader(np.arange(3), prefetch=-1),
            pg.SettingError,
            "prefetch must be an integer of at least 0, at most 1024; got -1",
        ),
        (lambda: DataLoader(np.arange(3), shuffle=True, seed=-1), pg.SettingError, "seed must be"),
        (lambda: DataLoader(np.arange(3), shuffle=True, seed=0.5), pg.SettingError, "got 0.5"),
        (lambda: DataLoader(np.zeros((0, 2))), pg.SettingError, "give at least one sample"),
        (
            lambda: DataLoader(np.zeros(3), batch_size=4, drop_last=True),
            pg.SettingError,
            "3 samples leave no batch of 4; take a smaller batch_size",
        ),
        (
            lambda: DataLoader((np.zeros(3), np.zeros(4))),
            pg.ShapeError,
            r"arrays must have one length; got \[3, 4\]",
        ),
        (lambda: DataLoader(()), pg.ShapeError, "none at all"),
        (lambda: DataLoader(np.float32(3)), pg.ShapeError, "an axis of samples"),
        (lambda: DataLoader((np.zeros(2), [[1], [1, 2]])), pg.ShapeError, "must be rectangular"),
        (lambda: DataLoader(3), pg.DTypeError, "needs arrays, a dataset .* got int"),
        (lambda: DataLoader("abc"), pg.DTypeError, "got str"),
        (
            lambda: DataLoader(iter([1, 2]), shuffle=True, seed=0),
            pg.SettingError,
            "shuffle needs data with __len__",
        ),
        (lambda: DataLoader(np.zeros(3), collate_fn=list), pg.SettingError, "use transform for"),
        (
            lambda: next(iter(DataLoader([np.zeros((5, 2)), np.zeros(5)], batch_size=2))),
            pg.ShapeError,
            r"number 1 has \(5,\), the first \(5, 2\); give collate_fn=, or the tuple \(x, y\)",
        ),
    ],
)
def test_a_mistake_is_named_with_what_to_do(make, error, message):
    with pytest.raises(error, match=message):
        make()
