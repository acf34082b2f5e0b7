"""`aura eval`: a policy's success on LIBERO's held-out states, with intervals and a blind control beside it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from aura_ros.errors import UserError
from aura_ros.files import write_json
from aura_ros.preflight import check_json
from aura_ros.sim.suites import INIT_STATES_PER_TASK, SUITES
from aura_ros.states import numbers

SPLITS = ("official", "displaced")
# Fixture seeds count from here: no demonstration has them.
FIRST_SEED = 4_000_000_000


def _text(help_text: str, metavar: str) -> Any:
    return tyro.conf.arg(help=help_text, metavar=metavar)


@dataclasses.dataclass(frozen=True)
class Eval:
    """Run a policy on LIBERO, chunks of 8 open loop, and count successes. States 40-49 are in no demonstration."""

    checkpoint: Annotated[Path, tyro.conf.Positional, _text("of the backbone", "CKPT")]
    tasks: Annotated[str, _text("tasks, as 0,2,4-6", "LIST")]
    suite: Annotated[str, _text("LIBERO suite", "NAME")] = "libero_object"
    states: Annotated[str, _text("official initial states, as 40-49", "LIST")] = "40-49"
    split: Annotated[str, _text("official, or displaced: the states' objects moved", "NAME")] = "official"
    fixture_seeds: Annotated[
        int, _text("episodes of each state, with other fixtures and arrangements", "INT")
    ] = 1
    instruction_of: Annotated[
        int, _text("give the instruction of this task, and count its object; -1: each its own", "INT")
    ] = -1
    blind: Annotated[Path | None, _text("control that was trained with --blind, beside it", "CKPT")] = None
    backbone: Annotated[str, _text("compact or openvla_oft", "NAME")] = "compact"
    image_size: Annotated[int, _text("pixels of both cameras", "INT")] = 256
    jobs: Annotated[int, _text("processes; 0: one for each core", "INT")] = 0
    out: Annotated[Path | None, _text("keep a line an episode here, and go on from it", "PATH")] = None
    json: Annotated[Path | None, _text("write all results to this file", "PATH")] = None


def run_eval(command: Eval) -> int:
    """Run `aura eval`; returns the exit status. Raises UserError for what was given wrong."""
    from aura_ros.bench.evaluation import HEADER, EvalJob, evaluate, table
    from aura_ros.bench.parallel import Lines, run_jobs
    from aura_ros.bench.recall.clock import progress
    from aura_ros.bench.recall.table import line

    tasks, states = check(command)
    arms = {"policy": command.checkpoint} | ({"blind": command.blind} if command.blind else {})
    jobs = [
        EvalJob(
            str(checkpoint.resolve() if checkpoint.exists() else checkpoint),
            command.suite,
            task,
            state,
            FIRST_SEED + seed,
            command.split == "displaced",
            command.image_size,
            command.instruction_of,
            command.backbone,
            arm,
        )
        for task in tasks
        for arm, checkpoint in arms.items()
        for state in states
        for seed in range(command.fixture_seeds)
    ]
    jobs[0].episode  # noqa: B018 (its check)
    with progress("evaluating", len(jobs)) as shown:
        lines = Lines(command.out, shown.say) if command.out else None

        def report(done: int, result: dict[str, Any]) -> None:
            said = "success" if result["success"] else "no success"
            shown.item(done, f"{result['key']}: {said}, {result['steps']} steps")

        found = run_jobs(evaluate, jobs, workers=command.jobs, lines=lines, report=report, warn=shown.say)
    other = {job.key: job.checkpoint for job in jobs}
    strange = [r["key"] for r in found if r["checkpoint"] != other[r["key"]]]
    if strange:
        raise UserError(f"'{command.out}' has {strange[0]} of another checkpoint; give another --out")
    rows = [HEADER, ("---",) * len(HEADER), *table(found)]
    sys.stdout.write("\n".join(line(row) for row in rows) + "\n")
    if command.json is not None:
        write_json(command.json, found)
    return 0


def check(command: Eval) -> tuple[list[int], list[int]]:
    """Tasks and states. Raises UserError before anything slow is done."""
    if command.suite not in SUITES:
        raise UserError(f"suite '{command.suite}' is unknown; choose one of {', '.join(SUITES)}")
    if command.split not in SPLITS:
        raise UserError(f"split '{command.split}' is unknown; choose one of {', '.join(SPLITS)}")
    highest = SUITES[command.suite].tasks - 1
    for name, low, high in (("fixture_seeds", 1, 1000), ("jobs", 0, 1024), ("instruction_of", -1, highest)):
        value = getattr(command, name)
        if not low <= value <= high:
            raise UserError(f"{name} {value} is not allowed; it must be from {low} to {high}")
    if command.instruction_of >= 0 and command.suite != "libero_object":
        raise UserError(f"instruction_of is for libero_object, not for {command.suite}; leave it out")
    for path in (command.checkpoint, command.blind):
        if path is not None and command.backbone == "compact" and not path.is_file():
            raise UserError(f"checkpoint '{path}' is no file; give one of `aura train backbone`")
    if command.json is not None:
        check_json(command.json)
    tasks, states = (
        numbers("tasks", command.tasks, highest),
        numbers("states", command.states, INIT_STATES_PER_TASK - 1),
    )
    if not tasks or not states:
        raise UserError("tasks and states must name at least one each, as 0,2,4-6")
    return tasks, states
