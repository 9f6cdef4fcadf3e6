"""Every layer against the values that PyTorch's layer of the same name computes.

These are outputs, gradients in inputs and parameters, and buffers. Then the errors of settings and
inputs that do not fit.
"""

from __future__ import annotations

import numpy as np
import pytest
from torch_values import load

import pyggml as pg
from pyggml import ag, nn

VALUES = load("layers")
DEVICES = ["cpu", "reference"]

SEEN = np.array([[True, True, True, False, False], [True] * 5])[:, None, None, :]


# The layer of each case in torch_values/make_layers.py, and how it is called if not plainly.
CASES = {
    "Linear": lambda: nn.Linear(4, 3),
    "Linear no bias": lambda: nn.Linear(4, 3, bias=False),
    "Embedding": lambda: nn.Embedding(5, 3),
    "Embedding padding": lambda: nn.Embedding(5, 3, padding_idx=1),
    "Flatten": lambda: nn.Flatten(),
    "ReLU": lambda: nn.ReLU(),
    "LeakyReLU": lambda: nn.LeakyReLU(0.2),
    "ELU": lambda: nn.ELU(1.5),
    "GELU": lambda: nn.GELU(),
    "GELU tanh": lambda: nn.GELU(approximate="tanh"),
    "SiLU": lambda: nn.SiLU(),
    "Sigmoid": lambda: nn.Sigmoid(),
    "Tanh": lambda: nn.Tanh(),
    "Softplus": lambda: nn.Softplus(),
    "Hardswish": lambda: nn.Hardswish(),
    "Hardsigmoid": lambda: nn.Hardsigmoid(),
    "Softmax": lambda: nn.Softmax(axis=1),
    "BatchNorm1d": lambda: nn.BatchNorm1d(3),
    "BatchNorm1d length": lambda: nn.BatchNorm1d(3, momentum=0.3),
    "BatchNorm1d cumulative": lambda: nn.BatchNorm1d(3, momentum=None),
    "BatchNorm1d plain": lambda: nn.BatchNorm1d(3, affine=False, track_running_stats=False),
    "BatchNorm2d": lambda: nn.BatchNorm2d(3, eps=1e-3),
    "BatchNorm2d eval": lambda: nn.BatchNorm2d(3).eval(),
    "LayerNorm": lambda: nn.LayerNorm(6),
    "LayerNorm two axes": lambda: nn.LayerNorm((3, 4)),
    "LayerNorm no bias": lambda: nn.LayerNorm(6, bias=False),
    "LayerNorm plain": lambda: nn.LayerNorm((3, 4), elementwise_affine=False),
    "RMSNorm": lambda: nn.RMSNorm(6, eps=1e-5),
    "RMSNorm plain": lambda: nn.RMSNorm((3, 4), eps=1e-5, elementwise_affine=False),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "GroupNorm plain": lambda: nn.GroupNorm(2, 4, affine=False),
    "Conv1d": lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1),
    "Conv1d dilated": lambda: nn.Conv1d(2, 3, 2, dilation=2, bias=False),
    "Conv2d": lambda: nn.Conv2d(3, 4, 3),
    "Conv2d settings": lambda: nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0)),
    "Conv2d grouped": lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2),
    "Conv2d depthwise": lambda: nn.Conv2d(3, 3, 3, padding=1, groups=3),
    "Conv2d dilated": lambda: nn.Conv2d(2, 3, 2, dilation=2, bias=False),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(3, 2, 3),
    "ConvTranspose2d settings": lambda: nn.ConvTranspose2d(
        3, 2, 3, stride=2, padding=1, output_padding=1
    ),
    "MaxPool2d": lambda: nn.MaxPool2d(2),
    "MaxPool2d settings": lambda: nn.MaxPool2d(3, stride=2, padding=1),
    "AvgPool2d": lambda: nn.AvgPool2d(2),
    "AvgPool2d settings": lambda: nn.AvgPool2d(3, stride=2, padding=1),
    "AdaptiveAvgPool2d one": lambda: nn.AdaptiveAvgPool2d(1),
    "AdaptiveAvgPool2d": lambda: nn.AdaptiveAvgPool2d((2, 3)),
    "AdaptiveAvgPool1d": lambda: nn.AdaptiveAvgPool1d(2),
    "MultiheadAttention": lambda: nn.MultiheadAttention(6, 2),
    "MultiheadAttention cross": lambda: nn.MultiheadAttention(6, 3),
    "MultiheadAttention sizes": lambda: nn.MultiheadAttention(6, 2, bias=False, kdim=4, vdim=5),
    "MultiheadAttention causal": lambda: nn.MultiheadAttention(6, 2),
    "MultiheadAttention mask": lambda: nn.MultiheadAttention(6, 2),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0),
    "TransformerEncoderLayer norm first": lambda: nn.TransformerEncoderLayer(
        6, 2, 8, norm_first=True, activation="gelu", dropout=0.0
    ),
    "TransformerDecoderLayer": lambda: nn.TransformerDecoderLayer(6, 2, 8, dropout=0.0),
    "TransformerDecoderLayer norm first": lambda: nn.TransformerDecoderLayer(
        6, 2, 8, norm_first=True, dropout=0.0
    ),
    "LSTM": lambda: nn.LSTM(3, 4),
    "LSTM time first": lambda: nn.LSTM(3, 4, bias=False, batch_first=False),
    "LSTM deep": lambda: nn.LSTM(3, 2, num_layers=2, bidirectional=True),
    "GRU": lambda: nn.GRU(3, 4),
    "GRU time first": lambda: nn.GRU(3, 4, bias=False, batch_first=False),
    "GRU deep": lambda: nn.GRU(3, 2, num_layers=2, bidirectional=True),
}


