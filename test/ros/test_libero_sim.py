"""The simulator node's side of lockstep, on real LIBERO, against a policy that a test plays."""

import array
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image as Picture

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("aura_ros.msg", reason="the messages are not built")

from aura_ros.msg import ActionChunk, EpisodeStatus, PolicyStatus
from geometry_msgs.msg import PoseStamped
from rclpy.parameter import Parameter
from real_libero import LIBERO_MARKS
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image, JointState
from shared_libero import SharedLibero, put_cans_into_basket, shared_libero
from std_msgs.msg import String

from aura_ros.nodes import libero_sim, qos
from aura_ros.nodes.conversions import chunk_to_msg, to_ns
from aura_ros.sim import EpisodeConfig, LiberoEnv
from aura_ros.types import LIBERO_ACTION_SPEC
from aura_ros.types import ActionChunk as Chunk

pytestmark = LIBERO_MARKS

CHUNK_NS = 400_000_000
PIXELS = 64


def chunk(stamp_ns: int, epoch: int = 1, sequence: int = 0, row=(0.01, 0, 0, 0, 0, 0, 1.0)) -> ActionChunk:
    rows = np.tile(np.asarray(row, np.float32), (8, 1))
    return chunk_to_msg(Chunk(rows, LIBERO_ACTION_SPEC, stamp_ns), epoch, sequence, 0)


class Driver:
    """Plays the policy: `answer` gets the stamp (ns) of every observation and how often it came."""

    def __init__(self, ros, answer=lambda driver, stamp_ns, times: driver.send(chunk(stamp_ns))):
        self.ros, self.node, self.answer = ros, ros.node("driver"), answer
        self.observations: dict[int, int] = {}
        self.clocks: list[int] = []
        self.last: dict[type, object] = {}
        self.episodes: list[EpisodeStatus] = []
        self.beating = True
        self.chunks = self.node.create_publisher(ActionChunk, "action_chunk", qos.RELIABLE)
        self.status = self.node.create_publisher(PolicyStatus, "policy_node/status", qos.RELIABLE)
        subscribe = self.node.create_subscription
        subscribe(Clock, "/clock", lambda m: self.clocks.append(to_ns(m.clock)), qos.RELIABLE)
        for topic in ("images/agentview", "images/wrist"):
            subscribe(Image, topic, self._keep, qos.RELIABLE)
        subscribe(JointState, "joint_states", self._keep, qos.RELIABLE)
        subscribe(PoseStamped, "ee_pose", self._on_pose, qos.RELIABLE)
        subscribe(EpisodeStatus, "episode", self.episodes.append, qos.LATCHED)
        self.node.create_timer(0.1, self._beat)

    def send(self, msg: ActionChunk) -> None:
        self.chunks.publish(msg)

    def _beat(self) -> None:
        if self.beating:
            self.status.publish(PolicyStatus(state=PolicyStatus.RUNNING))

    def _keep(self, msg) -> None:
        self.last[type(msg)] = msg

    def _on_pose(self, msg) -> None:
        # The pose is published last: the observation is whole.
        self._keep(msg)
        stamp_ns = to_ns(msg.header.stamp)
        self.observations[stamp_ns] = self.observations.get(stamp_ns, 0) + 1
        self.answer(self, stamp_ns, self.observations[stamp_ns])

    @property
    def end(self) -> EpisodeStatus | None:
        return next((e for e in self.episodes if e.phase == EpisodeStatus.FINISHED), None)


@pytest.fixture(scope="module")
def libero():
    """What makes the module's one LIBERO environment a node's own."""
    with shared_libero() as own:
        yield own


