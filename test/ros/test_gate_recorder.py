"""The recorder as a process: nothing is lost at its end, whatever ends it."""

import array
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("aura_ros.msg", reason="the messages are not built")

from aura_ros.msg import ActionChunk, EpisodeStatus, GateEvent, Latent
from rclpy.duration import Duration
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image
from std_msgs.msg import String

from aura_ros.nodes.gate_recorder import RecorderConfig, streams
from aura_ros.nodes.qos import LATCHED, RELIABLE
from aura_ros.nodes.supervisor import Plan, Supervisor
from aura_ros.report.bag import repair_bag
from aura_ros.report.definitions import typestore
from aura_ros.report.reading import read_bag, summarize_bag

ROOT = Path(__file__).resolve().parents[2]
EVENTS = 200
FIELD_TOPIC = "/policy_node/gate"


class Policy:
    """What a policy and a simulator publish, and when the recorder hears them."""

    def __init__(self, ros, namespace: str = "/", policy: str = "policy_node") -> None:
        self.ros = ros
        self.node = ros.node("publisher", namespace=namespace)
        # A publisher may forget what is older than its depth, so a burst must fit in it.
        burst = QoSProfile(depth=EVENTS, reliability=ReliabilityPolicy.RELIABLE)
        self.gate = self.node.create_publisher(GateEvent, f"{policy}/gate", burst)
        self.chunk = self.node.create_publisher(ActionChunk, "action_chunk", burst)
        self.episode = self.node.create_publisher(EpisodeStatus, "episode", LATCHED)
        self.instruction = self.node.create_publisher(String, "instruction", LATCHED)

    def wait_for_recorder(self) -> None:
        publishers = (self.gate, self.chunk, self.episode, self.instruction)
        self.ros.spin_until(
            lambda: all(p.get_subscription_count() for p in publishers), what="the recorder's subscriptions"
        )

    def wait_until_heard(self) -> None:
        """Until the recorder, too, has matched these publishers: a busy one learns of them later than they of it.

        Step 0 is the probe; it need not arrive, its acknowledgement tells that the next one will.
        """
        self.gate.publish(GateEvent(state_bytes=4224))
        self.chunk.publish(ActionChunk())
        self.wait_for_arrival()

    def wait_for_arrival(self) -> None:
        """Until everything lies in the recorder's middleware, read by the recorder or not."""
        for publisher in (self.gate, self.chunk, self.episode, self.instruction):
            assert publisher.wait_for_all_acked(Duration(seconds=30))

    def publish(self, first: int, count: int, wait: bool = True) -> None:
        for index in range(first, first + count):
            event = GateEvent(step=index + 1, fired=index % 4 == 0, state_bytes=4224, probability=0.25)
            event.header.stamp.sec = index
            event.header.frame_id = "base"
            event.bytes_written = 4096 if event.fired else 0
            self.gate.publish(event)
            self.chunk.publish(ActionChunk(sequence=index, horizon=1, names=["x"], data=[0.5]))
        if wait:
            self.wait_for_arrival()


def record(start_process, bag, *arguments: str, **options):
    process = start_process("gate_recorder", "--ros-args", "-p", f"output:={bag}", *arguments, **options)
    process.wait_for_output("recording")
    return process


def steps(bag) -> list[int]:
    return [m.message.step for m in read_bag(bag, [FIELD_TOPIC])]


@pytest.mark.parametrize(
    "signals",
    [(signal.SIGINT,), (signal.SIGTERM,), (signal.SIGINT, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)],
    ids=["int", "term", "int-int", "int-term"],
)
def test_every_message_before_a_signal_is_in_the_bag(ros, start_process, tmp_path, signals):
    process = record(start_process, tmp_path / "bag")
    policy = Policy(ros)
    policy.wait_for_recorder()
    before = time.time_ns()
    policy.wait_until_heard()
    policy.publish(0, EVENTS)
    for number in signals:
        process.send_signal(number)
    assert process.wait() == 0, process.output
    assert "Traceback" not in process.output
    summary = summarize_bag(tmp_path / "bag")
    assert process.output.count(f"recorded {sum(summary.messages.values())} messages to") == 1
    assert [step for step in steps(tmp_path / "bag") if step] == list(range(1, EVENTS + 1))
    chunks = [m.message for m in read_bag(tmp_path / "bag", ["/action_chunk"])]
    assert [chunk.sequence for chunk in chunks if chunk.horizon] == list(range(EVENTS))
    assert (summary.gate.writes, summary.gate.state_bytes) == (50, (4224,))
    assert summary.gate.steps == len(steps(tmp_path / "bag"))
    assert before <= summary.start_ns <= summary.end_ns <= time.time_ns()
    assert not (tmp_path / "bag.incomplete").exists()


