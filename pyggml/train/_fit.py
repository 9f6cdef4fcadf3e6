"""The training loop."""

from __future__ import annotations

import functools
import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..autograd import grad_tape
from ..checks import as_list, need_function, need_path, one_of, positive_integer, shown
from ..data import batch_length
from ..errors import DTypeError, NonFiniteLossError, SettingError
from ..io import load_state, save_state
from ..nn import Module
from ..ops import mul
from ..optim import Optimizer
from ..optim._clipping import gradient_norm
from ..random import Generator, chosen_generator, default_generator
from ..tensor import Tensor, make_tensor
from ._callbacks import Callback
from ._evaluate import (
    Forward,
    Loss,
    Metrics,
    as_arrays,
    check_functions,
    evaluated,
    loss_of,
    mode,
    named_metrics,
    pair_forward,
    pair_of,
    value_of,
)
from ._state import FitState, History

Path = str | os.PathLike[str]


def fit(
    model: Any,
    loader: Iterable[Any],
    *,
    loss: Loss,
    optimizer: Optimizer,
    epochs: int,
    validation: Any = None,
    metrics: Metrics = None,
    callbacks: Sequence[Callback] = (),
    forward: Forward | None = None,
    flush: bool = True,
    on_nonfinite: str = "raise",
    state_path: Path | None = None,
    save_every: int | None = None,
    resume: bool = False,
    generator: Generator | None = None,
    progress: bool = True,
) -> History:
    """Train a model on batches, epoch by epoch, and return a row of numbers for each.

    Args:
        model: a module, or any function of tensors.
        loader: gives an epoch's batches (x, y) each time it is looped over: a DataLoader, a list.
            Of longer tuples all but the last are inputs.
        loss: a function (outputs, targets) that returns the mean over the batch, of one element.
        epochs: how many there are to be in all, those before a resumed run included.
        validation: batches, or arrays (x, y), to evaluate the model on after each epoch.
        metrics: functions (outputs, targets) of NumPy arrays, as a dict by name or a list. Over
            the validation data each sees everything at once; the training columns are the means of
            the batches, as the weights change.
        callbacks: called after each step and each epoch; see Callback.
        forward: a function (model, batch) that returns outputs and targets, where batches are not
            such tuples.
        flush: whether an accumulation window that the end of an epoch leaves incomplete is applied.
        on_nonfinite: what to do when a loss is NaN or infinite. "raise" raises, after the update:
            looking first costs time. "skip" looks before each update, at the loss and at the norm
            of the gradients, and leaves out the step, with the window it belongs to.
        state_path: where to save the state of the run, after each epoch and on Ctrl-C.
        save_every: after how many steps to save it besides.
        resume: whether to go on from the state in state_path, if the file is there. The run then
            ends as it would have without the break, to the last bit.
        generator: one that the model draws from, beside the default one, to be in the state.
        progress: whether to show a bar, if the output is a terminal.

    With ``accumulate_steps`` each batch of a window counts with its number of samples, so that
    unequal batches give the gradient of the whole; not with ``average=False``, the plain sum.

    The first Ctrl-C lets the running step end, saves the state, and raises KeyboardInterrupt with a
    message that says where it is. The second one raises at once.

    Raises NonFiniteLossError, and SettingError for settings that do not fit.

    >>> x = np.linspace(-1, 1, 64).reshape(-1, 1)
    >>> loader = pg.data.DataLoader((x, 3 * x), batch_size=16, shuffle=True, seed=0)
    >>> model = nn.Linear(1, 1)
    >>> opt = optim.Adam(model.parameters(), lr=0.1)
    >>> history = pg.train.fit(model, loader, loss=ag.mse_loss, optimizer=opt, epochs=50)
    >>> history["loss"][-1] < 1e-3
    True
    """
    _check(loader, epochs, on_nonfinite, state_path, save_every, resume)
    check_functions("fit", model, loss=need_function("fit", "loss", loss), forward=forward)
    callbacks = _check_objects(optimizer, callbacks, generator)
    named, forward = named_metrics("fit", metrics), forward or pair_forward("fit", model)
    state = FitState(model, optimizer, History(), skipped_before=optimizer.skipped)
    saved = _Saved(state_path, state, loader, callbacks, generator)
    if resume:
        saved.load()
    guard = _Guard(model, optimizer, on_nonfinite)
    is_windowed = optimizer.accumulate_steps > 1
    is_weighted = is_windowed and optimizer.average
    if is_windowed and not optimizer._gathered:  # what an earlier loop may have left
        optimizer.zero_grad()

    display = _Bar(progress, epochs, state, loader)
    with mode(model, training=True), _Interrupts() as interrupts, display as bar:
        while state.is_trained or (state.epoch < epochs and state.stop is None):
            started = time.perf_counter()
            for batch in _rest_of_epoch(loader, state):
                samples = batch_length(batch)
                guard.remember()
                with grad_tape():
                    outputs, targets = pair_of("fit", forward, model, batch)
                    value = loss_of("fit", loss, outputs, targets)
                    total = mul(value, _number(samples, value)) if is_weighted else value
                if not named:
                    del outputs  # what nobody holds need not be kept
                if not is_windowed:
                    optimizer.zero_grad()
                optimizer.backward(total)
                state.lr = optimizer.lr
                if guard.allows(value, state):
                    state.updated = optimizer.step(count=samples if is_weighted else None)
                    state.loss = float(value.item())  # after the step, whose run computed it
                    guard.check(state)
                    numbers = {"loss": state.loss}
                    for name, metric in named.items():
                        arrays = as_arrays(outputs), as_arrays(targets)
                        numbers[name] = value_of("fit", name, metric, *arrays)
                    state.add(numbers, samples)
                state.step, state.batch = state.step + 1, state.batch + 1
                for callback in callbacks:
                    callback.on_step_end(state)
                bar.show()
                if save_every is not None and state.step % save_every == 0:
                    saved.save()
                interrupts.check(saved)
                if state.stop is not None:
                    break

            state.is_trained = True
            if flush:
                optimizer.flush()
            found = {}
            if validation is not None:
                poll = functools.partial(interrupts.check, saved)
                found = evaluated(model, validation, loss, named, forward, after_batch=poll)
            row = state.close_epoch()
            row.update({f"val_{name}": number for name, number in found.items()})
            row["seconds"] = time.perf_counter() - started
            state.history.rows.append(row)
            for callback in callbacks:
                callback.on_epoch_end(state)
            bar.show()
            saved.save()
            interrupts.check(saved)

    for callback in callbacks:
        callback.on_fit_end(state)
    state.history.stopped = state.stop
    return state.history


