"""The panel as people read it: rates with intervals, paired differences, writes and bytes, beside the paper's own panel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from aura_ros.bench.arms import ARMS
from aura_ros.bench.evaluation import interval
from aura_ros.bench.parallel import Result
from aura_ros.types import LIBERO_ACTION_SPEC

RESAMPLES = 10_000
QUERY_S = LIBERO_ACTION_SPEC.horizon * LIBERO_ACTION_SPEC.period_s
# The paper's table 4 and figure 9: LIBERO-Long, zero-shot OpenVLA-OFT 7B, 60 episodes an arm.
PAPER = {
    "base": "0.233, no writes",
    "kv": "0.217, 3,541 writes, 906,496 bytes at the end",
    "aura": "0.233, 504 writes (7.0x fewer), 4,224 bytes",
}
HEADER = (
    *("tasks", "delay", "arm", "success", "95 %", "wrong", "rejected", "other"),
    *("less base", "writes", "a second"),
    *("fewer than kv", "when active", "in the cue", "bytes first", "last", "ms a query"),
)


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences of success, and its bootstrap's 95 % interval; pairs, and the states they come from."""

    mean: float
    low: float
    high: float
    pairs: int
    clusters: int

    def text(self) -> str:
        """In points."""
        return f"{100 * self.mean:+.0f} [{100 * self.low:+.0f}, {100 * self.high:+.0f}]"


def moment(line: Result) -> tuple[object, ...]:
    """What episodes of all arms have in common that are compared in pairs."""
    return (*cluster(line), line["seed"], line["delay"], line["cue"])


def cluster(line: Result) -> tuple[object, ...]:
    """The state: episodes of one are not independent of one another. Official ones differ with the state alone."""
    return (line["task"], line["init_state"], line["seed"] if line["displaced"] else 0, line["displaced"])


def paired(ours: Sequence[Result], theirs: Sequence[Result], seed: int = 0) -> Difference | None:
    """Success of the same moments in two arms. Whole states are drawn; None where no moment is in both."""
    other = {moment(line): line for line in theirs}
    sums: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for line in ours:
        if moment(line) in other:
            sums[cluster(line)].append(int(line["success"]) - int(other[moment(line)]["success"]))
    if not sums:
        return None
    totals = np.array([[sum(found), len(found)] for found in sums.values()], float)
    drawn = np.random.default_rng(seed).integers(0, len(totals), (RESAMPLES, len(totals)))
    means = totals[drawn].sum(1)
    low, high = np.quantile(means[:, 0] / means[:, 1], (0.025, 0.975))
    mean = totals[:, 0].sum() / totals[:, 1].sum()
    return Difference(float(mean), float(low), float(high), int(totals[:, 1].sum()), len(totals))


def clustered(lines: Sequence[Result], seed: int = 0) -> tuple[float, float]:
    """95 % interval of the success rate when whole states are drawn."""
    nothing = [{**line, "success": False} for line in lines]
    found = paired(lines, nothing, seed)
    assert found is not None
    return found.low, found.high


def cue_fired(line: Result) -> bool:
    """Whether something was written while the cue was lit."""
    start, stop = line["cue_steps"]
    return any(start <= step < stop for step in line["fired_steps"])


def group_of(line: Result) -> str:
    """cue_object_1 -> cue_object; what has no cue is a standard task."""
    return str(line["task"]).rsplit("_", 1)[0] if str(line["task"]).startswith("cue_") else "standard"


def rows(lines: Sequence[Result]) -> list[tuple[str, ...]]:
    """A row for each group of tasks, delay and arm, and of all cue tasks together."""
    groups: dict[tuple[str, int], list[Result]] = defaultdict(list)
    for line in lines:
        groups[group_of(line), line["delay"]].append(line)
        if group_of(line) != "standard":
            groups["~all cue tasks", line["delay"]].append(line)
    found = []
    for (group, delay), inside in sorted(groups.items()):
        by_arm = {arm: [line for line in inside if line["arm"] == arm] for arm in ARMS}
        for arm, own in by_arm.items():
            if own:
                found.append(
                    (group.removeprefix("~"), str(delay), arm, *_row(arm, own, by_arm["base"], by_arm["kv"]))
                )
    return found


