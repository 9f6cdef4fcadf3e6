"""Convolution and pooling: against loops, over threads and tile edges, at ties, padding and NaN."""

from __future__ import annotations

import re
from math import inf, nan, prod

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag, ggml_plan
from pyggml.device import CpuDevice
from pyggml.plan import graph_order
from pyggml.remat import work_of


@pytest.fixture(scope="module")
def portable_cpu():
    """Run ops with the lowering that other devices use: ggml ops only."""
    device = CpuDevice(n_threads=1, own_kernels=False)
    yield device
    device.close()


@pytest.fixture(params=["cpu", "portable", "reference"])
def device(request):
    """Run a test with own kernels, with ggml ops only, and on the reference device."""
    name = request.param
    with pg.device(request.getfixturevalue("portable_cpu") if name == "portable" else name):
        yield name


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def convolved(x, weight, stride, padding, dilation, groups):
    """Return the convolution, element by element from its definition."""
    n, _, h, w = x.shape
    o, c, kh, kw = weight.shape
    oh = (h + 2 * padding[0] - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    ow = (w + 2 * padding[1] - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    y = np.zeros((n, o, oh, ow))
    for at in np.ndindex(y.shape):
        for channel, i, j in np.ndindex(c, kh, kw):
            row = at[2] * stride[0] - padding[0] + i * dilation[0]
            column = at[3] * stride[1] - padding[1] + j * dilation[1]
            if 0 <= row < h and 0 <= column < w:
                group = at[1] // (o // groups)
                y[at] += x[at[0], group * c + channel, row, column] * weight[at[1], channel, i, j]
    return y


CASES = [
    # x, weight, stride, padding, dilation, groups
    ((2, 3, 4, 5), (2, 3, 2, 3), (1, 1), (0, 0), (1, 1), 1),
    ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    ((2, 2, 5, 6), (4, 1, 3, 2), (2, 1), (1, 2), (1, 3), 2),
    ((1, 3, 5, 4), (6, 1, 3, 3), (1, 2), (1, 1), (1, 1), 3),
    ((1, 2, 4, 4), (3, 2, 2, 2), (3, 3), (3, 4), (2, 2), 1),
    ((2, 1, 3, 7), (1, 1, 1, 5), (1, 1), (0, 4), (1, 1), 1),
    ((2, 4, 3, 3), (2, 2, 1, 1), (2, 2), (1, 0), (1, 1), 2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_convolution_is_what_its_definition_says(case, device):
    x, weight = normal(0, *case[0]), normal(1, *case[1])
    stride, padding, dilation, groups = case[2:]
    settings = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    expected = convolved(x, weight, *case[2:])
    np.testing.assert_allclose(ag.conv2d(x, weight, **settings).numpy(), expected, 1e-5, 1e-5)
    bias = normal(2, case[1][0])
    found = ag.conv2d(x, weight, bias, **settings).numpy()
    np.testing.assert_allclose(found, expected + bias[:, None, None], 1e-5, 1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_transposed_convolution_is_the_adjoint_of_the_convolution(case, device):
    stride, padding, dilation, groups = case[2:]
    x, weight = normal(0, *case[0]), normal(1, *case[1])
    y = convolved(x, weight, *case[2:])
    upstream = normal(3, *y.shape)
    spare = [  # what the floor in the size formula loses
        (n + 2 * p - d * (k - 1) - 1) % s
        for n, p, d, k, s in zip(case[0][2:], padding, dilation, case[1][2:], stride, strict=True)
    ]
    back = ag.conv_transpose2d(
        upstream, weight, stride=stride, padding=padding, output_padding=spare, dilation=dilation,
        groups=groups,
    ).numpy()  # fmt: skip
    assert back.shape == x.shape
    np.testing.assert_allclose(np.sum(back * x), np.sum(y * upstream), rtol=1e-4, atol=1e-4)


def test_conv1d_is_numpys_correlation(device):
    x, weight = normal(0, 2, 3, 50), normal(1, 4, 3, 7)
    expected = [
        [
            sum(np.correlate(row, k) for row, k in zip(item, kernel, strict=True))
            for kernel in weight
        ]
        for item in x
    ]
    np.testing.assert_allclose(ag.conv1d(x, weight).numpy(), expected, rtol=1e-4, atol=1e-5)


LARGE = {
    "images wider than a tile": ((1, 1, 3, 50_000), (2, 1, 3, 3), {"padding": 1}),
    "more rows than a tile has": ((2, 70, 12, 13), (3, 70, 3, 3), {"padding": 1, "stride": 2}),
    "many small images": ((37, 8, 4, 4), (6, 8, 3, 3), {"padding": 1}),
    "many small images in groups": ((11, 6, 3, 3), (6, 2, 2, 2), {"groups": 3}),
    "pointwise": ((3, 600, 12, 12), (8, 600, 1, 1), {}),
    "depthwise": ((3, 16, 14, 14), (16, 1, 3, 3), {"padding": 1, "groups": 16}),
    "one channel": ((5, 1, 28, 28), (32, 1, 3, 3), {}),
}


@pytest.mark.parametrize("name", LARGE)
def test_sizes_beyond_a_tile_and_any_number_of_threads_give_the_references_values(name, on_threads):
    shape, weight_shape, settings = LARGE[name]
    x, weight, bias = normal(0, *shape), normal(1, *weight_shape), normal(2, weight_shape[0])

    def values():
        tensors = [ag.param(array) for array in (x, weight, bias)]
        with ag.grad_tape():
            y = ag.conv2d(*tensors, **settings)
            loss = ag.sum(y * normal(3, *y.shape))
        return [y, *ag.grad(loss, tensors)]

    with pg.device("reference"):
        expected = [value.numpy() for value in values()]
    for n_threads in (1, 2, 5):
        for found, right in zip(on_threads(n_threads, values), expected, strict=True):
            np.testing.assert_allclose(found, right, rtol=0, atol=1e-5 * np.abs(right).max())


def test_pooling_gives_the_same_on_any_number_of_threads(on_threads):
    x = np.maximum(normal(0, 3, 5, 9, 300), 0)  # many ties at 0

    def values():
        p = ag.param(x)
        with ag.grad_tape():
            pooled = [
                ag.max_pool2d(p, 3, stride=2, padding=1),
                ag.avg_pool2d(p, (2, 3), stride=(1, 2), padding=1),
            ]
            loss = ag.sum(pooled[0] * pooled[0]) + ag.sum(pooled[1] * pooled[1])
        return [*pooled, ag.grad(loss, p)]

    with pg.device("reference"):
        expected = [value.numpy() for value in values()]
    for n_threads in (1, 2, 5):
        for found, right in zip(on_threads(n_threads, values), expected, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


def pooled_gradient(x, *args, **settings):
    p = ag.param(x)
    with ag.grad_tape():
        loss = ag.sum(ag.max_pool2d(p, *args, **settings))
    return ag.grad(loss, p).numpy()


def test_padding_never_wins_in_max_pooling(device):
    x = -1.0 - np.arange(9.0).reshape(1, 1, 3, 3)
    found = ag.max_pool2d(x, 2, padding=1).tolist()
    assert found == [[[[-1.0, -2.0], [-4.0, -5.0]]]]


def test_the_gradient_of_max_pooling_goes_to_the_first_of_equal_elements(device):
    x = np.array([[[[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [2.0, 2.0, 2.0]]]])
    assert pooled_gradient(x, 2, stride=1).tolist() == [[[[1, 0, 1], [0, 0, 0], [1, 1, 0]]]]
    zeros = np.zeros((1, 2, 4, 4))
    first = np.zeros((4, 4))
    first[::2, ::2] = 1.0
    np.testing.assert_array_equal(pooled_gradient(zeros, 2), [[first, first]])


def test_rows_and_columns_that_no_window_reaches_get_no_gradient(device):
    gradient = pooled_gradient(normal(0, 1, 1, 5, 5), 2)
    assert gradient.sum() == 4.0
    assert not gradient[..., 4, :].any() and not gradient[..., 4].any()


@pytest.mark.parametrize("where", ["cpu", "reference"])
def test_max_pooling_keeps_nan_and_infinity(where):
    x = np.array([[[[1.0, nan, -inf, -inf], [nan, 2.0, -inf, -inf], [3.0, inf, 0.0, -1.0]]]])
    with pg.device(where):
        found = ag.max_pool2d(x, (1, 2)).numpy()[0, 0]
        np.testing.assert_array_equal(found, [[nan, -inf], [nan, -inf], [inf, 0.0]])
        gradient = pooled_gradient(x, 2, stride=(1, 2))[0, 0]
    np.testing.assert_array_equal(gradient, [[0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 1, 0]])


@pytest.mark.parametrize("width", [2, 15, 66, 2050, 2500])  # some rows of windows at a time, or one
def test_windows_of_two_by_two_follow_the_reference_with_ties_and_nan(width, on_threads):
    x = np.floor(4 * normal(0, 2, 3, 9, width)) / 4  # many ties
    x[0, 0, ::3, ::5] = nan
    x[1, 1, ::2, ::7] = -inf
    weight = normal(1, 2, 3, 4, width // 2)

    def values():
        p = ag.param(x)
        with ag.grad_tape():
            pooled = ag.max_pool2d(p, 2)
            loss = ag.sum(pooled * weight)
        return [pooled, ag.grad(loss, p)]

    with pg.device("reference"):
        expected = [value.numpy() for value in values()]
    for n_threads in (1, 3):
        for found, right in zip(on_threads(n_threads, values), expected, strict=True):
            np.testing.assert_array_equal(found, right.astype(np.float32))


def test_padding_counts_in_average_pooling(device):
    found = ag.avg_pool2d(np.ones((1, 1, 2, 2)), 2, padding=1).tolist()
    assert found == [[[[0.25, 0.25], [0.25, 0.25]]]]


def test_pooling_windows_are_counted_with_floor(device):
    x = np.zeros((1, 1, 7, 8))
    assert ag.max_pool2d(x, 3).shape == (1, 1, 2, 2)
    assert ag.max_pool2d(x, 3, stride=2, padding=1).shape == (1, 1, 4, 4)
    assert ag.avg_pool2d(x, (2, 3), stride=(3, 1)).shape == (1, 1, 2, 6)


def test_a_step_of_a_small_network_of_convolutions_follows_the_reference(device):
    def gradients():
        first, second = ag.param(normal(1, 4, 1, 3, 3)), ag.param(normal(2, 6, 4, 3, 3))
        with ag.grad_tape():
            h = ag.max_pool2d(ag.relu(ag.conv2d(normal(0, 4, 1, 8, 8), first, padding=1)), 2)
            h = ag.avg_pool2d(ag.relu(ag.conv2d(h, second, padding=1)), 4)
            loss = ag.softmax_cross_entropy(ag.reshape(h, (4, 6)), [0, 1, 2, 3])
        return [gradient.numpy() for gradient in ag.grad(loss, [first, second])]

    found = gradients()
    with pg.device("reference"):
        for ours, right in zip(found, gradients(), strict=True):
            np.testing.assert_allclose(ours, right, rtol=1e-4, atol=1e-5)


# ---- mistakes ----------------------------------------------------------------------------------

MISTAKES = {
    "a convolution of three axes": (
        lambda: ag.conv2d(np.ones((1, 3, 3)), np.ones((1, 1, 3, 3))),
        pg.ShapeError,
        "conv2d: needs 4 axes, (batch, channels, ...)",
    ),
    "a fractional padding": (
        lambda: ag.conv2d(np.ones((1, 1, 3, 3)), np.ones((1, 1, 3, 3)), padding=0.5),
        pg.DTypeError,
        "conv2d: padding must be an integer, or 2 of them; got 0.5",
    ),
    "output_padding without a stride": (
        lambda: ag.conv_transpose2d(np.ones((1, 1, 3, 3)), np.ones((1, 1, 3, 3)), output_padding=1),
        pg.SettingError,
        "conv_transpose2d: output_padding must be less than stride",
    ),
    "pooling of integers": (
        lambda: ag.max_pool2d(ag.tensor(np.ones((1, 1, 2, 2), int)), 2),
        pg.DTypeError,
        "max_pool2d: needs float32",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_that_says_what_is_wrong(name):
    call, error, message = MISTAKES[name]
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_the_work_of_a_convolution_and_its_gradients_is_that_of_the_loops_they_stand_for():
    shape = (2, 6, 5, 3)  # of the result; each element is a sum of 4 x 3 x 2 products
    values = normal(0, 2, 8, 7, 4), normal(1, 6, 4, 3, 2)
    x, weight = map(ag.param, values)
    with ag.grad_tape():
        y = ag.conv2d(x, weight, groups=2)
        loss = ag.sum(y * y)
    assert y.shape == shape
    gradients = ag.grad(loss, [x, weight])
    nodes = graph_order([tensor._at[1] for tensor in gradients])
    convolutions = [node for node in nodes if node.op.name.startswith("conv2d")]
    assert {node.op.name for node in convolutions} == {"conv2d", "conv2d_input", "conv2d_weight"}
    assert {work_of(node) for node in convolutions} == {2 * prod(shape) * 4 * 3 * 2}


@pytest.mark.parametrize(
    "shape, outputs, kernel, padding, dilation, groups",
    [
        ((2, 3, 9, 70), 11, (3, 3), (1, 1), (1, 1), 1),  # several panels; outputs beyond the last 8
        ((1, 300, 6, 5), 9, (2, 3), (0, 2), (1, 2), 1),  # more channels than a tile takes
        ((2, 4, 60, 100), 16, (5, 2), (2, 1), (2, 1), 2),  # more lines than a tile takes
        ((1, 32, 3, 3), 8, (3, 3), (4, 5), (1, 1), 1),  # padded by more than the kernel covers
    ],
)
def test_unit_strides_give_the_reference_and_equal_bits_for_any_number_of_threads(
    shape, outputs, kernel, padding, dilation, groups, monkeypatch
):
    monkeypatch.setattr(ggml_plan, "WORK_WORTH_A_THREAD", 0)
    settings = {"padding": padding, "dilation": dilation, "groups": groups}
    x, weight = normal(0, *shape), normal(1, outputs, shape[1] // groups, *kernel)
    bias = normal(2, outputs)

    def run(device):
        with pg.device(device):
            a, w = ag.param(x), ag.param(weight)
            with ag.grad_tape():
                y = ag.conv2d(a, w, bias, **settings)
                loss = ag.sum(ag.sin(y))
            return y.numpy(), ag.grad(loss, [a])[0].numpy()

    expected = run("reference")
    results = []
    for n_threads in (1, 3):
        device = CpuDevice(n_threads=n_threads)
        results.append(run(device))
        device.close()
    for one, other, values in zip(*results, expected, strict=True):
        assert np.array_equal(one, other)
        assert np.allclose(one, values, rtol=1e-4, atol=1e-3)


def test_the_weight_s_gradient_is_the_reference_s_in_equal_bits_for_any_number_of_threads(
    monkeypatch,
):
    monkeypatch.setattr(ggml_plan, "WORK_WORTH_A_THREAD", 0)
    x, g = normal(0, 3, 11, 20, 31), normal(1, 3, 64, 21, 30)

    def run(device):
        with pg.device(device):
            weight = ag.param(np.zeros((64, 11, 2, 4), np.float32))
            with ag.grad_tape():
                loss = ag.sum(g * ag.conv2d(x, weight, padding=(1, 1)))
            return ag.grad(loss, [weight])[0].numpy()

    results = []
    for n_threads in (1, 2, 3):
        device = CpuDevice(n_threads=n_threads)
        results.append(run(device))
        device.close()
    assert np.allclose(results[0], run("reference"), rtol=1e-4, atol=1e-3)
    assert all(np.array_equal(results[0], other) for other in results[1:])
