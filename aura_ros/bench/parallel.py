"""Many jobs in a few processes, each job's result kept as one line of a file, resumable whenever it is killed."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable, Generator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol, TypeVar

from aura_ros.errors import UserError

# How often what is left is begun anew when a worker dies without a result in between.
RETRIES = 3
Result = dict[str, Any]


class Keyed(Protocol):
    """A job: plain data with a key of its own."""

    @property
    def key(self) -> str:
        """Unique among jobs."""
        ...


Job = TypeVar("Job", bound=Keyed)


def run_jobs(
    work: Callable[[Job], Result],
    jobs: Sequence[Job],
    *,
    workers: int = 0,
    lines: Lines | None = None,
    report: Callable[[int, Result], None] = lambda done, result: None,
    warn: Callable[[str], None] = lambda text: None,
    engine: str = "processes",
) -> list[Result]:
    """Do all jobs that `lines` has no result of; returns the results of all, in the order of the jobs.

    work: a module's function, told a job with a `key`; what it returns is JSON. workers: processes, 0: one a core.
    engine: "processes" of this machine, or "ray": the cluster that RAY_ADDRESS names.
    report: how many are done and the newest result. Raises what a job raises, and UserError when workers keep dying.
    """
    found = dict(lines.results) if lines else {}
    waiting = {job.key: job for job in jobs if job.key not in found}
    done = len(jobs) - len(waiting)
    deaths = 0
    while waiting:
        before = len(waiting)
        try:
            with closing(
                _on_ray(work, list(waiting.values()), workers, warn)
                if engine == "ray"
                else _results(work, list(waiting.values()), workers)
            ) as results:
                for result in results:
                    key = result["key"]
                    del waiting[key]
                    found[key] = result
                    if lines:
                        lines.append(result)
                    done += 1
                    report(done, result)
        except BrokenProcessPool as error:
            deaths = deaths + 1 if len(waiting) == before else 1
            if deaths > RETRIES:
                raise UserError(
                    f"workers died {deaths} times and finished nothing ({next(iter(waiting))} is next); the machine may "
                    "have too little memory: give fewer --jobs, then run the same command again to go on"
                ) from error
            warn("a worker died; what it had is begun again")
    return [found[job.key] for job in jobs]


def _results(
    work: Callable[[Job], Result], jobs: Sequence[Job], workers: int
) -> Generator[Result, None, None]:
    """In the order in which they are done."""
    count = min(workers or os.cpu_count() or 1, len(jobs))
    if count == 1:
        yield from map(work, jobs)
        return
    try:
        import joblib
    except ImportError as error:
        raise UserError(f"--jobs {count} needs joblib ({error}); give --jobs 1, or install it") from error
    # Ctrl-C reaches the whole group; this process ends the workers, each without a traceback of its own.
    options = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
    with (
        warnings.catch_warnings(),
        joblib.parallel_config(backend="loky", inner_max_num_threads=1, **options),
    ):
        warnings.filterwarnings("ignore", message=".*You could benefit from adjusting the input task")
        parallel = joblib.Parallel(
            n_jobs=count, return_as="generator_unordered", batch_size=1, pre_dispatch="n_jobs"
        )
        with closing(parallel(joblib.delayed(work)(job) for job in jobs)) as results:
            yield from results


def _on_ray(
    work: Callable[[Job], Result], jobs: Sequence[Job], workers: int, warn: Callable[[str], None]
) -> Generator[Result, None, None]:
    """In the order in which they are done, by the workers of a Ray cluster; a dead node's jobs are begun again."""
    import joblib

    from aura_ros.bench.recall.ray_engine import ray_workers

    with ray_workers(workers, RETRIES, warn) as ray, joblib.parallel_config(backend=ray.backend):
        parallel = joblib.Parallel(
            n_jobs=min(ray.count, len(jobs)),
            return_as="generator_unordered",
            batch_size=1,
            pre_dispatch="2 * n_jobs",
        )
        try:
            with closing(parallel(joblib.delayed(work)(job) for job in jobs)) as results:
                yield from results
        except ray.error as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"workers of the Ray cluster died too often ({reason}); run the same command again to go on"
            ) from error


class Lines:
    """Results by key in a JSON Lines file; a line is on the disk before the next job's result is taken."""

    def __init__(self, path: str | Path, warn: Callable[[str], None] = lambda text: None) -> None:
        """Read what is there. A line that is broken is named to `warn` and its job done again.

        Raises UserError for a file that cannot be read or written.
        """
        self.path = Path(path)
        self.results: dict[str, Result] = {}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = self.path.read_bytes() if self.path.exists() else b""
            with self.path.open("ab") as stream:
                # Where a run was killed while it wrote: that line goes, and its job is done again.
                whole = text.rfind(b"\n") + 1
                if whole < len(text):
                    stream.truncate(whole)
                    warn(f"'{self.path}' ended in a line cut off; that job is done again")
                    text = text[:whole]
        except OSError as error:
            raise UserError(
                f"'{self.path}' cannot be used ({error.strerror}); give a file in a folder you may write"
            ) from error
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                result = json.loads(line)
                self.results[result["key"]] = result
            except (ValueError, TypeError, KeyError):
                warn(f"'{self.path}' line {number} is broken; that job is done again")

    def append(self, result: Result) -> None:
        """Add one line. Raises UserError when the disk is full."""
        text = json.dumps(result) + "\n"
        try:
            with self.path.open("ab") as stream:
                stream.write(text.encode())
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise UserError(
                f"'{self.path}' cannot be written ({error.strerror}); make room, then run the same command again to go on"
            ) from error
        self.results[result["key"]] = result


class EpisodeLines(Lines):
    """As `Lines`, but a job's result is many lines, each with a key of its own."""

    def append(self, result: Result) -> None:
        """Add the episodes of a result. Raises UserError when the disk is full."""
        for episode in result["episodes"]:
            super().append(episode)
