"""When a real-time policy queries: once per period, about something new, and early where a player would run dry."""

from __future__ import annotations

from dataclasses import dataclass, field

NS = 1_000_000_000
# A report that is older says nothing about now: the player may be gone.
REPORT_MAX_AGE_NS = NS


@dataclass(frozen=True)
class PlayerReport:
    """What a chunk player said of itself. epoch: of the chunk it plays. arrival_ns: by the steady clock."""

    epoch: int
    rows_left: int
    arrival_ns: int

    def depth(self, epoch: int, steady_ns: int) -> int:
        """Rows left to play; 0 where the report is of another epoch or too old to count."""
        current = epoch == self.epoch and steady_ns - self.arrival_ns <= REPORT_MAX_AGE_NS
        return self.rows_left if current else 0

    def runs_dry(self, epoch: int, steady_ns: int, row_ns: int, latency_ns: int) -> bool:
        """Whether the rows left are played before a chunk asked for now would come, with a row to spare.

        row_ns: a row's length. latency_ns: how long a chunk takes to come. A report that does not count says nothing.
        """
        age_ns = steady_ns - self.arrival_ns
        if epoch != self.epoch or age_ns > REPORT_MAX_AGE_NS:
            return False
        return self.rows_left * row_ns - age_ns <= latency_ns + row_ns


@dataclass
class QuerySchedule:
    """A grid of queries, `step_ns` nanoseconds apart by the steady clock.

    next_ns: when the next one may be; due_ns: when the last one might have been; 0: at any time.
    """

    step_ns: int
    next_ns: int = 0
    due_ns: int = 0
    _last_ns: int | None = None
    _used: dict[str, int] = field(default_factory=dict)

    def due(self, stamps: dict[str, int], steady_ns: int, early: bool = False) -> bool:
        """Whether to query now with messages of these stamps (stream -> nanoseconds); if so, they are used.

        The same messages again would be a memory step about nothing new. A late query shifts the grid instead of
        causing a burst. early: do not wait for the grid, which then begins anew here; but never is a query less than half
        a period after the last one, for the memory was trained at its period.
        """
        begin_ns = self._begin_ns(early)
        if steady_ns < begin_ns or stamps == self._used:
            return False
        # Asked for early, it was not due before somebody said so.
        self.due_ns = steady_ns if early else begin_ns
        self._used, self._last_ns = dict(stamps), steady_ns
        following = self.next_ns + self.step_ns
        on_grid = self.next_ns <= steady_ns < following
        self.next_ns = following if on_grid else steady_ns + self.step_ns
        return True

    def _begin_ns(self, early: bool) -> int:
        """When the next query may be."""
        half = 0 if self._last_ns is None else self._last_ns + self.step_ns // 2
        return half if early else max(self.next_ns, half)

    def clear(self) -> None:
        """Forget: a new epoch begins, and its first query is due at once."""
        self.next_ns, self.due_ns, self._last_ns, self._used = 0, 0, None, {}
