"""`aura bench backbone`: progress on standard error, the table on standard output, the numbers in a file."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from aura_ros.bench.backbone_config import BackboneBenchConfig
from aura_ros.errors import UserError
from aura_ros.files import write_json

_COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TextColumn("left:"),
    TimeRemainingColumn(),
)
SECONDS_BETWEEN_LINES = 10.0


class _Lines:
    """Progress where there is no terminal: a line now and then."""

    def __init__(self, console: Console) -> None:
        self._console, self._next = console, SECONDS_BETWEEN_LINES
        self._begin: float | None = None

    def show(self, done: int, total: int) -> None:
        if self._begin is None:
            # From the first call on: loading before it says nothing about the calls.
            self._begin, self._first = time.monotonic(), done
            return
        elapsed = time.monotonic() - self._begin
        if elapsed >= self._next:
            self._next = elapsed + SECONDS_BETWEEN_LINES
            left = elapsed / (done - self._first) * (total - done)
            self._console.print(
                f"measuring: {done} of {total} calls, about {left:.0f} s left", highlight=False
            )


def run_backbone(config: BackboneBenchConfig, json_path: Path | None = None) -> int:
    """Measure, print the table and write `json_path`; returns 0, or 1 where ways do not give the same actions.

    Raises `UserError` for what cannot be measured or written; nothing is written then.
    """
    try:
        from aura_ros.bench.backbone import disagreement, run_backbone_bench, table
    except ImportError as error:
        raise UserError(
            f"the backbone needs torch and transformers>=4.57.6,<6 ({error}); install them with "
            "`pip install aura_ros`"
        ) from error
    console = Console(stderr=True)
    with Progress(*_COLUMNS, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading the backbone", total=None)
        lines = _Lines(console)

        def show(done: int, total: int) -> None:
            bar.update(task, description="measuring", completed=done, total=total)
            if not console.is_terminal:
                lines.show(done, total)

        report = run_backbone_bench(config, show)
    sys.stdout.write(table(report))
    if json_path is not None:
        write_json(json_path, dataclasses.asdict(report))
    if fault := disagreement(report):
        sys.stderr.write(f"aura: {fault}\n")
        return 1
    return 0
