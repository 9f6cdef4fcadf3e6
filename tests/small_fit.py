"""A small regression to fit, shared by the tests of pyggml.train."""

from __future__ import annotations

import numpy as np

import pyggml as pg
from pyggml import ag, nn, optim, train
from pyggml.data import DataLoader

X = np.random.default_rng(0).standard_normal((22, 3)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5]]) + 0.3).astype(np.float32)


def make(seed=0, batch_size=5, hidden=4, dropout=0.0, **window):
    """A small regression: model, optimizer, loader."""
    pg.manual_seed(seed)
    layers = [nn.Linear(3, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, 1)]
    model = nn.Sequential(*layers)
    opt = optim.AdamW(model.parameters(), lr=0.05, **window)
    return model, opt, DataLoader((X, Y), batch_size=batch_size, shuffle=True, seed=seed)


def run(epochs=3, made=None, **settings):
    """Fit the small regression and return the history and what was made."""
    model, opt, loader = made or make()
    settings = {"loss": ag.mse_loss, "optimizer": opt, "epochs": epochs, **settings}
    return train.fit(model, loader, **settings), model, opt, loader


def weights(model):
    return np.concatenate([value.ravel() for value in model.state_dict().values()])


def without_times(history):
    return [{n: v for n, v in row.items() if n != "seconds"} for row in history]
