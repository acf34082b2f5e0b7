"""What a robot may be asked for: bounds on values and on steps from row to row. A violation is told, never clamped."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from aura_ros.errors import UserError
from aura_ros.types import ControlMode, FloatArray

# Rounding of float32, relative and near zero.
SLACK, TINY = 1e-5, 1e-9


@dataclass(frozen=True)
class Limits:
    """Bounds of each column of a chunk, SI.

    names: of the columns. lower, upper: of a row's values (positions, velocities, or displacements per row). step: of how
    far a row may move a column. Infinite where there is no bound.
    """

    names: tuple[str, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    step: tuple[float, ...]

    def __post_init__(self) -> None:
        for field in ("lower", "upper", "step"):
            values = getattr(self, field)
            if len(values) != len(self.names):
                raise UserError(
                    f"limits.{field} has {len(values)} numbers for {len(self.names)} columns ({', '.join(self.names)}); "
                    "give one each"
                )
            if any(math.isnan(value) for value in values):
                raise UserError(f"limits.{field} {list(values)} holds NaN; give numbers, .inf for no bound")
        for name, low, high, step in zip(self.names, self.lower, self.upper, self.step, strict=True):
            if not low < high:
                raise UserError(f"limits of {name} are {low} to {high}; lower must be below upper")
            if not step > 0:
                raise UserError(f"limits.step of {name} is {step}; it must be positive, .inf for no bound")

    def violation(
        self, mode: ControlMode, rows: FloatArray, period_s: float, before: FloatArray | None = None
    ) -> str:
        """What is wrong with rows, float32 [rows, columns], in one line; empty when nothing is.

        before: the position that the first row starts from, float32 [columns]; absolute positions only.
        """
        if not np.isfinite(rows).all():
            row, column = np.argwhere(~np.isfinite(rows))[0]
            return f"row {row} has {self.names[column]} = {rows[row, column]}; finite numbers are needed"
        # float32 rows: a value or a step of exactly the bound is allowed.
        lower, upper, most = (np.asarray(bound, np.float64) for bound in (self.lower, self.upper, self.step))
        outside = (rows < lower - np.abs(lower) * SLACK - TINY) | (
            rows > upper + np.abs(upper) * SLACK + TINY
        )
        if outside.any():
            row, column = np.argwhere(outside)[0]
            return (
                f"row {row} has {self.names[column]} = {rows[row, column]:.4g}; allowed: "
                f"{self.lower[column]:g} to {self.upper[column]:g}"
            )
        steps = step_sizes(mode, rows, period_s, before)
        far = steps > most * (1 + SLACK) + TINY
        if far.any():
            row, column = np.argwhere(far)[0]
            size = f"{steps[row, column]:.4g}"
            return f"row {row} moves {self.names[column]} by {size}; allowed in a row: {self.step[column]:g}"
        return ""


def step_sizes(mode: ControlMode, rows: FloatArray, period_s: float, before: FloatArray | None) -> FloatArray:
    """How far each row moves each column, SI, [rows, columns].

    rows: float32 [rows, columns]. before: the position before the first row, [columns]; only for absolute positions, whose
    first row is not judged without it.
    """
    if mode in (ControlMode.CARTESIAN_DELTA, ControlMode.JOINT_DELTA):
        return np.abs(rows)
    if mode == ControlMode.JOINT_VELOCITY:
        return np.abs(rows) * np.float32(period_s)
    first = rows[:1] if before is None else np.asarray(before, np.float32)[None]
    return np.abs(np.diff(np.concatenate([first, rows]), axis=0))
