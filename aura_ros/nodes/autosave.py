"""The memory's newest state in a file after every step, and what else a restart needs to go on exactly."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aura_ros.control.statistics import Rejections
from aura_ros.errors import UserError
from aura_ros.memory.state_file import State, read_noted, write_state
from aura_ros.nodes.policy_config import PolicyNodeConfig
from aura_ros.types import FloatArray

FAILED = "autosave failed"
# An episode's first stamp, nanoseconds, and what else tells it from others.
Episode = tuple[int, tuple[object, ...]]


@dataclass(frozen=True)
class Saved:
    """A memory's state, and where the policy was with it.

    episode: the one that runs. stamp_ns: of the last observation that the memory saw; chunk: float32 [horizon, dim], SI,
    what it was answered with, for it may not have arrived. budget: of `WriteBudget.saved`. None: not known.
    """

    state: State
    episode: Episode | None = None
    stamp_ns: int | None = None
    chunk: FloatArray | None = None
    budget: dict[str, Any] | None = None

    def is_before(self, episode: Episode | None) -> bool:
        """Whether another episode than the one that it is of has begun."""
        return None not in (self.episode, episode) and self.episode != episode

    def note(self) -> str:
        """All but the state, as text."""
        chunk = None if self.chunk is None else self.chunk.tolist()  # float32 as decimals and back is exact
        return json.dumps(
            {"episode": self.episode, "stamp_ns": self.stamp_ns, "chunk": chunk, "budget": self.budget}
        )

    @classmethod
    def of(cls, state: State, note: str) -> Saved:
        """Read a note; an empty one, of ~/save_memory, knows nothing. Raises ValueError, TypeError or KeyError."""
        if not note:
            return cls(state)
        values = json.loads(note)
        episode, stamp_ns, chunk, budget = (values[k] for k in ("episode", "stamp_ns", "chunk", "budget"))
        return cls(
            state,
            None if episode is None else (int(episode[0]), tuple(episode[1])),
            None if stamp_ns is None else int(stamp_ns),
            None if chunk is None else np.array(chunk, np.float32),
            None
            if budget is None
            else {"level": float(budget["level"]), "ages": [int(age) for age in budget["ages"]]},
        )


class Autosave:
    """Keeps the file of `memory.autosave`; without a path it does nothing. Safe to use from several threads.

    log: an object with warning. rejections: where a write that fails is counted.
    """

    def __init__(self, config: PolicyNodeConfig, weights_hash: str, rejections: Rejections, log: Any):
        self.path, self._restore = config.memory__autosave, config.memory__restore
        self._hash, self._rejections, self._log = weights_hash, rejections, log
        self._lock = threading.Lock()
        self._newest = (-1, -1)
        self._failing = False

    def save(self, saved: Saved, epoch: int, steps: int) -> None:
        """Replace the file as a whole; one that is older, by epoch and steps in it, than what was saved is left out.

        A write that fails is counted, and logged where the one before did not fail: the policy goes on.
        """
        if not self.path:
            return
        with self._lock:
            if (epoch, steps) < self._newest:
                return
            self._newest = (epoch, steps)
            try:
                write_state(saved.state, self._hash, self.path, epoch, saved.note())
            except UserError as error:
                self._rejections.add(FAILED)
                if not self._failing:
                    self._log.warning(f"{FAILED}: {error}; a restart would begin with an older memory")
                self._failing = True
            else:
                self._failing = False

    def read(self, check: Callable[[Saved], None]) -> Saved | None:
        """What the file holds; None where there is none, or it is not to be restored.

        check: raises UserError or ValueError for what does not fit.

        Raises UserError for a file that is broken or belongs to other weights: to begin with an empty memory instead is
        the user's decision.
        """
        if not self.path or not self._restore:
            return None
        try:
            if not Path(self.path).exists():
                return None
            saved = Saved.of(*read_noted(self._hash, self.path))
            check(saved)
            return saved
        except UserError as error:
            raise self._refused(str(error)) from None
        except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
            raise self._refused(f"'{self.path}' cannot be read ({' '.join(str(error).split())})") from None

    def _refused(self, reason: str) -> UserError:
        return UserError(
            f"memory.autosave: {reason}; to begin with an empty memory remove the file or set memory.restore to false"
        )
