"""The panel's arms: one frozen backbone, and what remembers beside it, each stepped as a policy steps its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aura_ros.errors import UserError
from aura_ros.memory import MemoryStep, NumpyMemory
from aura_ros.memory.baseline_config import GROWING, WINDOW
from aura_ros.memory.baseline_file import FORMAT as BASELINE_FORMAT
from aura_ros.memory.baseline_file import load_baseline
from aura_ros.memory.baselines import Baseline
from aura_ros.memory.checkpoint import format_of
from aura_ros.types import FloatArray

# Arms whose memory has weights of its own, and the stem of its file; the others run on aura's, or on none.
TRAINED = {
    "aura": "aura",
    "aura-always": "aura-always",
    "kv": "kv",
    "window": "window",
    "random": "random",
    "periodic": "periodic",
}
# Without a memory; the latter is told its target.
WITHOUT = ("base", "oracle")
# Aura's weights, and something done to its writes or its state.
ALTERED = ("first-k", "swap", "zero")
ARMS = (*WITHOUT, *TRAINED, *ALTERED)


@dataclass
class Remembered:
    """One arm's memory in one episode, with what it did, in order of queries."""

    memory: Any
    fired: list[bool]
    writes: int = 0
    bytes_first: int = 0
    bytes_last: int = 0


class CachedBaseline:
    """A baseline stepped query by query, with the interface that a policy asks of a memory.

    What is carried is its rows, and their bytes are the baseline's own count. Only caches that attend to all rows, or to
    the latest.
    """

    def __init__(self, module: Baseline) -> None:
        if module.config.kind not in (GROWING, WINDOW) or (
            module.config.kind == WINDOW and module.config.sinks
        ):
            raise UserError(
                f"baseline '{module.config.kind}' is no arm of the panel; use kv or window without sinks"
            )
        self.module, self.config = module, module.config
        self._most = module.config.rows if module.config.kind == WINDOW else None
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def step(self, hidden: FloatArray) -> MemoryStep:
        """hidden: float32 [input_dim]."""
        module: Any = self.module
        z = module.encoder(torch.from_numpy(hidden)[None])
        self._rows.append((module.to_k(z), module.to_v(z)))
        if self._most is not None:
            del self._rows[: -self._most]
        keys, values = (torch.stack(parts, dim=1) for parts in zip(*self._rows, strict=True))
        ages = torch.arange(len(self._rows) - 1, -1, -1)
        read, _ = module.attend(module.to_q(z), keys, values, ages)
        output, _, _ = module.head(read, z)
        return MemoryStep(True, 1.0, 0.0, 0.0, output[0].numpy(), module.config.row_bytes, 0.0)

    def reset(self) -> None:
        """Forget."""
        self._rows.clear()

    @property
    def state_bytes(self) -> int:
        """Of what is carried now."""
        return self.module.state_bytes(len(self._rows))


class ForcedMemory:
    """A memory of which something else than its gate decides: force(step) -> write or not."""

    def __init__(self, memory: NumpyMemory, force: Callable[[int], bool]) -> None:
        self._memory, self._force = memory, force
        self.config = memory.config
        self._steps = 0

    def step(self, hidden: FloatArray) -> MemoryStep:
        """As `NumpyMemory.step`."""
        self._steps += 1
        return self._memory.step(hidden, self._force(self._steps - 1))

    def reset(self) -> None:
        """As `NumpyMemory.reset`."""
        self._steps = 0
        self._memory.reset()

    @property
    def state_bytes(self) -> int:
        """As `NumpyMemory.state_bytes`."""
        return self._memory.state_bytes


def load_arm(path: Path) -> Any:
    """A memory or a baseline, whichever the file holds. Raises UserError."""
    if format_of(path) == BASELINE_FORMAT:
        return CachedBaseline(load_baseline(path))
    return NumpyMemory.load(path)


def arm_file(folder: Path, arm: str) -> Path:
    """Where the weights of an arm are. Raises UserError if they are not there."""
    stem = TRAINED.get(arm, "aura")
    path = folder / f"{stem}.safetensors"
    if not path.is_file():
        raise UserError(
            f"arm '{arm}' needs '{path}', which is missing; train it with `aura train memory --arm {stem}`, "
            "or leave the arm out"
        )
    return path


def follow(memory: Any, hidden: np.ndarray[Any, Any]) -> Remembered:
    """Step a memory over the hidden states of a hold, [Q, hidden_dim], from its empty state."""
    memory.reset()
    done = Remembered(memory, [])
    for row in hidden:
        note(done, memory.step(row))
    return done


def note(done: Remembered, step: MemoryStep) -> None:
    """Count a step."""
    done.fired.append(bool(step.written_bytes))
    done.writes += bool(step.written_bytes)
    done.bytes_last = int(done.memory.state_bytes)
    done.bytes_first = done.bytes_first or done.bytes_last
