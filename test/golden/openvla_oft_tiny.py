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
EMPTY_SPACE_ID = 29871


class NoTokenizer:
    bos_id, eos_id, empty_space_id, vocab = 1, 2, EMPTY_SPACE_ID, 32064

    def encode(self, text: str) -> list[int]:
        return [self.bos_id, *(100 + byte for byte in text.encode())]


def golden() -> dict[str, np.ndarray]:
    with np.load(DATA / "golden_io.npz") as stored:
        return dict(stored)


def tiny_config(cameras: int, proprio_dim: int) -> OftConfig:
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
    )


def tiny_tensors(proprio: bool) -> dict[str, torch.Tensor]:
    other_heads = ("noisy_action_projector.", "diffusion_head.", "film.")
    if not proprio:
        other_heads += ("proprio_projector.",)
    stored = load_file(DATA / "tiny_weights.safetensors")
    tensors = {name: tensor for name, tensor in stored.items() if not name.startswith(other_heads)}
    random = np.random.RandomState(zlib.crc32(EMBED.encode()) & 0x7FFFFFFF)
    tensors[EMBED] = torch.from_numpy((0.5 * random.standard_normal((32064, 64))).astype(np.float32))
    return tensors


def tiny_model(cameras: int = 2, proprio_dim: int = 8, dtype: str = "float32") -> OpenVlaOft:
    statistics = json.loads((DATA / "dataset_statistics.json").read_text())
    checkpoint = Checkpoint(
        tiny_config(cameras, proprio_dim), statistics, tiny_tensors(proprio_dim > 0), trained=False
    )
    return OpenVlaOft(checkpoint, source="tiny", dtype=dtype, tokenizer=NoTokenizer())


def prompt_tensor(ids: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.append(ids, [[EMPTY_SPACE_ID]], axis=1))
