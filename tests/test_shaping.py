"""Shapes, parts and indices: NumPy's rules, what is refused, and what costs nothing."""

from __future__ import annotations

import itertools
import re
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices

import pyggml as pg
from pyggml import ag, ggml_plan
from pyggml.device import CpuDevice

ARRAY = np.arange(4 * 5 * 6, dtype=np.float32).reshape(4, 5, 6)


@pytest.fixture(scope="module")
def portable_cpu():
    """Run ops with the lowering that other devices use: ggml ops only."""
    device = CpuDevice(n_threads=1, own_kernels=False)
    yield device
    device.close()


@pytest.fixture(params=["cpu", "portable"])
def device(request):
    """Run a test with own kernels, and with ggml ops only."""
    with pg.device(request.getfixturevalue("portable_cpu") if request.param != "cpu" else "cpu"):
        yield


@pytest.fixture
def on_threads(monkeypatch):
    """Return a function that runs another on so many threads, however small the work."""

    def run(n_threads, fn):
        monkeypatch.setattr(ggml_plan, "threads_worth_starting", lambda graph: n_threads)
        device = CpuDevice(n_threads=n_threads)
        with pg.device(device):
            value = fn().numpy()
        device.close()
        return value

    return run


# ---- x[key] --------------------------------------------------------------------------------------

KEYS = [
    0,
    -1,
    np.int64(2),
    slice(1, 3),
    slice(None, None, 2),
    slice(None, None, -1),
    slice(3, 0, -2),
    slice(-2, 100),
    ...,
    None,
    (),
    (0, 0, 0),
    (..., -1),
    (..., None, 0),
    (slice(0, 4, 3), slice(0, 5, 2), slice(1, 6, 4)),
    (slice(None), slice(1, 4, 2), slice(5, None, -2)),
    [0, 2, 2],
    [-1, 0],
    np.array([3, -4], np.int8),
    (slice(None), [1, -1], slice(1, 3)),
    (slice(None), slice(1, 3), [0, 5, 5]),
    (slice(None, None, -1), [3, 0], 2),
    (0, [1, 2]),
    ([[0, 1], [2, 3]], 0),
    (..., np.array([[5], [0]])),
]


@pytest.mark.parametrize("key", KEYS, ids=repr)
@pytest.mark.parametrize("base", [ARRAY, ARRAY.astype(np.int32)], ids=["floats", "integers"])
def test_a_key_takes_from_data_what_it_takes_in_numpy(key, base, device):
    found = ag.tensor(base)[key].numpy()
    assert found.dtype == base.dtype
    np.testing.assert_array_equal(found, base[key])


@pytest.mark.parametrize("key", KEYS, ids=repr)
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_a_gradient_comes_back_to_the_entries_that_a_key_took(key, transposed, device):
    base = ARRAY.transpose(1, 0, 2)[:4] if transposed else ARRAY
    x = ag.param(ARRAY)
    with ag.grad_tape():
        value = (ag.permute(x, (1, 0, 2))[:4] if transposed else x)[key]
        weights = np.arange(1.0, value.size + 1).reshape(value.shape)
        loss = ag.sum(value * ag.tensor(weights))
    np.testing.assert_array_equal(value.numpy(), base[key])
    expected = np.zeros(ARRAY.shape)
    np.add.at(expected.transpose(1, 0, 2)[:4] if transposed else expected, key, weights)
    np.testing.assert_array_equal(ag.grad(loss, x).numpy(), expected)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(basic_indices((4, 5, 6), allow_newaxis=True), st.booleans())
def test_any_key_gives_what_numpy_gives_or_says_that_it_cannot(key, is_parameter):
    x = ag.param(ARRAY) if is_parameter else ag.tensor(ARRAY)
    expected = ARRAY[key]
    if expected.size == 0 or expected.ndim > 4:
        with pytest.raises(pg.ShapeError, match="tensors are never empty|at most 4 dimensions"):
            x[key]
    else:
        np.testing.assert_array_equal(x[key].numpy(), expected)


@pytest.mark.parametrize("key", [4, -5, (0, 5), (0, 0, 0, 0), [0, 4], [-5], np.array([999999])])
def test_an_index_out_of_range_is_an_index_error_at_once(key):
    for x in (ag.tensor(ARRAY), ag.param(ARRAY)):
        with pytest.raises(pg.IndexRangeError, match="index: "):
            x[key]


