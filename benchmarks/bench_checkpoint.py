"""Memory and time of gradient checkpointing against depth, beside torch.utils.checkpoint.

Two stacks: a chain of matmul and relu, and transformer blocks (pre-norm, attention, gelu). Each
case runs in a process of its own, forward and backward, several times: its resident peak is the
process's peak less what it held before the first step; its time the median of the steps. "planned"
is what ggml's allocator planned for the values between inputs and outputs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from math import isqrt
from typing import Any

import numpy as np
from common import begin, flag_parser, forget_peak, positive, status_of, write_json

import pyggml as pg
from pyggml import ag

CHAIN_WIDTH, CHAIN_BATCH = 256, 1024
WIDTH, HEADS, TOKENS, BATCH = 128, 4, 64, 8


def chain_weights(depth: int) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(0)
    scale = (2 / CHAIN_WIDTH) ** 0.5
    square = (CHAIN_WIDTH, CHAIN_WIDTH)
    return [[rng.standard_normal(square, np.float32) * np.float32(scale)] for _ in range(depth)]


def transformer_weights(depth: int) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(0)
    shapes = (WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
    return [[rng.standard_normal(s, np.float32) * np.float32(0.02) for s in shapes]
            for _ in range(depth)]  # fmt: skip


STACKS = {
    "chain": (chain_weights, (CHAIN_BATCH, CHAIN_WIDTH)),
    "transformer": (transformer_weights, (BATCH, TOKENS, WIDTH)),
}


def run_pyggml(stack: str, depth: int, segment: int, steps: int) -> dict[str, float]:
    """Run forward and backward in pyggml; return planned and resident peak, and seconds."""
    make, shape = STACKS[stack]
    layers = [[ag.param(w) for w in layer] for layer in make(depth)]
    data = np.random.default_rng(1).standard_normal(shape, np.float32)

    def attention(h: ag.Tensor, w_qkv: ag.Tensor) -> ag.Tensor:
        batch, tokens, width = h.shape
        qkv = ag.reshape(h @ w_qkv, (batch, tokens, 3, width))
        parts = (ag.reshape(qkv[:, :, i], (batch, tokens, HEADS, width // HEADS)) for i in range(3))
        q, k, v = (ag.permute(part, (0, 2, 1, 3)) for part in parts)  # (batch, heads, tokens, -1)
        mixed = ag.scaled_dot_product_attention(q, k, v, causal=True)
        return ag.reshape(ag.permute(mixed, (0, 2, 1, 3)), (batch, tokens, width))

    def layer(h: ag.Tensor, weights: list[ag.Tensor]) -> ag.Tensor:
        if stack == "chain":
            return ag.relu(h @ weights[0])
        w_qkv, w_out, w_up, w_down = weights
        h = h + attention(ag.layer_norm(h), w_qkv) @ w_out
        return h + ag.gelu(ag.layer_norm(h) @ w_up) @ w_down

    def part(h: ag.Tensor, first: int, last: int) -> ag.Tensor:
        for weights in layers[first:last]:
            h = layer(h, weights)
        return h

    def step() -> tuple[ag.Tensor, float]:
        for weights in layers:
            for weight in weights:
                weight.grad = None
        h = ag.tensor(data)
        with ag.grad_tape():
            if segment:
                for first in range(0, depth, segment):
                    h = ag.checkpoint(part, h, first, first + segment)
            else:
                h = part(h, 0, depth)
            loss = ag.mean(h * h)
            del h
        ag.backward(loss)
        return loss, ag.plan_report(loss).bytes["activations"] if not planned else planned[0]

    planned: list[float] = []
    before = forget_peak()
    times = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        loss, bytes_planned = step()
        loss.item()
        times.append(time.perf_counter() - start)
        planned = planned or [bytes_planned]
    peak = status_of("VmHWM") - before
    return {
        "planned": planned[0] / 2**20,
        "resident": peak / 2**20,
        "seconds": statistics.median(times[1:]),
        "loss": float(loss.item()),
    }


def run_torch(stack: str, depth: int, segment: int, steps: int) -> dict[str, float]:
    """Run the same in PyTorch."""
    import torch
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    make, shape = STACKS[stack]
    layers = [[torch.tensor(w, requires_grad=True) for w in layer] for layer in make(depth)]
    data = np.random.default_rng(1).standard_normal(shape, np.float32)

    def layer(h: Any, weights: list[Any]) -> Any:
        if stack == "chain":
            return torch.relu(h @ weights[0])
        w_qkv, w_out, w_up, w_down = weights
        batch, tokens, width = h.shape
        qkv = (functional.layer_norm(h, (width,)) @ w_qkv).view(batch, tokens, 3, HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + mixed.transpose(1, 2).reshape(batch, tokens, width) @ w_out
        return h + functional.gelu(functional.layer_norm(h, (width,)) @ w_up) @ w_down

    def part(h: Any, first: int, last: int) -> Any:
        for weights in layers[first:last]:
            h = layer(h, weights)
        return h

    def step() -> Any:
        for weights in layers:
            for weight in weights:
                weight.grad = None
        h = torch.tensor(data)
        if segment:
            for first in range(0, depth, segment):
                h = checkpoint(part, h, first, first + segment, use_reentrant=False)
        else:
            h = part(h, 0, depth)
        loss = (h * h).mean()
        loss.backward()
        return loss

    before = forget_peak()
    times = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        loss = step().item()
        times.append(time.perf_counter() - start)
    peak = status_of("VmHWM") - before
    return {"resident": peak / 2**20, "seconds": statistics.median(times[1:]), "loss": loss}


def run_case(args: argparse.Namespace, engine: str, stack: str, depth: int, segment: int) -> Any:
    """Run one case in a process of its own."""
    case = [engine, stack, str(depth), str(segment)]
    command = [sys.executable, __file__, "--case", *case, "--steps", str(args.steps)]
    command += ["--threads", str(args.threads), "--device", args.device]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = flag_parser(__doc__)
    parser.add_argument("--depths", type=positive, nargs="+", default=[8, 16, 36, 64, 128, 256],
                        metavar="N", help="numbers of layers")  # fmt: skip
    parser.add_argument("--steps", type=positive, default=5, metavar="N", help="steps a case")
    parser.add_argument("--stacks", nargs="+", default=list(STACKS), choices=list(STACKS))
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        pg.set_device(args.device)
        pg.set_num_threads(args.threads)
        engine, stack, depth, segment = args.case
        if engine == "torch":
            import torch

            torch.set_num_threads(args.threads)
        run = {"pyggml": run_pyggml, "torch": run_torch}[engine]
        print(json.dumps(run(stack, int(depth), int(segment), args.steps)))
        return

    about = begin(args)
    try:
        import torch

        engines = ["pyggml", "torch"] if args.device == "cpu" else ["pyggml"]
        print(f"PyTorch:       {torch.__version__}\n")
    except ImportError:
        engines = ["pyggml"]
    rows: list[dict[str, Any]] = []
    for stack in args.stacks:
        print(f"{stack}: plain, and in segments of about the root of the depth; MiB and ms a step")
        print("depth segment engine  planned resident     ms | plain planned, and of plain: "
              "planned resident  time")  # fmt: skip
        for depth in args.depths:
            segment = isqrt(depth)
            while depth % segment:
                segment -= 1
            for engine in engines:
                plain = run_case(args, engine, stack, depth, 0)
                ours = run_case(args, engine, stack, depth, segment)
                assert abs(plain["loss"] - ours["loss"]) <= 1e-4 * abs(plain["loss"])
                rows.append({"stack": stack, "depth": depth, "segment": segment, "engine": engine,
                             "plain": plain, "checkpointed": ours})  # fmt: skip
                ratio = {key: ours[key] / plain[key] if plain[key] else np.nan for key in plain}
                print(
                    f"{depth:5} {segment:7} {engine:7} {ours.get('planned', np.nan):7.1f} "
                    f"{ours['resident']:8.1f} {ours['seconds'] * 1e3:6.1f} | "
                    f"{plain.get('planned', np.nan):13.1f} {ratio.get('planned', np.nan):23.2f} "
                    f"{ratio['resident']:8.2f} "
                    f"{ratio['seconds']:5.2f}",
                    flush=True,
                )
    write_json(args.json, {"about": about, "rows": rows})


if __name__ == "__main__":
    main()
