"""Predict how diabetes progresses from a table of ten measurements, and stop in time.

The data are the 442 patients that scikit-learn ships: age, sex, body mass index, blood pressure and
six blood values, and a measure of the disease a year later, from 25 to 346. A fifth of the patients
is held out for the test. Of the others a quarter is the validation set, which decides when training
stops and which epoch's weights are kept. The baseline, linear regression, learns from both.

With the default flags the network explains 47 % of the variance (R2 0.470, mean of ten splits), and
linear regression 46 % (0.456); single splits lie between 0.39 and 0.62, and the network is ahead in
seven of the ten.

    python examples/diabetes.py
    python examples/diabetes.py --splits 1 --seed 7 --hidden 64

Written to results/diabetes, for the last split: weights.safetensors, history.csv and curve.png.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np

try:
    import matplotlib  # noqa: F401 (for history.plot)
    from sklearn.datasets import load_diabetes
    from sklearn.linear_model import LinearRegression
    from sklearn.metrics import r2_score
    from sklearn.model_selection import train_test_split

    import pyggml as pg
    from pyggml import ag, nn, optim
except ModuleNotFoundError as error:
    sys.exit(f"diabetes.py: {error.name} is missing; in pyggml's folder: pip install '.[examples]'")


def count(text: str) -> int:
    """Read a whole number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {text}")
    return int(text)


def parse_flags() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Predict how diabetes progresses from a table of ten measurements.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    flag = parser.add_argument
    flag("--splits", type=count, default=10, metavar="N",
         help="random splits of the patients to train on, one after another")  # fmt: skip
    flag("--hidden", type=count, default=32, metavar="N", help="size of the hidden layer")
    flag("--dropout", type=float, default=0.2, metavar="X", help="share of hidden values dropped")
    flag("--epochs", type=count, default=300, metavar="N", help="most passes over the training set")
    flag("--patience", type=count, default=30, metavar="N",
         help="epochs without a better validation loss after which training stops")  # fmt: skip
    flag("--batch-size", type=count, default=32, metavar="N", help="patients in a training step")
    flag("--lr", type=float, default=3e-3, metavar="X", help="AdamW's learning rate")
    flag("--weight-decay", type=float, default=0.1, metavar="X", help="AdamW's weight decay")
    flag("--seed", type=int, default=0, metavar="N",
         help="of the first split: decides the split, the first weights and the order")  # fmt: skip
    flag("--threads", type=count, default=1, metavar="N", help="CPU threads; the network is tiny")
    flag("--device", default="cpu", metavar="NAME",
         help="where to compute; python -m pyggml lists what there is")  # fmt: skip
    flag("--output", type=Path, default=Path("results/diabetes"), metavar="FOLDER",
         help="where the files go; made if it is not there")  # fmt: skip
    flag("--short", action="store_true", help="take seconds: one split, 40 epochs at most")
    args = parser.parse_args()
    if args.short:
        args.splits, args.epochs, args.patience, args.lr = 1, 40, 10, 1e-2
    return args


def train(args: argparse.Namespace, seed: int) -> tuple[float, float]:
    """Train on one split, write the files, return R2 of the network and of the baseline."""
    pg.manual_seed(seed)
    x, y = load_diabetes(return_X_y=True, scaled=False)
    x_rest, x_test, y_rest, y_test = train_test_split(x, y, test_size=0.2, random_state=seed)
    x_train, x_val, y_train, y_val = train_test_split(
        x_rest, y_rest, test_size=0.25, random_state=seed
    )

    # All numbers in units of the training set's spread around its mean.
    mean, std, y_mean, y_std = x_train.mean(0), x_train.std(0), y_train.mean(), y_train.std()

    def scaled(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        units = (y - y_mean) / y_std
        return ((x - mean) / std).astype(np.float32), units[:, None].astype(np.float32)

    loader = pg.data.DataLoader(
        scaled(x_train, y_train), batch_size=args.batch_size, shuffle=True, seed=seed
    )
    model = nn.Sequential(
        nn.Linear(x.shape[1], args.hidden), nn.ReLU(), nn.Dropout(args.dropout),
        nn.Linear(args.hidden, 1),
    )  # fmt: skip
    history = pg.train.fit(
        model,
        loader,
        loss=ag.mse_loss,
        optimizer=optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay),
        epochs=args.epochs,
        validation=scaled(x_val, y_val),
        callbacks=[
            pg.train.EarlyStopping(patience=args.patience),  # gives the best weights back
            pg.train.CSVLogger(args.output / "history.csv"),
        ],
        progress=False,
    )

    predicted = pg.train.predict(model, scaled(x_test, y_test))[:, 0] * y_std + y_mean
    score = r2_score(y_test, predicted)
    baseline = LinearRegression().fit(x_rest, y_rest).score(x_test, y_test)
    rmse = np.sqrt(np.mean((predicted - y_test) ** 2))
    best = int(np.argmin(history["val_loss"])) + 1
    print(
        f"split {seed}: {len(history)} epochs, the best was {best}; "
        f"R2 {score:.3f}, off by {rmse:.1f} (RMSE); linear regression {baseline:.3f}",
        flush=True,
    )
    pg.io.save_weights(args.output / "weights.safetensors", model)
    beside = args.output / ".curve.png"  # complete before it takes the old one's place
    history.plot(beside)
    os.replace(beside, args.output / "curve.png")
    return score, baseline


def main(args: argparse.Namespace) -> None:
    """Train on all splits and report."""
    args.output.mkdir(parents=True, exist_ok=True)
    pg.set_num_threads(args.threads)
    pg.set_device(args.device)
    scores = np.array([train(args, args.seed + i) for i in range(args.splits)])
    print("R2 on held-out patients, mean of the splits (1: perfect, 0: always the mean)")
    print(f"network: {scores[:, 0].mean():.3f}, linear regression: {scores[:, 1].mean():.3f}")
    print(f"wrote weights.safetensors, history.csv and curve.png to {args.output}")


if __name__ == "__main__":
    flags = parse_flags()
    try:
        main(flags)
    except (pg.PyggmlError, OSError) as error:
        sys.exit(f"diabetes.py: {error}")