def _row(arm: str, own: list[Result], base: list[Result], kv: list[Result]) -> tuple[str, ...]:
    low, high = interval(own)
    good, wrong = sum(line["success"] for line in own), sum(line["wrong"] for line in own)
    rejected = sum(bool(line["problem"]) for line in own)
    less = paired(own, base) if arm != "base" else None
    writes, queries = _mean(own, "writes"), _mean(own, "queries")
    has_cue = own[0]["task"].startswith("cue_")
    return (
        f"{good}/{len(own)} = {100 * good / len(own):.0f} %",
        f"{100 * low:.0f}-{100 * high:.0f} %",
        f"{wrong}",
        f"{rejected}",
        f"{len(own) - good - wrong - rejected}",
        less.text() if less else "-",
        f"{writes:.1f} of {queries:.1f}",
        f"{writes / (queries * QUERY_S):.2f}",
        _ratio(kv, own, lambda line: line["writes"] / line["queries"]),
        _ratio(kv, own, lambda line: line["writes_active"] / max(line["queries_active"], 1)),
        f"{100 * np.mean([cue_fired(line) for line in own]):.0f} %" if has_cue and writes else "-",
        f"{max(line['state_bytes_first'] for line in own):,}",
        f"{max(line['state_bytes_last'] for line in own):,}",
        f"{np.median([line['ms_per_query'] for line in own]):.1f}",
    )


def _mean(lines: Sequence[Result], name: str) -> float:
    return float(np.mean([line[name] for line in lines]))


def _ratio(theirs: Sequence[Result], ours: Sequence[Result], rate: Callable[[Result], float]) -> str:
    """By rates a query, for arms that fail go on for longer."""
    mine = float(np.mean([rate(line) for line in ours]))
    if not theirs or not mine:
        return "-"
    return f"{np.mean([rate(line) for line in theirs]) / mine:.1f}x"


def verdicts(lines: Sequence[Result]) -> list[str]:
    """What the panel is asked, each with its numbers, for every delay."""
    said = []
    delays = sorted({line["delay"] for line in lines if group_of(line) != "standard"})
    arms: dict[tuple[int, str], list[Result]] = defaultdict(list)
    standard: dict[str, list[Result]] = defaultdict(list)
    for line in lines:
        if group_of(line) == "standard":
            standard[line["arm"]].append(line)
        else:
            arms[line["delay"], line["arm"]].append(line)
    for name in ("aura", "kv"):
        if hurt := paired(standard[name], standard["base"]):
            said.append(f"standard tasks, {name} less base: {hurt.text()} points, {hurt.pairs} pairs")
    for delay in delays:
        for other in ("base", "kv", "aura-always", "oracle"):
            gap = paired(arms[delay, "aura"], arms[delay, other])
            if gap:
                said.append(
                    f"cue tasks, delay {delay}, aura less {other}: {gap.text()} points, {gap.pairs} pairs of {gap.clusters} "
                    "states"
                )
        for name in ("base", "zero"):
            if own := arms[delay, name]:
                low, high = clustered(own)
                said.append(
                    f"cue tasks, delay {delay}, {name}: {100 * np.mean([line['success'] for line in own]):.0f} % "
                    f"[{100 * low:.0f}, {100 * high:.0f}], whole states drawn; both cues of a state look alike to it, and "
                    "it can reach the target of one of them at most"
                )
        if swapped := arms[delay, "swap"]:
            # What was chosen, of those that chose: with the other cue's memory it is the other target.
            chose = [line for line in swapped if line["success"] or line["wrong"]]
            turned = sum(line["wrong"] for line in swapped)
            said.append(
                f"cue tasks, delay {delay}, W of the other cue: the other target in {turned} of {len(swapped)} "
                f"= {100 * turned / len(swapped):.0f} % ({turned} of the {len(chose)} that reached one)"
            )
    return said
