"""What a run of fit knows: where it is, and a row of numbers for each epoch."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..checks import as_list, need_keys, need_mapping, need_path
from ..errors import NonFiniteLossError, SettingError
from ..optim import Optimizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, float]


class History:
    """A row of numbers for each epoch: what fit returns.

    Columns are "epoch" (from 1), "loss" and the metrics over the epoch's training batches, the same
    with "val_" in front over the validation data, "lr" (of the last update), "updates" (made so
    far), "skipped" (steps of the epoch that left the weights alone) and "seconds".

    >>> history = pg.train.History([{"epoch": 1, "loss": 2.0}, {"epoch": 2, "loss": 0.5}])
    >>> history["loss"], history.rows[-1]
    ([2.0, 0.5], {'epoch': 2, 'loss': 0.5})
    """

    def __init__(self, rows: list[Row] | None = None) -> None:
        self.rows: list[Row] = as_list("History", "rows", rows or [], "dicts of numbers")
        for row in self.rows:
            need_mapping("History", "a row", row)
        self.stopped: str | None = None
        """Why the run ended before its last epoch, if it did."""

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> list[float]:
        """Return a column. Raises SettingError for a name that no row has."""
        if name not in self.names():
            raise SettingError(
                f"History: no column {name!r}; there are {', '.join(self.names()) or 'none yet'}"
            )
        return [row.get(name, float("nan")) for row in self.rows]

    def __repr__(self) -> str:
        last = self.rows[-1].items() if self.rows else ()
        return f"History({len(self)} epochs; {', '.join(f'{n}={v:.4g}' for n, v in last)})"

    def names(self) -> list[str]:
        """Return the names of the columns."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def to_dict(self) -> dict[str, list[float]]:
        """Return all columns by name: what pandas.DataFrame takes."""
        return {name: self[name] for name in self.names()}

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write all rows as a table, in full precision."""
        with open(need_path("to_csv", path), "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.names(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw loss and metrics over the epochs, training and validation in one panel each.

        Returns a matplotlib figure, which notebooks show; writes it to path if there is one.
        Raises SettingError if there are no rows yet.
        """
        try:
            from matplotlib.figure import Figure
            from matplotlib.ticker import MaxNLocator
        except ModuleNotFoundError:
            raise SettingError("plot: needs matplotlib: pip install matplotlib") from None
        others = {"epoch", "lr", "updates", "skipped", "seconds"}
        shown = [name for name in self.names() if name not in others]
        panels = list(dict.fromkeys(name.removeprefix("val_") for name in shown))
        if not panels:
            raise SettingError("plot: the history has no rows yet")
        figure = Figure(figsize=(4.8 * len(panels), 3.6), layout="constrained")
        for axes, name in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            for column, label in ((name, "training"), (f"val_{name}", "validation")):
                if column in shown:
                    axes.plot(self["epoch"], self[column], marker=".", label=label)
            axes.set(xlabel="epoch", ylabel=name)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(alpha=0.25)
            axes.legend(frameon=False)
        if path is not None:
            need_path("plot", path)
            figure.savefig(path, dpi=150)
        return figure


@dataclass
class FitState:
    """Where a run of fit stands: what callbacks are given.

    A callback ends the run by setting ``stop`` to the reason.
    """

    model: Any
    optimizer: Optimizer
    history: History
    epoch: int = 0
    """Epochs that have ended."""
    step: int = 0
    """Batches since the run began."""
    batch: int = 0
    """Batches since the epoch began."""
    loss: float = float("nan")
    """The loss of the last batch."""
    lr: float = float("nan")
    """The learning rate of the last step."""
    updated: bool = False
    """Whether the last step was an update, and did not only fill the window."""
    is_trained: bool = False
    """Whether the epoch has had all its batches, and only its validation is left."""
    stop: str | None = None
    """Why to end the run, once a callback wants it to."""
    sums: Row = field(default_factory=dict)  # of the epoch: numbers times samples
    samples: int = 0  # of the batches in the sums
    skipped: int = 0  # steps of the epoch that were left out
    skipped_before: int = 0  # what the optimizer had skipped before the epoch

    @property
    def row(self) -> Row:
        """The numbers of the last epoch that has ended."""
        return self.history.rows[-1]

    def add(self, numbers: Row, samples: int) -> None:
        """Take a batch's numbers into the means of the epoch."""
        for name, value in numbers.items():
            self.sums[name] = self.sums.get(name, 0.0) + value * samples
        self.samples += samples

    def close_epoch(self) -> Row:
        """End the epoch: return its row, as far as training knows it.

        Raises SettingError if there was no batch, NonFiniteLossError if all were left out.
        """
        self.epoch += 1
        if not self.batch:
            raise SettingError(
                f"fit: epoch {self.epoch} had no batches; a generator can be looped over once: "
                "give a DataLoader, or a list"
            )
        if not self.samples:
            raise NonFiniteLossError(
                f"fit: all {self.batch} steps of epoch {self.epoch} were left out, the last with "
                f"loss {self.loss}; start with a smaller learning rate, or look for the operation "
                "with ag.detect_anomaly"
            )
        row: Row = {"epoch": self.epoch}
        row.update({name: total / self.samples for name, total in self.sums.items()})
        row["lr"], row["updates"] = self.lr, self.optimizer.t
        row["skipped"] = self.skipped + self.optimizer.skipped - self.skipped_before
        self.sums, self.samples, self.skipped, self.batch, self.is_trained = {}, 0, 0, 0, False
        self.skipped_before = self.optimizer.skipped
        return row

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on from here, apart from the objects trained."""
        return {**{name: getattr(self, name) for name in _SAVED}, "rows": self.history.rows}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Go on from a state."""
        need_keys("FitState", values, (*_SAVED, "rows"))
        for name in _SAVED:
            setattr(self, name, values[name])
        self.history.rows = list(values["rows"])


_SAVED = (
    "epoch",
    "step",
    "batch",
    "loss",
    "lr",
    "is_trained",
    "stop",
    "sums",
    "samples",
    "skipped",
    "skipped_before",
)
