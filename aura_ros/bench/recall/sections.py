"""A table of its own question, as text and as numbers, and how its cells are grouped and summed up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aura_ros.bench.recall.statistics import collapsed, interval
from aura_ros.bench.recall.table import Record, line, plain, task_of
from aura_ros.bench.recall.tasks import find_task

MAIN, HARD, SPARSE = "noisy_long_recall", "hard_recall", "sparse_recall"


@dataclass(frozen=True)
class Section:
    """One table: title, header, rows as text, a note below, and the same as numbers for JSON."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    note: str = ""
    numbers: list[dict[str, Any]] = field(default_factory=list)

    def add(self, cells: Iterable[object], **numbers: Any) -> None:
        """One row, as text and as numbers."""
        self.rows.append(tuple(map(str, cells)))
        self.numbers.append(plain(numbers))

    def markdown(self) -> str:
        """The table for people."""
        lines = [f"### {self.title}", "", line(self.header), line(["---"] * len(self.header))]
        lines += [line(row) for row in self.rows]
        return "\n".join([*lines, *(["", self.note] if self.note else []), ""])


def by(records: Iterable[Record], *names: str) -> dict[tuple[Any, ...], list[Record]]:
    """Records by the values of some fields, in order of those."""
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[tuple(record[name] for name in names)].append(record)
    return dict(sorted(groups.items()))


def mean_of(cells: Sequence[Record], name: str, digits: int = 3) -> str:
    """Mean of a field over seeds with its t-interval; "-" where the records have none."""
    values = [cell[name] for cell in cells if cell.get(name) is not None]
    return interval(values).text(digits) if values else "-"


def by_seed(cells: Iterable[Record], name: str = "accuracy") -> dict[int, float]:
    """seed -> value."""
    return {cell["seed"]: cell[name] for cell in cells}


def shut(cells: Iterable[Record]) -> list[int]:
    """Seeds whose gate has collapsed."""
    return sorted(
        c["seed"] for c in cells if collapsed(c["accuracy"], c["write_rate"], find_task(c["task"]).chance)
    )


def gated(records: Iterable[Record], task: str, *labels: str) -> list[Record]:
    """Cells of the gated memory on a task as it is, of some recipes."""
    return [r for r in records if r["variant"] == "aura" and task_of(r) == task and r["label"] in labels]
