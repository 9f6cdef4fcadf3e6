"""Write docs/devices.md: how each op runs on each device.

Every row of tests/op_table.py is run, with its gradients, on the CPU and on the first Vulkan
device, and what each op became is noted. Needs a build with Vulkan and a device; Mesa's software
driver will do: GGML_VK_VISIBLE_DEVICES=0 python docs/make_devices.py
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import pyggml as pg
from pyggml import ag
from pyggml._ffi import ffi, lib
from pyggml.ggml_plan import GgmlPlan
from pyggml.graph import OPS, SOURCE
from pyggml.plan import Step
from pyggml.vulkan import VulkanPlan

HERE = Path(__file__).resolve().parent
VIEWS = {"NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"}
COPIES = {"CONT", "CPY", "DUP"}
SEED = 0

HEAD = """# Ops and devices

Made by `docs/make_devices.py`, with {device}; do not edit.

- **own**: a kernel of pyggml's (CPU only). **native**: one op of ggml. **composed**: several.
  **view**: nothing is computed.
- **fallback**: the Vulkan backend lacks a part, which the CPU takes; `ag.plan_report` lists these
  for a program of yours (`fallbacks`).

What ggml's Vulkan backend has depends little on the GPU: limits of size and a few features.

| op | cpu | vulkan | as ggml ops on vulkan |
|---|---|---|---|
"""


class Notes:
    """What the ops became on one device."""

    def __init__(self) -> None:
        self.used: dict[str, set[tuple[str, ...]]] = defaultdict(set)
        self.lacking: dict[str, set[str]] = defaultdict(set)

    def note(self, plan: GgmlPlan, step: Step, first: int) -> None:
        nodes = [
            lib.ggml_graph_node(plan.graph, i)
            for i in range(first, lib.ggml_graph_n_nodes(plan.graph))
        ]
        op = step.node.op.name
        self.used[op].add(tuple(name_of(n) for n in nodes if name_of(n) not in VIEWS))
        if isinstance(plan, VulkanPlan):
            self.lacking[op].update(name_of(n) for n in nodes if not plan.device.can_run(n))

    def kind(self, op: str) -> str:
        if self.lacking[op]:
            return f"fallback ({', '.join(sorted(self.lacking[op])).lower()})"
        real = [[n for n in names if n not in COPIES] or list(names) for names in self.used[op]]
        if any("CUSTOM" in names for names in real):
            return "own"
        return ("view", "native", "composed")[min(2, max(map(len, real), default=0))]


def name_of(node: Any) -> str:
    """Return ggml's name of a node's op, the function where the op is a family."""
    if node.op == lib.GGML_OP_UNARY:
        return ffi.string(lib.ggml_unary_op_name(lib.ggml_get_unary_op(node))).decode()
    return ffi.string(lib.ggml_op_name(node.op)).decode()


def run_rows(device: pg.Device, notes: Notes) -> None:
    """Run value, gradient and update of every row on a device, noting what the ops become."""
    from op_table import ROWS

    before = GgmlPlan._lowered, VulkanPlan._lowered

    def lowered(plan: GgmlPlan, step: Step, first: int) -> None:
        notes.note(plan, step, first)
        before[isinstance(plan, VulkanPlan)](plan, step, first)

    with (
        pg.device(device),
        patch.object(GgmlPlan, "_lowered", lowered),
        patch.object(VulkanPlan, "_lowered", lowered),
    ):
        for row in ROWS:
            inputs = [ag.tensor(x, requires_grad=x.dtype.kind == "f") for x in row.inputs(SEED)]
            with ag.grad_tape():
                value = row.fn(*inputs)
            if value.requires_grad:
                grads = ag.backward(value, seed=ag.tensor(np.ones(value.shape)))
                for gradient in grads.values():
                    gradient.numpy()
            value.numpy()
        update_everything()


def update_everything() -> None:
    """Use every optimizer, and gradients that accumulate."""
    for method in vars(pg.optim).values():
        if isinstance(method, type) and issubclass(method, pg.optim.Optimizer):
            if method is pg.optim.Optimizer:
                continue
            w = ag.param(np.ones((2, 3)))
            optimizer = method([w], accumulate_steps=2)
            for _ in range(2):
                with ag.grad_tape():
                    loss = ag.sum(w * w)
                ag.backward(loss)
                optimizer.step()


def main() -> None:
    sys.path.insert(0, str(HERE.parent / "tests"))
    gpus = [device for device in pg.devices() if device.name.startswith("vulkan")]
    if not gpus:
        sys.exit("make_devices: needs a Vulkan device; try GGML_VK_VISIBLE_DEVICES=0")
    notes = {"cpu": Notes(), "vulkan": Notes()}
    run_rows(pg.device("cpu").device, notes["cpu"])
    run_rows(gpus[0], notes["vulkan"])
    lines = []
    for op in sorted(OPS):
        if OPS[op] is SOURCE:
            continue
        parts = max(notes["vulkan"].used[op], key=len, default=())
        listed = " ".join(part.lower() for part in parts)
        kinds = [notes[name].kind(op) for name in ("cpu", "vulkan")]
        lines.append(f"| {op} | {kinds[0]} | {kinds[1]} | {listed} |\n")
    text = HEAD.format(device=gpus[0].description) + "".join(lines)
    (HERE / "devices.md").write_text(text, encoding="utf-8")
    fallen = [line for line in lines if "fallback" in line]
    print(f"docs/devices.md: {len(lines)} ops, {len(fallen)} with a fallback")


if __name__ == "__main__":
    main()
