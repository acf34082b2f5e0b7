"""How figures look: colours that the colour-blind tell apart, a marker for each memory, the paper's points hollow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from aura_ros.bench.recall.statistics import Interval
from aura_ros.memory.baseline_config import KINDS
from aura_ros.memory.config import Variant

# Wong's palette; memory and its baselines in the paper's order, then the trained caches.
COLOURS = ("#0072B2", "#009E73", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#999999", "#000000")
MARKERS = ("*", "s", "D", "v", "^", "o", "X", "P")
STYLE = {v.value: (COLOURS[i], MARKERS[i]) for i, v in enumerate(Variant)}
CACHES = (("#D55E00", "p"), ("#E69F00", "h"), ("#CC79A7", "<"), ("#000000", ">"))
STYLE |= dict(zip(KINDS, CACHES, strict=True))
OURS, OTHER, GREY = COLOURS[0], COLOURS[4], "0.6"


def canvas(columns: int = 1, width: float = 7.0, height: float = 4.2, **options: Any) -> tuple[Any, Any]:
    """A figure and its axes, without pyplot, which keeps figures and asks for a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, **options)


def save(figure: Any, path: Path) -> Path:
    """Write a PNG."""
    figure.savefig(path, dpi=130, metadata={"Software": None})
    return path


def half(found: Interval) -> float:
    """Half of an error bar: none for one seed."""
    return 0.0 if math.isnan(found.half) else found.half


def look(variant: str) -> dict[str, Any]:
    """Colour and marker of a variant, for matplotlib."""
    colour, marker = STYLE.get(variant, (GREY, "."))
    first = variant == Variant.AURA.value
    # On top of what has the same accuracy, and larger.
    return {"color": colour, "marker": marker, "ms": 12 if first else 7, "zorder": 4 if first else 2}


def hollow(variant: str) -> dict[str, Any]:
    """The paper's point of it."""
    return {**look(variant), "mfc": "none", "ls": "none"}


def guessing(axes: Any, chance: float) -> None:
    """The line of answers that know nothing."""
    axes.axhline(chance, color=GREY, lw=0.9, ls=":", label="guessing", zorder=0)


def legend(axes: Any) -> None:
    """Beside the axes, where it hides nothing."""
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
