"""A table of a module's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..autograd import no_grad
from ..tensor import Parameter, Tensor, make_tensor
from ._module import Module, _watch

WIDTH = 44  # of the column that describes the layer


def summarize(module: Module, inputs: Sequence[Any], settings: Mapping[str, Any]) -> str:
    """Return the text that Module.summary prints."""
    shapes = _output_shapes(module, inputs, settings) if inputs or settings else None
    rows = [["name", "layer", *([] if shapes is None else ["output"]), "parameters"]]
    seen: set[int] = set()
    for name, layer in module.named_modules():
        own = []
        for _, parameter in layer._found(Parameter):
            if id(parameter) not in seen:  # a tied one counts once
                seen.add(id(parameter))
                own.append(parameter)
        if name == "" and not own and layer.children():
            continue  # a container's own line would say nothing
        row = [name, _describe(layer)]
        if shapes is not None:
            row.append(shapes.get(id(layer), "-"))
        rows.append([*row, f"{sum(p.size for p in own):,}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        cells[-1] = row[-1].rjust(widths[-1])
        lines.append("  ".join(cells))
    return "\n".join([*lines, _totals(module)])


def _describe(layer: Module) -> str:
    text = f"{type(layer).__name__}({layer.extra_repr()})"
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def _totals(module: Module) -> str:
    parameters = module.parameters()
    count = sum(p.size for p in parameters)
    trained = sum(p.size for p in parameters if p.requires_grad)
    text = f"{count:,} parameters, {trained:,} of them trained"
    buffered = sum(b.size for b in module.buffers())
    return f"{text}; {buffered:,} numbers in buffers" if buffered else text


def _output_shapes(
    module: Module, inputs: Sequence[Any], settings: Mapping[str, Any]
) -> dict[int, str]:
    """Return the shape of each layer's first output in a call, which is recorded but not run."""
    tensors = [
        make_tensor(value) if isinstance(value, (np.ndarray, list)) else value for value in inputs
    ]
    modes = [(each, each.__dict__.get("training")) for each in module.modules()]
    outer, _watch.calls = _watch.calls, []
    try:
        with no_grad():
            module.eval()(*tensors, **settings)
        shapes: dict[int, str] = {}
        for layer, result in _watch.calls:
            shapes.setdefault(id(layer), _shape_of(result))
        return shapes
    finally:
        _watch.calls = outer
        for each, mode in modes:
            del each.training
            if mode is not None:
                each.training = mode


def _shape_of(result: Any) -> str:
    if isinstance(result, Tensor):
        return str(result.shape)
    if isinstance(result, (tuple, list)):
        return ", ".join(_shape_of(item) for item in result)
    return type(result).__name__
