"""What a chunk player commands at each tick: a row, a hold or a stop. Pure Python; times and measurements are passed in.

| situation | deltas and velocities | positions |
| --- | --- | --- |
| a row is due | the row | the row |
| rows ran out, a chunk may still come | zero | the last row again |
| no chunk for `chunk_timeout`, fault, emergency stop, the clock went back | zero | the position measured when it stopped |
| stopped for a second | nothing: somebody else may drive | nothing |
| nothing was played yet | nothing | nothing |
"""

from __future__ import annotations

from collections.abc import Sequence
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
# SI (REP-103): what a row may be in.
UNITS = ("m", "rad", "m/s", "rad/s", "1", "")
# A shorter period is a busy loop, or a mistake.
SHORTEST_PERIOD_NS = 5_000_000
# A chunk from further ahead is of another clock.
FUTURE_NS = NS // 10
# A stop is sent again for so long, in case a message is lost.
STOP_NS = NS


@dataclass(frozen=True)
class ChunkKind:
    """What every chunk must be: columns in order, what a row means, nanoseconds between rows (0: as in the first one)."""

    columns: tuple[str, ...]
    mode: ControlMode
    period_ns: int = 0

    def mismatch(self, names: Sequence[str], units: Sequence[str], mode: int, period_ns: int) -> str:
        """How a chunk differs, in one line; empty when it does not."""
        if mode != self.mode:
            known = {m.value: m.name.lower() for m in ControlMode}
            return (
                f"chunk's control_mode is {known.get(mode, mode)}; this player plays {self.mode.name.lower()}"
            )
        if tuple(names) != self.columns:
            return f"chunk's columns are {', '.join(names)}; this player plays {', '.join(self.columns)}"
        if foreign := [unit for unit in units if unit not in UNITS]:
            return f"chunk's units are {', '.join(foreign)}; this player plays SI: m, rad, m/s, rad/s, 1"
        if period_ns < SHORTEST_PERIOD_NS or (self.period_ns and period_ns != self.period_ns):
            shortest = f"{SHORTEST_PERIOD_NS / NS:g} s or more"
            wanted = f"{self.period_ns / NS:g} s" if self.period_ns else shortest
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


NOTHING = Command(Kind.NOTHING)


@dataclass(frozen=True)
class Bounds:
    """How a player is bounded. Times in nanoseconds.

    deviation: of a joint's measured position from where it was told to be, rad or m, when a chunk comes; beyond it the arm
    does not follow, and what is planned from there is a fault. Infinite: not looked at.
    """

    limits: Limits
    timeout_ns: int
    cross_fade: int = 0
    deviation: float = np.inf


