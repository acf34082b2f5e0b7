"""`aura recall`: train the paper's cells, see them beside its numbers, compute some again."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from aura_ros.errors import UserError
from aura_ros.files import write_json


def _text(help_text: str, metavar: str) -> Any:
    return tyro.conf.arg(help=help_text, metavar=metavar)


Folder = Annotated[Path, tyro.conf.Positional, _text("folder of a sweep", "DIR")]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Train the cells of a preset that a folder lacks; interrupt and run again to go on."""

    preset: Annotated[str, _text("see `aura recall presets`", "NAME")] = "paper-main"
    out: Annotated[Path, _text("folder of the results", "DIR")] = Path("runs/recall")
    seeds: Annotated[str, _text("comma separated; empty: all of the preset", "0,1,...")] = ""
    budget: Annotated[str, _text("state sizes N, comma separated; empty: all", "16,32,...")] = ""
    variants: Annotated[str, _text("comma separated; empty: all", "NAME,...")] = ""
    steps: Annotated[int, _text("gradient steps; 0: the preset's own", "INT")] = 0
    jobs: Annotated[int, _text("processes; 0: one for each core", "INT")] = 0
    engine: Annotated[
        str, _text("processes, or ray (the cluster at RAY_ADDRESS, or a local one)", "NAME")
    ] = "processes"


@dataclasses.dataclass(frozen=True)
class Table:
    """Ours beside the paper's, every seed counted; reads only the folder's cells.jsonl."""

    folder: Folder
    json: Annotated[Path | None, _text("write the rows to this file", "PATH")] = None


@dataclasses.dataclass(frozen=True)
class Figures:
    """Draw accuracy against writes and against the size of the state, from the folder's cells.jsonl."""

    folder: Folder
    out: Annotated[Path, _text("folder of the pictures", "DIR")] = Path("runs/figures")


@dataclasses.dataclass(frozen=True)
class Verify:
    """Compute randomly chosen cells again from their checkpoints and compare; exit status 1 if one differs."""

    folder: Annotated[Path, tyro.conf.Positional, _text("folder of a sweep", "DIR")] = Path("results")
    count: Annotated[int, _text("how many", "INT")] = 3
    seed: Annotated[int, _text("of the choice", "INT")] = 0


@dataclasses.dataclass(frozen=True)
class Floors:
    """Count the writes that no memory can do without, on the evaluation episodes of each task."""


