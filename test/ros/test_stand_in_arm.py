"""The stand-in arm as a process: every kind of command drives it, a jump is told, INT ends it with a summary."""

import json
import math
import signal

import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("trajectory_msgs", reason="trajectory_msgs is not installed")

import rclpy
from geometry_msgs.msg import PoseStamped, TwistStamped
from sensor_msgs.msg import Image, JointState
from stand_in_arm import VIOLATIONS
from std_msgs.msg import Bool, Float64MultiArray, String
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from aura_ros.nodes import conversions
from aura_ros.nodes.qos import RELIABLE, SENSOR

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "forearm_roll", "wrist_flex", "wrist_roll")
# A busy machine may keep a command waiting; only the tests of time-outs are about that.
PATIENT = "command_timeout:=2.0"


class Person:
    """Commands the arm and listens to it."""

    def __init__(self, ros):
        self.ros, self.node = ros, ros.node("person")
        self.states, self.poses, self.lines, self.images = [], [], [], []
        listen = self.node.create_subscription
        listen(JointState, "joint_states", self.states.append, RELIABLE)
        listen(PoseStamped, "ee_pose", self.poses.append, RELIABLE)
        listen(String, "stand_in_arm/violations", lambda msg: self.lines.append(msg.data), VIOLATIONS)
        listen(Image, "images/wrist", self.images.append, SENSOR)

    def publisher(self, kind, topic):
        publisher = self.node.create_publisher(kind, topic, RELIABLE)
        self.ros.spin_until(publisher.get_subscription_count, what=f"the arm's subscription to {topic}")
        self.ros.spin_until(lambda: self.states, what="the arm's first state")
        return publisher

    def now(self):
        return conversions.to_time(self.node.get_clock().now().nanoseconds)

    def at(self, joint):
        msg = self.states[-1]
        return msg.position[list(msg.name).index(joint)]

    def wait_for(self, joint, low, high):
        self.ros.spin_until(lambda: low < self.at(joint) < high, what=f"{joint} between {low} and {high}")


def summary_of(process):
    """End it and read its summary: one line of JSON, status 0, no traceback."""
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0, process.output
    assert "Traceback" not in process.output
    return json.loads(next(line for line in process.output.splitlines() if line.startswith("{")))


def trajectory(positions, seconds=0.2):
    msg = JointTrajectory(joint_names=list(JOINTS))
    point = JointTrajectoryPoint(positions=[float(value) for value in positions])
    point.time_from_start = conversions.to_duration(seconds)
    msg.points = [point]
    return msg


def test_twist_drives_the_arm_and_its_states_are_those_of_a_robot(ros, start_arm):
    process, person = start_arm("command_type:=twist", PATIENT, "velocities_nan:=true"), Person(ros)
    publisher = person.publisher(TwistStamped, "delta_twist_cmds")
    ros.spin_until(lambda: person.poses)
    before = person.poses[-1].pose.position.z
    msg = TwistStamped()
    msg.header.frame_id, msg.twist.linear.z = "base", 0.1
    msg.header.stamp = person.now()
    publisher.publish(msg)
    ros.spin_until(lambda: person.poses[-1].pose.position.z > before + 0.05, what="the tip's rise")
    state = person.states[-1]
    assert list(state.name) == sorted((*JOINTS, "left_finger", "right_finger")) != list(JOINTS)
    assert all(math.isnan(value) for value in state.velocity)
    summary = summary_of(process)
    assert summary["commands"] == {"twist": 1}
    assert summary["violations"] == {}
    assert sum(summary["joint_travel"].values()) > 0.01


def test_trajectory_drives_the_arm_and_a_jump_is_told_also_to_who_comes_late(ros, start_arm):
    process, person = start_arm("command_type:=joint_trajectory"), Person(ros)
    publisher = person.publisher(JointTrajectory, "joint_trajectory")
    publisher.publish(trajectory([0.1, 0.4, 1.2, 0, 1.5416, 0]))
    person.wait_for("shoulder_pan", 0.099, 0.101)
    assert person.lines == []
    publisher.publish(trajectory([0.6, 0.4, 1.2, 0, 1.5416, 0]))
    ros.spin_until(lambda: person.lines, what="the jump's violation")
    assert person.lines[0].startswith("step: joint_trajectory 2: shoulder_pan at 0.6 lies 0.5")
    late = []
    ros.node("late").create_subscription(String, "stand_in_arm/violations", late.append, VIOLATIONS)
    ros.spin_until(lambda: late, what="the violation of before")
    assert summary_of(process)["violations"] == {"step": 1}


@pytest.mark.parametrize(("array_of", "value"), [("position", 0.1), ("velocity", 0.5)])
def test_array_drives_the_arm(ros, start_arm, array_of, value):
    process, person = start_arm("command_type:=float64_array", f"array_of:={array_of}"), Person(ros)
    publisher = person.publisher(Float64MultiArray, "commands")
    rest = [0.4, 1.2, 0.0, 1.5416, 0.0] if array_of == "position" else [0.0] * 5
    publisher.publish(Float64MultiArray(data=[value, *rest]))
    person.wait_for("shoulder_pan", 0.09, 3.0)
    summary = summary_of(process)
    assert (summary["commands"], summary["violations"]) == ({"float64_array": 1}, {})