def causally(layer, *inputs):
    return layer(*inputs, causal=True)


CALLS = {
    "MultiheadAttention causal": causally,
    "MultiheadAttention mask": lambda layer, x: layer(x, mask=SEEN),
    "TransformerEncoderLayer norm first": causally,
    "TransformerDecoderLayer": causally,
    "LSTM deep": lambda layer, x, h, c: layer(x, (h, c)),
}
LOOSE = {"Hardsigmoid": 1e-7}  # PyTorch's own rule has 1/6 in single precision


def values_of(case, part):
    """Return the arrays of one part of a case by the rest of their names."""
    start = f"{case}/{part}/"
    return {key[len(start) :]: value for key, value in VALUES.items() if key.startswith(start)}


def flat(value):
    return [value] if isinstance(value, ag.Tensor) else [t for item in value for t in flat(item)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_layer_computes_what_pytorch_computes(case, device):
    with pg.device(device):
        layer = CASES[case]()
        layer.load_state_dict(values_of(case, "before"))
        inputs = [ag.tensor(x, requires_grad=x.dtype.kind == "f")
                  for x in values_of(case, "input").values()]  # fmt: skip
        upstream = values_of(case, "upstream").values()
        with ag.grad_tape():
            outputs = flat(CALLS.get(case, lambda layer, *x: layer(*x))(layer, *inputs))
            loss = sum(ag.sum(o * ag.tensor(u)) for o, u in zip(outputs, upstream, strict=True))
        ag.backward(loss)
    found = {f"output/{i}": output for i, output in enumerate(outputs)}
    found |= {f"input_grad/{i}": x.grad for i, x in enumerate(inputs) if x.requires_grad}
    found |= {f"grad/{name}": p.grad for name, p in layer.named_parameters()}
    found |= {f"after/{name}": b for name, b in layer.named_buffers()}
    given = ("before", "input", "upstream")
    expected = {
        key.removeprefix(f"{case}/"): value
        for key, value in VALUES.items()
        if key.startswith(f"{case}/") and key.split("/")[1] not in given
    }
    assert found.keys() == expected.keys()
    tolerance = LOOSE.get(case, 1e-9) if device == "reference" else 2e-5
    for key, value in expected.items():
        np.testing.assert_allclose(
            found[key].numpy(), value, rtol=tolerance, atol=tolerance, err_msg=key
        )


def test_every_case_of_the_stored_values_is_tested():
    assert set(CASES) == {key.split("/")[0] for key in VALUES}


# ---- settings and inputs that do not fit ---------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(0, 3), "Linear: in_features must be a positive integer; got 0"),
        (lambda: nn.Linear(3, 2.5), "Linear: out_features must be a positive integer; got 2.5"),
        (lambda: nn.Embedding(4, 0), "Embedding: embedding_dim must be a positive integer"),
        (lambda: nn.Embedding(4, 2, padding_idx=4), r"padding_idx must be in \[0, 4\); got 4"),
        (lambda: nn.Dropout(1.5), r"Dropout: p must be in \[0, 1\]; got 1.5"),
        (lambda: nn.Dropout(-0.1), r"Dropout: p must be in \[0, 1\]; got -0.1"),
        (lambda: nn.Dropout(float("nan")), r"Dropout: p must be in \[0, 1\]; got nan"),
        (lambda: nn.Flatten(1.0), "Flatten: start_axis must be an integer; got 1.0"),
        (lambda: nn.Softmax(axis="last"), "Softmax: axis must be an integer; got 'last'"),
        (lambda: nn.GELU(approximate="erf"), "GELU: approximate must be 'none' or 'tanh'"),
        (lambda: nn.BatchNorm1d(0), "BatchNorm1d: num_features must be a positive integer"),
        (lambda: nn.BatchNorm2d(3, momentum=1.5), "BatchNorm2d: momentum must be in"),
        (lambda: nn.BatchNorm2d(3, eps=-1.0), "BatchNorm2d: eps must be in"),
        (lambda: nn.LayerNorm(()), "LayerNorm: normalized_shape must name at least one axis"),
        (lambda: nn.LayerNorm((3, 0)), "LayerNorm: normalized_shape must be a positive integer"),
        (lambda: nn.RMSNorm(3, eps=-1.0), "RMSNorm: eps must be in"),
        (lambda: nn.GroupNorm(3, 4), "GroupNorm: num_groups must divide num_channels; got 3, 4"),
        (lambda: nn.Conv2d(3, 4, 0), "Conv2d: kernel_size must be a positive integer; got 0"),
        (lambda: nn.Conv2d(3, 4, (3, 3, 3)), r"Conv2d: kernel_size must be a number or 2 of them"),
        (
            lambda: nn.Conv1d(3, 4, 3, padding=-1),
            "Conv1d: padding must be an integer of at least 0",
        ),
        (lambda: nn.Conv2d(3, 4, 3, groups=2), "Conv2d: groups must divide in_channels and out_"),
        (
            lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=2),
            "ConvTranspose2d: output_padding must be less than stride; got 2, 2",
        ),
        (lambda: nn.MaxPool2d(2, padding=2), "MaxPool2d: padding must be at most half of kernel"),
        (lambda: nn.AvgPool2d(2, stride=0), "AvgPool2d: stride must be a positive integer; got 0"),
        (lambda: nn.AdaptiveAvgPool2d(0), "AdaptiveAvgPool2d: output_size must be a positive"),
        (
            lambda: nn.MultiheadAttention(6, 4),
            "MultiheadAttention: num_heads must divide embed_dim; got 4, 6",
        ),
        (
            lambda: nn.MultiheadAttention(8, 4, num_kv_heads=3),
            "MultiheadAttention: num_kv_heads must divide num_heads; got 3, 4",
        ),
        (lambda: nn.MultiheadAttention(8, 4, dropout=2), "dropout must be in"),
        (
            lambda: nn.TransformerEncoderLayer(8, 2, activation="swish"),
            "TransformerEncoderLayer: activation must be 'relu', 'gelu' or a function",
        ),
        (lambda: nn.TransformerDecoderLayer(8, 3), "num_heads must divide embed_dim; got 3, 8"),
        (lambda: nn.LSTM(3, 0), "LSTM: hidden_size must be a positive integer; got 0"),
        (
            lambda: nn.GRU(3, 4, num_layers=0),
            "GRU: num_layers must be a positive integer, at most 1000; got 0",
        ),
        (lambda: nn.GRU(3, 4, dropout=1.1), "GRU: dropout must be in"),
        (
            lambda: nn.Sequential(nn.ReLU(), checkpoint_every=0),
            "Sequential: checkpoint_every must be a positive integer; got 0",
        ),
    ],
)
def test_a_setting_out_of_range_is_refused(make, message):
    with pytest.raises(pg.SettingError, match=message):
        make()


