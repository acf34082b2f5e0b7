"""A stand-in simulator and operator, and a policy node in this process, for the tests of `policy_node`.

The driver is a plain rclpy node that publishes small observations and collects everything the policy says.
"""

import array
from types import SimpleNamespace

import numpy as np
from aura_ros.msg import ActionChunk, EpisodeStatus, GateEvent, Latent, PolicyInfo, PolicyStatus
from aura_ros.srv import LoadMemory, SaveMemory
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import PoseStamped
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from rclpy.parameter import Parameter
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import Float64, String, UInt64
from std_srvs.srv import SetBool, Trigger

from aura_ros.nodes import conversions, qos
from aura_ros.nodes.policy_node import PolicyNode

NS = 1_000_000_000
STEP_NS = 400_000_000  # eight control steps of 0.05 s
START_NS = NS
CAMERAS = ("agentview", "wrist")
FINGERS = ("panda_finger_joint1", "panda_finger_joint2")
STREAMS = (*(f"images/{camera}" for camera in CAMERAS), "ee_pose", "joint_states")
SIZE = 64


def stamp_of(index: int) -> int:
    """Stamp of the episode's observation `index`."""
    return START_NS + index * STEP_NS


def picture(seed: int) -> np.ndarray:
    """Return uint8 [SIZE, SIZE, 3] of smooth noise that differs by seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return np.ascontiguousarray(coarse.repeat(SIZE // 8, 0).repeat(SIZE // 8, 1))


def header_of(message) -> int:
    return conversions.to_ns(message.header.stamp)


class Driver:
    """Publishes observations of a stamp and keeps what comes back, in order of arrival."""

    def __init__(
        self, ros, *, namespace="/", policy="policy_node", sensor_qos=qos.RELIABLE, compressed=False
    ):
        self.ros = ros
        self.node = node = ros.node("driver", namespace=namespace)
        kind, suffix = (CompressedImage, "/compressed") if compressed else (Image, "")
        self.publishers = {
            f"images/{camera}": node.create_publisher(kind, f"images/{camera}{suffix}", sensor_qos)
            for camera in CAMERAS
        }
        self.publishers["ee_pose"] = node.create_publisher(PoseStamped, "ee_pose", sensor_qos)
        self.publishers["joint_states"] = node.create_publisher(JointState, "joint_states", sensor_qos)
        self._clock = node.create_publisher(Clock, "/clock", qos.RELIABLE)
        self._instruction = node.create_publisher(String, "instruction", qos.LATCHED)
        self._episode = node.create_publisher(EpisodeStatus, "episode", qos.LATCHED)
        self.chunks = self._collect(ActionChunk, "action_chunk", qos.RELIABLE)
        self.gates = self._collect(GateEvent, f"{policy}/gate", qos.RELIABLE)
        self.rates = self._collect(Float64, f"{policy}/write_rate", qos.RELIABLE)
        self.bytes = self._collect(UInt64, f"{policy}/state_bytes", qos.RELIABLE)
        self.statuses = self._collect(PolicyStatus, f"{policy}/status", qos.RELIABLE)
        self.infos = self._collect(PolicyInfo, f"{policy}/info", qos.LATCHED)
        self.latents = self._collect(Latent, f"{policy}/latent", qos.RELIABLE)
        self.diagnostics = self._collect(DiagnosticArray, "/diagnostics", qos.RELIABLE)
        self._clients = {
            name: node.create_client(kind, f"{policy}/{name}")
            for name, kind in {
                "reset": Trigger,
                "clear_fault": Trigger,
                "enable": SetBool,
                "save_memory": SaveMemory,
                "load_memory": LoadMemory,
                "change_state": ChangeState,
            }.items()
        }

    def _collect(self, kind, topic, profile):
        got = []
        self.node.create_subscription(kind, topic, got.append, profile)
        return got

    # -- what a simulator does ------------------------------------------------------------------------------

    def wait_for_policy(self) -> None:
        """Until the policy's endpoints and ours know each other."""
        publishers = (*self.publishers.values(), self._instruction, self._episode)
        names = [subscription.topic_name for subscription in self.node.subscriptions]
        outputs = [name for name in names if name.endswith(("action_chunk", "/gate", "/status"))]
        self.ros.spin_until(
            lambda: (
                all(p.get_subscription_count() for p in publishers)
                and all(self.node.count_publishers(name) for name in outputs)
            ),
            what="discovery of the policy",
        )

    def instruct(self, text: str = "put the cup on the plate") -> None:
        self._instruction.publish(String(data=text))

    def start_episode(self, number: int = 0, stamp_ns: int = START_NS, **fields) -> None:
        self._publish_episode(EpisodeStatus.STARTED, number, stamp_ns, fields)

    def finish_episode(self, number: int = 0, stamp_ns: int = START_NS, **fields) -> None:
        self._publish_episode(EpisodeStatus.FINISHED, number, stamp_ns, fields)

    def _publish_episode(self, phase, number, stamp_ns, fields):
        msg = EpisodeStatus(phase=phase, episode=number, **fields)
        msg.header.stamp = conversions.to_time(stamp_ns)
        self._episode.publish(msg)

    def clock(self, stamp_ns: int) -> None:
        self._clock.publish(Clock(clock=conversions.to_time(stamp_ns)))

    def messages(self, stamp_ns: int, seed: int | None = None) -> dict:
        """Build one observation: stream -> message. Its content depends on the seed (by default: the stamp)."""
        seed = stamp_ns // STEP_NS if seed is None else seed
        made = {
            f"images/{camera}": conversions.rgb_to_image(picture(2 * seed + i), stamp_ns, camera)
            for i, camera in enumerate(CAMERAS)
        }
        pose = PoseStamped()
        pose.pose.position.x, pose.pose.position.z = 0.01 * (seed % 7), 0.3
        pose.pose.orientation.x, pose.pose.orientation.w = 1.0, 0.01
        joints = JointState(name=list(FINGERS), position=[0.02, -0.02])
        made |= {"ee_pose": pose, "joint_states": joints}
        for message in (pose, joints):
            message.header.stamp = conversions.to_time(stamp_ns)
        return made

    def send(self, stamp_ns: int, *, seed: int | None = None, leave_out: str = "", **replaced) -> None:
        """Publish one observation; `replaced` are messages by stream, with __ for / in the stream's name."""
        messages = self.messages(stamp_ns, seed)
        messages |= {name.replace("__", "/"): message for name, message in replaced.items()}
        for stream, message in messages.items():
            if stream != leave_out:
                self.publishers[stream].publish(message)

    def ask(self, stamp_ns: int, **options) -> ActionChunk:
        """Send an observation and wait for the next chunk."""
        before = len(self.chunks)
        self.send(stamp_ns, **options)
        self.ros.spin_until(lambda: len(self.chunks) > before, what=f"a chunk for stamp {stamp_ns}")
        return self.chunks[-1]

    def query(self, index: int, **options) -> ActionChunk:
        """Answer of the policy to the episode's observation `index`."""
        return self.ask(stamp_of(index), **options)

    # -- what an operator does ------------------------------------------------------------------------------

    def call_later(self, service: str, **fields):
        """Start a service call; the future's result is the response."""
        client = self._clients[service]
        self.ros.spin_until(client.service_is_ready, what=f"service {service}")
        request = client.srv_type.Request()
        for name, value in fields.items():
            setattr(request, name, value)
        return client.call_async(request)

    def call(self, service: str, **fields):
        future = self.call_later(service, **fields)
        self.ros.spin_until(future.done, what=f"the answer of {service}")
        return future.result()

    def transition(self, number: int, timeout: float = 60.0):
        future = self.call_later("change_state", transition=Transition(id=number))
        self.ros.spin_until(future.done, timeout, f"transition {number}")
        return future.result().success

    # -- what it sees -----------------------------------------------------------------------------------------

    def wait_for_status(self, condition, what: str = "such a status") -> PolicyStatus:
        """Return the first status from now on that meets the condition."""
        seen = len(self.statuses)

        def met():
            return any(condition(status) for status in self.statuses[seen:])

        self.ros.spin_until(met, what=what)
        return next(status for status in self.statuses[seen:] if condition(status))

    def wait_for_state(self, state: int, text: str = "") -> PolicyStatus:
        return self.wait_for_status(
            lambda s: s.state == state and text in s.reason, f"state {state} with '{text}'"
        )

    def wait_for_rejection(self, text: str) -> PolicyStatus:
        return self.wait_for_status(
            lambda s: any(text in reason for reason in s.rejected_reasons), f"a rejection naming '{text}'"
        )


