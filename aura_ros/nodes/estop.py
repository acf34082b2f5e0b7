"""The emergency stop's topic, heard whoever offers it."""

from __future__ import annotations

from collections.abc import Callable

from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from std_msgs.msg import Bool

from aura_ros.nodes import qos

TOPIC = "estop"
LOOK_S = 0.2  # between two calls of `EmergencyStop.look`


class EmergencyStop:
    """`estop` (std_msgs/Bool): true is pressed.

    A reliable, volatile subscription hears every reliable publisher. Two kinds of offers need another: a latched stop that
    was pressed before this node came, and a best-effort one, which would not be matched. Those are made when a publisher
    offers them: before, they would be warned of as incompatible, or hear everything twice.
    """

    def __init__(self, node: Node, on_change: Callable[[bool], None]) -> None:
        self._node, self._on_change = node, on_change
        self._made: set[str] = set()
        node.create_subscription(Bool, TOPIC, self._heard, qos.RELIABLE)

    def look(self) -> None:
        """See what publishers offer; to be called again and again."""
        for offer in self._node.get_publishers_info_by_topic(self._node.resolve_topic_name(TOPIC)):
            if offer.qos_profile.reliability == ReliabilityPolicy.BEST_EFFORT:
                self._also("best effort", qos.SENSOR_QUEUE)
            elif offer.qos_profile.durability == DurabilityPolicy.TRANSIENT_LOCAL:
                self._also("latched", qos.LATCHED)

    def _also(self, kind: str, profile: QoSProfile) -> None:
        if kind not in self._made:
            self._made.add(kind)
            self._node.create_subscription(Bool, TOPIC, self._heard, profile)

    def _heard(self, msg: Bool) -> None:
        self._on_change(bool(msg.data))