@dataclasses.dataclass(frozen=True)
class Presets:
    """List the presets and how many cells each has."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """Time a gradient step of the chunked scan and of the step-by-step loop, interleaved."""

    rounds: Annotated[int, _text("steps of each", "INT")] = 20
    batch: Annotated[int, _text("episodes a step", "INT")] = 64


COMMANDS: dict[str, type] = {
    "sweep": Sweep,
    "table": Table,
    "figures": Figures,
    "verify": Verify,
    "floors": Floors,
    "speed": Speed,
    "presets": Presets,
}


def run(command: Any) -> int:
    """Run one of `COMMANDS`; returns the exit status."""
    runners: dict[type, Any] = {
        Sweep: _sweep,
        Table: _table,
        Figures: _figures,
        Verify: _verify,
        Floors: _floors,
        Speed: _speed,
        Presets: _presets,
    }
    return runners[type(command)](command)


def _numbers(option: str, text: str) -> list[int] | None:
    if not text.strip():
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option} '{text}' is not allowed; give whole numbers separated by commas") from None


def _sweep(command: Sweep) -> int:
    from aura_ros.bench.recall.presets import preset_cells
    from aura_ros.bench.recall.sweep import ENGINES, run_sweep

    for option, value in (("steps", command.steps), ("jobs", command.jobs)):
        if value < 0:
            raise UserError(f"{option} {value} is not allowed; it must be 0 or more")
    if command.engine not in ENGINES:
        raise UserError(f"engine '{command.engine}' is unknown; choose one of: {', '.join(ENGINES)}")
    cells = preset_cells(
        command.preset,
        seeds=_numbers("seeds", command.seeds),
        budgets=_numbers("budget", command.budget),
        variants=[v.strip() for v in command.variants.split(",")] if command.variants.strip() else None,
        steps=command.steps or None,
    )
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as shown:
        bar = shown.add_task(command.preset, total=len(cells))

        def report(done: int, total: int, record: dict[str, Any]) -> None:
            shown.update(bar, completed=done)
            line = (
                f"{done}/{total} {record['key']}: accuracy {record['accuracy']:.4f}, writes "
                f"{100 * record['write_rate']:.2f} %, {record['cpu_s'] / 60:.1f} CPU-min"
            )
            shown.console.print(line, highlight=False, soft_wrap=True)

        trained = run_sweep(
            cells,
            command.out,
            jobs=command.jobs,
            engine=command.engine,
            report=report,
            warn=lambda text: shown.console.print(f"note: {text}", highlight=False, soft_wrap=True),
        )
    sys.stdout.write(f"{command.out}: {len(cells)} cells, {trained} trained now\n")
    return 0


def _table(command: Table) -> int:
    from aura_ros.bench.recall.store import read_lines
    from aura_ros.bench.recall.table import markdown, rows

    table = rows(read_lines(command.folder))
    sys.stdout.write(markdown(table))
    if command.json is not None:
        write_json(command.json, [dataclasses.asdict(row) for row in table])
    return 0


def _figures(command: Figures) -> int:
    from aura_ros.bench.recall.figures import draw
    from aura_ros.bench.recall.store import read_lines

    records = read_lines(command.folder)
    try:
        files = draw(records, command.out)
    except OSError as error:
        raise UserError(
            f"'{command.out}' cannot be written ({error.strerror}); give a folder you may write"
        ) from error
    sys.stdout.writelines(f"{path}\n" for path in files)
    return 0


def _verify(command: Verify) -> int:
    from aura_ros.bench.recall.verify import verify

    different = 0
    for check in verify(command.folder, command.count, command.seed):
        different += not check.equal
        word = "equal" if check.equal else "DIFFERENT"
        sys.stdout.write(
            f"{word:<9} {check.key}: accuracy {check.accuracy:.6f} (recorded {check.recorded_accuracy:.6f}), writes "
            f"{check.write_rate:.6f} (recorded {check.recorded_write_rate:.6f})\n"
        )
    return 1 if different else 0


def _floors(_: Floors) -> int:
    from aura_ros.bench.recall.tasks import TASKS, evaluation_episodes, write_floors

    sys.stdout.write("task               events  skipping redundant ones  with a default value\n")
    for name, task in TASKS.items():
        floors = write_floors(evaluation_episodes(task))
        sys.stdout.write(
            f"{name:<18} {floors.events:>5.2f}x {floors.skip:>22.2f}x {floors.default:>20.2f}x\n"
        )
    return 0


def _speed(command: Speed) -> int:
    from aura_ros.bench.recall.speed import measure
    from aura_ros.bench.recall.tasks import MAIN

    for option, value in (("rounds", command.rounds), ("batch", command.batch)):
        if value < 1:
            raise UserError(f"{option} {value} is not allowed; it must be 1 or more")
    sys.stdout.write("N   chunked ms   step by step ms   ratio   CPU-min for 4,000 steps\n")
    for speed in measure(MAIN, (16, 32, 64), command.batch, command.rounds):
        sys.stdout.write(
            f"{speed.state_dim:<4}{1e3 * speed.chunked_s:>9.1f} {1e3 * speed.stepwise_s:>17.1f} {speed.ratio:>8.2f}x"
            f" {4000 * speed.chunked_s / 60:>12.1f}\n"
        )
        sys.stdout.flush()
    return 0


def _presets(_: Presets) -> int:
    from aura_ros.bench.recall.presets import PRESETS

    for name, make in PRESETS.items():
        about = (make.__doc__ or "").strip().splitlines()[0]
        sys.stdout.write(f"{name:<18} {len(make()):>4} cells  {about}\n")
    return 0
