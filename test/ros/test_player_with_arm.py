"""Player and arm as processes, positions as commands: what only outputs that need measured joints can get wrong."""

import json
import math
import signal
import time

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("aura_ros.msg", reason="the messages are not built")

from arm_config import ArmConfig
from aura_ros.msg import ActionChunk, ChunkState
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from sensor_msgs.msg import JointState
from stand_in_arm import VIOLATIONS
from std_msgs.msg import Bool, String
from std_srvs.srv import Trigger

from aura_ros.nodes import conversions, qos

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "forearm_roll", "wrist_flex", "wrist_roll")
TOPICS = {"float64_array": "commands", "joint_trajectory": "joint_trajectory"}
PERIOD_S, HORIZON = 0.05, 8
HOME = np.array(ArmConfig().home)


class Bench:
    """A player, an arm, and a policy that swings every joint slowly around its home."""

    def __init__(self, ros, start_process, start_arm, command_type):
        self.ros, self.command_type = ros, command_type
        self.node = node = ros.node("policy")
        self.states, self.violations, self.joints = [], [], {}
        self.talks, self.sequence, self.epoch = True, 0, time.time_ns()
        self.begun = self.node.get_clock().now().nanoseconds
        node.create_subscription(ChunkState, "chunk_state", self.states.append, qos.RELIABLE)
        node.create_subscription(
            String, "stand_in_arm/violations", lambda msg: self.violations.append(msg.data), VIOLATIONS
        )
        node.create_subscription(JointState, "joint_states", self._measured, qos.SENSOR)
        self._chunks = node.create_publisher(ActionChunk, "action_chunk", qos.RELIABLE)
        self._faults = node.create_publisher(String, "stand_in_arm/fault", qos.RELIABLE)
        self._estop = node.create_publisher(Bool, "estop", qos.RELIABLE)
        node.create_timer(0.2, self._talk)
        self.arm = start_arm(f"command_type:={command_type}", "max_position_step:=0.15", "max_seconds:=300.0")
        names = "[" + ",".join(JOINTS) + "]"
        self.player = start_process(
            "chunk_player",
            "--ros-args",
            *[word for text in (
                "control_mode:=joint_position",
                f"columns:={names}",
                f"joints:={names}",
                f"command_type:={command_type}",
                f"command_topic:={TOPICS[command_type]}",
                "gripper_column:=''",
                f"limits.step:=[{','.join(['0.1'] * 6)}]",
                "limits.deviation:=1.0",
                "period:=0.05",
                "chunk_timeout:=0.8",
            ) for word in ("-p", text)],
        )  # fmt: skip
        self.change(Transition.TRANSITION_CONFIGURE)
        self.change(Transition.TRANSITION_ACTIVATE)

    def change(self, transition):
        client = self.node.create_client(ChangeState, "chunk_player/change_state")
        self.ros.spin_until(client.service_is_ready, what="the player")
        future = client.call_async(ChangeState.Request(transition=Transition(id=transition)))
        self.ros.spin_until(future.done, what="a transition")
        assert future.result().success

    def clear(self):
        client = self.node.create_client(Trigger, "chunk_player/clear_fault")
        future = client.call_async(Trigger.Request())
        self.ros.spin_until(future.done, what="a cleared fault")
        return future.result().success

    def _measured(self, msg):
        if all(math.isfinite(position) for position in msg.position):
            self.joints = dict(zip(msg.name, msg.position, strict=True))

    def swing(self, seconds):
        return HOME + 0.2 * np.sin(0.5 * np.asarray(seconds))[:, None]

    def _talk(self, jump=0.0):
        """From where the arm is, towards the swing: after a stop nothing may jump."""
        if not self.talks or len(self.joints) < len(JOINTS):
            return
        now = self.node.get_clock().now().nanoseconds
        at = np.array([self.joints[name] for name in JOINTS])
        ahead = (now - self.begun) / 1e9 + PERIOD_S * np.arange(1, HORIZON + 1)
        step = np.clip(self.swing(ahead) - at, -0.02, 0.02)
        rows = at + np.cumsum(step, axis=0) / 2 + jump
        self.sequence += 1
        msg = ActionChunk(epoch=self.epoch, sequence=self.sequence, horizon=HORIZON)
        msg.control_mode, msg.names, msg.units = ActionChunk.JOINT_POSITION, list(JOINTS), ["rad"] * 6
        msg.period, msg.header.stamp = conversions.to_duration(PERIOD_S), conversions.to_time(now)
        msg.data = rows.astype(np.float32).ravel().tolist()
        self._chunks.publish(msg)

    def plays(self):
        self.states.clear()
        self.says(ChunkState.PLAYING, "")
        self.ros.spin_for(0.3)

    def says(self, state, text):
        try:
            self.ros.spin_until(
                lambda: self.states and self.states[-1].state == state and text in self.states[-1].reason
            )
        except pytest.fail.Exception:
            said = f"it is {self.states[-1:]}, the arm says {self.violations[-3:]}"
            pytest.fail(f"state {state} '{text}' did not come; {said}")


@pytest.mark.parametrize("command_type", TOPICS)
def test_positions_stay_within_the_arm_s_bounds_through_every_fault(
    ros, start_process, start_arm, command_type
):
    bench = Bench(ros, start_process, start_arm, command_type)
    bench.plays()
    for fault in ("drop_states=1.0", "stamp_age=2.0", "nan_joint=elbow_flex"):
        bench._faults.publish(String(data=fault))
        bench.says(ChunkState.HOLDING, "joint positions were not measured")
        bench._faults.publish(String(data="clear"))
        bench.plays()
    bench._estop.publish(Bool(data=True))
    bench.says(ChunkState.FAULT, "emergency stop")
    bench.ros.spin_for(1.5)
    bench._estop.publish(Bool(data=False))
    bench.ros.spin_until(bench.clear, what="a cleared fault")
    bench.plays()
    bench._talk(jump=0.5)
    bench.says(ChunkState.FAULT, "allowed in a row: 0.1")
    bench.clear()
    bench.plays()
    bench.talks = False
    bench.says(ChunkState.HOLDING, "no chunk for more than 0.8 s: stopped")
    bench.talks = True
    bench.plays()
    bench.change(Transition.TRANSITION_DEACTIVATE)
    bench.change(Transition.TRANSITION_ACTIVATE)
    bench.plays()
    for process in (bench.player, bench.arm):
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0, process.output
    summary = json.loads(bench.arm.output.strip().splitlines()[-1])
    assert bench.violations == []
    assert summary["violations_total"] == 0
    assert summary["commands"][command_type] > 5
    assert sum(summary["joint_travel"].values()) > 0.05