class Player:
    """Playback with limits, latched faults and stops. Not safe to use from several threads.

    unfaded: as in `Playback`. measures: whether a chunk needs measured positions to start from. Wherever `measured` is asked
    for it is float32 [columns], the joint positions now, None where they are not known; NaN for a column that has none.
    `now_ns` is the clock of the stamps, `steady_ns` one that never stands still: without a chunk it times out by either.
    """

    def __init__(
        self, kind: ChunkKind, bounds: Bounds, unfaded: tuple[int, ...] = (), measures: bool = False
    ) -> None:
        self.kind, self.bounds, self.measures = kind, bounds, measures
        self.playback = Playback(bounds.cross_fade, unfaded)
        self.rejections = Rejections()
        self.fault = ""
        self.emergency = False
        # Where the joints were told to be; None before that is known, and from a stop on.
        self.target: FloatArray | None = None
        self._stopped: FloatArray | None = None
        self._stopping_ns: int | None = None  # steady, since when
        self._fresh: tuple[int, int] | None = None  # when the last chunk was taken, by both clocks
        self._last_drop = ""
        self._state, self._reason = PlayState.IDLE, "waiting for a chunk"

    @property
    def state(self) -> tuple[PlayState, str]:
        """What it does, as of the last tick, and why, in one line; empty while playing."""
        return (PlayState.FAULT, self.fault) if self.fault else (self._state, self._reason)

    @property
    def waiting(self) -> bool:
        """Whether a chunk that comes now is to be played at once: the last tick found no row."""
        return self._state in (PlayState.IDLE, PlayState.HOLDING)

    def apply(self, bounds: Bounds) -> None:
        """Use other bounds from now on, also on what is left of a chunk: beyond them it is a fault."""
        self.bounds, self.playback.cross_fade = bounds, bounds.cross_fade
        left = self.playback.remaining()
        if len(left) and (wrong := self._judge(left, self.target)):
            self._latch(f"rows left to play are beyond the new limits: {wrong}")

    def offer(
        self,
        rows: Rows,
        kind: tuple[Sequence[str], Sequence[str], int, int],
        now_ns: int,
        steady_ns: int,
        measured: FloatArray | None,
    ) -> Taken:
        """Take a chunk, or count why not. What must not be played is a latched fault, never clamped.

        kind: its names, units, control mode and period, as in `ChunkKind.mismatch`.
        """
        if rows.epoch < self.playback.epoch:
            return self._dropped("of an older epoch")
        if self.fault:
            return self._dropped("it came during a fault")
        wrong = self.kind.mismatch(*kind)
        if not wrong and rows.data.ndim != 2:
            wrong = "chunk's values do not fit its columns"
        if wrong:
            return self._refused(wrong)
        if now_ns - rows.stamp_ns > self.bounds.timeout_ns:
            return self._dropped(f"too old: {(now_ns - rows.stamp_ns) / NS:.3f} s")
        if rows.stamp_ns - now_ns > FUTURE_NS:
            return self._dropped("from the future: synchronise the clocks")
        before = self.target if self.target is not None else measured
        # Also while it knows its target: whether the arm follows is not to be seen, nor where it could stop.
        if self.measures and measured is None:
            return self._dropped(UNMEASURED)
        if self.measures and (wrong := self._deviates(measured)):
            return self._refused(wrong)
        taken = self.playback.offer(rows, now_ns, lambda played: self._judge(played, before, kind[3]))
        if taken.refused:
            return self._refused(f"chunk {rows.sequence} refused: {taken.refused}", taken)
        if taken.dropped:
            return self._dropped(taken.dropped, taken)
        self.kind = replace(self.kind, period_ns=kind[3])
        self._fresh, self._last_drop = (now_ns, steady_ns), ""
        return taken

    def tick(self, now_ns: int, steady_ns: int, measured: FloatArray | None) -> Command:
        """What to command now; once a period."""
        if self.fault:
            return self._stop(steady_ns, measured)
        late = self._timed_out(now_ns, steady_ns)
        row = None if late else self.playback.next_row(now_ns)
        if row is not None:
            self._state, self._reason, self._stopping_ns = PlayState.PLAYING, "", None
            self._advance(row.values, measured)
            return Command(Kind.ROW, row.values, row)
        if self._state == PlayState.IDLE:
            return NOTHING
        self._state = PlayState.HOLDING
        if late:
            self._reason = (
                f"no chunk for more than {self.bounds.timeout_ns / NS:g} s: stopped{self._last_drop}"
            )
            self.playback.drop()
            return self._stop(steady_ns, measured)
        self._reason = "no rows left: holding until the next chunk"
        if self.kind.mode == ControlMode.JOINT_POSITION:
            return Command(Kind.HOLD, self.target)
        return Command(Kind.HOLD, stop_values(self.kind.mode, len(self.kind.columns), None))

    def watch(self, now_ns: int, steady_ns: int, measured: FloatArray | None) -> Command:
        """Between ticks, and where none come because time stands still: stops what has timed out, and plays nothing."""
        moving = self._state != PlayState.IDLE
        return (
            self.tick(now_ns, steady_ns, measured)
            if moving and self._timed_out(now_ns, steady_ns)
            else NOTHING
        )

    def positions_ahead(self) -> FloatArray:
        """Where the joints are to be after the row just played and all that are left, float32 [rows, columns]."""
        left = self.playback.remaining()
        if self.target is None:
            raise RuntimeError("a row was played without a target")
        ahead = [self.target[None]]
        if len(left):
            absolute = self.kind.mode == ControlMode.JOINT_POSITION
            ahead.append(left if absolute else self.target + np.cumsum(left, axis=0, dtype=np.float32))
        return np.concatenate(ahead)

    def stop(self, steady_ns: int, measured: FloatArray | None) -> Command:
        """Drop what is left and stop, for the end of the player; nothing where nothing was ever commanded."""
        self.playback.clear()
        if self._state == PlayState.IDLE:
            return NOTHING
        self._stopping_ns = None  # sent whatever was sent before
        command = self._stop(steady_ns, measured)
        self._state, self._reason = PlayState.IDLE, "waiting for a chunk"
        return command

    def clock_went_back(self) -> None:
        """Drop what is left, whose times mean nothing now, and stop as after a time-out."""
        self.playback.clear()
        self._fresh = (-(2**62), -(2**62)) if self._fresh is not None else None
        self.rejections.add("clock went back")
        self._last_drop = "; the clock went back"

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

    def _judge(self, rows: FloatArray, before: FloatArray | None, period_ns: int = 0) -> str:
        period_s = (period_ns or self.kind.period_ns) / NS
        return self.bounds.limits.violation(self.kind.mode, rows, period_s, before)

    def _deviates(self, measured: FloatArray | None) -> str:
        """Which joint is too far from where it was told to be, in one line; empty: none, or it is not known."""
        if measured is None or self.target is None:
            return ""
        far = np.abs(measured - self.target)
        beyond = np.flatnonzero(far > self.bounds.deviation)
        if not len(beyond):
            return ""
        column = int(beyond[0])
        return (
            f"{self.kind.columns[column]} is {far[column]:.3g} from where it was told to be; allowed: "
            f"{self.bounds.deviation:g}"
        )

    def _advance(self, values: FloatArray, measured: FloatArray | None) -> None:
        if not self.measures:
            return
        if self.kind.mode == ControlMode.JOINT_POSITION:
            self.target = values
            return
        start = self.target if self.target is not None else measured
        self.target = None if start is None else np.asarray(start + values, np.float32)

    def _timed_out(self, now_ns: int, steady_ns: int) -> bool:
        """Never before the first chunk, for nothing moves yet."""
        if self._fresh is None:
            return False
        return max(now_ns - self._fresh[0], steady_ns - self._fresh[1]) > self.bounds.timeout_ns

    def _stop(self, steady_ns: int, measured: FloatArray | None) -> Command:
        """Where it stops is measured once: a position that follows the arm would let it sink."""
        if self._state == PlayState.IDLE:
            return NOTHING
        if self._stopping_ns is None:
            self._stopping_ns = steady_ns
            # Not measured: where it was told to be last is nearer than anything else that is known.
            held = measured if measured is not None else self.target
            self._stopped = stop_values(self.kind.mode, len(self.kind.columns), held)
            self.target = None
            if self.measures and self.kind.mode != ControlMode.JOINT_POSITION:
                self._stopped = held
        elif steady_ns - self._stopping_ns > STOP_NS:
            return NOTHING
        return Command(Kind.STOP, self._stopped)

    def _latch(self, fault: str) -> None:
        self.playback.drop()
        self.fault = self.fault or fault

    def _refused(self, wrong: str, taken: Taken | None = None) -> Taken:
        self._latch(wrong)
        self.rejections.add(without_numbers(wrong))
        return taken or Taken(0, refused=wrong)

    def _dropped(self, why: str, taken: Taken | None = None) -> Taken:
        self.rejections.add(f"chunk {without_numbers(why)}")
        self._last_drop = f"; the last one was {why}"
        return taken or Taken(0, dropped=why)
