"""`aura eval`: a policy's success on LIBERO's held-out states, with intervals and a blind control beside it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from aura_ros.backbones.registry import BACKBONES
from aura_ros.errors import UserError
from aura_ros.files import write_json
from aura_ros.preflight import check_json
from aura_ros.sim.suites import CUE_SUITES, INIT_STATES_PER_TASK, SUITES
from aura_ros.states import numbers

CHOICES = {
    "split": ("official", "displaced"),
    "instructions": ("own", "others"),
    "protocol": ("aura", "oft"),
    "backbone": BACKBONES,
}
if TYPE_CHECKING:
    from aura_ros.bench.evaluation import EvalJob

# Fixture seeds count from here: no demonstration has them.
FIRST_SEED = 4_000_000_000


def _text(help_text: str, metavar: str) -> Any:
    return tyro.conf.arg(help=help_text, metavar=metavar)


@dataclasses.dataclass(frozen=True)
class Eval:
    """Run a policy on LIBERO, chunks of 8 open loop, and count successes. States 40-49 are in no demonstration."""

    checkpoint: Annotated[
        Path | None, tyro.conf.Positional, _text("of the backbone; none: the one that is shipped", "CKPT")
    ] = None
    tasks: Annotated[str, _text("tasks, as 0,2,4-6", "LIST")] = ""
    suite: Annotated[str, _text("LIBERO suite", "NAME")] = "libero_object"
    states: Annotated[
        str, _text("official initial states, as 0,2-6; empty: 40-49, with --protocol oft 0-49", "LIST")
    ] = ""
    split: Annotated[str, _text("official, or displaced: the states' objects moved", "NAME")] = "official"
    fixture_seeds: Annotated[
        int, _text("episodes of each state, with other fixtures and arrangements", "INT")
    ] = 1
    instructions: Annotated[
        str, _text("own, or others: each other task's of LIST whose object the scene has", "NAME")
    ] = "own"
    protocol: Annotated[
        str,
        _text(
            "aura: fixtures of each episode's own seed; oft: as OpenVLA-OFT evaluates, seeded once a task",
            "NAME",
        ),
    ] = "aura"
    blind: Annotated[Path | None, _text("control that was trained with --blind, beside it", "CKPT")] = None
    backbone: Annotated[str, _text("compact or openvla_oft", "NAME")] = "compact"
    device: Annotated[str, _text("cpu, cuda or cuda:<n>", "NAME")] = "cpu"
    image_size: Annotated[int, _text("pixels of both cameras", "INT")] = 256
    jobs: Annotated[int, _text("processes; 0: one for each core", "INT")] = 0
    out: Annotated[Path | None, _text("keep a line an episode here, and go on from it", "PATH")] = None
    json: Annotated[Path | None, _text("write all results to this file", "PATH")] = None


def run_eval(command: Eval) -> int:
    """Run `aura eval`; returns the exit status. Raises UserError for what was given wrong."""
    from aura_ros.bench.evaluation import HEADER, PUBLISHED, evaluate, table
    from aura_ros.bench.parallel import Lines, run_jobs
    from aura_ros.bench.recall.clock import progress
    from aura_ros.bench.recall.table import line

    jobs = plan(command)
    with progress("evaluating", len(jobs)) as shown:
        lines = Lines(command.out, shown.say) if command.out else None
        if lines:
            check_lines(command.out, lines.results, jobs)

        def report(done: int, result: dict[str, Any]) -> None:
            said = "success" if result["success"] else "no success"
            shown.item(done, f"{result['key']}: {said}, {result['steps']} steps")

        found = run_jobs(evaluate, jobs, workers=command.jobs, lines=lines, report=report, warn=shown.say)
    rows = [HEADER, ("---",) * len(HEADER), *table(found)]
    sys.stdout.write("\n".join(line(row) for row in rows) + "\n")
    if command.protocol == "oft" and command.suite in PUBLISHED:
        sys.stdout.write(
            f"published: {100 * PUBLISHED[command.suite]:.1f} % on all of {command.suite} for OpenVLA-OFT 7B "
            "(arXiv 2502.19645, table I)\n"
        )
    if command.json is not None:
        write_json(command.json, found)
    void = [result for result in found if result["problem"]]
    if void:
        sys.stderr.write(
            f"{len(void)} episodes are void and not counted: {void[0]['key']}: {void[0]['problem']}\n"
        )
    return 0 if len(void) < len(found) else 1


def check_lines(path: Path | None, results: Mapping[str, Any], jobs: Sequence[EvalJob]) -> None:
    """Raise UserError where results that are there are of another policy or other images than what is asked for."""
    for job in jobs:
        line = results.get(job.key)
        wanted = {"identity": job.identity, "image_size": job.image_size}
        if line is not None and any(line.get(name) != value for name, value in wanted.items()):
            raise UserError(f"'{path}' has {job.key} of another checkpoint or image size; give another --out")


def plan(command: Eval) -> list[EvalJob]:
    """All episodes. Raises UserError before anything slow is done."""
    from aura_ros.bench.evaluation import EvalJob
    from aura_ros.sim.instruction import tellable

    tasks, states = check(command)
    oft = command.protocol == "oft"
    chosen = {"policy": command.checkpoint} | ({"blind": command.blind} if command.blind else {})
    arms = {
        arm: str(path.resolve() if path.exists() else path) if path else "" for arm, path in chosen.items()
    }
    identities = {arm: identity(command.backbone, path) for arm, path in arms.items()}
    template = EvalJob(
        "",
        command.suite,
        tasks[0],
        states[0],
        0,
        command.split == "displaced",
        image_size=command.image_size,
        backbone=command.backbone,
        device=command.device,
    )
    template.episode  # noqa: B018 (its check)
    told = {t: tellable(command.suite, t, tasks) if command.instructions == "others" else [-1] for t in tasks}
    if not any(told.values()):
        raise UserError(
            f"no scene of tasks {command.tasks} has the object of another of them; name more tasks, or leave out "
            "--instructions others"
        )
    return [
        dataclasses.replace(
            template,
            checkpoint=checkpoint,
            arm=arm,
            identity=identities[arm],
            task=task,
            instruction_of=other,
            init_state=state,
            seed=0 if oft else FIRST_SEED + seed,
            resets=state if oft else 0,
        )
        for task in tasks
        for other in told[task]
        for arm, checkpoint in arms.items()
        for state in states
        for seed in range(command.fixture_seeds)
    ]


def identity(backbone: str, checkpoint: str) -> str:
    """A file's recorded hash, else the folder or hub name. Raises UserError for a file that cannot be used."""
    if backbone != "compact" and not Path(checkpoint).is_file():
        return checkpoint
    from aura_ros.backbones.openvla_oft.checkpoint import read_head
    from aura_ros.backbones.registry import shipped_checkpoint

    return str(read_head(checkpoint or shipped_checkpoint()).recorded_sha256)


