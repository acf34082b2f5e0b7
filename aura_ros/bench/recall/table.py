"""Ours beside the paper's, from `cells.jsonl` alone: every seed counted, collapsed ones too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from aura_ros.bench.recall.paper import CONTROL_HZ, PUBLISHED, Published
from aura_ros.bench.recall.statistics import Comparison, Interval, collapsed, compare, interval
from aura_ros.bench.recall.tasks import find_task
from aura_ros.memory.config import Variant

ORDER = {variant.value: index for index, variant in enumerate(Variant)}
DENSE = "write_every_step"
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
    *("x skip floor (worst)", "collapsed", "against every step", "bytes"),
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

    @property
    def ratio(self) -> float | None:
        """How many times fewer writes than every step, of the mean write rate; None if nothing was written."""
        return 1.0 / self.writes.mean if self.writes.mean > 0 else None


def rows(records: Iterable[dict[str, Any]]) -> list[Row]:
    """One row for each task, label, size and variant, in the paper's order."""
    groups: dict[tuple[str, str, int, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        length = record["config"]["task_steps"]
        task = record["task"] + (f" T={length}" if length else "")
        groups[task, record["label"], record["state_dim"], record["variant"]].append(record)
    result = []
    for key in sorted(groups, key=lambda k: (k[0], k[1], k[2], ORDER[k[3]])):
        task, label, state_dim, variant = key
        dense = groups.get((task, label, state_dim, DENSE), [])
        result.append(_row(task, label, variant, state_dim, groups[key], dense))
    return result


def _row(
    task: str,
    label: str,
    variant: str,
    state_dim: int,
    cells: Sequence[dict[str, Any]],
    dense: Sequence[dict[str, Any]],
) -> Row:
    name = cells[0]["task"]
    chance = find_task(name).chance
    over = [c["write_rate"] * c["floor_skip"] for c in cells]
    by_seed = {c["seed"]: c["accuracy"] for c in cells}
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
        worst_accuracy=min(by_seed.values()),
        over_skip=sum(over) / len(over),
        worst_over_skip=max(over),
        collapsed=sum(collapsed(c["accuracy"], c["write_rate"], chance) for c in cells if variant in LEARNED),
        state_bytes=cells[0]["state_bytes"],
        params=cells[0]["params"],
        published=PUBLISHED.get((name, variant, state_dim)),
        against_dense=against,
    )


def markdown(table: Sequence[Row]) -> str:
    """A table for people; `writes` are a fraction of steps and per second at 20 Hz."""
    lines = []
    for (task, label), group in _grouped(table):
        seeds = sorted({row.accuracy.n for row in group})
        many = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        lines += [
            f"### {task}, recipe {label}, {many} seeds",
            "",
            _line(HEADER),
            _line(["---"] * len(HEADER)),
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
                f"{row.over_skip:.3f} ({row.worst_over_skip:.3f})" if row.variant == "aura" else "",
                f"{row.collapsed} of {row.accuracy.n}",
                _against(row.against_dense),
                row.state_bytes,
            )
            lines.append(_line(cells))
        lines.append("")
    return "\n".join(lines)


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _grouped(table: Sequence[Row]) -> list[tuple[tuple[str, str], list[Row]]]:
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in table:
        groups[row.task, row.label].append(row)
    return list(groups.items())


def _published(published: Published | None) -> str:
    if published is None or published.accuracy is None:
        return "-"
    fewer = f", {published.ratio:.2f}x" if published.ratio else ""
    seeds = f" ({published.seeds})" if published.seeds else ""
    return f"{published.accuracy:.3f}{fewer}{seeds}"


def _against(comparison: Comparison | None) -> str:
    if comparison is None:
        return "-"
    p = "" if comparison.welch_p != comparison.welch_p else f", p={comparison.welch_p:.2g}"
    return f"{comparison.difference:+.4f} [{comparison.low:+.4f}, {comparison.high:+.4f}]{p}"
