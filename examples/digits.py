"""Train an MLP to read handwritten digits, and show what it learned.

The data are the 1,797 images of the UCI handwritten digits that scikit-learn ships, 8x8 pixels
each. A fifth of them, with the same share of every digit, is held out: never trained on. With the
default flags 98.6 % of the held-out digits are read correctly (355 of 360), after a second or two
on one core; with the seeds 0 to 9 it is 98.1 % to 99.4 %. (The defaults were chosen on splits like
these.) Two runs with one seed give the same bits; another kind of CPU may round another way.

    python examples/digits.py
    python examples/digits.py --hidden 128 --epochs 50 --seed 7

Written to results/digits: weights.safetensors, curve.png and predictions.png.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
    from safetensors.numpy import save
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from tqdm import tqdm

    import pyggml as pg
    from pyggml import ag, nn, optim
except ModuleNotFoundError as error:
    sys.exit(f"digits.py: {error.name} is missing; in pyggml's folder: pip install '.[examples]'")

PIXELS, CLASSES = 64, 10
BLUE, ORANGE, RED, GREY = "#2a6fb0", "#e08214", "#c22326", "#777777"


def parse_flags() -> argparse.Namespace:
    """Read the command line; a bad value ends the program with a message and status 2."""
    parser = argparse.ArgumentParser(
        description="Train an MLP to read handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    flag = parser.add_argument
    flag("--epochs", type=count, default=30, metavar="N", help="passes over the training images")
    flag("--batch-size", type=count, default=64, metavar="N", help="images in a training step")
    flag("--hidden", type=count, default=[256, 256], metavar="N", nargs="+",
         help="sizes of the hidden layers, first to last")  # fmt: skip
    flag("--lr", type=positive, default=3e-3, metavar="X",
         help="AdamW's learning rate at the start; it falls to 0 along a cosine")  # fmt: skip
    flag("--weight-decay", type=not_negative, default=0.1, metavar="X", help="AdamW's weight decay")
    flag("--label-smoothing", type=share, default=0.1, metavar="X",
         help="share of the target that is spread evenly over all ten digits")  # fmt: skip
    flag("--accumulate", type=count, default=1, metavar="N",
         help="micro-batches of a training step: less memory, the same update")  # fmt: skip
    flag("--checkpoint", action="store_true",
         help="recompute the layers in the backward pass: less memory")  # fmt: skip
    flag("--seed", type=seed, default=0, metavar="N",
         help="decides the split, the first weights and the order of the images")  # fmt: skip
    flag("--threads", type=count, default=pg.get_num_threads(), metavar="N", help="CPU threads")
    flag("--device", choices=[device.name for device in pg.devices()], default="cpu",
         help="where to compute; reference is NumPy in float64: slow")  # fmt: skip
    flag("--output", type=Path, default=Path("results/digits"), metavar="FOLDER",
         help="where the files go; made if it is not there")  # fmt: skip
    args = parser.parse_args()
    try:
        pg.set_num_threads(args.threads)
        args.output.mkdir(parents=True, exist_ok=True)
    except pg.SettingError as error:
        parser.error(f"argument --threads: {error}")
    except OSError as error:
        parser.error(f"argument --output: cannot make {args.output}: {error.strerror}")
    if not os.access(args.output, os.W_OK):
        parser.error(f"argument --output: {args.output} is not writable")
    return args


def train(args: argparse.Namespace) -> None:
    """Train, report, and write the files."""
    pg.set_device(args.device)
    pg.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)

    # The data: pixels from 0 to 16, scaled to 0 to 1.
    images, labels = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        (images / 16).astype(np.float32), labels,
        test_size=0.2, stratify=labels, random_state=args.seed,
    )  # fmt: skip

    # The model: linear layers, with a ReLU after each but the last.
    sizes = [PIXELS, *args.hidden, CLASSES]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers[:-1], checkpoint_every=2 if args.checkpoint else None)

    steps = args.epochs * math.ceil(len(x_train) / args.batch_size)
    opt = optim.AdamW(
        model.parameters(), lr=optim.cosine_decay(args.lr, steps=steps),
        weight_decay=args.weight_decay, accumulate_steps=args.accumulate,
    )  # fmt: skip
    cross_entropy = partial(
        ag.softmax_cross_entropy, label_smoothing=args.label_smoothing, reduction="sum"
    )

    shape = "-".join(map(str, sizes))
    parameters = sum(parameter.size for parameter in model.parameters())
    print(f"{len(x_train)} images to train on, {len(x_test)} held out, seed {args.seed}")
    print(f"MLP {shape}, {parameters:,} parameters, on {args.device}", flush=True)

    history = []  # one row for each epoch: losses and accuracies, training and held out
    bar = tqdm(range(1, args.epochs + 1), desc="training", unit="epoch", disable=None)
    for epoch in bar:
        loss_sum = 0.0
        order = rng.permutation(len(x_train))
        for start in range(0, len(order), args.batch_size):
            batch = order[start : start + args.batch_size]
            parts = np.array_split(batch, min(args.accumulate, len(batch)))
            opt.zero_grad()
            for part in parts:
                with ag.grad_tape():
                    loss = cross_entropy(model(ag.tensor(x_train[part])), y_train[part])
                ag.backward(loss)
                # Runs all of the above as one graph, and with the last part the update. The losses
                # are sums: with count= the step divides by the images in all parts.
                opt.step(count=len(part), flush=part is parts[-1])
                loss_sum += loss.item()
        if not math.isfinite(loss_sum):
            sys.exit(f"digits.py: the loss is {loss_sum} in epoch {epoch}; try a smaller --lr")

        logits = model(ag.tensor(x_test))  # (held out, 10)
        predicted = logits.numpy().argmax(axis=1)
        fitted = model(ag.tensor(x_train)).numpy().argmax(axis=1)
        losses = loss_sum / len(order), cross_entropy(logits, y_test).item() / len(y_test)
        accuracies = np.mean(fitted == y_train), np.mean(predicted == y_test)
        history.append([*losses, *accuracies])

        bar.set_postfix(loss=f"{losses[0]:.4f}", held_out=f"{accuracies[1]:.2%}")
        if bar.disable and (epoch % 5 == 0 or epoch == args.epochs):  # not a terminal
            print(
                f"epoch {epoch:3}: loss {losses[0]:.6f}, held out {losses[1]:.6f}; "
                f"accuracy {accuracies[0]:.2%}, held out {accuracies[1]:.2%}",
                flush=True,
            )

    right = int(np.sum(predicted == y_test))
    result = f"{right / len(y_test):.2%} ({right} of {len(y_test)})"
    about = {"about": f"digits, MLP {shape}, seed {args.seed}: held out {result}"}
    with replacing(args.output / "weights.safetensors") as path:
        path.write_bytes(save(model.state_dict(), metadata=about))
    with replacing(args.output / "curve.png") as path:
        draw_curve(np.array(history), args.label_smoothing).savefig(path, dpi=150)
    with replacing(args.output / "predictions.png") as path:
        draw_predictions(x_test, y_test, predicted).savefig(path, dpi=150)
    print(f"held-out digits read correctly: {result}")
    print(f"wrote weights.safetensors, curve.png and predictions.png to {args.output}")


# ---- pictures --------------------------------------------------------------------------------


def draw_curve(history: np.ndarray, smoothing: float) -> Figure:
    """Draw the losses and accuracies, (epochs, 4), that train() gathers."""
    trained, held_out = {"color": BLUE, "marker": "."}, {"color": ORANGE, "marker": "."}
    epochs = np.arange(1, len(history) + 1)
    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)

    left.set_title("Loss")
    left.plot(epochs, history[:, 0], **trained, label="training, mean over the epoch")
    left.plot(epochs, history[:, 1], **held_out, label="held out, after the epoch")
    floor = least_loss(smoothing)
    left.axhline(floor, color=GREY, linestyle=":", label=f"least possible, {floor:.3f}")
    left.set_ylabel(f"cross entropy in nats, labels smoothed by {smoothing:g}")
    left.set_ylim(bottom=0)

    right.set_title("Accuracy")
    right.plot(epochs, 100 * history[:, 2], **trained, label="training")
    right.plot(epochs, 100 * history[:, 3], **held_out, label="held out")
    last = 100 * history[-1, 3]
    right.annotate(f"{last:.2f} %", (epochs[-1], last), (0, -14), textcoords="offset points",
                   ha="right", va="top", color=ORANGE)  # fmt: skip
    right.set_ylabel("digits read correctly, %")
    right.set_ylim(min(90.0, 100 * history[:, 2:].min()) - 0.5, 100.5)

    for axes in (left, right):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper right" if axes is left else "lower right")
    return figure


def least_loss(smoothing: float) -> float:
    """Return the entropy of a smoothed label: no prediction has a smaller cross entropy."""
    target = np.full(CLASSES, smoothing / CLASSES)
    target[0] += 1 - smoothing
    target = target[target > 0]
    return float(np.sum(target * -np.log(target)))


def draw_predictions(
    images: np.ndarray, labels: np.ndarray, predicted: np.ndarray, rows: int = 6, columns: int = 10
) -> Figure:
    """Draw a grid of images (count, 64) under their predictions, the wrong ones first."""
    wrong = int(np.sum(predicted != labels))
    order = np.argsort(predicted == labels, kind="stable")[: rows * columns]
    figure = Figure(figsize=(0.95 * columns, 1.2 * rows + 0.6), layout="constrained")
    figure.suptitle(
        f"{len(labels) - wrong} of {len(labels)} held-out digits read correctly "
        "(wrong ones first, in red)"
    )
    for axes in figure.subplots(rows, columns).flat:
        axes.set_axis_off()
    for index, axes in zip(order, figure.axes, strict=False):
        right = predicted[index] == labels[index]
        axes.set_axis_on()
        axes.set(xticks=[], yticks=[])
        axes.imshow(images[index].reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
        title = f"{predicted[index]}" if right else f"{predicted[index]} (is {labels[index]})"
        axes.set_title(title, color="black" if right else RED, fontsize=10, pad=3)
        axes.spines[:].set(color=GREY if right else RED, linewidth=0.5 if right else 2)
    return figure


# ---- small helpers ---------------------------------------------------------------------------


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name beside path to write to; the complete file then takes path's place."""
    beside = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def number(kind: type, rule: str, holds: Callable[[Any], bool]) -> Callable[[str], Any]:
    """Return a reader of flag values that refuses those for which the rule does not hold."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
            if holds(value):
                return value
        except ValueError:
            pass  # not even a number
        raise argparse.ArgumentTypeError(f"must be {rule}; got {text!r}")

    return read


count = number(int, "a whole number of at least 1", lambda n: n >= 1)
seed = number(int, "a whole number from 0 to 4294967295", lambda n: 0 <= n < 2**32)
positive = number(float, "a number above 0", lambda x: 0 < x < math.inf)
not_negative = number(float, "a number of at least 0", lambda x: 0 <= x < math.inf)
share = number(float, "a number from 0 to 1", lambda x: 0 <= x <= 1)


if __name__ == "__main__":
    train(parse_flags())
