"""`aura expert`: a table of how often the scripted expert solves LIBERO's tasks."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from aura_ros.errors import UserError
from aura_ros.files import write_json
from aura_ros.preflight import check_json
from aura_ros.sim.suites import CUE_SUITES, INIT_STATES_PER_TASK, SUITES
from aura_ros.states import numbers

SPLITS = ("official", "displaced")
HEADER = ("task", "success", "95 % interval", "steps: median, most", "failures: states")
# Tasks of each suite whose goal the expert can reach: it puts objects into or onto places.
PLACING = {"libero_object": range(10), "libero_10": (0, 7)}


def _text(help_text: str, metavar: str) -> Any:
    return tyro.conf.arg(help=help_text, metavar=metavar)


@dataclasses.dataclass(frozen=True)
class Expert:
    """Drive LIBERO by the scripted expert and count successes: no camera, privileged poses."""

    suite: Annotated[str, _text("LIBERO suite", "NAME")] = "libero_object"
    tasks: Annotated[str, _text("tasks, as 0,2,4-6; empty: those that the expert is for", "LIST")] = ""
    states: Annotated[str, _text("official initial states, as 0-49", "LIST")] = "0-9"
    all: Annotated[bool, tyro.conf.FlagCreatePairsOff, _text("all 50 states", "")] = False
    split: Annotated[str, _text("official, or displaced: the states' objects moved", "NAME")] = "official"
    seed: Annotated[int, _text("of fixture poses", "INT")] = 7
    jobs: Annotated[int, _text("processes; 0: one for each core", "INT")] = 0
    out: Annotated[Path | None, _text("keep a line an episode here, and go on from it", "PATH")] = None
    json: Annotated[Path | None, _text("write all results to this file", "PATH")] = None


def run_expert_command(command: Expert) -> int:
    """Run `aura expert`; returns the exit status. Raises UserError for what was given wrong."""
    from aura_ros.bench.expert import ExpertJob, run_expert, table
    from aura_ros.bench.parallel import Lines, run_jobs
    from aura_ros.bench.recall.clock import progress
    from aura_ros.bench.recall.table import line

    if command.suite not in SUITES:
        raise UserError(f"suite '{command.suite}' is unknown; choose one of {', '.join(SUITES)}")
    if command.suite in CUE_SUITES:
        raise UserError(f"suite '{command.suite}' has a cue, of which both must be played; use `aura panel`")
    if command.split not in SPLITS:
        raise UserError(f"split '{command.split}' is unknown; choose one of {', '.join(SPLITS)}")
    if command.jobs < 0:
        raise UserError(f"jobs {command.jobs} is not allowed; it must be 0 or more")
    if command.json is not None:
        check_json(command.json)
    tasks = numbers("tasks", command.tasks, SUITES[command.suite].tasks - 1) or list(
        PLACING.get(command.suite, range(SUITES[command.suite].tasks))
    )
    states = numbers("states", "0-49" if command.all else command.states, INIT_STATES_PER_TASK - 1)
    jobs = [
        ExpertJob(command.suite, task, state, int(command.split == "displaced"), command.seed)
        for task in tasks
        for state in states
    ]
    for job in jobs:
        job.episode  # noqa: B018 (its check)
    with progress("expert", len(jobs)) as shown:
        lines = Lines(command.out, shown.say) if command.out else None

        def report(done: int, result: dict[str, Any]) -> None:
            said = "success" if result["success"] else result["failure"]
            shown.item(done, f"{result['key']}: {said}, {result['steps']} steps")

        found = run_jobs(run_expert, jobs, workers=command.jobs, lines=lines, report=report, warn=shown.say)
    rows = [HEADER, ("---",) * len(HEADER), *table(found)]
    sys.stdout.write("\n".join(line(row) for row in rows) + "\n")
    if command.json is not None:
        write_json(command.json, found)
    return 0
