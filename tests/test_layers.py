"""Every layer against the values that PyTorch's layer of the same name computes: outputs, gradients
in inputs and parameters, buffers; and the errors of settings and inputs that do not fit.
"""

from __future__ import annotations

import numpy as np
import pytest
from torch_values import load

import pyggml as pg
from pyggml import ag, nn, optim

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
