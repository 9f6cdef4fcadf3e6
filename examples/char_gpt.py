"""Train a small GPT, character by character, on the source text of Python's standard library.

The text is read from the Python that runs this: its library's .py files in the order of their
names, up to --characters. The last tenth is held out. With the default flags and Python 3.11 the
held-out loss falls from 4.6 nats for a character to 1.38 (2.0 bits), in about five minutes on one
core; the training loss to 0.99, so more text would help. What it writes looks like Python and means
nothing. Another version of Python is another text.

    python examples/char_gpt.py
    python examples/char_gpt.py --width 256 --context 128 --checkpoint --accumulate 4
    python examples/char_gpt.py --resume

Written to results/char_gpt: weights.safetensors, curve.png, samples.txt, and state.safetensors,
from which --resume goes on to the last bit, in a new process too.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np

try:
    from matplotlib.figure import Figure

    import pyggml as pg
    from pyggml import ag, nn, optim
    from pyggml.random import default_generator
except ModuleNotFoundError as error:
    sys.exit(f"char_gpt.py: {error.name} is missing; in pyggml's folder: pip install '.[examples]'")


def count(text: str) -> int:
    """Read a whole number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {text}")
    return int(text)


def parse_flags() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT on the source text of Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    flag = parser.add_argument
    flag("--characters", type=count, default=1_000_000, metavar="N", help="length of the text")
    flag("--layers", type=count, default=4, metavar="N", help="transformer layers")
    flag("--heads", type=count, default=4, metavar="N", help="attention heads of a layer")
    flag("--width", type=count, default=128, metavar="N", help="numbers that stand for a character")
    flag("--context", type=count, default=64, metavar="N", help="characters that the model sees")
    flag("--dropout", type=float, default=0.0, metavar="X", help="share of values dropped")
    flag("--steps", type=count, default=2000, metavar="N", help="updates of the weights")
    flag("--batch-size", type=count, default=32, metavar="N", help="windows of text in an update")
    flag("--lr", type=float, default=2e-3, metavar="X",
         help="AdamW's largest learning rate; it rises for --warmup updates, then falls to a "
              "tenth along a cosine")  # fmt: skip
    flag("--warmup", type=count, default=100, metavar="N", help="updates until --lr is reached")
    flag("--accumulate", type=count, default=1, metavar="N",
         help="micro-batches of an update: less memory, the same update")  # fmt: skip
    flag("--checkpoint", action="store_true",
         help="recompute each layer in the backward pass: less memory")  # fmt: skip
    flag("--every", type=count, default=200, metavar="N",
         help="updates after which to look at the held-out text and save the state")  # fmt: skip
    flag("--resume", action="store_true",
         help="go on from the state in --output; give the flags of the first run")  # fmt: skip
    flag("--stop-after", type=count, default=None, metavar="N",
         help="stop after this many updates, for --resume to go on later")  # fmt: skip
    flag("--samples", type=count, default=2, metavar="N", help="texts to write at the end")
    flag("--length", type=count, default=400, metavar="N", help="characters of each")
    flag("--temperature", type=float, default=0.7, metavar="X",
         help="near 0 the likeliest character; at 1 each as often as predicted")  # fmt: skip
    flag("--seed", type=int, default=0, metavar="N",
         help="decides the first weights, the windows and the samples")  # fmt: skip
    flag("--threads", type=count, default=pg.get_num_threads(), metavar="N", help="CPU threads")
    flag("--device", default="cpu", metavar="NAME",
         help="where to compute; python -m pyggml lists what there is")  # fmt: skip
    flag("--output", type=Path, default=Path("results/char_gpt"), metavar="FOLDER",
         help="where the files go; made if it is not there")  # fmt: skip
    flag("--short", action="store_true", help="take seconds: a tiny model, little text, 60 updates")
    args = parser.parse_args()
    if args.short:
        args.characters, args.layers, args.heads, args.width, args.context = 100_000, 2, 2, 32, 32
        args.steps, args.batch_size, args.warmup, args.every, args.lr = 60, 16, 10, 20, 1e-2
        args.length = 80
    if args.batch_size % args.accumulate:
        parser.error(f"argument --accumulate: must divide the batch size, {args.batch_size}")
    if args.characters < 20 * args.context:
        parser.error(f"argument --characters: must be at least {20 * args.context}, 20 contexts")
    if not args.temperature > 0:
        parser.error("argument --temperature: must be above 0")
    return args


