"""What an OpenVLA-OFT network is made of: sizes and options as data, with two presets.

Source: moojink/openvla-oft @213c5ff; the resolved text config of OpenVLA-7B-OFT.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

from aura_ros.errors import UserError
from aura_ros.types import LIBERO_ACTION_SPEC, ActionSpec, ControlMode

TOKENIZERS = ("byte", "words", "llama")
STEMS = ("patch", "conv")
HEADS = ("l1", "diffusion", "discrete")
# Which two columns of the statistics stand for -1 and 1: the 1 % and 99 % quantiles, or the extremes.
BOUNDS = ("q99", "min_max")
# The reference's noise schedule was trained with this many steps; inference may take fewer.
DIFFUSION_TRAIN_STEPS = 50
# Discrete actions are the last 256 ids before the ids that pad the vocabulary to a multiple of 64.
ACTION_BINS = 256
PADDED_IDS = 64
# Options that files without them were made before: part, name, default.
LATER = (("dino", "stem", "patch"), ("siglip", "stem", "patch"), ("image", "blank", False))
MAX_WIDTH = 2**16
MAX_DEPTH = 256


def _require_whole(name: str, value: object, low: int, high: int) -> None:
    # The upper limits keep a malformed checkpoint from asking for a network no machine can hold.
    whole = isinstance(value, int) and not isinstance(value, bool)
    _require(
        whole and low <= value <= high,  # type: ignore[operator]
        name,
        value,
        f"a whole number from {low} to {high}",
    )


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise UserError(f"{name} {value} is not allowed; it must be {allowed}")


@dataclass(frozen=True)
class TowerConfig:
    """One vision transformer (timm's VisionTransformer, LayerNorm eps 1e-6, erf GELU).

    depth counts all blocks of the original; only depth - 1 are built, for the features are the output of
    block depth - 2. registers and class_token are prefix tokens, dropped at the end. stem: how patches become
    features, "patch" by one linear map, as timm's, or "conv" by small convolutions, which learn from less data (Xiao et al.
    2021, "Early Convolutions Help Transformers See Better").
    """

    width: int
    depth: int
    heads: int
    mlp_width: int
    class_token: bool = False
    registers: int = 0
    layer_scale: bool = False
    stem: str = "patch"

    def __post_init__(self) -> None:
        for name in ("width", "heads", "mlp_width"):
            _require_whole(f"tower {name}", getattr(self, name), 1, MAX_WIDTH)
        # At least 2, for the last block is not built.
        _require_whole("tower depth", self.depth, 2, MAX_DEPTH)
        _require_whole("tower registers", self.registers, 0, 64)
        _require(self.stem in STEMS, "tower stem", f"'{self.stem}'", f"one of {list(STEMS)}")
        if self.stem == "conv":
            _require(self.width % 8 == 0, "tower width", self.width, "a multiple of 8 for a conv stem")
        _require(self.width % self.heads == 0, "tower width", self.width, f"a multiple of heads {self.heads}")


@dataclass(frozen=True)
class LanguageConfig:
    """The Llama trunk. rms_norm_eps is 1e-6 in OpenVLA, not Llama-2's 1e-5."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocab: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_positions: int = 2048

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "heads", "max_positions"):
            _require_whole(f"language {name}", getattr(self, name), 1, MAX_WIDTH)
        _require_whole("language layers", self.layers, 1, MAX_DEPTH)
        _require_whole("language vocab", self.vocab, 4, 2**20)
        per_head = 2 * self.heads
        _require(
            self.hidden % per_head == 0,
            "language hidden",
            self.hidden,
            f"a multiple of 2 x heads = {per_head}",
        )
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value > 0, f"language {name}", value, "positive and finite")


@dataclass(frozen=True)
class ImageConfig:
    """How a camera image becomes the network's input.

    size: side of the network's image, pixels. mirror: flip the true view left-right (LIBERO checkpoints were
    trained on `raw[::-1, ::-1]`, which is the true view mirrored; off for real robots). jpeg: the quality-95
    round trip of the training data. crop_area: share of the area kept by the centre crop, 1 = no crop. blank: the network
    is shown grey instead, always: a control that must do without its eyes.
    """

    size: int
    mirror: bool = False
    jpeg: bool = True
    crop_area: float = 0.9
    blank: bool = False

    def __post_init__(self) -> None:
        _require_whole("image size", self.size, 2, 4096)
        _require(0 < self.crop_area <= 1, "image crop_area", self.crop_area, "in (0, 1]")


