"""What can be hung into fit: a callback is called after each step and each epoch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..checks import as_list, need_keys, need_path, number_in, plain_number, positive_integer
from ..errors import SettingError
from ..io import save_weights
from ..nn import Module
from ._state import FitState

Path = str | os.PathLike[str]


class Callback:
    """Base of all callbacks: define the hooks that you need.

    A hook that sets ``state.stop`` to a text ends the run, and the text says why: at once after a
    step, with the row of the epoch as far as it came, or after the epoch.

    >>> class Patience(pg.train.Callback):
    ...     def on_epoch_end(self, state):
    ...         if state.row["seconds"] > 60:
    ...             state.stop = "too slow"
    """

    def on_step_end(self, state: FitState) -> None:
        """Called after each batch; state.loss and state.updated are those of the batch."""

    def on_epoch_end(self, state: FitState) -> None:
        """Called after each epoch's validation; state.row are the epoch's numbers."""

    def on_fit_end(self, state: FitState) -> None:
        """Called once, when the run has ended without an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, in numbers, texts and arrays."""
        return {}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Go on from a state."""


class _Watch(Callback):
    """A callback that follows one column and knows its best value."""

    def __init__(self, monitor: str, mode: str | None, min_delta: float) -> None:
        self._name = type(self).__name__
        self.monitor = monitor
        if not isinstance(monitor, str):
            raise SettingError(f"{self._name}: monitor must be a column's name; got {monitor!r}")
        self.min_delta = number_in(self._name, "min_delta", min_delta, 0.0)
        if mode is None and monitor.endswith("loss"):
            mode = "min"
        if mode is None and monitor.endswith("accuracy"):
            mode = "max"
        if not isinstance(mode, str) or mode not in ("min", "max"):
            raise SettingError(
                f"{self._name}: say mode='min' or mode='max' for {monitor!r}; got {mode!r}"
            )
        self.mode = mode
        self.best: float | None = None
        """The best value so far."""
        self.best_epoch = 0
        """The epoch, from 1, that had it."""

    def _improves(self, state: FitState) -> bool:
        """Take the new value in; return whether it is the best. NaN never is."""
        if self.monitor not in state.row:
            raise SettingError(
                f"{self._name}: no column {self.monitor!r}; there are {', '.join(state.row)}; "
                "val_ columns need validation="
            )
        value = state.row[self.monitor]
        sign = 1.0 if self.mode == "min" else -1.0
        if math.isnan(value):
            return False
        if self.best is not None and not sign * (self.best - value) > self.min_delta:
            return False
        self.best, self.best_epoch = float(value), state.epoch
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_epoch": self.best_epoch}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        need_keys(self._name, values, ("best", "best_epoch"))
        self.best, self.best_epoch = values["best"], values["best_epoch"]


class EarlyStopping(_Watch):
    """End the run when a column has not improved for some epochs.

    Args:
        patience: after how many epochs without improvement to end.
        monitor: the column.
        mode: whether smaller ("min") or larger ("max") is better; known for names that end with
            loss or accuracy.
        min_delta: improvements that are not larger than this do not count.
        restore_best: whether to give the model the best epoch's weights back when the run ends,
            for this reason or another. A saved training state keeps the last ones.

    Raises SettingError for a column that there is not.

    >>> stop = pg.train.EarlyStopping(patience=5, monitor="val_accuracy")
    >>> stop.mode
    'max'
    """

    def __init__(
        self,
        *,
        patience: int = 10,
        monitor: str = "val_loss",
        mode: str | None = None,
        min_delta: float = 0.0,
        restore_best: bool = True,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        self.patience = positive_integer("EarlyStopping", "patience", patience)
        self.restore_best = bool(restore_best)
        self._weights: dict[str, np.ndarray] | None = None

    def on_epoch_end(self, state: FitState) -> None:
        if self._improves(state):
            if self.restore_best:
                self._weights = _weights_of(state)
        elif state.epoch - self.best_epoch >= self.patience:
            state.stop = (
                f"{self.monitor} has not improved for {self.patience} epochs; the best was "
                f"{self.best} in epoch {self.best_epoch}"
            )

    def on_fit_end(self, state: FitState) -> None:
        if self._weights is not None:
            _set_weights(state, self._weights)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "weights": self._weights}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        need_keys(self._name, values, ("best", "best_epoch", "weights"))
        super().load_state_dict(values)
        self._weights = values["weights"]


class SaveBest(_Watch):
    """Write the model's weights to a file whenever a column is better than it ever was.

    Settings as for EarlyStopping; pg.io.load_weights reads the file.

    >>> save = pg.train.SaveBest("best.safetensors", monitor="val_loss")
    >>> save.mode
    'min'
    """

    def __init__(
        self,
        path: Path,
        *,
        monitor: str = "val_loss",
        mode: str | None = None,
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        self.path = need_path("SaveBest", path)

    def on_epoch_end(self, state: FitState) -> None:
        if self._improves(state):
            about = {"epoch": str(state.epoch), self.monitor: repr(self.best)}
            save_weights(self.path, _weights_of(state), about=about)


class CSVLogger(Callback):
    """Keep the history in a CSV file, complete after each epoch.

    The file holds the whole run, the epochs before a resumed one included.
    """

    def __init__(self, path: Path) -> None:
        self.path = need_path("CSVLogger", path)

    def on_epoch_end(self, state: FitState) -> None:
        state.history.to_csv(self.path)


class TensorBoardLogger(Callback):
    """Write every column of the history for TensorBoard, through tensorboardX.

    ``folder`` is what `tensorboard --logdir` is given. Raises SettingError if tensorboardX is not
    installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ModuleNotFoundError:
            raise SettingError(
                "TensorBoardLogger: needs tensorboardX: pip install 'pyggml[tensorboard]'"
            ) from None
        self._writer = SummaryWriter(os.fspath(need_path("TensorBoardLogger", folder)))

    def on_epoch_end(self, state: FitState) -> None:
        for name, value in state.row.items():
            if name != "epoch":
                self._writer.add_scalar(name, value, state.epoch)
        self._writer.flush()

    def on_fit_end(self, state: FitState) -> None:
        self._writer.close()


class LearningRateLogger(Callback):
    """Remember the learning rate of every update.

    >>> log = pg.train.LearningRateLogger()
    >>> log.rates
    []
    """

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step_end(self, state: FitState) -> None:
        if state.updated:
            self.rates.append(state.lr)

    def state_dict(self) -> dict[str, Any]:
        return {"rates": np.array(self.rates)}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        need_keys("LearningRateLogger", values, ("rates",))
        rates = as_list("LearningRateLogger", "rates", values["rates"], "numbers")
        self.rates = [plain_number("LearningRateLogger", "a rate", rate) for rate in rates]


def _weights_of(state: FitState) -> dict[str, np.ndarray]:
    """Return a copy of what is trained: of a model that is no module, what the optimizer has."""
    if isinstance(state.model, Module):
        return state.model.state_dict()
    return {str(i): parameter.numpy() for i, parameter in enumerate(state.optimizer.params)}


def _set_weights(state: FitState, weights: dict[str, np.ndarray]) -> None:
    if isinstance(state.model, Module):
        state.model.load_state_dict(weights)
        return
    for i, parameter in enumerate(state.optimizer.params):
        parameter.assign(weights[str(i)])
