"""Train a GRU to tell from a docstring whether it documents a function or a class.

The texts are the first paragraphs of docstrings in the source files of Python's standard library,
NumPy, scikit-learn and Matplotlib, as installed: read, not imported. There are as many of functions
as of classes. A fifth of the files is held out, so that no file is on both sides. With the default
flags and the seeds 0 to 3, 79.6 % to 85.1 % of the held-out texts are told apart correctly, 81.4 %
on average. Naive Bayes on the counts of all words reaches 79.5 % on average: which words there are
says most, and their order a little. Other versions of the packages give other texts.

    python examples/text_gru.py
    python examples/text_gru.py --hidden 128 --bidirectional --seed 7

Written to results/text_gru: weights.safetensors, curve.png and words.txt.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
import sysconfig
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np

try:
    import matplotlib  # noqa: F401 (for history.plot)
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.naive_bayes import MultinomialNB

    import pyggml as pg
    from pyggml import ag, nn, optim
except ModuleNotFoundError as error:
    sys.exit(f"text_gru.py: {error.name} is missing; in pyggml's folder: pip install '.[examples]'")

PACKAGES = ["numpy", "sklearn", "matplotlib"]
KINDS = ["function", "class"]
PADDING, UNKNOWN = 0, 1
MOST_OF_FILE = 12  # texts: a few large files must not be most of what there is


def count(text: str) -> int:
    """Read a whole number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {text}")
    return int(text)


def parse_flags() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a GRU to tell whether a docstring documents a function or a class.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    flag = parser.add_argument
    flag("--files", type=count, default=2000, metavar="N", help="most source files to read")
    flag("--vocabulary", type=count, default=4000, metavar="N", help="words that have a vector")
    flag("--words", type=count, default=24, metavar="N", help="words of a text that are read")
    flag("--width", type=count, default=64, metavar="N", help="numbers that stand for a word")
    flag("--hidden", type=count, default=64, metavar="N", help="width of the GRU's state")
    flag("--bidirectional", action="store_true", help="a second GRU reads from the end")
    flag("--dropout", type=float, default=0.5, metavar="X", help="share of values dropped")
    flag("--epochs", type=count, default=10, metavar="N", help="passes over the training texts")
    flag("--batch-size", type=count, default=64, metavar="N", help="texts in a training step")
    flag("--lr", type=float, default=3e-3, metavar="X",
         help="AdamW's learning rate at the start; it falls to 0 along a cosine")  # fmt: skip
    flag("--seed", type=int, default=0, metavar="N",
         help="decides the split, the first weights and the order of the texts")  # fmt: skip
    flag("--threads", type=count, default=pg.get_num_threads(), metavar="N", help="CPU threads")
    flag("--device", default="cpu", metavar="NAME",
         help="where to compute; python -m pyggml lists what there is")  # fmt: skip
    flag("--output", type=Path, default=Path("results/text_gru"), metavar="FOLDER",
         help="where the files go; made if it is not there")  # fmt: skip
    flag("--short", action="store_true", help="take seconds: fewer texts, a small model, 5 epochs")
    args = parser.parse_args()
    if args.short:
        args.files, args.epochs, args.words = 250, 5, 12
        args.width, args.hidden, args.lr, args.dropout = 32, 32, 1e-2, 0.2
    return args


def docstrings(most: int, rng: np.random.Generator) -> list[tuple[int, int, str]]:
    """Return (file, kind, first paragraph) of the docstrings in so many files, drawn at random."""
    library = Path(sysconfig.get_path("stdlib")).rglob("*.py")
    paths = [path for path in library if "site-packages" not in path.parts]
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None and spec.origin is not None
        paths += Path(spec.origin).parent.rglob("*.py")
    paths = sorted(path for path in paths if not {"test", "tests"} & set(path.parts))
    found: dict[str, tuple[int, int, str]] = {}  # what many places share counts once
    for i in rng.permutation(len(paths))[:most]:
        try:
            tree = ast.parse(paths[i].read_bytes())
        except (SyntaxError, ValueError):
            continue  # files that are broken on purpose
        before = len(found)
        for node in ast.walk(tree):
            if len(found) - before == MOST_OF_FILE:
                break
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                paragraph = (ast.get_docstring(node) or "").split("\n\n")[0].lower()
                if len(paragraph.split()) >= 3:
                    kind = KINDS.index("class" if isinstance(node, ast.ClassDef) else "function")
                    found.setdefault(paragraph, (int(i), kind, paragraph))
    kinds = [[row for row in found.values() if row[1] == kind] for kind in range(len(KINDS))]
    fewest = min(map(len, kinds))
    return [rows[i] for rows in kinds for i in rng.permutation(len(rows))[:fewest]]


