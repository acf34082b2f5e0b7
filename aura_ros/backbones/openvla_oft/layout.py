"""What a published OpenVLA-OFT checkpoint says about its own network: sizes from tensors, never from a path.

Source: moojink/openvla-oft @213c5ff, prismatic/vla/constants.py (robots) and configuration_prismatic.py.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aura_ros.backbones.openvla_oft.config import (
    DIFFUSION_TRAIN_STEPS,
    OPENVLA_OFT_7B,
    ImageConfig,
    LanguageConfig,
    OftConfig,
    TowerConfig,
)
from aura_ros.errors import UserError
from aura_ros.types import LIBERO_ACTION_SPEC, ActionSpec, ControlMode

Shapes = Mapping[str, tuple[int, ...]]

TOWERS = ("featurizer", "fused_featurizer")
# Attention heads cannot be read from tensors, so the towers are known by timm's names. A tensor that is lost as
# a whole kind (registers, the last block) would only make another tower: the names say what must be there.
# Name: heads, depth, class token, registers, LayerScale. The last two are the reference's at test size.
KNOWN_TOWERS: dict[str, tuple[int, int, bool, int, bool]] = {
    "vit_large_patch14_reg4_dinov2.lvd142m": (16, 24, True, 4, True),
    "vit_so400m_patch14_siglip_224": (16, 27, False, 0, False),
    "oft_tiny_dino": (4, 3, True, 4, True),
    "oft_tiny_siglip": (4, 4, False, 0, False),
}
TOWER_PARTS = ("blocks", "class token", "registers", "LayerScale")
# Llama-2-7B: what `text_config` leaves to defaults, which are not the same in every transformers.
LLAMA_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 2048,
}
ALOHA_JOINTS = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate", "gripper")


HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?")


def is_hub_name(text: str) -> bool:
    """Whether it can be a hub snapshot's name, "owner/name" or "owner/name@revision"."""
    return HUB_NAME.fullmatch(text) is not None


