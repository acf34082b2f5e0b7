"""Names of backbones and how each is loaded; torch is imported only when one is."""

from __future__ import annotations

from pathlib import Path

from aura_ros.backbones.base import Backbone
from aura_ros.errors import UserError

BACKBONES = ("compact", "openvla_oft")
DTYPES = ("float32", "bfloat16")


def load_backbone(
    name: str,
    checkpoint: str | Path | None = None,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    unnorm_key: str | None = None,
    seed: int = 0,
) -> Backbone:
    """Load the backbone `name` (one of `BACKBONES`) and freeze it.

    checkpoint: a `.safetensors` file saved by `OpenVlaOft.save`. Without one, `compact` gets seeded random
      weights (`info.trained` is False) and `openvla_oft` is refused.
    device: "cpu", "cuda" or "cuda:<n>". dtype: "float32" or "bfloat16", of the parameters.
    unnorm_key: the entry of the checkpoint's dataset statistics; needed only if there are several.
    seed: of the random weights; not used with a checkpoint.
    Raises `UserError` for an unknown name, device, dtype or key and for a file that cannot be used.
    """
    if name not in BACKBONES:
        raise UserError(f"backbone '{name}' is unknown; choose one of: {', '.join(BACKBONES)}")
    if dtype not in DTYPES:
        raise UserError(f"dtype '{dtype}' is not supported; choose one of: {', '.join(DTYPES)}")
    if name == "openvla_oft" and checkpoint is None:
        raise UserError("backbone 'openvla_oft' has no checkpoint; give the path of its .safetensors file")
    try:
        from aura_ros.backbones.openvla_oft.api import OpenVlaOft
    except ImportError as error:
        raise UserError(
            f"backbone '{name}' needs torch, transformers>=4.57.6,<6, pillow and simplejpeg ({error}); "
            "install them with `pip install aura_ros`"
        ) from error
    if checkpoint is None:
        return OpenVlaOft.random_compact(seed=seed, device=device, dtype=dtype, unnorm_key=unnorm_key)
    return OpenVlaOft.from_file(
        checkpoint,
        device=device,
        dtype=dtype,
        unnorm_key=unnorm_key,
        expected_name="compact" if name == "compact" else None,
    )
