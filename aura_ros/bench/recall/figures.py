"""The paper's figures from `cells.jsonl`: accuracy against writes (figure 4), bytes (figure 6) and state size (figure 5)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aura_ros.bench.recall.paper import CONTROL_HZ
from aura_ros.bench.recall.table import Row, rows
from aura_ros.bench.recall.tasks import find_task
from aura_ros.errors import UserError
from aura_ros.memory.config import Variant

# Wong's palette, told apart by the colour-blind too; one marker for each.
COLOURS = ("#0072B2", "#009E73", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#999999", "#000000")
MARKERS = ("*", "s", "D", "v", "^", "o", "x", "P")
STYLE = {v.value: (COLOURS[i], MARKERS[i]) for i, v in enumerate(Variant)}
NEVER = 0.02  # where a logarithmic axis shows what never writes, writes/s


def draw(records: Sequence[dict[str, Any]], folder: str | Path) -> list[Path]:
    """Write one PNG for each figure and task; returns the files. Raises UserError without matplotlib or cells."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise UserError(
            f"figures need matplotlib ({error}); install it with `pip install aura_ros[report]`"
        ) from error
    table = rows(records)
    if not table:
        raise UserError("there are no cells to draw; run a sweep first")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for task in sorted({row.task for row in table}):
        group = [row for row in table if row.task == task]
        for name, draw_one in (("writes", _writes), ("state", _state)):
            figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
            draw_one(axes, group)
            axes.axhline(find_task(task.split()[0]).chance, color="0.7", lw=0.8, ls=":", label="guessing")
            axes.set_ylabel("accuracy on queries (mean, 95 % t-interval)")
            axes.set_ylim(0, 1.05)
            axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
            path = folder / f"{task.replace(' ', '_').replace('=', '')}_{name}.png"
            figure.savefig(path, dpi=130, metadata={"Software": None})
            pyplot.close(figure)
            files.append(path)
    return files


def _writes(axes: Any, group: Sequence[Row]) -> None:
    """Accuracy against writes a second, at the largest state that most variants have."""
    sizes = [row.state_dim for row in group]
    size = max(set(sizes), key=lambda n: (sizes.count(n), n))
    for row in (r for r in group if r.state_dim == size):
        colour, marker = STYLE[row.variant]
        rate = max(CONTROL_HZ * row.writes.mean, NEVER)
        axes.errorbar(
            rate,
            row.accuracy.mean,
            yerr=_half(row),
            color=colour,
            marker=marker,
            ms=9,
            ls="none",
            capsize=3,
            label=f"{row.variant} ({row.label}, n={row.accuracy.n})",
        )
        if row.published is not None and row.published.accuracy is not None and row.published.ratio:
            axes.plot(
                CONTROL_HZ / row.published.ratio,
                row.published.accuracy,
                color=colour,
                marker=marker,
                ms=9,
                mfc="none",
                ls="none",
            )
    axes.set_xscale("log")
    axes.set_xlabel("writes per second at 20 Hz, logarithmic (hollow: the paper's)")
    axes.set_title(f"{group[0].task}, N = {size}", fontsize=10)


def _state(axes: Any, group: Sequence[Row]) -> None:
    """Accuracy against the size of the state, one line for each variant."""
    for key in sorted(
        {(row.variant, row.label) for row in group}, key=lambda k: (list(STYLE).index(k[0]), k[1])
    ):
        line = sorted((r for r in group if (r.variant, r.label) == key), key=lambda r: r.state_dim)
        colour, marker = STYLE[key[0]]
        axes.errorbar(
            [r.state_dim for r in line],
            [r.accuracy.mean for r in line],
            yerr=[_half(r) for r in line],
            color=colour,
            marker=marker,
            capsize=3,
            label=f"{key[0]} ({key[1]})",
        )
    axes.set_xlabel("N (state: N x N fast weights and N of the previous read)")
    axes.set_title(group[0].task, fontsize=10)


def _half(row: Row) -> float:
    return 0.0 if row.accuracy.n < 2 else row.accuracy.half
