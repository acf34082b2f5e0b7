"""The memory over epochs: what each begins with, what a step makes of it, and what of it is kept on disk."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aura_ros.control.statistics import Rejections, SlidingWindow
from aura_ros.memory.state_file import State, read_state, write_state
from aura_ros.nodes.autosave import Autosave, Episode, Saved
from aura_ros.nodes.gate_settings import GateSettings
from aura_ros.nodes.policy_config import PolicyNodeConfig
from aura_ros.nodes.stepped import Stepped
from aura_ros.policy import ActionRejected, Policy, PolicyStep


class MemoryLife:
    """Counts and keeps what happens to one policy's memory. Only the thread that steps it calls `take` and `stepped`.

    The caller's lock is held for every method but `keep`, `read_saved`, `write_to` and `read_from`, which wait for a disk.
    step_s: seconds between memory steps.
    """

    def __init__(
        self, policy: Policy, config: PolicyNodeConfig, step_s: float, rejections: Rejections, log: Any
    ):
        self._memory, self._spec = policy.memory, policy.backbone.info.action
        self._gate = GateSettings(policy, step_s)
        self._wrote = SlidingWindow(config.write_rate_window)
        self._autosave = Autosave(config, policy.memory.weights_hash, rejections, log)
        self._empty = policy.memory.state_dict()
        self._steps_before = self._writes_before = 0  # this epoch
        self._is_new = False
        self.saved = Saved(self._empty)  # that after the latest step, or the one that the epoch begins with
        self.apply(config)

    def apply(self, config: PolicyNodeConfig) -> None:
        """Use run-time parameters from the next step on. Raises UserError, nothing changed, for what cannot be."""
        self._gate.apply(config)
        self._wrote.resize(config.write_rate_window)

    def begin(self, saved: Saved | None, episode: Episode | None) -> Saved:
        """An epoch begins, with a state or, None, empty; the memory itself takes it at the next `take`."""
        if saved is None:
            # A reset moves `random_write` to its next schedule.
            schedule = np.array(self._memory.episode + 1, np.int64)
            saved = Saved({**self._empty, "episode": schedule}, episode)
        self.saved, self._is_new = saved, True
        return saved

    def take(self) -> None:
        """Let the memory begin with the epoch's state, where it has not yet."""
        if not self._is_new:
            return
        self._memory.load_state_dict(self.saved.state)
        self._is_new = False
        # A saved state brings its counters; those of an epoch begin with it.
        self._steps_before, self._writes_before = self._memory.steps, self._memory.writes
        self._wrote.clear()
        self._gate.begin(self.saved.budget)

    def stepped(
        self,
        step: PolicyStep | ActionRejected,
        stamp_ns: int,
        epoch: int,
        sequence: int,
        episode: Episode | None,
    ) -> Stepped:
        """Count a memory step, keep the state after it, and say what there is to say about it."""
        memory, chunk = self._memory, step.chunk if isinstance(step, PolicyStep) else None
        wrote = step.memory_step.written_bytes > 0
        self._wrote.add(wrote)
        self._gate.stepped(step.memory_step)
        data = None if chunk is None else chunk.data
        self.saved = Saved(memory.state_dict(), episode, stamp_ns, data, self._gate.saved())
        return Stepped(
            memory_step=step.memory_step,
            hidden_state=step.hidden_state,
            chunk=chunk,
            frame_id=self._spec.frame_id,
            epoch=epoch,
            sequence=sequence,
            stamp_ns=stamp_ns,
            writes=memory.writes - self._writes_before,
            steps=memory.steps - self._steps_before,
            write_rate=self._wrote.mean(),
            state_norm=memory.state_norm,
            state_bytes=memory.state_bytes,
        )

    def keep(self, saved: Saved, epoch: int, steps: int) -> None:
        """Put a state into the file of `memory.autosave`, unless a later one is there: `steps` in the epoch later."""
        self._autosave.save(saved, epoch, steps)

    def read_saved(self) -> Saved | None:
        """What activation is to begin with; None: an empty memory. Raises UserError for a file that cannot be right."""
        return self._autosave.read(self._check)

    def _check(self, saved: Saved) -> None:
        self._memory.check_state(saved.state)
        shape = (self._spec.horizon, self._spec.dim)
        chunk, level = saved.chunk, (saved.budget or {"level": 0.0})["level"]
        if chunk is not None and not (chunk.shape == shape and np.isfinite(chunk).all()):
            raise ValueError(f"its chunk is {list(chunk.shape)}; expected {list(shape)} finite numbers")
        if not math.isfinite(level):
            raise ValueError(f"its budget is at {level}")

    def write_to(self, path: str, state: State, epoch: int) -> None:
        """Save a state as a file of the user's. Raises UserError."""
        write_state(state, self._memory.weights_hash, path, epoch)

    def read_from(self, path: str) -> State:
        """Read a state that this memory can begin with. Raises UserError."""
        state = read_state(self._memory.weights_hash, path)
        self._memory.check_state(state)
        return state
