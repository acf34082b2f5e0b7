"""A budget of writes: a slow controller that raises the gate's threshold while the memory is written too often."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

# How much one write raises the threshold. From 0.5 to closed it takes about five writes more than the budget has.
GAIN = 0.1


@dataclass
class WriteBudget:
    """Integral control of the threshold, per memory step, between the gate's own threshold and 1 (closed).

    Ask for `threshold` before a step and tell `after` it whether W changed. In no `window` steps in a row (or as many as
    one write takes, where that is more) are there more writes than the budget has: when it is used up, the gate is closed.

    share: writes per memory step; 0: no budget, and the threshold is always the own one. own: the threshold to return to,
    0..1. window: memory steps.
    """

    share: float = 0.0
    own: float = 0.5
    window: int = 100
    _level: float = 0.0
    _steps: int = 0
    _written: deque[int] = field(default_factory=deque)  # numbers of the steps that wrote

    def __post_init__(self) -> None:
        self.change(self.share, self.own, self.window)

    @property
    def threshold(self) -> float:
        """The threshold of the next step."""
        if self.share <= 0:
            return self.own
        return 1.0 if self._used_up() else min(self._level, 1.0)

    def after(self, wrote: bool) -> None:
        """Take a step into account."""
        if self.share <= 0:
            return
        closed = self._used_up()
        self._steps += 1
        if wrote:
            self._written.append(self._steps)
        # While the budget is used up the gate has no say: integrating would open it for a burst afterwards.
        if not closed:
            # Above 1 it stays as far as one write takes it: cut off there, a gate that is always sure would write twice
            # as often.
            self._level = max(self._level + GAIN * (wrote - self.share), self.own)

    def change(self, share: float, own: float, window: int) -> None:
        """Another budget from the next step on; what was written stays counted."""
        self.share, self.own, self.window = share, own, window
        self._level = max(self._level, own) if share > 0 else own

    def clear(self) -> None:
        """Forget what was written: a new life of the memory begins."""
        self._level, self._steps = self.own, 0
        self._written.clear()

    def saved(self) -> dict[str, object]:
        """What `restore` needs to go on exactly, as JSON takes it."""
        return {"level": self._level, "ages": [self._steps - step for step in self._written]}

    def restore(self, level: float, ages: list[int]) -> None:
        """Go on from what `saved` gave."""
        self._level, self._steps = max(level, self.own), max(ages, default=0) + 1
        self._written = deque(self._steps - age for age in ages)

    def _used_up(self) -> bool:
        """Whether a write in the next step would be one too many of the latest `window` steps."""
        window = max(self.window, math.ceil(1 / self.share - 1e-9))
        while self._written and self._written[0] <= self._steps + 1 - window:
            self._written.popleft()
        return len(self._written) + 1 > self.share * window + 1e-9
