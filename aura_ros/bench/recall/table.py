"""Ours beside the paper's, from `cells.jsonl` alone: every seed counted, collapsed ones too."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aura_ros.bench.recall.cells import Cell
from aura_ros.bench.recall.paper import CONTROL_HZ, PUBLISHED, Published
from aura_ros.bench.recall.statistics import (
    COLLAPSED_NOTE,
    Comparison,
    Interval,
    Verdict,
    collapsed,
    compare,
    interval,
    judge,
)
from aura_ros.bench.recall.store import fault, read_lines
from aura_ros.bench.recall.tasks import find_task
from aura_ros.errors import UserError
from aura_ros.memory.config import Variant

Record = dict[str, Any]
ORDER = {variant.value: index for index, variant in enumerate(Variant)}
DENSE = "write_every_step"
# Recipes whose cells stand for the paper's; the others change what the paper did not, or what it did elsewhere.
COMPARABLE = ("aura", "open", "paper", "ib")
# Half a unit of the last digit that the paper prints, of accuracies and of writes per second.
ACCURACY_DIGITS, WRITES_DIGITS = 0.0005, 0.005
# Variants whose gate is learned, so that it can shut.
LEARNED = ("aura", "learned_token_gate")
HEADER = (
    *(
        "variant",
        "N",
        "steps",
        "accuracy",
        "worst seed",
        "writes",
        "writes/s",
        "fewer",
        "paper: accuracy, fewer (seeds)",
    ),
    *("where we differ", "x skip floor (worst)", "collapsed", "against every step", "bytes"),
)


@dataclass(frozen=True)
class Row:
    """Seeds of one configuration. writes: fraction of steps. over_skip: mean and worst writes over the skip floor's.

    steps: of training; dense_steps: of what `against_dense` compares with. probed: trained with probes. differences:
    what tells it from the other rows of its variant and size, by field.
    """

    task: str
    label: str
    variant: str
    state_dim: int
    steps: int
    probed: bool
    accuracy: Interval
    writes: Interval
    worst_accuracy: float
    over_skip: float
    worst_over_skip: float
    collapsed: int
    state_bytes: int
    params: int
    published: Published | None
    against_dense: Comparison | None
    dense_steps: int | None = None
    differences: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def accuracy_verdict(self) -> Verdict | None:
        """Accuracy against the paper's; None where it has none."""
        p = self.published
        return None if p is None else judge(self.accuracy, p.accuracy, p.half, p.seeds, ACCURACY_DIGITS)

    @property
    def writes_verdict(self) -> Verdict | None:
        """Writes per second against the paper's; None where it has none, or where they are not learned."""
        p = self.published
        if p is None or p.ratio is None or self.variant not in LEARNED:
            return None
        a_second = Interval(CONTROL_HZ * self.writes.mean, CONTROL_HZ * self.writes.half, self.writes.n)
        return judge(a_second, CONTROL_HZ / p.ratio, p.writes_half, p.seeds, WRITES_DIGITS)

    @property
    def ratio(self) -> float | None:
        """How many times fewer writes than every step, of the mean write rate; None if nothing was written."""
        return 1.0 / self.writes.mean if self.writes.mean > 0 else None


def read_cells(folder: str | Path) -> list[Record]:
    """The cells of a folder, each with what tables and figures need. Raises UserError naming file and line."""
    records = read_lines(folder)
    seen: dict[str, int] = {}
    for number, record in enumerate(records, start=1):
        if wrong := fault(record):
            raise UserError(f"'{folder}' line {number} of its cells {wrong}; run the sweep again")
        first = seen.setdefault(record["key"], number)
        if first != number:
            raise UserError(
                f"'{folder}' lines {first} and {number} are the same cell, {record['key']}; remove one of them"
            )
    if not records:
        raise UserError(f"'{folder}' has no cells; make some with `aura recall sweep --out {folder}`")
    return records


