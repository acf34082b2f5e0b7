"""From a player's values to the message that a robot's interface takes."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from builtin_interfaces.msg import Time
from geometry_msgs.msg import TwistStamped
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from aura_ros.control.commands import FLOAT64_ARRAY, JOINT_JOG, JOINT_TRAJECTORY, TWIST
from aura_ros.errors import UserError
from aura_ros.nodes.conversions import to_duration
from aura_ros.types import FloatArray


def command_class(command_type: str) -> Any:
    """The message class. Raises UserError where it is not installed."""
    if command_type == JOINT_JOG:
        try:
            from control_msgs.msg import JointJog
        except ImportError:
            raise UserError(
                "command_type 'joint_jog' needs control_msgs, which is not installed; install ros-<distro>-control-msgs"
            ) from None
        return JointJog
    return {TWIST: TwistStamped, JOINT_TRAJECTORY: JointTrajectory, FLOAT64_ARRAY: Float64MultiArray}[
        command_type
    ]


def twist(values: FloatArray, stamp: Time, frame_id: str) -> TwistStamped:
    """values: x y z roll pitch yaw, m/s and rad/s, or as scaled."""
    msg = TwistStamped()
    msg.header.stamp, msg.header.frame_id = stamp, frame_id
    linear, angular = msg.twist.linear, msg.twist.angular
    linear.x, linear.y, linear.z, angular.x, angular.y, angular.z = (float(value) for value in values)
    return msg


def trajectory(rows: FloatArray, period_s: float, joints: Sequence[str]) -> JointTrajectory:
    """Positions [rows, joints], the first one reached after one period. Stamp 0: it starts when it arrives."""
    msg = JointTrajectory(joint_names=list(joints))
    for number, row in enumerate(np.asarray(rows, np.float64), 1):
        point = JointTrajectoryPoint(time_from_start=to_duration(number * period_s))
        point.positions = array.array("d", row.tolist())
        msg.points.append(point)
    return msg


def values_array(values: FloatArray) -> Float64MultiArray:
    """Values in the controller's order; without a layout, as forward controllers take them."""
    return Float64MultiArray(data=array.array("d", np.asarray(values, np.float64).tolist()))


def joint_jog(values: FloatArray, stamp: Time, joints: Sequence[str], duration_s: float) -> Any:
    """Velocities of joints; duration: how long they are meant to last."""
    msg = command_class(JOINT_JOG)()
    msg.header.stamp = stamp
    msg.joint_names, msg.velocities = list(joints), np.asarray(values, np.float64).tolist()
    msg.duration = float(duration_s)
    return msg
