"""`chunk_player`: plays action chunks into one of the robot's own command interfaces, and stops it safely."""

from __future__ import annotations

import math
import threading
import time
import traceback
from typing import Any

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.clock import Clock, ClockType
from rclpy.duration import Duration
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray
from std_srvs.srv import Trigger

from aura_ros.control.commands import FLOAT64_ARRAY, JOINT_TRAJECTORY, TWIST, command_values
from aura_ros.control.measured import MeasuredJoints
from aura_ros.control.playback import NS, PlayState, Rows
from aura_ros.control.player import Command, Kind, Player
from aura_ros.control.statistics import SlidingWindow, without_numbers
from aura_ros.errors import UserError
from aura_ros.msg import ActionChunk, ChunkState
from aura_ros.nodes import conversions, parameters, player_messages, player_status, qos
from aura_ros.nodes.estop import LOOK_S, EmergencyStop
from aura_ros.nodes.player_config import PlayerConfig
from aura_ros.nodes.realtime import BACKWARD_JUMP_NS
from aura_ros.nodes.runtime import run
from aura_ros.types import ControlMode, FloatArray

# Until the first chunk says what its period is.
IDLE_PERIOD_NS = 100_000_000
WATCH_S = 0.1
TICKS_REMEMBERED = 2000
# The last stop of a process that ends is waited for so long.
LAST_WORDS_S = 0.5