def library_text(length: int) -> str:
    """Return the first characters of the running Python's library, files in order of names."""
    text = ""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace").replace("\t", "    ")
        if len(text) >= length:
            break
    # What is not ASCII is too rare to be learned.
    return "".join(c if c == "\n" or " " <= c <= "~" else "?" for c in text[:length])


class GPT(nn.Module):
    """Predicts the next character at each place of a text: (B, T) -> (B, T, characters)."""

    def __init__(self, characters: int, args: argparse.Namespace) -> None:
        self.token = nn.Embedding(characters, args.width)
        self.place = nn.Embedding(args.context, args.width)
        for table in (self.token, self.place):
            table.weight.assign(nn.init.normal(table.weight.shape, std=0.02))
        self.drop = nn.Dropout(args.dropout)
        self.layers = [
            nn.TransformerEncoderLayer(
                args.width, args.heads, 4 * args.width,
                dropout=args.dropout, activation="gelu", norm_first=True,
            )
            for _ in range(args.layers)
        ]  # fmt: skip
        if args.checkpoint:
            self.layers = [nn.checkpoint(layer) for layer in self.layers]
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, characters)

    def forward(self, x: ag.Tensor) -> ag.Tensor:
        h = self.drop(self.token(x) + self.place(np.arange(x.shape[1])))  # (B, T, width)
        for layer in self.layers:
            h = layer(h, causal=True)
        return self.head(self.norm(h))


