"""Record the gate, chunk and status topics, as serialized bytes, to a rosbag2 MCAP bag."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rclpy.clock import Clock, ClockType
from rclpy.exceptions import InvalidTopicNameException
from rclpy.executors import ExternalShutdownException
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy
from rclpy.validate_topic_name import validate_topic_name
from sensor_msgs.msg import Image
from std_msgs.msg import Float64, String, UInt64

from aura_ros.config import check_fields, option
from aura_ros.errors import UserError
from aura_ros.msg import ActionChunk, EpisodeStatus, GateEvent, Latent, PolicyInfo, PolicyStatus
from aura_ros.nodes.parameters import declare
from aura_ros.nodes.qos import LATCHED, RELIABLE
from aura_ros.nodes.runtime import run
from aura_ros.report.bag import BagTopic, BagWriter
from aura_ros.report.bag import qos as bag_qos

if TYPE_CHECKING:
    from rclpy.subscription import MessageInfo  # Kilted; Jazzy hands over a dictionary of the same content

FLUSH_PERIOD_S = 1.0
# At the end: silence that means that nothing more is on its way, and the longest wait for it.
QUIET_S = 0.1
DRAIN_LIMIT_S = 2.0
# So deep that a stall of this process (a slow disk) loses nothing.
HISTORY = 1000
LATCHED_HISTORY = 100
IMAGE_HISTORY = 30


@dataclass(frozen=True)
class RecorderConfig:
    """Parameters of the gate recorder."""

    output: str = option("", "bag directory to make; must not exist, or be empty")
    policy: str = option("policy_node", "name of the policy node whose topics are recorded")
    record_images: bool = option(False, "record images/<camera> too")
    cameras: tuple[str, ...] = option(("agentview", "wrist"), "cameras whose images are recorded")
    record_latents: bool = option(False, "record the policy's hidden states (it must publish them)")

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.output:
            raise UserError("output '' names no bag directory; give one, such as -p output:=runs/bag")
        if not self.policy.strip("/"):
            raise UserError(
                f"policy '{self.policy}' names no node; give the policy node's name, such as policy_node"
            )
        if not all(self.cameras) or len(set(self.cameras)) != len(self.cameras):
            raise UserError(
                f"cameras {list(self.cameras)} must be different names, such as agentview and wrist"
            )


@dataclass(frozen=True)
class Stream:
    """A topic to record: relative name, message class, kind ("reliable", "latched" or "sensor")."""

    topic: str
    type: Any
    kind: str = "reliable"


def streams(config: RecorderConfig) -> list[Stream]:
    """The topics that a configuration records, relative to the node's namespace."""
    policy = config.policy.rstrip("/")
    chosen = [
        Stream(f"{policy}/gate", GateEvent),
        Stream(f"{policy}/write_rate", Float64),
        Stream(f"{policy}/state_bytes", UInt64),
        Stream(f"{policy}/status", PolicyStatus),
        Stream(f"{policy}/info", PolicyInfo, "latched"),
        Stream("action_chunk", ActionChunk),
        Stream("episode", EpisodeStatus, "latched"),
        Stream("instruction", String, "latched"),
    ]
    if config.record_latents:
        chosen.append(Stream(f"{policy}/latent", Latent))
    if config.record_images:
        chosen += [Stream(f"images/{camera}", Image, "sensor") for camera in config.cameras]
    return chosen


# What each kind asks of its publishers. Best effort matches reliable publishers as well.
SUBSCRIPTION_QOS = {
    "reliable": QoSProfile(
        history=HistoryPolicy.KEEP_LAST, depth=HISTORY, reliability=ReliabilityPolicy.RELIABLE
    ),
    "latched": QoSProfile(
        history=HistoryPolicy.KEEP_LAST,
        depth=LATCHED_HISTORY,
        reliability=ReliabilityPolicy.RELIABLE,
        durability=DurabilityPolicy.TRANSIENT_LOCAL,
    ),
    "sensor": QoSProfile(
        history=HistoryPolicy.KEEP_LAST, depth=IMAGE_HISTORY, reliability=ReliabilityPolicy.BEST_EFFORT
    ),
}
# What the bag says that the publishers offer, for a replay.
RECORDED_QOS = {
    "reliable": bag_qos(depth=RELIABLE.depth),
    "latched": bag_qos(depth=LATCHED.depth, latched=True),
    "sensor": bag_qos(depth=IMAGE_HISTORY, reliable=False),
}


class GateRecorder(Node):
    """Writes what arrives, as it arrives; message times are the receive times of the system clock."""

    def __init__(self) -> None:
        super().__init__("gate_recorder")
        self.finished = threading.Event()
        self.exit_code = 0
        self._received = 0
        config = declare(self, RecorderConfig)
        chosen = streams(config)
        names = [self._full_name(stream.topic) for stream in chosen]
        self._bag = BagWriter(
            config.output,
            [
                BagTopic(name, f"{stream.type.__module__.split('.')[0]}/msg/{stream.type.__name__}",
                         RECORDED_QOS[stream.kind])
                for name, stream in zip(names, chosen, strict=True)
            ],
        )  # fmt: skip
        for name, stream in zip(names, chosen, strict=True):
            self.create_subscription(
                stream.type, stream.topic, self._recorder(name), SUBSCRIPTION_QOS[stream.kind], raw=True
            )
        # By the steady clock: simulated time may stand still while messages arrive.
        self._flush_timer = self.create_timer(
            FLUSH_PERIOD_S, self._bag.flush, clock=Clock(clock_type=ClockType.STEADY_TIME)
        )
        self.get_logger().info(f"recording {len(names)} topics to {self._bag.path}")

    def stop(self) -> None:
        """Write down what has already arrived, close the bag and say what is in it."""
        if self._bag.closed:  # by an error, which has been told
            return
        try:
            self._drain()
            self._bag.close()
        except UserError as mistake:
            self.get_logger().error(str(mistake))
            self.exit_code = 2
            return
        counts = ", ".join(f"{name} {count}" for name, count in self._bag.counts.items() if count)
        self.get_logger().info(
            f"recorded {self._received} messages to {self._bag.path} ({counts or 'nothing was published'})"
        )

    def _full_name(self, topic: str) -> str:
        try:
            validate_topic_name(topic)
        except InvalidTopicNameException as error:
            reason = str(error).splitlines()[0].rstrip(": ")
            raise UserError(f"'{topic}': {reason}; mend the parameter policy or cameras") from None
        return self.resolve_topic_name(topic)

    def _recorder(self, name: str) -> Callable[[bytes, MessageInfo], None]:
        def record(data: bytes, info: MessageInfo) -> None:
            # Not every middleware notes the time of reception.
            self._bag.write(name, info["received_timestamp"] or time.time_ns(), data)
            self._received += 1

        return record

    def _drain(self) -> None:
        """Take what waits in the subscriptions, until nothing comes for a moment."""
        self._flush_timer.cancel()
        executor = self.executor
        now = time.monotonic()
        quiet_at, stop_at = now + QUIET_S, now + DRAIN_LIMIT_S
        try:
            while executor is not None and now < min(quiet_at, stop_at):
                before = self._received
                executor.spin_once(timeout_sec=quiet_at - now)
                now = time.monotonic()
                if self._received != before:
                    quiet_at = now + QUIET_S
        except ExternalShutdownException:
            return


def main() -> None:
    """Run the recorder until Ctrl-C or TERM."""
    run(GateRecorder, "gate_recorder")
