"""Parameters of the synthetic source, with their meaning and range. Imports no rclpy."""

from __future__ import annotations

from dataclasses import dataclass

from aura_ros.config import check_fields, option


@dataclass(frozen=True)
class SourceConfig:
    """Parameters of `synthetic_source`. Checked at construction; raises UserError naming the field."""

    cameras: tuple[str, ...] = option(("agentview", "wrist"), "images/<camera> for each; empty: no pictures")
    camera_rate: float = option(30.0, "pictures of each camera a second", minimum=0.1, maximum=1000.0)
    image_size: int = option(256, "pixels, height and width", minimum=1, maximum=4096)
    state_rate: float = option(100.0, "poses and joint states a second", minimum=0.1, maximum=1000.0)
    joints: tuple[str, ...] = option(("panda_finger_joint1", "panda_finger_joint2"), "names in joint_states")
    seed: int = option(0, "of the pictures", minimum=0, maximum=2**31 - 1)

    def __post_init__(self) -> None:
        check_fields(self)