def rejected(status: PolicyStatus) -> dict[str, int]:
    return dict(zip(status.rejected_reasons, status.rejected_counts, strict=True))


LOCKSTEP = {"mode": "lockstep", "enabled_at_start": True, "use_sim_time": True}
REALTIME = {"mode": "realtime", "enabled_at_start": True, "use_sim_time": True}


def make_policy(ros, start: bool = True, namespace: str | None = None, **parameters) -> PolicyNode:
    """Return a policy node on the executor, active unless `start` is false; __ in a name is a dot."""
    overrides = [Parameter(name.replace("__", "."), value=value) for name, value in parameters.items()]
    node = ros.add(PolicyNode(parameter_overrides=overrides, namespace=namespace))
    if start:
        node.trigger_configure()
        assert node.worker is not None, node._problem
        node.trigger_activate()
        assert node.worker.active, node._problem
    return node


def loop(ros, *, driver_options: dict | None = None, **parameters) -> SimpleNamespace:
    """Return driver and active policy that know each other, instructed and (lockstep) in an episode."""
    parameters = LOCKSTEP | parameters
    compressed = parameters.get("image_transport") == "compressed"
    driver = Driver(ros, compressed=compressed, **(driver_options or {}))
    node = make_policy(ros, **parameters)
    driver.wait_for_policy()
    driver.instruct()
    ros.spin_until(lambda: node.worker.instruction != "", what="the instruction")
    if parameters["mode"] == "lockstep":
        driver.start_episode()
        ros.spin_until(lambda: node.worker._episode is not None, what="the episode's start")
    return SimpleNamespace(driver=driver, node=node, worker=node.worker, ros=ros)


def float_array(values) -> array.array:
    return array.array("d", values)