class ChunkPlayer(LifecycleNode):
    """Action chunks in; commands, their state and diagnostics out.

    Every decision is `aura_ros.control.player.Player`'s; here are topics and clocks. Raises UserError at construction for a
    parameter that cannot be right.
    """

    def __init__(self, **node_options: Any) -> None:
        super().__init__("chunk_player", **node_options)
        self.finished = threading.Event()
        self.exit_code = 0
        self.loading = False
        self.config = parameters.declare(self, PlayerConfig)
        self.player = self._new_player()
        self._measured = MeasuredJoints(self.config.joints)
        self._active = False
        self._simulated = bool(self.get_parameter("use_sim_time").value)
        self._steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._period_ns = IDLE_PERIOD_NS
        self._last_now_ns: int | None = None
        self._last_tick: float | None = None
        self._ticked = 0.0  # steady clock, seconds
        self._said = ""
        self.period_error_ms = SlidingWindow(TICKS_REMEMBERED)
        self.period_ms = SlidingWindow(TICKS_REMEMBERED)

        self._state_pub = self.create_publisher(ChunkState, "chunk_state", qos.RELIABLE)
        self._diagnostics_pub = self.create_publisher(DiagnosticArray, "/diagnostics", qos.RELIABLE)
        self._command_pub: Any = None
        self._gripper_pub: Any = None
        self._timer: Any = None
        self._repeat_timer: Any = None
        self._repeated: FloatArray | None = None
        self._frame = self.config.frame_id
        self.create_subscription(ActionChunk, "action_chunk", self._on_chunk, qos.RELIABLE)
        self.create_subscription(
            JointState, self.config.joint_states_topic, self._on_joints, qos.SENSOR_QUEUE
        )
        self._estop = EmergencyStop(self, self._on_estop)
        self.create_service(Trigger, "~/clear_fault", self._on_clear_fault)
        self.create_timer(1.0, self._diagnose, clock=self._steady)
        self.create_timer(LOOK_S, self._estop.look, clock=self._steady)
        self.create_timer(WATCH_S, self._watch, clock=self._steady)
        parameters.watch(self, PlayerConfig, lambda: self.config, self._apply)

    # -- lifecycle ------------------------------------------------------------------------------------------

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Make the command's publisher; on failure stay unconfigured."""
        config = self.config
        try:
            self._command_pub = self.create_publisher(
                player_messages.command_class(config.command_type), config.command_topic, qos.COMMAND
            )
            if config.gripper_column:
                self._gripper_pub = self.create_publisher(
                    Float64MultiArray, config.gripper_topic, qos.COMMAND
                )
        except Exception as error:
            if isinstance(error, UserError):
                self.get_logger().error(f"configure failed: {error}")
            else:
                self.get_logger().error(f"configure failed\n{traceback.format_exc()}")
            self._free()
            if config.exit_on_configure_failure:
                self.exit_code = 2 if isinstance(error, UserError) else 1
                self.finished.set()
            return TransitionCallbackReturn.FAILURE
        return super().on_configure(state)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Begin anew: nothing moves before a chunk comes. A fault stays until it is cleared."""
        before, self.player = self.player, self._new_player()
        self.player.fault, self.player.emergency = before.fault, before.emergency
        self._active, self._repeated, self._last_now_ns = True, None, None
        self._set_period(IDLE_PERIOD_NS)
        if self.config.command_rate:
            self._repeat_timer = self.create_timer(
                1.0 / self.config.command_rate, self._repeat, clock=self._steady
            )
        return super().on_activate(state)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Stop the robot."""
        self._halt()
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Give the command's topic up."""
        self._free()
        return super().on_cleanup(state)

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Stop the robot and end the process."""
        self._halt()
        self._free()
        self.finished.set()
        return super().on_shutdown(state)

    def _free(self) -> None:
        for publisher in (self._command_pub, self._gripper_pub):
            if publisher is not None:
                self.destroy_publisher(publisher)
        self._command_pub = self._gripper_pub = None

    def _halt(self) -> None:
        if not self._active:
            return
        self._active = False
        for timer in (self._timer, self._repeat_timer):
            if timer is not None:
                self.destroy_timer(timer)
        self._timer = self._repeat_timer = None
        self._send(self.player.stop(time.monotonic_ns(), self._columns_measured()))
        self._publish_state(None)
        # The publisher may go next: time for the stop to arrive.
        if self._command_pub is not None and hasattr(self._command_pub, "wait_for_all_acked"):
            self._command_pub.wait_for_all_acked(Duration(seconds=LAST_WORDS_S))

    def stop(self) -> None:
        """The safe stop."""
        self._halt()

    def destroy_node(self) -> None:
        """Leave the graph at once: rclpy keeps a lifecycle node visible until its state machine is collected."""
        super().destroy_node()
        self._state_machine.destroy_when_not_in_use()

    # -- in ---------------------------------------------------------------------------------------------------

    def _on_chunk(self, msg: ActionChunk) -> None:
        if not self._active:
            return
        columns, data = len(msg.names), np.asarray(msg.data, np.float32)
        if columns and msg.horizon and data.size == msg.horizon * columns:
            data = data.reshape(msg.horizon, columns)
        period_ns = conversions.to_ns(msg.period)
        rows = Rows(msg.epoch, msg.sequence, conversions.to_ns(msg.header.stamp), data)
        kind = (msg.names, msg.units, msg.control_mode, period_ns)
        waiting = self.player.waiting
        taken = self.player.offer(rows, kind, self._now_ns(), time.monotonic_ns(), self._columns_measured())
        if taken.refused:
            self._tick()
        if not taken.accepted:
            return
        self._frame = self.config.frame_id or msg.header.frame_id
        # A robot that waits gets the first row now, not at a tick that was due anyway.
        if waiting:
            self._set_period(period_ns)
            self._tick()

    def _on_joints(self, msg: JointState) -> None:
        age_s = (self._now_ns() - conversions.to_ns(msg.header.stamp)) / NS
        limit_s = self.config.joint_states_max_age
        wrong = self._measured.update(msg.name, msg.position, time.monotonic(), age_s, limit_s)
        if wrong:
            self.player.rejections.add(without_numbers(wrong))

    def _on_estop(self, pressed: bool) -> None:
        self.player.set_emergency(pressed)
        if pressed and self._active:
            self._tick()

    def _on_clear_fault(self, _request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        response.success, response.message = self.player.clear_fault()
        return response

    def _apply(self, config: PlayerConfig) -> None:
        self.config = config
        self.player.apply(config.bounds())

    # -- out --------------------------------------------------------------------------------------------------

    def _new_player(self) -> Player:
        config = self.config
        gripper = [config.columns.index(config.gripper_column)] if config.gripper_column else []
        return Player(config.kind(), config.bounds(), tuple(gripper), config.measures)

    def _now_ns(self) -> int:
        return int(self.get_clock().now().nanoseconds)

    def _set_period(self, period_ns: int) -> None:
        """Tick at this period from now on: by simulated time if there is one, else by the steady clock."""
        if self._timer is not None:
            self.destroy_timer(self._timer)
        self._period_ns, self._last_tick = period_ns, None
        clock = None if self._simulated else self._steady
        self._timer = self.create_timer(period_ns / NS, self._on_timer, clock=clock)

    def _on_timer(self) -> None:
        tick = time.monotonic()
        if self._last_tick is not None:
            took_ms = (tick - self._last_tick) * 1e3
            self.period_ms.add(took_ms)
            self.period_error_ms.add(abs(took_ms - self._period_ns / 1e6))
        self._last_tick = tick
        self._tick()

    def _tick(self) -> None:
        if not self._active:
            return
        now = self._now_ns()
        if self._last_now_ns is not None and now < self._last_now_ns - BACKWARD_JUMP_NS:
            self.player.clock_went_back()
        self._last_now_ns, self._ticked = now, time.monotonic()
        command = self.player.tick(now, time.monotonic_ns(), self._columns_measured())
        self._send(command)
        self._publish_state(command)

    def _watch(self) -> None:
        """Simulated time may stand still, and no tick come: what has timed out is stopped all the same."""
        if not self._active or time.monotonic() - self._ticked < 2 * self._period_ns / NS + WATCH_S:
            return
        self._repeated = None
        command = self.player.watch(self._now_ns(), time.monotonic_ns(), self._columns_measured())
        if command.kind is not Kind.NOTHING:
            self._send(command)
            self._publish_state(command)

    def _columns_measured(self) -> FloatArray | None:
        """Measured positions of the chunk's columns, float32; NaN for one that is no joint; None where not fresh."""
        config = self.config
        if not config.measures:
            return None
        joints = self._measured.positions(time.monotonic(), config.joint_states_max_age)
        if joints is None:
            return None
        found = dict(zip(config.outputs, joints, strict=True))
        return np.array([found.get(name, math.nan) for name in config.columns], np.float32)

    def _scale(self) -> FloatArray:
        return np.asarray(self.config.scale or (1.0,) * len(self.config.outputs), np.float32)

    def _pick(self, rows: FloatArray) -> FloatArray:
        """The command's columns of rows [..., columns], in its order."""
        return rows[..., [self.config.columns.index(name) for name in self.config.outputs]]

    def _send(self, command: Command) -> None:
        """One command to the robot; nothing in shadow mode."""
        if self.config.command_type == JOINT_TRAJECTORY:
            self._send_trajectory(command)
        elif command.values is None:
            self._repeated = None
        else:
            period_s = self._period_ns / NS
            values = command_values(self.config.mode, self._pick(command.values), period_s)
            self._repeated = (
                values * self._scale() if self.config.mode != ControlMode.JOINT_POSITION else None
            )
            self._publish_values(values * self._scale())
        if command.kind is Kind.ROW and command.values is not None:
            self._send_gripper(command.values)

    def _send_trajectory(self, command: Command) -> None:
        """All rows that are left go out with the first one; a controller plays them by itself, until the next chunk."""
        if command.kind is Kind.ROW and command.row is not None and command.row.first:
            rows = self.player.positions_ahead()
        elif command.kind is Kind.STOP and command.values is not None:
            rows = command.values[None]
        else:
            return
        period_s, joints = self._period_ns / NS, self.config.joints
        self._publish(player_messages.trajectory(self._pick(rows) * self._scale(), period_s, joints))

    def _publish_values(self, values: FloatArray) -> None:
        config, stamp = self.config, self.get_clock().now().to_msg()
        if config.command_type == TWIST:
            self._publish(player_messages.twist(values, stamp, self._frame))
        elif config.command_type == FLOAT64_ARRAY:
            self._publish(player_messages.values_array(values))
        else:
            self._publish(player_messages.joint_jog(values, stamp, config.joints, self._period_ns / NS))

    def _repeat(self) -> None:
        if self._repeated is not None and self._active:
            self._publish_values(self._repeated)

    def _send_gripper(self, row: FloatArray) -> None:
        config = self.config
        if self._gripper_pub is None or config.shadow:
            return
        opening = float(row[config.columns.index(config.gripper_column)])
        value = config.gripper_closed + opening * (config.gripper_open - config.gripper_closed)
        self._gripper_pub.publish(player_messages.values_array(np.array([value])))

    def _publish(self, msg: Any) -> None:
        if not self.config.shadow and self._command_pub is not None:
            self._command_pub.publish(msg)

    def _publish_state(self, command: Command | None) -> None:
        state, reason = self.player.state
        msg = player_status.chunk_state(self.player, command)
        msg.header.stamp = self.get_clock().now().to_msg()
        self._state_pub.publish(msg)
        if reason != self._said:
            self._said = reason
            if state is PlayState.FAULT:
                self.get_logger().error(f"fault: {reason}; ~/clear_fault clears it")
            elif state is PlayState.HOLDING:
                self.get_logger().warning(reason)

    def _diagnose(self) -> None:
        state, reason = self.player.state
        errors, periods = self.period_error_ms.percentiles(50, 99), self.period_ms.mean()
        msg = player_status.diagnostics(
            self.get_fully_qualified_name(),
            (state, reason) if self._active else None,
            {
                "rate_hz": round(1e3 / periods, 3) if periods else 0.0,
                "wanted_rate_hz": round(NS / self._period_ns, 3),
                "period_error_ms p50": round(errors[0], 3),
                "period_error_ms p99": round(errors[1], 3),
                **{f"rejected {why}": count for why, count in self.player.rejections.items()},
            },
        )
        msg.header.stamp = self.get_clock().now().to_msg()
        self._diagnostics_pub.publish(msg)


def main() -> None:
    """Run the node until INT, TERM or a shutdown transition."""
    run(ChunkPlayer, "chunk_player")


__all__ = ["ChunkPlayer", "main"]
