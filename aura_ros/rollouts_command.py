"""`aura collect --latents`: rollouts of a frozen backbone with what was right, for `aura train memory`."""

from __future__ import annotations

import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aura_ros.errors import UserError
from aura_ros.sim.suites import LONGEST_DELAY, SHORTEST_DELAY

if TYPE_CHECKING:
    from aura_ros.collect_command import Collect


def run_rollouts(command: Collect, tasks: list[int]) -> int:
    """Roll out `command.episodes` episodes of each task; returns the exit status. Raises UserError."""
    from aura_ros.backbones.registry import shipped_checkpoint
    from aura_ros.bench.parallel import EpisodeLines, run_jobs
    from aura_ros.bench.recall.clock import progress
    from aura_ros.training.demonstrations import LINES
    from aura_ros.training.rolling import RolloutJob, head, jobs, roll
    from aura_ros.training.rollouts import RolloutFolder

    check_rollouts(command)
    policy = Path(command.policy or shipped_checkpoint()).resolve()
    policy_hash, hidden_dim = backbone_of(command, policy)
    delays = delays_of(command.delays)
    memory, memory_hash = "", ""
    if command.memory is not None:
        from aura_ros.memory import NumpyMemory

        driver = NumpyMemory.load(command.memory)
        if driver.config.backbone not in ("", policy_hash):
            raise UserError(
                f"memory '{command.memory}' was trained on backbone {driver.config.backbone[:12]}, the policy is "
                f"{policy_hash[:12]}; give that backbone, or a memory of this one"
            )
        memory, memory_hash = str(command.memory.resolve()), driver.weights_hash
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
        command.backbone,
        command.device,
    )
    folder = RolloutFolder(command.out)
    folder.prepare(head(policy_hash, hidden_dim, delays, command.image_size))
    # Both cues of a state are episodes of their own.
    states = range(-(-command.episodes // len(template.cues)))
    every = jobs(template, tasks, states, command.split)
    begun, run = time.monotonic(), 0
    with progress("rolling out", len(every)) as shown:
        lines = EpisodeLines(folder.folder / LINES, shown.say)
        folder.forget_lost(lines.results)
        todo = [job for job in every if any(job.line_key(cue) not in lines.results for cue in job.cues)]

        def report(done: int, result: dict[str, Any]) -> None:
            nonlocal run
            run += len(result["episodes"])
            said = [
                line.get("problem", "success" if line["success"] else "no success")
                for line in result["episodes"]
            ]
            shown.item(len(every) - len(todo) + done, f"{result['key']}: {', '.join(said)}")

        run_jobs(roll, todo, workers=command.jobs, lines=lines, report=report, warn=shown.say)
    found = [lines.results[job.line_key(cue)] for job in every for cue in job.cues]
    succeeded = sum(bool(line["success"]) for line in found)
    sys.stdout.write(f"{len(found)} rollouts, {succeeded} ended in success\n")
    if run:
        seconds = time.monotonic() - begun
        sys.stdout.write(f"{run} episodes in {seconds / 60:.1f} min, {run / seconds:.2f}/s\n")
    return 0


def index_rollouts(bags: list[Path], out: Path) -> int:
    """Index a policy's own bags as rollouts; returns the exit status. Raises UserError naming the bag."""
    from aura_ros.bench.parallel import Lines
    from aura_ros.bench.recall.clock import progress
    from aura_ros.training.demonstrations import LINES
    from aura_ros.training.rolling import shared
    from aura_ros.training.rollouts import RolloutFolder, index_rollout, policy_of, save_rollout

    folder = RolloutFolder(out)
    queries = 0
    with progress("indexing", len(bags)) as shown:
        for number, bag in enumerate(bags, start=1):
            # All of them are of one policy: the folder says which, and refuses another's.
            folder.prepare(shared(**policy_of(bag)))
            lines = Lines(folder.folder / LINES, shown.say)
            folder.forget_lost(lines.results)
            name = f"{bag.name}-{sha256(str(bag.resolve()).encode()).hexdigest()[:8]}"
            if name not in lines.results:
                rollout = index_rollout(bag)
                save_rollout(folder.index / f"{name}.npz", rollout)
                lines.append({"key": name, "id": name, "bag": str(bag.resolve()), "frames": len(rollout)})
            queries += lines.results[name]["frames"]
            shown.item(number, f"{bag}: {lines.results[name]['frames']} queries")
    sys.stdout.write(f"{out}: {len(bags)} rollouts, {queries:,} queries\n")
    return 0


def check_rollouts(command: Collect) -> None:
    """Raise UserError for options that rollouts do not have."""
    for name, plain in (("instructions", "own"), ("until", "end"), ("frames_every", 3)):
        if getattr(command, name) != plain:
            raise UserError(
                f"{name} is not for --latents: every query of the whole episode is kept; leave it out"
            )
    if command.backbone != "compact" and command.policy is None:
        raise UserError(f"backbone '{command.backbone}' has no checkpoint of its own; give --policy DIR")


def backbone_of(command: Collect, policy: Path) -> tuple[str, int]:
    """Hash of the backbone's weights, and width of its hidden state. Raises UserError."""
    if command.backbone == "compact":
        from aura_ros.backbones.openvla_oft.checkpoint import read_head

        head = read_head(policy)
        return str(head.recorded_sha256), head.config.language.hidden
    from aura_ros.backbones.registry import load_backbone

    # What a folder's weights are is known once they are read.
    loaded = load_backbone(command.backbone, policy, device=command.device)
    try:
        return loaded.info.checkpoint_hash, loaded.info.hidden_dim
    finally:
        loaded.close()


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
