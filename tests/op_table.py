"""The op table: one row for each op and each way of using it that runs other code.

test_ops.py runs every row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from pyggml import ag
from pyggml.ops import sum_to
from pyggml.ops.recurrent import recurrence
from pyggml.random import Generator

Domain = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.standard_normal(shape)


def apart_from_zero(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Both signs, at least 0.2 from the kink or pole at 0."""
    return generator.choice([-1.0, 1.0], shape) * generator.uniform(0.2, 2.0, shape)


def positive(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.uniform(0.2, 2.0, shape)


def around_one(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Both signs, sizes from 0.8 to 1.25: high powers stay near 1."""
    return generator.choice([-1.0, 1.0], shape) * generator.uniform(0.8, 1.25, shape)


def labels(classes: int) -> Domain:
    return lambda generator, shape: generator.integers(0, classes, shape)


def recurrent(*inputs: ag.Tensor, reverse: bool = False) -> ag.Tensor:
    """Return all that a recurrent op gives as one tensor."""
    outputs, last = recurrence(*inputs, reverse=reverse)
    return ag.concat([outputs, ag.stack(last)])


def whole(x: ag.Tensor) -> ag.Tensor:
    """Return integers as floats, which can be compared like other results."""
    return ag.astype(x, "float32")


def statistics_of(like: ag.Tensor, *shape: int) -> ag.Tensor:
    """Mean plus variance of each channel of a constant: no gradient flows through them."""
    x = np.random.default_rng(0).standard_normal(shape)
    mean, var = ag.batch_statistics(ag.tensor(x, device=like.device))
    return mean + var


@dataclass
class Row:
    """One op at work: fn on inputs of these shapes, drawn from these domains (the last one
    repeats).
    """

    name: str
    fn: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    domains: Sequence[Domain] = field(default=(normal,))
    order: int = 2  # how many times it can be differentiated
    tolerance: float = 1e-5  # device against reference, relative to the largest value

    def inputs(self, seed: int) -> list[np.ndarray]:
        generator = np.random.default_rng(seed)
        domains = [*self.domains, *[self.domains[-1]] * (len(self.shapes) - len(self.domains))]
        return [
            domain(generator, shape) for domain, shape in zip(domains, self.shapes, strict=True)
        ]


ROWS = [
    # elementwise
    Row("full", lambda x: x * ag.full((2, 1), 3.0, device=x.device), [(2, 3)]),
    Row("add", ag.add, [(3, 4), (3, 4)]),
    Row("add right broadcast", ag.add, [(3, 4), (1, 4)]),
    Row("add left broadcast", ag.add, [(4,), (2, 3, 4)]),
    Row("add both broadcast", ag.add, [(3, 1), (1, 4)]),
    Row("add for each channel", ag.add, [(2, 3, 4, 5), (3, 1, 1)]),
    Row("add along a joined axis", ag.add, [(2, 3, 4, 5), (2, 1, 4, 5)]),
    Row("add scalar", lambda x: 2.0 + x + 1, [(3, 4)]),
    Row("sub", ag.sub, [(2, 3), (2, 3)]),
    Row("sub left broadcast", ag.sub, [(3,), (2, 3)]),
    Row("sub scalar", lambda x: 1.0 - (x - 2.0), [(3, 4)]),
    Row("mul", ag.mul, [(2, 1, 4, 8), (2, 1, 4, 1)]),
    Row("mul by itself", lambda x: x * x, [(3, 4)]),
    Row("div", ag.div, [(2, 3), (2, 3)], [normal, apart_from_zero]),
    Row("div both broadcast", ag.div, [(2, 1), (3,)], [normal, apart_from_zero]),
    Row("div scalar", lambda x: x / 4.0, [(2, 3)]),
    Row("div into scalar", lambda x: 2.0 / x, [(2, 3)], [apart_from_zero]),
    Row("affine", lambda x: ag.affine(x, scale=-2.0, shift=0.5), [(5,)]),
    Row("neg", lambda x: -x, [()]),
    Row("sqr", ag.sqr, [(3, 4)]),
    Row("sqrt", ag.sqrt, [(2, 3)], [positive]),
    Row("exp", ag.exp, [(2, 3, 4)]),
    Row("exp of a transpose", lambda x: ag.exp(x.T), [(2, 3)]),
    Row("log", ag.log, [(2, 3)], [positive]),
    Row("abs", ag.abs, [(2, 3)], [apart_from_zero]),
    Row("sign", ag.sign, [(2, 3)], [apart_from_zero], order=1),
    Row("sin", ag.sin, [(2, 3)]),
    Row("cos", ag.cos, [(2, 3)]),
    Row("astype", lambda x: whole(ag.astype(3.0 * x.T, "int32")) * x.T, [(3, 4)]),
    # powers
    Row("pow whole", lambda x: ag.pow(x, 3) + ag.pow(x.T, 4), [(3, 3)]),
    Row("pow negative", lambda x: ag.pow(x, -1) + ag.pow(x, -3), [(3, 4)], [apart_from_zero]),
    Row("pow large", lambda x: ag.pow(x, 7) + ag.pow(x, -6), [(3, 4)], [around_one]),
    Row("pow fraction", lambda x: ag.pow(x, 2.5) + ag.pow(x, -0.3), [(3, 4)], [positive]),
    Row("pow special", lambda x: ag.pow(x, 0) + ag.pow(x, 1) + ag.pow(x, 2), [(3, 4)]),
    Row("pow root", lambda x: ag.pow(x, 0.5), [(3, 4)], [positive]),
    Row("pow tensors", ag.pow, [(3, 4), (3, 4)], [positive, normal]),
    Row("pow both broadcast", ag.pow, [(3, 1), (2, 1, 4)], [positive, normal]),
    Row("pow of a number", lambda x: ag.pow(2.0, x.T), [(3, 4)]),
    Row(
        "pow of negative bases",
        lambda x: ag.pow(x, np.array([3.0, -2.0, 0.0, 1.0])),
        [(3, 4)],
        [apart_from_zero],
    ),
    # comparisons and choices
    Row("step", ag.step, [(3, 5)], [apart_from_zero], order=1),
    Row("greater", ag.greater, [(3, 1), (2, 1, 4)], order=1),
    Row("less", ag.less, [(3, 4), (3, 4)], order=1),
    Row("equal", lambda x: ag.equal(x, ag.relu(x)), [(3, 4)], [apart_from_zero], order=1),
    Row("equal broadcast", lambda x: ag.equal(x, 0.5), [(3, 4)], order=1),
    Row("where", lambda x, y: ag.where(ag.greater(x, y), x, y * y), [(3, 4), (3, 4)]),
    Row(
        "where broadcast",
        lambda x, y: ag.where(np.array([[True], [False], [True]]), x, y),
        [(2, 1, 4), (4,)],
    ),
    Row("where scalars", lambda x: ag.where(ag.step(x), x.T, 2.0), [(4, 4)], [apart_from_zero]),
    Row("maximum", ag.maximum, [(3, 4), (3, 4)]),
    Row("maximum both broadcast", ag.maximum, [(2, 3, 1), (1, 4)]),
    Row("maximum scalars", lambda x: ag.maximum(-0.5, ag.maximum(x, 0.5)), [(3, 4)]),
    Row("minimum", ag.minimum, [(3, 4), (3, 4)]),
    Row("minimum left broadcast", ag.minimum, [(4,), (2, 1, 3, 4)]),
    Row("minimum scalars", lambda x: ag.minimum(0.5, ag.minimum(x, -0.5)), [(3, 4)]),
    Row("clamp", lambda x: ag.clamp(x * x, min=0.3, max=1.0), [(3, 4)]),
    Row("clamp one side", lambda x: ag.clamp(ag.clamp(x, max=0.5).T, min=-0.5), [(3, 4)]),
    Row("cast", lambda x: ag.astype(x * 0.0 + 1.5, "float16") * x, [(3, 4)]),  # exact there
    Row("detach", lambda x: ag.detach(x * 0.0) + x, [(3,)]),  # elsewhere: no gradient comes through
    # activations
    Row("relu", ag.relu, [(3, 5)], [apart_from_zero]),
    Row("leaky_relu", ag.leaky_relu, [(3, 5)], [apart_from_zero]),
    Row(
        "leaky_relu folding",
        lambda x: ag.leaky_relu(x.T, negative_slope=-0.5),
        [(3, 5)],
        [apart_from_zero],
    ),
    Row("elu", ag.elu, [(3, 5)], [apart_from_zero]),
    Row("elu alpha", lambda x: ag.elu(x.T, alpha=0.5), [(3, 5)], [apart_from_zero]),
    Row("tanh", ag.tanh, [(3, 5)]),
    Row("tanh of a transpose", lambda x: ag.tanh(x.T), [(2, 3, 5)]),
    Row("sigmoid", ag.sigmoid, [(3, 5)]),
    Row("sigmoid of a transpose", lambda x: ag.sigmoid(x.T), [(3, 5)]),
    Row("silu", ag.silu, [(2, 2, 3, 5)]),
    Row("silu of a transpose", lambda x: ag.silu(x.T), [(3, 5)]),
    Row("swiglu", ag.swiglu, [(3, 5), (3, 5)]),
    Row("gelu", ag.gelu, [(3, 50)]),
    Row("gelu of a transpose", lambda x: ag.gelu(x.T), [(3, 5)]),
    Row("gelu tanh", lambda x: ag.gelu(x.T, approximate="tanh"), [(3, 50)]),
    Row("softplus", ag.softplus, [(3, 5)]),
    Row("softplus of a transpose", lambda x: ag.softplus(x.T), [(3, 5)]),
    Row("hardsigmoid", ag.hardsigmoid, [(3, 5)]),
    Row("hardswish", ag.hardswish, [(3, 5)]),
    # shape
    Row("reshape", lambda x: ag.reshape(x, (3, -1)) * 2.0, [(2, 3, 2)]),
    Row("reshape of a transpose", lambda x: ag.reshape(x.T, (6,)), [(2, 3)]),
    Row("permute", lambda x: ag.permute(x, (2, 0, 1)) * 1.0, [(2, 3, 4)]),
    Row("permute 4-D", lambda x: ag.permute(x, (0, 2, 1, 3)), [(2, 3, 4, 2)]),
    Row(
        "transpose of a transpose", lambda x: ag.transpose(ag.transpose(x, 0, 2), 0, 1), [(2, 3, 4)]
    ),
    Row("broadcast_to", lambda x: ag.broadcast_to(x, (2, 3, 4)), [(3, 1)]),
    Row("squeeze", lambda x: ag.squeeze(x) * ag.squeeze(x, axis=1), [(2, 1, 3)]),
    Row("unsqueeze", lambda x: ag.unsqueeze(x.T, axis=1), [(3, 4)]),
    Row("repeat", lambda x: ag.repeat(x, 3, axis=1), [(2, 3, 2)]),
    Row("repeat last axis", lambda x: ag.repeat(x.T, 2, axis=-1), [(2, 3, 2, 2)]),
    Row("tile", lambda x: ag.tile(x, 3, axis=0), [(2, 3)]),
    Row("tile last axis", lambda x: ag.tile(x.T, 2, axis=-1), [(2, 3, 2, 2)]),
    # parts and joins
    Row("slice", lambda x: x[1:, :2], [(3, 4)]),
    Row("slice with steps", lambda x: x[::2, 1::3, :, 1::2], [(3, 5, 2, 4)]),
    Row("slice of a transpose", lambda x: x.T[1:3, ::2], [(5, 4)]),
    Row("slice of a slice", lambda x: x[:, 1::2][1, ::2], [(2, 9, 3)]),
    Row("slice backwards", lambda x: x[::-1, 3:0:-2], [(3, 5)]),
    Row("index with new axes", lambda x: x[..., None, -1, 1:], [(2, 3, 4)]),
    Row("index by a list", lambda x: x[:, [0, 2, 2, -1], 1:], [(2, 4, 3)]),
    Row("pad", lambda x: ag.pad(x, ((0, 1), (2, 0)), value=-1.5), [(2, 3)]),
    Row("pad 4-D", lambda x: ag.pad(x.T, (1, 2)), [(2, 1, 3, 2)]),
    Row("concat", lambda x, y: ag.concat([x, y.T, x]), [(2, 3), (3, 2)]),
    Row("concat last axis", lambda x, y: ag.concat([x, y], axis=-1), [(2, 2, 3), (2, 2, 1)]),
    Row("concat of many", lambda x: ag.concat([x * n for n in range(19)], axis=1), [(2, 2, 2)]),
    Row("stack", lambda x, y: ag.stack([x, y * y], axis=1), [(2, 3, 2), (2, 3, 2)]),
    Row("split", lambda x: ag.split(x, 2)[1] * ag.split(x, (1, 2, 1))[1], [(4, 3)]),
    Row("take", ag.take, [(4, 3), (5,)], [normal, labels(4)]),
    Row(
        "take middle axis",
        lambda x, i: ag.take(x, i, axis=1),
        [(2, 4, 3), (2, 5)],
        [normal, labels(4)],
    ),
    Row(
        "take last axis", lambda x, i: ag.take(x.T, i, axis=-1), [(4, 3), (6,)], [normal, labels(4)]
    ),
    Row("embedding", ag.embedding, [(4, 3), (2, 6)], [normal, labels(4)]),
    Row("flip", lambda x: ag.flip(x, axis=(0, -1)), [(2, 3, 4)]),
    Row("one_hot", lambda i, x: ag.one_hot(i, 5) * x, [(2, 3), (5,)], [labels(5), normal]),
    # reductions
    Row("sum", ag.sum, [(3, 4)]),
    Row("sum of many", lambda x: ag.sum(ag.broadcast_to(x, (1024, 64)) * x), [(64,)]),
    Row("sum of far axes", lambda x: ag.sum(x, axis=(0, -1)), [(2, 3, 70)]),
    Row("sum first axis", lambda x: ag.sum(x, axis=0), [(3, 4)]),
    Row("sum last axis", lambda x: ag.sum(x, axis=-1, keepdims=True), [(2, 3, 4)]),
    Row("sum middle axis", lambda x: ag.sum(x, axis=1), [(2, 3, 4)]),
    Row("sum two axes", lambda x: ag.sum(x, axis=(0, 2)), [(2, 3, 4, 2)]),
    Row("mean", ag.mean, [(3, 4)]),
    Row("mean axis", lambda x: ag.mean(x, axis=(0, -1), keepdims=True), [(2, 3, 4)]),
    Row("max", ag.max, [(3, 4)]),
    Row("max of many", lambda x: ag.max(ag.broadcast_to(x, (1024, 64))), [(64,)]),
    Row("max first axis", lambda x: ag.max(x * x, axis=0), [(3, 4)]),
    Row("max last axis", lambda x: ag.max(x, axis=-1, keepdims=True), [(2, 3, 40)]),
    Row("max middle axis", lambda x: ag.max(x, axis=1), [(2, 3, 4)]),
    Row("max two axes", lambda x: ag.max(x, axis=(0, 2)), [(2, 3, 4, 2)]),
    Row("max of a transpose", lambda x: ag.max(x.T, axis=(0, 1)), [(2, 3, 4)]),
    Row("min", lambda x: ag.min(x * x, axis=(1, -1), keepdims=True), [(2, 3, 4)]),
    Row("logsumexp", ag.logsumexp, [(3, 4)]),
    Row("logsumexp first axis", lambda x: ag.logsumexp(x.T, axis=0), [(3, 4)]),
    Row(
        "logsumexp two axes",
        lambda x: ag.logsumexp(x, axis=(0, 2), keepdims=True),
        [(2, 3, 4, 2)],
    ),
    Row("argmax", lambda x: whole(ag.argmax(x)), [(3, 4)], order=1),
    Row("argmax keeping", lambda x: whole(ag.argmax(x, keepdims=True)), [(3, 4)], order=1),
    Row("argmax first axis", lambda x: whole(ag.argmax(x, axis=0)), [(3, 300)], order=1),
    Row("argmax middle axis", lambda x: whole(ag.argmax(x, axis=1)), [(2, 3, 4)], order=1),
    Row("argmax of a transpose", lambda x: whole(ag.argmax(x.T, axis=-1)), [(3, 4)], order=1),
    Row("norm", ag.norm, [(3, 4)]),
    Row("norm axis", lambda x: ag.norm(x, axis=-1, keepdims=True), [(3, 4)]),
    Row("var", ag.var, [(3, 4)]),
    Row("var axes", lambda x: ag.var(x, axis=(0, 2), keepdims=True, ddof=1), [(3, 2, 4)]),
    Row("std", lambda x: ag.std(x, axis=0), [(3, 4)]),
    Row("sum_to", lambda x: sum_to(x, (3, 1)), [(2, 3, 4)]),
    # linear algebra
    Row("matmul", ag.matmul, [(3, 4), (4, 5)]),
    Row("matmul of a row", ag.matmul, [(1, 4), (4, 1)]),
    Row("matmul of transposes", lambda a, b: ag.matmul(a.T, b.T), [(4, 3), (5, 4)]),
    Row("matmul with a transposed weight", lambda x, w: x @ w.T, [(2, 3, 4), (5, 4)]),
    Row("matmul batched", ag.matmul, [(2, 3, 4), (2, 4, 2)]),
    Row("matmul 4-D", lambda a, b: a @ ag.transpose(b, -1, -2), [(2, 2, 3, 4), (2, 2, 5, 4)]),
    Row("matmul left batch broadcast", ag.matmul, [(3, 4), (2, 4, 2)]),
    Row("matmul both batches broadcast", ag.matmul, [(2, 1, 3, 4), (3, 4, 2)]),
    Row(
        "matmul of strided operands",
        lambda a, b: ag.permute(a, (1, 0, 2)) @ ag.permute(b, (1, 2, 0)),
        [(3, 2, 4), (5, 2, 4)],
    ),
    Row("linear", ag.linear, [(5, 4), (3, 4), (3,)]),
    Row("linear without bias", ag.linear, [(3, 4), (5, 4)]),
    Row("linear of a vector", ag.linear, [(4,), (3, 4), (3,)]),
    Row("linear of 4-D", lambda x, w, b: ag.linear(x.T, w, b), [(4, 2, 3, 2), (5, 4), (5,)]),
    Row("matmul of vectors", ag.matmul, [(4,), (4,)]),
    Row("matmul vector left", ag.matmul, [(4,), (2, 4, 3)]),
    Row("matmul vector right", ag.matmul, [(2, 3, 4), (4,)]),
    Row("outer", ag.outer, [(3,), (4,)]),
    # softmax and normalisation
    Row("softmax", ag.softmax, [(3, 5)]),
    Row("softmax 4-D", ag.softmax, [(2, 2, 3, 4)]),
    Row("softmax first axis", lambda x: ag.softmax(x, axis=0), [(3, 5)]),
    Row("softmax of a transpose", lambda x: ag.softmax(x.T), [(3, 5)]),
    Row("log_softmax", ag.log_softmax, [(3, 5)]),
    Row("log_softmax middle axis", lambda x: ag.log_softmax(x, axis=1), [(2, 3, 4)]),
    Row("layer_norm", ag.layer_norm, [(2, 3, 6), (6,), (6,)]),
    Row("layer_norm two axes", ag.layer_norm, [(2, 3, 4), (3, 4)]),
    Row("layer_norm plain", lambda x: ag.layer_norm(x.T, eps=0.1), [(6, 4)]),
    Row("rms_norm", ag.rms_norm, [(2, 3, 6), (6,)]),
    Row("rms_norm plain", lambda x: ag.rms_norm(x, eps=0.1), [(4,)]),
    Row(
        "group_norm",
        lambda x, w, b: ag.group_norm(x, w, b, groups=2),
        [(2, 4, 3, 2), (4,), (4,)],
    ),
    Row("batch_norm", lambda x: ag.batch_norm(x, training=True), [(5, 3)]),
    Row(
        "batch_norm of images",
        lambda x, w, b: ag.batch_norm(x, w, b, training=True),
        [(2, 3, 2, 2), (3,), (3,)],
    ),
    Row("batch_statistics", lambda x: x * statistics_of(x, 5, 3), [(3,)]),
    Row("batch_statistics of images", lambda x: x * statistics_of(x, 3, 2, 4, 5), [(2,)]),
    Row("batch_statistics of one channel", lambda x: x * statistics_of(x, 300, 1), [(1,)]),
    Row(
        "batch_norm of strided sequences",
        lambda x: ag.batch_norm(ag.transpose(x, 1, 2), training=True, eps=0.1),
        [(2, 3, 4)],
    ),
    Row(
        "batch_norm evaluated",
        lambda x, w, b, mean, var: ag.batch_norm(x, w, b, running_mean=mean, running_var=var),
        [(2, 3, 4), (3,), (3,), (3,), (3,)],
        [normal, normal, normal, normal, positive],
    ),
    # recurrent layers; hidden 34 and batch 9 are more than the kernel's tiles hold
    Row("lstm", recurrent, [(12, 3), (12, 5), (6, 5), (12,), (2, 3), (2, 3)]),
    Row(
        "lstm from the end",
        partial(recurrent, reverse=True),
        [(12, 3), (12, 5), (6, 5), (12,), (2, 3), (2, 3)],
    ),
    Row(
        "lstm large",
        lambda w, x, b: recurrent(w / 6.0, w / 6.0, x, b, x[:9], x[9:], reverse=True),
        [(136, 34), (18, 34), (136,)],
        order=1,
    ),
    Row("gru", recurrent, [(9, 3), (9, 2), (6, 2), (12,), (2, 3)]),
    Row(
        "gru from the end",
        partial(recurrent, reverse=True),
        [(9, 3), (9, 2), (6, 2), (12,), (2, 3)],
    ),
    Row(
        "gru large",
        lambda w, x, b: recurrent(w / 6.0, w / 6.0, x, b, x[:9]),
        [(102, 34), (18, 34), (136,)],
        order=1,
    ),
    # convolution and pooling
    Row("conv2d", ag.conv2d, [(2, 3, 5, 6), (4, 3, 3, 2), (4,)]),
    Row("conv2d pointwise", ag.conv2d, [(2, 3, 2, 3), (4, 3, 1, 1)]),
    Row(
        "conv2d with all settings",
        lambda x, w, b: ag.conv2d(
            x, w, b, stride=(2, 1), padding=(1, 3), dilation=(1, 2), groups=2
        ),
        [(2, 4, 5, 6), (4, 2, 3, 2), (4,)],
    ),
    Row(
        "conv2d with strides that leave a rest",
        lambda x, w: ag.conv2d(x, w, stride=3, padding=2),
        [(1, 1, 6, 9), (2, 1, 2, 4)],
    ),
    Row(
        "conv2d depthwise",
        lambda x, w: ag.conv2d(x, w, padding=1, groups=3),
        [(2, 3, 4, 4), (6, 1, 3, 3)],
    ),
    Row("conv2d of many small images", ag.conv2d, [(20, 2, 3, 3), (3, 2, 2, 2), (3,)]),
    Row("conv2d of many channels", ag.conv2d, [(2, 130, 2, 3), (2, 130, 2, 2)]),
    Row(
        "conv2d of strided operands",
        lambda x, w: ag.conv2d(x.T, w[:, ::2, ::-1]),
        [(4, 3, 2, 2), (3, 4, 2, 2)],
    ),
    Row("conv1d", ag.conv1d, [(2, 3, 7), (4, 3, 3), (4,)]),
    Row(
        "conv1d with all settings",
        lambda x, w: ag.conv1d(x, w, stride=2, padding=2, dilation=2, groups=2),
        [(2, 4, 7), (2, 2, 3)],
    ),
    Row("conv_transpose2d", ag.conv_transpose2d, [(2, 3, 3, 4), (3, 2, 2, 3), (2,)]),
    Row(
        "conv_transpose2d with all settings",
        lambda x, w: ag.conv_transpose2d(
            x, w, stride=(2, 3), padding=(1, 2), output_padding=(1, 2), dilation=(2, 1), groups=2
        ),
        [(2, 4, 3, 2), (4, 1, 2, 3)],
    ),
    Row("max_pool2d", lambda x: ag.max_pool2d(x, 2), [(2, 2, 4, 5)]),
    Row(
        "max_pool2d with all settings",
        lambda x: ag.max_pool2d(x.T, (3, 2), stride=(2, 1), padding=1),
        [(4, 5, 2, 2)],
    ),
    Row("avg_pool2d", lambda x: ag.avg_pool2d(x, 2), [(2, 2, 4, 5)]),
    Row(
        "avg_pool2d with all settings",
        lambda x: ag.avg_pool2d(x.T, (3, 2), stride=(2, 1), padding=1),
        [(4, 5, 2, 2)],
    ),
    # attention
    Row("rope", ag.rope, [(2, 3, 2, 6)]),
    Row("rope interleaved", lambda x: ag.rope(x, interleaved=True, base=100.0), [(3, 2, 4)]),
    Row(
        "rope at positions",
        lambda x, at: ag.rope(ag.transpose(x, 1, 2), positions=at),
        [(2, 2, 3, 4), (3,)],
        [normal, labels(50)],
    ),
    Row("attention", ag.scaled_dot_product_attention, [(2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 3)]),
    Row(
        "attention causal over several blocks",
        lambda q, k, v: ag.scaled_dot_product_attention(
            *(ag.transpose(t, 1, 2) for t in (q, k, v)), causal=True
        ),
        [(2, 70, 1, 4), (2, 70, 1, 4), (2, 70, 1, 3)],
    ),
    Row(
        "attention causal",
        lambda q, k, v: ag.scaled_dot_product_attention(q, k, v, causal=True),
        [(1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4)],
    ),
    Row(
        "attention in groups with a learned mask",
        lambda q, k, v, m: ag.scaled_dot_product_attention(q, k, v, mask=m, scale=0.7),
        [(2, 4, 3, 2), (2, 2, 4, 2), (2, 2, 4, 2), (4, 1, 4)],
    ),
    Row(
        "attention of strided heads",
        lambda q, k, v: ag.scaled_dot_product_attention(
            *(ag.transpose(t, 1, 2) for t in (q, k, v)), mask=np.tri(3, 3, dtype=bool), causal=True
        ),
        [(2, 3, 2, 4), (2, 3, 1, 4), (2, 3, 1, 4)],
    ),
    # random
    Row("dropout", lambda x: ag.dropout(x, p=0.4, generator=Generator(7)), [(3, 100)]),
    Row("dropout of all", lambda x: ag.dropout(x.T, p=1.0) + x.T, [(3, 4)]),
    # losses
    Row("mse_loss", ag.mse_loss, [(3, 4), (3, 4)]),
    Row("mse_loss none", lambda a, b: ag.mse_loss(a, b, reduction="none"), [(3,), (3,)]),
    Row("l1_loss", lambda a, b: ag.l1_loss(a, a + b), [(3, 4), (3, 4)], [normal, apart_from_zero]),
    Row(
        "huber_loss",
        lambda a, b: ag.huber_loss(a, a + b, delta=0.1, reduction="sum"),
        [(3, 4), (3, 4)],
        [normal, apart_from_zero],
    ),
    Row("huber_loss inside", lambda a, b: ag.huber_loss(a, b, delta=10.0), [(3, 4), (3, 4)]),
    Row("softmax_cross_entropy", ag.softmax_cross_entropy, [(4, 5), (4,)], [normal, labels(5)]),
    Row(
        "softmax_cross_entropy smooth",
        lambda x, y: ag.softmax_cross_entropy(x, y, label_smoothing=0.1, reduction="sum"),
        [(2, 3, 5), (2, 3)],
        [normal, labels(5)],
    ),
    Row(
        "softmax_cross_entropy ignoring",
        lambda x, y: ag.softmax_cross_entropy(x.T, y, ignore_index=2, label_smoothing=0.1),
        [(3, 6), (6,)],
        [normal, labels(3)],
    ),
    Row(
        "softmax_cross_entropy of probabilities",
        lambda x, t: ag.softmax_cross_entropy(x, t, label_smoothing=0.1, reduction="none"),
        [(2, 3, 4), (2, 3, 4)],
        [normal, positive],
    ),
    Row(
        "cross_entropy",
        lambda p, y: ag.cross_entropy(p, y, ignore_index=0, label_smoothing=0.2),
        [(2, 3, 4), (2, 3)],
        [positive, labels(4)],
    ),
    Row("cross_entropy of probabilities", ag.cross_entropy, [(3, 4), (3, 4)], [positive]),
    Row(
        "nll_loss",
        lambda x, y: ag.nll_loss(ag.log_softmax(x), y),
        [(4, 5), (4,)],
        [normal, labels(5)],
    ),
    Row(
        "nll_loss ignoring",
        lambda x, y: ag.nll_loss(x * x, y, ignore_index=1, reduction="none"),
        [(4, 3), (4,)],
        [normal, labels(3)],
    ),
    Row(
        "binary_cross_entropy_with_logits",
        lambda x, t, w: ag.binary_cross_entropy_with_logits(x, t, pos_weight=w),
        [(3, 4), (3, 4), (4,)],
        [normal, positive],
    ),
    Row("kl_div", ag.kl_div, [(3, 4), (3, 4)], [normal, positive]),
    Row(
        "kl_div of logarithms",
        lambda x, t: ag.kl_div(x, t, log_target=True, reduction="batchmean"),
        [(3, 4), (3, 4)],
    ),
]
