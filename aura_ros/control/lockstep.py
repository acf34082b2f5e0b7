"""The rules of lockstep: one memory step per stamp, repeats answered from the cache."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from aura_ros.errors import UserError


class Verdict(Enum):
    """What to do with an observation of a given stamp."""

    STEP = auto()  # new: infer and step the memory
    REPEAT = auto()  # answered already: send the cached chunk again
    JUMP_BACK = auto()  # older than the last one answered: the clock went back


@dataclass
class Lockstep:
    """Remembers the last stamp that was answered and with what.

    step_ns: nanoseconds between memory steps that the memory was trained at (`memory_step_period` control steps).
    """

    step_ns: int
    stamp_ns: int | None = None
    answer: Any = None
    any_gap: bool = False

    def verdict(self, stamp_ns: int) -> Verdict:
        """Judge an observation's stamp. Raises UserError when observations come at another period."""
        if self.stamp_ns is None:
            return Verdict.STEP
        if stamp_ns == self.stamp_ns:
            return Verdict.REPEAT
        if stamp_ns < self.stamp_ns:
            return Verdict.JUMP_BACK
        gap = stamp_ns - self.stamp_ns
        if abs(gap - self.step_ns) > 1_000_000 and not self.any_gap:
            raise UserError(
                f"observations come {gap / 1e9:.3f} s apart, but this memory was trained to be stepped every "
                f"{self.step_ns / 1e9:.3f} s; execute the whole chunk before the next observation, or use a memory "
                "of that period"
            )
        return Verdict.STEP

    def answered(self, stamp_ns: int, answer: Any) -> None:
        """Remember what a stamp was answered with."""
        self.stamp_ns, self.answer, self.any_gap = stamp_ns, answer, False

    def clear(self) -> None:
        """Forget: a new epoch begins."""
        self.stamp_ns, self.answer, self.any_gap = None, None, False

    def allow_gap(self) -> None:
        """Take the next later stamp whatever its distance: someone said that this is right."""
        self.any_gap = True
