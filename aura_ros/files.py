"""Files as every part writes and recognises them: JSON whole or not at all, Git LFS pointers in a file's place."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

from aura_ros.errors import UserError

# What stands in a file's place where `git lfs pull` was not run.
LFS_POINTER = b"version https://git-lfs"


def create(path: Path) -> int:
    """Make an empty file; returns the mode that the umask gives it.

    safetensors writes files that only their owner may read, and a node may run as another user: chmod to this afterwards.
    """
    path.touch()
    return path.stat().st_mode


def write_json(path: Path, value: Any) -> None:
    """Write the file whole or not at all. Raises `UserError` if it cannot be."""
    write_text(path, json.dumps(value, indent=2) + "\n", "json ")


def write_text(path: Path, text: str, what: str = "") -> None:
    """Write the file whole or not at all, on the disk when this returns. Raises `UserError` if it cannot be."""
    # A name of its own, so that two runs with one file do not write into each other's.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with temporary.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(
            f"{what}'{path}' cannot be written ({error.strerror}); give a file in a folder you may write, with room"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
