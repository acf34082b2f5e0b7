"""Parameters of the chunk player, with their meaning and range. Imports no rclpy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aura_ros.config import check_fields, option
from aura_ros.control.commands import (
    COMMAND_TYPES,
    JOINT_TRAJECTORY,
    TWIST,
    TWIST_COLUMNS,
    check_columns,
    check_pair,
)
from aura_ros.control.limits import Limits
from aura_ros.control.playback import NS
from aura_ros.control.player import SHORTEST_PERIOD_NS, Bounds, ChunkKind
from aura_ros.errors import UserError
from aura_ros.types import ControlMode

MODES = {mode.name.lower(): mode for mode in ControlMode}


@dataclass(frozen=True)
class PlayerConfig:
    """Parameters of `chunk_player`; two underscores in a name are a dot in ROS.

    Checked at construction; raises UserError naming the field, the value and what is allowed.
    """

    control_mode: str = option(
        "cartesian_delta",
        "what a row of the policy's chunks means; another chunk is a fault",
        choices=tuple(MODES),
    )
    columns: tuple[str, ...] = option(
        (*TWIST_COLUMNS, "gripper"),
        "names of the chunks' columns in the policy's order (PolicyInfo.names); another chunk is a fault",
    )
    command_type: str = option(
        TWIST,
        "message to the robot: twist (MoveIt Servo), joint_trajectory (JointTrajectoryController), float64_array (forward "
        "controllers), joint_jog (MoveIt Servo, needs control_msgs); docs/interface.md has the table of what drives what",
        choices=COMMAND_TYPES,
    )
    command_topic: str = option("command", "where commands go")
    joints: tuple[str, ...] = option(
        (),
        "the robot's joints, prefixes and all, in its controller's order; an array has no names: its order is this one. "
        "Empty for a twist",
    )
    joint_columns: tuple[str, ...] = option(
        (), "the chunk's column for each of `joints`, where the names differ; empty: the same names"
    )
    scale: tuple[float, ...] = option(
        (),
        "multiplies each command value (order of `joints`; x y z roll pitch yaw of a twist) from SI to what the controller "
        "takes, e.g. 57.29578 for degrees; empty: 1",
    )
    frame_id: str = option("", "frame of a twist; empty: the chunk's own")
    gripper_column: str = option(
        "gripper",
        "column, 0 closed .. 1 open, that goes to `gripper_topic` alone; empty: there is none, or it is one of `joints`",
    )
    gripper_topic: str = option("gripper_command", "Float64MultiArray of one value")
    gripper_closed: float = option(0.0, "value sent for closed", minimum=-1e6, maximum=1e6)
    gripper_open: float = option(1.0, "value sent for open", minimum=-1e6, maximum=1e6)
    joint_states_topic: str = option(
        "joint_states", "JointState with the measured positions, SI, by name; several publishers may share it"
    )
    period: float = option(
        0.0,
        "seconds between rows that every chunk must have; with limits.step it bounds the speed. 0: that of the first chunk, "
        "5 ms or more",
        minimum=0.0,
        maximum=60.0,
    )
    joint_states_max_age: float = option(
        0.2,
        "seconds, by the stamp and by arrival; an older position is as good as none: no chunk is taken then, and a "
        "stop holds what was commanded last",
        minimum=0.001,
        maximum=60.0,
    )
    command_rate: float = option(
        0.0,
        "velocities (twist, joint_jog, float64_array of velocities) are sent again so many times a second between rows, for "
        "controllers with a time-out shorter than a row; 0: once a row",
        minimum=0.0,
        maximum=1000.0,
    )
    chunk_timeout: float = option(
        1.0,
        "seconds without a fresh chunk after which the robot is stopped, and after which a chunk is too old to be played; "
        "longer than the policy's time between chunks, or every chunk is cut short",
        minimum=0.01,
        maximum=60.0,
        read_only=False,
    )
    cross_fade: int = option(
        0,
        "rows over which a new chunk takes over from the old one's: smoother, and later by as much; 0: at once",
        minimum=0,
        maximum=1000,
        read_only=False,
    )
    limits__lower: tuple[float, ...] = option(
        (),
        "smallest value of each column in a row, SI; a chunk below it is a fault; empty: none",
        read_only=False,
    )
    limits__upper: tuple[float, ...] = option(
        (),
        "largest value of each column in a row, SI; a chunk above it is a fault; empty: none",
        read_only=False,
    )
    limits__step: tuple[float, ...] = option(
        (),
        "how far a row may move each column, SI (for positions: from the row before, also across a splice); a chunk that "
        "moves further is a fault, never clamped; empty: no bound",
        read_only=False,
    )
    limits__deviation: float = option(
        0.0,
        "rad or m that a joint may be from where it was told to be when a chunk comes: beyond it the arm does not follow, "
        "and that is a fault; 0: not looked at",
        minimum=0.0,
        maximum=1e6,
        read_only=False,
    )
    shadow: bool = option(
        False, "publish everything but commands: try a policy beside the one that drives", read_only=True
    )
    exit_on_configure_failure: bool = option(
        False, "end the process with status 2 when configuring fails, so that a launch file can shut down"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        mode = MODES[self.control_mode]
        if len(set(self.columns)) != len(self.columns) or not self.columns:
            raise UserError(f"columns {list(self.columns)} must be different names, one or more")
        check_pair(mode, self.command_type)
        if self.joint_columns and len(self.joint_columns) != len(self.joints):
            raise UserError(
                f"joint_columns names {len(self.joint_columns)} columns for {len(self.joints)} joints; give one each"
            )
        check_columns(self.columns, self.gripper_column, self.command_type, self.joint_columns or self.joints)
        if self.command_type == TWIST and self.joints:
            raise UserError(f"joints {list(self.joints)} mean nothing to a twist; leave them empty")
        if self.scale and len(self.scale) != len(self.outputs):
            raise UserError(
                f"scale has {len(self.scale)} numbers for {len(self.outputs)} command values "
                f"({', '.join(self.outputs)}); give one each"
            )
        if not all(math.isfinite(value) and value != 0 for value in self.scale):
            raise UserError(f"scale {list(self.scale)} must be finite and not 0")
        if 0 < self.period * NS < SHORTEST_PERIOD_NS:
            raise UserError(
                f"period {self.period} s is too short; allowed: 0, or {SHORTEST_PERIOD_NS / NS:g} s or more"
            )
        self.bounds()

    @property
    def mode(self) -> ControlMode:
        """What a row means."""
        return MODES[self.control_mode]

    @property
    def outputs(self) -> tuple[str, ...]:
        """Columns of the chunk in the order of the command's values."""
        return TWIST_COLUMNS if self.command_type == TWIST else (self.joint_columns or self.joints)

    @property
    def measures(self) -> bool:
        """Whether measured joint positions are needed."""
        return self.mode == ControlMode.JOINT_POSITION or self.command_type == JOINT_TRAJECTORY

    def kind(self) -> ChunkKind:
        """What every chunk must be."""
        return ChunkKind(self.columns, self.mode, round(self.period * NS))

    def bounds(self) -> Bounds:
        """What holds while it runs. Raises UserError."""
        deviation = self.limits__deviation or math.inf
        return Bounds(self.limits(), round(self.chunk_timeout * NS), self.cross_fade, deviation)

    def limits(self) -> Limits:
        """The bounds of the columns. Raises UserError."""
        n = len(self.columns)
        return Limits(
            self.columns,
            self.limits__lower or (-math.inf,) * n,
            self.limits__upper or (math.inf,) * n,
            self.limits__step or (math.inf,) * n,
        )
