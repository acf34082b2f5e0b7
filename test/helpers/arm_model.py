"""A kinematic arm that takes a robot's own commands, follows them with a lag, and says what is wrong with them.

No rclpy: times are nanoseconds of one steady clock and passed in. The arm moves in steps of 5 ms up to the time given,
never beyond its own limits of position and velocity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from arm_chain import Array, Chain, read_joints
from arm_config import FLOAT64_ARRAY, JOINT_JOG, JOINT_TRAJECTORY, TWIST, ArmConfig
from arm_judge import NS, STILL, Judge, Point

from aura_ros.errors import UserError

URDF = Path(__file__).resolve().parents[1] / "data" / "stand_in_arm.urdf"
BASE, TIP = "base", "tool0"
FINGERS = ("left_finger", "right_finger")
STEP_NS = NS // 200
STEP_S = STEP_NS / NS


@dataclass(frozen=True)
class Velocities:
    """values: [joints], rad/s. until_ns: halted then; None: goes on, as a forward controller does."""

    values: Array
    until_ns: int | None = None


@dataclass(frozen=True)
class Twist:
    """values: [6] along the base's axes, or the tip's. until_ns: halted then."""

    values: Array
    in_tip: bool
    until_ns: int


@dataclass(frozen=True)
class Route:
    """times_ns: [points], rising. positions: [points, joints]; linear between them, the last one held."""

    times_ns: Array
    positions: Array


class Arm:
    """See the module. Commands may come in any order; their times must not go back."""

    def __init__(self, config: ArmConfig) -> None:
        """Raises UserError for a home that does not fit."""
        self.config = config
        self.chain = Chain(URDF, BASE, TIP)
        self.names = tuple(config.joint_prefix + name for name in self.chain.names)
        fingers = [joint for joint in read_joints(URDF).values() if joint.name in FINGERS]
        self.finger_names = tuple(config.joint_prefix + joint.name for joint in fingers)
        # How far each finger goes to be open.
        self._reach = np.array([max((j.lower, j.upper), key=abs) for j in fingers])
        self._finger_speed = float(min(j.velocity for j in fingers) / np.abs(self._reach).max())
        home = np.array(config.home, np.float64)
        if home.shape != self.chain.lower.shape or np.any(
            (home < self.chain.lower) | (home > self.chain.upper)
        ):
            raise UserError(
                f"home {list(config.home)} does not fit; give {len(self.names)} positions within the limits of "
                f"{', '.join(self.names)}"
            )
        self.judge = Judge(config, self.names, self.chain.lower, self.chain.upper, self.chain.velocity)
        self.position, self.velocity = home.copy(), np.zeros(len(home))
        self.gripper = self._gripper_goal = 1.0
        self.travel = np.zeros(len(home))
        self.halts = self.bound_halts = self.dropped = self.stops_after_estop = 0
        self.largest_gap_s = 0.0
        self.estopped = False
        self._forbidden_ns: dict[str, int] = {}  # violation -> since when
        self._rng = np.random.default_rng(config.seed)
        self._last_velocities, self._last_twist = np.zeros(len(home)), np.zeros(6)
        self._due: list[tuple[int, Callable[[int], None]]] = []
        self._drive: Any = Route(np.zeros(1), home[None])
        self._at_limit = np.zeros(len(home), bool)
        self._time_ns: int | None = None

    @property
    def finger_positions(self) -> Array:
        """Metres, in the order of `finger_names`."""
        return self.gripper * self._reach

    def pose(self) -> Array:
        """[4, 4] of the tip in the base's frame."""
        return self.chain.pose(self.position)

    # -- commands ---------------------------------------------------------------------------------------------

    def take_twist(self, values: Sequence[float], frame: str, stamp_ns: int | None, now_ns: int) -> None:
        """[6], m/s and rad/s; like MoveIt Servo: stale by its stamp, in the base's or the tip's frame."""
        twist = np.asarray(values, np.float64)
        command = self._begin(TWIST, now_ns)
        if not (self.judge.fits(command, twist, 6) and self._fresh(command, stamp_ns, now_ns)):
            return
        if frame not in (BASE, TIP):
            self.judge.report("frame", command, f"frame '{frame}' is unknown; known: {BASE}, {TIP}")
            return
        before, self._last_twist = self._last_twist, twist
        if not self._allowed(command, bool(np.any(twist)), now_ns):
            return
        self.judge.twist(command, twist, before)
        until_ns = int(stamp_ns or 0) + round(self.config.command_timeout * NS)
        self._soon(now_ns, lambda at: self._drive_by(Twist(twist, frame == TIP, until_ns)))

    def take_jog(
        self, names: Sequence[str], values: Sequence[float], stamp_ns: int | None, now_ns: int
    ) -> None:
        """Joint velocities, rad/s, of some joints; like MoveIt Servo."""
        given = np.asarray(values, np.float64)
        command = self._begin(JOINT_JOG, now_ns)
        if not (
            self.judge.names_fit(command, names, partial=True) and self.judge.fits(command, given, len(names))
        ):
            return
        if not self._fresh(command, stamp_ns, now_ns):
            return
        velocities = np.zeros(len(self.names))
        velocities[[self.names.index(name) for name in names]] = given
        until_ns = int(stamp_ns or 0) + round(self.config.command_timeout * NS)
        self._take_velocities(command, velocities, until_ns, now_ns)

    def take_array(self, values: Sequence[float], now_ns: int) -> None:
        """Positions (rad) or velocities (rad/s) of all joints in order; like a forward controller, until the next."""
        given = np.asarray(values, np.float64)
        command = self._begin(FLOAT64_ARRAY, now_ns)
        if not self.judge.fits(command, given, len(self.names)):
            return
        if self.config.array_of == "velocity":
            self._take_velocities(command, given, None, now_ns)
            return
        if not self._allowed(command, self._moves(given), now_ns):
            return
        self.judge.positions(command, given[None], self.position)
        self._soon(now_ns, lambda at: self._drive_by(Route(np.array([at]), given[None])))

    def take_trajectory(
        self, names: Sequence[str], points: Sequence[Point], stamp_ns: int | None, now_ns: int
    ) -> None:
        """Like a joint_trajectory_controller: replaces the one before from where the arm is. No points: holds."""
        command = self._begin(JOINT_TRAJECTORY, now_ns)
        if not points:
            if self._allowed(command, False, now_ns):
                self._soon(now_ns, lambda at: self._hold())
            return
        if not self.judge.names_fit(command, names, partial=False):
            return
        if not self.judge.points_fit(command, points, stamp_ns, now_ns):
            return
        order = [list(names).index(name) for name in self.names]
        # What is past already, by the trajectory's stamp, is left out.
        past_ns = 0 if stamp_ns is None else now_ns - stamp_ns
        points = [
            Point(p.time_ns, np.asarray(p.positions, np.float64)[order])
            for p in points
            if p.time_ns > past_ns
        ]
        rows = np.array([point.positions for point in points])
        if not self._allowed(command, self._moves(rows), now_ns):
            return
        self.judge.positions(command, rows, self.position)
        self.judge.path_velocities(command, points)
        times = np.array([point.time_ns for point in points], np.int64)

        def start(at: int) -> None:
            absolute = times + (at if stamp_ns is None else stamp_ns)
            ahead = absolute > at
            if ahead.any():
                path_times = np.concatenate([[at], absolute[ahead]])
                self._drive_by(Route(path_times, np.concatenate([self.position[None], rows[ahead]])))

        self._soon(now_ns, start)

    def take_gripper(self, values: Sequence[float], now_ns: int) -> None:
        """One value, 0 closed .. 1 open."""
        given = np.asarray(values, np.float64)
        command = self._begin("gripper", now_ns)
        if not self.judge.fits(command, given, 1):
            return
        value = float(given[0])
        if not self._allowed(command, abs(value - self._gripper_goal) > STILL, now_ns):
            return
        if not -1e-6 <= value <= 1 + 1e-6:
            self.judge.report("position_limit", command, f"gripper {value:.4g}; allowed: 0 to 1")
        self._soon(now_ns, lambda at: setattr(self, "_gripper_goal", min(1.0, max(0.0, value))))

    def set_estop(self, on: bool, now_ns: int) -> None:
        """Stand still at once and take no command; or take them again."""
        self.advance(now_ns)
        self.estopped = on
        self._forbid("after_estop", on, now_ns)
        if on:
            self._due.clear()
            self._hold()
            self.velocity[:] = 0

    def expect_silence(self, on: bool, now_ns: int) -> None:
        """From now on, after the grace, any command is a violation; or not any more."""
        self.advance(now_ns)
        self._forbid("not_silent", on, now_ns)

    # -- motion -----------------------------------------------------------------------------------------------

    def advance(self, now_ns: int) -> None:
        """Move on to a time."""
        if self._time_ns is None:
            self._time_ns = now_ns
        self.largest_gap_s = max(self.largest_gap_s, (now_ns - self._time_ns) / NS)
        while self._time_ns + STEP_NS <= now_ns:
            self._time_ns += STEP_NS
            while self._due and self._due[0][0] < self._time_ns:
                at_ns, effect = self._due.pop(0)
                effect(at_ns)
            self._step(self._time_ns)

    def configure(self, config: ArmConfig) -> None:
        """Take changed faults over."""
        self.config = self.judge.config = config

    def summary(self) -> dict[str, Any]:
        """What happened, for JSON."""
        return {
            "violations": dict(self.judge.violations),
            "violations_total": sum(self.judge.violations.values()),
            "commands": dict(self.judge.commands),
            "dropped_commands": self.dropped,
            "halts": self.halts,
            "bound_halts": self.bound_halts,
            "stops_after_estop": self.stops_after_estop,
            "joint_travel": {
                name: round(float(way), 6) for name, way in zip(self.names, self.travel, strict=True)
            },
            "positions": {
                name: round(float(value), 6) for name, value in zip(self.names, self.position, strict=True)
            },
            "gripper": round(self.gripper, 6),
            "largest_gap_s": round(self.largest_gap_s, 3),
        }

    def _step(self, time_ns: int) -> None:
        chain, share = self.chain, 1 - math.exp(-STEP_S / self.config.lag)
        drive = self._drive
        if isinstance(drive, Route):
            goal = np.array([np.interp(time_ns, drive.times_ns, column) for column in drive.positions.T])
            velocity = (np.clip(goal, chain.lower, chain.upper) - self.position) * (share / STEP_S)
        else:
            if drive.until_ns is not None and time_ns > drive.until_ns:
                self.halts += bool(np.any(drive.values))
                # The next command is judged against standing still.
                self._last_velocities, self._last_twist = np.zeros(len(self.names)), np.zeros(6)
                drive = self._drive = Velocities(np.zeros(len(self.names)))
            wanted = drive.values
            if isinstance(drive, Twist):
                wanted = self._from_twist(drive)
            velocity = self.velocity + (wanted - self.velocity) * share
        velocity = np.clip(velocity, -chain.velocity, chain.velocity)
        position = np.clip(self.position + velocity * STEP_S, chain.lower, chain.upper)
        self.velocity = (position - self.position) / STEP_S
        self.travel += np.abs(position - self.position)
        self.position = position
        self._tell_limits(drive, velocity)
        change = (self._gripper_goal - self.gripper) * share
        most = self._finger_speed * STEP_S
        self.gripper += min(most, max(-most, change))

    def _from_twist(self, drive: Twist) -> Array:
        twist = drive.values
        if drive.in_tip:
            turn = self.pose()[:3, :3]
            twist = np.concatenate([turn @ twist[:3], turn @ twist[3:]])
        wanted = self.chain.joint_velocities(self.position, twist)
        # All joints slowed alike: slower along the same way.
        return wanted / max(1.0, float(np.max(np.abs(wanted) / self.chain.velocity)))

    def _tell_limits(self, drive: Any, velocity: Array) -> None:
        """Say once that velocities drive a joint into its limit. Positions beyond it are judged as commands.

        Who sends a twist doesn't know the joints: there Servo halts at their bounds, and that is counted, no violation.
        """
        if isinstance(drive, Route):
            self._at_limit[:] = False
            return
        chain = self.chain
        driven = ((self.position <= chain.lower) & (velocity < -1e-3)) | (
            (self.position >= chain.upper) & (velocity > 1e-3)
        )
        for joint in np.flatnonzero(driven & ~self._at_limit):
            if isinstance(drive, Twist):
                self.bound_halts += 1
                continue
            text = f"driven into its limit {self.position[joint]:.4g}"
            self.judge.report("position_limit", "velocities", f"{self.names[joint]} {text}")
        self._at_limit = driven

    # -- parts ------------------------------------------------------------------------------------------------

    def _begin(self, kind: str, now_ns: int) -> str:
        self.advance(now_ns)
        return self.judge.count(kind)

    def _take_velocities(self, command: str, values: Array, until_ns: int | None, now_ns: int) -> None:
        before, self._last_velocities = self._last_velocities, values
        if not self._allowed(command, bool(np.any(values)), now_ns):
            return
        self.judge.velocities(command, values, before)
        self._soon(now_ns, lambda at: self._drive_by(Velocities(values, until_ns)))

    def _fresh(self, command: str, stamp_ns: int | None, now_ns: int) -> bool:
        timeout = self.config.command_timeout
        if stamp_ns is not None and now_ns - stamp_ns < timeout * NS:
            return True
        age = "its stamp is 0" if stamp_ns is None else f"it is {(now_ns - stamp_ns) / NS:.3f} s old"
        self.judge.report("stale", command, f"{age}; younger than {timeout:g} s is needed")
        return False

    def _forbid(self, violation: str, on: bool, now_ns: int) -> None:
        if not on:
            self._forbidden_ns.pop(violation, None)
        else:
            self._forbidden_ns.setdefault(violation, now_ns)

    def _allowed(self, command: str, moves: bool, now_ns: int) -> bool:
        """Whether commands are taken now. After an e-stop only those that ask for motion are violations."""
        for violation, since_ns in self._forbidden_ns.items():
            if violation == "after_estop" and not moves:
                self.stops_after_estop += 1
            elif (late := (now_ns - since_ns) / NS) > self.config.grace:
                self.judge.report(violation, command, f"{late:.3f} s after commands had to end")
        return not self.estopped

    def _moves(self, positions: Array) -> bool:
        return bool(np.any(np.abs(positions - self.position) > STILL))

    def _soon(self, now_ns: int, effect: Callable[[int], None]) -> None:
        """Let a command take effect after the latency, unless it is dropped."""
        if self._rng.random() < self.config.fault__drop_commands:
            self.dropped += 1
            return
        self._due.append((now_ns + round(self.config.fault__latency * NS), effect))
        self._due.sort(key=lambda due: due[0])

    def _drive_by(self, drive: Any) -> None:
        self._drive = drive

    def _hold(self) -> None:
        self._drive = Route(np.zeros(1), self.position[None].copy())
