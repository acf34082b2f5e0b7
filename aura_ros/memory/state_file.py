"""A memory's state as a file: what survives a restart."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from aura_ros.errors import UserError
from aura_ros.memory.numpy_step import NumpyMemory

FORMAT = "aura_ros memory state 1"
State = dict[str, npt.NDArray[Any]]


def save_state(memory: NumpyMemory, path: str | os.PathLike[str], epoch: int) -> None:
    """Write W, previous read and counters to a safetensors file, as a whole or not at all.

    The file is bound to the memory's weights by their hash. Raises UserError when it cannot be written.
    """
    write_state(memory.state_dict(), memory.weights_hash, path, epoch)


def write_state(
    state: State, weights_hash: str, path: str | os.PathLike[str], epoch: int, note: str = ""
) -> None:
    """Write a state taken earlier (`NumpyMemory.state_dict`); otherwise as `save_state`.

    note: text of the writer's own, which `read_noted` gives back.
    """
    target = Path(path)
    if not target.name or "\0" in str(path):
        raise UserError(f"path {str(path)!r} names no file; give one, such as memory.safetensors")
    temporary = target.with_name(f".{uuid.uuid4().hex}.tmp")
    metadata = {"format": FORMAT, "weights_hash": weights_hash, "epoch": str(epoch)}
    if note:
        metadata["note"] = note
    try:
        # Whoever may call the service must not be able to replace other files of this user.
        if target.exists() and not _is_state(target):
            raise UserError(f"'{target}' exists and is no memory state; give another path or remove it")
        save_file(dict(state), temporary, metadata)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        reason = " ".join(str(error).split())
        raise UserError(
            f"cannot write memory state to '{target}' ({reason}); give a path in a writable folder"
        ) from error


def load_state(memory: NumpyMemory, path: str | os.PathLike[str]) -> None:
    """Load a state that `save_state` wrote for a memory of the same weights.

    Raises UserError, the memory untouched, when the file is missing, damaged, or of other weights.
    """
    memory.load_state_dict(read_state(memory.weights_hash, path))


def read_state(weights_hash: str, path: str | os.PathLike[str]) -> State:
    """Read a state for `NumpyMemory.load_state_dict` of a memory of these weights; otherwise as `load_state`."""
    return read_noted(weights_hash, path)[0]


def read_noted(weights_hash: str, path: str | os.PathLike[str]) -> tuple[State, str]:
    """Read a state as `read_state` does, and its writer's note; empty where there is none."""
    source = Path(path)
    try:
        if "\0" in str(path) or not source.is_file():
            raise UserError(f"memory state {str(path)!r} is not a file; give one written by ~/save_memory")
        # The format first: NumPy has no type for some of the tensors that other files hold.
        metadata = _metadata(source)
        if metadata.get("format") != FORMAT:
            raise UserError(
                f"memory state '{source}' has format {metadata.get('format')!r}; expected {FORMAT!r}"
            )
        with safe_open(source, framework="numpy") as tensors:
            state = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"memory state '{source}' cannot be read ({reason}); it is truncated or of another kind"
        ) from error
    if metadata.get("weights_hash") != weights_hash:
        raise UserError(
            f"memory state '{source}' belongs to weights {metadata.get('weights_hash', '')[:12]}, but this memory has "
            f"{weights_hash[:12]}; load it into the memory that saved it"
        )
    return state, metadata.get("note", "")


def _is_state(path: Path) -> bool:
    try:
        # Only files: opening a pipe would wait for its other end.
        return path.is_file() and _metadata(path).get("format") == FORMAT
    except SafetensorError:
        return False


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="numpy") as tensors:
        return dict(tensors.metadata() or {})
