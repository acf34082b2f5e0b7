"""Weights on disk and from a seed: one `.safetensors` file that carries config and statistics, and its hash.

Nothing here unpickles. A file that cannot be used is a `UserError`; random weights never stand in for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from aura_ros.backbones.openvla_oft.config import OftConfig
from aura_ros.backbones.openvla_oft.model import build_on_meta
from aura_ros.backbones.openvla_oft.tensor_files import one_line, refuse_pointer, safetensors_entries
from aura_ros.backbones.weights import add_tensor
from aura_ros.errors import UserError
from aura_ros.files import create

FORMAT = "aura_ros.openvla_oft.1"
# Spread of untrained actions, normalised units: small enough that no value of a chunk leaves +-1.
RANDOM_ACTION_STD = 0.15


@dataclass(frozen=True)
class Checkpoint:
    """A network's contents: config, dataset statistics (key -> action, proprio) and tensors by name.

    recorded_sha256: what the file says `sha256()` is; None for weights that come from no file.
    """

    config: OftConfig
    statistics: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    trained: bool
    recorded_sha256: str | None = None

    def sha256(self) -> str:
        """See `WeightsDigest`; reads every tensor."""
        digest = WeightsDigest(self.config, self.statistics)
        for name in sorted(self.tensors):
            digest.update(name, self.tensors[name])
        return digest.hexdigest()


class WeightsDigest:
    """SHA-256 over config, statistics and the names, dtypes, shapes and bytes of tensors in order of name."""

    def __init__(self, config: OftConfig, statistics: Mapping[str, Any]) -> None:
        self._digest = hashlib.sha256(config.to_json().encode())
        self._digest.update(json.dumps(statistics, sort_keys=True).encode())

    def update(self, name: str, tensor: Tensor) -> None:
        """Add one tensor, as stored."""
        add_tensor(self._digest, name, tensor)

    def hexdigest(self) -> str:
        """64 lower-case hexadecimal digits."""
        return self._digest.hexdigest()


def random_tensors(config: OftConfig, seed: int) -> dict[str, Tensor]:
    """fp32 weights from a seed.

    Each tensor has a NumPy generator of its own, so neither torch's version nor the order matters.
    """
    tensors = {}
    for name, parameter in build_on_meta(config).named_parameters():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        shape = tuple(parameter.shape)
        if name.endswith(("pos_embed", "cls_token", "reg_token", "embed_tokens.weight")):
            values = 0.5 * rng.standard_normal(shape)
        elif len(shape) == 1:  # norms and LayerScale start at one, biases at zero
            values = np.zeros(shape) if name.endswith("bias") else np.ones(shape)
        else:
            gain = RANDOM_ACTION_STD if name == "action_head.model.fc2.weight" else 1.0
            values = gain * rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        tensors[name] = torch.from_numpy(values.astype(np.float32))
    return tensors


def save_checkpoint(checkpoint: Checkpoint, path: str | Path) -> None:
    """Write the file whole or not at all: into a temporary file beside it, then renamed."""
    path = Path(path)
    if path.suffix != ".safetensors" or not path.parent.is_dir():
        raise UserError(f"'{path}' cannot be written; give a .safetensors path in a folder that exists")
    metadata = {
        "format": FORMAT,
        "config": checkpoint.config.to_json(),
        "dataset_statistics": json.dumps(checkpoint.statistics, sort_keys=True),
        "trained": str(checkpoint.trained).lower(),
        "sha256": checkpoint.sha256(),
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    # In the target's folder, for a rename is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        mode = create(temporary)
        save_file(tensors, temporary, metadata=metadata)
        temporary.chmod(mode)
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"'{path}' cannot be written ({one_line(error)}); give a writable folder") from error
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a file of `save_checkpoint`. A file that is not one is a one-line `UserError`.

    Names, shapes and values of the tensors are checked where they are used (`model.load_weights`), the hash
    by whoever serves them.
    """
    head = read_head(path)
    entries = safetensors_entries(Path(path))
    return dataclasses.replace(head, tensors={name: entry.read() for name, entry in entries.items()})


def read_head(path: str | Path) -> Checkpoint:
    """As `load_checkpoint`, without the tensors."""
    path = Path(path)
    if not path.is_file():
        reason = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"checkpoint '{path}' {reason}; give a .safetensors file")
    refuse_pointer(path)
    try:
        with safe_open(str(path), framework="pt") as stored:
            metadata = stored.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"checkpoint '{path}' is truncated or not safetensors ({one_line(error)}); get it again"
        ) from error
    missing = [name for name in ("config", "dataset_statistics", "trained", "sha256") if name not in metadata]
    if metadata.get("format") != FORMAT or missing:
        raise UserError(
            f"checkpoint '{path}' has no {FORMAT} metadata; give a file that OpenVlaOft.save wrote"
        )
    try:
        statistics = json.loads(metadata["dataset_statistics"])
        config = OftConfig.from_json(metadata["config"])
    except (ValueError, RecursionError) as error:  # UserError is a ValueError: add the path to it
        raise UserError(f"checkpoint '{path}' has bad metadata: {error}") from error
    if not isinstance(statistics, dict) or not statistics:
        raise UserError(f"checkpoint '{path}' has no dataset statistics; save it again with them")
    return Checkpoint(config, statistics, {}, metadata["trained"] == "true", metadata["sha256"])
