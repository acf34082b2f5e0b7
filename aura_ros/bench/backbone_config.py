"""Options of `aura bench backbone`, and the network sizes it can measure. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from aura_ros.backbones.openvla_oft.config import (
    COMPACT,
    OPENVLA_OFT_7B,
    ImageConfig,
    LanguageConfig,
    OftConfig,
    TowerConfig,
)
from aura_ros.backbones.openvla_oft.layout import FolderOptions
from aura_ros.backbones.registry import ACCELERATIONS, DTYPES
from aura_ros.config import check_fields, option
from aura_ros.errors import UserError

# About a fortieth of the 7B, with its rows of the sequence, depth of the towers and dimension of heads, and about its
# shares of towers and lm_head in the work, so that ratios carry over.
SMALL = OftConfig(
    name="small",
    cameras=("agentview", "wrist"),
    image=ImageConfig(size=224, mirror=True),
    patch=14,
    dino=TowerConfig(
        width=192, depth=24, heads=3, mlp_width=768, class_token=True, registers=4, layer_scale=True
    ),
    siglip=TowerConfig(width=216, depth=27, heads=3, mlp_width=808),
    language=LanguageConfig(hidden=1024, intermediate=2752, layers=12, heads=8, vocab=4096),
    tokenizer="byte",
)
# Option of the command -> field. Those of a checkpoint folder are the policy's.
OPTIONS = {
    "size": "size",
    "checkpoint": "checkpoint",
    "unnorm_key": "unnorm_key",
    "device": "device",
    "dtype": "dtype",
    "threads": "threads",
    "repeats": "repeats",
    "warmup": "warmup",
    "accelerate": "accelerate",
    "seed": "seed",
}
SIZES = {"compact": COMPACT, "small": SMALL, "7b": OPENVLA_OFT_7B}


@dataclass(frozen=True)
class BackboneBenchConfig:
    """What to measure; checked at construction, raises UserError naming the field, the value and what is allowed."""

    size: str = option(
        "auto",
        "of random weights; small: 200 M parameters in the 7b's proportions; auto: compact, or the checkpoint's",
        choices=("auto", *SIZES),
    )
    checkpoint: str = option(
        "",
        "a .safetensors file of OpenVlaOft.save, a published checkpoint's folder or a downloaded hub snapshot "
        "(owner/name@revision)",
    )
    random_weights: bool = option(False, "seeded random weights, made on the device; as fast as trained ones")
    unnorm_key: str = option("", "entry of the checkpoint's statistics; empty: the only one there is")
    device: str = option("cpu", "where the network runs: cpu, cuda or cuda:<n>")
    dtype: str = option(
        "auto",
        "of the parameters; auto: bfloat16 for OpenVLA-OFT, float32 for compact and small",
        choices=DTYPES,
    )
    threads: int = option(0, "of the CPU; 0: as many as torch takes", minimum=0, maximum=1024)
    repeats: int = option(20, "measured calls of each kind", minimum=1, maximum=100_000)
    warmup: int = option(3, "calls of each kind before the measured ones", minimum=1, maximum=1000)
    accelerate: str = option(
        "none",
        "compile: torch.compile; cuda-graph: recorded kernels (CUDA only, not yet tried on a GPU)",
        choices=ACCELERATIONS,
    )
    seed: int = option(0, "of random weights and images", minimum=0, maximum=2**31 - 1)

    folder: FolderOptions | None = None  # what a checkpoint folder does not say about itself

    def __post_init__(self) -> None:
        check_fields(self)
        if self.checkpoint and self.random_weights:
            raise UserError(
                f"checkpoint '{self.checkpoint}' and --random-weights exclude each other; give one of them"
            )
        if self.random_weights and self.folder not in (None, FolderOptions()):
            said = [name for name, value in vars(self.folder).items() if value is not None]
            raise UserError(
                f"{', '.join(said)} can be said of a checkpoint folder only, not of random weights; leave it away"
            )
        if not self.checkpoint and not self.random_weights:
            raise UserError("there are no weights to measure; give --checkpoint PATH or --random-weights")
        if self.checkpoint and self.size != "auto":
            raise UserError(
                f"size '{self.size}' is for random weights; a checkpoint has its own: leave --size away"
            )

    def dtype_for(self, name: str) -> str:
        """The dtype of a network of this name: the one asked for, or as it was trained."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if name.startswith("openvla") else "float32"

    @property
    def network(self) -> OftConfig:
        """The network of random weights."""
        return COMPACT if self.size == "auto" else SIZES[self.size]
