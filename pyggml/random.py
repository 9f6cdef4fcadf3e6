"""Random numbers that are functions of a seed and a counter.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011)
turns a key and a counter into four random words, so there is no hidden stream: draw n of a seed is
the same whichever device, thread or replay asks for it. A Generator only counts the draws.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Mapping

import numpy as np

from .checks import as_index, need_mapping, shown
from .errors import DTypeError, SettingError
from .graph import state

KEY_WORDS = 4  # seed and number of the draw, two words each

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)

_WORDS = 4
_LANES = 64  # blocks that the kernel makes side by side


def philox(key: tuple[int, int], counter: np.ndarray) -> np.ndarray:
    """Return four random 32-bit words, (4, n), for each of n counters of four words, (4, n).

    >>> [hex(word) for word in philox((0, 0), np.zeros((4, 1), np.uint64))[:, 0]]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter.astype(np.uint64)
    for i in range(_ROUNDS):
        k0, k1 = (
            np.uint64((k + i * weyl) & 0xFFFFFFFF) for k, weyl in zip(key, _WEYL, strict=True)
        )
        p, q = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (q >> _SHIFT) ^ c1 ^ k0, q & _LOW, (p >> _SHIFT) ^ c3 ^ k1, p & _LOW
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def random_words(key: np.ndarray, size: int) -> np.ndarray:
    """Return the words that the dropout kernel draws under a key for that many elements."""
    seed_low, seed_high, draw_low, draw_high = (int(word) for word in key.astype(np.uint32))
    groups = -(-size // (_WORDS * _LANES))
    block = np.arange(groups * _LANES, dtype=np.uint64)
    counter = np.stack(
        [block & _LOW, block >> _SHIFT, *np.broadcast_arrays(draw_low, draw_high, block)[:2]]
    )
    words = philox((seed_low, seed_high), counter).reshape(_WORDS, groups, _LANES)
    return words.transpose(1, 0, 2).reshape(-1)[:size]


class Generator:
    """A seed and the count of draws made from it; safe to share between threads.

    Without a seed it takes one from the operating system. Raises SettingError unless the seed is
    an integer of 64 bits.

    >>> Generator(7).state()
    {'seed': 7, 'draws': 0}
    """

    def __init__(self, seed: int | None = None) -> None:
        self._lock = threading.Lock()
        self.set_state({"seed": secrets.randbits(64) if seed is None else seed, "draws": 0})

    def __repr__(self) -> str:
        return f"Generator(seed={self._seed}, draws={self._draws})"

    def renew_lock(self) -> None:
        """Take a new lock: in a forked child nobody is left to release the old one."""
        self._lock = threading.Lock()

    def state(self) -> dict[str, int]:
        """Return what set_state needs to go on from here."""
        with self._lock:
            return {"seed": self._seed, "draws": self._draws}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Go on from a state that state() gave."""
        need_mapping("generator", "state", state)
        seed, draws = (_word64(name, state.get(name)) for name in ("seed", "draws"))
        with self._lock:
            self._seed, self._draws = seed, draws

    def key(self) -> np.ndarray:
        """Return the key of the next draw, four int32 words, and count it."""
        return np.array(self._next(), np.uint64).view(np.int32)

    def numpy(self) -> np.random.Generator:
        """Return NumPy's generator for the next draw, and count it.

        It is for numbers made on the host, such as initial weights.

        >>> Generator(0).numpy().integers(10, size=3) == Generator(0).numpy().integers(10, size=3)
        array([ True,  True,  True])
        """
        return np.random.Generator(np.random.Philox(key=np.array(self._next(), np.uint64)))

    def _next(self) -> tuple[int, int]:
        if state.trace is not None:
            state.trace.refuse_drawing()
        with self._lock:
            draw = self._draws
            self._draws = draw + 1
            return self._seed, draw


def _word64(name: str, value: object) -> int:
    number = as_index(value)
    if number is None:
        raise SettingError(f"generator: {name} must be an integer; got {shown(value)}")
    if not 0 <= number < 1 << 64:
        raise SettingError(f"generator: {name} must be in [0, 2^64); got {shown(number)}")
    return number


default_generator = Generator()
if hasattr(os, "register_at_fork"):  # another thread may have held the lock
    os.register_at_fork(after_in_child=default_generator.renew_lock)
"""What is drawn from where no generator is given."""


def chosen_generator(op: str, generator: Generator | None) -> Generator:
    """Return the generator that was given, the default one for None."""
    if generator is None:
        return default_generator
    if not isinstance(generator, Generator):
        raise DTypeError(f"{op}: generator must be a pg.Generator; got {shown(generator)}")
    return generator


def manual_seed(seed: int) -> Generator:
    """Start the default generator anew from a seed, and return it.

    Raises SettingError unless the seed is an integer of 64 bits.

    >>> pg.manual_seed(0)
    Generator(seed=0, draws=0)
    """
    default_generator.set_state({"seed": seed, "draws": 0})
    return default_generator
