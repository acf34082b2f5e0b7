"""What a checkpoint folder holds and lacks, from its headers alone or with every weight."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from aura_ros.backbones.openvla_oft.checkpoint import WeightsDigest
from aura_ros.backbones.openvla_oft.config import OftConfig
from aura_ros.backbones.openvla_oft.folder import (
    OTHER_STATISTICS,
    STATISTICS,
    Folder,
    find_folder,
    read_folder,
)
from aura_ros.backbones.openvla_oft.layout import FolderOptions
from aura_ros.backbones.openvla_oft.model import build_on_meta, check_keys
from aura_ros.backbones.openvla_oft.normalisation import select_statistics
from aura_ros.backbones.openvla_oft.tokenizer import TOKENIZER_FILES, LlamaTokenizer
from aura_ros.errors import UserError

# Bytes done so far and in all.
Progress = Callable[[int, int], None]
NO_TOKENIZER = (
    "tokenizer.json: put the one the checkpoint came with beside its weights; without it only ready token ids are "
    "served"
)


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
        wanted = _wanted(folder)
        report.parameters = sum(_count(shape) for shape in wanted.values())
        report.unused_tensors = len(folder.tensors) - len(wanted)
        report.problems += _wrong_shapes(folder, wanted)
        if digest and not report.problems:
            report.sha256 = _digest(folder, list(wanted), report, progress)
    except UserError as problem:
        report.problems.append(str(problem))
    return report


def check_headers(folder: Folder) -> None:
    """Raise `UserError` for tensors missing, unknown or of another shape, and for a tokenizer that does not serve.

    Reads no weight: what `warm_up` would find after minutes of reading shows in about a second. A folder without
    tokenizer, which serves ready token ids only, is refused too.
    """
    if wrong := _wrong_shapes(folder, _wanted(folder)):
        raise UserError(f"checkpoint '{folder.path}': {wrong[0]}; use files of one checkpoint")
    if not _has_tokenizer(folder):
        raise UserError(f"checkpoint '{folder.path}' lacks {NO_TOKENIZER}")
    _check_tokenizer(folder)


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
    if not os.path.lexists(folder.path / STATISTICS):
        report.missing.append(f"{STATISTICS}: {OTHER_STATISTICS}")
    if not _has_tokenizer(folder):
        report.missing.append(NO_TOKENIZER)
        return
    try:
        _check_tokenizer(folder)
        report.tokenizer = "gives the ids the model was trained on"
    except UserError as problem:
        report.problems.append(str(problem))


def _has_tokenizer(folder: Folder) -> bool:
    return any((folder.path / name).exists() for name in TOKENIZER_FILES)


def _check_tokenizer(folder: Folder) -> None:
    tokenizer, rows = LlamaTokenizer(folder.path), folder.config.language.vocab
    tokenizer.check()
    if tokenizer.vocab > rows:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab} tokens but checkpoint '{folder.path}' embeds {rows}; use the "
            "tokenizer the checkpoint came with"
        )


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


def _wanted(folder: Folder) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the network reads. Raises `UserError` unless they are there, and no other."""
    wanted = {name: tuple(p.shape) for name, p in build_on_meta(folder.config).named_parameters()}
    check_keys(folder.config, wanted.keys(), folder.tensors.keys(), f"checkpoint '{folder.path}'")
    return wanted


def _wrong_shapes(folder: Folder, wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    entries = folder.tensors.entries
    return [
        f"tensor '{name}' in '{entries[name].file}' has shape {list(entries[name].shape)}; expected {list(shape)}"
        for name, shape in wanted.items()
        if entries[name].shape != shape
    ]


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
