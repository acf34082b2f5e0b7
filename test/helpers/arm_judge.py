"""What is wrong with a command: as the robot's own controllers refuse, and as a careful person beside it would say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from arm_chain import Array
from arm_config import ArmConfig

NS = 1_000_000_000
# Rows come as float32: a bound that is met exactly is kept.
SLACK, SMALL = 1 + 1e-5, 1e-6
# A position so near to where the arm is asks for no motion, rad.
STILL = 0.01


@dataclass(frozen=True)
class Point:
    """One point of a trajectory. time_ns: from its start. positions, velocities: as they were sent."""

    time_ns: int
    positions: Sequence[float]
    velocities: Sequence[float] = ()


class Judge:
    """Counts commands and violations. on_violation: called with each as one line, "kind: type number: what"."""

    def __init__(
        self, config: ArmConfig, names: Sequence[str], lower: Array, upper: Array, velocity: Array
    ) -> None:
        self.config, self.names = config, tuple(names)
        self.lower, self.upper, self.velocity = lower, upper, velocity
        self.commands: Counter[str] = Counter()
        self.violations: Counter[str] = Counter()
        self.on_violation: Callable[[str], None] = lambda line: None

    def count(self, kind: str) -> str:
        """A new command; returns how violations name it."""
        self.commands[kind] += 1
        return f"{kind} {self.commands[kind]}"

    def report(self, violation: str, command: str, text: str) -> None:
        """One violation."""
        self.violations[violation] += 1
        self.on_violation(f"{violation}: {command}: {text}")

    # -- what is refused: each reports and returns False ------------------------------------------------------

    def fits(self, command: str, values: Array, wanted: int) -> bool:
        """Whether there are as many finite numbers as needed."""
        if values.shape != (wanted,):
            self.report("size", command, f"{values.size} values; {wanted} are needed")
            return False
        if not np.isfinite(values).all():
            self.report("nan", command, f"values {values.tolist()}; finite numbers are needed")
            return False
        return True

    def names_fit(self, command: str, names: Sequence[str], partial: bool) -> bool:
        """Whether the joints are known and given once; all of them unless partial."""
        unknown = [name for name in names if name not in self.names]
        missing = [name for name in self.names if name not in names]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if not names:
            self.report("names", command, "no joint names")
        elif unknown:
            self.report("names", command, f"joint '{unknown[0]}' is unknown; known: {', '.join(self.names)}")
        elif twice:
            self.report("names", command, f"joint '{twice[0]}' is given twice")
        elif missing and not partial:
            self.report("partial", command, f"joint '{missing[0]}' is missing; partial goals are refused")
        else:
            return True
        return False

    def points_fit(self, command: str, points: Sequence[Point], start_ns: int | None, now_ns: int) -> bool:
        """Whether a trajectory is one that a joint_trajectory_controller takes. start_ns: None: now."""
        before = 0
        for number, point in enumerate(points):
            for what, values, optional in (
                ("positions", point.positions, False),
                ("velocities", point.velocities, True),
            ):
                if len(values) != len(self.names) and not (optional and not len(values)):
                    text = f"point {number} has {len(values)} {what} for {len(self.names)} joints"
                    self.report("size", command, text)
                    return False
                if not np.isfinite(np.asarray(values, np.float64)).all():
                    self.report("nan", command, f"point {number} has {what} {list(values)}")
                    return False
            if point.time_ns <= before:
                text = f"time_from_start of point {number} is {point.time_ns / NS:g} s; it must be after {before / NS:g} s"
                self.report("times", command, text)
                return False
            before = point.time_ns
        if len(points) and np.any(np.asarray(points[-1].velocities, np.float64)):
            self.report("times", command, "the last point has a velocity; a trajectory ends at rest")
            return False
        if len(points) and start_ns is not None and start_ns + before <= now_ns:
            late = (now_ns - start_ns - before) / NS
            self.report(
                "times", command, f"it ended {late:.3f} s ago; its stamp must be 0 (start now) or later"
            )
            return False
        return True

    # -- what is done all the same, within the arm's own limits -------------------------------------------------

    def positions(self, command: str, rows: Array, present: Array) -> None:
        """Judge positions [rows, joints] to be gone through from the present ones [joints]."""
        self._bounds(command, "position_limit", rows, self.lower - SMALL, self.upper + SMALL)
        steps = np.abs(np.diff(np.concatenate([present[None], rows]), axis=0))
        far = np.argwhere(steps > self.config.max_position_step * SLACK)
        if len(far):
            row, joint = far[0]
            before = "where it is" if row == 0 else "the point before"
            text = f"{self.names[joint]} at {rows[row, joint]:.4g} lies {steps[row, joint]:.4g} rad from {before}"
            self.report("step", command, f"{text}; allowed: {self.config.max_position_step:g}")

    def path_velocities(self, command: str, points: Sequence[Point]) -> None:
        """Judge how fast a trajectory goes from point to point; to the first the arm goes as fast as it can."""
        for first, second in pairwise(points):
            seconds = (second.time_ns - first.time_ns) / NS
            speed = (np.asarray(second.positions, np.float64) - first.positions) / seconds
            if self._bounds(
                command, "velocity_limit", speed[None], -self.velocity * SLACK, self.velocity * SLACK
            ):
                return

    def velocities(self, command: str, values: Array, before: Array) -> None:
        """Judge joint velocities [joints], after others."""
        self._bounds(command, "velocity_limit", values[None], -self.velocity * SLACK, self.velocity * SLACK)
        steps = np.abs(values - before)
        # A stop may be abrupt.
        if np.any(values) and np.any(steps > self.config.max_velocity_step * SLACK):
            joint = int(np.argmax(steps))
            text = f"{self.names[joint]} changes by {steps[joint]:.4g} rad/s"
            self.report("step", command, f"{text}; allowed: {self.config.max_velocity_step:g}")

    def twist(self, command: str, values: Array, before: Array) -> None:
        """Judge a twist [6], after another."""
        config = self.config
        for what, unit, part, most, step in (
            ("linear", "m/s", slice(0, 3), config.max_linear, config.max_linear_step),
            ("angular", "rad/s", slice(3, 6), config.max_angular, config.max_angular_step),
        ):
            size = float(np.linalg.norm(values[part]))
            change = float(np.linalg.norm(values[part] - before[part]))
            if size > most * SLACK:
                self.report("velocity_limit", command, f"{what} {size:.4g} {unit}; allowed: {most:g}")
            if np.any(values) and change > step * SLACK:
                self.report("step", command, f"{what} changes by {change:.4g} {unit}; allowed: {step:g}")

    def _bounds(self, command: str, violation: str, rows: Array, lower: Array, upper: Array) -> bool:
        outside = np.argwhere((rows < lower) | (rows > upper))
        if not len(outside):
            return False
        row, joint = outside[0]
        bounds = f"allowed: {lower[joint]:.4g} to {upper[joint]:.4g}"
        self.report(violation, command, f"{self.names[joint]} {rows[row, joint]:.4g}; {bounds}")
        return True
