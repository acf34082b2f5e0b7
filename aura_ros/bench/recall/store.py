"""A folder of finished cells: one file each, written whole or not at all, and the lines that tables read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from aura_ros.bench.recall.cells import FORMAT, Cell
from aura_ros.errors import UserError
from aura_ros.files import write_text

LINES, CHECKPOINTS = "cells.jsonl", "checkpoints"
# What a line leaves out of a cell's file.
LONG = ("history",)
# What a record must have, and of what kind.
NUMBERS = ("state_dim", "seed", "steps", "accuracy", "write_rate", "floor_skip", "state_bytes", "params")
TEXTS = ("key", "task", "variant", "label")
# What older records lack, and what has no value where there is nothing to count.
OPTIONAL = (
    *("event_rate", "distractor_rate", "filler_rate", "query_rate", "soft_event", "soft_distractor"),
    *("soft_query", "floor_events", "floor_default", "selectivity", "gradient_active", "cpu_s"),
)
FRACTIONS = ("accuracy", "write_rate")
# Said twice, of the cell and of its configuration.
REPEATED = ("task", "variant", "state_dim", "seed", "label")
# What was measured at each further length.
AT_LENGTH = ("steps", "accuracy", "write_rate", "state_bytes")


class Store:
    """`OUT/cells/<key>.json`, `OUT/checkpoints/<key>.safetensors`, and `OUT/cells.jsonl`, a line for each cell.

    A folder may have lines alone, as one that is handed on does. A line is replaced by its cell's file and never dropped.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.cells, self.checkpoints = self.folder / "cells", self.folder / CHECKPOINTS

    def prepare(self) -> None:
        """Make the folders. Raises UserError where that is not possible, and for lines that cannot be kept."""
        try:
            for folder in (self.cells, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"'{self.folder}' cannot be written ({error.strerror}); give a folder you may write"
            ) from error
        # Before anything is trained that they would have no room for.
        self._lines()

    def file(self, cell: Cell) -> Path:
        """Where a cell's record is."""
        return self.cells / f"{cell.key}.json"

    def checkpoint(self, cell: Cell) -> Path:
        """Where a cell's memory is."""
        return self.checkpoints / f"{cell.key}.safetensors"

    def missing(self, cells: Iterable[Cell], warn: Callable[[str], None]) -> list[Cell]:
        """Those without a usable record, or without the memory that it names.

        One that is there and of no use is named to `warn` and computed again. A record that names no memory has none.
        """
        lines = self._lines()
        left = []
        for cell in cells:
            path = self.file(cell)
            if not path.exists() and cell.key not in lines:
                left.append(cell)
            elif problem := self._problem(cell, path, lines.get(cell.key)):
                warn(f"{problem}; it is computed again")
                left.append(cell)
        return left

    def _problem(self, cell: Cell, path: Path, line: dict[str, Any] | None) -> str:
        """Why a cell's file, or its line where there is no file, is of no use; or nothing."""
        if path.exists():
            try:
                line = read_record(path)
            except UserError as problem:
                return str(problem)
            what = f"'{path}'"
        else:
            what = f"'{self.folder / LINES}', cell {cell.key},"
        assert line is not None
        if wrong := fault(line):
            return f"{what} {wrong}"
        if Cell.from_dict(line["config"]) != cell:
            return f"{what} was trained with other defaults"
        name = line["checkpoint"]
        if name is not None and not (self.checkpoints / name).is_file():
            return f"{what} names a checkpoint that is not there, '{name}'"
        return ""

    def save(self, record: dict[str, Any]) -> None:
        """Write one cell's record."""
        write_text(self.cells / f"{record['key']}.json", json.dumps(record) + "\n")

    def write_lines(self) -> int:
        """Bring `cells.jsonl` up to date with all records, in order of key; returns how many lines it has.

        A broken file changes nothing: what an earlier line says of it stays.
        """
        lines = self._lines()
        for path in sorted(self.cells.glob("*.json")):
            try:
                record = read_record(path)
            except UserError:
                continue
            lines[record["key"]] = {name: value for name, value in record.items() if name not in LONG}
        text = "".join(json.dumps(lines[key]) + "\n" for key in sorted(lines))
        write_text(self.folder / LINES, text)
        return len(lines)

    def _lines(self) -> dict[str, dict[str, Any]]:
        """The lines that are there, by key, usable or not. Raises UserError for one that has no key to keep it by."""
        path = self.folder / LINES
        if not path.exists():
            return {}
        lines = {}
        for number, record in enumerate(read_lines(path), start=1):
            key = record.get("key")
            if not isinstance(key, str):
                raise UserError(f"'{path}' line {number} has no text 'key'; mend or remove that line")
            lines[key] = record
        return lines


