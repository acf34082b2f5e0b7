"""From a row of a chunk to what a robot's interface takes: which pairs exist, and the arithmetic. Imports no rclpy.

| control mode | joint_trajectory | twist | joint_jog | float64_array |
| --- | --- | --- | --- | --- |
| cartesian delta | - | delta / period | - | - |
| joint delta | measured position + sum of deltas | - | delta / period | - |
| joint position | positions | - | - | positions |
| joint velocity | - | - | velocities | velocities |

A Cartesian delta can't drive joints without inverse kinematics, which is MoveIt Servo's job. A joint delta is no element
of an array: whether its controller takes positions or velocities can't be seen there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aura_ros.errors import UserError
from aura_ros.types import ControlMode, FloatArray

JOINT_TRAJECTORY, TWIST, JOINT_JOG, FLOAT64_ARRAY = "joint_trajectory", "twist", "joint_jog", "float64_array"
COMMAND_TYPES = (JOINT_TRAJECTORY, TWIST, JOINT_JOG, FLOAT64_ARRAY)
# Which control mode may drive which command.
ALLOWED: dict[ControlMode, tuple[str, ...]] = {
    ControlMode.CARTESIAN_DELTA: (TWIST,),
    ControlMode.JOINT_DELTA: (JOINT_TRAJECTORY, JOINT_JOG),
    ControlMode.JOINT_POSITION: (JOINT_TRAJECTORY, FLOAT64_ARRAY),
    ControlMode.JOINT_VELOCITY: (JOINT_JOG, FLOAT64_ARRAY),
}
# Columns of a twist, in the order of geometry_msgs/Twist's linear and angular part.
TWIST_COLUMNS = ("x", "y", "z", "roll", "pitch", "yaw")


def check_pair(mode: ControlMode, command_type: str) -> None:
    """Refuse a control mode that can't drive a command. Raises UserError naming both and what goes."""
    if command_type not in ALLOWED[mode]:
        raise UserError(
            f"control_mode {mode.name.lower()} cannot drive command_type '{command_type}'; it drives: "
            f"{', '.join(ALLOWED[mode])}"
        )


def check_columns(names: Sequence[str], gripper: str, command_type: str, joints: Sequence[str]) -> None:
    """Refuse columns that a command has no place for.

    names: of the chunk's columns. gripper: the one that goes to its own topic; empty: none. joints: those of the robot's
    controller, in its order; for a twist unused. Raises UserError naming what is missing or left over.
    """
    if gripper and gripper not in names:
        raise UserError(
            f"gripper column '{gripper}' is not in the chunk; its columns are: {', '.join(names)}"
        )
    columns = [name for name in names if name != gripper]
    wanted = list(TWIST_COLUMNS) if command_type == TWIST else list(joints)
    if command_type == TWIST and columns != wanted:
        raise UserError(f"a twist needs the columns {', '.join(wanted)}; the chunk has: {', '.join(columns)}")
    if sorted(columns) != sorted(wanted):
        missing = [name for name in wanted if name not in columns]
        left = [name for name in columns if name not in wanted]
        raise UserError(
            f"joints are {', '.join(wanted) or 'none'}, the chunk's columns {', '.join(columns)}: "
            f"missing {', '.join(missing) or 'none'}, left over {', '.join(left) or 'none'}; map them with joint_names"
        )


def command_values(mode: ControlMode, row: FloatArray, period_s: float) -> FloatArray:
    """What a row asks of a velocity or position interface, SI, as many columns: delta / period is a velocity."""
    if mode in (ControlMode.CARTESIAN_DELTA, ControlMode.JOINT_DELTA):
        return np.asarray(row / np.float32(period_s), np.float32)
    return row


def stop_values(mode: ControlMode, columns: int, measured: FloatArray | None) -> FloatArray | None:
    """The safe stop: zero for deltas and velocities, the measured positions for positions, never zero.

    None where the positions were never measured: then nothing must be sent.
    """
    if mode == ControlMode.JOINT_POSITION:
        return measured
    return np.zeros(columns, np.float32)