def test_latched_messages_from_before_the_recorder_are_recorded(ros, start_process, tmp_path):
    policy = Policy(ros)
    policy.instruction.publish(String(data="put both moka pots on the stove"))
    policy.episode.publish(EpisodeStatus(phase=EpisodeStatus.FINISHED, suite="libero_10", steps=520))
    process = record(start_process, tmp_path / "bag")
    policy.wait_for_recorder()
    policy.wait_for_arrival()
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0, process.output
    messages = {m.topic: m.message for m in read_bag(tmp_path / "bag")}
    assert messages["/instruction"].data == "put both moka pots on the stove"
    assert summarize_bag(tmp_path / "bag").episodes[0].steps == 520


def test_both_readers_decode_a_recorded_gate_event(ros, start_process, tmp_path):
    process = record(start_process, tmp_path / "bag")
    policy = Policy(ros)
    policy.wait_for_recorder()
    policy.publish(7, 1)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0, process.output
    (ours,) = [m.message for m in read_bag(tmp_path / "bag", [FIELD_TOPIC])]
    mcap_ros2 = pytest.importorskip("mcap_ros2.reader", reason="needs the [test] extra")
    (theirs,) = mcap_ros2.read_ros2_messages(str(tmp_path / "bag" / "bag_0.mcap"), topics=[FIELD_TOPIC])
    for event in (ours, theirs.ros_msg):
        assert (event.header.stamp.sec, event.header.frame_id) == (7, "base")
        assert (event.step, event.fired, event.probability, event.state_bytes) == (8, False, 0.25, 4224)


def test_flushed_messages_survive_kill_9(ros, start_process, tmp_path):
    process = record(start_process, tmp_path / "bag")
    policy = Policy(ros)
    policy.wait_for_recorder()
    policy.publish(0, EVENTS)
    file = tmp_path / "bag.incomplete" / "bag_0.mcap"
    # About 120 bytes an event: all of them are on disk after the next flush, without any end of the process.
    ros.spin_until(lambda: file.stat().st_size > EVENTS * 2 * 100, timeout=10, what="the flush")
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "bag").exists()
    repair_bag(tmp_path / "bag")
    found = steps(tmp_path / "bag")
    assert found == list(range(1, len(found) + 1))
    assert len(found) > EVENTS // 2


def test_no_message_gives_a_valid_empty_bag(start_process, tmp_path):
    process = record(start_process, tmp_path / "bag")
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0, process.output
    assert "recorded 0 messages to" in process.output
    assert summarize_bag(tmp_path / "bag").total == 0


def test_namespace_and_policy_name_give_the_recorded_topics(ros, start_process, tmp_path):
    process = record(start_process, tmp_path / "bag", "-p", "policy:=brain", "-r", "__ns:=/arm")
    policy = Policy(ros, namespace="/arm", policy="brain")
    policy.wait_for_recorder()
    policy.publish(0, 3)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0, process.output
    counts = summarize_bag(tmp_path / "bag").messages
    assert (counts["/arm/brain/gate"], counts["/arm/action_chunk"]) == (3, 3)


@pytest.mark.parametrize("offered", ["reliable", "best_effort"])
def test_images_and_latents_are_recorded_when_asked_for(ros, start_process, tmp_path, offered):
    process = record(
        start_process, tmp_path / "bag", "-p", "record_images:=true", "-p", "cameras:=[front]",
        "-p", "record_latents:=true",
    )  # fmt: skip
    node = ros.node("cameras")
    quality = QoSProfile(depth=10, reliability=ReliabilityPolicy[offered.upper()])
    images = node.create_publisher(Image, "images/front", quality)
    latents = node.create_publisher(Latent, "policy_node/latent", RELIABLE)
    ros.spin_until(lambda: images.get_subscription_count() > 0 and latents.get_subscription_count() > 0)
    pixels = array.array("B", random.Random(3).randbytes(768))
    latents.publish(Latent(step=1, data=[0.5, -0.5]))
    file = tmp_path / "bag.incomplete" / "bag_0.mcap"
    before = file.stat().st_size

    def flushed() -> bool:
        # Again and again: best effort may lose what comes before both sides know of each other.
        images.publish(Image(height=16, width=16, encoding="rgb8", step=48, data=pixels))
        return file.stat().st_size > before + len(pixels)

    ros.spin_until(flushed, what="the flush of the image")
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0, process.output
    messages = {m.topic: m.message for m in read_bag(tmp_path / "bag")}
    assert bytes(messages["/images/front"].data) == pixels.tobytes()
    assert messages["/policy_node/latent"].data.tolist() == [0.5, -0.5]


def test_simulated_time_that_stands_still_does_not_stop_the_flush(ros, start_process, tmp_path):
    process = record(start_process, tmp_path / "bag", "-p", "use_sim_time:=true")
    policy = Policy(ros)
    policy.wait_for_recorder()
    before = time.time_ns()
    policy.publish(0, 10)
    file = tmp_path / "bag.incomplete" / "bag_0.mcap"
    ros.spin_until(lambda: file.stat().st_size > 1000, timeout=10, what="the flush")
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0, process.output
    assert summarize_bag(tmp_path / "bag").start_ns >= before