@dataclass(frozen=True)
class FolderOptions:
    """What a checkpoint does not say about itself; None: as the reference does for robots of its dimensions.

    cameras: names in the order of training. mirror: flip the true view left-right (LIBERO only). horizon: rows of a
    chunk. film: True demands the FiLM file, False refuses one. diffusion_steps: passes of a diffusion head, 1 to 50.
    head: "discrete" for a checkpoint trained without an action head. scale: SI units for one unit of the statistics, one
    for each action column. period_s: seconds between rows.
    """

    cameras: tuple[str, ...] | None = None
    mirror: bool | None = None
    horizon: int | None = None
    film: bool | None = None
    diffusion_steps: int | None = None
    head: str | None = None
    scale: tuple[float, ...] | None = None
    period_s: float | None = None

    def __post_init__(self) -> None:
        names = self.cameras
        if names is not None and (
            not isinstance(names, tuple | list)
            or not names
            or not all(isinstance(name, str) and name.strip() for name in names)
        ):
            raise UserError(
                f"cameras {names!r} is not allowed; give one or more names, in the order of training"
            )
        if self.head not in (None, "discrete"):
            raise UserError(f"head {self.head!r} is not allowed; only 'discrete' can be asked for")
        for name in ("mirror", "film"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise UserError(f"{name} {value!r} is not allowed; give True, False or None")
        for name, highest in (("horizon", None), ("diffusion_steps", DIFFUSION_TRAIN_STEPS)):
            if (value := getattr(self, name)) is not None and not _whole(value, highest):
                allowed = f"1 to {highest}" if highest else "1 or more"
                raise UserError(f"{name} {value!r} is not allowed; give a whole number, {allowed}")


def _whole(value: Any, highest: int | None) -> bool:
    return type(value) is int and value >= 1 and (highest is None or value <= highest)


@dataclass(frozen=True)
class Robot:
    """What the reference fixes for a robot outside the checkpoint."""

    name: str
    cameras: tuple[str, ...]
    action: ActionSpec
    proprio_dim: int
    mirror: bool
    binary_columns: tuple[int, ...]
    bounds: str


ROBOTS = (
    Robot("LIBERO", ("agentview", "wrist"), LIBERO_ACTION_SPEC, 8, True, (6,), "q99"),
    Robot(
        "Bridge",
        ("agentview",),
        ActionSpec(
            names=LIBERO_ACTION_SPEC.names,
            units=LIBERO_ACTION_SPEC.units,
            scale=(1.0,) * 7,
            control_mode=ControlMode.CARTESIAN_DELTA,
            period_s=0.2,
            horizon=5,
        ),
        7,
        False,
        (6,),
        "q99",
    ),
    Robot(
        "ALOHA",
        ("cam_high", "cam_left_wrist", "cam_right_wrist"),
        ActionSpec(
            names=tuple(f"{side}_{joint}" for side in ("left", "right") for joint in ALOHA_JOINTS),
            units=("rad",) * 6 + ("1",) + ("rad",) * 6 + ("1",),
            scale=(1.0,) * 14,
            control_mode=ControlMode.JOINT_POSITION,
            period_s=0.04,
            horizon=25,
        ),
        14,
        False,
        (),
        "min_max",
    ),
)


def describe_action(action: ActionSpec) -> str:
    """In words, what a number of the chunk is taken for."""
    scale = ", ".join(f"{value:g}" for value in dict.fromkeys(action.scale))
    return f"{action.control_mode.name.lower()} in frame '{action.frame_id}', {scale} SI a unit, every {action.period_s:g} s"


def derive_config(
    settings: Mapping[str, Any],
    shapes: Shapes,
    statistics: Mapping[str, Any],
    source: str,
    options: FolderOptions,
    *,
    film: bool = False,
) -> OftConfig:
    """The network's configuration.

    settings: `config.json`. shapes: tensor name -> shape, heads included. statistics: of every data set.
    Raises `UserError`, beginning with `source`, for an architecture that this package does not have.
    """
    try:
        return _derived(settings, shapes, statistics, source, options, film)
    except UserError as error:  # those of the configuration's own checks do not know whose it is
        if str(error).startswith(source):
            raise
        raise UserError(f"{source}: {error}; check config.json and the options given") from error


def _derived(
    settings: Mapping[str, Any],
    shapes: Shapes,
    statistics: Mapping[str, Any],
    source: str,
    options: FolderOptions,
    film: bool,
) -> OftConfig:
    _check_architecture(settings, source)
    head = _head(shapes)
    action_dim, proprio_dim = _dims(shapes, statistics, head, source)
    robot = _robot(action_dim, proprio_dim or _recorded_proprio(statistics), source)
    language = _language(settings.get("text_config"), shapes, source)
    patch = _shape(shapes, "vision_backbone.featurizer.patch_embed.proj.weight", 4, source)[-1]
    size = _image_size(settings, source)
    ids = settings.get("timm_model_ids")
    if not isinstance(ids, list) or len(ids) != len(TOWERS):
        raise UserError(f"{source}: timm_model_ids {ids!r} in config.json must name two vision towers")
    dino, siglip = (_tower(shapes, tower, name, source) for tower, name in zip(TOWERS, ids, strict=True))
    big = (language, dino, siglip) == (
        OPENVLA_OFT_7B.language,
        OPENVLA_OFT_7B.dino,
        OPENVLA_OFT_7B.siglip,
    )
    mirror = robot.mirror if options.mirror is None else options.mirror
    action = robot.action
    for name in ("horizon", "scale", "period_s"):
        if (value := getattr(options, name)) is not None:
            action = dataclasses.replace(action, **{name: value})
    return OftConfig(
        name=OPENVLA_OFT_7B.name if big else "openvla-oft",
        cameras=robot.cameras if options.cameras is None else tuple(options.cameras),
        image=ImageConfig(size=size, mirror=mirror),
        patch=patch,
        dino=dino,
        siglip=siglip,
        language=language,
        action=action,
        proprio_dim=proprio_dim,
        binary_columns=robot.binary_columns,
        tokenizer="llama",
        head=head,
        film=film,
        diffusion_steps=(
            OftConfig.diffusion_steps if options.diffusion_steps is None else options.diffusion_steps
        ),
        bounds=robot.bounds,
    )


def _check_architecture(settings: Mapping[str, Any], source: str) -> None:
    wanted: dict[str, Any] = {
        "model_type": "openvla",
        "use_fused_vision_backbone": True,
        "arch_specifier": "no-align+fused-gelu-mlp",
        "image_resize_strategy": "resize-naive",
    }
    for name, value in wanted.items():
        if settings.get(name) != value:
            raise UserError(
                f"{source}: {name} is {settings.get(name)!r} in config.json; only {value!r} is supported, the "
                "published OpenVLA-OFT architecture"
            )


def _head(shapes: Shapes) -> str:
    if any(name.startswith("action_head.noise_predictor.") for name in shapes):
        return "diffusion"
    return "l1" if any(name.startswith("action_head.") for name in shapes) else "discrete"


def _dims(shapes: Shapes, statistics: Mapping[str, Any], head: str, source: str) -> tuple[int, int]:
    """Widths of an action and of proprioception (0: not used)."""
    if head == "discrete":
        widths = {len(entry["action"]["q01"]) for entry in statistics.values() if _has(entry, "action")}
        if len(widths) != 1:
            raise UserError(f"{source} has no action head, and statistics of {sorted(widths)} action columns")
        action_dim = widths.pop()
    else:
        inside = "noise_predictor.mlp_resnet" if head == "diffusion" else "model"
        action_dim = _shape(shapes, f"action_head.{inside}.fc2.weight", 2, source)[0]
    if not any(name.startswith("proprio_projector.") for name in shapes):
        return action_dim, 0
    return action_dim, _shape(shapes, "proprio_projector.fc1.weight", 2, source)[1]


def _recorded_proprio(statistics: Mapping[str, Any]) -> int:
    """Values of the recorded robot's state, for a model that does not read it; 0 if they differ."""
    widths = {len(entry["proprio"]["q01"]) for entry in statistics.values() if _has(entry, "proprio")}
    return widths.pop() if len(widths) == 1 else 0


def _has(entry: Any, part: str) -> bool:
    inner = entry.get(part) if isinstance(entry, dict) else None
    return isinstance(inner, dict) and isinstance(inner.get("q01"), list)


def _robot(action_dim: int, proprio_dim: int, source: str) -> Robot:
    for robot in ROBOTS:
        if (action_dim, proprio_dim) == (robot.action.dim, robot.proprio_dim):
            return robot
    known = "; ".join(f"{r.name} {r.action.dim} and {r.proprio_dim}" for r in ROBOTS)
    raise UserError(
        f"{source} has {action_dim} action and {proprio_dim} state values, of no robot known here ({known}); "
        "add it to ROBOTS in backbones/openvla_oft/layout.py"
    )


def _language(text: Any, shapes: Shapes, source: str) -> LanguageConfig:
    if not isinstance(text, dict):
        raise UserError(
            f"{source}: text_config is a {type(text).__name__} in config.json and must be an object; get the file again"
        )
    stated = {**LLAMA_DEFAULTS, **{name: value for name, value in text.items() if value is not None}}
    vocab, hidden = _shape(shapes, "language_model.model.embed_tokens.weight", 2, source)
    intermediate = _shape(shapes, "language_model.model.layers.0.mlp.gate_proj.weight", 2, source)[0]
    layers = _count(shapes, "language_model.model.layers")
    found = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
    }
    for name, value in found.items():
        if stated.get(name, value) != value:
            told = "says" if text.get(name) is not None else "leaves to Llama-2-7B"
            raise UserError(
                f"{source}: text_config in config.json {told} {name} {stated[name]} but the tensors have {value}; "
                "use files of one checkpoint"
            )
    for name in ("rms_norm_eps", "rope_theta"):
        number = stated[name]
        if not isinstance(number, (int, float)) or isinstance(number, bool) or not math.isfinite(number):
            raise UserError(f"{source}: {name} {number!r} in text_config must be a number")
    heads = stated["num_attention_heads"]
    if stated.get("num_key_value_heads", heads) != heads:
        raise UserError(f"{source}: grouped-query attention is not part of OpenVLA-OFT; num_key_value_heads "
                        f"must be {heads}")  # fmt: skip
    if stated.get("rope_scaling"):
        raise UserError(f"{source}: rope_scaling {stated['rope_scaling']} is not part of OpenVLA-OFT")
    return LanguageConfig(
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        vocab=vocab,
        rms_norm_eps=stated["rms_norm_eps"],
        rope_theta=stated["rope_theta"],
        max_positions=stated["max_position_embeddings"],
    )