# ---- before the loop -----------------------------------------------------------------------------


def _check(
    loader: Any,
    epochs: int,
    on_nonfinite: str,
    state_path: Path | None,
    save_every: int | None,
    resume: bool,
) -> None:
    """Raise SettingError for settings that do not fit."""
    positive_integer("fit", "epochs", epochs)
    one_of("fit", "on_nonfinite", on_nonfinite, ("raise", "skip"))
    if save_every is not None:
        positive_integer("fit", "save_every", save_every)
    if state_path is None and (resume or save_every is not None):
        name = "resume" if resume else "save_every"
        raise SettingError(f"fit: {name} needs state_path=, the file of the state")
    if state_path is not None:
        need_path("fit", state_path)
        folder = os.path.dirname(os.path.realpath(state_path))
        if not os.path.isdir(folder):
            raise SettingError(f"fit: state_path needs a folder that is there; make {folder}")
    if isinstance(loader, (tuple, Mapping, np.ndarray)) or not isinstance(loader, Iterable):
        raise SettingError(
            f"fit: needs batches to loop over; got {type(loader).__name__}; make a loader of "
            "arrays: pg.data.DataLoader((x, y), batch_size=32, shuffle=True)"
        )


def _check_objects(optimizer: Any, callbacks: Any, generator: Any) -> list[Callback]:
    """Return the callbacks; raise DTypeError for objects of another kind than they must be."""
    if not isinstance(optimizer, Optimizer):
        raise DTypeError(f"fit: optimizer must be a pg.optim.Optimizer; got {shown(optimizer)}")
    callbacks = as_list("fit", "callbacks", callbacks, "callbacks")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise DTypeError(
                f"fit: callbacks must be pg.train.Callback objects; got {shown(callback)}"
            )
    chosen_generator("fit", generator)
    return callbacks


class _Saved:
    """The state of a run in its file."""

    def __init__(
        self,
        path: Path | None,
        state: FitState,
        loader: Any,
        callbacks: Sequence[Callback],
        generator: Generator | None,
    ) -> None:
        self.path, self.state = path, state
        self.callbacks = {f"{i} {type(c).__name__}": c for i, c in enumerate(callbacks)}
        parameters = {str(i): p for i, p in enumerate(state.optimizer.params)}
        self.parts: dict[str, Any] = {
            "model": state.model if isinstance(state.model, Module) else parameters,
            "optimizer": state.optimizer,
            "default_generator": default_generator,
        }
        if hasattr(loader, "state_dict"):
            self.parts["loader"] = loader
        if generator is not None:
            self.parts["generator"] = generator

    def save(self) -> None:
        if self.path is not None:
            states = {name: callback.state_dict() for name, callback in self.callbacks.items()}
            fit = self.state.state_dict()
            save_state(self.path, **self.parts, fit=fit, callbacks=states)

    def load(self) -> None:
        """Go on from the file, if it is there. Callbacks that it does not know start anew."""
        assert self.path is not None
        if not os.path.exists(self.path):
            return
        values = load_state(self.path, **self.parts)
        if "fit" not in values:
            raise SettingError(f"fit: {os.fspath(self.path)} is no state that fit saved")
        self.state.load_state_dict(values["fit"])
        for name, callback in self.callbacks.items():
            if name in values["callbacks"]:
                callback.load_state_dict(values["callbacks"][name])


# ---- in the loop ---------------------------------------------------------------------------------


