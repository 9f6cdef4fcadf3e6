"""No user's mistake ends the process: each is a Python exception that says what was wrong.

Each is made in a process of its own, forked from one that has loaded everything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import pyggml as pg
from pyggml import ag, nn, optim

MISTAKES = {
    # name: (statement, exception, part of the message)
    "inner sizes": (
        "ag.tensor(np.ones((2, 3))) @ ag.tensor(np.ones((2, 3)))",
        "ShapeError",
        "matmul: inner sizes must agree; got (2, 3) @ (2, 3), 3 != 2; did you mean b.T?",
    ),
    "batch sizes": (
        "np.ones((2, 3, 4)) @ ag.tensor(np.ones((3, 4, 5)))",
        "ShapeError",
        "matmul: shapes must match or be 1",
    ),
    "matmul by a number": ("ag.tensor([1.0]) @ 2.0", "ShapeError", "use * to scale"),
    "shapes that do not broadcast": (
        "ag.tensor(np.ones((2, 3))) + ag.tensor(np.ones((2, 4)))",
        "ShapeError",
        "add: shapes must match or be 1 axis by axis, from the last; got (2, 3) and (2, 4), 3 != 4",
    ),
    "a multiple that ggml would repeat": (
        "ag.tensor(np.ones((2, 4))) * ag.tensor(np.ones((2, 2)))",
        "ShapeError",
        "mul: shapes must match or be 1",
    ),
    "reshape to another count": (
        "ag.tensor(np.ones((2, 3))).reshape(4)",
        "ShapeError",
        "reshape: (2, 3) has 6 elements, (4,) has 4",
    ),
    "reshape with two unknowns": (
        "ag.tensor(np.ones(4)).reshape(-1, -1)",
        "ShapeError",
        "one of them may be -1",
    ),
    "reshape with an indivisible unknown": (
        "ag.tensor(np.ones(6)).reshape(4, -1)",
        "ShapeError",
        "cannot hold",
    ),
    "reshape to nothing": (
        "ag.tensor(np.ones(6)).reshape(0, 6)",
        "ShapeError",
        "sizes must be positive",
    ),
    "reshape to a fraction": ("ag.reshape(ag.tensor(np.ones(6)), 2.5)", "TypeError", ""),
    "reshape to five dimensions": (
        "ag.tensor(np.ones(2)).reshape(1, 1, 1, 1, 2)",
        "ShapeError",
        "at most 4 dimensions",
    ),
    "five dimensions": ("ag.tensor(np.ones((1,) * 5))", "ShapeError", "at most 4 dimensions"),
    "five dimensions from a product": (
        "ag.broadcast_to(ag.tensor([1.0]), (1, 1, 1, 1, 1))",
        "ShapeError",
        "at most 4 dimensions",
    ),
    "broadcast to fewer": (
        "ag.broadcast_to(ag.tensor(np.ones((2, 3))), (3,))",
        "ShapeError",
        "cannot grow",
    ),
    "an axis that is not there": (
        "ag.sum(ag.tensor([1.0]), axis=1)",
        "ShapeError",
        "axis 1 does not exist in 1 dimensions",
    ),
    "an axis twice": (
        "ag.sum(ag.tensor([[1.0]]), axis=(0, -2))",
        "ShapeError",
        "each axis at most once",
    ),
    "an axis that is no integer": (
        "ag.sum(ag.tensor([1.0]), axis=0.5)",
        "DTypeError",
        "axis must be an integer",
    ),
    "permute with a repeated axis": (
        "ag.permute(ag.tensor([[1.0]]), (0, 0))",
        "ShapeError",
        "each of the 2 axes exactly once",
    ),
    "transpose with one axis": (
        "ag.transpose(ag.tensor([[1.0]]), 0)",
        "ShapeError",
        "give both axes or none",
    ),
    "an unknown dtype": (
        "ag.tensor([1.0], dtype='float8')",
        "DTypeError",
        "pyggml has float32, int32",
    ),
    "complex data": ("ag.tensor([1j])", "DTypeError", "needs real numbers"),
    "a clamp without bounds": (
        "ag.clamp(ag.tensor([1.0]))",
        "SettingError",
        "clamp: needs min=, max= or both; got neither",
    ),
    "a clamp upside down": (
        "ag.clamp(ag.tensor([1.0]), min=2, max=1)",
        "SettingError",
        "clamp: min must not be above max; got min=2.0, max=1.0",
    ),
    "a clamp by nan": ("ag.clamp(ag.tensor([1.0]), min=np.nan)", "SettingError", "min=nan"),
    "a condition of integers": (
        "ag.where(ag.tensor([1, 0]), 1.0, 2.0)",
        "DTypeError",
        "where: needs float32; got int32",
    ),
    "a condition that does not broadcast": (
        "ag.where(np.ones(2, bool), np.ones(3), 0.0)",
        "ShapeError",
        "where: shapes must match or be 1",
    ),
    "a power of integers": ("ag.pow(ag.tensor([1, 2]), 2)", "DTypeError", "sqr: needs float32"),
    "powers that do not broadcast": (
        "ag.pow(np.ones(2), np.ones(3))",
        "ShapeError",
        "pow: shapes must match or be 1",
    ),
    "maximum of shapes that do not broadcast": (
        "ag.maximum(np.ones((2, 3)), np.ones((3, 2)))",
        "ShapeError",
        "maximum: shapes must match or be 1",
    ),
    "an unknown form of gelu": (
        "ag.gelu(ag.tensor([1.0]), approximate='erf')",
        "SettingError",
        "gelu: approximate must be 'none' or 'tanh'; got 'erf'",
    ),
    "tanh of integers": ("ag.tanh(ag.tensor([1, 2]))", "DTypeError", "tanh: needs float32"),
    "swiglu of shapes that do not broadcast": (
        "ag.swiglu(np.ones((2, 4)), np.ones((2, 2)))",
        "ShapeError",
        "mul: shapes must match or be 1",
    ),
    "an unknown type in astype": (
        "ag.astype(ag.tensor([1.0]), 'float8')",
        "DTypeError",
        "pyggml has",
    ),
    "argmax along an axis that is not there": (
        "ag.argmax(ag.tensor([1.0]), axis=1)",
        "ShapeError",
        "argmax: axis 1 does not exist in 1 dimensions",
    ),
    "argmax along two axes": (
        "ag.argmax(ag.tensor([[1.0]]), axis=(0, 1))",
        "DTypeError",
        "argmax: axis must be an integer; got (0, 1)",
    ),
    "argmax of integers": ("ag.argmax(ag.tensor([1, 2]))", "DTypeError", "argmax: needs float32"),
    "max of integers": ("ag.max(ag.tensor([1, 2]))", "DTypeError", "max: needs float32"),
    "max along an axis twice": (
        "ag.max(ag.tensor([[1.0]]), axis=(1, -1))",
        "ShapeError",
        "max: each axis at most once",
    ),
    "logsumexp along an axis that is not there": (
        "ag.logsumexp(ag.tensor([1.0]), axis=2)",
        "ShapeError",
        "logsumexp: axis 2 does not exist",
    ),
    "the norm of integers": ("ag.norm(ag.tensor([3, 4]))", "DTypeError", "norm: needs float32"),
    "min along an axis that is not there": (
        "ag.min(ag.tensor([1.0]), axis=1)",
        "ShapeError",
        "min: axis 1 does not exist",
    ),
    "a variance of one element": (
        "ag.var(ag.tensor([1.0]), ddof=1)",
        "SettingError",
        "var: ddof must be in [0, 1), the elements; got 1",
    ),
    "integers in arithmetic": ("ag.relu(ag.tensor([1, 2]))", "DTypeError", "relu: needs float32"),
    "labels below 0": (
        "ag.softmax_cross_entropy(np.ones((2, 3)), [0, -1])",
        "IndexRangeError",
        "softmax_cross_entropy: labels must be in [0, 3); got -1",
    ),
    "labels too high": (
        "ag.softmax_cross_entropy(np.ones((2, 3)), [0, 3])",
        "IndexRangeError",
        "got 3",
    ),
    "labels far too high": (
        "ag.softmax_cross_entropy(np.ones((2, 3)), [0, 999999])",
        "IndexRangeError",
        "got 999999",
    ),
    "labels as tensor too high": (
        "ag.softmax_cross_entropy(np.ones((2, 3)), ag.tensor([0, 3]))",
        "IndexRangeError",
        "got 3",
    ),
    "labels that are fractions": (
        "ag.softmax_cross_entropy(np.ones((2, 3)), [0.0, 1.0])",
        "DTypeError",
        "must be integers",
    ),
    "labels of another shape": (
        "ag.softmax_cross_entropy(np.ones((2, 3)), [0, 1, 2])",
        "ShapeError",
        "need labels of shape (2,)",
    ),
    "logits without classes": (
        "ag.softmax_cross_entropy(1.0, [0])",
        "ShapeError",
        "need a class axis",
    ),
    "an unknown reduction": (
        "ag.mse_loss([1.0], [1.0], reduction='avg')",
        "SettingError",
        "must be 'mean', 'sum' or 'none'",
    ),
    "smoothing above 1": (
        "ag.softmax_cross_entropy(np.ones((2, 3)), [0, 1], label_smoothing=2)",
        "SettingError",
        "label_smoothing must be in [0, 1]",
    ),
    "losses of two shapes": (
        "ag.mse_loss(np.ones((2, 1)), np.ones(2))",
        "ShapeError",
        "must have one shape",
    ),
    "losses of two shapes in another loss": (
        "ag.kl_div(np.ones((2, 1)), np.ones(2))",
        "ShapeError",
        "kl_div: prediction and target must have one shape; got (2, 1) and (2,)",
    ),
    "a delta of zero": (
        "ag.huber_loss([1.0], [2.0], delta=0)",
        "SettingError",
        "huber_loss: delta must be positive; got 0",
    ),
    "probabilities with an ignored index": (
        "ag.softmax_cross_entropy(np.ones((2, 3)), np.ones((2, 3)), ignore_index=0)",
        "SettingError",
        "ignore_index is for integer labels",
    ),
    "a label that is not the ignored one": (
        "ag.nll_loss(np.ones((2, 3)), [-100, -1], ignore_index=-100)",
        "IndexRangeError",
        "nll_loss: labels must be in [0, 3); got -1",
    ),
    "a weight that grows the logits": (
        "ag.binary_cross_entropy_with_logits(np.ones(3), np.ones(3), pos_weight=np.ones((2, 1)))",
        "ShapeError",
        "pos_weight must broadcast to (3,); got (2, 1)",
    ),
    "softmax of a number": (
        "ag.softmax(1.0)",
        "ShapeError",
        "softmax: axis -1 does not exist in 0 dimensions",
    ),
    "softmax of integers": (
        "ag.softmax(ag.tensor([1, 2]))",
        "DTypeError",
        "softmax: needs float32",
    ),
    "a weight that does not fit a norm": (
        "ag.layer_norm(np.ones((2, 3)), np.ones(2))",
        "ShapeError",
        "layer_norm: x (2, 3) must end in the axes to normalise, (2,)",
    ),
    "a bias that does not fit a norm": (
        "ag.layer_norm(np.ones((2, 3)), np.ones(3), np.ones((2, 3)))",
        "ShapeError",
        "layer_norm: bias must have shape (3,); got (2, 3)",
    ),
    "a norm of a number": ("ag.rms_norm(1.0)", "ShapeError", "rms_norm: x () must end in"),
    "a negative epsilon": (
        "ag.rms_norm([1.0], eps=-1e-5)",
        "SettingError",
        "rms_norm: eps must be in [0.0, inf); got -1e-05",
    ),
    "groups that do not divide the channels": (
        "ag.group_norm(np.ones((2, 6)), groups=4)",
        "ShapeError",
        "group_norm: groups must divide the channels; got 4, 6",
    ),
    "no groups": (
        "ag.group_norm(np.ones((2, 6)), groups=0)",
        "SettingError",
        "groups must be a positive integer",
    ),
    "batch norm without a batch": (
        "ag.batch_norm([1.0, 2.0], training=True)",
        "ShapeError",
        "batch_norm: needs (batch, channels, ...); got shape (2,)",
    ),
    "training a batch norm on one value": (
        "ag.batch_norm([[1.0, 2.0]], training=True)",
        "ShapeError",
        "batch_norm: training needs more than one value per channel; got (1, 2)",
    ),
    "batch norm evaluated without statistics": (
        "ag.batch_norm([[1.0, 2.0]])",
        "SettingError",
        "outside of training, give running_mean= and running_var=",
    ),
    "statistics of other channels": (
        "ag.batch_norm(np.ones((2, 3)), running_mean=np.ones(2), running_var=np.ones(3))",
        "ShapeError",
        "batch_norm: running_mean must have shape (3,); got (2,)",
    ),
    "a probability above 1": (
        "ag.dropout([1.0], p=1.5)",
        "SettingError",
        "dropout: p must be in [0, 1]; got 1.5",
    ),
    "a probability below 0": ("ag.dropout([1.0], p=-0.1)", "ValueError", "p must be in [0, 1]"),
    "a probability that is not a number": (
        "ag.dropout([1.0], p=float('nan'))",
        "SettingError",
        "p must be in [0, 1]; got nan",
    ),
    "random numbers of five dimensions": (
        "ag.randn((1, 1, 1, 1, 2))",
        "ShapeError",
        "randn: at most 4 dimensions",
    ),
    "rope of an odd width": (
        "ag.rope(np.ones((2, 3, 4, 5)))",
        "ShapeError",
        "rope: needs (batch, tokens, heads, width) with an even width; got (2, 3, 4, 5)",
    ),
    "positions of other tokens": (
        "ag.rope(np.ones((2, 3, 4, 6)), positions=[0, 1])",
        "ShapeError",
        "rope: x (2, 3, 4, 6) needs positions of shape (3,); got (2,)",
    ),
    "positions that are fractions": (
        "ag.rope(np.ones((1, 2, 6)), positions=[0.5])",
        "DTypeError",
        "rope: positions must be integers",
    ),
    "a base below 1": ("ag.rope(np.ones((1, 2, 6)), base=0.5)", "SettingError", "base must be in"),
    "keys of another width": (
        "q = np.ones((1, 2, 3, 4)); ag.scaled_dot_product_attention(q, q[..., :3], q)",
        "ShapeError",
        "scaled_dot_product_attention: needs queries (B, H, T, D), keys (B, G, S, D)",
    ),
    "heads that do not share keys evenly": (
        "q = np.ones((1, 3, 3, 4)); k = q[:, :2]; ag.scaled_dot_product_attention(q, k, k)",
        "ShapeError",
        "H a multiple of G; got (1, 3, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)",
    ),
    "attention in two dimensions": (
        "q = np.ones((3, 4)); ag.scaled_dot_product_attention(q, q, q)",
        "ShapeError",
        "got (3, 4), (3, 4), (3, 4)",
    ),
    "a mask of another shape": (
        "q = np.ones((1, 2, 3, 4)); ag.scaled_dot_product_attention(q, q, q, mask=np.ones((3, 2)))",
        "ShapeError",
        "scaled_dot_product_attention: the mask must broadcast to (1, 2, 3, 3); got (3, 2)",
    ),
    "a mask with more axes of its own": (
        "q = np.ones((1, 2, 3, 4)); "
        "ag.scaled_dot_product_attention(q, q, q, mask=np.ones((2, 1, 3, 3)))",
        "ShapeError",
        "scaled_dot_product_attention: the mask must broadcast to (1, 2, 3, 3); got (2, 1, 3, 3)",
    ),
    "a mask of integers": (
        "q = np.ones((1, 2, 3, 4)); ag.scaled_dot_product_attention(q, q, q, mask=[[0, 1, 1]])",
        "DTypeError",
        "the mask must be boolean, True for what may be seen, or floats",
    ),
    "more causal queries than keys": (
        "q = np.ones((1, 2, 3, 4)); k = q[:, :, :2]; "
        "ag.scaled_dot_product_attention(q, k, k, causal=True)",
        "ShapeError",
        "causal needs at least as many keys as queries; got 3 queries, 2 keys",
    ),
    "a scale of zero": (
        "q = np.ones((1, 2, 3, 4)); ag.scaled_dot_product_attention(q, q, q, scale=0.0)",
        "SettingError",
        "scale must be positive; got 0.0",
    ),
    "an outer product of a matrix": (
        "ag.outer(np.ones((2, 2)), [1.0])",
        "ShapeError",
        "outer: needs two vectors; got (2, 2) and (1,)",
    ),
    "a fifth axis": (
        "ag.unsqueeze(ag.tensor(np.ones((1, 1, 1, 1))), axis=0)",
        "ShapeError",
        "unsqueeze: at most 4 dimensions",
    ),
    "an index out of range": (
        "ag.tensor([1.0, 2.0])[2]",
        "IndexRangeError",
        "index: 2 is out of range for axis 0 of size 2",
    ),
    "an empty slice": ("ag.param([1.0, 2.0])[2:]", "ShapeError", "2: leaves nothing of axis 0"),
    "negative padding": ("ag.pad(ag.tensor([1.0]), -1)", "ShapeError", "must not be negative"),
    "concat of other sizes": (
        "ag.concat([np.ones((2, 3)), np.ones((2, 4))])",
        "ShapeError",
        "concat: shapes must be equal except along axis 0; got (2, 3) and (2, 4)",
    ),
    "concat of two types": (
        "ag.concat([ag.tensor([1.0]), ag.tensor([1])])",
        "DTypeError",
        "concat: dtypes must be equal; got float32 and int32",
    ),
    "an embedding of no such row": (
        "ag.embedding(ag.param(np.ones((4, 2))), [0, 999999])",
        "IndexRangeError",
        "embedding: indices must be in [0, 4); got 999999",
    ),
    "a kernel larger than the image": (
        "ag.conv2d(np.ones((1, 1, 3, 3)), np.ones((1, 1, 3, 5)))",
        "ShapeError",
        "conv2d: the kernel must fit into the padded input; it covers (3, 5) of (3, 3)",
    ),
    "a dilated kernel larger than the sequence": (
        "ag.conv1d(np.ones((1, 1, 4)), np.ones((1, 1, 3)), dilation=2)",
        "ShapeError",
        "conv1d: the kernel must fit into the padded input; it covers (5,) of (4,)",
    ),
    "channels that do not fit the kernel": (
        "ag.conv2d(np.ones((1, 3, 3, 3)), np.ones((4, 2, 3, 3)), groups=2)",
        "ShapeError",
        "with groups=2 needs 4 channels",
    ),
    "outputs that groups do not divide": (
        "ag.conv2d(np.ones((1, 4, 3, 3)), np.ones((3, 2, 3, 3)), groups=2)",
        "ShapeError",
        "a multiple of 2 as its first size",
    ),
    "a bias of another size": (
        "ag.conv2d(np.ones((1, 1, 3, 3)), np.ones((2, 1, 3, 3)), np.ones(1))",
        "ShapeError",
        "conv2d: bias must have shape (2,); got (1,)",
    ),
    "a stride of zero": (
        "ag.conv2d(np.ones((1, 1, 3, 3)), np.ones((1, 1, 3, 3)), stride=(1, 0))",
        "SettingError",
        "conv2d: stride must be at least 1",
    ),
    "a transposed convolution that leaves nothing": (
        "ag.conv_transpose2d(np.ones((1, 1, 1, 1)), np.ones((1, 1, 3, 3)), padding=2)",
        "ShapeError",
        "leaves nothing of the result",
    ),
    "a window larger than the image": (
        "ag.max_pool2d(np.ones((1, 1, 3, 3)), 4)",
        "ShapeError",
        "max_pool2d: the kernel must fit",
    ),
    "padding beyond half a window": (
        "ag.avg_pool2d(np.ones((1, 1, 3, 3)), 2, padding=2)",
        "SettingError",
        "padding must be at most half of the kernel",
    ),
    "backward of a constant": (
        "ag.backward(ag.tensor(1.0))",
        "GradError",
        "does not depend on a parameter on a tape",
    ),
    "backward of a number": (
        "ag.backward(1.0)",
        "DTypeError",
        "backward: needs a Tensor; got 1.0",
    ),
    "a tensor made by hand": ("ag.Tensor()", "TypeError", "make one with ag.tensor"),
    "a layer without inputs": (
        "nn.Linear(0, 3)",
        "SettingError",
        "Linear: in_features must be a positive integer",
    ),
    "input that does not fit a layer": (
        "nn.Linear(3, 2)(ag.tensor(np.ones((5, 4))))",
        "ShapeError",
        "Linear(in_features=3, out_features=2): needs (..., 3); got (5, 4)",
    ),
    "weights of another model": (
        "nn.Linear(3, 2).load_state_dict({'weight': np.ones((2, 4)), 'scale': 1.0})",
        "ShapeError",
        "load_state_dict: missing bias; unexpected scale; weight has shape (2, 4), not (2, 3)",
    ),
    "a shape without elements": (
        "ag.full((0, 3), 1.0)",
        "ShapeError",
        "full: sizes must be positive, and below 2^63; got (0, 3)",
    ),
    "a negative size": ("ag.full((-1,), 1.0)", "ShapeError", "sizes must be positive"),
    "a size that is a fraction": ("ag.full((2.7,), 1.0)", "DTypeError", "sizes must be integers"),
    "more bytes than 64 bits count": (
        "ag.sum(ag.broadcast_to(ag.tensor([1.0]), (2**16,) * 4))",
        "MemoryError",
        "broadcast_to: shape (65536, 65536, 65536, 65536) would take",
    ),
    "an axis longer than 31 bits": ("ag.full((2**31,), 1.0)", "ShapeError", "an axis may have"),
    "a huge transposed convolution": (
        "ag.conv_transpose2d(np.ones((1,1,3,3)), np.ones((1,1,2,2)), stride=2**31 - 1)",
        "MemoryError",
        "conv2d_input: shape (1, 1, 4294967296, 4294967296) would take",
    ),
    "a huge padding": (
        "ag.conv2d(np.ones((1,1,3,3)), np.ones((1,1,2,2)), padding=2**31 - 1)",
        "PyggmlError",
        "conv2d",
    ),
    "a tensor as a number": (
        "ag.affine([1.0], scale=ag.param(2.0))",
        "DTypeError",
        "scale must be",
    ),
    "a list of tensors as data": ("ag.tensor([ag.tensor(1.0)])", "DTypeError", "use ag.stack"),
    "pickling a tensor": (
        "import pickle; pickle.dumps(ag.tensor(1.0))",
        "TypeError",
        "save it with pg.io.save_weights",
    ),
    "a gradient of another shape": (
        "w = ag.param([1.0, 2.0]); w.grad = ag.tensor([1.0]); optim.SGD([w], lr=1.0).step()",
        "ShapeError",
        "the gradient of a (2,) parameter must have its shape; got (1,)",
    ),
    "an array as a gradient": (
        "w = ag.param([1.0]); w.grad = np.ones(1); optim.SGD([w], lr=1.0).step()",
        "DTypeError",
        "a gradient must be a Tensor; got ndarray",
    ),
    "gradients of other parameters": (
        "optim.SGD([ag.param(1.0)]).step({ag.param(1.0): ag.tensor(1.0)})",
        "GradError",
        "needs gradients of its parameters",
    ),
    "a budget for an inner tape": (
        "ag.grad_tape().__enter__(); ag.grad_tape(memory_budget=1).__enter__()",
        "SettingError",
        "belongs to the outermost tape",
    ),
    "the gradient in data": (
        "x = ag.tensor([1.0]); ag.grad(ag.sum(ag.param([1.0]) * x), x)",
        "GradError",
        "was not recorded for gradients",
    ),
    "an unknown device": (
        "pg.set_device('cuda')",
        "DeviceError",
        "this process has cpu, reference",
    ),
    # arguments of another kind
    "None as a number": (
        "ag.affine([1.0], scale=None)",
        "DTypeError",
        "affine: scale must be a Python number; got NoneType",
    ),
    "a number beyond floats": (
        "optim.SGD([ag.param(1.0)], 10**400)",
        "SettingError",
        "SGD: lr must be in [0.0, inf); got int",
    ),
    "a text for a list of tensors": (
        "ag.concat('ab')",
        "DTypeError",
        "concat: tensors must be a list of tensors; got 'ab'",
    ),
    "a number for a shape of several": (
        "ag.rand('ab')",
        "DTypeError",
        "rand: sizes must be integers; got 'ab'",
    ),
    "no parameters": (
        "optim.SGD(None)",
        "DTypeError",
        "SGD: params must be a list of parameters; got None",
    ),
    "a module for its parameters": (
        "optim.SGD(nn.Linear(2, 1))",
        "SettingError",
        "SGD: needs parameters; got a module; write model.parameters()",
    ),
    "a tensor that is no parameter": (
        "optim.SGD([ag.tensor([1.0])])",
        "SettingError",
        "SGD: needs parameters made with ag.param; got a tensor of shape (1,)",
    ),
    "no betas": (
        "optim.Adam([ag.param(1.0)], betas=None)",
        "DTypeError",
        "Adam: betas must be a list of two numbers; got None",
    ),
    "three betas": (
        "optim.Adam([ag.param(1.0)], betas=(0.9, 0.9, 0.9))",
        "SettingError",
        "Adam: betas must be two numbers; got (0.9, 0.9, 0.9)",
    ),
    "an array of parameters to clip": (
        "optim.clip_grad_norm(np.ones(3), 1.0)",
        "DTypeError",
        "clip_grad_norm: needs parameters and tensors as .grad; got",
    ),
    "gradients that are no dict": (
        "optim.SGD([ag.param(1.0)]).step(1.5)",
        "DTypeError",
        "SGD: grads must be a dict; got 1.5",
    ),
    "an optimizer without a method": (
        "w = ag.param(1.0); w.grad = ag.tensor(1.0); optim.Optimizer([w], 0.1).step()",
        "NotImplementedError",
        "Optimizer: define update_single",
    ),
    "fit without an optimizer": (
        "pg.train.fit(nn.ReLU(), [1], loss=ag.mse_loss, optimizer=None, epochs=1)",
        "DTypeError",
        "fit: optimizer must be a pg.optim.Optimizer; got None",
    ),
    "a loss that is no tensor": (
        "w = ag.param([1.0]); pg.train.fit(lambda x: x * w, [(np.ones(1), np.ones(1))], "
        "loss=lambda *a: 1.0, optimizer=optim.SGD([w]), epochs=1, progress=False)",
        "DTypeError",
        "fit: loss must return a tensor; got 1.0",
    ),
    "no model": (
        "pg.train.predict(None, [np.ones(2)])",
        "DTypeError",
        "predict: model must be a function; got None",
    ),
    "a prefetch below 0": (
        "pg.data.DataLoader(np.ones(3), prefetch=-1)",
        "SettingError",
        "DataLoader: prefetch must be an integer of at least 0, at most 1024; got -1",
    ),
    "samples of two structures": (
        "pg.data.stack([(1.0, 2), (3.0,)])",
        "ShapeError",
        "samples and batches must have one structure; got (1.0, 2) and (3.0,)",
    ),
    "a state of another kind": (
        "pg.train.LearningRateLogger().load_state_dict({})",
        "SettingError",
        "LearningRateLogger: the state is of another kind: it has no rates",
    ),
    "a path that is none": (
        "pg.io.read_weights(7)",
        "DTypeError",
        "read_weights: needs the path of a file; got 7",
    ),
    "a generator of NumPy's": (
        "ag.rand(3, generator=np.random.default_rng(0))",
        "DTypeError",
        "rand: generator must be a pg.Generator; got Generator(PCG64)",
    ),
    "requires_grad as a text": (
        "ag.tensor([1.0], requires_grad='no')",
        "SettingError",
        "tensor: requires_grad must be True or False; got 'no'",
    ),
    "requires_grad set to a text": (
        "ag.param([1.0]).requires_grad = 'no'",
        "SettingError",
        "requires_grad: must be True or False; got 'no'",
    ),
    "a masked array": (
        "ag.tensor(np.ma.masked_array([1.0, 2.0], [True, False]))",
        "DTypeError",
        "tensor: a masked array would lose its mask; use .filled(value) first",
    ),
    "NumPy's sum": ("np.sum(ag.param([1.0]))", "DTypeError", "np.sum: takes arrays; use the"),
    "a format of several numbers": (
        "f'{ag.tensor([1.0, 2.0]):.2f}'",
        "SettingError",
        "got a tensor of shape (2,)",
    ),
    # sizes and numbers that nothing can hold
    "random numbers without end": (
        "ag.rand((2**20, 2**20, 2**20))",
        "MemoryError",
        "rand: shape (1048576, 1048576, 1048576) would take",
    ),
    "a layer without end": (
        "nn.Linear(2**40, 2**40)",
        "MemoryError",
        "uniform: shape (1099511627776, 1099511627776) would take",
    ),
    "a schedule without end": (
        "optim.step_decay(1.0, every=1, factor=2.0)(10**6)",
        "SettingError",
        "step_decay: lr 1.0 times factor 2.0, 1000000 times, is no number any more",
    ),
    "threads without end": (
        "pg.set_num_threads(10**6)",
        "SettingError",
        "set_num_threads: n_threads must be a positive integer, at most",
    ),
    "a momentum above 1": (
        "nn.BatchNorm1d(3, momentum=1.5)",
        "SettingError",
        "BatchNorm1d: momentum must be in [0, 1]; got 1.5",
    ),
    # gradients
    "a difference of size 0": (
        "ag.gradcheck(ag.sqr, [[1.0]], epsilon=0)",
        "SettingError",
        "gradcheck: epsilon must be in [1e-12, inf); got 0",
    ),
    "an infinite gradient": (
        "ag.gradcheck(ag.sqrt, [[1.0, 0.0]])",
        "GradCheckError",
        "inf at index (1,), where no differences can check it",
    ),
    "a function that draws anew": (
        "ag.gradcheck(lambda x: ag.dropout(x, p=0.5), [np.ones(64)])",
        "GradCheckError",
        "gradcheck: fn gives other values each time",
    ),
    "requires_grad changed before the step": (
        """
        w = ag.param([1.0])
        with ag.grad_tape():
            loss = ag.sum(w * w)
        ag.backward(loss)
        w.requires_grad = False
        optim.SGD([w]).step()
        """,
        "StaleError",
        "the requires_grad of a (1,) parameter has changed since it was recorded here",
    ),
}


def attempt(statement: str) -> tuple[list[str], str]:
    """Make a mistake; return the kinds of the exception that came, and its message."""
    try:
        exec(textwrap.dedent(statement), {"np": np, "pg": pg, "ag": ag, "nn": nn, "optim": optim})
    except Exception as error:
        assert (ag.tensor([1.0]) * 2.0).tolist() == [2.0]  # the library is usable afterwards
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    return [], "no exception came"


def main() -> None:
    """Make all mistakes, each in a fork; print a line of JSON for each that ended as it should."""
    for name, (statement, _, _) in MISTAKES.items():
        child = os.fork()
        if child == 0:
            print(json.dumps([name, *attempt(statement)]), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


@pytest.fixture(scope="module")
def ends() -> dict[str, tuple[list[str], str]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", __file__],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    lines = map(json.loads, done.stdout.splitlines())
    return {name: (kinds, message) for name, kinds, message in lines}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_exception_on_its_line_and_not_the_end_of_the_process(name, ends):
    _, exception, message = MISTAKES[name]
    assert name in ends, "the process ended"
    kinds, text = ends[name]
    assert exception in kinds, text
    assert message in text


if __name__ == "__main__":
    main()