def _image_size(settings: Mapping[str, Any], source: str) -> int:
    sizes = settings.get("image_sizes")
    if isinstance(sizes, list) and len(sizes) == 2 and sizes[0] == sizes[1] and isinstance(sizes[0], int):
        return sizes[0]
    raise UserError(f"{source}: image_sizes {sizes!r} in config.json must be two equal numbers of pixels")


def _tower(shapes: Shapes, tower: str, name: Any, source: str) -> TowerConfig:
    known = KNOWN_TOWERS.get(name) if isinstance(name, str) else None
    if known is None:
        raise UserError(
            f"{source}: vision tower {name!r} in config.json is unknown; known are: {', '.join(KNOWN_TOWERS)}"
        )
    prefix = f"vision_backbone.{tower}"
    registers = f"{prefix}.reg_token" in shapes
    found = (
        _count(shapes, f"{prefix}.blocks"),
        f"{prefix}.cls_token" in shapes,
        _shape(shapes, f"{prefix}.reg_token", 3, source)[1] if registers else 0,
        f"{prefix}.blocks.0.ls1.scale_factor" in shapes,
    )
    heads, *expected = known
    for what, has, wanted in zip(TOWER_PARTS, found, expected, strict=True):
        if has != wanted:
            raise UserError(
                f"{source}: tower '{tower}' has {what} {has}, but {name} has {wanted}; use a complete checkpoint"
            )
    depth, class_token, register_tokens, layer_scale = found
    return TowerConfig(
        width=_shape(shapes, f"{prefix}.patch_embed.proj.weight", 4, source)[0],
        depth=depth,
        heads=heads,
        mlp_width=_shape(shapes, f"{prefix}.blocks.0.mlp.fc1.weight", 2, source)[0],
        class_token=class_token,
        registers=register_tokens,
        layer_scale=layer_scale,
    )


def _count(shapes: Shapes, prefix: str) -> int:
    """How many numbered children a module has, by the highest number."""
    pattern = re.compile(re.escape(prefix) + r"\.(\d+)\.")
    return 1 + max((int(match[1]) for name in shapes if (match := pattern.match(name))), default=-1)


def _shape(shapes: Shapes, name: str, axes: int, source: str) -> tuple[int, ...]:
    shape = shapes.get(name)
    if shape is None:
        raise UserError(f"{source} lacks the tensor '{name}'; use a complete checkpoint")
    if len(shape) != axes:
        raise UserError(f"{source}: tensor '{name}' has shape {list(shape)}, not {axes} axes; get it again")
    return shape
