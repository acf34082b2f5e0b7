"""`aura collect`: demonstrations on real LIBERO, as bags that a robot might have recorded and an index to train on."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import tyro

from aura_ros.backbones.registry import BACKBONES
from aura_ros.errors import UserError
from aura_ros.rollouts_command import run_rollouts
from aura_ros.sim.suites import CUE_SUITES, SUITES
from aura_ros.states import numbers

UNTIL = ("end", "lift")
SPLITS = ("mixed", "official", "displaced")
# An episode's fixture seed is 100,000 times this and its number; those from 4,000,000,000 on are for judging.
MAX_SEED = 39_000
INSTRUCTIONS = ("own", "mixed")
# Where the expert fails, further episodes are tried, but not for ever.
MOST_TRIES = 3


def _text(help_text: str, metavar: str) -> Any:
    return tyro.conf.arg(help=help_text, metavar=metavar)


@dataclasses.dataclass(frozen=True)
class Collect:
    """Collect demonstrations: the scripted expert drives, or a policy does and the expert says what to do instead.

    Official states 40-49 are never used. Killed or interrupted, the same command goes on.
    """

    out: Annotated[Path, _text("folder to make, or to go on with", "DIR")]
    tasks: Annotated[str, _text("tasks, as 0,2,4-6", "LIST")]
    suite: Annotated[str, _text("LIBERO suite", "NAME")] = "libero_object"
    episodes: Annotated[int, _text("to keep of each task", "INT")] = 40
    split: Annotated[str, _text("official, displaced (objects moved), or mixed: half of each", "NAME")] = (
        "mixed"
    )
    instructions: Annotated[
        str,
        _text(
            "own, or mixed: half with another task's of LIST, or with a cue task's target named",
            "NAME",
        ),
    ] = "own"
    policy: Annotated[Path | None, _text("backbone that drives (DAgger); none: the expert", "CKPT")] = None
    latents: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        _text(
            "rollouts for `aura train memory`: hidden states of --policy, or of the one that is shipped", ""
        ),
    ] = False
    memory: Annotated[
        Path | None,
        _text("latents: memory that drives with the policy (DAgger); none: the expert leads", "CKPT"),
    ] = None
    backbone: Annotated[str, _text("latents: compact, or openvla_oft with --policy DIR", "NAME")] = "compact"
    device: Annotated[str, _text("latents: of the backbone, cpu or cuda", "NAME")] = "cpu"
    delays: Annotated[
        str,
        _text("latents: control steps from the end of a cue to the decision, shortest-longest", "INT-INT"),
    ] = "20-80"
    frames_every: Annotated[int, _text("control steps between two frames of the expert's", "INT")] = 3
    until: Annotated[
        str, _text("end, or lift: over when the object is up, more arrangements in the same time", "NAME")
    ] = "end"
    image_size: Annotated[int, _text("pixels of both cameras", "INT")] = 256
    seed: Annotated[int, _text("of fixtures, pushes and arrangements", "INT")] = 0
    jobs: Annotated[int, _text("processes; 0: one for each core", "INT")] = 0


def run_collect(command: Collect) -> int:
    """Run `aura collect`; returns the exit status. Raises UserError for what was given wrong."""
    from aura_ros.backbones.openvla_oft.checkpoint import read_head
    from aura_ros.bench.parallel import Lines, run_jobs
    from aura_ros.bench.recall.clock import progress
    from aura_ros.sim.instruction import tellable
    from aura_ros.training.collection import collect, head, jobs
    from aura_ros.training.demonstrations import LINES, DemoFolder

    tasks = check(command)
    if command.latents:
        return run_rollouts(command, tasks)
    folder = DemoFolder(command.out)
    folder.prepare(head(command.image_size, command.frames_every, command.until))
    mixed = command.instructions == "mixed"
    cue = command.suite in CUE_SUITES
    others = {task: tellable(command.suite, task, tasks) if mixed and not cue else [] for task in tasks}
    policy = "" if command.policy is None else str(command.policy.resolve())
    policy_hash = str(read_head(policy).recorded_sha256) if policy else ""
    kept: dict[int, int] = dict.fromkeys(tasks, 0)
    tried: dict[int, int] = dict.fromkeys(tasks, 0)
    failed: list[str] = []
    run: list[str] = []
    begun = time.monotonic()
    with progress("collecting", len(tasks) * command.episodes) as shown:
        lines = Lines(folder.folder / LINES, shown.say)
        folder.forget_lost(lines.results)

        def report(_: int, line: dict[str, Any]) -> None:
            run.append(line["key"])
            said = "kept" if line["frames"] else f"dropped ({line.get('problem', 'no success')})"
            now = sum(kept.values()) + sum(1 for done in lines.results.values() if done["key"] in running)
            shown.item(now, f"{line['key']}: {line['steps']} steps, {said}")

        while True:
            batch = []
            for task in tasks:
                missing = min(command.episodes - kept[task], MOST_TRIES * command.episodes - tried[task])
                span = range(tried[task], tried[task] + max(missing, 0))
                tried[task] += len(span)
                batch += jobs(
                    folder.folder,
                    command.suite,
                    task,
                    span,
                    split=command.split,
                    image_size=command.image_size,
                    seed=command.seed,
                    policy=policy,
                    policy_hash=policy_hash,
                    others=others[task],
                    frames_every=command.frames_every,
                    until=command.until,
                    cues=(4 if mixed else 2) if cue else 0,
                )
            if not batch:
                break
            running = {job.key for job in batch}
            for line in run_jobs(
                collect, batch, workers=command.jobs, lines=lines, report=report, warn=shown.say
            ):
                kept[line["task"]] += bool(line["frames"])
                if not line["success"]:
                    failed.append(line["key"])
            running = set()
    for task in tasks:
        sys.stdout.write(f"task {task}: {kept[task]} demonstrations of {tried[task]} episodes\n")
    if failed:
        # A policy's failures are what it is corrected for, and many.
        which = f"{len(failed)} episodes" if policy else ", ".join(failed)
        sys.stdout.write(f"without success: {which}\n")
    if run:
        seconds = time.monotonic() - begun
        sys.stdout.write(f"{len(run)} episodes in {seconds / 60:.1f} min, {len(run) / seconds:.2f}/s\n")
    short = [task for task in tasks if kept[task] < command.episodes]
    if short:
        raise UserError(
            f"tasks {short} have fewer than {command.episodes} demonstrations: the expert does not solve them often enough; "
            "choose other tasks or another seed"
        )
    return 0


def check(command: Collect) -> list[int]:
    """The tasks. Raises UserError for anything that is out of range, before minutes are spent."""
    from aura_ros.sim.suites import EpisodeConfig

    if command.suite not in SUITES:
        raise UserError(f"suite '{command.suite}' is unknown; choose one of {', '.join(SUITES)}")
    if command.split not in SPLITS:
        raise UserError(f"split '{command.split}' is unknown; choose one of {', '.join(SPLITS)}")
    if command.until not in UNTIL:
        raise UserError(f"until '{command.until}' is unknown; choose one of {', '.join(UNTIL)}")
    if command.instructions not in INSTRUCTIONS:
        raise UserError(
            f"instructions '{command.instructions}' is unknown; choose one of {', '.join(INSTRUCTIONS)}"
        )
    if command.instructions == "mixed" and command.suite not in ("libero_object", *CUE_SUITES):
        raise UserError(
            f"instructions 'mixed' is for libero_object and cue tasks, not for {command.suite}; leave it out"
        )
    if command.memory is not None and not (command.latents and command.memory.is_file()):
        raise UserError(
            f"memory '{command.memory}' is not allowed; give a checkpoint of `aura train memory`, with --latents"
        )
    for name, low, high in (
        ("episodes", 1, 30_000),
        ("frames_every", 1, 1000),
        ("jobs", 0, 1024),
        ("seed", 0, MAX_SEED),
    ):
        value = getattr(command, name)
        if not low <= value <= high:
            raise UserError(f"{name} {value} is not allowed; it must be from {low} to {high}")
    if command.backbone not in BACKBONES or (command.backbone != "compact" and not command.latents):
        raise UserError(
            f"backbone '{command.backbone}' is not allowed; choose one of {', '.join(BACKBONES)}, the latter with --latents"
        )
    if command.policy is not None and command.backbone == "compact" and not command.policy.is_file():
        raise UserError(f"policy '{command.policy}' is no file; give a checkpoint of `aura train backbone`")
    tasks = numbers("tasks", command.tasks, SUITES[command.suite].tasks - 1)
    if not tasks:
        raise UserError("tasks '' is not allowed; name at least one, as 0,2,4-6")
    EpisodeConfig(suite=command.suite, task=tasks[0], image_size=command.image_size)
    return tasks
