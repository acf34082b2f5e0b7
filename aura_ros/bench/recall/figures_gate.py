"""Figures of trained caches (7), the bottleneck (11), where the gate fires (12), and its rate knob (13)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aura_ros.bench.recall import paper
from aura_ros.bench.recall.figure_style import (
    GREY,
    OTHER,
    OURS,
    canvas,
    guessing,
    half,
    hollow,
    legend,
    look,
)
from aura_ros.bench.recall.reports import at_lengths, knob_cells, kv_cells
from aura_ros.bench.recall.sections import SPARSE, by_recipe, gated, ib_pairs, trained
from aura_ros.bench.recall.statistics import interval
from aura_ros.bench.recall.table import Record, shut
from aura_ros.bench.recall.tasks import evaluation_episodes, find_task
from aura_ros.training.episodes import DISTRACTOR, EVENT, QUERY, Episodes

# As many as in the paper's figure 12.
TRACED_EPISODES = 512
WHITE = {"marker": "D", "ms": 6, "mfc": "white", "mec": "black", "ls": "none"}


def caches(records: Sequence[Record], _: Path | None) -> Any:
    """Figure 7: bytes and accuracy by length, of what was trained at the shortest."""
    cells = kv_cells(records)
    if not cells:
        return None
    shortest = min(cell["config"]["task_steps"] for cell in cells)
    cells = [cell for cell in cells if cell["config"]["task_steps"] == shortest]
    figure, (sizes, accuracies) = canvas(2, width=10.0, height=4.0)
    for index, ((variant,), group) in enumerate(by_recipe(cells, "variant")):
        points: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for cell in group:
            for point in at_lengths(cell):
                points[point["steps"]].append(point)
        lengths = sorted(points)
        found = [interval([p["accuracy"] for p in points[n]]) for n in lengths]
        label = f"{variant} (n={len(group)}, {group[0]['steps']:,} training steps)"
        sizes.plot(
            lengths, [points[n][0]["state_bytes"] for n in lengths], lw=1, label=label, **look(variant)
        )
        accuracies.errorbar(
            [n * (1 + 0.03 * index) for n in lengths],
            [i.mean for i in found],
            yerr=[half(i) for i in found],
            capsize=3,
            lw=1,
            label=label,
            **look(variant),
        )
    for index, variant in enumerate(("aura", "growing_kv")):
        published = {steps: both[index][0] for steps, both in paper.TRAINED_KV.items()}
        accuracies.plot(list(published), list(published.values()), **hollow(variant))
    crossing = paper.STATE_BYTES / paper.KV_BYTES_A_STEP
    sizes.axvline(crossing, color=GREY, ls=":", lw=0.9, label=f"crossover, T = {crossing:.1f}")
    steps = np.geomspace(4, 20_000, 50)
    sizes.plot(
        steps, paper.KV_BYTES_A_STEP * steps, color=GREY, lw=0.9, ls="--", label="256 bytes a step", zorder=0
    )
    guessing(accuracies, find_task(SPARSE).chance)
    sizes.set(xscale="log", yscale="log", xlabel="T, steps, logarithmic", ylabel="bytes carried, batch 1")
    accuracies.set(xscale="log", xlabel="T, steps; hollow: the paper's, trained at each T")
    accuracies.set(ylabel="accuracy (mean, 95 % t-interval)", ylim=(0, 1.08))
    sizes.legend(fontsize=7)
    figure.suptitle(f"Figure 7: sparse_recall, N = 32, trained at T = {shortest}", fontsize=10)
    return figure


def bottleneck(records: Sequence[Record], _: Path | None) -> Any:
    """Figure 11: with and without the information bottleneck on the hard task, every seed shown."""
    pairs = ib_pairs(records)
    if not pairs:
        return None
    figure, axes = canvas(width=6.5)
    for place, (size, *arms) in enumerate(pairs):
        for side, (label, colour, found) in enumerate(zip(("ib", "no-ib"), (OURS, OTHER), arms, strict=True)):
            at = place + 0.4 * side - 0.2
            mean = interval([cell["accuracy"] for cell in found])
            name = {"ib": "with (beta 1e-3)", "no-ib": "without (beta 0)"}[label]
            axes.bar(at, mean.mean, 0.36, color=colour, alpha=0.55, label=name if place == 0 else None)
            axes.errorbar(at, mean.mean, yerr=half(mean), color="0.2", capsize=4, lw=1)
            closed = shut(found)
            for index, cell in enumerate(sorted(found, key=lambda c: c["seed"])):
                mark = "x" if cell["seed"] in closed else "o"
                offset = 0.02 * (index - (len(found) - 1) / 2)
                axes.plot(
                    at + 0.09 + offset,
                    cell["accuracy"],
                    marker=mark,
                    color=colour,
                    ms=4,
                    mec="black",
                    mew=0.8,
                )
            if size == 8:
                p = paper.IB_ABLATION.with_ib if label == "ib" else paper.IB_ABLATION.without
                axes.errorbar(at - 0.1, p.accuracy, yerr=p.half, color="black", capsize=3, lw=0.8, **WHITE)
    names = [f"N = {size}{trained(cells[0])}\n{cells[0]['steps']:,} steps" for size, cells, _ in pairs]
    axes.set_xticks(range(len(pairs)), names)
    guessing(axes, find_task("hard_recall").chance)
    axes.set(ylim=(0, 1.2), ylabel="accuracy (mean, 95 % t-interval)")
    axes.set_xlabel(
        "dots: seeds, crosses: collapsed ones, counted in; white diamond: the paper's, without them"
    )
    axes.xaxis.label.set_size(8)
    axes.set_title("Figure 11: information bottleneck, hard_recall", fontsize=10)
    legend(axes)
    return figure


def selectivity(records: Sequence[Record], checkpoints: Path | None) -> Any:
    """Figure 12: the soft gate over one episode, and its mean by kind of step, of the folder's memories."""
    cells = sorted(gated(records, SPARSE, "aura"), key=lambda cell: (cell["state_dim"], cell["seed"]))
    cells = [
        cell
        for cell in cells
        if checkpoints is not None and cell.get("checkpoint") and (checkpoints / cell["checkpoint"]).is_file()
    ]
    if checkpoints is None or not cells:
        return None
    # Seeds of one training, that of the most.
    cells = max((group for _, group in by_recipe(cells, "state_dim")), key=len)
    files = [checkpoints / cell["checkpoint"] for cell in cells]
    episodes = evaluation_episodes(find_task(SPARSE), TRACED_EPISODES)
    gates = [_gate(file, episodes) for file in files]
    figure, (trace, bars) = canvas(2, width=11.0, height=3.8, width_ratios=(2, 1))
    # An episode with something to see.
    events = (episodes.kinds == EVENT).sum(axis=1)
    shown = int(np.argmax(events >= min(4, events.max())))
    kinds = episodes.kinds[shown]
    for kind, colour, name in ((EVENT, "#E69F00", "event"), (DISTRACTOR, "0.88", "distractor")):
        for index, step in enumerate(np.nonzero(kinds == kind)[0]):
            label = name if index == 0 else None
            trace.axvspan(step - 0.5, step + 0.5, color=colour, alpha=0.6, lw=0, label=label, zorder=0)
    soft, fired = (part[shown] for part in gates[0])
    steps = np.arange(len(soft))
    trace.plot(steps, soft, color=OURS, marker="o", ms=3, lw=1, label="soft gate")
    trace.plot(steps[fired], soft[fired], color="black", marker="v", ms=6, ls="none", label="written")
    trace.axhline(0.5, color="0.3", lw=0.8, ls="--", label="threshold")
    trace.set(ylim=(-0.03, 1.05), xlim=(-0.5, len(soft) - 0.5), xlabel="step (white: query)", ylabel="gate")
    trace.set_title(f"seed {cells[0]['seed']}, one episode", fontsize=9)
    trace.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=5, frameon=False)
    published = paper.SELECTIVITY
    for place, (kind, theirs) in enumerate(
        ((EVENT, published.event), (DISTRACTOR, published.distractor), (QUERY, published.query))
    ):
        for side, (name, colour) in enumerate((("soft gate", OURS), ("written", OTHER))):
            found = interval([float(gate[side][episodes.kinds == kind].mean()) for gate in gates])
            at = place + 0.38 * side - 0.19
            label = name if place == 0 else None
            bars.bar(at, found.mean, 0.34, yerr=half(found), capsize=3, color=colour, alpha=0.7, label=label)
            bars.text(at, found.mean + half(found) + 0.02, f"{found.mean:.3f}", ha="center", fontsize=7)
        bars.plot(place - 0.31, theirs, label="paper, soft (n=1)" if place == 0 else None, **WHITE)
    bars.set_xticks(range(3), ["events", "distractors", "queries"])
    bars.set(ylim=(0, 1.08), xlim=(-0.6, 2.6))
    bars.set_title(f"{len(gates)} seeds, {TRACED_EPISODES} episodes, 95 % t-interval", fontsize=9)
    bars.legend(fontsize=7)
    figure.suptitle(f"Figure 12: sparse_recall, T = 40, N = {cells[0]['state_dim']}", fontsize=10)
    return figure


