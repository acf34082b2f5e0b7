"""The newest message of each observation stream, and whether they make one usable observation.

Freshness, not presence: a missing, stale, future or skewed stream means hold, never a zero fill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition
from typing import Any

NS = 1_000_000_000


@dataclass(frozen=True)
class Sample:
    """One message as it arrived. stamp_ns: its own clock; arrival_ns: the steady clock of this process."""

    value: Any
    stamp_ns: int
    arrival_ns: int


@dataclass(frozen=True)
class Ready:
    """A usable set: every stream's message, and the stamp that the observation gets (the oldest of them)."""

    samples: dict[str, Sample]
    stamp_ns: int


@dataclass(frozen=True)
class Hold:
    """No usable set, and why, in one line.

    missing: nothing is wrong, something just has not come yet. cause: the reason without its numbers, for
    counting; empty where there is nothing to count.
    """

    reason: str
    missing: bool = False
    cause: str = ""


class Streams:
    """Depth-1 store of observation streams. `put` is all that a subscription's callback does.

    steady_ns: the steady clock, injected for tests.
    """

    def __init__(self, names: list[str], steady_ns: Callable[[], int]):
        self.names = list(names)
        self.changed = Condition()
        self._steady_ns = steady_ns
        self._newest: dict[str, Sample] = {}
        self._stamps: dict[str, int] = {}
        self._version = 0

    def put(self, name: str, value: Any, stamp_ns: int) -> None:
        """Keep the newest message of a stream and wake whoever waits on `changed`."""
        with self.changed:
            self._newest[name] = Sample(value, stamp_ns, self._steady_ns())
            self._stamps[name] = stamp_ns
            self._version += 1
            self.changed.notify_all()

    def clear(self) -> None:
        """Forget every message."""
        with self.changed:
            self._newest.clear()
            self._stamps.clear()
            self._version += 1
            self.changed.notify_all()

    def discard(self, stamp_ns: int) -> None:
        """Forget the messages of this stamp: they were used."""
        with self.changed:
            self._newest = {n: s for n, s in self._newest.items() if s.stamp_ns != stamp_ns}

    @property
    def version(self) -> int:
        """Counts changes, so that a waiter can tell whether there is anything new."""
        return self._version

    def snapshot(self) -> dict[str, Sample]:
        """The newest message of every stream that has one."""
        with self.changed:
            return dict(self._newest)

    def ages_ms(self, now_ns: int) -> dict[str, float]:
        """Age of each stream's newest message, used or not, by the given clock, milliseconds; -1 before the first."""
        with self.changed:
            stamps = dict(self._stamps)
        return {n: (now_ns - stamps[n]) / 1e6 if n in stamps else -1.0 for n in self.names}

    def joined(self) -> Ready | Hold:
        """Lockstep: a set is usable when all stamps are equal, whatever the machine's speed."""
        newest = self.snapshot()
        missing = [n for n in self.names if n not in newest]
        if missing:
            return Hold(f"waiting for {', '.join(missing)}", missing=True)
        stamps = {newest[n].stamp_ns for n in self.names}
        if len(stamps) > 1:
            newest_stamp = max(stamps)
            late = [n for n in self.names if newest[n].stamp_ns != newest_stamp]
            return Hold(f"waiting for {', '.join(late)} of stamp {newest_stamp / NS:.3f} s", missing=True)
        return Ready({n: newest[n] for n in self.names}, stamps.pop())

    def fresh(
        self, now_ns: int, max_age_ns: dict[str, int], max_skew_ns: int, max_future_ns: int
    ) -> Ready | Hold:
        """Real time: every stream young enough, none from the future, all close together.

        now_ns: the node's clock. The steady clock is watched beside it, because simulated time stands still
        when the simulator dies.
        """
        newest = self.snapshot()
        missing = [n for n in self.names if n not in newest]
        if missing:
            return Hold(f"waiting for {', '.join(missing)}", missing=True)
        steady = self._steady_ns()
        for name in self.names:
            sample, limit = newest[name], max_age_ns[name]
            age = now_ns - sample.stamp_ns
            if age > limit:
                return Hold(
                    f"{name} is {age / NS:.3f} s old; allowed: {limit / NS:.3f} s", cause=f"{name} too old"
                )
            if -age > max_future_ns:
                return Hold(
                    f"{name} is stamped {-age / NS:.3f} s in the future; synchronise the clocks",
                    cause=f"{name} in the future",
                )
            silent = steady - sample.arrival_ns
            if silent > limit:
                return Hold(
                    f"{name} has been silent for {silent / NS:.3f} s; allowed: {limit / NS:.3f} s",
                    cause=f"{name} silent",
                )
        stamps = [newest[n].stamp_ns for n in self.names]
        skew = max(stamps) - min(stamps)
        if skew > max_skew_ns:
            return Hold(
                f"streams are {skew / NS:.3f} s apart; allowed: {max_skew_ns / NS:.3f} s",
                cause="streams too far apart",
            )
        return Ready({n: newest[n] for n in self.names}, min(stamps))
