"""The training loop, and what goes with it: history, metrics, callbacks."""

from ._callbacks import (
    Callback,
    CSVLogger,
    EarlyStopping,
    LearningRateLogger,
    SaveBest,
    TensorBoardLogger,
)
from ._evaluate import accuracy, evaluate, predict
from ._fit import fit
from ._state import FitState, History

__all__ = [
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "FitState",
    "History",
    "LearningRateLogger",
    "SaveBest",
    "TensorBoardLogger",
    "accuracy",
    "evaluate",
    "fit",
    "predict",
]
