"""`aura recall`: train the paper's cells, see them beside its numbers, compute some again."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aura_ros.bench.recall.options import (
    COMMANDS,
    Counts,
    Eval,
    Figures,
    Floors,
    Presets,
    Speed,
    Sweep,
    Table,
    Train,
    Verify,
)
from aura_ros.errors import UserError
from aura_ros.files import write_json
from aura_ros.preflight import check_json

__all__ = ["COMMANDS", "run"]


def run(command: Any) -> int:
    """Run one of `COMMANDS`; returns the exit status. Raises UserError for what was given wrong."""
    runners: dict[type, Any] = {
        Sweep: _sweep,
        Train: _train,
        Eval: _eval,
        Table: _table,
        Figures: _figures,
        Verify: _verify,
        Floors: _floors,
        Counts: _counts,
        Speed: _speed,
        Presets: _presets,
    }
    # Before minutes of work whose numbers could not be kept.
    if (path := getattr(command, "json", None)) is not None:
        check_json(path)
    status: int = runners[type(command)](command)
    return status


def _write(path: Path | None, numbers: Any) -> None:
    if path is not None:
        from aura_ros.bench.recall.table import plain

        write_json(path, plain(numbers))


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text.strip() else []


def _numbers(option: str, text: str) -> list[int] | None:
    if not text.strip():
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option} '{text}' is not allowed; give whole numbers separated by commas") from None


def _sweep(command: Sweep) -> int:
    from aura_ros.bench.recall.clock import progress
    from aura_ros.bench.recall.presets import preset_cells
    from aura_ros.bench.recall.sweep import ENGINES, run_sweep

    for option, value in (("steps", command.steps), ("jobs", command.jobs)):
        if value < 0:
            raise UserError(f"{option} {value} is not allowed; it must be 0 or more")
    if command.engine not in ENGINES:
        raise UserError(f"engine '{command.engine}' is unknown; choose one of: {', '.join(ENGINES)}")
    if command.preset == "floors":
        return _floors_of_a_folder(command)
    cells = preset_cells(
        command.preset,
        seeds=_numbers("seeds", command.seeds),
        budgets=_numbers("budget", command.budget),
        variants=_names(command.variants) or None,
        steps=command.steps or None,
    )
    with progress(command.preset, len(cells)) as shown:

        def report(done: int, total: int, record: dict[str, Any]) -> None:
            shown.item(done, f"{record['key']}: {_result(record)}, {record['cpu_s'] / 60:.1f} CPU-min")

        trained = run_sweep(
            cells,
            command.out,
            jobs=command.jobs,
            engine=command.engine,
            report=report,
            warn=lambda text: shown.say(f"note: {text}"),
        )
    sys.stdout.write(f"{command.out}: {len(cells)} cells, {trained} trained now\n")
    return 0


def _result(record: dict[str, Any]) -> str:
    return f"accuracy {record['accuracy']:.4f}, writes {100 * record['write_rate']:.2f} %"


def _floors_of_a_folder(command: Sweep) -> int:
    """The preset that trains nothing: what is counted goes to the folder of the results."""
    given = [name for name in ("seeds", "budget", "variants", "steps") if getattr(command, name)]
    if given:
        raise UserError(f"{given[0]} has no meaning for preset 'floors', which counts and trains nothing")
    try:
        command.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"'{command.out}' cannot be written ({error.strerror}); give a folder you may write"
        ) from error
    return run(Floors(json=command.out / "floors.json"))


def _train(command: Train) -> int:
    from aura_ros.bench.recall.cells import run_cell
    from aura_ros.bench.recall.clock import progress
    from aura_ros.bench.recall.single import make_cell

    cell = make_cell(
        task=command.task,
        variant=command.variant,
        state_dim=command.budget,
        seed=command.seed,
        recipe=command.recipe,
        objective=command.objective,
        steps=command.steps,
        batch=command.batch,
        length=command.length,
        event=command.event,
        probe=command.probe,
        engine=command.engine,
    )
    out = command.out or Path("runs/recall") / f"{cell.key}.safetensors"
    record_file = out.with_suffix(".json")
    teacher = out.with_suffix(".teacher.safetensors") if command.teacher else None
    _check_out(out, [record_file, *([teacher] if teacher else [])], make=command.out is None)
    with progress("training", cell.train.steps) as shown:
        record = run_cell(cell, out, lambda done, total: shown.step(done, cell.key), teacher)
    write_json(record_file, record)
    sys.stdout.write(f"{out}: {_result(record)}, {record['cpu_s']:.0f} CPU-s; record: {record_file}\n")
    return 0


def _check_out(out: Path, more: Sequence[Path], make: bool) -> None:
    """Raises UserError unless all files can be made and hide nothing; make: the folder too."""
    if out.suffix != ".safetensors":
        raise UserError(f"out '{out}' is no checkpoint's name; give one that ends in .safetensors")
    for path in (out, *more):
        if path.exists():
            raise UserError(f"out '{path}' exists; give another name or remove it")
    folder = out.parent
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        check_json(more[0])
    except (OSError, UserError) as error:
        reason = getattr(error, "strerror", None) or "no folder there that you may write"
        raise UserError(
            f"out '{out}' cannot be written ({reason}); give a file in a folder you may write"
        ) from error


def _eval(command: Eval) -> int:
    from aura_ros.bench.recall.single import judge_checkpoint

    found = judge_checkpoint(
        command.checkpoint,
        task=command.task,
        steps=command.steps,
        event=command.event,
        episodes=command.episodes,
        say=lambda text: _say(text + "\n"),
    )
    sys.stdout.write(found.text())
    _write(command.json, found.numbers())
    return 0


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _table(command: Table) -> int:
    from aura_ros.bench.recall.reports import sections
    from aura_ros.bench.recall.table import markdown, read_cells, row_numbers, rows

    records = read_cells(command.folder)
    further = sections(records, _names(command.only))
    table = [] if command.only else rows(records)
    sys.stdout.write(
        "\n".join([*([markdown(table)] if table else []), *(s.markdown() for s in further.values())])
    )
    numbers = {name: section.numbers for name, section in further.items()}
    _write(command.json, {"rows": [row_numbers(row) for row in table], "sections": numbers})
    return 0


def _figures(command: Figures) -> int:
    from aura_ros.bench.recall.figures import draw
    from aura_ros.bench.recall.table import read_cells

    records = read_cells(command.folder)
    checkpoints = (command.folder if command.folder.is_dir() else command.folder.parent) / "checkpoints"
    only = _numbers("only", command.only) or ()
    sys.stdout.writelines(f"{path}\n" for path in draw(records, command.out, checkpoints, only))
    return 0


def _verify(command: Verify) -> int:
    from aura_ros.bench.recall.verify import choose, judge_again

    choice = choose(command.folder, command.count, command.seed)
    sys.stdout.write(
        f"{len(choice.records)} of {choice.kept} cells with a checkpoint, chosen by --seed {choice.seed}\n"
    )
    sys.stdout.flush()
    checks = []
    for check in judge_again(choice):
        checks.append({**dataclasses.asdict(check), "equal": check.equal, "seed": choice.seed})
        word = "equal" if check.equal else "DIFFERENT"
        where = f" at T = {check.steps:,}" if check.steps else ""
        sys.stdout.write(
            f"{word:<9} {check.key}{where}: accuracy {check.accuracy:.6f} (recorded {check.recorded_accuracy:.6f}), writes "
            f"{check.write_rate:.6f} (recorded {check.recorded_write_rate:.6f})\n"
        )
        sys.stdout.flush()
    _write(command.json, checks)
    return 0 if all(check["equal"] for check in checks) else 1


def _floors(command: Floors) -> int:
    from aura_ros.bench.recall.tasks import TASKS, evaluation_episodes, write_floors

    numbers = {}
    sys.stdout.write("task               events  skipping redundant ones  with a default value\n")
    for name, task in TASKS.items():
        floors = write_floors(evaluation_episodes(task))
        numbers[name] = dataclasses.asdict(floors)
        sys.stdout.write(
            f"{name:<18} {floors.events:>5.2f}x {floors.skip:>22.2f}x {floors.default:>20.2f}x\n"
        )
    _write(command.json, numbers)
    return 0


def _counts(command: Counts) -> int:
    # Its C++ part writes a line to standard error for every profile.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from aura_ros.bench.recall.clock import progress
    from aura_ros.bench.recall.counts import SOURCES, counts, table
    from aura_ros.memory.config import Variant

    sizes = _numbers("budget", command.budget) or []
    found = []
    with progress("counting", len(sizes) * len(Variant)) as shown:
        for count in counts(command.batch, sizes, command.device):
            found.append(count)
            shown.step(len(found), f"{count.variant} N = {count.state_dim}")
    sys.stdout.write(table(found, command.batch, command.device))
    _write(command.json, {"batch": command.batch, "peaks": SOURCES[command.device], "counts": found})
    return 0


def _speed(command: Speed) -> int:
    from aura_ros.bench.recall.speed import measure
    from aura_ros.bench.recall.tasks import MAIN

    for option, value in (("rounds", command.rounds), ("batch", command.batch)):
        if value < 1:
            raise UserError(f"{option} {value} is not allowed; it must be 1 or more")
    numbers = []
    sys.stdout.write("N   chunked ms   step by step ms   ratio   CPU-min for 4,000 steps\n")
    for speed in measure(MAIN, (16, 32, 64), command.batch, command.rounds):
        numbers.append({**dataclasses.asdict(speed), "ratio": speed.ratio})
        sys.stdout.write(
            f"{speed.state_dim:<4}{1e3 * speed.chunked_s:>9.1f} {1e3 * speed.stepwise_s:>17.1f} {speed.ratio:>8.2f}x"
            f" {4000 * speed.chunked_s / 60:>12.1f}\n"
        )
        sys.stdout.flush()
    _write(command.json, numbers)
    return 0


def _presets(command: Presets) -> int:
    from aura_ros.bench.recall.presets import PRESETS

    numbers = []
    for name, make in PRESETS.items():
        about, cells = (make.__doc__ or "").strip().splitlines()[0], make()
        numbers.append({"name": name, "cells": len(cells), "about": about, "keys": [c.key for c in cells]})
        sys.stdout.write(f"{name:<18} {len(cells):>4} cells  {about}\n")
    sys.stdout.write(
        "floors                0 cells  Counts writes: of every event, of changes, and with a default value.\n"
    )
    _write(command.json, numbers)
    return 0