@pytest.fixture
def simulator(ros, libero, monkeypatch):
    """Start the node after the driver is there; returns the node, its `env` what it runs (see SharedLibero)."""

    nodes = []

    def start(
        driver: Driver, before_step: Callable[[LiberoEnv], None] | None = None, **parameters
    ) -> libero_sim.LiberoSim:
        built: list[SharedLibero] = []
        may_begin = threading.Event()

        def build(config: EpisodeConfig) -> SharedLibero:
            env = libero(config)
            env.before_step = before_step or env.before_step
            built.append(env)
            may_begin.wait(10)
            return env

        monkeypatch.setattr(libero_sim, "LiberoEnv", build)
        given = {
            "suite": "libero_10",
            "task": 0,
            "max_steps": 24,
            "image_size": PIXELS,
            "repeat_after": 0.2,
            **parameters,
        }
        node = libero_sim.LiberoSim(parameter_overrides=[Parameter(k, value=v) for k, v in given.items()])
        nodes.append(ros.add(node))
        ros.spin_until(
            lambda: (
                driver.chunks.get_subscription_count() > 0
                and node._pose_pub.get_subscription_count() > 0
                and node._clock_pub.get_subscription_count() > 0
                and driver.status.get_subscription_count() > 0
            ),
            what="discovery",
        )
        may_begin.set()
        ros.spin_until(lambda: bool(built), what="the environment")
        node.env = built[0]
        return node

    yield start
    for node in nodes:
        node.stop()
        assert node.finished.wait(10), "the next test needs the environment"


def run_to_end(ros, driver: Driver, node) -> EpisodeStatus:
    ros.spin_until(lambda: driver.end is not None and node.finished.is_set(), timeout=15, what="the end")
    assert driver.end is not None
    return driver.end


def test_episode_executes_every_row_once_with_stamps_a_chunk_apart(ros, simulator):
    driver = Driver(ros)
    node = simulator(driver)
    end = run_to_end(ros, driver, node)
    assert (end.success, end.reason, end.steps, end.queries) == (False, "max_steps", 24, 3)
    assert (end.init_state, end.seed, end.suite, node.exit_code) == (0, 7, "libero_10", 0)
    stamps = list(driver.observations)
    assert [b - a for a, b in pairwise(stamps)] == [CHUNK_NS, CHUNK_NS]
    assert stamps[0] > 0, "a stamp of zero means no time"
    # x of 0.01 m is 0.2 controller units; an open gripper is -1.
    np.testing.assert_allclose(node.env.executed, np.tile([0.2, 0, 0, 0, 0, 0, -1.0], (24, 1)), atol=1e-6)


def test_what_the_cameras_saw_at_both_ends_is_kept_where_that_was_asked_for(ros, simulator, tmp_path):
    driver = Driver(ros)
    run_to_end(ros, driver, simulator(driver, frames=str(tmp_path)))
    first, last = (np.asarray(Picture.open(tmp_path / f"{name}.png")) for name in ("first", "last"))
    assert first.shape == (PIXELS, 2 * PIXELS, 3)
    assert (first != last).any()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.png", "last.png"]


def test_a_folder_that_is_not_there_costs_the_pictures_alone(ros, simulator, tmp_path):
    driver = Driver(ros)
    end = run_to_end(ros, driver, simulator(driver, frames=str(tmp_path / "gone")))
    assert (end.reason, end.steps) == ("max_steps", 24)


def test_success_ends_the_episode_within_a_chunk(ros, simulator):
    def achieve(env: LiberoEnv) -> None:
        if env.step_count == 10:
            put_cans_into_basket(env)

    driver = Driver(ros)
    end = run_to_end(ros, driver, node := simulator(driver, before_step=achieve))
    assert (end.success, end.reason, end.steps, end.queries) == (True, "success", 11, 2)
    assert (len(node.env.executed), node.exit_code) == (11, 0)


def test_clock_never_goes_back_and_ends_at_the_last_step(ros, simulator):
    driver = Driver(ros)
    run_to_end(ros, driver, simulator(driver))
    first = next(iter(driver.observations))
    ros.spin_until(lambda: driver.clocks[-1] == first + 24 * 50_000_000, what="the last clock")
    assert driver.clocks == sorted(driver.clocks)
    assert set(np.diff(sorted(set(driver.clocks)))) == {50_000_000}


