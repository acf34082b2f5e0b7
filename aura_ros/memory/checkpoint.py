"""Keep weights in one safetensors file whose content hash is checked when it is read: a memory's, and other kinds."""

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
from aura_ros.files import LFS_POINTER, create
from aura_ros.memory.config import MemoryConfig, buffer_shapes, parameter_shapes

Shape = tuple[int, ...]
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
    check_shapes(parameter_shapes(config) | buffer_shapes(config), arrays, where, "export the memory again")


def save_checkpoint(path: str | os.PathLike[str], config: MemoryConfig, arrays: Arrays) -> str:
    """Write the file as a whole or not at all, and return its weights_hash.

    Raises UserError when the arrays do not fit the configuration or the folder cannot be written.
    """
    check_arrays(config, arrays, f"memory for '{Path(path)}'")
    return write_weights(path, FORMAT, config.to_json(), arrays, "memory")


def load_checkpoint(path: str | os.PathLike[str]) -> MemoryCheckpoint:
    """Read and verify a file that `save_checkpoint` wrote.

    Raises UserError when it is missing, truncated, no memory of ours, altered, of wrong shapes or not finite.
    """
    where = f"memory checkpoint '{Path(path)}'"
    config_json, arrays, weights_hash = read_weights(path, FORMAT, where, "export the memory again")
    config = MemoryConfig.from_json(config_json)
    check_arrays(config, arrays, where)
    return MemoryCheckpoint(config, arrays, weights_hash)


# Of any kind of file


def check_shapes(
    wanted: Mapping[str, Shape], arrays: Mapping[str, npt.NDArray[np.float32]], where: str, remedy: str
) -> None:
    """Raise UserError unless the arrays are exactly those wanted, float32 and finite.

    where, remedy: whose they are and what to do, for the message.
    """
    if missing := sorted(set(wanted) - set(arrays)):
        raise UserError(f"{where} lacks {missing[0]} ({len(missing)} missing); {remedy}")
    if extra := sorted(set(arrays) - set(wanted)):
        raise UserError(f"{where} has unknown {extra[0]} ({len(extra)} unknown); {remedy}")
    for name, shape in wanted.items():
        array = arrays[name]
        if array.shape != shape or array.dtype != np.float32:
            raise UserError(
                f"{where}: {name} is {array.dtype} {list(array.shape)}; expected float32 {list(shape)}; {remedy}"
            )
        if not np.isfinite(array).all():
            raise UserError(f"{where}: {name} holds NaN or infinity; use one from before it diverged")


def write_weights(
    path: str | os.PathLike[str], file_format: str, config_json: str, arrays: Arrays, what: str
) -> str:
    """Write a file of any kind as a whole or not at all; return its weights_hash. Raises UserError if it cannot be.

    what: what is written, for the message.
    """
    target = Path(path)
    weights_hash = content_hash(config_json, arrays)
    metadata = {"format": file_format, "config": config_json, "sha256": weights_hash}
    # In the target's folder, since os.replace is atomic only within one file system.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        mode = create(temporary)
        save_file({name: np.asarray(array, order="C") for name, array in arrays.items()}, temporary, metadata)
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise UserError(
            f"cannot write {what} to '{target}' ({_line(error)}); give a path in a writable folder"
        ) from error
    return weights_hash


def read_weights(
    path: str | os.PathLike[str], file_format: str, where: str, remedy: str
) -> tuple[str, Arrays, str]:
    """Read what `write_weights` wrote: configuration as JSON, arrays, weights_hash.

    where, remedy: which file and what to do, for the message. Raises UserError when it is missing, truncated, of another
    format, not float32 or altered; shapes and values are the caller's to check.
    """
    source = Path(path)
    if not source.is_file():
        raise UserError(f"{where} is not a file; give the path of one that this package wrote")
    try:
        with source.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise UserError(f"{where} is a Git LFS pointer; run `git lfs pull`")
        with safe_open(source, framework="numpy") as tensors:
            metadata = dict(tensors.metadata() or {})
            # Before any tensor is read: another kind of file is named as such, whatever it holds.
            if metadata.get("format") != file_format or not {"config", "sha256"} <= set(metadata):
                raise UserError(
                    f"{where} has format {metadata.get('format')!r}; expected {file_format!r}; {remedy} with this package"
                )
            arrays = {}
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                # Asked before reading, since NumPy has no bfloat16 to read into.
                if (dtype := tensors.get_slice(name).get_dtype()) != "F32":
                    raise UserError(f"{where}: {name} is {dtype}; expected F32; {remedy}")
                arrays[name] = tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{where} cannot be read ({_line(error)}); it is truncated or no safetensors file"
        ) from error
    found = content_hash(metadata["config"], arrays)
    if found != metadata["sha256"]:
        raise UserError(
            f"{where} has content hash {found[:12]}, not {metadata['sha256'][:12]!r}; "
            "it was altered or damaged, copy it again"
        )
    return metadata["config"], arrays, found


def format_of(path: str | os.PathLike[str]) -> str:
    """What kind of file of this package it is; "" for anything else, and for none."""
    try:
        with safe_open(Path(path), framework="numpy") as tensors:
            return str((tensors.metadata() or {}).get("format", ""))
    except (OSError, SafetensorError):
        return ""


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
