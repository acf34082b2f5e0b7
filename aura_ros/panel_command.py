"""`aura panel`: what a gated memory does in closed loop, beside what it is compared with, on tasks that need one."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from aura_ros.backbones.registry import BACKBONES
from aura_ros.errors import UserError
from aura_ros.eval_command import FIRST_SEED, identity
from aura_ros.panel_base import verify_base
from aura_ros.preflight import check_json
from aura_ros.share import share_directory
from aura_ros.sim.suites import CUE_SUITES, LONGEST_DELAY, SHORTEST_DELAY, SUITES
from aura_ros.states import numbers

if TYPE_CHECKING:
    from aura_ros.bench.panel import PanelJob

DEFAULT_ARMS = "base,kv,window,aura,aura-always,first-k,random,periodic,oracle"
SPLITS = ("auto", "official", "displaced")
# Its goals are regions of the table, which do not move with the plate that they are named after.
OFFICIAL = "cue_place"
ENGINES = ("processes", "ray")
# States 40-49 are in no demonstration and in no rollout.
FIRST_STATE, STATES = 40, 10
QUICK_EPISODES = 2


def _text(help_text: str, metavar: str) -> Any:
    return tyro.conf.arg(help=help_text, metavar=metavar)


@dataclasses.dataclass(frozen=True)
class Panel:
    """Run every arm from the same moments on: cue tasks, whose target was shown and is hidden, and standard ones.

    Interrupted or killed, the same command goes on from OUT.
    """

    arms: Annotated[str, _text("comma separated; swap and zero too", "LIST")] = DEFAULT_ARMS
    episodes: Annotated[int, _text("of each suite, delay and arm", "INT")] = 60
    suites: Annotated[
        str, _text("cue_object, cue_place, cue_order, libero_object; comma separated", "LIST")
    ] = ",".join(CUE_SUITES)
    tasks: Annotated[str, _text("of each suite, as 0,2,4; empty: all of a cue suite", "LIST")] = ""
    delays: Annotated[str, _text("control steps from cue to decision, comma separated", "LIST")] = "80"
    split: Annotated[
        str,
        _text("official, displaced: the states' objects moved, or auto: displaced but for cue_place", "NAME"),
    ] = "auto"
    checkpoint: Annotated[Path | None, _text("of the backbone; none: the one that is shipped", "CKPT")] = None
    memories: Annotated[
        Path | None, _text("folder of ARM.safetensors; none: those that are shipped", "DIR")
    ] = None
    backbone: Annotated[str, _text("compact or openvla_oft", "NAME")] = "compact"
    device: Annotated[str, _text("cpu, cuda or cuda:<n>", "NAME")] = "cpu"
    image_size: Annotated[int, _text("pixels of both cameras", "INT")] = 256
    verify_suite: Annotated[
        str, _text("openvla_oft: where the base's success is compared with the published one first", "NAME")
    ] = "libero_10"
    verify_states: Annotated[int, _text("openvla_oft: of each of its tasks; the protocol has 50", "INT")] = 50
    quick: Annotated[
        bool, tyro.conf.FlagCreatePairsOff, _text("two episodes an arm of one suite: does it run?", "")
    ] = False
    engine: Annotated[str, _text("processes of this machine, or ray: RAY_ADDRESS's cluster", "NAME")] = (
        "processes"
    )
    jobs: Annotated[int, _text("processes; 0: one for each core", "INT")] = 0
    out: Annotated[Path, _text("a line an episode, and what to go on from", "PATH")] = Path("panel.jsonl")
    record: Annotated[
        Path | None,
        _text("keep hidden states and chunks of aura's episodes as bags, for aura certify", "DIR"),
    ] = None
    json: Annotated[Path | None, _text("write all results to this file", "PATH")] = None


def run_panel(command: Panel) -> int:
    """Run `aura panel`; returns the exit status. Raises UserError for what was given wrong."""
    from aura_ros.bench.panel import play
    from aura_ros.bench.panel_lines import PanelLines
    from aura_ros.bench.panel_table import HEADER, PAPER, rows, verdicts
    from aura_ros.bench.parallel import run_jobs
    from aura_ros.bench.recall.clock import progress
    from aura_ros.bench.recall.table import line
    from aura_ros.files import write_json

    if command.quick:
        command = dataclasses.replace(command, episodes=QUICK_EPISODES, suites="cue_place", tasks="")
    jobs = plan(command)
    if command.backbone == "openvla_oft":
        verify_base(command)
    with progress("panel", len(jobs)) as shown:
        lines = PanelLines(command.out, shown.say)
        todo = [job for job in (lines.missing(job) for job in jobs) if job is not None]

        def report(done: int, result: dict[str, Any]) -> None:
            good = sum(episode["success"] for episode in result["episodes"])
            said = result["problem"] or f"{good} of {len(result['episodes'])} succeeded"
            shown.item(len(jobs) - len(todo) + done, f"{result['key']}: {said}")

        found = run_jobs(
            play,
            todo,
            workers=command.jobs,
            lines=lines,
            report=report,
            warn=shown.say,
            engine=command.engine,
        )
    episodes = lines.of(jobs)
    out = sys.stdout.write
    out("\n".join(line(row) for row in [HEADER, ("---",) * len(HEADER), *rows(episodes)]) + "\n\n")
    out("".join(f"{said}\n" for said in verdicts(episodes)))
    out(
        "\nthe paper's panel (arXiv 2606.02775, table 4, figure 9; LIBERO-Long, OpenVLA-OFT 7B, 60 episodes an arm): "
    )
    out("; ".join(f"{arm} {said}" for arm, said in PAPER.items()) + "\n")
    if command.json is not None:
        write_json(command.json, episodes)
    void = [result for result in found if result["problem"]]
    if void:
        sys.stderr.write(
            f"{len(void)} moments are void and not counted: {void[0]['key']}: {void[0]['problem']}\n"
        )
    return 0 if episodes else 1


def plan(command: Panel) -> list[PanelJob]:
    """All moments. Raises UserError before anything slow is done."""
    from zlib import crc32

    from aura_ros.bench.arms import WITHOUT, arm_file, load_arm
    from aura_ros.bench.panel import PanelJob

    arms, suites, delays = check(command)
    if command.memories is None and command.backbone != "compact" and not set(arms) <= set(WITHOUT):
        raise UserError(
            f"memories is not given: the shipped ones are not of backbone '{command.backbone}'; give --memories DIR, filled "
            "by `aura train memory --arm ARM`"
        )
    memories = (command.memories or share_directory() / "checkpoints" / "memories").resolve()
    given = command.checkpoint
    # A hub snapshot's name is no path.
    checkpoint = str(given.resolve() if given.exists() else given) if given else ""
    backbone = identity(command.backbone, checkpoint)
    known = {}
    for arm in arms:
        if arm in WITHOUT:
            known[arm] = f"{backbone[:16]}-{command.image_size}"
            continue
        path = arm_file(memories, arm)
        trained_on = load_arm(path).config.backbone
        # Of a folder the hash is known once it is loaded; the policy compares it then.
        if command.backbone == "compact" and trained_on and trained_on != backbone:
            raise UserError(
                f"'{path}' was trained on backbone {trained_on[:12]}, the checkpoint is {backbone[:12]}; give the "
                "memories of this backbone"
            )
        known[arm] = f"{backbone[:16]}-{command.image_size}-{crc32(path.read_bytes()):08x}"
    jobs = []
    for suite in suites:
        has_cue = suite in CUE_SUITES
        tasks = numbers("tasks", command.tasks, SUITES[suite].tasks - 1) if command.tasks else _all(suite)
        # Both cues of a moment are episodes of their own.
        moments = -(-command.episodes // (2 if has_cue else 1))
        if command.split == "official" and not has_cue and moments > len(tasks) * STATES:
            # Another fixture seed would give the very same episode again.
            raise UserError(
                f"episodes {command.episodes} is not allowed: {suite} has {len(tasks) * STATES} different held-out episodes "
                "of these tasks; give at most as many, or --split displaced"
            )
        for delay in delays if has_cue else [0]:
            jobs += [
                PanelJob(
                    suite,
                    tasks[number % len(tasks)],
                    FIRST_STATE + number // len(tasks) % STATES,
                    FIRST_SEED + number // len(tasks) // STATES,
                    delay,
                    command.split == "displaced" or (command.split == "auto" and suite != OFFICIAL),
                    tuple(arms),
                    str(memories),
                    checkpoint,
                    command.backbone,
                    command.device,
                    command.image_size,
                    tuple(known.items()),
                    str(command.record.resolve()) if command.record else "",
                )
                for number in range(moments)
            ]
    return jobs


def _all(suite: str) -> list[int]:
    """The tasks that a suite's arms run on: all of a cue suite, and those that the shipped policy learned."""
    return list(range(SUITES[suite].tasks)) if suite in CUE_SUITES else [0, 2, 4, 8]


