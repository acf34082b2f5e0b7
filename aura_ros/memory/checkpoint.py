"""Keep a memory's weights in one safetensors file whose content hash is checked when it is read."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from aura_ros.errors import UserError
from aura_ros.files import LFS_POINTER
from aura_ros.memory.config import MemoryConfig, buffer_shapes, parameter_shapes

Arrays = dict[str, npt.NDArray[np.float32]]

FORMAT = "aura_memory/1"


@dataclass(frozen=True)
class MemoryCheckpoint:
    """What a file holds: float32 arrays by name (`parameter_shapes`, `buffer_shapes`) and their identity.

    weights_hash: sha256 (hex) over the configuration and every array's name, shape and bytes.
    """

    config: MemoryConfig
    arrays: Arrays
    weights_hash: str


def content_hash(config_json: str, arrays: Mapping[str, npt.NDArray[np.float32]]) -> str:
    """Return the sha256 (hex) over configuration text, names, shapes and bytes, in order of names."""
    digest = hashlib.sha256()
    digest.update(f"{FORMAT}\n{config_json}\n".encode())
    for name in sorted(arrays):
        array = np.asarray(arrays[name], dtype="<f4", order="C")
        digest.update(f"{name} float32 {list(arrays[name].shape)}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def check_arrays(config: MemoryConfig, arrays: Mapping[str, npt.NDArray[np.float32]], where: str) -> None:
    """Raise UserError unless the arrays are exactly those of the configuration, float32 and finite.

    where: what the arrays belong to, for the message.
    """
    wanted = parameter_shapes(config) | buffer_shapes(config)
    if missing := sorted(set(wanted) - set(arrays)):
        raise UserError(f"{where} lacks {missing[0]} ({len(missing)} missing); export the memory again")
    if extra := sorted(set(arrays) - set(wanted)):
        raise UserError(f"{where} has unknown {extra[0]} ({len(extra)} unknown); export the memory again")
    for name, shape in wanted.items():
        array = arrays[name]
        if array.shape != shape or array.dtype != np.float32:
            raise UserError(
                f"{where}: {name} is {array.dtype} {list(array.shape)}; expected float32 {list(shape)}; "
                "export the memory again"
            )
        if not np.isfinite(array).all():
            raise UserError(f"{where}: {name} holds NaN or infinity; use one from before it diverged")


def save_checkpoint(path: str | os.PathLike[str], config: MemoryConfig, arrays: Arrays) -> str:
    """Write the file as a whole or not at all, and return its weights_hash.

    Raises UserError when the arrays do not fit the configuration or the folder cannot be written.
    """
    target = Path(path)
    check_arrays(config, arrays, f"memory for '{target}'")
    config_json = config.to_json()
    weights_hash = content_hash(config_json, arrays)
    metadata = {"format": FORMAT, "config": config_json, "sha256": weights_hash}
    # In the target's folder, since os.replace is atomic only within one file system.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file({name: np.asarray(array, order="C") for name, array in arrays.items()}, temporary, metadata)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        reason = " ".join(str(error).split())
        raise UserError(
            f"cannot write memory to '{target}' ({reason}); give a path in a writable folder"
        ) from error
    return weights_hash


def load_checkpoint(path: str | os.PathLike[str]) -> MemoryCheckpoint:
    """Read and verify a file that `save_checkpoint` wrote.

    Raises UserError when it is missing, truncated, no memory of ours, altered, of wrong shapes or not finite.
    """
    source = Path(path)
    if not source.is_file():
        raise UserError(f"memory checkpoint '{source}' is not a file; give the path of an exported memory")
    try:
        with source.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise UserError(f"memory checkpoint '{source}' is a Git LFS pointer; run `git lfs pull`")
        with safe_open(source, framework="numpy") as tensors:
            metadata = dict(tensors.metadata() or {})
            arrays = {}
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                # Asked before reading, since NumPy has no bfloat16 to read into.
                if (dtype := tensors.get_slice(name).get_dtype()) != "F32":
                    raise UserError(
                        f"memory checkpoint '{source}': {name} is {dtype}; expected F32; export it again"
                    )
                arrays[name] = tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"memory checkpoint '{source}' cannot be read ({reason}); it is truncated or no safetensors file"
        ) from error
    if metadata.get("format") != FORMAT or not {"config", "sha256"} <= set(metadata):
        raise UserError(
            f"memory checkpoint '{source}' has format {metadata.get('format')!r}; expected {FORMAT!r}; "
            "export the memory with this package"
        )
    found = content_hash(metadata["config"], arrays)
    if found != metadata["sha256"]:
        raise UserError(
            f"memory checkpoint '{source}' has content hash {found[:12]}, not {metadata['sha256'][:12]!r}; "
            "it was altered or damaged, copy it again"
        )
    config = MemoryConfig.from_json(metadata["config"])
    check_arrays(config, arrays, f"memory checkpoint '{source}'")
    return MemoryCheckpoint(config, arrays, found)
