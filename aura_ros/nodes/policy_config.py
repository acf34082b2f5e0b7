"""Parameters of the policy node, with their meaning and range. Imports no rclpy."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from aura_ros.backbones.openvla_oft.layout import FolderOptions, is_hub_name
from aura_ros.backbones.registry import ACCELERATIONS, DTYPES, KNOWN_BACKBONES, RANDOM
from aura_ros.config import check_fields, option
from aura_ros.errors import UserError
from aura_ros.memory.config import UNTRAINED


@dataclass(frozen=True)
class PolicyNodeConfig:
    """Parameters of `policy_node`; two underscores in a name are a dot in ROS.

    Checked at construction; raises UserError naming the field, the value and what is allowed.
    """

    mode: str = option(
        "realtime",
        "lockstep: simulation; streams are joined by equal stamps and every stamp is answered once. "
        "realtime: robots; the newest fresh observation, at the memory's own period",
        choices=("lockstep", "realtime"),
    )
    backbone: str = option(
        "compact",
        "the frozen policy: a small one for CPUs, OpenVLA-OFT, or one that another package adds",
        choices=KNOWN_BACKBONES,
    )
    checkpoint: str = option(
        "",
        "weights of the backbone: a .safetensors file, for openvla_oft also a published checkpoint's folder or a "
        "downloaded hub snapshot (owner/name@revision); empty: the policy that is shipped; random: seeded random ones (both "
        "compact only)",
    )
    device: str = option("cpu", "where the backbone runs: cpu, cuda or cuda:<n>")
    dtype: str = option(
        "auto",
        "of the backbone's parameters; auto: bfloat16 for openvla_oft, float32 for compact",
        choices=DTYPES,
    )
    accelerate: str = option(
        "none",
        "compile: torch.compile; cuda-graph: one CUDA graph for each length of prompt, whose first query is slow (not "
        "yet tried on a GPU); compared with the plain network at activation",
        choices=ACCELERATIONS,
    )
    unnorm_key: str = option("", "entry of the checkpoint's statistics; empty: the only one there is")
    openvla_oft__cameras: str = option(
        "",
        "names of the cameras of a published checkpoint in the order of its training, separated by commas; empty: "
        "those of the robot with its dimensions (LIBERO: agentview,wrist)",
    )
    openvla_oft__image_flip: str = option(
        "auto",
        "left_right: mirror the camera's view, as the LIBERO checkpoints were trained; none: for real robots; auto: "
        "left_right for a checkpoint of LIBERO's dimensions",
        choices=("auto", "left_right", "none"),
    )
    openvla_oft__head: str = option(
        "auto",
        "auto: the published checkpoint's action head file, which must be there; discrete: trained without one",
        choices=("auto", "discrete"),
    )
    openvla_oft__film: str = option(
        "auto",
        "auto: FiLM if the published checkpoint has its file; required: refuse one without",
        choices=("auto", "required"),
    )
    openvla_oft__action_scale: str = option(
        "",
        "metres, radians, ... for one unit of each action column of a published checkpoint, separated by commas; "
        "empty: of the robot with its dimensions (LIBERO 0.05 m, 0.5 rad; Bridge and ALOHA 1)",
    )
    openvla_oft__period: float = option(
        0.0,
        "seconds between rows of a published checkpoint's chunk; 0: of the robot with its dimensions "
        "(LIBERO 0.05, Bridge 0.2, ALOHA 0.04)",
        minimum=0.0,
        maximum=60.0,
    )
    openvla_oft__horizon: int = option(
        0,
        "rows of a published checkpoint's chunk, which its files do not say; 0: as of the robot with its "
        "dimensions (LIBERO 8, Bridge 5, ALOHA 25)",
        minimum=0,
        maximum=1000,
    )
    seed: int = option(0, "of random weights", minimum=0, maximum=2**31 - 1)
    torch_threads: int = option(
        1,
        "CPU threads of the backbone; more is faster and takes them from the robot's drivers",
        minimum=1,
        maximum=256,
    )
    memory__checkpoint: str = option(
        "",
        "trained memory (.safetensors); empty: the shipped one if backbone, N and period are those it was trained for, else "
        "an untrained one, whose residual is exactly zero; untrained: always that",
    )
    memory__state_dim: int = option(
        32,
        "N = dk = dv of an untrained memory; another N than 32 turns the shipped one off; a checkpoint brings its own",
        minimum=1,
        maximum=1024,
    )
    memory_step_period: int = option(
        0,
        "control steps between queries; 0: the chunk's horizon. A memory of another period is refused, the shipped one "
        "left out",
        minimum=0,
        maximum=100_000,
    )
    memory__autosave: str = option(
        "",
        "file that holds the memory's state after every memory step, so that a restart goes on exactly; each chunk "
        "leaves later by the time of writing 4 KB. Empty: none, a restart begins with an empty memory",
    )
    memory__restore: bool = option(
        True,
        "begin with the state in memory.autosave at activation, where the file exists; one that is broken or of other "
        "weights refuses the activation. false: begin empty, and overwrite the file with the first memory step",
    )
    gate__threshold: float = option(
        -1.0,
        "the gate fires when its probability is greater; negative: the memory's own. Higher writes less",
        minimum=-1.0,
        maximum=1.0,
        read_only=False,
    )
    gate__mode: str = option(
        "learned",
        "learned: the gate decides. always, never: W is written at every memory step or at none, for comparison; the "
        "gate's own probability and threshold are still told. always overwrites what the gate would have kept, never "
        "remembers nothing",
        choices=("learned", "always", "never"),
        read_only=False,
    )
    gate__writes_per_second: float = option(
        0.0,
        "budget of writes, kept over write_rate_window by a threshold that rises while it is exceeded, up to 1 (no write) "
        "and never below the own one; 0: none. A small budget leaves out what the gate is less sure of",
        minimum=0.0,
        maximum=1000.0,
        read_only=False,
    )
    action_limit: float = option(
        1.5,
        "largest magnitude of an action in controller units; a chunk beyond it is a fault, never clamped",
        minimum=0.01,
        maximum=1000.0,
        read_only=False,
    )
    instruction: str = option("", "the task, until one arrives on the topic `instruction`")
    reset: str = option(
        "episode",
        "whether an episode's start (topic `episode`) clears the memory",
        choices=("episode", "never"),
    )
    enabled_at_start: bool = option(False, "infer as soon as active; false on robots: call ~/enable")
    shadow: bool = option(
        False,
        "infer and publish everything but action_chunk: nothing moves, while gate, latents and status can be watched",
    )
    prefetch: bool = option(
        True,
        "query before the period is over, at the earliest at its half, where the player's chunk_state says that its rows "
        "end before the next chunk would come (realtime). false: the robot may wait for chunks",
    )
    proprio__sources: tuple[str, ...] = option(
        ("pose:ee_pose", "joints:joint_states:panda_finger_joint1,panda_finger_joint2"),
        "ordered parts of the proprioception vector: 'pose:<topic>' (position, axis-angle) or "
        "'joints:<topic>:<name>,<name>' (positions, mapped by name)",
    )
    proprio__orientation_reference: tuple[float, ...] = option(
        (0.0, 0.0, 0.0, 1.0),
        "quaternion x y z w on whose side the axis-angle's sign is taken; [1, 0, 0, 0] for LIBERO checkpoints",
        minimum=-1.0,
        maximum=1.0,
    )
    image_transport: str = option(
        "raw", "raw: Image on images/<camera>; compressed: CompressedImage on images/<camera>/compressed",
        choices=("raw", "compressed"),
    )  # fmt: skip
    image_max_age: float = option(
        0.5,
        "seconds; an older image means hold (realtime)",
        minimum=0.001,
        maximum=3600.0,
        read_only=False,
    )
    proprio_max_age: float = option(
        0.2,
        "seconds; older proprioception means hold (realtime)",
        minimum=0.001,
        maximum=3600.0,
        read_only=False,
    )
    max_skew: float = option(
        0.1,
        "seconds between the oldest and newest stream of one observation (realtime)",
        minimum=0.0,
        maximum=3600.0,
        read_only=False,
    )
    max_future: float = option(
        0.05,
        "seconds that a stamp may lie ahead of the node's clock (realtime)",
        minimum=0.0,
        maximum=3600.0,
        read_only=False,
    )
    write_rate_window: int = option(
        100,
        "memory steps that write_rate is counted over",
        minimum=1,
        maximum=1_000_000,
        read_only=False,
    )
    latency_window: int = option(
        1000, "queries that the latency percentiles are taken over", minimum=1, maximum=1_000_000
    )
    publish_latent: bool = option(False, "publish the hidden state on ~/latent, to train memories from bags")
    wait_for_recorder: str = option(
        "", "node that must listen to ~/gate and action_chunk before the first query; empty: wait for nobody"
    )
    exit_on_configure_failure: bool = option(
        False, "end the process with status 2 when configuring fails, so that a launch file can shut down"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        reference = self.proprio__orientation_reference
        if len(reference) != 4 or not any(reference):
            raise UserError(
                f"proprio.orientation_reference {list(reference)} is not a quaternion; give four numbers "
                "[x, y, z, w], not all zero"
            )

        if re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is None:
            raise UserError(f"device '{self.device}' is not known; allowed: cpu, cuda, cuda:0, cuda:1, ...")

    def folder_options(self) -> FolderOptions:
        """What the parameters say about a published checkpoint."""
        names = [name.strip() for name in self.openvla_oft__cameras.split(",")]
        return FolderOptions(
            cameras=tuple(names) if any(names) else None,
            mirror={"auto": None, "left_right": True, "none": False}[self.openvla_oft__image_flip],
            horizon=self.openvla_oft__horizon or None,
            head="discrete" if self.openvla_oft__head == "discrete" else None,
            scale=self._action_scale(),
            period_s=self.openvla_oft__period or None,
            film=True if self.openvla_oft__film == "required" else None,
        )

    def _action_scale(self) -> tuple[float, ...] | None:
        text = self.openvla_oft__action_scale
        try:
            return tuple(float(part) for part in text.split(",")) if text.strip() else None
        except ValueError:
            raise UserError(
                f"openvla_oft__action_scale '{text}' is not allowed; give numbers separated by commas"
            ) from None

    def check_files(self) -> None:
        """Refuse paths that do not exist, before anything heavy is started. Raises UserError."""
        for what, path in (("checkpoint", self.checkpoint), ("memory checkpoint", self.memory__checkpoint)):
            try:
                found = (
                    path in ("", RANDOM if what == "checkpoint" else UNTRAINED)
                    or Path(path).exists()
                    or (what == "checkpoint" and is_hub_name(path))
                )
            except OSError as error:
                raise UserError(
                    f"{what} '{path}' cannot be looked at ({error.strerror}); give a readable one"
                ) from None
            if not found:
                raise UserError(f"{what} '{path}' does not exist; give an existing file or folder")
        if self.memory__autosave and not os.path.isdir(os.path.dirname(self.memory__autosave) or "."):
            raise UserError(
                f"memory.autosave '{self.memory__autosave}' is in no existing folder; make the folder or give another path"
            )
