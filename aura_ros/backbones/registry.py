"""Names of backbones and how each is loaded, built-in ones and those of other packages; torch is imported only then."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aura_ros.backbones.base import Backbone
from aura_ros.backbones.entry_points import GROUP, KnownBackbones, load_entry_point
from aura_ros.backbones.openvla_oft.layout import FolderOptions
from aura_ros.errors import UserError
from aura_ros.share import share_directory

BACKBONES = ("compact", "openvla_oft")
# These and those of other packages, looked for each time it is asked.
KNOWN_BACKBONES = KnownBackbones(BACKBONES)
# auto: bfloat16 for OpenVLA-OFT, as it was trained, float32 for the compact model.
DTYPES = ("auto", "float32", "bfloat16")
ACCELERATIONS = ("none", "compile", "cuda-graph")
# In place of a checkpoint: seeded random weights of the compact network.
RANDOM = "random"
NO_CHECKPOINT = (
    "backbone 'openvla_oft' has no checkpoint; give a published checkpoint's folder, a downloaded hub snapshot "
    "(owner/name@revision) or a .safetensors file of OpenVlaOft.save"
)


def load_backbone(
    name: str,
    checkpoint: str | Path | None = None,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    unnorm_key: str | None = None,
    seed: int = 0,
    options: FolderOptions | None = None,
    accelerate: str = "none",
) -> Backbone:
    """Load the backbone `name` and freeze it: one of `BACKBONES`, else an entry point (see `entry_points`).

    An entry point gets checkpoint, device, dtype, unnorm_key and seed; what follows is of the built-in ones.
    checkpoint: a `.safetensors` file saved by `OpenVlaOft.save`; for `openvla_oft` also a published checkpoint's
      folder or a downloaded hub snapshot, "owner/name[@revision]". Without one, `compact` is what the package ships
      and `openvla_oft` is refused. "random": seeded random weights (compact only; `info.trained` is False).
    device: "cpu", "cuda" or "cuda:<n>". dtype: of the parameters, one of `DTYPES`.
    unnorm_key: the entry of the checkpoint's dataset statistics; needed only if there are several.
    seed: of random weights. options: what a folder does not say about itself.
    accelerate: one of `ACCELERATIONS`; not "none" makes the first query of a new length of prompt slow.
    Raises `UserError` for an unknown name, device, dtype or key and for a file that cannot be used.
    """
    _check_names(name, checkpoint, dtype)
    _check_options(name, checkpoint, options)
    if name not in BACKBONES:
        if accelerate != "none":
            raise UserError(
                f"accelerate '{accelerate}' is for {', '.join(BACKBONES)}; leave it 'none' for '{name}'"
            )
        given = None if checkpoint is None else str(checkpoint)
        return load_entry_point(name, given, device=device, dtype=dtype, unnorm_key=unnorm_key, seed=seed)
    with _requirements(name):
        from aura_ros.backbones.openvla_oft.api import OpenVlaOft
    if dtype == "auto":
        dtype = "bfloat16" if name == "openvla_oft" else "float32"
    if str(checkpoint) == RANDOM:
        return OpenVlaOft.random_compact(
            seed=seed, device=device, dtype=dtype, unnorm_key=unnorm_key, accelerate=accelerate
        )
    checkpoint = checkpoint or shipped_checkpoint()
    if name == "compact" or Path(checkpoint).is_file():
        return OpenVlaOft.from_file(
            checkpoint,
            device=device,
            dtype=dtype,
            unnorm_key=unnorm_key,
            expected_name="compact" if name == "compact" else None,
            accelerate=accelerate,
        )
    return OpenVlaOft.from_checkpoint(
        checkpoint, device, dtype, unnorm_key, options=options, accelerate=accelerate
    )


def check_checkpoint(
    name: str,
    checkpoint: str | Path | None = None,
    *,
    unnorm_key: str | None = None,
    options: FolderOptions | None = None,
) -> None:
    """Raise `UserError` for what `load_backbone` would refuse, as far as it shows without reading a weight.

    A second or two, mostly for importing torch. Of another package's backbone only the name is checked.
    """
    _check_names(name, checkpoint)
    _check_options(name, checkpoint, options)
    if name not in BACKBONES or str(checkpoint) == RANDOM:
        return
    checkpoint = checkpoint or shipped_checkpoint()
    with _requirements(name):
        from aura_ros.backbones.openvla_oft.checkpoint import read_head
        from aura_ros.backbones.openvla_oft.folder import find_folder, read_folder
        from aura_ros.backbones.openvla_oft.inspection import check_headers
        from aura_ros.backbones.openvla_oft.normalisation import select_statistics
    if name == "compact" or Path(checkpoint).is_file():
        found: Any = read_head(checkpoint)
    else:
        found = read_folder(find_folder(checkpoint), options)
        check_headers(found)
    config = found.config
    select_statistics(
        found.statistics,
        unnorm_key,
        action_dim=config.action.dim,
        proprio_dim=config.proprio_dim,
        bounds=config.bounds,
    )


def shipped_checkpoint() -> Path:
    """The compact policy that the package carries; its model card lies beside it. Raises UserError if it is missing."""
    path = share_directory() / "checkpoints" / "compact.safetensors"
    if not path.is_file():
        raise UserError(
            f"the shipped policy '{path}' is missing; install the package again, or give a checkpoint"
        )
    return path


def _check_names(name: str, checkpoint: str | Path | None, dtype: str = "auto") -> None:
    if name not in KNOWN_BACKBONES:
        raise UserError(
            f"backbone '{name}' is unknown; choose one of: {', '.join(KNOWN_BACKBONES)}; a package adds one by an "
            f"entry point of the group '{GROUP}' (docs/other_backbones.md)"
        )
    if dtype not in DTYPES:
        raise UserError(f"dtype '{dtype}' is not supported; choose one of: {', '.join(DTYPES)}")
    if name == "openvla_oft" and str(checkpoint or RANDOM) == RANDOM:
        raise UserError(NO_CHECKPOINT)


def _check_options(name: str, checkpoint: str | Path | None, options: FolderOptions | None) -> None:
    if options in (None, FolderOptions()) or (name == "openvla_oft" and not Path(checkpoint or "").is_file()):
        return
    given = [f.name for f in dataclasses.fields(FolderOptions) if getattr(options, f.name) is not None]
    raise UserError(
        f"{', '.join(given)} can be said of a published checkpoint's folder only; '{checkpoint or name}' records "
        "its own: leave it away"
    )


@contextmanager
def _requirements(name: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"backbone '{name}' needs torch, transformers>=4.57.6,<6, pillow and simplejpeg ({error}); "
            "install them with `pip install aura_ros`"
        ) from error