def _rest_of_epoch(loader: Iterable[Any], state: FitState) -> Iterable[Any]:
    """Return the batches that are left: a loader that knows its position gives no others."""
    if state.is_trained:  # the run was stopped while it validated
        return ()
    if state.batch and not hasattr(loader, "load_state_dict"):
        return itertools.islice(loader, state.batch, None)
    return loader


def _number(value: float, like: Tensor) -> Tensor:
    """Return a number as an input of the graph: as a setting it would plan each size anew."""
    return make_tensor(float(value), device=like.device)


class _Guard:
    """What becomes of a loss that is not finite."""

    def __init__(self, model: Any, optimizer: Optimizer, on_nonfinite: str) -> None:
        self._optimizer = optimizer
        self._skips = on_nonfinite == "skip"
        buffers = model.buffers() if isinstance(model, Module) and self._skips else []
        self._buffers = buffers
        self._values: list[Any] = []

    def remember(self) -> None:
        """Keep what a forward pass may spoil: a batch norm's running statistics, for example."""
        self._values = [buffer._materialized() for buffer in self._buffers]

    def allows(self, loss: Tensor, state: FitState) -> bool:
        """Tell whether to step. If not, the weights, the buffers and the window are as before it.

        Only "skip" looks: it makes two graphs of a step, forward and backward, and the update.
        """
        if not self._skips:
            return True
        gradients = [p.grad for p in self._optimizer.params if p.grad is not None]
        if self._optimizer.loss_scale is not None:  # then the optimizer looks at them itself
            gradients = []
        norm = gradient_norm(gradients) if gradients else loss
        if math.isfinite(loss.item()) and math.isfinite(norm.item()):
            return True
        state.loss, state.updated = float(loss.item()), False
        state.skipped += 1
        self._optimizer.zero_grad(discard_window=True)
        for buffer, value in zip(self._buffers, self._values, strict=True):
            buffer._take_place(value)
        return False

    def check(self, state: FitState) -> None:
        """Raise NonFiniteLossError if the loss of a step that was made is not finite."""
        if not math.isfinite(state.loss):
            raise NonFiniteLossError(
                f"fit: the loss is {state.loss} in epoch {state.epoch + 1}, step {state.batch + 1} "
                f"of the epoch (update {self._optimizer.t}); find the operation with `with "
                "ag.detect_anomaly():` around fit, take a smaller learning rate or clip_norm=, or "
                "leave such steps out with on_nonfinite='skip'"
            )


class _Interrupts:
    """A with block in which the first Ctrl-C is only noted, so that the running step can end.

    The second raises as ever. So does the first where fit has no say over signals: in another
    thread than the main one, or where the program has a handler of its own.
    """

    def __init__(self) -> None:
        self._is_noted = False

    def __enter__(self) -> _Interrupts:
        is_main = threading.current_thread() is threading.main_thread()
        self._is_ours = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._is_ours:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._is_noted and kind is None:
            raise KeyboardInterrupt("fit: Ctrl-C came when the run had just ended")

    def _note(self, number: int, frame: Any) -> None:
        if self._is_noted:
            raise KeyboardInterrupt
        self._is_noted = True
        # Not print: the interrupted code may be in the middle of one.
        os.write(2, b"\nfit: stopping after this batch; Ctrl-C again stops at once\n")

    def check(self, saved: _Saved) -> None:
        """Save the state and raise KeyboardInterrupt, if Ctrl-C came."""
        if not self._is_noted:
            return
        saved.save()
        state = saved.state
        where = f"fit: stopped by Ctrl-C after {state.epoch} epochs and {state.batch} steps"
        if saved.path is None:
            raise KeyboardInterrupt(f"{where}; nothing was saved, since state_path= is not given")
        raise KeyboardInterrupt(
            f"{where}; the state is in {os.fspath(saved.path)}: call fit with resume=True to go on"
        )


class _Bar:
    """The progress bar: one for the whole run, and none where no terminal shows it."""

    def __init__(self, progress: bool, epochs: int, state: FitState, loader: Any) -> None:
        self._progress, self._epochs, self._state = progress, epochs, state
        try:
            self._total: int | None = epochs * len(loader)
        except TypeError:  # a loader that does not know how long it is
            self._total = None

    def __enter__(self) -> _Bar:
        from tqdm import tqdm

        self._bar = tqdm(
            total=self._total,
            initial=self._state.step,
            unit="step",
            disable=None if self._progress else True,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def show(self) -> None:
        """Show where the run is."""
        bar, state = self._bar, self._state
        if bar.disable:
            return
        shown = {"loss": state.loss}
        if state.history.rows:
            shown.update({n: v for n, v in state.row.items() if n.startswith("val_")})
        epoch = state.epoch + (1 if state.batch else 0)
        bar.set_description(f"epoch {epoch}/{self._epochs}", refresh=False)
        bar.set_postfix({name: f"{value:.4g}" for name, value in shown.items()}, refresh=False)
        bar.update(state.step - bar.n)
