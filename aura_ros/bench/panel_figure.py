"""The panel in two pictures: how often each arm succeeds at each delay, and when the gate writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from aura_ros.bench.evaluation import interval
from aura_ros.bench.panel_table import group_of
from aura_ros.bench.parallel import Result
from aura_ros.bench.recall.figure_style import COLOURS, GREY, canvas, guessing, legend, save

# Arm -> colour and marker; what holds the content first, then what does not.
LOOK = {
    "oracle": ("#000000", "_"),
    "kv": (COLOURS[4], "P"),
    "aura": (COLOURS[0], "*"),
    "aura-always": (COLOURS[1], "s"),
    "window": (COLOURS[5], "p"),
    "first-k": (COLOURS[2], "D"),
    "random": (COLOURS[3], "v"),
    "periodic": (COLOURS[3], "^"),
    "zero": (GREY, "x"),
    "base": (GREY, "o"),
}
MOST_ROWS = 60


def cued(lines: Sequence[Result]) -> list[Result]:
    """Those of cue tasks."""
    return [line for line in lines if group_of(line) != "standard"]


def success(lines: Sequence[Result], folder: Path) -> Path:
    """Success with Wilson's intervals by delay, all cue tasks together."""
    figure, axes = canvas()
    groups: dict[tuple[str, int], list[Result]] = defaultdict(list)
    for line in cued(lines):
        groups[line["arm"], line["delay"]].append(line)
    delays = sorted({delay for _, delay in groups})
    arms = [arm for arm in LOOK if any((arm, delay) in groups for delay in delays)]
    for number, arm in enumerate(arms):
        at = [index for index, delay in enumerate(delays) if (arm, delay) in groups]
        found = [groups[arm, delays[index]] for index in at]
        rates = np.array([np.mean([line["success"] for line in own]) for own in found])
        ends = np.array([interval(own) for own in found])
        colour, marker = LOOK[arm]
        # Beside one another, for intervals of arms that are alike hide each other.
        shift = 0.06 * (number - (len(arms) - 1) / 2)
        bars = np.abs(ends.T - rates)
        look = {"color": colour, "marker": marker, "ms": 11 if arm == "aura" else 7, "capsize": 2, "lw": 1}
        axes.errorbar(np.array(at) + shift, rates, bars, ls="none", label=arm, **look)
    guessing(axes, 0.5)
    axes.set_xticks(range(len(delays)), [f"{delay}\n({delay / 20:g} s)" for delay in delays])
    axes.set(
        xlabel="control steps from the end of the cue to the decision",
        ylabel="success, 95 % interval",
        ylim=(-0.02, 1.02),
    )
    legend(axes)
    return save(figure, folder / "panel_success.png")


def writes(lines: Sequence[Result], folder: Path) -> Path:
    """When the gate wrote in each episode at the shortest delay, from the cue's begin on."""
    own = [line for line in cued(lines) if line["arm"] == "aura"]
    delay = min(line["delay"] for line in own)
    own = [line for line in own if line["delay"] == delay]
    suites = sorted({group_of(line) for line in own})
    figure, all_axes = canvas(len(suites), width=3.2 * len(suites), height=4.2, squeeze=False, sharex=True)
    for axes, suite in zip(all_axes[0], suites, strict=True):
        chosen = [line for line in own if group_of(line) == suite][:MOST_ROWS]
        axes.axvspan(0, 20, color=COLOURS[5], alpha=0.25, lw=0, label="the cue is lit")
        for row, line in enumerate(chosen):
            start = line["cue_steps"][0]
            axes.plot([-start, line["steps"] - start], [row, row], color="0.9", lw=1, zorder=0)
            fired = np.array(line["fired_steps"]) - start
            axes.plot(
                fired, [row] * len(fired), "|", color=COLOURS[0], ms=5, label=None if row else "a write"
            )
            axes.plot(
                line["held"] - start, row, ".", color="0.4", ms=3, label=None if row else "the decision"
            )
        axes.set(title=suite, xlabel="control steps since the cue began", yticks=[])
    all_axes[0][0].set_ylabel("episodes")
    legend(all_axes[0][-1])
    return save(figure, folder / "panel_writes.png")
