"""`aura collect --latents`: rollouts of a frozen backbone with what was right, for `aura train memory`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aura_ros.errors import UserError
from aura_ros.sim.suites import LONGEST_DELAY, SHORTEST_DELAY

if TYPE_CHECKING:
    from aura_ros.collect_command import Collect


def run_rollouts(command: Collect, tasks: list[int]) -> int:
    """Roll out `command.episodes` episodes of each task; returns the exit status. Raises UserError."""
    from aura_ros.backbones.openvla_oft.checkpoint import read_head
    from aura_ros.backbones.registry import shipped_checkpoint
    from aura_ros.bench.parallel import Lines, run_jobs
    from aura_ros.bench.recall.clock import progress
    from aura_ros.training.demonstrations import LINES
    from aura_ros.training.rolling import RolloutJob, head, jobs, roll
    from aura_ros.training.rollouts import RolloutFolder

    policy = Path(command.policy or shipped_checkpoint()).resolve()
    backbone = read_head(policy)
    policy_hash = str(backbone.recorded_sha256)
    hidden_dim = backbone.config.language.hidden
    delays = delays_of(command.delays)
    memory, memory_hash = "", ""
    if command.memory is not None:
        from aura_ros.memory import NumpyMemory

        memory, memory_hash = str(command.memory.resolve()), NumpyMemory.load(command.memory).weights_hash
    template = RolloutJob(
        str(command.out),
        command.suite,
        tasks[0],
        0,
        False,
        str(policy),
        policy_hash,
        memory,
        memory_hash,
        delays,
        command.image_size,
        command.seed,
    )
    folder = RolloutFolder(command.out)
    folder.prepare(head(policy_hash, hidden_dim, delays))
    todo = jobs(template, tasks, range(command.episodes), command.split)
    begun, run, succeeded = time.monotonic(), 0, 0
    with progress("rolling out", len(todo)) as shown:
        lines = Lines(folder.folder / LINES, shown.say)
        folder.forget_lost(lines.results)

        def report(done: int, line: dict[str, Any]) -> None:
            nonlocal run
            run += 1
            said = line.get("problem", "success" if line["success"] else "no success")
            shown.item(done, f"{line['key']}: {line['steps']} steps, {said}")

        found = run_jobs(roll, todo, workers=command.jobs, lines=lines, report=report, warn=shown.say)
    succeeded = sum(bool(line["success"]) for line in found)
    sys.stdout.write(f"{len(found)} rollouts, {succeeded} ended in success\n")
    if run:
        seconds = time.monotonic() - begun
        sys.stdout.write(f"{run} episodes in {seconds / 60:.1f} min, {run / seconds:.2f}/s\n")
    return 0


def delays_of(text: str) -> tuple[int, int]:
    """Shortest and longest delay, as 20-80 or 40. Raises UserError."""
    parts = text.split("-")
    if not all(part.isdecimal() for part in parts) or len(parts) > 2:
        raise UserError(f"delays '{text}' is not allowed; give control steps as 20-80 or 40")
    low, high = int(parts[0]), int(parts[-1])
    if not SHORTEST_DELAY <= low <= high <= LONGEST_DELAY:
        raise UserError(
            f"delays '{text}' is not allowed; give {SHORTEST_DELAY} to {LONGEST_DELAY} control steps, the shortest first"
        )
    return low, high
