"""A copy of a checkpoint folder without pickles, which goes on where it was interrupted."""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from aura_ros.backbones.openvla_oft.folder import Folder, find_folder, read_folder
from aura_ros.backbones.openvla_oft.inspection import Progress
from aura_ros.backbones.openvla_oft.layout import FolderOptions
from aura_ros.backbones.openvla_oft.tensor_files import component_entries, one_line
from aura_ros.errors import UserError

logger = logging.getLogger(__name__)
COPIED_SUFFIXES = (".json", ".safetensors", ".model", ".txt", ".md")
# In an unfinished copy: what it is a copy of.
MARKER = ".copy_of"


def convert(
    path: str | Path,
    out: str | Path,
    progress: Progress = lambda done, total: None,
    *,
    options: FolderOptions | None = None,
) -> tuple[Path, tuple[str, ...]]:
    """Copy a checkpoint folder with its `.pt` files rewritten as safetensors; code and adapters stay behind.

    The folder appears under its name when it is whole. An interrupted copy of the same files goes on where it
    stopped; one of others is begun afresh. options: what the folder does not say about itself; they are checked
    against it and not written down. Returns the folder and the names of its files. Raises `UserError` if it cannot
    be read or written, or changes meanwhile.
    """
    out = Path(out)
    folder = read_folder(find_folder(path), options)
    _check_target(folder.path, out)
    partial = partial_of(out)
    names = _names(folder)
    total = sum((folder.path / name).stat().st_size for name in names)
    done = 0
    try:
        begun = _identity(folder.path, names)
        _prepare(partial, begun)
        written = []
        for name in names:
            origin = folder.path / name
            target = partial / (name if origin.suffix != ".pt" else f"{origin.stem}.safetensors")
            _write_once(origin, target, functools.partial(_further, progress, done, total))
            written.append(target.name)
            done += origin.stat().st_size
            progress(done, total)
        if _identity(folder.path, names) != begun:
            raise UserError(f"checkpoint '{folder.path}' changed while it was copied; run it again")
        for left in {file.name for file in partial.iterdir()} - set(written):
            (partial / left).unlink()
        os.rename(partial, out)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"'{out}' cannot be written ({_reason(error)}); give a place with {total / 1e9:.2f} GB free and run it "
            f"again, or remove '{partial}'"
        ) from error
    return out, tuple(written)


def partial_of(out: str | Path) -> Path:
    """The folder that holds an unfinished copy, beside the one to make."""
    return Path(out).with_name(f".{Path(out).name}.partial")


def _names(folder: Folder) -> list[str]:
    companions = (f.name for f in folder.path.iterdir() if f.suffix in COPIED_SUFFIXES and f.is_file())
    return sorted({*folder.files, *companions})


def _identity(source: Path, names: Sequence[str]) -> dict[str, Any]:
    """What a file written earlier must have been copied from."""
    found = {name: (source / name).stat() for name in names}
    return {
        "source": str(source.resolve()),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in found.items()},
    }


def _prepare(partial: Path, identity: dict[str, Any]) -> None:
    """Keep what an interrupted copy of the same files left; else have the folder empty but for its marker."""
    partial.mkdir(exist_ok=True)
    marker = partial / MARKER
    try:
        if json.loads(marker.read_text()) == identity:
            return
    except (FileNotFoundError, ValueError):
        pass
    left = list(partial.iterdir())
    if left:
        logger.warning("'%s' is of another checkpoint, or of one changed since; it is begun afresh", partial)
    for file in left:
        file.unlink()
    marker.write_text(json.dumps(identity))


def _further(progress: Progress, done: int, total: int, part: int) -> None:
    progress(done + part, total)


def _reason(error: OSError | SafetensorError) -> str:
    """In words. safetensors has the system's error in its text only."""
    if isinstance(error, OSError):
        code = error.errno
    else:
        found = re.search(r"os error (\d+)", str(error))
        code = int(found[1]) if found else None
    if code is None:
        return one_line(error)
    return "the disk is full" if code == errno.ENOSPC else os.strerror(code)


def _check_target(source: Path, out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise UserError(f"'{out}' exists; give the name of a new folder")
    if source.resolve() in (out.resolve(), *out.resolve().parents):
        raise UserError(
            f"'{out}' lies in the checkpoint folder, which is never written to; give another place"
        )
    if not out.parent.is_dir():
        raise UserError(f"'{out.parent}' is no folder; make it first or give another place")


def _write_once(origin: Path, target: Path, progress: Callable[[int], None]) -> None:
    """Write one file under a temporary name and rename it; a file that is there already is whole."""
    if target.exists():
        return
    unfinished = target.with_name(f"{target.name}.unfinished")
    if origin.suffix == ".pt":
        tensors = {name: entry.read().contiguous() for name, entry in component_entries(origin).items()}
        save_file(tensors, unfinished, metadata={"format": "pt"})
    else:
        with origin.open("rb") as read, unfinished.open("wb") as write:
            while block := read.read(1 << 24):
                write.write(block)
                progress(write.tell())
    with unfinished.open("rb") as stream:
        os.fsync(stream.fileno())
    os.replace(unfinished, target)