def task_of(record: Record) -> str:
    """The task's name, with the length and event probability that are not its own."""
    length, event = (record["config"].get(name) for name in ("task_steps", "task_event"))
    return record["task"] + (f" T={length}" if length else "") + (f" event={event:g}" if event else "")


def settings(record: Record, *without: str) -> dict[str, Any]:
    """All that a cell was trained by but its seed, as field -> value ("train.steps"), less the fields `without`.

    Older records have what they lack filled in. Cells of equal settings are seeds of one row.
    """
    values = Cell.from_dict(record["config"]).to_dict()
    flat = {
        **values,
        **{f"{part}.{n}": v for part in ("train", "objective") for n, v in values[part].items()},
    }
    left_out = {"seed", "train.seed", "train", "objective", *without}
    return {name: value for name, value in sorted(flat.items()) if name not in left_out}


def recipe(record: Record, *without: str) -> str:
    """`settings` as one text, to group cells by and to order them."""
    return json.dumps(settings(record, *without))


def rows(records: Iterable[Record]) -> list[Row]:
    """One row for each task, label, size, variant and further setting, in the paper's order."""
    groups: dict[tuple[str, str, int, str, int, str], list[Record]] = defaultdict(list)
    for r in records:
        groups[task_of(r), r["label"], r["state_dim"], r["variant"], r["steps"], recipe(r)].append(r)
    result = []
    for key in sorted(groups, key=lambda k: (*k[:3], ORDER.get(k[3], len(ORDER)), *k[3:])):
        dense = [cells for other, cells in groups.items() if other[:4] == (*key[:3], DENSE)]
        twins = [cells for other, cells in groups.items() if other[:4] == key[:4]]
        result.append(_row(key[0], groups[key], _dense_of(groups[key][0], dense), twins))
    return result


def _dense_of(record: Record, dense: Sequence[Sequence[Record]]) -> Sequence[Record]:
    """What a row is compared with: the dense cells trained alike, or the only ones that differ in their steps alone."""
    alike = {
        steps: [
            cells
            for cells in dense
            if recipe(cells[0], "variant", *steps) == recipe(record, "variant", *steps)
        ]
        for steps in ((), ("train.steps",))
    }
    for found in alike.values():
        if len(found) == 1:
            return found[0]
    return ()


def _row(
    task: str, cells: Sequence[Record], dense: Sequence[Record], twins: Sequence[Sequence[Record]]
) -> Row:
    first = cells[0]
    name, label, variant = first["task"], first["label"], first["variant"]
    over = [c["write_rate"] * c["floor_skip"] for c in cells]
    published = None
    if task == name and label in COMPARABLE:
        published = PUBLISHED.get((name, variant, first["state_dim"]))
    against = None
    if variant != DENSE and dense:
        against = compare(by_seed(cells), by_seed(dense))
    others = [settings(twin[0]) for twin in twins]
    ours = settings(first)
    return Row(
        task=task,
        label=label,
        variant=variant,
        state_dim=first["state_dim"],
        steps=first["steps"],
        probed=bool(first["config"].get("probe")),
        accuracy=interval([c["accuracy"] for c in cells]),
        writes=interval([c["write_rate"] for c in cells]),
        worst_accuracy=min(c["accuracy"] for c in cells),
        over_skip=sum(over) / len(over),
        worst_over_skip=max(over),
        collapsed=len(shut(cells)) if variant in LEARNED else 0,
        state_bytes=first["state_bytes"],
        params=first["params"],
        published=published,
        against_dense=against,
        dense_steps=dense[0]["steps"] if against is not None else None,
        differences={n: v for n, v in ours.items() if any(other[n] != v for other in others)},
    )


def by_seed(cells: Iterable[Record], name: str = "accuracy") -> dict[int, float]:
    """seed -> value, of cells of one row. Raises UserError where two have the same seed: neither is left out."""
    found: dict[int, float] = {}
    for cell in cells:
        if cell["seed"] in found:
            raise UserError(
                f"seed {cell['seed']} of {cell['label']} has two cells, such as {cell['key']}; remove one"
            )
        found[cell["seed"]] = cell[name]
    return found


