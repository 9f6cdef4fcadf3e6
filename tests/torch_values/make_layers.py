"""Write layers.npz: what PyTorch's layers compute, for tests/test_layers.py and its neighbours.

    python tests/torch_values/make_layers.py        (needs torch, which the tests do not)

Each case holds the layer's state before, the inputs, the outputs, the gradients of
sum(output * upstream) in parameters and inputs, and the buffers afterwards, in double precision.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

FILE = Path(__file__).with_name("layers.npz")


@dataclass
class Case:
    """One call of one layer. Shapes stand for random inputs; arrays for themselves."""

    layer: Callable[[], nn.Module]
    inputs: list[Any]
    call: Callable[..., Any] = lambda layer, *inputs: layer(*inputs)
    training: bool = True
    settings: dict[str, Any] = field(default_factory=dict)


def attend(layer: nn.MultiheadAttention, *inputs: torch.Tensor) -> torch.Tensor:
    """Call an attention layer for its output alone; one input is query, key and value."""
    query, key, value = inputs if len(inputs) == 3 else inputs * 3
    return layer(query, key, value, need_weights=False)[0]


def attend_causally(layer: nn.MultiheadAttention, x: torch.Tensor) -> torch.Tensor:
    """Call an attention layer such that no position sees a later one."""
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
    return layer(x, x, x, attn_mask=mask, need_weights=False)[0]


def attend_where(layer: nn.MultiheadAttention, x: torch.Tensor) -> torch.Tensor:
    """Call an attention layer whose last two keys are masked in the first batch element."""
    return layer(x, x, x, key_padding_mask=torch.from_numpy(~SEEN), need_weights=False)[0]


def causal_encoder(layer: nn.TransformerEncoderLayer, x: torch.Tensor) -> torch.Tensor:
    """Call an encoder layer causally."""
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
    return layer(x, src_mask=mask, is_causal=True)


def causal_decoder(layer: nn.TransformerDecoderLayer, x: torch.Tensor, m: torch.Tensor) -> Any:
    """Call a decoder layer causally."""
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
    return layer(x, m, tgt_mask=mask, tgt_is_causal=True)


def with_states(layer: nn.LSTM, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
    """Call an LSTM with first states."""
    return layer(x, (h, c))


SEEN = np.array([[True, True, True, False, False], [True] * 5])
TOKENS = np.array([[1, 1, 2], [0, 4, 1]])
BATCH = {"batch_first": True}
QUIET = {"batch_first": True, "dropout": 0.0}

CASES = {
    "Linear": Case(lambda: nn.Linear(4, 3), [(2, 5, 4)]),
    "Linear no bias": Case(lambda: nn.Linear(4, 3, bias=False), [(5, 4)]),
    "Embedding": Case(lambda: nn.Embedding(5, 3), [TOKENS]),
    "Embedding padding": Case(lambda: nn.Embedding(5, 3, padding_idx=1), [TOKENS]),
    "Flatten": Case(lambda: nn.Flatten(), [(2, 3, 4, 2)]),
    # activations
    "ReLU": Case(lambda: nn.ReLU(), [(3, 7)]),
    "LeakyReLU": Case(lambda: nn.LeakyReLU(0.2), [(3, 7)]),
    "ELU": Case(lambda: nn.ELU(1.5), [(3, 7)]),
    "GELU": Case(lambda: nn.GELU(), [(3, 7)]),
    "GELU tanh": Case(lambda: nn.GELU(approximate="tanh"), [(3, 7)]),
    "SiLU": Case(lambda: nn.SiLU(), [(3, 7)]),
    "Sigmoid": Case(lambda: nn.Sigmoid(), [(3, 7)]),
    "Tanh": Case(lambda: nn.Tanh(), [(3, 7)]),
    "Softplus": Case(lambda: nn.Softplus(), [(3, 7)]),
    "Hardswish": Case(lambda: nn.Hardswish(), [(3, 7)]),
    "Hardsigmoid": Case(lambda: nn.Hardsigmoid(), [(3, 7)]),
    "Softmax": Case(lambda: nn.Softmax(dim=1), [(2, 5, 3)]),
    # norms
    "BatchNorm1d": Case(lambda: nn.BatchNorm1d(3), [(6, 3)]),
    "BatchNorm1d length": Case(lambda: nn.BatchNorm1d(3, momentum=0.3), [(2, 3, 5)]),
    "BatchNorm1d cumulative": Case(lambda: nn.BatchNorm1d(3, momentum=None), [(6, 3)]),
    "BatchNorm1d plain": Case(
        lambda: nn.BatchNorm1d(3, affine=False, track_running_stats=False), [(6, 3)]
    ),
    "BatchNorm2d": Case(lambda: nn.BatchNorm2d(3, eps=1e-3), [(2, 3, 4, 2)]),
    "BatchNorm2d eval": Case(lambda: nn.BatchNorm2d(3), [(2, 3, 4, 2)], training=False),
    "LayerNorm": Case(lambda: nn.LayerNorm(6), [(2, 3, 6)]),
    "LayerNorm two axes": Case(lambda: nn.LayerNorm((3, 4)), [(2, 3, 4)]),
    "LayerNorm no bias": Case(lambda: nn.LayerNorm(6, bias=False), [(4, 6)]),
    "LayerNorm plain": Case(lambda: nn.LayerNorm((3, 4), elementwise_affine=False), [(2, 3, 4)]),
    "RMSNorm": Case(lambda: nn.RMSNorm(6, eps=1e-5), [(2, 3, 6)]),
    "RMSNorm plain": Case(
        lambda: nn.RMSNorm((3, 4), eps=1e-5, elementwise_affine=False), [(2, 3, 4)]
    ),
    "GroupNorm": Case(lambda: nn.GroupNorm(2, 4), [(2, 4, 3, 2)]),
    "GroupNorm plain": Case(lambda: nn.GroupNorm(2, 4, affine=False), [(2, 4, 3)]),
    # convolutions and pooling
    "Conv1d": Case(lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1), [(2, 3, 8)]),
    "Conv1d dilated": Case(lambda: nn.Conv1d(2, 3, 2, dilation=2, bias=False), [(2, 2, 7)]),
    "Conv2d": Case(lambda: nn.Conv2d(3, 4, 3), [(2, 3, 6, 5)]),
    "Conv2d settings": Case(
        lambda: nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0)), [(2, 2, 6, 5)]
    ),
    "Conv2d grouped": Case(lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), [(2, 4, 4, 4)]),
    "Conv2d depthwise": Case(lambda: nn.Conv2d(3, 3, 3, padding=1, groups=3), [(2, 3, 4, 4)]),
    "Conv2d dilated": Case(lambda: nn.Conv2d(2, 3, 2, dilation=2, bias=False), [(1, 2, 5, 5)]),
    "ConvTranspose2d": Case(lambda: nn.ConvTranspose2d(3, 2, 3), [(2, 3, 3, 4)]),
    "ConvTranspose2d settings": Case(
        lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1, output_padding=1), [(2, 3, 3, 4)]
    ),
    "MaxPool2d": Case(lambda: nn.MaxPool2d(2), [(2, 3, 4, 6)]),
    "MaxPool2d settings": Case(lambda: nn.MaxPool2d(3, stride=2, padding=1), [(2, 2, 7, 6)]),
    "AvgPool2d": Case(lambda: nn.AvgPool2d(2), [(2, 3, 4, 6)]),
    "AvgPool2d settings": Case(lambda: nn.AvgPool2d(3, stride=2, padding=1), [(2, 2, 7, 6)]),
    "AdaptiveAvgPool2d one": Case(lambda: nn.AdaptiveAvgPool2d(1), [(2, 3, 4, 5)]),
    "AdaptiveAvgPool2d": Case(lambda: nn.AdaptiveAvgPool2d((2, 3)), [(2, 3, 4, 6)]),
    "AdaptiveAvgPool1d": Case(lambda: nn.AdaptiveAvgPool1d(2), [(2, 3, 6)]),
    # attention
    "MultiheadAttention": Case(lambda: nn.MultiheadAttention(6, 2, **BATCH), [(2, 4, 6)], attend),
    "MultiheadAttention cross": Case(
        lambda: nn.MultiheadAttention(6, 3, **BATCH), [(2, 3, 6), (2, 5, 6), (2, 5, 6)], attend
    ),
    "MultiheadAttention sizes": Case(
        lambda: nn.MultiheadAttention(6, 2, bias=False, kdim=4, vdim=5, **BATCH),
        [(2, 3, 6), (2, 5, 4), (2, 5, 5)],
        attend,
    ),
    "MultiheadAttention causal": Case(
        lambda: nn.MultiheadAttention(6, 2, **BATCH), [(2, 4, 6)], attend_causally
    ),
    "MultiheadAttention mask": Case(
        lambda: nn.MultiheadAttention(6, 2, **BATCH), [(2, 5, 6)], attend_where
    ),
    "TransformerEncoderLayer": Case(
        lambda: nn.TransformerEncoderLayer(6, 2, 8, **QUIET), [(2, 4, 6)]
    ),
    "TransformerEncoderLayer norm first": Case(
        lambda: nn.TransformerEncoderLayer(6, 2, 8, norm_first=True, activation="gelu", **QUIET),
        [(2, 4, 6)],
        causal_encoder,
    ),
    "TransformerDecoderLayer": Case(
        lambda: nn.TransformerDecoderLayer(6, 2, 8, **QUIET), [(2, 4, 6), (2, 3, 6)], causal_decoder
    ),
    "TransformerDecoderLayer norm first": Case(
        lambda: nn.TransformerDecoderLayer(6, 2, 8, norm_first=True, **QUIET),
        [(2, 4, 6), (2, 3, 6)],
    ),
    # recurrent
    "LSTM": Case(lambda: nn.LSTM(3, 4, **BATCH), [(2, 5, 3)]),
    "LSTM time first": Case(lambda: nn.LSTM(3, 4, bias=False), [(5, 2, 3)]),
    "LSTM deep": Case(
        lambda: nn.LSTM(3, 2, num_layers=2, bidirectional=True, **BATCH),
        [(2, 4, 3), (4, 2, 2), (4, 2, 2)],
        with_states,
    ),
    "GRU": Case(lambda: nn.GRU(3, 4, **BATCH), [(2, 5, 3)]),
    "GRU time first": Case(lambda: nn.GRU(3, 4, bias=False), [(5, 2, 3)]),
    "GRU deep": Case(
        lambda: nn.GRU(3, 2, num_layers=2, bidirectional=True, **BATCH), [(2, 4, 3), (4, 2, 2)]
    ),
}


def flat(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nested tuple, in order."""
    return [value] if isinstance(value, torch.Tensor) else [t for item in value for t in flat(item)]