@pytest.mark.parametrize("name", ["bag_é_ü", "bag_🤖", "bag 'yes' #1: [x]"], ids=["accent", "emoji", "yaml"])
def test_any_name_that_record_is_given_reaches_the_recorder_as_it_is(ros_domain, tmp_path, name):
    bag = tmp_path / name
    plan = Plan(
        config=ROOT / "config" / "libero_sim.yaml",
        logs=tmp_path / "logs",
        parameters={"gate_recorder": {"output": str(bag), "record_images": False}},
    )
    plan.logs.mkdir()
    supervisor = Supervisor(plan, lambda _: None, lambda: False)
    supervisor._start("gate_recorder")
    (recorder,) = supervisor._children
    try:
        deadline = time.monotonic() + 30
        while f"topics to {bag}" not in recorder.log.read_text() and recorder.process.poll() is None:
            assert time.monotonic() < deadline
            threading.Event().wait(0.02)
    finally:
        supervisor._end("gate_recorder", None)
    assert recorder.process.returncode == 0, recorder.log.read_text()
    assert summarize_bag(bag).total == 0


def test_every_node_imports_with_an_rclpy_whose_subscriptions_tell_nothing_of_messages():
    """Jazzy's rclpy.subscription has no MessageInfo."""
    program = (
        "import importlib, pkgutil, sys\n"
        "import rclpy, rclpy.lifecycle, rclpy.executors, rclpy.subscription\n"
        "vars(rclpy.subscription).pop('MessageInfo', None)\n"
        "import aura_ros.nodes\n"
        "names = [m.name for m in pkgutil.iter_modules(aura_ros.nodes.__path__) if not m.name.startswith('_')]\n"
        "for name in names:\n"
        "    importlib.import_module(f'aura_ros.nodes.{name}')\n"
        "print(*names)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert {"gate_recorder", "libero_sim", "policy_node", "supervisor"} <= set(run.stdout.split())


def refused(process) -> str:
    """The one line of a process that ended with a user's mistake."""
    assert process.wait() == 2, process.output
    lines = process.output.splitlines()
    assert len(lines) == 1, process.output
    return lines[0]


def test_existing_bag_is_refused_in_one_line_and_left_alone(start_process, tmp_path):
    (tmp_path / "bag").mkdir()
    (tmp_path / "bag" / "metadata.yaml").write_text("mine")
    line = refused(start_process("gate_recorder", "--ros-args", "-p", f"output:={tmp_path / 'bag'}"))
    mistake = f"bag directory {tmp_path / 'bag'} exists and is not empty; give another one or remove it"
    assert line == f"gate_recorder: {mistake}"
    assert [p.name for p in tmp_path.rglob("*")] == ["bag", "metadata.yaml"]


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ("use_sim_time:=false", "output '' names no bag directory"),
        ("output:=/proc/nowhere/bag", "bag directory /proc/nowhere/bag cannot be made"),
        ("policy:='a b'", "'a b/gate': Invalid topic name"),
        ("policy:=''", "policy '' names no node"),
        ("cameras:=[wrist, wrist]", "cameras ['wrist', 'wrist'] must be different names"),
        ("record_images:=1", "record_images is 1; expected true or false"),
        ("output:=7", "output is 7; expected a string (quote it)"),
    ],
)
def test_wrong_parameter_is_one_line_and_leaves_no_half_bag(start_process, tmp_path, parameter, message):
    given = [] if "output" in parameter or "sim_time" in parameter else ["-p", f"output:={tmp_path / 'bag'}"]
    line = refused(start_process("gate_recorder", "--ros-args", *given, "-p", parameter))
    assert message in line
    assert list(tmp_path.iterdir()) == []


def test_full_disk_ends_the_recorder_with_one_line_and_a_whole_bag(ros, start_process, tmp_path):
    limit = 60_000
    process = record(
        start_process,
        tmp_path / "bag",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)),
    )
    policy = Policy(ros)
    policy.wait_for_recorder()
    policy.publish(0, 10)
    file = tmp_path / "bag.incomplete" / "bag_0.mcap"
    ros.spin_until(lambda: file.stat().st_size > 1000, what="the first flush")
    published = 10
    while process.popen.poll() is None:
        policy.publish(published, 20, wait=False)
        published += 20
        ros.spin_for(0.02)
        assert published < 20_000, "the recorder does not notice the full disk"
    assert process.wait() == 2, process.output
    assert process.output.count("stopped: File too large") == 1
    assert "Traceback" not in process.output
    found = steps(tmp_path / "bag")
    assert len(found) >= 10
    assert found == list(range(1, len(found) + 1))


@pytest.mark.parametrize(
    "stream", streams(RecorderConfig("bag", record_images=True, record_latents=True)), ids=lambda s: s.topic
)
def test_recorded_type_hash_is_the_one_on_the_wire(ros, stream):
    node = ros.node("probe")
    node.create_publisher(stream.type, stream.topic, 1)
    ros.spin_until(lambda: bool(node.get_publishers_info_by_topic(stream.topic)))
    (info,) = node.get_publishers_info_by_topic(stream.topic)
    assert str(info.topic_type_hash) == typestore().hash_rihs01(info.topic_type)
