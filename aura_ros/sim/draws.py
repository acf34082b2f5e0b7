"""NumPy's global generator as robosuite's resets use it: seeded for them alone, the caller's state put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def global_generator(seed: int | None = None) -> Iterator[None]:
    """Give the caller's generator back after a block; seed it for the block unless None."""
    state = np.random.get_state()
    try:
        if seed is not None:
            np.random.seed(seed)
        yield
    finally:
        np.random.set_state(state)


class Draws:
    """Resets that follow one another after one seeding, any of them by its number."""

    def __init__(self) -> None:
        self._seed, self._number = -1, 0
        # The generator's before reset `_number`.
        self._state: Any = None

    def reset(self, place: Callable[[], None], seed: int, number: int) -> None:
        """Call `place` as the reset of that number (from 0) since the generator was seeded.

        Those before are drawn too, from where the last call left off if it can go on from there.
        """
        with global_generator():
            if seed == self._seed and number >= self._number:
                np.random.set_state(self._state)
            else:
                np.random.seed(seed)
                self._seed, self._number = seed, 0
            for _ in range(self._number, number):
                place()
            self._number, self._state = number, np.random.get_state()
            place()
