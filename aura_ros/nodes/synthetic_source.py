"""`synthetic_source`: pictures and robot states at fixed rates, for benchmarks and for wiring up a stack without a robot."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
from geometry_msgs.msg import PoseStamped
from rclpy.node import Node
from sensor_msgs.msg import Image, JointState

from aura_ros.nodes import conversions, parameters, qos
from aura_ros.nodes.runtime import run
from aura_ros.nodes.source_config import SourceConfig

# Pictures made beforehand, one after the other: making them is not what a camera costs.
PICTURES = 8


class SyntheticSource(Node):
    """Publishes `images/<camera>`, `ee_pose` and `joint_states`; see `SourceConfig`."""

    def __init__(self, **node_options: Any) -> None:
        super().__init__("synthetic_source", **node_options)
        self.finished = threading.Event()
        self.exit_code = 0
        self.config = parameters.declare(self, SourceConfig)
        config = self.config
        rng = np.random.default_rng(config.seed)
        size = config.image_size
        self._pictures = [
            conversions.rgb_to_image(rng.integers(0, 256, (size, size, 3), np.uint8), 0, "camera")
            for _ in range(PICTURES)
        ]
        self._images = [self.create_publisher(Image, f"images/{name}", qos.SENSOR) for name in config.cameras]
        self._pose = self.create_publisher(PoseStamped, "ee_pose", qos.SENSOR)
        self._joints = self.create_publisher(JointState, "joint_states", qos.SENSOR)
        self._sent = 0
        if config.cameras:
            self.create_timer(1.0 / config.camera_rate, self._send_images)
        self.create_timer(1.0 / config.state_rate, self._send_state)

    def stop(self) -> None:
        """Nothing to stop."""

    def _send_images(self) -> None:
        self._sent += 1
        picture = self._pictures[self._sent % PICTURES]
        picture.header.stamp = self.get_clock().now().to_msg()
        for publisher in self._images:
            publisher.publish(picture)

    def _send_state(self) -> None:
        stamp = self.get_clock().now().to_msg()
        pose = PoseStamped()
        pose.header.stamp, pose.header.frame_id = stamp, "base"
        pose.pose.position.x, pose.pose.position.z = 0.4, 0.3
        pose.pose.orientation.w = 1.0
        self._pose.publish(pose)
        joints = JointState(name=list(self.config.joints), position=[0.02] * len(self.config.joints))
        joints.velocity = [math.nan] * len(self.config.joints)
        joints.header.stamp = stamp
        self._joints.publish(joints)


def main() -> None:
    """Run the node until INT or TERM."""
    run(SyntheticSource, "synthetic_source")


__all__ = ["SyntheticSource", "main"]
