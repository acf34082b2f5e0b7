"""The paper's figures from the cells of a folder, each under its number in the paper, where there are cells for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aura_ros.bench.recall.figure_style import canvas, guessing, half, hollow, legend, look, save
from aura_ros.bench.recall.figures_gate import bottleneck, caches, rate_knob, selectivity
from aura_ros.bench.recall.paper import CONTROL_HZ, KV_BYTES_A_STEP
from aura_ros.bench.recall.sections import HARD, MAIN
from aura_ros.bench.recall.table import Record, Row, rows
from aura_ros.bench.recall.tasks import MAIN as MAIN_TASK
from aura_ros.bench.recall.tasks import find_task
from aura_ros.errors import UserError

# Where logarithmic axes show what never writes, and what carries nothing.
NEVER, NOTHING = 0.02, 30.0
ACCURACY = "accuracy on queries (mean, 95 % t-interval)"


# Recipes of the presets' own on a task.
OWN = {MAIN: ("aura", "open"), HARD: ("aura", "probe")}


def _rows_of(records: Sequence[Record], task: str) -> list[Row]:
    """The rows of the presets' own recipes on a task; of those without probes, a size has the first recipe that it has."""
    found = [row for row in rows(records) if row.task == task and row.label in OWN[task]]
    first = {(row.variant, row.state_dim) for row in found if row.label == OWN[task][0]}
    return [
        row
        for row in found
        if row.probed or row.label == OWN[task][0] or (row.variant, row.state_dim) not in first
    ]


def _widest(group: Sequence[Row]) -> list[Row]:
    """The rows at the size that most variants have; the largest of these."""
    sizes = [n for n, _ in {(row.state_dim, row.variant) for row in group}]
    size = max(set(sizes), key=lambda n: (sizes.count(n), n))
    return [row for row in group if row.state_dim == size]


def _name(row: Row, group: Sequence[Row]) -> str:
    """A row's name: variant, seeds, and its training's steps where the group has another row of the variant."""
    twice = sum(other.variant == row.variant for other in group) > 1
    return f"{row.variant} ({f'{row.steps:,} steps, ' if twice else ''}n={row.accuracy.n})"


def writes(records: Sequence[Record], _: Path | None) -> Any:
    """Figure 4: accuracy against writes per second on the main task, at the largest size that most variants have."""
    group = _rows_of(records, MAIN)
    if not group:
        return None
    group = _widest(group)
    figure, axes = canvas()
    for row in group:
        rate = CONTROL_HZ * row.writes.mean
        axes.errorbar(
            max(rate, NEVER),
            row.accuracy.mean,
            yerr=half(row.accuracy),
            xerr=CONTROL_HZ * half(row.writes) if rate > NEVER else None,
            ls="none",
            capsize=3,
            label=_name(row, group),
            **look(row.variant),
        )
        if row.published is not None:
            ratio = row.published.ratio
            axes.plot(CONTROL_HZ / ratio if ratio else NEVER, row.published.accuracy, **hollow(row.variant))
    guessing(axes, find_task(MAIN).chance)
    axes.set(xscale="log", xlim=(NEVER / 1.5, 40), ylim=(0, 1.08), ylabel=ACCURACY)
    axes.set_xlabel(
        f"writes per second at 20 Hz, logarithmic ({NEVER:g}: never); hollow: the paper's", fontsize=9
    )
    axes.set_title(f"Figure 4: {MAIN}, N = {group[0].state_dim}", fontsize=10)
    legend(axes)
    return figure


def hard(records: Sequence[Record], _: Path | None) -> Any:
    """Figure 5: accuracy against the size of the state on the hard task."""
    group = _rows_of(records, HARD)
    if not group:
        return None
    figure, axes = canvas()
    sizes = sorted({row.state_dim for row in group})
    lines = list(dict.fromkeys((row.variant, row.probed) for row in group))
    for index, (variant, probed) in enumerate(lines):
        line = sorted(
            (row for row in group if (row.variant, row.probed) == (variant, probed)),
            key=lambda row: row.state_dim,
        )
        # A little beside each other, or the intervals hide one another.
        shift = 1 + 0.012 * (index - (len(lines) - 1) / 2)
        axes.errorbar(
            [row.state_dim * shift for row in line],
            [row.accuracy.mean for row in line],
            yerr=[half(row.accuracy) for row in line],
            capsize=3,
            lw=1,
            ls="--" if probed else "-",
            fillstyle="bottom" if probed else "full",
            label=f"{variant}{', trained with probes' if probed else ''} (n={max(row.accuracy.n for row in line)})",
            **look(variant),
        )
        known = [row for row in line if row.published is not None]
        axes.plot(
            [row.state_dim * shift for row in known],
            [row.published.accuracy for row in known if row.published],
            **hollow(variant),
        )
    guessing(axes, find_task(HARD).chance)
    axes.set(xscale="log", ylim=(0, 1.08), ylabel=ACCURACY)
    axes.set_xticks(sizes, [str(n) for n in sizes])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("N = dk = dv, logarithmic; hollow: the paper's", fontsize=9)
    axes.set_title(f"Figure 5: {HARD}", fontsize=10)
    legend(axes)
    return figure


