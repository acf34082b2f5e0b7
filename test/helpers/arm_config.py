"""Parameters of the stand-in arm, its faults among them. No rclpy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from aura_ros.config import check_fields, dotted, from_text, option
from aura_ros.errors import UserError

JOINT_TRAJECTORY, TWIST, JOINT_JOG, FLOAT64_ARRAY = "joint_trajectory", "twist", "joint_jog", "float64_array"
COMMAND_TYPES = (JOINT_TRAJECTORY, TWIST, JOINT_JOG, FLOAT64_ARRAY)
# Where controllers of each kind listen by default.
TOPICS = {
    JOINT_TRAJECTORY: "joint_trajectory",
    TWIST: "delta_twist_cmds",
    JOINT_JOG: "delta_joint_cmds",
    FLOAT64_ARRAY: "commands",
}
FAULT = "fault__"


@dataclass(frozen=True)
class ArmConfig:
    """What the arm is told at its start; faults may change while it runs, see `with_fault`."""

    command_type: str = option(TWIST, "the command that it takes", choices=COMMAND_TYPES)
    command_topic: str = option("", "where; empty: as its controllers do, by command_type")
    gripper_topic: str = option("gripper_command", "one value, 0 closed .. 1 open")
    array_of: str = option("position", "what float64_array holds", choices=("position", "velocity"))
    joint_prefix: str = option("", "before every joint's name, like a tf_prefix")
    command_timeout: float = option(
        0.1, "seconds of a twist or jog, counted from its stamp", minimum=0.001, maximum=60.0
    )
    lag: float = option(0.02, "seconds, of a first-order lag behind commands", minimum=0.001, maximum=10.0)
    grace: float = option(
        0.1,
        "seconds in which commands may still come after an e-stop or expect_silence",
        minimum=0.0,
        maximum=10.0,
    )
    home: tuple[float, ...] = option(
        (0.0, 0.4, 1.2, 0.0, 1.5416, 0.0), "first joint positions, rad, in the controller's order"
    )
    max_position_step: float = option(
        0.2,
        "rad; a commanded position farther from the one before, the first from where the arm is, is a jump",
        minimum=0.0,
        maximum=100.0,
    )
    max_velocity_step: float = option(1.0, "rad/s between two joint velocities", minimum=0.0, maximum=100.0)
    max_linear: float = option(1.5, "m/s of a twist", minimum=0.0, maximum=100.0)
    max_angular: float = option(10.0, "rad/s of a twist", minimum=0.0, maximum=100.0)
    max_linear_step: float = option(1.0, "m/s between two twists", minimum=0.0, maximum=100.0)
    max_angular_step: float = option(5.0, "rad/s between two twists", minimum=0.0, maximum=100.0)
    state_rate: float = option(100.0, "Hz of joint_states and ee_pose", minimum=1.0, maximum=1000.0)
    velocities_nan: bool = option(False, "fill velocities with NaN, as some drivers do")
    camera_rate: float = option(
        0.0, "Hz of images/agentview and images/wrist; 0: none", minimum=0.0, maximum=120.0
    )
    image_size: int = option(256, "pixels, width and height", minimum=16, maximum=2048)
    seed: int = option(0, "of what is dropped and of the pictures", minimum=0, maximum=2**31 - 1)
    max_seconds: float = option(
        600.0, "ends by itself after so long, so that none is left behind", minimum=0.1, maximum=86400.0
    )
    fault__latency: float = option(0.0, "seconds until a command takes effect", minimum=0.0, maximum=60.0)
    fault__drop_commands: float = option(
        0.0, "share of commands that take no effect", minimum=0.0, maximum=1.0
    )
    fault__drop_states: float = option(
        0.0, "share of joint_states and ee_pose not sent", minimum=0.0, maximum=1.0
    )
    fault__freeze_states: bool = option(False, "joint_states keep their positions, with fresh stamps")
    fault__stamp_age: float = option(
        0.0, "seconds that all stamps lie in the past", minimum=0.0, maximum=3600.0
    )
    fault__nan_joint: str = option("", "joint whose position is NaN in joint_states")
    fault__stop_camera: str = option("", "camera that stops", choices=("", "agentview", "wrist", "all"))

    def __post_init__(self) -> None:
        check_fields(self)

    def with_fault(self, text: str) -> ArmConfig:
        """With one fault set, as "latency=0.2" or "nan_joint=elbow_flex"; "clear": without any. Raises UserError."""
        faults = {f.name: f for f in dataclasses.fields(self) if f.name.startswith(FAULT)}
        if text.strip() == "clear":
            return dataclasses.replace(self, **{name: field.default for name, field in faults.items()})
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or FAULT + name not in faults:
            known = ", ".join(dotted(known).split(".")[1] for known in faults)
            raise UserError(f"fault '{text}' is not known; give NAME=VALUE with one of: {known}; or clear")
        return dataclasses.replace(self, **{FAULT + name: from_text(ArmConfig, FAULT + name, value)})