def run(name: str, case: Case) -> dict[str, np.ndarray]:
    """Return everything about one case, by name."""
    torch.manual_seed(sum(map(ord, name)))
    layer = case.layer().double().train(case.training)
    with torch.no_grad():  # so that no gradient or statistic is trivial
        for tensor in layer.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5 if case.training else tensor.abs() + 0.5)
                tensor -= 0.7 * (tensor.ndim > 1)
    values = {f"before/{key}": value.numpy().copy() for key, value in layer.state_dict().items()}
    inputs = [
        torch.from_numpy(given) if isinstance(given, np.ndarray)
        else torch.randn(given, dtype=torch.float64, requires_grad=True)
        for given in case.inputs
    ]  # fmt: skip
    outputs = flat(case.call(layer, *inputs))
    upstream = [torch.randn_like(output) for output in outputs]
    sum((o * u).sum() for o, u in zip(outputs, upstream, strict=True)).backward()
    for i, given in enumerate(inputs):
        values[f"input/{i}"] = given.detach().numpy()
        if given.grad is not None:
            values[f"input_grad/{i}"] = given.grad.numpy()
    for i, (output, u) in enumerate(zip(outputs, upstream, strict=True)):
        values[f"output/{i}"] = output.detach().numpy()
        values[f"upstream/{i}"] = u.numpy()
    for key, parameter in layer.named_parameters():
        values[f"grad/{key}"] = parameter.grad.numpy()
    for key, buffer in layer.named_buffers():
        values[f"after/{key}"] = buffer.numpy()
    return {f"{name}/{key}": value for key, value in values.items()}


def main() -> None:
    """Write the file."""
    values: dict[str, np.ndarray] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
        for name, case in CASES.items():
            values.update(run(name, case))
    # One array and one index: a thousand small entries would be mostly headers.
    index = {name: [value.dtype.name, value.shape] for name, value in values.items()}
    flat_values = np.concatenate([value.ravel().astype(float) for value in values.values()])
    np.savez_compressed(FILE, index=np.array(json.dumps(index)), values=flat_values)
    print(f"{FILE.name}: {len(CASES)} cases, {FILE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