def train(args: argparse.Namespace) -> None:
    """Train, report, and write the files."""
    args.output.mkdir(parents=True, exist_ok=True)
    pg.set_num_threads(args.threads)
    pg.set_device(args.device)
    pg.manual_seed(args.seed)

    text = library_text(args.characters)
    alphabet = sorted(set(text))
    numbers = {c: i for i, c in enumerate(alphabet)}
    data = np.array([numbers[c] for c in text], np.int32)
    fitted, held_out = np.split(data, [len(data) * 9 // 10])

    def windows(source: np.ndarray, count: int, *key: int) -> tuple[np.ndarray, np.ndarray]:
        """Return windows of text, and the same one character later; a key gives the same ones."""
        starts = np.random.default_rng([args.seed, *key]).integers(
            0, len(source) - args.context, count
        )
        window = source[starts[:, None] + np.arange(args.context + 1)]
        return window[:, :-1], window[:, 1:]

    model = GPT(len(alphabet), args)
    falling = optim.cosine_decay(
        args.lr, steps=max(1, args.steps - args.warmup), floor=args.lr / 10
    )  # fmt: skip
    opt = optim.AdamW(
        model.parameters(), lr=optim.warmup(falling, steps=args.warmup),
        betas=(0.9, 0.95), weight_decay=0.1, clip_norm=1.0, accumulate_steps=args.accumulate,
    )  # fmt: skip
    size = sum(parameter.size for parameter in model.parameters())
    print(f"{len(text):,} characters of Python's library, {len(alphabet)} different ones")
    print(f"GPT of {args.layers} layers, {size:,} parameters, on {args.device}", flush=True)

    state_path = args.output / "state.safetensors"
    state = {"model": model, "optimizer": opt, "generator": default_generator}
    curve = []  # rows of updates made, training loss since the row before, held-out loss
    if args.resume:
        curve = pg.io.load_state(state_path, **state)["curve"]
        print(f"going on after {opt.t} updates", flush=True)

    last = args.steps if args.stop_after is None else min(args.stop_after, args.steps)
    losses, started = [], time.perf_counter()
    while opt.t < last:
        x, y = windows(fitted, args.batch_size, 0, opt.t)
        for part in np.split(np.arange(args.batch_size), args.accumulate):
            with ag.grad_tape():
                loss = ag.softmax_cross_entropy(model(ag.tensor(x[part])), y[part])
            if args.accumulate == 1:
                opt.zero_grad()
            ag.backward(loss)
            opt.step()
            losses.append(loss.item())  # nats for a character
        if opt.t % args.every == 0 or opt.t == last:
            model.eval()
            with ag.no_grad():
                checks = []
                for i in range(20):  # always the same windows
                    x, y = windows(held_out, args.batch_size, 1, i)
                    checks.append(ag.softmax_cross_entropy(model(ag.tensor(x)), y).item())
                check = float(np.mean(checks))
            model.train()
            curve.append([opt.t, float(np.mean(losses)), check])
            seconds = (time.perf_counter() - started) / (len(losses) / args.accumulate)
            print(
                f"update {opt.t:5}: loss {curve[-1][1]:.4f}, held out {check:.4f} nats/character; "
                f"{1000 * seconds:.0f} ms/update",
                flush=True,
            )
            losses, started = [], time.perf_counter()
            pg.io.save_state(state_path, **state, curve=curve)

    samples = sample(model, alphabet, args)
    for i, written in enumerate(samples, 1):
        print(f"---- sample {i} {'-' * 60}\n{written}")
    print("-" * 74)
    (args.output / "samples.txt").write_text("\n\n".join(samples), encoding="utf-8")
    about = {
        "about": f"character GPT, held out {curve[-1][2]:.4f} nats",
        "alphabet": repr(alphabet),
    }
    pg.io.save_weights(args.output / "weights.safetensors", model, about=about)
    beside = args.output / ".curve.png"  # complete before it takes the old one's place
    draw_curve(np.array(curve)).savefig(beside, dpi=150)
    os.replace(beside, args.output / "curve.png")
    print(f"held-out loss after {opt.t} updates: {curve[-1][2]:.4f} nats/character")
    print("wrote weights.safetensors, state.safetensors, curve.png and samples.txt to", args.output)


@ag.no_grad()
def sample(model: GPT, alphabet: list[str], args: argparse.Namespace) -> list[str]:
    """Return texts that the model writes, each begun with a new line."""
    rng = np.random.default_rng([args.seed, 2])
    model.eval()
    written = np.full((args.samples, args.length + 1), alphabet.index("\n"), np.int32)
    for end in range(1, args.length + 1):
        # Always a whole window, so that one plan serves all: what stands after `end` is not seen.
        start = max(0, end - args.context)
        window = np.zeros((args.samples, args.context), np.int32)
        window[:, : end - start] = written[:, start:end]
        logits = model(ag.tensor(window)).numpy()[:, end - start - 1]  # (samples, characters)
        # The largest of logits plus Gumbel noise is a draw from their softmax.
        written[:, end] = np.argmax(logits / args.temperature + rng.gumbel(size=logits.shape), 1)
    model.train()
    return ["".join(alphabet[i] for i in row[1:]) for row in written]


def draw_curve(curve: np.ndarray) -> Figure:
    """Draw the losses (rows, 3) that train() gathers."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(curve[:, 0], curve[:, 1], marker=".", label="training, mean since the last point")
    axes.plot(curve[:, 0], curve[:, 2], marker=".", label="held out")
    axes.set(xlabel="updates", ylabel="cross entropy, nats for a character")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    flags = parse_flags()
    try:
        train(flags)
    except (pg.PyggmlError, OSError) as error:
        sys.exit(f"char_gpt.py: {error}")
    except KeyboardInterrupt:
        sys.exit("\nchar_gpt.py: stopped; --resume goes on from the state that was saved last")