def check(command: Panel) -> tuple[list[str], list[str], list[int]]:
    """Arms, suites and delays. Raises UserError for what is out of range or does not go together."""
    from aura_ros.bench.arms import ARMS

    arms = [arm.strip() for arm in command.arms.split(",") if arm.strip()]
    suites = [suite.strip() for suite in command.suites.split(",") if suite.strip()]
    for name, given, allowed in (("arms", arms, ARMS), ("suites", suites, tuple(SUITES))):
        if not given or len(set(given)) != len(given):
            raise UserError(
                f"{name} '{getattr(command, name)}' is not allowed; name each once, and at least one"
            )
        for one in given:
            if one not in allowed:
                raise UserError(f"{name}: '{one}' is unknown; choose from {', '.join(allowed)}")
    if "first-k" in arms and "aura" not in arms:
        raise UserError(
            "arm 'first-k' writes as often as aura does in the same episode; add aura to the arms"
        )
    if command.backbone != "compact" and command.checkpoint is None:
        raise UserError(f"backbone '{command.backbone}' has no checkpoint of its own; give --checkpoint DIR")
    if command.backbone not in BACKBONES:
        raise UserError(f"backbone '{command.backbone}' is unknown; choose one of {', '.join(BACKBONES)}")
    if command.split not in SPLITS:
        raise UserError(f"split '{command.split}' is unknown; choose one of {', '.join(SPLITS)}")
    if command.engine not in ENGINES:
        raise UserError(f"engine '{command.engine}' is unknown; choose one of {', '.join(ENGINES)}")
    for name, low, high in (("episodes", 1, 100_000), ("jobs", 0, 1024)):
        if not low <= getattr(command, name) <= high:
            raise UserError(
                f"{name} {getattr(command, name)} is not allowed; it must be from {low} to {high}"
            )
    delays = [int(part) if part.strip().isdecimal() else -1 for part in command.delays.split(",")]
    if len(set(delays)) != len(delays):
        raise UserError(f"delays '{command.delays}' is not allowed; name each once")
    for delay in delays:
        if not SHORTEST_DELAY <= delay <= LONGEST_DELAY:
            raise UserError(
                f"delays '{command.delays}' is not allowed; give whole numbers from {SHORTEST_DELAY} to {LONGEST_DELAY}"
            )
    if command.json is not None:
        check_json(command.json)
    return arms, suites, delays
