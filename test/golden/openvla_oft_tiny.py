"""The tiny reference model of data/openvla_oft_tiny as an `OpenVlaOft`, for the golden tests."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from aura_ros.backbones.openvla_oft.api import OpenVlaOft
from aura_ros.backbones.openvla_oft.checkpoint import Checkpoint
from aura_ros.backbones.openvla_oft.config import ImageConfig, LanguageConfig, OftConfig, TowerConfig

DATA = Path(__file__).parent / "data" / "openvla_oft_tiny"
EMBED = "language_model.model.embed_tokens.weight"
LM_HEAD = "language_model.lm_head.weight"
EMPTY_SPACE_ID = 29871


class NoTokenizer:
    bos_id, eos_id, empty_space_id, vocab = 1, 2, EMPTY_SPACE_ID, 32064

    def encode(self, text: str) -> list[int]:
        return [self.bos_id, *(100 + byte for byte in text.encode())]

    def check(self) -> None:
        pass


def golden() -> dict[str, np.ndarray]:
    with np.load(DATA / "golden_io.npz") as stored:
        return dict(stored)


def tiny_config(cameras: int = 2, proprio_dim: int = 8, **changes) -> OftConfig:
    raw = json.loads((DATA / "tiny_config.json").read_text())
    dino, siglip, text = raw["timm_dino"], raw["timm_siglip"], raw["hf_config"]["text_config"]
    return OftConfig(
        name="tiny",
        cameras=("agentview", "wrist")[:cameras],
        image=ImageConfig(size=raw["image_size"], mirror=True),
        patch=dino["patch_size"],
        dino=TowerConfig(
            width=dino["embed_dim"],
            depth=dino["depth"],
            heads=dino["num_heads"],
            mlp_width=4 * dino["embed_dim"],
            class_token=True,
            registers=dino["reg_tokens"],
            layer_scale=True,
        ),
        siglip=TowerConfig(
            width=siglip["embed_dim"],
            depth=siglip["depth"],
            heads=siglip["num_heads"],
            mlp_width=int(siglip["mlp_ratio"] * siglip["embed_dim"]),
        ),
        language=LanguageConfig(
            hidden=text["hidden_size"],
            intermediate=text["intermediate_size"],
            layers=text["num_hidden_layers"],
            heads=text["num_attention_heads"],
            vocab=text["vocab_size"],
        ),
        proprio_dim=proprio_dim,
        **changes,
    )


def tiny_tensors(config: OftConfig) -> dict[str, torch.Tensor]:
    """The stored weights that this configuration reads, and what a checkpoint holds besides."""
    stored = load_file(DATA / "tiny_weights.safetensors")
    tensors = {}
    skip = [
        *(["proprio_projector."] if not config.proprio_dim else []),
        *(["film."] if not config.film else []),
        *(["noisy_action_projector.", "diffusion_head."] if config.head != "diffusion" else []),
        *(["action_head."] if config.head != "l1" else []),
    ]
    for name, tensor in stored.items():
        if not name.startswith(tuple(skip)):
            name = name.removeprefix("film.").replace("diffusion_head.", "action_head.")
            # FiLM's layers of the last block are never read, nor built.
            tensors[name] = tensor
    tensors[EMBED] = 0.5 * regenerated(EMBED)
    if config.head == "discrete":
        tensors[LM_HEAD] = regenerated(LM_HEAD) / 8.0  # sqrt(64)
    return tensors


def regenerated(name: str) -> torch.Tensor:
    random = np.random.RandomState(zlib.crc32(name.encode()) & 0x7FFFFFFF)
    return torch.from_numpy(random.standard_normal((32064, 64)).astype(np.float32))


def tiny_model(cameras: int = 2, proprio_dim: int = 8, dtype: str = "float32", **changes) -> OpenVlaOft:
    statistics = json.loads((DATA / "dataset_statistics.json").read_text())
    config = tiny_config(cameras, proprio_dim, **changes)
    checkpoint = Checkpoint(config, statistics, tiny_tensors(config), trained=False)
    return OpenVlaOft(checkpoint, source="tiny", dtype=dtype, tokenizer=NoTokenizer())


def prompt_tensor(ids: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.append(ids, [[EMPTY_SPACE_ID]], axis=1))