def _gate(file: Path, episodes: Episodes) -> tuple[Any, Any]:
    """Soft and hard gate of a memory over episodes, [n, T] each."""
    import torch

    from aura_ros.memory.module import load_module
    from aura_ros.training.train import run_memory

    with torch.no_grad():
        done = run_memory(load_module(file), torch.from_numpy(episodes.observations))
    return done.soft.numpy(), done.fired.numpy()


def rate_knob(records: Sequence[Record], _: Path | None) -> Any:
    """Figure 13: accuracy against the write rate that each target gives."""
    cells = knob_cells(records)
    if not cells:
        return None
    figure, axes = canvas(width=6.5)
    for index, ((rho,), group) in enumerate(by_recipe(cells, "rho")):
        rate, accuracy = (interval([c[name] for c in group]) for name in ("write_rate", "accuracy"))
        axes.errorbar(
            rate.mean,
            accuracy.mean,
            xerr=half(rate),
            yerr=half(accuracy),
            color=OURS,
            marker="o",
            capsize=3,
            label=f"ours (n={len(group)})" if index == 0 else None,
        )
        _name(axes, rho, rate.mean, accuracy.mean, below=14 + 12 * (index % 2))
    for index, (rho, (x, y)) in enumerate(paper.RATE_KNOB.items()):
        axes.plot(x, y, label="the paper's (n=1)" if index == 0 else None, **WHITE)
        _name(axes, rho, x, y, below=-8 - 12 * (index % 2))
    guessing(axes, find_task(SPARSE).chance)
    axes.set(xlim=(-0.03, 1.0), ylim=(0, 1.2), xlabel="write rate (fraction of steps)", ylabel="accuracy")
    axes.set_title("Figure 13: rate knob, sparse_recall, T = 40; 95 % t-intervals", fontsize=10)
    axes.legend(fontsize=8, loc="lower right")
    return figure


def _name(axes: Any, rho: float, x: float, y: float, below: float) -> None:
    """Name a point, so many dots below it."""
    axes.annotate(
        f"\u03c1={rho:g}",
        (x, y),
        (0, -below),
        textcoords="offset points",
        ha="center",
        va="center",
        fontsize=7,
    )
