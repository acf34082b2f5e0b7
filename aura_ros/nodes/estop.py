"""The emergency stop's topic, heard whoever offers it."""

from __future__ import annotations

from collections.abc import Callable

from rclpy.node import Node
from rclpy.qos import DurabilityPolicy
from std_msgs.msg import Bool

from aura_ros.nodes import qos

TOPIC = "estop"


class EmergencyStop:
    """`estop` (std_msgs/Bool): true is pressed.

    A volatile subscription hears every publisher, but only a transient-local one is told of a stop that was pressed before
    this node came. The second is made when a publisher offers it: before, it would be warned of as an incompatible one.
    """

    def __init__(self, node: Node, on_change: Callable[[bool], None]) -> None:
        self._node, self._on_change = node, on_change
        self._latched = False
        node.create_subscription(Bool, TOPIC, self._heard, qos.RELIABLE)

    def look(self) -> None:
        """See whether a publisher has a stop from before; to be called again and again."""
        if self._latched:
            return
        offers = self._node.get_publishers_info_by_topic(self._node.resolve_topic_name(TOPIC))
        if any(offer.qos_profile.durability == DurabilityPolicy.TRANSIENT_LOCAL for offer in offers):
            self._latched = True
            self._node.create_subscription(Bool, TOPIC, self._heard, qos.LATCHED)

    def _heard(self, msg: Bool) -> None:
        self._on_change(bool(msg.data))