@pytest.mark.parametrize(
    "key", [slice(2, 2), slice(5, 9), slice(0, 2, -1), [], (slice(None), slice(0))]
)
def test_a_key_that_leaves_nothing_is_refused(key):
    with pytest.raises(pg.ShapeError, match="leaves nothing"):
        ag.tensor(ARRAY)[key]


@pytest.mark.parametrize(
    "mask", [True, np.bool_(False), [True, False], ARRAY > 3, (slice(None), np.ones(5, bool))]
)
def test_a_mask_is_refused_and_the_message_names_where(mask):
    with pytest.raises(pg.DTypeError, match=r"depends on the data; use ag\.where"):
        ag.tensor(ARRAY)[mask]


@pytest.mark.parametrize("key", [([0], [1]), ([0, 1], slice(None), 0), (0, slice(None), [1])])
def test_arrays_whose_axes_numpy_would_move_are_refused(key):
    with pytest.raises(pg.ShapeError, match="index in two steps"):
        ag.tensor(ARRAY)[key]


@pytest.mark.parametrize("key", ["a", 1.5, [0.5], (0, {})])
def test_what_is_no_index_is_a_type_error(key):
    with pytest.raises(pg.DTypeError, match="index: "):
        ag.tensor(ARRAY)[key]


def test_a_tensor_of_integers_may_be_an_index_and_count_from_the_end():
    x = ag.tensor(ARRAY)
    np.testing.assert_array_equal(x[ag.tensor([1, 3])].numpy(), ARRAY[[1, 3]])
    np.testing.assert_array_equal(x[ag.tensor([-1, 0])].numpy(), ARRAY[[-1, 0]])
    with pytest.raises(pg.IndexRangeError):
        x[ag.tensor([0, 4])]


def test_a_loop_over_a_tensor_ends():
    np.testing.assert_array_equal([row.numpy() for row in ag.tensor(ARRAY)], ARRAY)


def test_batches_cut_from_data_at_other_places_share_one_plan():
    device = CpuDevice(n_threads=1)
    data = ag.tensor(ARRAY.reshape(60, 2), device=device)
    labels = ag.tensor(np.arange(60) % 2, device=device)
    w = ag.param(np.ones((2, 2)), device=device)
    counts = []
    for start in range(0, 60, 10):
        with ag.grad_tape():
            batch = slice(start, start + 10)
            loss = ag.softmax_cross_entropy(data[batch] @ w, labels[batch])
        ag.backward(loss)[w].numpy()
        w.grad = None
        counts.append(len(device.plans))
    device.close()
    assert counts[-1] == counts[1]


def test_labels_may_be_a_strided_part_of_a_tensor(device):
    logits = np.eye(3)[[0, 2]] * 1000.0
    labels = ag.tensor([0, 1, 2, 1])
    assert ag.softmax_cross_entropy(logits, labels[::2]).item() == 0.0
    table = ag.tensor([[0, 9], [2, 9]])
    assert ag.softmax_cross_entropy(logits, table[:, 0]).item() == 0.0


# ---- take, embedding, one_hot --------------------------------------------------------------------


def test_rows_taken_more_than_once_add_their_gradients(device):
    weight = ag.param(np.zeros((4, 2)))
    with ag.grad_tape():
        loss = ag.sum(ag.embedding(weight, [1, 1, 2]))
    assert ag.grad(loss, weight).tolist() == [[0, 0], [2, 2], [1, 1], [0, 0]]


@pytest.mark.parametrize("wrong", [-1, 4, 999999])
def test_an_index_that_names_no_row_is_an_index_error_before_any_graph_runs(wrong, monkeypatch):
    def refuse(*_):
        raise AssertionError("a graph ran")

    monkeypatch.setattr(CpuDevice, "compute", refuse)
    table = ag.param(np.zeros((4, 2)))
    for indices in ([0, wrong], np.array([[wrong]]), ag.tensor([0, wrong])):
        with pytest.raises(pg.IndexRangeError, match=rf"embedding: .* in \[0, 4\); got {wrong}"):
            ag.embedding(table, indices)
        with pytest.raises(IndexError, match=rf"take: indices must be in \[0, 4\); got {wrong}"):
            ag.take(table, indices)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_take_keeps_the_shape_of_the_indices_and_the_type_of_the_entries(axis, device):
    for indices in (3, [3, 0, 3], [[3], [1]]):
        for base in (ARRAY, ARRAY.astype(np.int32)):
            found = ag.take(ag.tensor(base), np.array(indices), axis=axis).numpy()
            assert found.dtype == base.dtype
            np.testing.assert_array_equal(found, np.take(base, indices, axis=axis))