def fault(record: dict[str, Any]) -> str:
    """What a cell's record or line lacks to be used by sweeps, tables and figures; or nothing."""
    wrong = _wrong_fields(record, TEXTS, str, "text") or _wrong_fields(
        record, NUMBERS, (int, float), "number"
    )
    if wrong:
        return wrong
    there = [name for name in OPTIONAL if record.get(name) is not None]
    if wrong := _wrong_fields(record, there, (int, float), "number"):
        return wrong
    if outside := [name for name in FRACTIONS if not 0 <= record[name] <= 1]:
        return f"has '{outside[0]}' {record[outside[0]]}, which is no fraction"
    if not isinstance(record.get("checkpoint", 0), (str, type(None))):
        return "has no file's name as 'checkpoint'"
    try:
        cell = Cell.from_dict(record.get("config") or {})
    except (UserError, AttributeError) as problem:
        return f"has no usable configuration: {problem}"
    said = {**{name: getattr(cell, name) for name in REPEATED}, "steps": cell.train.steps, "key": cell.key}
    if other := [name for name, value in said.items() if record[name] != value]:
        name = other[0]
        return f"has {name} '{record[name]}', its configuration says '{said[name]}'"
    return _wrong_lengths(record.get("at_lengths", []), cell)


def _wrong_fields(record: dict[str, Any], names: Iterable[str], kinds: Any, what: str) -> str:
    for name in names:
        value = record.get(name)
        if not isinstance(value, kinds) or isinstance(value, bool):
            return f"has no {what} '{name}'"
        if isinstance(value, float) and not math.isfinite(value):
            return f"has no finite '{name}'"
    return ""


def _wrong_lengths(points: Any, cell: Cell) -> str:
    """What is wrong with what was measured at a cell's further lengths, or nothing."""
    if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
        return "has no list of numbers as 'at_lengths'"
    for point in points:
        if wrong := _wrong_fields(point, AT_LENGTH, (int, float), "number"):
            return f"{wrong} in 'at_lengths'"
    steps = [point["steps"] for point in points]
    if steps != list(cell.lengths):
        return f"has 'at_lengths' of {steps} steps, its configuration says {list(cell.lengths)}"
    return ""


def read_record(path: Path) -> dict[str, Any]:
    """A cell's record. Raises UserError for a file that is none, of another format, or of no use."""
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        version = record["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"'{path}' is no cell ({type(error).__name__}: {error})") from error
    if version != FORMAT:
        raise UserError(f"'{path}' is of format {version}, this version reads {FORMAT}")
    if wrong := fault(record):
        raise UserError(f"'{path}' {wrong}")
    return record


def read_lines(folder: str | Path) -> list[dict[str, Any]]:
    """The cells of `FOLDER/cells.jsonl`, or of such a file. Raises UserError naming file and line."""
    path = Path(folder)
    path = path / LINES if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"'{path}' does not exist; give the folder of a sweep")
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise UserError(
            f"'{path}' has cells that are no text ({error.reason}); run the sweep again"
        ) from error
    except OSError as error:
        raise UserError(f"'{path}' cannot be read ({error.strerror}); give the folder of a sweep") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            version = record["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"'{path}' line {number} is no cell ({error}); mend or remove that line"
            ) from error
        if version != FORMAT:
            raise UserError(
                f"'{path}' line {number} is of format {version}, this version reads {FORMAT}; give another folder"
            )
        records.append(record)
    return records