def state(records: Sequence[Record], _: Path | None) -> Any:
    """Figure 6: accuracy against the bytes that are carried, at every size, beside what a growing cache would carry."""
    group = _rows_of(records, MAIN)
    if not group:
        return None
    figure, axes = canvas()
    for variant in dict.fromkeys(row.variant for row in group):
        line = sorted((row for row in group if row.variant == variant), key=lambda row: row.state_dim)
        at = [max(float(row.state_bytes), NOTHING) for row in line]
        axes.errorbar(
            at,
            [row.accuracy.mean for row in line],
            yerr=[half(row.accuracy) for row in line],
            capsize=3,
            ls="none",
            label=f"{variant} (N = {', '.join(str(row.state_dim) for row in line)})",
            **look(variant),
        )
        for x, row in zip(at, line, strict=True):
            if row.published is not None:
                axes.plot(x, row.published.accuracy, **hollow(variant))
    for count, style in ((MAIN_TASK.steps, "--"), (100_000, "-.")):
        label = f"growing cache, N = 32,\nafter {count:,} steps"
        axes.axvline(KV_BYTES_A_STEP * count, color="0.4", lw=1, ls=style, label=label, zorder=0)
    guessing(axes, find_task(MAIN).chance)
    axes.set(xscale="log", ylim=(0, 1.08), ylabel=ACCURACY)
    axes.set_xlabel(
        f"bytes carried, batch 1, logarithmic ({NOTHING:g}: none); hollow: the paper's", fontsize=9
    )
    axes.set_title(f"Figure 6: {MAIN}", fontsize=10)
    legend(axes)
    return figure


def variants(records: Sequence[Record], _: Path | None) -> Any:
    """Figure 10: all variants at one size on the main task, accuracy and writes per second as bars."""
    group = _rows_of(records, MAIN)
    if not group:
        return None
    group = list(reversed(_widest(group)))
    figure, (left, right) = canvas(2, width=9.0, height=3.8, sharey=True)
    places = range(len(group))
    colours = [look(row.variant)["color"] for row in group]
    for axes, found, scale in ((left, "accuracy", 1.0), (right, "writes", CONTROL_HZ)):
        intervals = [getattr(row, found) for row in group]
        means = [scale * i.mean for i in intervals]
        errors = [scale * half(i) for i in intervals]
        axes.barh(places, means, color=colours, height=0.65)
        # Intervals of two seeds may reach beyond what can be: cut to the axis.
        limit = 1.0 if axes is left else CONTROL_HZ
        cut = [[min(e, m) for e, m in zip(errors, means, strict=True)]]
        cut.append([min(e, max(limit - m, 0)) for e, m in zip(errors, means, strict=True)])
        axes.errorbar(means, places, xerr=cut, ls="none", color="0.2", capsize=3, lw=1)
    for place, row in zip(places, group, strict=True):
        if row.published is not None:
            dot = {"marker": "D", "ms": 6, "mfc": "white", "mec": "black", "ls": "none"}
            left.plot(row.published.accuracy, place, **dot)
            if row.published.ratio:
                right.plot(CONTROL_HZ / row.published.ratio, place, **dot)
        right.text(CONTROL_HZ * 1.06, place, f"{CONTROL_HZ * row.writes.mean:.2f}", fontsize=8, va="center")
    left.set_yticks(places, [_name(row, group) for row in group], fontsize=8)
    left.axvline(find_task(MAIN).chance, color="0.5", lw=0.9, ls=":")
    left.set(xlim=(0, 1.05), xlabel="accuracy (dotted: guessing)")
    right.set(xlim=(0, CONTROL_HZ * 1.22), xlabel="writes per second at 20 Hz")
    figure.suptitle(
        f"Figure 10: {MAIN}, N = {group[0].state_dim}; bars: 95 % t-interval; white diamond: the paper's",
        fontsize=10,
    )
    return figure


@dataclass(frozen=True)
class _Figure:
    """A picture by its number in the paper; make gives None where there are no cells; preset: what trains them."""

    name: str
    preset: str
    make: Callable[[Sequence[Record], Path | None], Any]


FIGURES = {
    4: _Figure("figure4_writes", "paper-main", writes),
    5: _Figure("figure5_hard", "paper-hard", hard),
    6: _Figure("figure6_bytes", "paper-main", state),
    7: _Figure("figure7_caches", "kv", caches),
    10: _Figure("figure10_variants", "paper-main", variants),
    11: _Figure("figure11_bottleneck", "ib-ablation", bottleneck),
    12: _Figure("figure12_selectivity", "selectivity", selectivity),
    13: _Figure("figure13_rate_knob", "rate-knob", rate_knob),
}


def draw(
    records: Sequence[Record],
    folder: str | Path,
    checkpoints: Path | None = None,
    only: Sequence[int] = (),
) -> list[Path]:
    """Write a PNG for each figure that has cells, and return the files.

    checkpoints: folder of the cells' memories; figure 12 needs them. only: numbers of figures, empty for all.
    Raises UserError without matplotlib or cells, for an unknown number, and where the folder cannot be written.
    """
    try:
        import matplotlib  # noqa: F401 (whether it is there)
    except ImportError as error:
        raise UserError(
            f"figures need matplotlib ({error}); install it with `pip install aura_ros[report]`"
        ) from error
    if unknown := [number for number in only if number not in FIGURES]:
        raise UserError(f"figure {unknown[0]} is unknown; choose from: {', '.join(map(str, FIGURES))}")
    if not records:
        raise UserError("there are no cells to draw; run a sweep first")
    folder = Path(folder)
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, figure in FIGURES.items():
            if only and number not in only:
                continue
            made = figure.make(records, checkpoints)
            if made is not None:
                files.append(save(made, folder / f"{figure.name}.png"))
            elif only:
                raise UserError(
                    f"figure {number} has no cells here; make them with `aura recall sweep --preset {figure.preset}`"
                )
    except OSError as error:
        raise UserError(
            f"'{folder}' cannot be written ({error.strerror}); give a folder you may write"
        ) from error
    if not files:
        raise UserError("none of these cells is in a figure; run `aura recall sweep --preset paper-main`")
    return files
