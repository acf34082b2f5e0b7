"""What a checkpoint folder holds and lacks, and a copy of it without pickles."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from aura_ros.backbones.openvla_oft.checkpoint import WeightsDigest
from aura_ros.backbones.openvla_oft.config import OftConfig
from aura_ros.backbones.openvla_oft.folder import Folder, find_folder, read_folder
from aura_ros.backbones.openvla_oft.layout import FolderOptions
from aura_ros.backbones.openvla_oft.model import build_on_meta, check_keys
from aura_ros.backbones.openvla_oft.normalisation import select_statistics
from aura_ros.backbones.openvla_oft.tensor_files import component_entries
from aura_ros.backbones.openvla_oft.tokenizer import LlamaTokenizer
from aura_ros.errors import UserError

# Bytes done so far and in all.
Progress = Callable[[int, int], None]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
COPIED_SUFFIXES = (".json", ".safetensors", ".model", ".txt", ".md")


@dataclass
class Report:
    """What `inspect` found; empty or zero where a problem came before.

    problems: one line each; with any, the checkpoint cannot be loaded. missing: what it can be loaded without,
    at a price that is said. statistics: data set -> what fits or does
    not. sha256: as `BackboneInfo.checkpoint_hash` with the same options; empty if not asked for.
    """

    path: str
    config: dict[str, Any] = field(default_factory=dict)
    parameters: int = 0
    bytes: int = 0
    dtypes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    unused_tensors: int = 0
    ignored: dict[str, str] = field(default_factory=dict)
    statistics: dict[str, str] = field(default_factory=dict)
    tokenizer: str = ""
    sha256: str = ""
    missing: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def inspect(
    path: str | Path,
    options: FolderOptions | None = None,
    *,
    digest: bool = True,
    progress: Progress = lambda done, total: None,
) -> Report:
    """Take stock of a checkpoint folder and check everything that loading would check.

    digest: read every weight, for the hash and for values that are not finite; else only names and shapes.
    """
    report = Report(str(path))
    try:
        folder = read_folder(find_folder(path), options)
        _describe(folder, report)
        wanted = {name: tuple(p.shape) for name, p in build_on_meta(folder.config).named_parameters()}
        report.parameters = sum(_count(shape) for shape in wanted.values())
        _check_shapes(folder, wanted, report)
        if digest and not report.problems:
            report.sha256 = _digest(folder, list(wanted), report, progress)
    except UserError as problem:
        report.problems.append(str(problem))
    return report


def _describe(folder: Folder, report: Report) -> None:
    entries, config = folder.tensors.entries, folder.config
    report.config = asdict(config)
    report.files = folder.files
    report.bytes = sum((folder.path / file).stat().st_size for file in folder.files)
    report.dtypes = tuple(sorted({entry.dtype for entry in entries.values()}))
    report.ignored = dict(folder.ignored)
    for key in sorted(folder.statistics):
        report.statistics[key] = _fit(folder.statistics, key, config)
    if "fits" not in report.statistics.values():
        report.problems.append(next(iter(report.statistics.values())))
    if not any((folder.path / name).exists() for name in TOKENIZER_FILES):
        report.missing.append(
            "tokenizer.json: put the one the checkpoint came with beside its weights; without it only ready token "
            "ids are served"
        )
        return
    try:
        LlamaTokenizer(folder.path).check()
        report.tokenizer = "gives the ids the model was trained on"
    except UserError as problem:
        report.problems.append(str(problem))


def _fit(statistics: Mapping[str, Any], key: str, config: OftConfig) -> str:
    try:
        select_statistics(
            statistics,
            key,
            action_dim=config.action.dim,
            proprio_dim=config.proprio_dim,
            bounds=config.bounds,
        )
    except UserError as problem:
        return str(problem)
    return "fits"


def _check_shapes(folder: Folder, wanted: Mapping[str, tuple[int, ...]], report: Report) -> None:
    entries = folder.tensors.entries
    check_keys(folder.config, wanted.keys(), entries.keys(), f"checkpoint '{folder.path}'")
    report.unused_tensors = len(entries) - len(wanted)
    for name, shape in wanted.items():
        if entries[name].shape != shape:
            report.problems.append(
                f"tensor '{name}' in '{entries[name].file}' has shape {list(entries[name].shape)}; "
                f"expected {list(shape)}"
            )


def _digest(folder: Folder, names: list[str], report: Report, progress: Progress) -> str:
    digest = WeightsDigest(folder.config, folder.statistics)
    done, total = 0, sum(_count(folder.tensors.entries[name].shape) for name in names)
    for name in sorted(names):
        tensor = folder.tensors[name]
        digest.update(name, tensor)
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            file = folder.tensors.entries[name].file
            report.problems.append(
                f"tensor '{name}' in '{file}' holds values that are not finite floats; get the file again"
            )
        done += tensor.numel()
        progress(done, total)
    return digest.hexdigest()


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def convert(
    path: str | Path, out: str | Path, progress: Progress = lambda done, total: None
) -> tuple[Path, tuple[str, ...]]:
    """Copy a checkpoint folder with its `.pt` files rewritten as safetensors; code and adapters stay behind.

    The folder appears under its name when it is whole. An interrupted copy goes on where it stopped.
    Returns the folder and the names of its files. Raises `UserError` if it cannot be read or written.
    """
    source, out = find_folder(path), Path(out)
    folder = read_folder(source)
    _check_target(folder.path, out)
    partial = out.with_name(f".{out.name}.partial")
    names = sorted(
        {
            *folder.files,
            *(f.name for f in folder.path.iterdir() if f.suffix in COPIED_SUFFIXES and f.is_file()),
        }
    )
    total = sum((folder.path / name).stat().st_size for name in names)
    done = 0
    try:
        partial.mkdir(exist_ok=True)
        written = []
        for name in names:
            origin = folder.path / name
            target = partial / (name if origin.suffix != ".pt" else f"{origin.stem}.safetensors")
            _write_once(origin, target, functools.partial(_further, progress, done, total))
            written.append(target.name)
            done += origin.stat().st_size
            progress(done, total)
        for left in {file.name for file in partial.iterdir()} - set(written):
            (partial / left).unlink()
        os.rename(partial, out)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        raise UserError(
            f"'{out}' cannot be written ({reason}); give a place with {total / 1e9:.2f} GB free and run it again, "
            f"or remove '{partial}'"
        ) from error
    return out, tuple(written)


def _further(progress: Progress, done: int, total: int, part: int) -> None:
    progress(done + part, total)


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
    if target.exists() and target.stat().st_mtime >= origin.stat().st_mtime:
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
