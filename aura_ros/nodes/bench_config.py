"""What `aura bench node` is asked for. Imports no rclpy and no torch."""

from __future__ import annotations

from dataclasses import dataclass

from aura_ros.config import check_fields, option


@dataclass(frozen=True)
class NodeBenchConfig:
    """Options of `aura bench node`. Checked at construction; raises UserError naming the field."""

    seconds: float = option(30.0, "how long cameras stream and chunks play", minimum=5.0, maximum=3600.0)
    idle_seconds: float = option(
        10.0, "how long the active node is watched without cameras", minimum=2.0, maximum=3600.0
    )
    camera_rate: float = option(30.0, "pictures of each of two cameras a second", minimum=1.0, maximum=120.0)
    image_size: int = option(256, "pixels, height and width", minimum=16, maximum=2048)
    control_rate: float = option(50.0, "rows a second that the player plays", minimum=1.0, maximum=200.0)

    def __post_init__(self) -> None:
        check_fields(self)


OPTIONS = {name: name for name in ("seconds", "idle_seconds", "camera_rate", "image_size", "control_rate")}
