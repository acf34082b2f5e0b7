"""A stand-in for a robot: a kinematic arm behind ROS topics, which judges the commands that it gets.

    python test/helpers/stand_in_arm.py --ros-args -p command_type:=twist -p camera_rate:=20.0

Parameters: see `arm_config.ArmConfig`. It takes one kind of command (on `joint_trajectory`, `delta_twist_cmds`,
`delta_joint_cmds` or `commands`), `gripper_command`, `estop`, `~/expect_silence` and `~/fault`; it publishes
`joint_states`, `ee_pose`, images and `~/violations`. INT or TERM: one line of JSON on stdout, status 0.
"""

from __future__ import annotations

import array
import json
import math
import os
import random
import signal
import sys
import threading
import time

if __name__ == "__main__":
    # Before what takes a second to import: also then a signal ends it quietly.
    for _number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(_number, lambda *_: os._exit(0))

import numpy as np
from arm_chain import quaternion
from arm_config import FLOAT64_ARRAY, JOINT_JOG, JOINT_TRAJECTORY, TOPICS, TWIST, ArmConfig
from arm_judge import NS, Point
from arm_model import BASE, Arm
from geometry_msgs.msg import PoseStamped, TwistStamped
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import Bool, Float64MultiArray, String
from trajectory_msgs.msg import JointTrajectory

from aura_ros.errors import UserError
from aura_ros.nodes import conversions, parameters
from aura_ros.nodes.qos import RELIABLE, SENSOR
from aura_ros.nodes.runtime import run

CAMERAS = ("agentview", "wrist")
PICTURES = 16  # rendered before the start, then sent in turn
VIOLATIONS = QoSProfile(
    depth=100, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL
)


