"""The vision file of a FiLM checkpoint: block wrappers and unmerged LoRA, brought to plain names and weights.

Source: film_vit_wrapper.py and `_apply_film_to_vla` of moojink/openvla-oft @213c5ff: rank from the tensors,
alpha = min(rank, 16).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from aura_ros.backbones.openvla_oft.tensor_files import Entry, require_one_dtype
from aura_ros.errors import UserError

MAX_ALPHA = 16
FILM_LAYER = re.compile(r"\.blocks\.\d+\.(scale|shift)\.(weight|bias)$")


def film_entries(entries: Mapping[str, Entry], path: Path) -> dict[str, Entry]:
    """File names -> network names: `.block` and `.base_layer` taken out, adapters merged when read.

    The sum is formed in float32 and rounded once to the stored dtype. Adapters and FiLM layers may have dtypes
    of their own: the reference trains them in float32 on bfloat16 towers, and saves them so.
    """
    adapters = {name: entry for name, entry in entries.items() if ".lora_" in name}
    layers = {name: entry for name, entry in entries.items() if FILM_LAYER.search(name)}
    towers = {name: entry for name, entry in entries.items() if name not in adapters and name not in layers}
    for group in (adapters, layers, towers):
        require_one_dtype(group, path)
    plain = {}
    for name, entry in (towers | layers).items():
        base = re.sub(r"\.base_layer\.(weight|bias)$", r".\1", name)
        target = re.sub(r"(\.blocks\.\d+)\.block\.", r"\1.", base)
        if base != name and base.endswith(".weight"):
            stem = name.removesuffix(".base_layer.weight")
            pair = [adapters.pop(f"{stem}.lora_{side}.default.weight", None) for side in "AB"]
            if pair[0] is None or pair[1] is None:
                raise UserError(f"'{path}' has '{name}' without both LoRA factors; get the file again")
            entry = _merged(entry, pair[0], pair[1], name, path)
        plain[target] = entry
    if adapters:
        raise UserError(
            f"'{path}' has LoRA factors '{min(adapters)}' without a base layer; get the file again"
        )
    if not layers:
        raise UserError(f"'{path}' has no FiLM layers (blocks.N.scale); it must come from a FiLM fine-tuning")
    return plain


def _merged(base: Entry, down: Entry, up: Entry, name: str, path: Path) -> Entry:
    rank = down.shape[0] if down.shape else 0
    fits = len(base.shape) == 2 and (up.shape, down.shape) == ((base.shape[0], rank), (rank, base.shape[1]))
    if not fits or rank < 1:
        raise UserError(
            f"'{path}': LoRA factors {list(up.shape)} and {list(down.shape)} do not fit '{name}' "
            f"{list(base.shape)}; get the file again"
        )
    return dataclasses.replace(base, read=_merge(base.read, down.read, up.read, min(rank, MAX_ALPHA) / rank))


def _merge(
    base: Callable[[], Tensor], down: Callable[[], Tensor], up: Callable[[], Tensor], scale: float
) -> Callable[[], Tensor]:
    def read() -> Tensor:
        weight = base()
        return (weight.float() + scale * (up().float() @ down().float())).to(weight.dtype)

    return read
