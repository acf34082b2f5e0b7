"""What flows from left to right: an observation enters, a chunk of actions leaves.

These live at the package's root because backbones, policy, simulator and nodes all speak them;
`aura_ros.policy` re-exports them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from aura_ros.errors import UserError

FloatArray = npt.NDArray[np.float32]
ImageArray = npt.NDArray[np.uint8]


class ControlMode(IntEnum):
    """What one row of a chunk means. The numbers are those of `ActionChunk.msg`."""

    CARTESIAN_DELTA = 1
    JOINT_DELTA = 2
    JOINT_POSITION = 3
    JOINT_VELOCITY = 4


@dataclass(frozen=True)
class Observation:
    """What a policy sees at one query.

    images: camera name -> uint8 [H, W, 3] RGB, the true view (row 0 is the top, not mirrored).
    proprio: float32 [proprio_dim], SI units, the layout the backbone was trained on.
    instruction: the task in plain language.
    stamp_ns: time of the observation, nanoseconds of the clock that made it.
    """

    images: dict[str, ImageArray]
    proprio: FloatArray
    instruction: str
    stamp_ns: int = 0

    def __post_init__(self) -> None:
        for camera, image in self.images.items():
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
                raise UserError(
                    f"image '{camera}' is {image.dtype} {list(image.shape)}; "
                    "expected uint8 [height, width, 3] RGB"
                )
        if self.proprio.ndim != 1 or not np.isfinite(self.proprio).all():
            raise UserError(f"proprioception {self.proprio.tolist()} must be a finite vector")


@dataclass(frozen=True)
class ActionSpec:
    """What the columns of an action chunk are and how controller units become SI (REP-103).

    names, units: one per action dimension, in the order of the columns.
    scale: SI per controller unit, one per dimension (LIBERO: 0.05 m, 0.5 rad, gripper 1.0).
    period_s: seconds between rows.
    """

    names: tuple[str, ...]
    units: tuple[str, ...]
    scale: tuple[float, ...]
    control_mode: ControlMode
    period_s: float
    horizon: int
    frame_id: str = "base"

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.units) == len(self.scale) >= 1:
            raise UserError(
                f"action spec has {len(self.names)} names, {len(self.units)} units and "
                f"{len(self.scale)} scales; they must be as many"
            )
        if not all(np.isfinite(s) and s > 0 for s in self.scale):
            raise UserError(f"action scale {list(self.scale)} must be positive and finite")
        if self.horizon < 1:
            raise UserError(f"horizon {self.horizon} must be at least 1")
        if not (np.isfinite(self.period_s) and self.period_s > 0):
            raise UserError(f"period {self.period_s} s must be positive")

    @property
    def dim(self) -> int:
        """Columns of a chunk."""
        return len(self.names)


LIBERO_ACTION_SPEC = ActionSpec(
    names=("x", "y", "z", "roll", "pitch", "yaw", "gripper"),
    units=("m", "m", "m", "rad", "rad", "rad", "1"),
    scale=(0.05, 0.05, 0.05, 0.5, 0.5, 0.5, 1.0),
    control_mode=ControlMode.CARTESIAN_DELTA,
    period_s=0.05,
    horizon=8,
    frame_id="base",
)


@dataclass(frozen=True)
class ActionChunk:
    """Rows to execute, one per `spec.period_s`.

    data: float32 [horizon, dim] in SI units; the gripper column is 0 closed .. 1 open.
    stamp_ns: the stamp of the observation the chunk answers.
    """

    data: FloatArray
    spec: ActionSpec
    stamp_ns: int

    def __post_init__(self) -> None:
        if self.data.shape != (self.spec.horizon, self.spec.dim):
            raise UserError(
                f"chunk has shape {list(self.data.shape)}; "
                f"expected [horizon {self.spec.horizon}, {self.spec.dim} names]"
            )
        if not np.isfinite(self.data).all():
            raise UserError("chunk holds NaN or infinite actions")


@dataclass(frozen=True)
class BackboneInfo:
    """What a backbone is: sizes come from its checkpoint's tensors, never from a path.

    cameras: the images it needs, in the order it was trained on.
    checkpoint, checkpoint_hash: identity and sha256 (hex) of the weights in use.
    trained: False for a seeded random initialisation, so that summaries can say so.
    binary_columns: action columns that are either 0 or 1 (a gripper), decided at 0.5.
    details: in words, what else a mistake in the files or parameters would change (head, statistics' key).
    image_rotation: what preprocessing does to the true view, in words and in order, turns and mirrors first.
    """

    name: str
    hidden_dim: int
    proprio_dim: int
    cameras: tuple[str, ...]
    action: ActionSpec
    checkpoint: str
    checkpoint_hash: str
    parameters: int
    trained: bool
    image_rotation: str = "none"
    details: str = ""
    binary_columns: tuple[int, ...] = ()


@dataclass(frozen=True)
class BackboneOutput:
    """One forward pass.

    hidden_state: float32 [hidden_dim], mean over the sequence of the final norm (paper section 3.1).
    base_chunk: float32 [horizon, action_dim], un-normalised controller units; gripper 0 closed .. 1 open.
    timing_ms: milliseconds by stage ("preprocess", "forward", ...).
    """

    hidden_state: FloatArray
    base_chunk: FloatArray
    timing_ms: dict[str, float] = field(default_factory=dict)