def hide_words(batch: tuple, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Make a tenth of the words unknown, so that no text is learned by heart."""
    words, kinds = batch
    is_hidden = (rng.random(words.shape) < 0.1) & (words != PADDING)
    return np.where(is_hidden, UNKNOWN, words), kinds


def words_of(text: str) -> list[str]:
    """Return the words and marks of a text."""
    return re.findall(r"[a-z]+|[0-9]+|[^\sa-z0-9]", text)


class Classifier(nn.Module):
    """Reads texts, (B, T) numbers of words, and returns logits (B, kinds)."""

    def __init__(self, words: int, args: argparse.Namespace) -> None:
        self.words = nn.Embedding(words, args.width, padding_idx=PADDING)
        self.drop = nn.Dropout(args.dropout)
        self.gru = nn.GRU(args.width, args.hidden, bidirectional=args.bidirectional)
        self.head = nn.Linear(args.hidden * (1 + args.bidirectional), len(KINDS))

    def forward(self, x: ag.Tensor) -> ag.Tensor:
        states, _ = self.gru(self.drop(self.words(x)))  # (B, T, hidden)
        return self.head(self.drop(ag.max(states, axis=1)))


def train(args: argparse.Namespace) -> None:
    """Train, report, and write the files."""
    args.output.mkdir(parents=True, exist_ok=True)
    pg.set_num_threads(args.threads)
    pg.set_device(args.device)
    pg.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)

    # The texts, split by file; the vocabulary is that of the training texts.
    rows = docstrings(args.files, rng)
    files = sorted({file for file, _, _ in rows})
    held_out = set(rng.choice(files, len(files) // 5, replace=False).tolist())
    sides: tuple[list, list] = [], []
    for file, kind, text in rows:
        sides[file in held_out].append((text, kind))
    counts = Counter(word for text, _ in sides[0] for word in words_of(text))
    vocabulary = ["", "?", *(word for word, _ in counts.most_common(args.vocabulary - 2))]
    numbers = {word: i for i, word in enumerate(vocabulary)}

    def encode(text: str) -> list[int]:
        found = [numbers.get(word, UNKNOWN) for word in words_of(text)][: args.words]
        return found + [PADDING] * (args.words - len(found))

    (x_train, y_train), (x_test, y_test) = (
        (np.array([encode(text) for text, _ in side], np.int32), np.array([n for _, n in side]))
        for side in sides
    )
    loader = pg.data.DataLoader(
        (x_train, y_train), batch_size=args.batch_size, shuffle=True, seed=args.seed,
        drop_last=True, augment=hide_words,  # batches of one size need one plan
    )  # fmt: skip

    model = Classifier(len(vocabulary), args)
    model.summary(x_train[: args.batch_size])
    print(f"{len(x_train)} texts to train on, {len(x_test)} held out", flush=True)
    schedule = optim.cosine_decay(args.lr, steps=args.epochs * len(loader))
    history = pg.train.fit(
        model,
        loader,
        loss=ag.softmax_cross_entropy,
        optimizer=optim.AdamW(model.parameters(), lr=schedule, weight_decay=0.05, clip_norm=1.0),
        epochs=args.epochs,
        validation=(x_test, y_test),
        metrics=pg.train.accuracy,
        callbacks=[Report()],
    )

    accuracy = history["val_accuracy"][-1]
    commonest = np.bincount(y_test).max() / len(y_test)
    bayes = naive_bayes(sides[0], sides[1])
    pg.io.save_weights(args.output / "weights.safetensors", model)
    for name, write in (
        ("curve.png", history.plot),
        ("words.txt", lambda path: path.write_text("\n".join(vocabulary), encoding="utf-8")),
    ):
        beside = args.output / f".{name}"  # complete before it takes the old one's place
        write(beside)
        os.replace(beside, args.output / name)
    print(f"always the commoner kind: {commonest:.2%} of the held-out texts are right")
    print(f"naive Bayes, all words without their order: {bayes:.2%}")
    print(f"GRU, the first {args.words} words in order: {accuracy:.2%}")
    print(f"wrote weights.safetensors, curve.png and words.txt to {args.output}")


def naive_bayes(train_side: list, test_side: list) -> float:
    """Return the held-out accuracy of naive Bayes on the counts of words."""
    counter = CountVectorizer(tokenizer=words_of, token_pattern=None)
    counts = counter.fit_transform([text for text, _ in train_side])
    bayes = MultinomialNB().fit(counts, [label for _, label in train_side])
    test = counter.transform([text for text, _ in test_side])
    return float(bayes.score(test, [label for _, label in test_side]))


class Report(pg.train.Callback):
    """Prints a line for each epoch."""

    def on_epoch_end(self, state: pg.train.FitState) -> None:
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
        sys.exit(f"text_gru.py: {error}")