def test_jog_without_its_messages_is_refused_in_one_line(start_arm):
    try:
        import control_msgs  # noqa: F401
    except ImportError:
        process = start_arm("command_type:=joint_jog")
        assert process.wait() == 2
        assert "command_type 'joint_jog' needs control_msgs" in process.output
        assert "Traceback" not in process.output
    else:
        pytest.skip("control_msgs is installed")


def test_jog_drives_the_arm(ros, start_arm):
    messages = pytest.importorskip("control_msgs.msg", reason="control_msgs is not installed")
    process, person = start_arm("command_type:=joint_jog", PATIENT), Person(ros)
    publisher = person.publisher(messages.JointJog, "delta_joint_cmds")
    msg = messages.JointJog(joint_names=["shoulder_pan"], velocities=[0.5])
    msg.header.stamp = person.now()
    publisher.publish(msg)
    person.wait_for("shoulder_pan", 0.09, 3.0)
    assert summary_of(process)["violations"] == {}


def test_gripper_estop_and_silence_are_heard(ros, start_arm):
    process, person = (
        start_arm("command_type:=float64_array", "array_of:=velocity", "grace:=0.0"),
        Person(ros),
    )
    commands = person.publisher(Float64MultiArray, "commands")
    gripper = person.publisher(Float64MultiArray, "gripper_command")
    gripper.publish(Float64MultiArray(data=[0.0]))
    ros.spin_until(lambda: person.at("left_finger") < 0.001, what="the gripper's closing")
    person.publisher(Bool, "estop").publish(Bool(data=True))
    # Two topics have no order between them: the arm's violation tells that the e-stop came first.
    ros.spin_until(lambda: commands.publish(Float64MultiArray(data=[0.5] + [0.0] * 5)) or person.lines)
    assert person.lines[0].startswith("after_estop: float64_array")
    person.publisher(Bool, "stand_in_arm/expect_silence").publish(Bool(data=True))
    stop = Float64MultiArray(data=[0.0] * 6)
    # Twice in a row: the motions that were under way are both kinds of violation.
    ros.spin_until(
        lambda: commands.publish(stop) or all(line.startswith("not_silent") for line in person.lines[-2:])
    )
    assert summary_of(process)["stops_after_estop"] >= 1


def test_faults_of_states_come_and_go_while_the_arm_runs(ros, start_arm):
    process, person = start_arm("camera_rate:=20.0"), Person(ros)
    fault = person.publisher(String, "stand_in_arm/fault")
    ros.spin_until(lambda: person.images, what="the wrist camera")
    image = conversions.image_to_rgb(person.images[0])
    assert image.shape == (256, 256, 3)
    assert image.std() > 10
    fault.publish(String(data="nan_joint=elbow_flex"))
    ros.spin_until(lambda: math.isnan(person.at("elbow_flex")), what="the NaN")
    assert math.isfinite(person.at("wrist_flex"))
    fault.publish(String(data="clear"))
    ros.spin_until(lambda: math.isfinite(person.at("elbow_flex")), what="the NaN's end")
    fault.publish(String(data="stamp_age=100"))

    def age():
        return person.now().sec - person.states[-1].header.stamp.sec

    ros.spin_until(lambda: age() > 90, what="old stamps")
    fault.publish(String(data="gravity=1"))
    process.wait_for_output("fault 'gravity=1' is not known; give NAME=VALUE")
    fault.publish(String(data="stop_camera=all"))
    process.wait_for_output("fault: stop_camera=all")
    ros.spin_for(0.2)  # what was under way
    count = len(person.images)
    ros.spin_for(0.3)
    assert len(person.images) == count
    summary_of(process)


def test_second_signal_does_not_spoil_the_end(ros, start_arm):
    process, person = start_arm(), Person(ros)
    ros.spin_until(lambda: person.states, what="the arm's first state")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0, process.output
    assert process.output.count('"violations"') == 1
    assert "Traceback" not in process.output


def test_arm_left_alone_ends_by_itself(start_arm):
    process = start_arm("max_seconds:=0.5")
    assert process.wait() == 1
    assert "max_seconds 0.5 are over" in process.output


def test_arm_runs_in_the_tests_own_process_too(ros):
    from stand_in_arm import StandInArm

    arm = ros.add(StandInArm(parameter_overrides=[rclpy.parameter.Parameter("command_type", value="twist")]))
    person = Person(ros)
    publisher = person.publisher(TwistStamped, "delta_twist_cmds")
    msg = TwistStamped()
    msg.header.frame_id = "nowhere"
    msg.header.stamp = person.now()
    publisher.publish(msg)
    ros.spin_until(lambda: arm.lines, what="the violation")
    assert arm.lines[0].split(":")[0] in ("frame", "stale")
    assert arm.summary()["violations_total"] == 1


def test_policy_acts_on_the_arms_own_topics(ros, start_arm):
    from policy_driver import make_policy

    # The policy's worker has a thread of its own in this process, so the arm has a process of its own.
    process = start_arm("camera_rate:=10.0")
    sources = ["pose:ee_pose", "joints:joint_states:left_finger,right_finger"]
    node = make_policy(
        ros,
        mode="realtime",
        enabled_at_start=True,
        checkpoint="random",
        proprio__sources=sources,
        instruction="lift the cup",
        image_max_age=5.0,
        proprio_max_age=5.0,
        max_skew=5.0,
        max_future=5.0,
    )
    ros.spin_until(lambda: node.worker.queries >= 2, what="two answers of the policy")
    assert node.worker.fault == ""
    summary_of(process)
