"""Policy, player and arm as processes, and one fault after the other: no unsafe command, and every fault has its name.

The arm judges the commands, not the player. The short run has every fault once, the slow one ten minutes of them.
"""

import json
import os
import random
import signal
import time

import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("aura_ros.msg", reason="the messages are not built")

from aura_ros.msg import ActionChunk, ChunkState, PolicyStatus
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from stand_in_arm import VIOLATIONS
from std_msgs.msg import Bool, String
from std_srvs.srv import SetBool, Trigger

from aura_ros.nodes import conversions, qos

POLICY = (
    "mode:=realtime",
    "instruction:=pick up the cup",
    'proprio.sources:=["pose:ee_pose","joints:joint_states:left_finger,right_finger"]',
    "image_max_age:=0.5",
    "proprio_max_age:=0.3",
    "enabled_at_start:=true",
)
PLAYER = (
    "command_topic:=delta_twist_cmds",
    "scale:=[0.2,0.2,0.2,0.2,0.2,0.2]",
    "command_rate:=25.0",
    "chunk_timeout:=1.0",
    "limits.step:=[0.075,0.075,0.075,0.75,0.75,0.75,1.0]",
)
# A busy machine may keep a command waiting for longer than a real arm would.
ARM = ("command_type:=twist", "camera_rate:=20.0", "command_timeout:=0.5", "grace:=0.3", "max_seconds:=900.0")
CHUNK_PERIOD_S = 0.4


class Stack:
    """The three processes, what they say, and a hand on each fault."""

    def __init__(self, ros, start_process, start_arm):
        self.ros, self._start_process = ros, start_process
        self.node = node = ros.node("operator")
        self.status, self.state, self.violations, self.chunks = [], [], [], 0
        node.create_subscription(PolicyStatus, "policy_node/status", self.status.append, qos.RELIABLE)
        node.create_subscription(ChunkState, "chunk_state", self._heard, qos.RELIABLE)
        node.create_subscription(ActionChunk, "action_chunk", self._counted, qos.RELIABLE)
        node.create_subscription(
            String, "stand_in_arm/violations", lambda msg: self.violations.append(msg.data), VIOLATIONS
        )
        self._faults = node.create_publisher(String, "stand_in_arm/fault", qos.RELIABLE)
        self._estop = node.create_publisher(Bool, "estop", qos.LATCHED)
        self._chunks = node.create_publisher(ActionChunk, "action_chunk", qos.RELIABLE)
        self.reasons = set()
        self.arm = start_arm(*ARM)
        self.player = self._start("chunk_player", PLAYER)
        self.policy = self._start("policy_node", POLICY)

    def _start(self, name, parameters):
        options = [word for parameter in parameters for word in ("-p", parameter)]
        process = self._start_process(name, "--ros-args", *options)
        self._change(name, Transition.TRANSITION_CONFIGURE)
        self._change(name, Transition.TRANSITION_ACTIVATE)
        return process

    def _change(self, name, transition):
        """Ask until it is answered: a killed process's service is still in the graph, and answers nobody."""
        client = self.node.create_client(ChangeState, f"{name}/change_state")
        asked = []

        def done():
            if not asked or (not asked[-1][1].done() and time.monotonic() > asked[-1][0] + 5.0):
                request = ChangeState.Request(transition=Transition(id=transition))
                asked.append((time.monotonic(), client.call_async(request)))
            return any(future.done() for _, future in asked)

        self.ros.spin_until(client.service_is_ready, timeout=60, what=name)
        self.ros.spin_until(done, timeout=60, what=f"transition {transition} of {name}")
        assert next(future for _, future in asked if future.done()).result().success, name
        self.node.destroy_client(client)

    def _heard(self, msg):
        self.state = [*self.state[-500:], msg]
        if msg.reason:
            self.reasons.add(msg.reason)

    def _counted(self, _msg):
        self.chunks += 1

    def call(self, kind, name, **values):
        client = self.node.create_client(kind, name)
        self.ros.spin_until(client.service_is_ready, what=name)
        future = client.call_async(kind.Request(**values))
        self.ros.spin_until(future.done, what=name)
        self.node.destroy_client(client)
        return future.result()

    def wait(self, condition, what):
        try:
            self.ros.spin_until(condition, timeout=30, what=what)
        except pytest.fail.Exception:
            pytest.fail(
                f"{what}: status {self.status[-1:]}, player {self.state[-1:]}, arm {self.violations[-3:]}"
            )

    def policy_says(self, text):
        self.status.clear()
        self.wait(
            lambda: any(text in f"{msg.reason} {' '.join(msg.rejected_reasons)}" for msg in self.status),
            f"'{text}' in the policy's status",
        )

    def player_says(self, text):
        self.wait(lambda: self.state and text in self.state[-1].reason, f"'{text}' in the player's state")

    def drives(self):
        """Wait until the policy's chunks are played."""
        count = self.chunks
        self.wait(
            lambda: self.chunks >= count + 2 and self.state[-1].state == ChunkState.PLAYING, "a driven arm"
        )

    def arm_fault(self, text):
        self._faults.publish(String(data=text))

    # -- faults: each says what must be heard of it, and mends it ------------------------------------------------

    def camera_stops(self):
        self.arm_fault("stop_camera=wrist")
        self.policy_says("images/wrist")
        self.player_says("no chunk for more than 1 s: stopped")

    def states_freeze_with_old_stamps(self):
        self.arm_fault("stamp_age=2.0")
        self.policy_says("s old; allowed")
        self.player_says("stopped")

    def a_joint_is_nan(self):
        self.arm_fault("nan_joint=left_finger")
        self.policy_says("joint 'left_finger' has position nan")
        self.player_says("stopped")

    def states_are_lost(self):
        self.arm_fault("drop_states=1.0")
        self.policy_says("s old; allowed")
        self.player_says("stopped")

    def emergency_stop(self):
        self._estop.publish(Bool(data=True))
        self.player_says("emergency stop")
        self.policy_says("emergency stop")
        assert not self.call(Trigger, "chunk_player/clear_fault").success
        self._estop.publish(Bool(data=False))
        self.wait(lambda: self.call(Trigger, "chunk_player/clear_fault").success, "a cleared player")
        self.wait(lambda: self.call(Trigger, "policy_node/clear_fault").success, "a cleared policy")

    def policy_is_killed(self):
        self.policy.send_signal(signal.SIGKILL)
        self.player_says("stopped")
        self.policy.wait()
        self.policy = self._start("policy_node", POLICY)

    def policy_hangs(self):
        self.policy.send_signal(signal.SIGSTOP)
        self.player_says("stopped")
        self.policy.send_signal(signal.SIGCONT)

    def operator_disables(self):
        self.call(SetBool, "policy_node/enable", data=False)
        self.policy_says("call ~/enable")
        self.player_says("stopped")
        self.call(SetBool, "policy_node/enable", data=True)

    def somebody_sends_a_wild_chunk(self):
        self._foreign_chunk([0.5] * 7)
        self.player_says("moves x by 0.5; allowed in a row: 0.075")
        self.call(Trigger, "chunk_player/clear_fault")

    def somebody_sends_nan(self):
        self._foreign_chunk([float("nan")] * 7)
        self.player_says("finite numbers are needed")
        self.call(Trigger, "chunk_player/clear_fault")

    def _foreign_chunk(self, row):
        msg = ActionChunk(
            epoch=time.time_ns(), sequence=0, control_mode=ActionChunk.CARTESIAN_DELTA, horizon=1
        )
        msg.names = ["x", "y", "z", "roll", "pitch", "yaw", "gripper"]
        msg.units, msg.data = ["1"] * 7, [float(value) for value in row]
        msg.period = conversions.to_duration(0.05)
        msg.header.stamp = self.node.get_clock().now().to_msg()
        self._chunks.publish(msg)
        # Its epoch is newer than the policy's, whose chunks are old from now on.
        self.ros.spin_for(0.2)
        self.call(Trigger, "policy_node/reset")

    def policy_is_reset(self):
        self.call(Trigger, "policy_node/reset")