def test_observation_is_named_joints_a_pose_and_two_rgb_images_of_one_stamp(ros, simulator):
    driver = Driver(ros)
    simulator(driver)
    ros.spin_until(lambda: len(driver.last) == 3 and driver.end is not None)
    joints, pose, image = driver.last[JointState], driver.last[PoseStamped], driver.last[Image]
    assert list(joints.name) == [*(f"panda_joint{i}" for i in range(1, 8)),
                                 "panda_finger_joint1", "panda_finger_joint2"]  # fmt: skip
    assert (len(joints.position), len(joints.velocity)) == (9, 9)
    assert pose.header.frame_id == "world"
    assert (image.height, image.width, image.encoding, image.step, len(image.data)) == (
        PIXELS,
        PIXELS,
        "rgb8",
        3 * PIXELS,
        3 * PIXELS**2,
    )
    assert joints.header.stamp == pose.header.stamp == image.header.stamp


def test_instruction_and_episode_are_latched_for_late_joiners(ros, simulator):
    driver = Driver(ros)
    run_to_end(ros, driver, simulator(driver))
    late, heard = ros.node("late"), []
    late.create_subscription(String, "instruction", heard.append, qos.LATCHED)
    late.create_subscription(EpisodeStatus, "episode", heard.append, qos.LATCHED)
    ros.spin_until(lambda: len(heard) == 2, what="the latched messages")
    assert {m.data if isinstance(m, String) else m.instruction for m in heard} == {
        "put both the alphabet soup and the tomato sauce in the basket"
    }


# Lost, late and repeated messages


def test_lost_observation_is_sent_again_with_the_same_stamp(ros, simulator):
    driver = Driver(ros, lambda d, stamp, times: d.send(chunk(stamp)) if times == 2 else None)
    end = run_to_end(ros, driver, node := simulator(driver))
    assert list(driver.observations.values()) == [2, 2, 2]
    assert (end.steps, end.queries, len(node.env.executed)) == (24, 3, 24)


def test_answer_of_another_stamp_is_not_executed_and_the_observation_is_repeated(ros, simulator):
    def answer(driver, stamp, times):
        driver.send(chunk(stamp - CHUNK_NS if times == 1 else stamp, row=(0.01 * times, 0, 0, 0, 0, 0, 1)))

    driver = Driver(ros, answer)
    end = run_to_end(ros, driver, node := simulator(driver))
    assert (end.reason, end.steps, end.queries) == ("max_steps", 24, 3)
    np.testing.assert_allclose([a[0] for a in node.env.executed], 0.4, atol=1e-6)


def test_stray_answer_right_behind_the_right_one_does_not_hide_it(ros, simulator):
    def answer(driver, stamp, _times):
        driver.send(chunk(stamp))
        driver.send(chunk(stamp - CHUNK_NS))

    driver = Driver(ros, answer)
    run_to_end(ros, driver, simulator(driver, repeat_after=5.0))
    assert list(driver.observations.values()) == [1, 1, 1]


def test_answer_given_twice_is_executed_once(ros, simulator):
    driver = Driver(ros, lambda d, stamp, _times: [d.send(chunk(stamp)) for _ in range(2)])
    end = run_to_end(ros, driver, node := simulator(driver))
    assert (end.queries, len(node.env.executed)) == (3, 24)


def test_chunk_of_an_older_epoch_is_dropped(ros, simulator):
    def answer(driver, stamp, times):
        first = len(driver.observations) == 1
        driver.send(chunk(stamp, epoch=5 if first or times > 1 else 4, row=(0.01 * times, 0, 0, 0, 0, 0, 1)))

    driver = Driver(ros, answer)
    end = run_to_end(ros, driver, node := simulator(driver))
    assert list(driver.observations.values()) == [1, 2, 2]
    assert end.reason == "max_steps"
    np.testing.assert_allclose([a[0] for a in node.env.executed], [0.2] * 8 + [0.4] * 16, atol=1e-6)


# What must not be executed


def spoil(**fields):
    def change(msg: ActionChunk) -> None:
        for name, value in fields.items():
            setattr(msg, name, value)

    return change