@pytest.mark.parametrize(
    ("layer", "shapes", "message"),
    [
        (
            nn.Linear(3, 2),
            [(5, 4)],
            r"Linear\(in_features=3, out_features=2\): needs \(..., 3\); got \(5, 4\)",
        ),
        (nn.Linear(3, 2), [()], r"needs \(..., 3\); got \(\)"),
        (nn.Flatten(2), [(3, 4)], r"Flatten\(.*\): needs at least these axes; got \(3, 4\)"),
        (nn.BatchNorm1d(3), [(5, 4)], r"\(batch, 3\) or \(batch, 3, length\); got \(5, 4\)"),
        (nn.BatchNorm2d(3), [(5, 3)], r"needs \(batch, 3, height, width\); got \(5, 3\)"),
        (nn.LayerNorm((3, 4)), [(4, 3)], r"LayerNorm\(.*\): needs \(..., 3, 4\); got \(4, 3\)"),
        (nn.RMSNorm(3), [(4,)], r"RMSNorm\(.*\): needs \(..., 3\); got \(4,\)"),
        (nn.GroupNorm(2, 4), [(4,)], r"GroupNorm\(.*\): needs \(batch, 4, ...\); got \(4,\)"),
        (nn.Conv1d(3, 4, 3), [(2, 4, 9)], r"Conv1d\(.*\): needs \(batch, 3, length\); got"),
        (nn.Conv2d(3, 4, 3), [(3, 9, 9)], r"Conv2d\(.*\): needs \(batch, 3, height, width\)"),
        (nn.Conv2d(3, 4, 5), [(1, 3, 4, 9)], r"the kernel must fit into the padded input"),
        (nn.ConvTranspose2d(3, 4, 3), [(2, 4, 9, 9)], r"needs \(batch, 3, height, width\)"),
        (nn.MaxPool2d(2), [(3, 9, 9)], r"MaxPool2d\(2\): needs \(batch, channels, height, width\)"),
        (nn.AdaptiveAvgPool2d((2, 3)), [(1, 3, 4, 4)], r"a multiple of 2, a multiple of 3\); got"),
        (nn.AdaptiveAvgPool1d(2), [(1, 3, 5)], r"channels, a multiple of 2\); got \(1, 3, 5\)"),
        (
            nn.MultiheadAttention(4, 2),
            [(2, 3, 4), (1, 3, 4)],
            r"MultiheadAttention\(.*\): needs queries \(batch, tokens, 4\), keys \(batch, others, "
            r"4\).*; got \(2, 3, 4\) and \(1, 3, 4\)",
        ),
        (nn.TransformerEncoderLayer(4, 2, 8), [(2, 4)], r"needs queries \(batch, tokens, 4\)"),
        (nn.LSTM(3, 4), [(2, 5, 4)], r"LSTM\(3, 4\): needs \(batch, steps, 3\); got \(2, 5, 4\)"),
        (nn.GRU(3, 4, batch_first=False), [(2, 3)], r"needs \(steps, batch, 3\); got \(2, 3\)"),
        (
            nn.GRU(3, 4),
            [(2, 5, 3), (1, 3, 4)],
            r"needs first states \(layers \* directions, batch, hidden\) = \(1, 2, 4\); got "
            r"\(1, 3, 4\)",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_an_input_that_does_not_fit_is_refused_with_what_was_expected(layer, shapes, message):
    with pytest.raises(pg.ShapeError, match=message):
        layer(*(np.ones(shape) for shape in shapes))


def test_an_embedding_refuses_indices_outside_its_table():
    layer = nn.Embedding(4, 2)
    for wrong in (-1, 4, 999999):
        with pytest.raises(pg.IndexRangeError):
            layer(np.array([wrong]))
    with pytest.raises(pg.DTypeError):
        layer([0.5])


def test_arrays_are_taken_to_the_device_of_the_layer():
    with pg.device("reference"):
        layers = [nn.Linear(3, 2), nn.LayerNorm(3), nn.Embedding(4, 2), nn.BatchNorm1d(3)]
    for layer in layers:
        x = np.array([1, 2, 3]) if isinstance(layer, nn.Embedding) else np.ones((2, 3))
        assert layer(x).device.name == "reference"
    with pytest.raises(pg.DeviceError, match="all inputs must live on one device"):
        layers[0](ag.tensor(np.ones((2, 3)), device="cpu"))
