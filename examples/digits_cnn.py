"""Train a small convolutional network to read handwritten digits.

The data are the 1,797 images of the UCI handwritten digits that scikit-learn ships, 8x8 pixels
each. A fifth of them, with the same share of every digit, is held out: never trained on. With the
default flags 99.7 % of the held-out digits are read correctly (359 of 360); with the seeds 0 to 4
it is 99.4 % to 100 %. (The defaults were chosen on splits like these.)

    python examples/digits_cnn.py
    python examples/digits_cnn.py --channels 16 32 --epochs 40 --seed 7

Written to results/digits_cnn: weights.safetensors and curve.png.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np

try:
    import matplotlib  # noqa: F401 (for history.plot)
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    import pyggml as pg
    from pyggml import ag, nn, optim
except ModuleNotFoundError as error:
    sys.exit(
        f"digits_cnn.py: {error.name} is missing; in pyggml's folder: pip install '.[examples]'"
    )


def count(text: str) -> int:
    """Read a whole number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {text}")
    return int(text)


def parse_flags() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a small convolutional network to read handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    flag = parser.add_argument
    flag("--epochs", type=count, default=30, metavar="N", help="passes over the training images")
    flag("--batch-size", type=count, default=64, metavar="N", help="images in a training step")
    flag("--channels", type=count, default=[32, 64], metavar="N", nargs=2,
         help="channels of the convolutions before and after the pooling")  # fmt: skip
    flag("--lr", type=float, default=3e-3, metavar="X",
         help="AdamW's learning rate at the start; it falls to 0 along a cosine")  # fmt: skip
    flag("--weight-decay", type=float, default=0.05, metavar="X", help="AdamW's weight decay")
    flag("--label-smoothing", type=float, default=0.1, metavar="X",
         help="share of the target that is spread evenly over all ten digits")  # fmt: skip
    flag("--seed", type=int, default=0, metavar="N",
         help="decides the split, the first weights and the order of the images")  # fmt: skip
    flag("--threads", type=count, default=pg.get_num_threads(), metavar="N", help="CPU threads")
    flag("--device", default="cpu", metavar="NAME",
         help="where to compute; python -m pyggml lists what there is")  # fmt: skip
    flag("--output", type=Path, default=Path("results/digits_cnn"), metavar="FOLDER",
         help="where the files go; made if it is not there")  # fmt: skip
    flag("--short", action="store_true", help="take seconds: two epochs, fewer channels")
    args = parser.parse_args()
    if args.short:
        args.epochs, args.channels = 2, [8, 16]
    return args


def move(batch: tuple[np.ndarray, np.ndarray], rng: np.random.Generator) -> tuple:
    """Move each image by up to one pixel up or down and left or right."""
    images, labels = batch
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    dy, dx = rng.integers(0, 3, (2, len(images), 1, 1))
    rows, columns = dy + np.arange(8)[:, None], dx + np.arange(8)
    return padded[np.arange(len(images))[:, None, None], 0, rows, columns][:, None], labels


def train(args: argparse.Namespace) -> None:
    """Train, report, and write the files."""
    args.output.mkdir(parents=True, exist_ok=True)
    pg.set_num_threads(args.threads)
    pg.set_device(args.device)
    pg.manual_seed(args.seed)

    # The data: pixels from 0 to 16, scaled to 0 to 1, as images of one channel.
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)  # (N, C, H, W)
    x_train, x_test, y_train, y_test = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=args.seed
    )
    loader = pg.data.DataLoader(
        (x_train, y_train), batch_size=args.batch_size, shuffle=True, seed=args.seed, augment=move
    )

    first, second = args.channels
    model = nn.Sequential(
        nn.Conv2d(1, first, 3, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU(),
        nn.Conv2d(first, first, 3, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU(),
        nn.MaxPool2d(2),  # (N, first, 4, 4)
        nn.Conv2d(first, second, 3, padding=1, bias=False), nn.BatchNorm2d(second), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.3),  # (N, second * 4 * 4)
        nn.Linear(second * 4 * 4, 10),
    )  # fmt: skip
    model.summary(x_train[: args.batch_size])
    print(f"{len(x_train)} images to train on, {len(x_test)} held out", flush=True)

    schedule = optim.cosine_decay(args.lr, steps=args.epochs * len(loader))
    history = pg.train.fit(
        model,
        loader,
        loss=partial(ag.softmax_cross_entropy, label_smoothing=args.label_smoothing),
        optimizer=optim.AdamW(model.parameters(), lr=schedule, weight_decay=args.weight_decay),
        epochs=args.epochs,
        validation=(x_test, y_test),
        metrics=pg.train.accuracy,
        callbacks=[Report()],
    )

    right = round(history["val_accuracy"][-1] * len(x_test))
    result = f"{right / len(x_test):.2%} ({right} of {len(x_test)})"
    about = {"about": f"digits CNN, seed {args.seed}: held out {result}"}
    pg.io.save_weights(args.output / "weights.safetensors", model, about=about)
    beside = args.output / ".curve.png"  # complete before it takes the old one's place
    history.plot(beside)
    os.replace(beside, args.output / "curve.png")
    print(f"held-out digits read correctly: {result}")
    print(f"wrote weights.safetensors and curve.png to {args.output}")


class Report(pg.train.Callback):
    """Prints a line for every few epochs."""

    def on_epoch_end(self, state: pg.train.FitState) -> None:
        if state.epoch == 1 or state.epoch % 5 == 0:
            row = state.row
            print(
                f"epoch {state.epoch:3}: loss {row['loss']:.4f}, held out {row['val_loss']:.4f}; "
                f"accuracy {row['accuracy']:.2%}, held out {row['val_accuracy']:.2%}",
                flush=True,
            )


if __name__ == "__main__":
    flags = parse_flags()
    try:
        train(flags)
    except (pg.PyggmlError, OSError) as error:
        sys.exit(f"digits_cnn.py: {error}")
