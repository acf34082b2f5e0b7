"""What a chunk player commands at each tick: a row, a hold or a stop. Pure Python; times and measurements are passed in.

| situation | deltas and velocities | positions |
| --- | --- | --- |
| a row is due | the row | the row |
| rows ran out, a chunk may still come | zero | the last row again |
| no chunk for `chunk_timeout`, fault, emergency stop | zero | the position measured when it stopped |
| nothing was played yet | nothing | nothing |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np

from aura_ros.control.commands import stop_values
from aura_ros.control.limits import Limits
from aura_ros.control.playback import NS, Playback, PlayState, Row, Rows, Taken
from aura_ros.control.statistics import Rejections, without_numbers
from aura_ros.types import ControlMode, FloatArray

EMERGENCY_STOP = "emergency stop"
UNMEASURED = "joint positions were not measured"


@dataclass(frozen=True)
class ChunkKind:
    """What every chunk must be: columns in order, what a row means, nanoseconds between rows (0: as in the first one)."""

    columns: tuple[str, ...]
    mode: ControlMode
    period_ns: int = 0

    def mismatch(self, names: tuple[str, ...], mode: int, period_ns: int) -> str:
        """How a chunk differs, in one line; empty when it does not."""
        if mode != self.mode:
            known = {m.value: m.name.lower() for m in ControlMode}
            return (
                f"chunk's control_mode is {known.get(mode, mode)}; this player plays {self.mode.name.lower()}"
            )
        if names != self.columns:
            return f"chunk's columns are {', '.join(names)}; this player plays {', '.join(self.columns)}"
        if period_ns <= 0 or (self.period_ns and period_ns != self.period_ns):
            wanted = f"{self.period_ns / NS:g} s" if self.period_ns else "a positive time"
            return f"chunk's period is {period_ns / NS:g} s; allowed: {wanted}"
        return ""


class Kind(Enum):
    """What a command is."""

    NOTHING = auto()
    ROW = auto()
    HOLD = auto()
    STOP = auto()


@dataclass(frozen=True)
class Command:
    """What to send now. values: float32 [columns], None where nothing must be sent. row: the one played."""

    kind: Kind
    values: FloatArray | None = None
    row: Row | None = None


class Player:
    """Playback with limits, latched faults and stops. Not safe to use from several threads.

    timeout_s, cross_fade, unfaded: as in `Playback`. measures: whether a chunk needs measured positions to start from.
    """

    def __init__(
        self,
        kind: ChunkKind,
        limits: Limits,
        timeout_s: float,
        cross_fade: int = 0,
        unfaded: tuple[int, ...] = (),
        measures: bool = False,
    ) -> None:
        self.kind, self.limits, self.measures = kind, limits, measures
        self.playback = Playback(round(timeout_s * NS), cross_fade, unfaded)
        self.rejections = Rejections()
        self.fault = ""
        self.emergency = False
        # The robot's target: what was last sent. None until something was, and where nothing could be.
        self._target: FloatArray | None = None
        self._stopped: FloatArray | None = None
        self._stopping = False
        self._state, self._reason = PlayState.IDLE, "waiting for a chunk"

    @property
    def state(self) -> tuple[PlayState, str]:
        """What it does, as of the last tick, and why, in one line; empty while playing."""
        return (PlayState.FAULT, self.fault) if self.fault else (self._state, self._reason)

    def offer(
        self,
        rows: Rows,
        names: tuple[str, ...],
        mode: int,
        period_ns: int,
        now_ns: int,
        measured: FloatArray | None,
    ) -> Taken:
        """Take a chunk, or count why not. What must not be played is a latched fault, never clamped.

        measured: float32 [columns], the joint positions now; only positions need them. NaN: a column without a
        measurement, whose first step is not judged.
        """
        if rows.epoch < self.playback.epoch:
            return self._counted(Taken(0, dropped="of an older epoch"))
        if self.fault:
            return self._counted(Taken(0, dropped="it came during a fault"))
        wrong = self.kind.mismatch(names, mode, period_ns)
        if not wrong and rows.data.ndim != 2:
            wrong = "chunk's values do not fit its columns"
        if wrong:
            self._latch(wrong)
            return self._counted(Taken(0, refused=wrong))
        before = self._target if self._target is not None and not self._stopping else measured
        if self.measures and before is None:
            return self._counted(Taken(0, dropped=UNMEASURED))

        def judge(played: FloatArray) -> str:
            return self.limits.violation(self.kind.mode, played, period_ns / NS, before)

        taken = self.playback.offer(rows, now_ns, judge)
        if taken.accepted:
            self.kind = replace(self.kind, period_ns=period_ns)
        elif taken.refused:
            self._latch(f"chunk {rows.sequence} refused: {taken.refused}")
        return self._counted(taken)

    def tick(self, now_ns: int, measured: FloatArray | None) -> Command:
        """What to command now; once a period."""
        if self.fault:
            return self._stop(measured)
        row = self.playback.next_row(now_ns) if not self.playback.timed_out(now_ns) else None
        if row is not None:
            self._state, self._reason, self._stopping = PlayState.PLAYING, "", False
            self._target = row.values
            return Command(Kind.ROW, row.values, row)
        if self._state == PlayState.IDLE:
            return Command(Kind.NOTHING)
        self._state = PlayState.HOLDING
        if self.playback.timed_out(now_ns):
            self.playback.drop()
            self._reason = f"no chunk for more than {self.playback.timeout_ns / NS:g} s: stopped"
            return self._stop(measured)
        self._reason = "no rows left: holding until the next chunk"
        if self.kind.mode == ControlMode.JOINT_POSITION:
            return Command(Kind.HOLD, self._target)
        return Command(Kind.HOLD, stop_values(self.kind.mode, len(self.kind.columns), None))

    def _stop(self, measured: FloatArray | None) -> Command:
        """Where it stops is measured once: a position that follows the arm would let it sink."""
        if not self._stopping:
            self._stopping = True
            self._stopped = stop_values(self.kind.mode, len(self.kind.columns), measured)
        elif self._stopped is None:
            self._stopped = measured
        self._target = self._stopped
        return Command(Kind.STOP, self._stopped)

    def stop(self, measured: FloatArray | None) -> Command:
        """Drop what is left and stop, for the end of the player; nothing where nothing was ever commanded."""
        self.playback.clear()
        if self._state == PlayState.IDLE and not self.fault:
            return Command(Kind.NOTHING)
        command = self._stop(measured)
        self._state, self._reason = PlayState.IDLE, "waiting for a chunk"
        return command

    def clock_went_back(self) -> None:
        """Drop what is left: its times mean nothing now."""
        self.playback.clear()
        self.rejections.add("clock went back")

    def set_emergency(self, on: bool) -> None:
        """The emergency stop's input. It latches a fault."""
        self.emergency = on
        if on:
            self._latch(EMERGENCY_STOP)

    def clear_fault(self) -> tuple[bool, str]:
        """Unlatch. Returns whether that was allowed, and what the fault was or why not."""
        if self.emergency:
            return False, "the emergency stop is still pressed; release it first"
        fault, self.fault = self.fault, ""
        return True, f"cleared: {fault}" if fault else "there was no fault"

    def _latch(self, fault: str) -> None:
        self.playback.drop()
        self.fault = self.fault or fault

    def _counted(self, taken: Taken) -> Taken:
        reason = taken.dropped or taken.refused
        if reason:
            self.rejections.add(
                f"chunk {without_numbers(reason)}" if taken.dropped else without_numbers(reason)
            )
        return taken


def unbounded(columns: tuple[str, ...]) -> Limits:
    """Limits that allow everything finite."""
    none = (np.inf,) * len(columns)
    return Limits(columns, tuple(-np.inf for _ in columns), none, none)
