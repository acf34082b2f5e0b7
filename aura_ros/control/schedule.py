"""When a real-time policy queries: once per period, and only about something new."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class QuerySchedule:
    """A grid of queries, `step_ns` nanoseconds apart by the steady clock."""

    step_ns: int
    _next_ns: int = 0
    _used: dict[str, int] = field(default_factory=dict)

    def due(self, stamps: dict[str, int], steady_ns: int) -> bool:
        """Whether to query now with messages of these stamps (stream -> nanoseconds); if so, they are used.

        The same messages again would be a memory step about nothing new. A late query shifts the grid instead of
        causing a burst.
        """
        if steady_ns < self._next_ns or stamps == self._used:
            return False
        self._used = dict(stamps)
        following = self._next_ns + self.step_ns
        self._next_ns = following if following > steady_ns else steady_ns + self.step_ns
        return True

    def clear(self) -> None:
        """Forget: a new epoch begins, and its first query is due at once."""
        self._next_ns, self._used = 0, {}