def check(command: Eval) -> tuple[list[int], list[int]]:
    """Tasks and states. Raises UserError for what is out of range or does not go together."""
    if command.suite not in SUITES:
        raise UserError(f"suite '{command.suite}' is unknown; choose one of {', '.join(SUITES)}")
    if command.suite in CUE_SUITES:
        raise UserError(f"suite '{command.suite}' has a cue, of which both must be played; use `aura panel`")
    for name, allowed in CHOICES.items():
        value = getattr(command, name)
        if value not in allowed:
            raise UserError(f"{name} '{value}' is unknown; choose one of {', '.join(allowed)}")
    for name, low, high in (("fixture_seeds", 1, 1000), ("jobs", 0, 1024)):
        value = getattr(command, name)
        if not low <= value <= high:
            raise UserError(f"{name} {value} is not allowed; it must be from {low} to {high}")
    if command.instructions != "own" and command.suite != "libero_object":
        raise UserError(f"instructions 'others' is for libero_object, not for {command.suite}; leave it out")
    oft = command.protocol == "oft"
    if oft and (command.split, command.fixture_seeds, command.instructions) != ("official", 1, "own"):
        raise UserError(
            "protocol 'oft' has official states, one fixture seed and a task's own instruction; leave out --split, "
            "--fixture-seeds and --instructions"
        )
    for path in (command.checkpoint, command.blind):
        if path is not None and command.backbone == "compact" and not path.is_file():
            raise UserError(f"checkpoint '{path}' is no file; give one of `aura train backbone`")
    if command.backbone != "compact" and command.checkpoint is None:
        raise UserError(
            f"backbone '{command.backbone}' has no checkpoint of its own; give a folder or a file"
        )
    if command.json is not None:
        check_json(command.json)
    tasks, states = (
        numbers("tasks", command.tasks, SUITES[command.suite].tasks - 1),
        numbers("states", command.states or ("0-49" if oft else "40-49"), INIT_STATES_PER_TASK - 1),
    )
    if not tasks or not states:
        raise UserError("tasks and states must name at least one each, as 0,2,4-6")
    return tasks, states