@pytest.mark.parametrize(
    "shape, axis", [((50, 3), 0), ((50, 300), 0), ((9, 50, 2), 1), ((20, 50), 1), ((50,), 0)]
)
def test_the_gradient_of_take_has_the_same_bits_on_any_number_of_threads(shape, axis, on_threads):
    generator = np.random.default_rng(0)
    array = generator.standard_normal(shape).astype(np.float32)
    indices = generator.integers(0, 50, 1000) ** 2 // 50  # some far more often than others
    upstream = generator.standard_normal((*shape[:axis], 1000, *shape[axis + 1 :]))

    def gradient():
        x = ag.param(array)
        with ag.grad_tape():
            loss = ag.sum(ag.take(x, indices, axis=axis) * upstream)
        return ag.grad(loss, x)

    alone = on_threads(1, gradient)
    expected = np.zeros(shape)
    np.add.at(np.moveaxis(expected, axis, 0), indices, np.moveaxis(upstream, axis, 0))
    np.testing.assert_allclose(alone, expected, rtol=1e-4, atol=1e-4)
    for n_threads in (2, 3, 7):
        np.testing.assert_array_equal(on_threads(n_threads, gradient), alone)


def test_one_hot_rows_follow_the_shape_of_the_indices():
    np.testing.assert_array_equal(ag.one_hot([[2, 0]], 3).numpy(), [[[0, 0, 1], [1, 0, 0]]])
    assert ag.one_hot(1, 2).tolist() == [0.0, 1.0]


# ---- joining, cutting, repeating, padding --------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_joins_and_repeats_give_what_numpy_gives(axis, dtype, device):
    a = ARRAY.astype(dtype)
    x = ag.tensor(a)
    pairs = [
        (ag.concat([x, x, x], axis=axis), np.concatenate([a, a, a], axis=axis)),
        (ag.stack([x, x], axis=axis), np.stack([a, a], axis=axis)),
        (ag.repeat(x, 3, axis=axis), np.repeat(a, 3, axis=axis)),
        (ag.tile(x, 3, axis=axis), np.concatenate([a] * 3, axis=axis)),
        (ag.flip(x, axis=axis), np.flip(a, axis=axis)),
        (ag.flip(x), np.flip(a)),
        (ag.unsqueeze(x, axis=axis), np.expand_dims(a, axis)),
    ]
    for found, expected in pairs:
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.numpy(), expected)


def test_parts_of_many_sizes_are_joined_in_order_on_any_number_of_threads(on_threads):
    parts = [np.full((2, n, 3), n, np.float32) for n in range(1, 40)]
    for axis in (0, 1, 2):
        turned = [np.moveaxis(part, 1, axis) for part in parts]
        expected = np.concatenate(turned, axis=axis)
        for n_threads in (1, 2, 5):
            joined = on_threads(
                n_threads, lambda turned=turned, axis=axis: ag.concat(turned, axis=axis)
            )
            np.testing.assert_array_equal(joined, expected)


def test_split_cuts_into_equal_parts_or_given_sizes():
    x = ag.tensor(ARRAY)
    for part, expected in zip(ag.split(x, 3, axis=2), np.split(ARRAY, 3, axis=2), strict=True):
        np.testing.assert_array_equal(part.numpy(), expected)
    first, second = ag.split(x, (1, 4), axis=1)
    np.testing.assert_array_equal(first.numpy(), ARRAY[:, :1])
    np.testing.assert_array_equal(second.numpy(), ARRAY[:, 1:])


def test_parts_of_one_split_give_one_whole_gradient():
    x = ag.param(np.zeros((2, 3)))
    with ag.grad_tape():
        a, b, c = ag.split(x, 3, axis=1)
        loss = ag.sum(a + 2.0 * b + 3.0 * c)
    assert ag.grad(loss, x).tolist() == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("value", [0.0, -2.5, inf, -inf])
