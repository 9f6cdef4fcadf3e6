"""Equal seeds, thread counts and devices give equal bits, in one process as in the next."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import child

TRAIN = """
import hashlib, sys
import numpy as np
import pyggml as pg
from pyggml import ag, nn, optim

device, n_threads = sys.argv[1], int(sys.argv[2])
pg.set_device(device)
pg.set_num_threads(n_threads)
pg.manual_seed(3)
rng = np.random.default_rng(0)

class Net(nn.Module):
    def __init__(self):
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.embed = nn.Embedding(20, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.1, activation="gelu")
        self.cell = nn.GRU(32, 24)
        self.head = nn.Linear(24 + 8, 5)
    def forward(self, image, words):
        picture = ag.mean(ag.relu(self.norm(self.conv(image))), axis=(2, 3))
        text = self.cell(self.layer(self.embed(words), causal=True))[0]
        return self.head(ag.concat([picture, ag.mean(text, axis=1)], axis=1))

model = Net()
opt = optim.AdamW(model.parameters(), lr=1e-3, clip_norm=1.0)
losses = []
for _ in range(4):
    image = rng.standard_normal((16, 3, 12, 12), np.float32)
    words, labels = rng.integers(0, 20, (16, 10)), rng.integers(0, 5, 16)
    with ag.grad_tape():
        loss = ag.softmax_cross_entropy(model(ag.tensor(image), words), labels)
    opt.zero_grad()
    ag.backward(loss)
    opt.step()
    losses.append(loss.item())
values = [value for value in model.state_dict().values()]
print(hashlib.sha256(b"".join(np.ascontiguousarray(v).tobytes() for v in values)).hexdigest())
print(losses)
"""


@pytest.mark.parametrize("device, n_threads", [("cpu", 1), ("cpu", 2), ("reference", 1)])
def test_two_processes_train_to_equal_bits(device, n_threads):
    first, second = (child(TRAIN, device, n_threads) for _ in range(2))
    assert first == second


def test_thread_counts_agree_up_to_rounding():
    losses = [json.loads(child(TRAIN, "cpu", n).splitlines()[1]) for n in (1, 2, 3)]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


def test_infinities_nan_and_denormals_end_in_every_kernel():
    soak = Path(__file__).with_name("soak") / "numerics.py"
    done = subprocess.run(
        [sys.executable, soak, "--runs", "1", "--bound", "1e9"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 10
