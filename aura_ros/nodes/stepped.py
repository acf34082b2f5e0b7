"""What the policy's worker takes and gives: where observations come from, and what a memory step made of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from aura_ros.control.statistics import SlidingWindow
from aura_ros.control.streams import Ready, Streams
from aura_ros.memory import MemoryStep
from aura_ros.types import ActionChunk, FloatArray, Observation


class Inputs(Protocol):
    """Where observations come from."""

    streams: Streams
    image_streams: list[str]
    callback_ms: SlidingWindow

    def decode(self, ready: Ready, instruction: str) -> Observation:
        """Turn messages into an observation; raises UserError for a broken one."""


@dataclass(frozen=True)
class Stepped:
    """One memory step and its chunk (None: withheld), ready to be published. hidden_state: float32 [hidden_dim]."""

    memory_step: MemoryStep
    hidden_state: FloatArray
    chunk: ActionChunk | None
    frame_id: str
    epoch: int
    sequence: int
    stamp_ns: int
    writes: int
    steps: int
    write_rate: float
    state_norm: float
    state_bytes: int


@dataclass(frozen=True)
class Restored:
    """A chunk that answered an observation before a restart, for the case that it never arrived."""

    chunk: ActionChunk
    epoch: int
    sequence: int