def test_padding_puts_its_value_around_and_leaves_the_inside_alone(value, device):
    inside = np.array([[nan, inf], [-inf, 1.0]], np.float32)
    for widths in (1, (0, 2), ((2, 0), (0, 1))):
        found = ag.pad(inside, widths, value=value).numpy()
        np.testing.assert_array_equal(found, np.pad(inside, widths, constant_values=value))


def test_padding_by_nothing_is_the_tensor_itself():
    x = ag.tensor([1.0])
    assert ag.pad(x, 0) is x


def test_squeeze_drops_named_axes_or_all():
    x = ag.tensor(np.ones((1, 2, 1)))
    assert ag.squeeze(x).shape == (2,)
    assert ag.squeeze(x, axis=-1).shape == (1, 2)
    assert ag.squeeze(x, axis=(0, 2)).shape == (2,)


# ---- copies in order -----------------------------------------------------------------------------


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("axes", [(1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0)])
def test_a_permuted_tensor_is_copied_in_order_either_way(axes, tiled):
    device = CpuDevice(n_threads=1, own_kernels=False)
    device.tiled_copies = tiled
    with pg.device(device):
        x = ag.param(ARRAY)
        with ag.grad_tape():
            y = ag.reshape(ag.permute(x, axes), (-1,))
        (gradient,) = ag.grad(y, [x], seed=ag.tensor(np.transpose(ARRAY + 1, axes).ravel()))
        np.testing.assert_array_equal(y.numpy(), np.transpose(ARRAY, axes).ravel())
        np.testing.assert_array_equal(gradient.numpy(), ARRAY + 1)
    device.close()


# ---- mistakes ----------------------------------------------------------------------------------

MISTAKES = {
    "squeeze of a longer axis": (
        lambda: ag.squeeze(ag.tensor(np.ones((2, 1))), axis=0),
        pg.ShapeError,
        "squeeze: axes must have size 1",
    ),
    "repeat zero times": (
        lambda: ag.repeat(ag.tensor([1.0]), 0, axis=0),
        pg.SettingError,
        "repeat: repeats must be a positive integer; got 0",
    ),
    "two arrays as index": (
        lambda: ag.tensor(np.ones((2, 2)))[[0], [1]],
        pg.ShapeError,
        "index: one array of integers at most",
    ),
    "padding for other axes": (
        lambda: ag.pad(ag.tensor([1.0]), ((1, 1), (1, 1))),
        pg.ShapeError,
        "pad: widths must be 1 pairs (before, after)",
    ),
    "padding of integers": (
        lambda: ag.pad(ag.tensor([1, 2]), 1),
        pg.DTypeError,
        "pad: needs float32",
    ),
    "concat of nothing": (
        lambda: ag.concat([]),
        pg.ShapeError,
        "concat: needs at least one tensor",
    ),
    "stack of two shapes": (
        lambda: ag.stack([[1.0], [1.0, 2.0]]),
        pg.ShapeError,
        "shapes must be equal",
    ),
    "an uneven split": (
        lambda: ag.split(ag.tensor(np.ones(5)), 2),
        pg.ShapeError,
        "split: axis 0 has size 5, which 2 does not divide",
    ),
    "an embedding by fractions": (
        lambda: ag.embedding(ag.param(np.ones((4, 2))), [0.0]),
        pg.DTypeError,
        "embedding: indices must be integers",
    ),
    "an embedding in a vector": (
        lambda: ag.embedding(ag.param(np.ones(4)), [0]),
        pg.ShapeError,
        "embedding: weight must be (rows, width); got shape (4,)",
    ),
    "indices that give a fifth axis": (
        lambda: ag.take(ag.tensor(np.ones((2, 2, 2))), np.zeros((1, 1, 1), int)),
        pg.ShapeError,
        "take: at most 4 dimensions",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_that_says_what_is_wrong(name):
    call, error, message = MISTAKES[name]
    with pytest.raises(error, match=re.escape(message)):
        call()


@pytest.mark.parametrize("axes", list(itertools.permutations(range(4))))
def test_permuted_axes_are_copied_in_their_order_by_any_number_of_threads(axes, on_threads):
    x = np.arange(2.0 * 17 * 3 * 35, dtype=np.float32).reshape(2, 17, 3, 35)
    expected = x.transpose(axes).ravel()
    for n_threads in (1, 3):
        found = on_threads(n_threads, lambda: ag.reshape(ag.permute(x, axes), (-1,)))
        np.testing.assert_array_equal(found, expected)