def set_value(index: int, value: float):
    def change(msg: ActionChunk) -> None:
        data = array.array("f", msg.data)
        data[index] = value
        msg.data = data

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_value(50, float("nan")), "chunk holds NaN or infinite actions"),
        (set_value(50, float("inf")), "chunk holds NaN or infinite actions"),
        (set_value(50, 0.5), "'y' is 10 controller units; allowed is -1.5..1.5"),
        (set_value(55, 3.0), "'gripper' is -5 controller units; allowed is -1.5..1.5"),
        (spoil(names=["x", "y", "z", "a", "b", "c", "gripper"]), "use a LIBERO checkpoint"),
        (spoil(units=["m", "m", "m", "deg", "deg", "deg", "1"]), "its units are"),
        (spoil(horizon=7), "chunk has 56 values; horizon 7 x 7 names need 49"),
        (spoil(horizon=0), "horizon 0 must be at least 1"),
        (spoil(control_mode=3), "joint_position"),
        (spoil(control_mode=9), "control_mode 9 is unknown"),
        (spoil(data=array.array("f", [0.0] * 55)), "chunk has 55 values"),
        (spoil(data=array.array("f")), "chunk has 0 values"),
        (spoil(names=["x"]), "they must be as many"),
    ],
)  # fmt: skip
def test_wrong_chunk_ends_the_episode_with_the_reason_and_no_row_of_it_is_executed(
    ros, simulator, change, reason
):
    def answer(driver, stamp, _times):
        msg = chunk(stamp, sequence=len(driver.observations) - 1)
        if len(driver.observations) == 2:
            change(msg)
        driver.send(msg)

    driver = Driver(ros, answer)
    end = run_to_end(ros, driver, node := simulator(driver))
    assert reason in end.reason
    assert end.reason.startswith("chunk 1 refused: ")
    assert "\n" not in end.reason
    assert (end.success, end.steps, len(node.env.executed), node.exit_code) == (False, 8, 8, 1)


def test_second_publisher_of_chunks_ends_the_episode_before_anything_moves(ros, simulator):
    driver = Driver(ros)
    ros.node("other").create_publisher(ActionChunk, "action_chunk", qos.RELIABLE)
    end = run_to_end(ros, driver, node := simulator(driver))
    assert "more than one node publishes action_chunk" in end.reason
    assert "ROS_DOMAIN_ID" in end.reason
    assert (node.env.executed, node.exit_code) == ([], 1)


# A policy that does not answer


def test_policy_without_heartbeat_ends_the_episode_in_time(ros, simulator):
    def answer(driver, stamp, _times):
        if len(driver.observations) == 1:
            driver._beat()
            driver.send(chunk(stamp))
        else:
            driver.beating = False

    driver = Driver(ros, answer)
    node = simulator(driver, policy_lost_after=1.0)
    ros.spin_until(lambda: not driver.beating)
    silent_since = time.monotonic()
    end = run_to_end(ros, driver, node)
    assert time.monotonic() - silent_since < 2.0
    assert "policy lost: 'policy_node' has been silent for" in end.reason
    assert (end.steps, node.exit_code) == (8, 1)


def test_policy_that_beats_but_never_answers_ends_the_episode_with_what_it_says(ros, simulator):
    driver = Driver(ros, lambda *_: None)
    driver.beating = False
    status = PolicyStatus(state=PolicyStatus.WAITING, reason="waiting for images/front")
    driver.node.create_timer(0.1, lambda: driver.status.publish(status))
    end = run_to_end(ros, driver, node := simulator(driver, start_timeout=1.0))
    assert "no chunk for stamp 1.00 s from 'policy_node' in 1 s" in end.reason
    assert "waiting for images/front" in end.reason
    assert node.exit_code == 1


def test_faulty_policy_ends_the_episode_with_its_fault(ros, simulator):
    def answer(driver, _stamp, _times):
        driver.beating = False
        driver.status.publish(PolicyStatus(state=PolicyStatus.FAULT, reason="chunk holds NaN"))

    driver = Driver(ros, answer)
    end = run_to_end(ros, driver, node := simulator(driver))
    assert end.reason == "the policy has a fault: chunk holds NaN"
    assert node.exit_code == 1


def test_stopping_the_node_mid_episode_tells_the_world_and_is_no_failure(ros, simulator):
    driver = Driver(ros, lambda *_: None)
    node = simulator(driver)
    ros.spin_until(lambda: bool(driver.observations))
    node.stop()
    ros.spin_until(lambda: driver.end is not None, what="the end of the episode")
    assert (driver.end.reason, node.exit_code) == ("interrupted", 0)
