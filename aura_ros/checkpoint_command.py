"""`aura checkpoint`: say what a checkpoint folder holds and lacks; copy it without pickles."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from aura_ros.backbones.openvla_oft.layout import FolderOptions
from aura_ros.files import write_json

if TYPE_CHECKING:
    from aura_ros.backbones.openvla_oft.inspection import Report


def run_inspect(
    path: str,
    options: FolderOptions | None = None,
    *,
    quick: bool = False,
    json_path: Path | None = None,
) -> int:
    """Print what is found, one line each, and every problem; returns 0, or 2 if it cannot be loaded."""
    from aura_ros.backbones.openvla_oft.inspection import inspect

    with _progress("reading weights") as progress:
        report = inspect(path, options, digest=not quick, progress=progress)
    sys.stdout.writelines(f"{name:<13} {text}\n" for name, text in lines(report))
    if json_path is not None:
        write_json(json_path, asdict(report))
    return 2 if report.problems else 0


def run_convert(path: str, out: str, options: FolderOptions | None = None) -> int:
    """Copy the folder; returns 0. Interrupted, it raises KeyboardInterrupt saying what is kept."""
    from aura_ros.backbones.openvla_oft.conversion import convert, partial_of

    try:
        with _progress("copying") as progress:
            folder, files = convert(path, out, progress, options=options)
    except KeyboardInterrupt:
        partial = partial_of(out)
        if not partial.is_dir():
            raise
        raise KeyboardInterrupt(f"'{partial}' keeps what was copied; run it again and it goes on") from None
    sys.stdout.write(f"{folder}: {len(files)} files, no pickle among them\n")
    sys.stdout.writelines(f"  {name}\n" for name in files)
    return 0


def lines(report: Report) -> Iterator[tuple[str, str]]:
    """The report as label and text."""
    yield "checkpoint", report.path
    if report.config:
        yield from _network(report)
        for key, fit in report.statistics.items():
            yield "statistics", f"{key}: {fit}"
        yield "tokenizer", report.tokenizer or "none"
        size = report.bytes / 1e9
        yield (
            "files",
            f"{len(report.files)}, {size:.3f} GB, {', '.join(report.dtypes)}: {', '.join(report.files)}",
        )
        yield "unused", f"{report.unused_tensors} tensors that this network never reads (allow-listed)"
        for name, reason in report.ignored.items():
            yield "ignored", f"{name}: {reason}"
        if report.sha256:
            yield "sha256", report.sha256
    for missing in report.missing:
        yield "missing", missing
    for problem in report.problems:
        yield "problem", problem
    if not report.problems and not report.missing:
        yield "missing", "nothing"


def _network(report: Report) -> Iterator[tuple[str, str]]:
    c = report.config
    language, action, image = c["language"], c["action"], c["image"]
    film = ", FiLM" if c["film"] else ""
    yield "model", f"{c['name']}, {report.parameters / 1e6:.1f} M parameters, {c['head']} head{film}"
    yield (
        "trunk",
        (
            f"Llama, hidden {language['hidden']}, {language['layers']} layers, {language['heads']} heads, "
            f"vocabulary {language['vocab']}, rms_norm_eps {language['rms_norm_eps']:g}"
        ),
    )
    for name in ("dino", "siglip"):
        tower = c[name]
        yield "vision", f"{name}, width {tower['width']}, {tower['depth']} blocks, {tower['heads']} heads"
    yield (
        "cameras",
        (
            f"{len(c['cameras'])} ({', '.join(c['cameras'])}), {image['size']} px, patch {c['patch']}, "
            f"{'mirrored left-right' if image['mirror'] else 'as seen'}"
        ),
    )
    yield (
        "chunk",
        (
            f"{action['horizon']} rows of {len(action['names'])} ({', '.join(action['names'])}) "
            f"every {action['period_s']:g} s"
        ),
    )
    yield "proprio", f"{c['proprio_dim']} values" if c["proprio_dim"] else "not used"


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
