"""Train the cells that are missing, one single-threaded process a core, resumable whenever it is killed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aura_ros.bench.recall.cells import Cell, run_cell
from aura_ros.bench.recall.store import Store
from aura_ros.errors import UserError

ENGINES = ("processes", "ray")
# Cells done, cells in all, the latest record.
Report = Callable[[int, int, dict[str, Any]], None]


def run_one(cell: Cell, folder: str) -> dict[str, Any]:
    """Train one cell and keep it: what a worker does. The memory is written before the record that names it."""
    store = Store(folder)
    record = run_cell(cell, store.checkpoint(cell))
    store.save(record)
    return record


def run_sweep(
    cells: Sequence[Cell],
    folder: str | Path,
    *,
    jobs: int = 0,
    engine: str = "processes",
    report: Report = lambda done, total, record: None,
    warn: Callable[[str], None] = lambda text: None,
) -> int:
    """Train what is missing of `cells` into `folder`; returns how many were trained.

    jobs: workers; 0: one a core (or all of the Ray cluster). engine: "ray" runs the same jobs on the Ray cluster that
    RAY_ADDRESS names, or a local one.
    """
    store = Store(folder)
    store.prepare()
    left = store.missing(cells, warn)
    done = len(cells) - len(left)
    try:
        for record in _records(left, str(store.folder.resolve()), jobs, engine):
            done += 1
            store.write_lines()
            report(done, len(cells), record)
    finally:
        store.write_lines()
    return len(left)


def _records(left: Sequence[Cell], folder: str, jobs: int, engine: str) -> Iterator[dict[str, Any]]:
    if not left:
        return
    if engine not in ENGINES:
        raise UserError(f"engine '{engine}' is unknown; choose one of: {', '.join(ENGINES)}")
    try:
        import joblib
    except ImportError as error:
        raise UserError(
            f"a sweep needs joblib ({error}); install it with `pip install aura_ros[train]`"
        ) from error
    workers = jobs or (os.cpu_count() or 1)
    if engine == "processes" and min(workers, len(left)) == 1:
        for cell in left:
            yield run_one(cell, folder)
        return
    with _backend(joblib, engine, jobs):
        # Unordered: a long cell must not keep finished ones from being counted.
        parallel = joblib.Parallel(
            n_jobs=-1 if engine == "ray" and not jobs else workers,
            return_as="generator_unordered",
            batch_size=1,
        )
        yield from parallel(joblib.delayed(run_one)(cell, folder) for cell in left)


@contextmanager
def _backend(joblib: Any, engine: str, jobs: int) -> Iterator[None]:
    if engine == "processes":
        with joblib.parallel_config(backend="loky", inner_max_num_threads=1):
            yield
        return
    try:
        import ray
        from ray.util.joblib import register_ray
    except ImportError as error:
        raise UserError(
            f"engine 'ray' needs ray ({error}); install it with `pip install 'ray>=2.9'`"
        ) from error
    started = not ray.is_initialized()
    if started:
        ray.init(
            address=os.environ.get("RAY_ADDRESS") or None,
            log_to_driver=False,
            include_dashboard=False if not os.environ.get("RAY_ADDRESS") else None,
        )
    register_ray()
    try:
        with joblib.parallel_config(backend="ray", ray_remote_args={"max_retries": 3}):
            yield
    finally:
        if started:
            ray.shutdown()


class Clock:
    """Time left from the rate so far: (done, total) -> seconds, None before the first."""

    def __init__(self) -> None:
        self._begin, self._first = time.monotonic(), -1

    def left(self, done: int, total: int) -> float | None:
        """Seconds until all are done."""
        if self._first < 0:
            self._first = done - 1
        new = done - self._first
        return (time.monotonic() - self._begin) / new * (total - done) if new > 0 else None
