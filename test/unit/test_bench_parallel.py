"""Jobs in processes: every result is kept as it comes, and what is there is not done again."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from aura_ros.bench.parallel import Lines, run_jobs
from aura_ros.errors import UserError


@dataclass(frozen=True)
class Job:
    """Squares a number; `folder` gets a file each time that it runs."""

    number: int
    folder: str
    kill: bool = False

    @property
    def key(self):
        """Its number."""
        return str(self.number)


def square(job):
    """What a worker does."""
    marks = Path(job.folder)
    (marks / f"{job.number}-{len(list(marks.iterdir()))}-{os.getpid()}").touch()
    if job.kill and len(list(marks.glob(f"{job.number}-*"))) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if job.number < 0:
        raise UserError(f"number {job.number} is negative")
    return {"key": job.key, "square": job.number**2}


def jobs(tmp_path, *numbers, **more):
    marks = tmp_path / "marks"
    marks.mkdir(exist_ok=True)
    return [Job(n, str(marks), **more) for n in numbers]


@pytest.mark.parametrize("workers", [1, 2])
def test_results_are_in_the_jobs_order_and_each_has_a_line(tmp_path, workers):
    lines, seen = Lines(tmp_path / "new" / "lines.jsonl"), []
    found = run_jobs(
        square,
        jobs(tmp_path, 3, 1, 2),
        workers=workers,
        lines=lines,
        report=lambda done, result: seen.append((done, result["key"])),
    )
    assert [r["square"] for r in found] == [9, 1, 4]
    assert [done for done, _ in seen] == [1, 2, 3]
    written = [json.loads(line) for line in lines.path.read_text().splitlines()]
    assert [r["key"] for r in written] == [key for _, key in seen]


def test_what_has_a_line_is_not_done_again_and_a_broken_line_is(tmp_path):
    path, warned = tmp_path / "lines.jsonl", []
    path.write_text('{"key": "1", "square": 1}\nnonsense\n{"key": "2", "squ')
    lines = Lines(path, warned.append)
    found = run_jobs(square, jobs(tmp_path, 1, 2), workers=1, lines=lines)
    assert [r["square"] for r in found] == [1, 4]
    assert sorted(p.name[0] for p in (tmp_path / "marks").iterdir()) == ["2"]
    assert [text.split("' ", 1)[1] for text in warned] == [
        "ended in a line cut off; that job is done again",
        "line 2 is broken; that job is done again",
    ]
    # The end that a kill left does not spoil the line after it.
    assert Lines(path).results == {"1": found[0], "2": found[1]}


def test_a_worker_that_dies_costs_only_what_it_had(tmp_path):
    warned = []
    killer = jobs(tmp_path, 5, kill=True)
    found = run_jobs(square, [*jobs(tmp_path, 1, 2), *killer], workers=2, warn=warned.append)
    assert [r["square"] for r in found] == [1, 4, 25]
    assert warned == ["a worker died; what it had is begun again"]


def test_a_mistake_in_a_job_keeps_the_lines_before_it(tmp_path):
    lines = Lines(tmp_path / "lines.jsonl")
    with pytest.raises(UserError, match="number -1 is negative"):
        run_jobs(square, jobs(tmp_path, 1, -1, 2), workers=1, lines=lines)
    assert list(Lines(lines.path).results) == ["1"]


def test_a_file_that_cannot_be_used_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be used.*give a file in a folder you may write"):
        Lines(tmp_path / "file" / "lines.jsonl")
