"""Actions between a policy's SI rows and LIBERO's controller. NumPy only.

LIBERO's OSC_POSE controller takes seven numbers at 20 Hz: six deltas in controller units (1 is 0.05 m
or 0.5 rad a step) and a gripper command where -1 opens and +1 closes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from aura_ros.errors import UserError
from aura_ros.types import LIBERO_ACTION_SPEC, ActionSpec, ControlMode

ACTION_DIM = 7
GRIPPER = 6
CONTROLLER_CLIP = 1.0
# A row that went to float32 SI and back may exceed a bound by this much (controller units).
ROUNDING = 1e-6


class ActionError(UserError):
    """An action that must not be executed: wrong shape, not finite, or beyond the limit."""


def check_spec(spec: ActionSpec) -> None:
    """Refuse a spec whose rows LIBERO's controller cannot execute.

    Raises:
        UserError: not seven Cartesian deltas named as `LIBERO_ACTION_SPEC` names them, or another period.
    """
    wanted = LIBERO_ACTION_SPEC
    if spec.control_mode != ControlMode.CARTESIAN_DELTA or spec.names != wanted.names:
        raise UserError(
            f"actions are {spec.control_mode.name.lower()} {list(spec.names)}; LIBERO's controller takes "
            f"{wanted.control_mode.name.lower()} {list(wanted.names)}: use a LIBERO checkpoint"
        )
    if abs(spec.period_s - wanted.period_s) > 1e-9:
        raise UserError(
            f"action period is {spec.period_s} s; LIBERO's controller runs at {wanted.period_s} s "
            "(20 Hz): use a LIBERO checkpoint"
        )


def chunk_row_to_env(row_si: npt.ArrayLike, spec: ActionSpec = LIBERO_ACTION_SPEC) -> npt.NDArray[np.float64]:
    """One row of an action chunk, as LIBERO's environment takes it.

    Args:
        row_si: float32 [7], metres and radians per step; gripper 0 closed .. 1 open.
        spec: what the columns are; its `scale` is SI per controller unit.

    Returns:
        float64 [7], controller units; gripper 1 - 2 g, so -1 opens and +1 closes. Not limited here:
        `check_env_action` does that.

    Raises:
        ActionError: not seven finite numbers.
        UserError: a spec that LIBERO cannot execute.
    """
    check_spec(spec)
    row = _finite_row(row_si)
    action = row / np.asarray(spec.scale, dtype=np.float64)
    action[GRIPPER] = 1.0 - 2.0 * action[GRIPPER]
    return action


def check_env_action(action: npt.ArrayLike, limit: float) -> npt.NDArray[np.float64]:
    """The action as float64 [7], or an error that names the column, its value and the limit.

    Never clamped: the simulator accepts NaN and any size silently, and the damage shows much later.

    Raises:
        ActionError: not seven finite numbers, or one with a magnitude above `limit` controller units.
    """
    row = _finite_row(action)
    beyond = np.flatnonzero(np.abs(row) > limit + ROUNDING)
    if beyond.size:
        column = int(beyond[0])
        raise ActionError(
            f"action '{LIBERO_ACTION_SPEC.names[column]}' is {row[column]:g} controller units; allowed is "
            f"-{limit:g}..{limit:g}: check the action scale and the un-normalisation statistics"
        )
    return row


def is_saturated(action: npt.NDArray[np.float64]) -> bool:
    """Whether robosuite's controller will clip this action (an arm delta beyond 1 controller unit)."""
    return bool(np.any(np.abs(action[:GRIPPER]) > CONTROLLER_CLIP + ROUNDING))


def _finite_row(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    try:
        row = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ActionError(f"action {values!r} must be {ACTION_DIM} numbers") from error
    if row.shape != (ACTION_DIM,):
        raise ActionError(
            f"action has shape {list(row.shape)}; expected [{ACTION_DIM}]: "
            f"{', '.join(LIBERO_ACTION_SPEC.names)}"
        )
    bad = np.flatnonzero(~np.isfinite(row))
    if bad.size:
        name = LIBERO_ACTION_SPEC.names[int(bad[0])]
        raise ActionError(f"action '{name}' is {row[bad[0]]}; every action must be a finite number")
    return row
