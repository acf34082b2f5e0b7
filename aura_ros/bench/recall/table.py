"""Ours beside the paper's, from `cells.jsonl` alone: every seed counted, collapsed ones too."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aura_ros.bench.recall.cells import Cell
from aura_ros.bench.recall.paper import CONTROL_HZ, PUBLISHED, Published
from aura_ros.bench.recall.statistics import (
    Comparison,
    Interval,
    Verdict,
    collapsed,
    compare,
    interval,
    judge,
)
from aura_ros.bench.recall.store import read_lines
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
# What a line must have, and of what kind.
NUMBERS = ("state_dim", "seed", "steps", "accuracy", "write_rate", "floor_skip", "state_bytes", "params")
TEXTS = ("key", "task", "variant", "label")
# Variants whose gate is learned, so that it can shut.
LEARNED = ("aura", "learned_token_gate")
HEADER = (
    *(
        "variant",
        "N",
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
    """One variant at one size. writes: fraction of steps. over_skip: mean and worst writes over the skip floor's."""

    task: str
    label: str
    variant: str
    state_dim: int
    steps: tuple[int, ...]
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
    seeds_twice: tuple[int, ...] = ()

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
    try:
        records = read_lines(folder)
    except UnicodeDecodeError as error:
        raise UserError(
            f"'{folder}' has cells that are no text ({error.reason}); run the sweep again"
        ) from error
    for number, record in enumerate(records, start=1):
        if fault := _fault(record):
            raise UserError(f"'{folder}' line {number} of its cells {fault}; run the sweep again")
    if not records:
        raise UserError(f"'{folder}' has no cells; make some with `aura recall sweep --out {folder}`")
    return records


def _fault(record: Record) -> str:
    """What a line lacks, or nothing."""
    for names, kinds, what in ((TEXTS, str, "text"), (NUMBERS, (int, float), "number")):
        for name in names:
            value = record.get(name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                return f"has no {what} '{name}'"
            if isinstance(value, float) and not math.isfinite(value):
                return f"has no finite '{name}'"
    if not isinstance(record.get("checkpoint"), (str, type(None))):
        return "has no file's name as 'checkpoint'"
    try:
        Cell.from_dict(record.get("config") or {})
        find_task(record["task"])
    except (UserError, AttributeError) as problem:
        return f"has no usable configuration: {problem}"
    return ""


def task_of(record: Record) -> str:
    """The task's name, with the length and event probability that are not its own."""
    length, event = (record["config"].get(name) for name in ("task_steps", "task_event"))
    return record["task"] + (f" T={length}" if length else "") + (f" event={event:g}" if event else "")


def rows(records: Iterable[Record]) -> list[Row]:
    """One row for each task, label, size and variant, in the paper's order."""
    groups: dict[tuple[str, str, int, str], list[Record]] = defaultdict(list)
    for record in records:
        groups[task_of(record), record["label"], record["state_dim"], record["variant"]].append(record)
    result = []
    for key in sorted(groups, key=lambda k: (k[0], k[1], k[2], ORDER.get(k[3], len(ORDER)), k[3])):
        task, label, state_dim, variant = key
        dense = groups.get((task, label, state_dim, DENSE), [])
        result.append(_row(task, label, variant, state_dim, groups[key], dense))
    return result


def _row(
    task: str,
    label: str,
    variant: str,
    state_dim: int,
    cells: Sequence[Record],
    dense: Sequence[Record],
) -> Row:
    name = cells[0]["task"]
    chance = find_task(name).chance
    over = [c["write_rate"] * c["floor_skip"] for c in cells]
    by_seed = {c["seed"]: c["accuracy"] for c in cells}
    seeds = [c["seed"] for c in cells]
    published = None
    if task == name and label in COMPARABLE:
        published = PUBLISHED.get((name, variant, state_dim))
    against = None
    if variant != DENSE and dense:
        against = compare(by_seed, {c["seed"]: c["accuracy"] for c in dense})
    return Row(
        task=task,
        label=label,
        variant=variant,
        state_dim=state_dim,
        steps=tuple(sorted({c["steps"] for c in cells})),
        accuracy=interval([c["accuracy"] for c in cells]),
        writes=interval([c["write_rate"] for c in cells]),
        worst_accuracy=min(c["accuracy"] for c in cells),
        over_skip=sum(over) / len(over),
        worst_over_skip=max(over),
        collapsed=sum(collapsed(c["accuracy"], c["write_rate"], chance) for c in cells if variant in LEARNED),
        state_bytes=cells[0]["state_bytes"],
        params=cells[0]["params"],
        published=published,
        against_dense=against,
        seeds_twice=tuple(sorted({s for s in seeds if seeds.count(s) > 1})),
    )


def markdown(table: Sequence[Row]) -> str:
    """A table for people; `writes` are a fraction of steps and per second at 20 Hz."""
    lines = []
    for (task, label), group in _grouped(table):
        seeds = sorted({row.accuracy.n for row in group})
        many = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        lines += [
            f"### {task}, recipe {label}, {many} seed{'' if seeds[-1] == 1 else 's'}",
            "",
            line(HEADER),
            line(["---"] * len(HEADER)),
        ]
        for row in group:
            cells = (
                row.variant,
                row.state_dim,
                row.accuracy.text(4),
                f"{row.worst_accuracy:.4f}",
                f"{100 * row.writes.mean:.2f} %",
                f"{CONTROL_HZ * row.writes.mean:.2f}",
                f"{row.ratio:.2f}x" if row.ratio else "-",
                _published(row.published),
                differs(row),
                f"{row.over_skip:.3f} ({row.worst_over_skip:.3f})" if row.variant == "aura" else "",
                f"{row.collapsed} of {row.accuracy.n}",
                "-" if row.against_dense is None else row.against_dense.text(),
                row.state_bytes,
            )
            lines.append(line(cells))
        lines += [
            f"\n{row.variant} N = {row.state_dim}: more than one cell of seed {', '.join(map(str, row.seeds_twice))} "
            f"({', '.join(map(str, row.steps))} steps); all are counted."
            for row in group
            if row.seeds_twice
        ]
        lines.append("")
    return "\n".join(lines)


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
