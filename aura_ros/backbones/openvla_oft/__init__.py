"""OpenVLA-OFT on stock transformers: one code path for the 7B model and for the compact one.

Importing this package imports no torch; `OpenVlaOft` and `OftPrediction` do when first used.

Modules: `config` (sizes), `layout` and `folder` (published checkpoints), `tensor_files`, `film`, `checkpoint` (our
own files), `inspection`, `conversion`; `processing` (images), `normalisation` (proprioception, actions), `tokenizer`,
`inputs`; `vision`, `language`, `heads`, `diffusion`, `model` (the network), `accelerate`; `startup` (checks), `api`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aura_ros.backbones.openvla_oft.layout import FolderOptions

if TYPE_CHECKING:
    from aura_ros.backbones.openvla_oft.api import OftPrediction, OpenVlaOft

__all__ = ["FolderOptions", "OftPrediction", "OpenVlaOft"]


def __getattr__(name: str) -> Any:
    if name in ("OftPrediction", "OpenVlaOft"):
        from aura_ros.backbones.openvla_oft import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