def shut(cells: Iterable[Record]) -> list[int]:
    """Seeds whose gate has collapsed."""
    return sorted(
        c["seed"]
        for c in cells
        if collapsed(
            c["accuracy"],
            c["write_rate"],
            find_task(c["task"]).chance,
            # Records without the floor with a default value have the one above it.
            1 / (c.get("floor_default") or c["floor_skip"]),
        )
    )


def markdown(table: Sequence[Row]) -> str:
    """A table for people; `writes` are a fraction of steps and per second at 20 Hz."""
    lines = []
    for (task, label), group in _grouped(table):
        seeds = sorted({row.accuracy.n for row in group})
        many = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        probes = ", trained with probes" if all(row.probed for row in group) else ""
        lines += [
            f"### {task}, recipe {label}{probes}, {many} seed{'' if seeds[-1] == 1 else 's'}",
            "",
            line(HEADER),
            line(["---"] * len(HEADER)),
        ]
        for row in group:
            cells = (
                row.variant,
                row.state_dim,
                f"{row.steps:,}",
                row.accuracy.text(4),
                f"{row.worst_accuracy:.4f}",
                f"{100 * row.writes.mean:.2f} %",
                f"{CONTROL_HZ * row.writes.mean:.2f}",
                f"{row.ratio:.2f}x" if row.ratio else "-",
                _published(row.published),
                differs(row),
                f"{row.over_skip:.3f} ({row.worst_over_skip:.3f})" if row.variant == "aura" else "",
                f"{row.collapsed} of {row.accuracy.n}",
                _against(row),
                row.state_bytes,
            )
            lines.append(line(cells))
        lines += [
            f"\n{row.variant} N = {row.state_dim}, {row.steps:,} steps: the one of "
            f"{', '.join(f'{name} {value}' for name, value in row.differences.items())}."
            for row in group
            # Steps have their column.
            if row.differences.keys() - {"train.steps"}
        ]
        lines.append("")
    if lines:
        lines += [COLLAPSED_NOTE, ""]
    return "\n".join(lines)


def _against(row: Row) -> str:
    """The comparison with write_every_step, and that one's steps where they are others."""
    if row.against_dense is None:
        return "-"
    other = "" if row.dense_steps == row.steps else f", its {row.dense_steps:,} steps"
    return row.against_dense.text(row.accuracy.n) + other


def line(cells: Iterable[object]) -> str:
    """One line of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def differs(row: Row) -> str:
    """Where a row and the paper's differ, from the intervals of both; the sign is ours less the paper's."""
    accuracy, writes = row.accuracy_verdict, row.writes_verdict
    if accuracy is None:
        return "-"
    if accuracy.word == "not comparable":
        return accuracy.text
    said = "accuracy " + accuracy.text.replace("higher", "better", 1).replace("lower", "worse", 1)
    if writes is not None:
        said += "; writes/s " + writes.text.replace("higher", "more", 1).replace("lower", "fewer", 1)
    return said


def plain(value: Any) -> Any:
    """Dataclasses, tuples and numbers as JSON has them: what is not finite becomes None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def row_numbers(row: Row) -> dict[str, Any]:
    """A row for JSON, with what follows from its fields."""
    verdicts = {"accuracy_verdict": row.accuracy_verdict, "writes_verdict": row.writes_verdict}
    more = {"writes_per_second": CONTROL_HZ * row.writes.mean, "ratio": row.ratio, "differs": differs(row)}
    found: dict[str, Any] = plain({**plain(row), **more, **verdicts})
    return found


def _grouped(table: Sequence[Row]) -> list[tuple[tuple[str, str], list[Row]]]:
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in table:
        groups[row.task, row.label].append(row)
    return list(groups.items())


def _published(published: Published | None) -> str:
    if published is None:
        return "-"
    fewer = f", {published.ratio:.2f}x" if published.ratio else ""
    seeds = f" ({published.seeds})" if published.seeds else ""
    return f"{published.accuracy:.3f}{fewer}{seeds}"
