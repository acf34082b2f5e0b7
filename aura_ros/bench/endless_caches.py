"""Attention caches as NumPy steps, batch 1: one that keeps every step, one that keeps a window of the same bytes.

They stand where the memory stands: its own encoder, projections and head around attention in place of fast weights,
so that a difference in time is one between the memories. Their answers mean nothing: nobody trained them so.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from aura_ros.memory.checkpoint import MemoryCheckpoint
from aura_ros.memory.folding import fold

FloatArray = npt.NDArray[np.float32]
# Weight of an age's logarithm in the scores: what a trained bias by relative age costs, whatever its values.
AGE_SLOPE = 0.1
# First steps that a window keeps for good (Xiao et al. 2024, "Efficient streaming language models with attention
# sinks").
SINKS = 4
FIRST_ROWS = 64


class _Surroundings:
    """Input -> query, key, value, and read -> output, into buffers of its own."""

    def __init__(self, checkpoint: MemoryCheckpoint) -> None:
        config = checkpoint.config
        folded = fold(config, checkpoint.arrays)
        self.dk, self.dv = config.dk, config.dv
        width = 2 * self.dk + self.dv
        weight, bias = folded.tail
        # Without the gate's rows, which the memory's encoder computes along with these.
        self._tail = (np.ascontiguousarray(weight[:width]), bias[:width].copy())
        self._first, self._head = folded.first, folded.head
        self._relu = config.input_kind == "encoder"
        self._first_out = _zeros(len(self._first[1]) if self._first else 0)
        self._tail_out = _zeros(width)
        self.query = self._tail_out[: self.dk]
        self.key = self._tail_out[self.dk : 2 * self.dk]
        self.value = self._tail_out[2 * self.dk :]
        self.read = _zeros(self.dv)
        self._head_out = [_zeros(len(bias)) for _, bias in self._head]
        self._scale = np.float32(1.0 / math.sqrt(self.dk))

    def encode(self, x: FloatArray) -> None:
        """Fill query (already scaled for attention), key and value from x, float32 [input_dim]."""
        if self._first is not None:
            self._first[0].dot(x, self._first_out)
            x = self._first_out
            x += self._first[1]
            if self._relu:
                np.maximum(x, 0.0, out=x)
        self._tail[0].dot(x, self._tail_out)
        self._tail_out += self._tail[1]
        self.query *= self._scale

    def attend(self, keys: FloatArray, values: FloatArray, ages: FloatArray, scores: FloatArray) -> None:
        """Fill the read: softmax(K q + ages)^T V over n rows; scores: scratch [n]."""
        keys.dot(self.query, scores)
        scores += ages
        scores -= scores.max()
        np.exp(scores, out=scores)
        total = scores.sum()
        scores.dot(values, self.read)
        self.read /= total

    def answer(self) -> FloatArray:
        """The head's output for the read, float32 [out_dim], valid until the next step."""
        x = self.read
        last = len(self._head) - 1
        for index, ((weight, bias), out) in enumerate(zip(self._head, self._head_out, strict=True)):
            weight.dot(x, out)
            out += bias
            if index < last:
                np.maximum(out, 0.0, out=out)
            x = out
        return x


class GrowingCache:
    """Every step's key and value, in arrays that double when full, up to a limit in bytes."""

    def __init__(self, checkpoint: MemoryCheckpoint, limit: int) -> None:
        self._around = around = _Surroundings(checkpoint)
        self.row_bytes = (around.dk + around.dv) * around.read.itemsize
        self._most = limit // self.row_bytes
        self.rows = 0
        self._allocate(min(FIRST_ROWS, self._most))

    def _allocate(self, capacity: int) -> None:
        around = self._around
        self._keys, self._values = (
            np.empty((capacity, around.dk), np.float32),
            np.empty((capacity, around.dv), np.float32),
        )
        self._scores = np.empty(capacity, np.float32)
        # By row for a full array: the newest row, of age 0, is the last; a part of the rows sees the end of it.
        self._ages = (-AGE_SLOPE * np.log1p(np.arange(capacity - 1, -1, -1.0))).astype(np.float32)

    @property
    def full(self) -> bool:
        """Whether the limit forbids another step."""
        return self.rows >= self._most

    @property
    def grows(self) -> bool:
        """Whether the next append has to copy everything into larger arrays first."""
        return self.rows == len(self._keys)

    @property
    def state_bytes(self) -> int:
        """Bytes of the keys and values held."""
        return self._keys[: self.rows].nbytes + self._values[: self.rows].nbytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the arrays they are held in, room to grow included."""
        return self._keys.nbytes + self._values.nbytes

    def append(self, x: FloatArray) -> None:
        """Take one step in; not when `full`. x: float32 [input_dim]."""
        around = self._around
        around.encode(x)
        if self.grows:
            keys, values, rows = self._keys, self._values, self.rows
            self._allocate(min(2 * rows, self._most))
            self._keys[:rows], self._values[:rows] = keys, values
        self._keys[self.rows], self._values[self.rows] = around.key, around.value
        self.rows += 1

    def read(self) -> FloatArray:
        """Attend from the step appended last over all of them; the output, float32 [out_dim]."""
        n = self.rows
        around = self._around
        ages = self._ages[len(self._ages) - n :]
        around.attend(self._keys[:n], self._values[:n], ages, self._scores[:n])
        return around.answer()


class WindowCache:
    """The first few steps and the latest ones, in rows that never move; ages are those within the cache."""

    def __init__(self, checkpoint: MemoryCheckpoint, rows: int) -> None:
        self._around = around = _Surroundings(checkpoint)
        self._sinks = sinks = min(SINKS, rows // 2)
        self._recent = recent = rows - sinks
        self._keys, self._values = _zeros(rows, around.dk), _zeros(rows, around.dv)
        self._scores = _zeros(rows)
        self._steps = 0
        # One line of biases for each step while it fills, then one for each place of the newest row.
        ages = np.zeros((rows + recent, rows))
        row = np.arange(rows)
        for step in range(rows):
            ages[step] = np.maximum(step - row, 0)
        for newest in range(recent):
            ages[rows + newest, :sinks] = rows - 1 - row[:sinks]
            ages[rows + newest, sinks:] = (newest - np.arange(recent)) % recent
        self._ages = (-AGE_SLOPE * np.log1p(ages)).astype(np.float32)

    @property
    def state_bytes(self) -> int:
        """Bytes of the live arrays of keys and values."""
        return self._keys.nbytes + self._values.nbytes

    def step(self, x: FloatArray) -> FloatArray:
        """Take one step in and attend from it; the output, float32 [out_dim]. x: float32 [input_dim]."""
        around, t, rows = self._around, self._steps, len(self._keys)
        around.encode(x)
        newest = (t - self._sinks) % self._recent
        slot = t if t < self._sinks else self._sinks + newest
        self._keys[slot], self._values[slot] = around.key, around.value
        n = min(t + 1, rows)
        line = t if t < rows else rows + newest
        around.attend(self._keys[:n], self._values[:n], self._ages[line, :n], self._scores[:n])
        self._steps += 1
        return around.answer()


def _zeros(*shape: int) -> FloatArray:
    return np.zeros(shape, dtype=np.float32)
