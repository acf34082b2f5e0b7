"""The smallest whole backbone, and memories of its size: what the tests of policy and worker run on."""

from __future__ import annotations

import dataclasses
import threading
from functools import cache

import numpy as np

from aura_ros.memory import MemoryCheckpoint, MemoryConfig, NumpyMemory, build_untrained
from aura_ros.types import LIBERO_ACTION_SPEC, BackboneInfo, BackboneOutput, Observation

WAIT_S = 10.0
INFO = BackboneInfo(
    name="tiny",
    hidden_dim=24,
    proprio_dim=8,
    cameras=("agentview",),
    action=LIBERO_ACTION_SPEC,
    checkpoint="tiny",
    checkpoint_hash="0" * 64,
    parameters=0,
    trained=False,
)


class TinyBackbone:
    """Hidden state and chunk are random numbers seeded by the observation's stamp.

    poison: (row, column, value) put into every chunk. release: while cleared, inference and warm-up wait for it;
    `entered` says that one has begun. at_once: the most calls that were ever under way together.
    """

    def __init__(self, **info) -> None:
        self.info = dataclasses.replace(INFO, **info)
        self.poison: tuple[int, int, float] | None = None
        self.bad_hidden = False
        self.error: Exception | None = None
        self.warm_ups = self.closes = 0
        self.entered, self.release = threading.Event(), threading.Event()
        self.release.set()
        self.at_once = self._under_way = 0
        self._count = threading.Lock()

    def infer(self, observation: Observation) -> BackboneOutput:
        self._call()
        if self.error is not None:
            raise self.error
        rng = np.random.default_rng(observation.stamp_ns)
        hidden = rng.standard_normal(self.info.hidden_dim).astype(np.float32)
        chunk = rng.uniform(-1, 1, (8, 7)).astype(np.float32)
        for column in self.info.binary_columns:
            chunk[:, column] = chunk[:, column] > 0
        if self.poison:
            row, column, value = self.poison
            chunk[row, column] = value
        if self.bad_hidden:
            hidden[3] = np.nan
        return BackboneOutput(hidden, chunk, {"forward": 1.0})

    def warm_up(self, instruction: str | None = None) -> None:
        self.warmed_for = instruction
        self._call()
        self.warm_ups += 1

    def close(self) -> None:
        self.closes += 1

    def _call(self) -> None:
        with self._count:
            self._under_way += 1
            self.at_once = max(self.at_once, self._under_way)
        self.entered.set()
        released = self.release.wait(WAIT_S)
        with self._count:
            self._under_way -= 1
        assert released


def tiny_memory(residual: bool = True, **changes) -> NumpyMemory:
    """An untrained memory for `TinyBackbone`; without `residual` its head gives numbers other than zero."""
    return NumpyMemory.from_checkpoint(_untrained(residual, tuple(sorted(changes.items()))))


@cache
def _untrained(residual: bool, changes: tuple[tuple[str, int], ...]) -> MemoryCheckpoint:
    sizes = {"input_dim": INFO.hidden_dim, "out_dim": 56, "memory_step_period": 8, **dict(changes)}
    return build_untrained(MemoryConfig(input_kind="projection", residual=residual, **sizes))