@dataclass(frozen=True)
class OftConfig:
    """Everything that fixes the network's shape and its pre- and post-processing.

    cameras: in the order of training. proprio_dim 0: no proprioception row. binary_columns: action columns
    thresholded at 0.5 (LIBERO's gripper, 1 = open). action: names, units, scale, horizon and period.
    head: "l1" regresses the chunk, "diffusion" denoises it in `diffusion_steps` passes of the trunk, "discrete"
    takes the likeliest token of each value. film: the prompt modulates every vision block. bounds: which of
    the statistics -1 and 1 stand for, "q99" (LIBERO, Bridge) or "min_max" (ALOHA).
    """

    name: str
    cameras: tuple[str, ...]
    image: ImageConfig
    patch: int
    dino: TowerConfig
    siglip: TowerConfig
    language: LanguageConfig
    action: ActionSpec = field(default=LIBERO_ACTION_SPEC)
    proprio_dim: int = 8
    binary_columns: tuple[int, ...] = (6,)
    tokenizer: str = "llama"
    head: str = "l1"
    film: bool = False
    diffusion_steps: int = 50
    bounds: str = "q99"

    def __post_init__(self) -> None:
        _require(
            len(self.cameras) >= 1 and len(set(self.cameras)) == len(self.cameras),
            "cameras",
            list(self.cameras),
            "one or more different names",
        )
        _require_whole("patch", self.patch, 1, self.image.size)
        _require(
            self.image.size % self.patch == 0,
            "image size",
            self.image.size,
            f"a multiple of patch {self.patch}",
        )
        _require_whole("proprio_dim", self.proprio_dim, 0, 1024)
        _require(
            all(0 <= c < self.action.dim for c in self.binary_columns),
            "binary_columns",
            list(self.binary_columns),
            f"columns 0 to {self.action.dim - 1}",
        )
        if "conv" in (self.dino.stem, self.siglip.stem):
            _require(
                self.patch.bit_count() == 1 and self.patch > 1,
                "patch",
                self.patch,
                "a power of 2 for a conv stem",
            )
        for name, choices in (("tokenizer", TOKENIZERS), ("head", HEADS), ("bounds", BOUNDS)):
            value = getattr(self, name)
            _require(value in choices, name, f"'{value}'", f"one of {list(choices)}")
        _require(isinstance(self.film, bool), "film", self.film, "true or false")
        _require_whole("diffusion_steps", self.diffusion_steps, 1, DIFFUSION_TRAIN_STEPS)
        if self.head == "discrete":
            _require(
                self.language.vocab > PADDED_IDS + ACTION_BINS,
                "language vocab",
                self.language.vocab,
                f"above {PADDED_IDS + ACTION_BINS} for a discrete head",
            )

    @property
    def vision_dim(self) -> int:
        """Width of one patch's features: both towers, concatenated."""
        return self.dino.width + self.siglip.width

    @property
    def patches_per_image(self) -> int:
        """Rows of the sequence that one camera takes."""
        return (self.image.size // self.patch) ** 2

    @property
    def prefix_rows(self) -> int:
        """Rows between BOS and the prompt: every image's patches, proprioception, the diffusion step."""
        extra = (self.proprio_dim > 0) + (self.head == "diffusion")
        return len(self.cameras) * self.patches_per_image + extra

    @property
    def placeholders(self) -> int:
        """Zeroed rows after the prompt, one for each action value of the chunk."""
        return self.action.horizon * self.action.dim

    def to_json(self) -> str:
        """One line of JSON that `from_json` reads back to an equal object.

        Options that came later are left out at their defaults: files made before keep their hashes.
        """
        values = dataclasses.asdict(self)
        for part, option, default in LATER:
            if values[part][option] == default:
                del values[part][option]
        return json.dumps(values, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> OftConfig:
        """Inverse of `to_json`. Raises `UserError` for malformed JSON, unknown, missing or bad fields."""
        try:
            raw = json.loads(text)
            action = _as(dict, raw["action"])
            action["control_mode"] = ControlMode(action["control_mode"])
            for name in ("names", "units", "scale"):
                action[name] = tuple(action[name])
            return cls(
                **{
                    **raw,
                    "cameras": tuple(raw["cameras"]),
                    "binary_columns": tuple(raw["binary_columns"]),
                    "image": ImageConfig(**raw["image"]),
                    "dino": TowerConfig(**raw["dino"]),
                    "siglip": TowerConfig(**raw["siglip"]),
                    "language": LanguageConfig(**raw["language"]),
                    "action": ActionSpec(**action),
                }
            )
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"model config is malformed ({type(error).__name__}: {error})") from error


def _as(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return kind(value)


COMPACT = OftConfig(
    name="compact",
    cameras=("agentview", "wrist"),
    image=ImageConfig(size=112),
    patch=16,
    dino=TowerConfig(
        width=128, depth=3, heads=4, mlp_width=512, class_token=True, registers=4, layer_scale=True
    ),
    siglip=TowerConfig(width=128, depth=3, heads=4, mlp_width=512),
    language=LanguageConfig(hidden=192, intermediate=384, layers=4, heads=6, vocab=320),
    tokenizer="byte",
)

# What is trained here on demonstrations: COMPACT's architecture with a stem and a tokenizer that learn from little, and
# with the 7B's image size: in LIBERO's agentview a bottle is 9 of 112 pixels wide, and a render of 256 costs little more.
EMBEDDED = dataclasses.replace(
    COMPACT,
    image=ImageConfig(size=224),
    patch=32,
    dino=dataclasses.replace(COMPACT.dino, stem="conv"),
    siglip=dataclasses.replace(COMPACT.siglip, stem="conv"),
    language=LanguageConfig(hidden=160, intermediate=320, layers=4, heads=5, vocab=1024),
    tokenizer="words",
)

OPENVLA_OFT_7B = OftConfig(
    name="openvla-oft-7b",
    cameras=("agentview", "wrist"),
    image=ImageConfig(size=224, mirror=True),
    patch=14,
    # vit_large_patch14_reg4_dinov2 and vit_so400m_patch14_siglip_224
    dino=TowerConfig(
        width=1024, depth=24, heads=16, mlp_width=4096, class_token=True, registers=4, layer_scale=True
    ),
    siglip=TowerConfig(width=1152, depth=27, heads=16, mlp_width=4304),
    language=LanguageConfig(hidden=4096, intermediate=11008, layers=32, heads=32, vocab=32064),
)
