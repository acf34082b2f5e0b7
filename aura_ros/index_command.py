"""`aura index`: bags of a robot's own demonstrations or rollouts, made ready for `aura train`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from aura_ros.errors import UserError
from aura_ros.rollouts_command import index_rollouts


def _text(help_text: str, metavar: str) -> Any:
    return tyro.conf.arg(help=help_text, metavar=metavar)


@dataclasses.dataclass(frozen=True)
class Index:
    """Index bags of a robot's own demonstrations, one episode each, as `aura train backbone` reads them.

    A bag has images/agentview/compressed, images/wrist/compressed, joint_states, ee_pose, action (ActionChunk) and
    instruction, in any namespace. With --latents, as `aura train memory` reads them: a bag has latent, action_chunk, info
    (PolicyInfo) and action. The bags stay where they are. Interrupted, the same command goes on.
    """

    bags: Annotated[list[Path], tyro.conf.Positional, _text("rosbag2 folders", "BAG ...")]
    out: Annotated[Path, _text("folder of demonstrations to make, or to add to", "DIR")]
    latents: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        _text("rollouts: hidden states (publish_latent) with what was right", ""),
    ] = False
    instruction: Annotated[str, _text("of all of them; empty: as each bag says", "TEXT")] = ""
    fingers: Annotated[str, _text("names of the two finger joints, separated by a comma", "NAMES")] = (
        "panda_finger_joint1,panda_finger_joint2"
    )
    jobs: Annotated[int, _text("processes; 0: one for each core", "INT")] = 0


def run_index(command: Index) -> int:
    """Run `aura index`; returns the exit status. Raises UserError for what was given wrong, naming the bag."""
    from aura_ros.bench.parallel import Lines, run_jobs
    from aura_ros.bench.recall.clock import progress
    from aura_ros.training.collection import head
    from aura_ros.training.demonstrations import LINES, DemoFolder
    from aura_ros.training.own_bags import IndexJob, index

    fingers = tuple(name.strip() for name in command.fingers.split(","))
    if len(fingers) != 2 or not all(fingers):
        raise UserError(
            f"fingers '{command.fingers}' is not allowed; give two joints, as left_finger,right_finger"
        )
    if not command.bags or not 0 <= command.jobs <= 1024:
        raise UserError("give at least one bag, and from 0 to 1024 jobs")
    missing = [bag for bag in command.bags if not bag.is_dir()]
    if missing:
        raise UserError(f"bag '{missing[0]}' is no folder; give rosbag2 folders, one for each episode")
    if command.latents:
        return index_rollouts(command.bags, command.out)
    # By their whole paths: bags of many sessions are called alike.
    jobs = [
        IndexJob(str(command.out), str(bag.resolve()), command.instruction, fingers) for bag in command.bags
    ]
    folder = DemoFolder(command.out)
    folder.prepare(head(0))
    with progress("indexing", len(jobs)) as shown:
        lines = Lines(folder.folder / LINES, shown.say)
        folder.forget_lost(lines.results)

        def report(done: int, line: dict[str, Any]) -> None:
            shown.item(done, f"{line['bag']}: {line['frames']} samples")

        found = run_jobs(index, jobs, workers=command.jobs, lines=lines, report=report, warn=shown.say)
    sys.stdout.write(
        f"{command.out}: {len(found)} demonstrations, {sum(line['frames'] for line in found):,} samples\n"
    )
    return 0
