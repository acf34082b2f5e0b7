"""Train the cells that are missing, one single-threaded process a core, resumable whenever it is killed."""

from __future__ import annotations

import os
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from aura_ros.bench.recall.cells import Cell, commit, run_cell
from aura_ros.bench.recall.store import Store
from aura_ros.errors import UserError

ENGINES = ("processes", "ray")
# How often a cell is begun anew when the worker that trains it dies.
RETRIES = 3
# Cells done, cells in all, the latest record.
Report = Callable[[int, int, dict[str, Any]], None]
Records = Generator[dict[str, Any], None, None]


def run_one(cell: Cell, folder: str, source: str) -> dict[str, Any]:
    """Train one cell and keep it: what a worker does. The memory is written before the record that names it.

    source: the commit of the code that trains. Raises what training or writing raises, with the cell's key in front.
    """
    store = Store(folder)
    try:
        record = run_cell(cell, store.checkpoint(cell), source=source)
        store.save(record)
    except UserError as mistake:
        raise UserError(f"cell {cell.key}: {mistake}") from mistake
    except Exception as error:
        raise RuntimeError(f"cell {cell.key} failed ({type(error).__name__}: {error})") from error
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

    jobs: workers; 0: one a core (or one a CPU of the Ray cluster). engine: "ray" runs the same jobs on the Ray cluster
    that RAY_ADDRESS names, or on one of this machine alone. Its nodes need this package and `folder` at the same path.
    A cell whose worker dies is begun anew, RETRIES times; one that fails ends the sweep. `warn` is told of the former
    and of files that are of no use.
    """
    if engine not in ENGINES:
        raise UserError(f"engine '{engine}' is unknown; choose one of: {', '.join(ENGINES)}")
    store = Store(folder)
    store.prepare()
    left = store.missing(cells, warn)
    done = len(cells) - len(left)
    # Now, not when a cell ends: by then the files may be others than those that train.
    source = commit()
    try:
        # Closed here and now, also when `report` raises: no worker goes on.
        with (
            _quiet(),
            closing(_records(left, (str(store.folder.resolve()), source), jobs, engine, warn)) as records,
        ):
            for record in records:
                done += 1
                store.write_lines()
                report(done, len(cells), record)
    except BaseException:
        # What ended the sweep is what is told, not that the same full disk has no room for this either.
        with suppress(UserError):
            store.write_lines()
        raise
    store.write_lines()
    return len(left)


def _records(
    left: Sequence[Cell], place: tuple[str, str], jobs: int, engine: str, warn: Callable[[str], None]
) -> Records:
    """Train all of `left`, whatever happens to workers. place: folder and commit, for `run_one`."""
    workers = min(jobs or os.cpu_count() or 1, len(left))
    if not left:
        return
    if engine == "processes" and workers == 1:
        for cell in left:
            yield run_one(cell, *place)
        return
    try:
        import joblib
    except ImportError as error:
        raise UserError(
            f"a sweep needs joblib ({error}); install it with `pip install aura_ros[train]`"
        ) from error
    if engine == "ray":
        yield from _on_ray(joblib, left, place, jobs, warn)
        return
    # Ctrl-C reaches the whole group; this process ends the workers, each without a traceback of its own.
    ignoring_interrupts = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
    deaths: Counter[str] = Counter()
    waiting = {cell.key: cell for cell in left}
    while waiting:
        begun: dict[str, Cell] = {}
        try:
            with joblib.parallel_config(backend="loky", inner_max_num_threads=1, **ignoring_interrupts):
                for record in _parallel(joblib, list(waiting.values()), place, workers, begun):
                    begun.pop(record["key"])
                    waiting.pop(record["key"])
                    yield record
        except BrokenProcessPool as error:
            # One worker died, the others were ended with it: which cell it had is not known.
            deaths.update(list(begun))
            if gone := [key for key in begun if deaths[key] > RETRIES]:
                raise _lost(gone, error) from error
            warn(f"a worker died; trained again from the start: {', '.join(begun)}")
            # Last, so that a cell that needs too much memory does not keep the others from being trained.
            waiting = dict(sorted(waiting.items(), key=lambda item: deaths[item[0]]))


def _on_ray(
    joblib: Any, left: Sequence[Cell], place: tuple[str, str], jobs: int, warn: Callable[[str], None]
) -> Records:
    from aura_ros.bench.recall.ray_engine import ray_workers

    begun: dict[str, Cell] = {}
    with ray_workers(jobs, RETRIES, warn) as ray, joblib.parallel_config(backend=ray.backend):
        try:
            # Ray's pool deals jobs out in turn, to busy workers too: two each keep idle ones rarer.
            for record in _parallel(joblib, left, place, min(ray.count, len(left)), begun, ahead=2):
                begun.pop(record["key"])
                yield record
        except ray.error as error:
            raise _lost(list(begun), error) from error


def _parallel(
    joblib: Any,
    left: Sequence[Cell],
    place: tuple[str, str],
    workers: int,
    begun: dict[str, Cell],
    ahead: int = 1,
) -> Records:
    """Records in the order in which they are done. begun: gets the cells that were given to workers, `ahead` to each."""

    def given() -> Iterator[Any]:
        for cell in left:
            begun[cell.key] = cell
            yield joblib.delayed(run_one)(cell, *place)

    # Unordered: a long cell must not keep finished ones from being counted.
    parallel = joblib.Parallel(
        n_jobs=workers, return_as="generator_unordered", batch_size=1, pre_dispatch=f"{ahead} * n_jobs"
    )
    with closing(parallel(given())) as records:
        yield from records


@contextmanager
def _quiet() -> Iterator[None]:
    """Without joblib's advice to whoever interrupts it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*You could benefit from adjusting the input task")
        yield


def _lost(keys: Sequence[str], error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return UserError(
        f"workers died {RETRIES + 1} times while they trained {' or '.join(keys)} ({reason}); "
        "the machine may have too little memory: give fewer --jobs, then run the same sweep again to go on"
    )
