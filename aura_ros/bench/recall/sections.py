"""A table of its own question, as text and as numbers, and how its cells are grouped and summed up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aura_ros.bench.recall.statistics import interval
from aura_ros.bench.recall.table import Record, line, plain, recipe, task_of

MAIN, HARD, SPARSE = "noisy_long_recall", "hard_recall", "sparse_recall"


@dataclass(frozen=True)
class Section:
    """One table: title, header, rows as text, a note below, and the same as numbers for JSON.

    steps: of training, for each row; None where a row has none. Said in the title where all agree.
    """

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    note: str = ""
    numbers: list[dict[str, Any]] = field(default_factory=list)
    steps: list[int | None] = field(default_factory=list)

    def add(self, cells: Iterable[object], steps: int | None = None, **numbers: Any) -> None:
        """One row, as text and as numbers."""
        self.rows.append(tuple(map(str, cells)))
        self.steps.append(steps)
        self.numbers.append(plain({**numbers, **({} if steps is None else {"training_steps": steps})}))

    def markdown(self) -> str:
        """The table for people."""
        title, header, rows = self.title, self.header, self.rows
        said = {steps for steps in self.steps if steps is not None}
        if len(said) == 1:
            title += f", {said.pop():,} training steps"
        elif said:
            header = (*header, "training steps")
            rows = [
                (*row, "-" if n is None else f"{n:,}") for row, n in zip(self.rows, self.steps, strict=True)
            ]
        lines = [f"### {title}", "", line(header), line(["---"] * len(header))]
        lines += [line(row) for row in rows]
        return "\n".join([*lines, *(["", self.note] if self.note else []), ""])


def by(records: Iterable[Record], *names: str) -> dict[tuple[Any, ...], list[Record]]:
    """Records by the values of some fields, in order of those."""
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[tuple(record[name] for name in names)].append(record)
    return dict(sorted(groups.items()))


def by_recipe(records: Iterable[Record], *names: str) -> list[tuple[tuple[Any, ...], list[Record]]]:
    """Records by the values of some fields, those of other training apart: each group is the seeds of one row."""
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        key = (*(record[name] for name in names), record["steps"], recipe(record))
        groups[key].append(record)
    return [(key[: len(names)], cells) for key, cells in sorted(groups.items(), key=lambda item: item[0])]


def alike(cells: Sequence[Record], others: Iterable[Record], *but: str) -> list[Record]:
    """Those of `others` trained as the cells of a row were, but for the fields `but`."""
    wanted = recipe(cells[0], *but)
    return [other for other in others if recipe(other, *but) == wanted]


def mean_of(cells: Sequence[Record], name: str, digits: int = 3) -> str:
    """Mean of a field over seeds with its t-interval; "-" where the records have none."""
    values = [cell[name] for cell in cells if cell.get(name) is not None]
    return interval(values).text(digits) if values else "-"


def gated(records: Iterable[Record], task: str, *labels: str) -> list[Record]:
    """Cells of the gated memory on a task as it is, of some recipes."""
    return [r for r in records if r["variant"] == "aura" and task_of(r) == task and r["label"] in labels]


def ib_pairs(records: Iterable[Record]) -> list[tuple[int, list[Record], list[Record]]]:
    """Figure 11's arms: N, cells with the bottleneck, cells trained alike without; sizes that have both.

    With: label "ib", or the hard task's own recipe.
    """
    cells = [r for r in records if r["variant"] == "aura" and task_of(r) == HARD]
    without = [r for r in cells if r["label"] == "no-ib"]
    ours = [r for r in cells if r["label"] in ("ib", "aura")]
    pairs = [
        (size, group, alike(group, without, "label", "objective.beta"))
        for (size,), group in by_recipe(ours, "state_dim")
    ]
    return [pair for pair in pairs if pair[2]]


def trained(record: Record) -> str:
    """What is said of a cell's training beside its size: whether it was with probes."""
    return ", trained with probes" if record["config"].get("probe") else ""
