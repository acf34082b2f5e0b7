"""Writes checkpoint folders in the published layout from the tiny reference weights, for the golden tests."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from openvla_oft_tiny import DATA, EMBED, LM_HEAD, regenerated
from safetensors.torch import load_file, save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
STEP = "150000_checkpoint"
STATISTICS = json.loads((DATA / "dataset_statistics.json").read_text())
HF_CONFIG = json.loads((DATA / "tiny_config.json").read_text())["hf_config"]
BACKBONE = ("vision_backbone.", "projector.", "language_model.")


@lru_cache(maxsize=1)
def golden_tensors() -> dict[str, Tensor]:
    """Every tensor of the tiny reference, fp32, the two tables included."""
    tables = {EMBED: 0.5 * regenerated(EMBED), LM_HEAD: regenerated(LM_HEAD) / 8.0}
    return {**load_file(DATA / "tiny_weights.safetensors"), **tables}


def part(prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in golden_tensors().items() if n.startswith(prefix)}


def write_folder(
    path: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    head: str = "l1",
    proprio: bool = True,
    film_rank: int = 0,
    sharded: bool = True,
    suffix: str = ".pt",
    statistics_file: bool = True,
) -> Path:
    """A folder as the reference saves it. head: l1, diffusion or none. film_rank: LoRA rank, 0 for no FiLM."""
    path.mkdir(parents=True)
    config = {**HF_CONFIG, "torch_dtype": str(dtype).removeprefix("torch."), "norm_stats": STATISTICS}
    write_json(path / "config.json", config)
    write_json(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 32000})
    if statistics_file:
        write_json(path / "dataset_statistics.json", STATISTICS)
    tensors = {n: t.to(dtype) for n, t in golden_tensors().items() if n.startswith(BACKBONE)}
    write_backbone(path, tensors, sharded)
    if proprio:
        write_part(path, "proprio_projector", part("proprio_projector."), dtype, suffix)
    if head == "l1":
        write_part(path, "action_head", part("action_head."), dtype, suffix)
    if head == "diffusion":
        write_part(path, "action_head", part("diffusion_head."), dtype, suffix)
        write_part(path, "noisy_action_projector", part("noisy_action_projector."), dtype, suffix)
    if film_rank:
        torch.save(film_state(film_rank, dtype), path / f"vision_backbone--{STEP}.pt")
    return path


def write_backbone(path: Path, tensors: dict[str, Tensor], sharded: bool = True) -> None:
    if not sharded:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {name: SHARDS[name == LM_HEAD] for name in tensors}
    for shard in SHARDS:
        held = {name: tensors[name] for name, file in weight_map.items() if file == shard}
        save_file(held, path / shard, metadata={"format": "pt"})
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    write_json(path / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})


def write_part(path: Path, stem: str, tensors: dict[str, Tensor], dtype: torch.dtype, suffix: str) -> Path:
    """One head or projector; its names carry the `module.` of data-parallel training."""
    state = OrderedDict((f"module.{name}", tensor.to(dtype)) for name, tensor in tensors.items())
    file = path / f"{stem}--{STEP}{suffix}"
    save_file(state, file) if suffix == ".safetensors" else torch.save(state, file)
    return file


def film_state(rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The whole vision backbone as PEFT and the FiLM wrappers name it: adapters unmerged.

    The base is what is left of the golden weight without its adapter, so that merging gives the golden weight.
    Adapters and FiLM layers are float32 whatever the towers are, as training leaves them.
    """
    random = np.random.default_rng(rank)
    scale = min(rank, 16) / rank
    state: OrderedDict[str, Tensor] = OrderedDict()
    for name, tensor in golden_tensors().items():
        if not name.startswith("vision_backbone."):
            continue
        wrapped = re.sub(r"(\.blocks\.\d+)\.", r"\1.block.", name)
        layer, _, kind = wrapped.rpartition(".")
        # "all-linear": the patch embedding is a convolution, norms and tokens are no layers.
        linear = layer.endswith((".qkv", ".proj", ".fc1", ".fc2", ".q", ".kv")) and "patch_embed" not in layer
        if linear and kind == "weight":
            down, up = (
                torch.from_numpy(0.1 * random.standard_normal(shape).astype(np.float32))
                for shape in ((rank, tensor.shape[1]), (tensor.shape[0], rank))
            )
            state[f"{layer}.base_layer.weight"] = (tensor - scale * (up @ down)).to(dtype)
            state[f"{layer}.lora_A.default.weight"] = down
            state[f"{layer}.lora_B.default.weight"] = up
        elif linear:
            state[f"{layer}.base_layer.{kind}"] = tensor.to(dtype)
        else:
            state[wrapped] = tensor.to(dtype)
    state.update(part("film."))
    return state


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def edit_json(path: Path, **changes: object) -> None:
    """Set top-level entries of a JSON file; None removes one."""
    value = {**json.loads(path.read_text()), **changes}
    write_json(path, {name: entry for name, entry in value.items() if entry is not None})


def edit_shard(path: Path, change) -> None:
    """Rewrite the first shard after `change(tensors)`; the index stays as it is."""
    tensors = load_file(path / SHARDS[0])
    change(tensors)
    save_file(tensors, path / SHARDS[0], metadata={"format": "pt"})


def drop_from_index(path: Path, *names: str) -> None:
    value = json.loads((path / INDEX).read_text())
    for name in names:
        del value["weight_map"][name]
    write_json(path / INDEX, value)