FAULTS = (
    "camera_stops",
    "states_freeze_with_old_stamps",
    "a_joint_is_nan",
    "states_are_lost",
    "emergency_stop",
    "policy_hangs",
    "operator_disables",
    "somebody_sends_a_wild_chunk",
    "somebody_sends_nan",
    "policy_is_reset",
    "policy_is_killed",
)


def run(stack, seconds):
    """All faults in a shuffled order, again and again; returns how often each was."""
    rng, counts, end = random.Random(0), dict.fromkeys(FAULTS, 0), time.monotonic() + seconds
    while min(counts.values()) == 0 or time.monotonic() < end:
        for fault in rng.sample(FAULTS, len(FAULTS)):
            if min(counts.values()) > 0 and time.monotonic() > end:
                break
            stack.drives()
            getattr(stack, fault)()
            stack.arm_fault("clear")
            counts[fault] += 1
    stack.drives()
    return counts


def judged(stack, counts):
    """The arm's verdict when all are asked to end: the player first, for its last word must be a stop."""
    for process in (stack.player, stack.policy):
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0, process.output
        assert "Traceback" not in process.output
    stack.arm.send_signal(signal.SIGINT)
    assert stack.arm.wait() == 0, stack.arm.output
    summary = json.loads(stack.arm.output.strip().splitlines()[-1])
    print(json.dumps({"faults": counts, "arm": summary}))
    assert stack.violations == []
    assert not any(summary["violations"].values())
    return summary


@pytest.fixture
def stack(ros, start_process, start_arm):
    return Stack(ros, start_process, start_arm)


def test_no_fault_makes_an_unsafe_command_and_every_one_has_its_name(stack):
    judged(stack, run(stack, 0.0))


@pytest.mark.slow
def test_ten_minutes_of_faults(stack):
    judged(stack, run(stack, float(os.environ.get("AURA_SOAK_S", "600"))))
