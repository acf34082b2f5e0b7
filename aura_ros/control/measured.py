"""Measured joint positions, by name, from however many publishers share a topic."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from aura_ros.types import FloatArray

# A stamp that is further ahead is of another clock.
FUTURE_S = 0.1


class MeasuredJoints:
    """The newest position of each joint. Not safe to use from several threads.

    joints: those that are kept, in the order in which they are asked for. Times are seconds of a steady clock.
    """

    def __init__(self, joints: Sequence[str]) -> None:
        self.joints = tuple(joints)
        self._newest: dict[str, tuple[float, float]] = {}

    def update(
        self, names: Sequence[str], positions: Sequence[float], now_s: float, age_s: float, max_age_s: float
    ) -> str:
        """Take a message's joints; others are left alone. Returns what is wrong with it; empty: nothing.

        age_s: of its stamp, by the stamps' clock. A message that is too old or from the future, and a position that is not
        finite, are not taken: what is known grows old as if they had not come.
        """
        if not -FUTURE_S <= age_s <= max_age_s:
            if not any(name in self.joints for name in names):
                return ""
            return f"joint states are {age_s:.3f} s old; allowed: {max_age_s:g} s"
        if len(positions) < len(names):
            return f"joint states have {len(positions)} positions for {len(names)} names"
        wrong = ""
        for name, position in zip(names, positions, strict=False):
            if name not in self.joints:
                continue
            if math.isfinite(position):
                self._newest[name] = (float(position), now_s)
            else:
                wrong = f"joint '{name}' has position {position}"
        return wrong

    def positions(self, now_s: float, max_age_s: float) -> FloatArray | None:
        """Positions of all joints, float32 [joints]; None where one never came or is too old, or there are no joints."""
        found = [self._newest.get(joint) for joint in self.joints]
        if not found or any(entry is None or now_s - entry[1] > max_age_s for entry in found):
            return None
        return np.array([entry[0] for entry in found if entry is not None], np.float32)
