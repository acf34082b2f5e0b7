"""A folder of finished cells: one file each, written whole or not at all, and the lines that tables read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from aura_ros.bench.recall.cells import FORMAT, Cell
from aura_ros.errors import UserError
from aura_ros.files import write_text

LINES = "cells.jsonl"
# What a line leaves out of a cell's file.
LONG = ("history",)


class Store:
    """`OUT/cells/<key>.json`, `OUT/checkpoints/<key>.safetensors`, and `OUT/cells.jsonl` made from the former."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.cells, self.checkpoints = self.folder / "cells", self.folder / "checkpoints"

    def prepare(self) -> None:
        """Make the folders. Raises UserError where that is not possible."""
        try:
            for folder in (self.cells, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"'{self.folder}' cannot be written ({error.strerror}); give a folder you may write"
            ) from error

    def file(self, cell: Cell) -> Path:
        """Where a cell's record is."""
        return self.cells / f"{cell.key}.json"

    def checkpoint(self, cell: Cell) -> Path:
        """Where a cell's memory is."""
        return self.checkpoints / f"{cell.key}.safetensors"

    def missing(self, cells: Iterable[Cell], warn: Callable[[str], None]) -> list[Cell]:
        """Those without a usable record. A broken one is named to `warn` and computed again."""
        left = []
        for cell in cells:
            path = self.file(cell)
            if not path.exists():
                left.append(cell)
                continue
            try:
                record = read_record(path)
            except UserError as problem:
                warn(f"{problem}; it is computed again")
                left.append(cell)
                continue
            if Cell.from_dict(record["config"]) != cell:
                warn(f"'{path}' was trained with other defaults; it is computed again")
                left.append(cell)
        return left

    def save(self, record: dict[str, Any]) -> None:
        """Write one cell's record."""
        write_text(self.cells / f"{record['key']}.json", json.dumps(record) + "\n")

    def write_lines(self) -> int:
        """Make `cells.jsonl` anew from all records, in order of key; returns how many. Broken files are left out."""
        lines = []
        for path in sorted(self.cells.glob("*.json")):
            try:
                record = read_record(path)
            except UserError:
                continue
            lines.append(json.dumps({name: v for name, v in record.items() if name not in LONG}))
        write_text(self.folder / LINES, "".join(line + "\n" for line in lines))
        return len(lines)


def read_record(path: Path) -> dict[str, Any]:
    """A cell's record. Raises UserError for a file that is none, or of another format."""
    try:
        record = json.loads(path.read_text())
        if record["format"] != FORMAT:
            raise UserError(f"it is of format {record['format']}, this version reads {FORMAT}")
        Cell.from_dict(record["config"])
        float(record["accuracy"]), float(record["write_rate"])
    except UserError as problem:
        raise UserError(f"'{path}' is of no use: {problem}") from problem
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"'{path}' is no cell ({type(error).__name__}: {error})") from error
    return record


def read_lines(folder: str | Path) -> list[dict[str, Any]]:
    """The cells of `FOLDER/cells.jsonl`. Raises UserError naming file and line."""
    path = Path(folder)
    path = path / LINES if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"'{path}' does not exist; give the folder of a sweep")
    records = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            record = json.loads(line)
            version = record["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"'{path}' line {number} is no cell ({error}); run the sweep again") from error
        if version != FORMAT:
            raise UserError(
                f"'{path}' line {number} is of format {version}, this version reads {FORMAT}; run the sweep again"
            )
        records.append(record)
    return records
