"""Counts and percentiles over a sliding window."""

from __future__ import annotations

import re
from collections import Counter, deque
from threading import Lock

import numpy as np


class SlidingWindow:
    """The latest `size` numbers and their percentiles. Safe to use from several threads."""

    def __init__(self, size: int):
        self._values: deque[float] = deque(maxlen=size)
        self._lock = Lock()

    def add(self, value: float) -> None:
        """Add a number; the oldest one leaves when the window is full."""
        with self._lock:
            self._values.append(float(value))

    def resize(self, size: int) -> None:
        """Keep so many of the latest numbers from now on."""
        with self._lock:
            if size != self._values.maxlen:
                self._values = deque(self._values, maxlen=size)

    def clear(self) -> None:
        """Forget every number."""
        with self._lock:
            self._values.clear()

    def percentiles(self, *which: float) -> tuple[float, ...]:
        """The percentiles (0..100, linear interpolation) of the window; 0.0 each while it is empty."""
        with self._lock:
            values = list(self._values)
        if not values:
            return tuple(0.0 for _ in which)
        return tuple(float(p) for p in np.percentile(values, which))

    def mean(self) -> float:
        """The mean of the window; 0.0 while it is empty."""
        with self._lock:
            return float(np.mean(self._values)) if self._values else 0.0

    def __len__(self) -> int:
        return len(self._values)


# Quoted names stay whole, digits of names (joint1, rgb8) too; sizes such as 410x308 are numbers.
_NUMBERS = re.compile(r"('[^']*')|(?<!\w)(?:-?(?:\d+x)?\d[\d.]*(?:e[+-]?\d+)?|-?nan|-?inf)(?!\w)")
OTHERS = "others"


def without_numbers(reason: str) -> str:
    """A reason with its numbers replaced by #, so that one kind of fault stays one reason."""
    return _NUMBERS.sub(lambda match: match[1] or "#", reason)


class Rejections:
    """How many messages were dropped or rejected, by reason. Safe to use from several threads.

    Beyond MOST reasons, new ones are counted together: a publisher must not make the status grow for ever.
    """

    MOST = 64

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = Lock()

    def add(self, reason: str) -> int:
        """Count one more; returns how often this reason occurred."""
        with self._lock:
            if reason not in self._counts and len(self._counts) >= self.MOST:
                reason = OTHERS
            self._counts[reason] += 1
            return self._counts[reason]

    def items(self) -> list[tuple[str, int]]:
        """(reason, count), sorted by reason."""
        with self._lock:
            return sorted(self._counts.items())