class StandInArm(Node):
    """The arm as a node. Keywords are those of rclpy's Node. Its steady clock is this process's."""

    def __init__(self, **options) -> None:
        super().__init__("stand_in_arm", **options)
        self.finished = threading.Event()
        self.exit_code = 0
        self.config = parameters.declare(self, ArmConfig)
        self.arm = Arm(self.config)
        self._check_joint(self.config.fault__nan_joint)
        self.lines: list[str] = []  # of violations
        self._violations = self.create_publisher(String, "~/violations", VIOLATIONS)
        self.arm.judge.on_violation = self._tell
        self._random = random.Random(self.config.seed)
        self._frozen: np.ndarray | None = None
        self._states = self.create_publisher(JointState, "joint_states", RELIABLE)
        self._poses = self.create_publisher(PoseStamped, "ee_pose", RELIABLE)
        self._subscribe()
        self.create_subscription(Float64MultiArray, self.config.gripper_topic, self._on_gripper, RELIABLE)
        self.create_subscription(Bool, "estop", self._on_estop, RELIABLE)
        self.create_subscription(Bool, "~/expect_silence", self._on_silence, RELIABLE)
        self.create_subscription(String, "~/fault", self._on_fault, RELIABLE)
        self.create_timer(1 / self.config.state_rate, self._publish_states)
        if self.config.camera_rate:
            self._cameras = {
                camera: (
                    self.create_publisher(Image, f"images/{camera}", SENSOR),
                    pictures(self.config.seed + index, self.config.image_size, camera),
                )
                for index, camera in enumerate(CAMERAS)
            }
            self._shown = 0
            self.create_timer(1 / self.config.camera_rate, self._publish_images)
        self._started = time.monotonic()
        self.create_timer(0.1, self._watch_age)

    def stop(self) -> None:
        """Nothing to make safe: the arm is numbers."""

    def summary(self) -> dict:
        """As printed at the end."""
        return {**self.arm.summary(), "seconds": round(time.monotonic() - self._started, 3)}

    def _subscribe(self) -> None:
        kind = self.config.command_type
        if kind == JOINT_JOG:
            try:
                from control_msgs.msg import JointJog
            except ImportError as error:
                raise UserError(
                    f"command_type '{kind}' needs control_msgs ({error}); choose one of: "
                    f"{JOINT_TRAJECTORY}, {TWIST}, {FLOAT64_ARRAY}"
                ) from error
            message, callback = JointJog, self._on_jog
        else:
            message, callback = {
                JOINT_TRAJECTORY: (JointTrajectory, self._on_trajectory),
                TWIST: (TwistStamped, self._on_twist),
                FLOAT64_ARRAY: (Float64MultiArray, self._on_array),
            }[kind]
        self.create_subscription(message, self.config.command_topic or TOPICS[kind], callback, RELIABLE)

    # -- in ---------------------------------------------------------------------------------------------------

    def _on_twist(self, msg: TwistStamped) -> None:
        linear, angular = msg.twist.linear, msg.twist.angular
        values = [linear.x, linear.y, linear.z, angular.x, angular.y, angular.z]
        now_ns = time.monotonic_ns()
        self.arm.take_twist(values, msg.header.frame_id, self._steady(msg.header.stamp, now_ns), now_ns)

    def _on_jog(self, msg) -> None:
        now_ns = time.monotonic_ns()
        stamp_ns = self._steady(msg.header.stamp, now_ns)
        self.arm.take_jog(msg.joint_names, msg.velocities, stamp_ns, now_ns)

    def _on_array(self, msg: Float64MultiArray) -> None:
        self.arm.take_array(msg.data, time.monotonic_ns())

    def _on_trajectory(self, msg: JointTrajectory) -> None:
        points = [
            Point(conversions.to_ns(point.time_from_start), point.positions, point.velocities)
            for point in msg.points
        ]
        now_ns = time.monotonic_ns()
        self.arm.take_trajectory(msg.joint_names, points, self._steady(msg.header.stamp, now_ns), now_ns)

    def _on_gripper(self, msg: Float64MultiArray) -> None:
        self.arm.take_gripper(msg.data, time.monotonic_ns())

    def _on_estop(self, msg: Bool) -> None:
        self.arm.set_estop(msg.data, time.monotonic_ns())

    def _on_silence(self, msg: Bool) -> None:
        self.arm.expect_silence(msg.data, time.monotonic_ns())

    def _on_fault(self, msg: String) -> None:
        try:
            config = self.config.with_fault(msg.data)
            self._check_joint(config.fault__nan_joint)
        except UserError as mistake:
            self.get_logger().error(str(mistake))
            return
        self.config = config
        self.arm.configure(config)
        self.get_logger().info(f"fault: {msg.data}")

    def _check_joint(self, name: str) -> None:
        known = (*self.arm.names, *self.arm.finger_names)
        if name and name not in known:
            raise UserError(f"fault nan_joint '{name}' is unknown; choose one of: {', '.join(known)}")

    def _steady(self, stamp, now_ns: int) -> int | None:
        """A stamp by the steady clock; None: zero, which means now to some and nothing to others."""
        stamp_ns = conversions.to_ns(stamp)
        return now_ns + stamp_ns - self.get_clock().now().nanoseconds if stamp_ns else None

    # -- out --------------------------------------------------------------------------------------------------

    def _tell(self, line: str) -> None:
        self.lines.append(line)
        self._violations.publish(String(data=line))
        self.get_logger().warning(line)

    def _stamp(self):
        age_ns = round(self.config.fault__stamp_age * NS)
        return conversions.to_time(self.get_clock().now().nanoseconds - age_ns)

    def _publish_states(self) -> None:
        arm, config = self.arm, self.config
        arm.advance(time.monotonic_ns())
        if self._random.random() >= config.fault__drop_states:
            self._states.publish(self._joint_state())
        if self._random.random() >= config.fault__drop_states:
            self._poses.publish(self._pose())

    def _joint_state(self) -> JointState:
        arm, config = self.arm, self.config
        names = [*arm.names, *arm.finger_names]
        positions = np.concatenate([arm.position, arm.finger_positions])
        velocities = np.concatenate([arm.velocity, np.zeros(len(arm.finger_names))])
        if not config.fault__freeze_states:
            self._frozen = None
        elif self._frozen is None:
            self._frozen = positions
        if self._frozen is not None:
            positions, velocities = self._frozen.copy(), np.zeros(len(names))
        if config.velocities_nan:
            velocities[:] = math.nan
        if config.fault__nan_joint:
            positions[names.index(config.fault__nan_joint)] = math.nan
        # A joint_state_broadcaster sorts by name; a controller has an order of its own.
        order = sorted(range(len(names)), key=lambda index: names[index])
        msg = JointState(name=[names[index] for index in order])
        msg.header.stamp = self._stamp()
        msg.position = array.array("d", positions[order])
        msg.velocity = array.array("d", velocities[order])
        return msg

    def _pose(self) -> PoseStamped:
        matrix = self.arm.pose()
        msg = PoseStamped()
        msg.header.stamp, msg.header.frame_id = self._stamp(), BASE
        place, turn = msg.pose.position, msg.pose.orientation
        place.x, place.y, place.z = (float(value) for value in matrix[:3, 3])
        turn.x, turn.y, turn.z, turn.w = (float(value) for value in quaternion(matrix[:3, :3]))
        return msg

    def _publish_images(self) -> None:
        self._shown += 1
        stopped = self.config.fault__stop_camera
        for camera, (publisher, images) in self._cameras.items():
            if stopped in (camera, "all"):
                continue
            image = images[self._shown % PICTURES]
            image.header.stamp = self._stamp()
            publisher.publish(image)

    def _watch_age(self) -> None:
        if time.monotonic() - self._started > self.config.max_seconds:
            self.get_logger().error(f"max_seconds {self.config.max_seconds:g} are over")
            self.exit_code = 1
            self.finished.set()


def pictures(seed: int, size: int, camera: str) -> list[Image]:
    """Messages of rgb8 [size, size]: smooth noise with a square that moves, so that no two are alike."""
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    index = np.arange(size) * 8 // size
    ground = coarse[index][:, index]
    images = []
    for number in range(PICTURES):
        pixels = ground.copy()
        at = number * size // PICTURES
        pixels[size // 3 : size // 2, at : at + size // 8] = 255
        images.append(conversions.rgb_to_image(pixels, 0, camera))
    return images


class PrintingArm(StandInArm):
    """As a process: prints its summary at the end."""

    def stop(self) -> None:
        sys.stdout.write(json.dumps(self.summary()) + "\n")


def main() -> None:
    """Run until INT, TERM or `max_seconds` (status 1)."""
    run(PrintingArm, "stand_in_arm")


if __name__ == "__main__":
    main()
