"""Plays chunks of actions row by row: which row comes next, where a new chunk takes over, what happens when none comes.

Pure Python with the time passed in. A chunk was computed from an observation that is older than the chunk; of its rows
those that correspond to what was executed since that observation are left out (latency-aligned splice), counted, not
estimated: a row that was not played moved nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from aura_ros.types import FloatArray

NS = 1_000_000_000
# Rows remembered as played, to count those since an observation: more than any chunk has.
REMEMBERED = 100_000


class PlayState(IntEnum):
    """What a player does. The numbers are those of `ChunkState.msg`."""

    IDLE = 0
    PLAYING = 1
    HOLDING = 2
    FAULT = 3


@dataclass(frozen=True)
class Rows:
    """A chunk as a player keeps it.

    data: float32 [horizon, columns], SI. stamp_ns: of the observation that it answers.
    """

    epoch: int
    sequence: int
    stamp_ns: int
    data: FloatArray


@dataclass(frozen=True)
class Row:
    """What to execute now.

    values: float32 [columns]. row: its number in the chunk. rows_left: after this one. first: the first that a chunk newly
    gives, for interfaces that take all that is left at once.
    """

    values: FloatArray
    epoch: int
    sequence: int
    row: int
    rows_left: int
    first: bool


@dataclass(frozen=True)
class Taken:
    """What became of a chunk that was offered.

    start: the first row that is played. dropped: why it is not played, though nothing is wrong with it; refused: what is
    wrong with it. Both empty: it is played next.
    """

    start: int
    dropped: str = ""
    refused: str = ""

    @property
    def accepted(self) -> bool:
        """Whether its rows are played next."""
        return not self.dropped and not self.refused


@dataclass
class Playback:
    """One chunk at a time, and what of it is left. Not safe to use from several threads.

    Offer chunks as they come; ask for the next row once a period. Times are nanoseconds of the clock of the stamps.

    cross_fade: rows over which a new chunk takes over from the old one's; 0: at once. unfaded: columns that take over at
    once all the same: half a gripper is neither plan.
    """

    cross_fade: int = 0
    unfaded: tuple[int, ...] = ()
    chunk: Rows | None = None
    _next: int = 0  # row of the chunk to be played next
    _first: bool = False
    _newest: tuple[int, int] = (-1, -1)  # epoch and sequence
    _played_ns: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def consumed_since(self, stamp_ns: int) -> int:
        """Rows of this epoch that were played at or after a time."""
        count = 0
        for played in reversed(self._played_ns):
            if played < stamp_ns:
                break
            count += 1
        return count

    def offer(self, rows: Rows, now_ns: int, judge: Callable[[FloatArray], str] = lambda rows: "") -> Taken:
        """Take a chunk over, from the row that comes after those consumed since its observation; or say why not.

        The first chunk of an epoch begins at row 0 and ends what is left of an older epoch. judge: what is wrong with the
        rows that would be played, float32 [rows, columns]; empty: nothing. A chunk that is not taken changes nothing of
        what is played, and one that is refused makes no epoch old.
        """
        epoch, sequence = self._newest
        if rows.epoch < epoch:
            return Taken(0, "of an older epoch")
        if rows.epoch == epoch and rows.sequence == sequence:
            return Taken(0, "repeated")
        if rows.epoch == epoch and rows.sequence < sequence:
            return Taken(0, "older than one that came before it")
        begins = rows.epoch > epoch
        # What was executed for another life of the memory is no part of this plan.
        start = 0 if begins else self.consumed_since(rows.stamp_ns)
        if start >= len(rows.data):
            self._newest = (rows.epoch, rows.sequence)
            return Taken(start, "all of its rows are past")
        data = rows.data if begins else self._faded(rows.data, start)
        if problem := judge(data[start:]):
            return Taken(start, refused=problem)
        if begins:
            self._played_ns.clear()
        self._newest = (rows.epoch, rows.sequence)
        self.chunk = Rows(rows.epoch, rows.sequence, rows.stamp_ns, data)
        self._next, self._first = start, True
        return Taken(start)

    def _faded(self, data: FloatArray, start: int) -> FloatArray:
        """The new rows, the first of them mixed with what is left of the old ones."""
        count = min(self.cross_fade, self.rows_left, len(data) - start)
        if self.chunk is None or count <= 0:
            return data
        old = self.chunk.data[self._next : self._next + count]
        share = (np.arange(1, count + 1, dtype=np.float32) / np.float32(count + 1))[:, None]
        faded = data.copy()
        faded[start : start + count] = (1 - share) * old + share * data[start : start + count]
        faded[:, list(self.unfaded)] = data[:, list(self.unfaded)]
        return faded

    def next_row(self, now_ns: int) -> Row | None:
        """The row to execute now, from here on counted as consumed; None when there is none left: hold."""
        if self.chunk is None or self._next >= len(self.chunk.data):
            return None
        chunk, number, first = self.chunk, self._next, self._first
        self._next, self._first = number + 1, False
        self._played_ns.append(now_ns)
        return Row(chunk.data[number], chunk.epoch, chunk.sequence, number, self.rows_left, first)

    @property
    def epoch(self) -> int:
        """The newest epoch that a chunk came of; -1 before the first."""
        return self._newest[0]

    @property
    def rows_left(self) -> int:
        """Rows not played yet."""
        return 0 if self.chunk is None else len(self.chunk.data) - self._next

    def remaining(self) -> FloatArray:
        """What is left to be played, float32 [rows, columns]; [0, 0] before the first chunk."""
        return np.zeros((0, 0), np.float32) if self.chunk is None else self.chunk.data[self._next :]

    def drop(self) -> None:
        """Drop what is left. Later chunks of the same epoch are taken."""
        self.chunk, self._next, self._first = None, 0, False

    def clear(self) -> None:
        """Forget everything but which epochs are old: the clock went back, or the player begins anew."""
        self.drop()
        self._played_ns.clear()
