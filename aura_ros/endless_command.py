"""`aura endless`: the memory beside a growing and a window cache on one endless stream, as table, JSON and figure."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from aura_ros.errors import UserError
from aura_ros.files import write_json
from aura_ros.preflight import check_json

SECONDS_BETWEEN_LINES = 10.0
FIGURE_KINDS = (".png", ".pdf", ".svg")


def _text(help_text: str, metavar: str) -> Any:
    return tyro.conf.arg(help=help_text, metavar=metavar)


@dataclasses.dataclass(frozen=True)
class Endless:
    """Bytes, latency and RSS of the memory over an endless stream, against caches that grow or keep a window."""

    steps: Annotated[int, _text("steps of the stream", "INT")] = 100_000
    checkpoint: Annotated[
        Path | None, _text("memory of sparse_recall; none: random weights, written at events", "PATH")
    ] = None
    kv_limit: Annotated[int, _text("where the growing cache stops", "BYTES")] = 64_000_000
    window: Annotated[int, _text("rows of the window cache; 0: as many as the memory's bytes", "INT")] = 0
    seed: Annotated[int, _text("of stream and random weights", "INT")] = 0
    json: Annotated[Path | None, _text("write the numbers to this file", "PATH")] = None
    figure: Annotated[Path | None, _text("draw to this file: .png, .pdf or .svg", "PATH")] = None


def run_endless(command: Endless) -> int:
    """Run `aura endless`; returns the exit status. Raises UserError for what was given wrong.

    Interrupted, it shows and writes what there is, then raises KeyboardInterrupt.
    """
    from aura_ros.bench.endless import EndlessConfig
    from aura_ros.bench.endless_process import measure_apart

    config = EndlessConfig(
        steps=command.steps,
        checkpoint=str(command.checkpoint or ""),
        kv_limit=command.kv_limit,
        window=command.window,
        seed=command.seed,
    )
    if command.json is not None:
        check_json(command.json)
    if command.figure is not None:
        check_figure(command.figure)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=2 * config.steps)
        begin = said = time.monotonic()

        def report(done: int, total: int) -> None:
            nonlocal said
            what = "memory alone" if done <= config.steps else "beside the caches"
            bar.update(task, completed=done, description=what)
            now = time.monotonic()
            if not console.is_terminal and now - said >= SECONDS_BETWEEN_LINES:
                said = now
                left = (now - begin) / done * (total - done)
                console.print(
                    f"{what}: {done:,} of {total:,} steps of both passes, about {left:.0f} s left",
                    highlight=False,
                )

        numbers = measure_apart(config, report)
    sys.stdout.write(table(numbers))
    sys.stdout.flush()
    if command.json is not None:
        write_json(command.json, {"config": dataclasses.asdict(config), **dataclasses.asdict(numbers)})
    if command.figure is not None:
        draw(numbers, command.figure)
    if numbers.interrupted:
        raise KeyboardInterrupt(f"the numbers are those of {numbers.steps:,} of {config.steps:,} steps")
    return 0


def table(numbers: Any) -> str:
    """An `aura_ros.bench.endless_numbers.Endless` as text."""
    dk, dv = numbers.state_dim
    lines = [
        f"memory {dk} x {dv}, weights {numbers.weights}; window of {numbers.window_rows} rows; growing cache of "
        f"{numbers.growing_row_bytes} bytes a step; {numbers.steps:,} steps",
        f"{'':<19}|{'us a step, p50 / p99':^52}|{'state bytes':^30}|{'RSS, MB':^14}|{'writes':>7}",
        f"{'steps':<19}|{'memory':>14} {'window':>14} {'growing (reads)':>22}|"
        f"{'memory':>8} {'window':>8} {'growing':>12}|{'alone':>6} {'all':>7}|{'%':>7}",
    ]
    for span in numbers.decades:
        reads = f" ({span.growing.count})" if span.growing else ""
        right = "" if span.accuracy is None else f"  accuracy {span.accuracy:.4f}"
        lines.append(
            f"{f'{span.first:,}..{span.last:,}':<19}|{_both(span.memory):>14} {_both(span.window):>14} "
            f"{_both(span.growing) + reads:>22}|{span.memory_bytes:>8,} {span.window_bytes:>8,} "
            f"{span.growing_bytes:>12,}|{span.rss_alone / 1e6:>6.1f} {span.rss / 1e6:>7.1f}|"
            f"{100 * span.write_rate:>7.2f}{right}"
        )
    if numbers.alone:
        lines.append(f"memory alone, {numbers.alone.count:,} steps: {_both(numbers.alone)} us")
    if numbers.slope is None:
        lines.append("RSS slope: too few samples after the warm-up; run more steps")
    else:
        slope = numbers.slope
        verdict = "0 within noise" if slope.is_zero else "NOT 0 within noise"
        lines.append(
            f"RSS slope, memory alone after the first tenth: {slope.per_step:+.4f} +- {slope.error:.4f} bytes a step, "
            f"{slope.growth:+,} bytes in all: {verdict} (a page in all: {slope.resolution:.4f})"
        )
    if numbers.decades:
        time_at, bytes_at = numbers.time_crossover, numbers.byte_crossover
        lines.append(
            f"the growing cache is larger than the memory from step {_at(bytes_at)}, and slower (median) from about step "
            f"{_at(None if time_at is None else _round(time_at))}; longest copy into larger arrays {numbers.pause_ms:.1f} ms"
        )
    if numbers.growing_stopped:
        lines.append(
            f"the growing cache stopped at its limit, after step {numbers.growing_stopped:,}; give --kv-limit for more"
        )
    lines.append(
        "The growing cache takes in every step; past step 1,000 a step is timed with its read at about every "
        "(t / 1000)th, and the others' step after it is not."
    )
    load, cores = numbers.machine["load_average"], numbers.machine["cores"]
    lines.append(
        f"One thread, {cores} cores at load {load:.1f}, NumPy {numbers.machine['numpy']}, {numbers.machine['machine']}."
    )
    return "\n".join(lines) + "\n"


def _both(latency: Any) -> str:
    if latency is None:
        return "-"
    return f"{_us(latency.p50_us)} / {_us(latency.p99_us)}"


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _at(step: int | None) -> str:
    return "- (not in this run)" if step is None else f"{step:,}"


def _round(step: float) -> int:
    """Two figures: medians of tenths of decades tell no more."""
    return int(float(f"{step:.2g}"))


def check_figure(path: Path) -> None:
    """Raises UserError unless a figure can be drawn there."""
    if path.suffix not in FIGURE_KINDS:
        raise UserError(
            f"figure '{path}' is of no known kind; give a name that ends in {', '.join(FIGURE_KINDS)}"
        )
    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"figure '{path}' cannot be written; give a file in a folder you may write")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"figure '{path}' needs matplotlib; install it with `pip install 'aura_ros[report]'`")


def draw(numbers: Any, path: Path) -> None:
    """Median latency and state bytes over steps, both axes logarithmic. Raises UserError if it cannot be written."""
    # Without pyplot, which keeps figures and asks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from aura_ros.bench.endless_numbers import FEWEST

    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    times, sizes = figure.subplots(1, 2)
    series = (
        ("memory", "memory", "tab:blue", "-"),
        ("window", "window cache", "tab:green", "--"),
        ("growing", "growing cache", "tab:red", "-."),
    )
    for name, label, colour, style in series:
        # A median of one or two steps is no more than what the scheduler did to them.
        spans = [span for span in numbers.parts if (timed := getattr(span, name)) and timed.count >= FEWEST]
        steps = [span.last for span in spans]
        medians = [getattr(span, name).p50_us for span in spans]
        tails = [getattr(span, name).p99_us for span in spans]
        times.plot(steps, medians, color=colour, linestyle=style, label=f"{label}, median")
        times.plot(steps, tails, color=colour, linestyle=style, alpha=0.3, label=f"{label}, p99")
        held = [getattr(span, f"{name}_bytes") for span in numbers.parts]
        sizes.plot([span.last for span in numbers.parts], held, color=colour, linestyle=style, label=label)
    for axes, crossing in ((times, numbers.time_crossover), (sizes, numbers.byte_crossover)):
        axes.set(xscale="log", yscale="log", xlabel="step")
        axes.grid(alpha=0.3)
        if crossing is not None:
            axes.axvline(crossing, color="grey", linestyle=":", label=f"crossover: {_round(crossing):,}")
        axes.legend(fontsize=7)
    times.set(ylabel="time of a step (us)", title="latency")
    sizes.set(ylabel="state (bytes)", title="state")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(
            f"figure '{path}' cannot be written ({error.strerror}); give a file in a folder you may write"
        ) from error
