"""Subscriptions of the policy node: callbacks store the newest message, the worker decodes it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from geometry_msgs.msg import PoseStamped
from rclpy.exceptions import InvalidTopicNameException
from rclpy.node import Node
from rclpy.qos import QoSProfile
from rclpy.validate_topic_name import validate_topic_name
from sensor_msgs.msg import CompressedImage, Image, JointState

from aura_ros.control.statistics import SlidingWindow
from aura_ros.control.streams import Ready, Streams
from aura_ros.errors import UserError
from aura_ros.nodes import conversions
from aura_ros.types import Observation

CALLBACKS_REMEMBERED = 2000
FORMS = "'pose:<topic>' or 'joints:<topic>:<joint>,<joint>,...'"


@dataclass(frozen=True)
class ProprioSource:
    """One part of the proprioception vector: a pose (6 values) or named joints (one value each)."""

    topic: str
    joints: tuple[str, ...] | None

    @staticmethod
    def parse(text: str) -> ProprioSource:
        """Read 'pose:<topic>' or 'joints:<topic>:<name>,<name>'. Raises UserError."""
        match = re.fullmatch(r"pose:([^:\s]+)|joints:([^:\s]+):([^:\s]+)", text.strip())
        if match is None:
            raise UserError(f"proprio.sources entry '{text}' is not understood; write {FORMS}")
        topic = match[1] or match[2]
        try:
            validate_topic_name(topic)
        except InvalidTopicNameException as error:
            raise UserError(
                f"proprio.sources entry '{text}' names topic '{topic}', which is no ROS name; use letters, digits, "
                "_ and /, as in joint_states"
            ) from error
        if match[1]:
            return ProprioSource(topic, None)
        joints = tuple(match[3].split(","))
        if len(set(joints)) < len(joints) or not all(joints):
            raise UserError(
                f"proprio.sources entry '{text}' names a joint twice or not at all; write {FORMS}"
            )
        return ProprioSource(topic, joints)

    @property
    def dim(self) -> int:
        """Values that it contributes."""
        return 6 if self.joints is None else len(self.joints)


class ObservationInputs:
    """The policy's observation streams: one per camera and one per proprioception topic."""

    def __init__(
        self,
        node: Node,
        cameras: tuple[str, ...],
        sources: tuple[ProprioSource, ...],
        orientation_reference: tuple[float, ...],
        compressed: bool,
        qos: QoSProfile,
        steady_ns: Callable[[], int],
    ):
        self.cameras, self.sources = cameras, sources
        self._orientation_reference = orientation_reference
        self.image_streams = [f"images/{camera}" for camera in cameras]
        topics: dict[str, type] = {}
        for source in sources:
            kind = PoseStamped if source.joints is None else JointState
            if source.topic in self.image_streams:
                raise UserError(
                    f"proprio.sources use topic '{source.topic}', which carries a camera's images"
                )
            if topics.setdefault(source.topic, kind) is not kind:
                raise UserError(
                    f"proprio.sources use topic '{source.topic}' both as a pose and as joints; one topic has one type"
                )
        self.streams = Streams([*self.image_streams, *topics], steady_ns)
        self.callback_ms = SlidingWindow(CALLBACKS_REMEMBERED)
        self._node = node
        self._subscriptions: list[Any] = []
        image_type, suffix = (CompressedImage, "/compressed") if compressed else (Image, "")
        try:
            for stream in self.image_streams:
                self._subscribe(image_type, stream + suffix, stream, qos)
            for topic, kind in topics.items():
                self._subscribe(kind, topic, topic, qos)
        except Exception:
            self.close()  # a node that stays unconfigured keeps nothing
            raise

    def _subscribe(self, kind: type, topic: str, stream: str, qos: QoSProfile) -> None:
        def store(msg: Any) -> None:
            begun = time.perf_counter()
            self.streams.put(stream, msg, conversions.to_ns(msg.header.stamp))
            self.callback_ms.add((time.perf_counter() - begun) * 1e3)

        try:
            self._subscriptions.append(self._node.create_subscription(kind, topic, store, qos))
        except Exception as error:
            # Not every distribution's message names the topic.
            reason = " ".join(str(error).split())
            raise UserError(
                f"topic '{topic}' cannot be subscribed to as {kind.__name__} ({reason}); give each type its own topic"
            ) from error

    def decode(self, ready: Ready, instruction: str) -> Observation:
        """Turn a set of messages into an observation.

        Raises UserError naming the stream whose message is broken; the caller counts it.
        """
        images = {}
        for camera, stream in zip(self.cameras, self.image_streams, strict=True):
            msg = ready.samples[stream].value
            convert = (
                conversions.compressed_to_rgb
                if isinstance(msg, CompressedImage)
                else conversions.image_to_rgb
            )
            images[camera] = _named(stream, convert, msg)
        proprio: list[float] = []
        for source in self.sources:
            msg = ready.samples[source.topic].value
            if source.joints is None:
                proprio += _named(source.topic, conversions.pose_values, msg, self._orientation_reference)
            else:
                proprio += _named(source.topic, conversions.joint_positions, msg, source.joints)
        return Observation(images, np.asarray(proprio, np.float32), instruction, ready.stamp_ns)

    def close(self) -> None:
        """End the subscriptions and forget the messages."""
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._subscriptions.clear()
        self.streams.clear()


def _named(stream: str, convert: Callable[..., Any], *args: Any) -> Any:
    try:
        return convert(*args)
    except UserError as error:
        raise UserError(f"{stream}: {error}") from error
