"""Roll one episode out for a memory: the frozen backbone looks on, and the scripted expert says what is right."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aura_ros.memory.config import UNTRAINED
from aura_ros.sim.cues import CHUNK
from aura_ros.sim.libero import CONTROL_PERIOD_NS, JOINT_NAMES, LiberoEnv, proprio
from aura_ros.sim.suites import EpisodeConfig, EpisodeVoidError
from aura_ros.training.collection import TRAINED_STATES, model_rows
from aura_ros.training.demo_bags import Recording, write_recording
from aura_ros.training.demonstrations import FORMAT
from aura_ros.training.rollouts import RolloutFolder, index_rollout, save_rollout
from aura_ros.types import LIBERO_ACTION_SPEC, Observation

if TYPE_CHECKING:
    from aura_ros.policy import Policy

STREAM = 71_994
# Steps after the hold: a policy that is lost for longer teaches little.
MOST_STEPS = 160
# Share of the chunks that the expert's plan is executed of; the others are the policy's, from where it must go on.
LED = 0.7


@dataclass(frozen=True)
class RolloutJob:
    """One episode. policy: checkpoint of the backbone. memory: of the memory that drives with it; "": the expert leads.

    backbone, device: as in `load_policy`. delays: shortest and longest delay of cue tasks. Other fields as in `CollectJob`.
    """

    folder: str
    suite: str
    task: int
    number: int
    displaced: bool
    policy: str
    policy_hash: str
    memory: str = ""
    memory_hash: str = ""
    delays: tuple[int, int] = (20, 80)
    image_size: int = 256
    seed: int = 0
    backbone: str = "compact"
    device: str = "cpu"

    @property
    def key(self) -> str:
        """Unique in a folder."""
        split = "displaced" if self.displaced else "official"
        driver = f"memory{self.memory_hash[:8]}" if self.memory else "led"
        return f"{self.suite}-t{self.task}-{split}-{driver}-s{self.seed}-n{self.number}"

    @property
    def episode(self) -> EpisodeConfig:
        """Both cues of a state follow one another, the same but for the cue. Raises UserError."""
        config = EpisodeConfig(suite=self.suite, task=self.task, image_size=self.image_size)
        place = self.number // 2 if config.has_cue else self.number
        fixtures = self.seed * 100_000 + place
        low, high = self.delays
        delay = int(np.random.default_rng([STREAM, self.task, fixtures]).integers(low, high + 1))
        return dataclasses.replace(
            config,
            init_state=place % TRAINED_STATES,
            seed=fixtures,
            displaced=fixtures + 1 if self.displaced else 0,
            cue=self.number % 2 if config.has_cue else 0,
            delay=delay if config.has_cue else config.delay,
        )


def shared(backbone: str, hidden_dim: int, memory_step_period: int) -> dict[str, Any]:
    """What all episodes of a folder have in common, and those of folders that are trained on together."""
    spec = LIBERO_ACTION_SPEC
    return {
        "format": FORMAT,
        "backbone": backbone,
        "hidden_dim": hidden_dim,
        "memory_step_period": memory_step_period,
        "horizon": spec.horizon,
        "period_s": spec.period_s,
        "action_names": list(spec.names),
    }


def head(policy_hash: str, hidden_dim: int, delays: tuple[int, int], image_size: int) -> dict[str, Any]:
    """What all simulated episodes of a folder share."""
    return {
        **shared(policy_hash, hidden_dim, LIBERO_ACTION_SPEC.horizon),
        "delays": list(delays),
        "camera_pixels": image_size,
        "held_out_states": f"{TRAINED_STATES}-49",
    }


def roll(job: RolloutJob) -> dict[str, Any]:
    """Run one episode and keep it; what a worker does. Returns its line."""
    from aura_ros.sim.pool import environment

    config = job.episode
    env = environment(config)
    names = ("suite", "task", "seed", "policy_hash", "memory_hash")
    line: dict[str, Any] = {
        "key": job.key,
        "id": job.key,
        **{name: getattr(job, name) for name in names},
        "init_state": config.init_state,
        "fixture_seed": config.seed,
        "displaced": config.displaced,
        "cue": config.cue,
        "delay": config.delay if config.has_cue else 0,
    }
    try:
        return {**line, **_roll(job, env, config)}
    except EpisodeVoidError as error:
        return {**line, "success": False, "steps": 0, "frames": 0, "problem": str(error)}


def _roll(job: RolloutJob, env: LiberoEnv, config: EpisodeConfig) -> dict[str, Any]:
    from aura_ros.policy.policy import ActionRejected
    from aura_ros.sim.actions import chunk_row_to_env
    from aura_ros.sim.relabel import relabel
    from aura_ros.sim.scene import SceneReader

    policy = _policy(job)
    env.begin(config)
    policy.reset()
    reader = SceneReader(env)
    rng = np.random.default_rng([STREAM, job.seed, job.task, job.number])
    recording = Recording(env.instruction, JOINT_NAMES)
    schedule, horizon = env.hold.schedule, LIBERO_ACTION_SPEC.horizon
    assert schedule.held % CHUNK == 0
    done = success = False
    while not done and env.step_count < schedule.held + MOST_STEPS:
        stamp = env.step_count * CONTROL_PERIOD_NS
        seen = env.observe()
        images = {name: seen.images[name] for name in policy.backbone.info.cameras}
        try:
            step = policy.act(Observation(images, proprio(seen), env.instruction))
            recording.latents[stamp] = (step.hidden_state, step.base_chunk)
            rows = [chunk_row_to_env(row) for row in step.chunk.data]
        except ActionRejected as rejected:
            recording.latents[stamp] = (rejected.hidden_state, rejected.base_chunk)
            # In the hold nothing is executed; later nothing of it may be, and what is right is all that is left to ask.
            rows = [np.zeros(7)] * horizon if env.held else []
        if not env.held:
            plan = relabel(env, reader, horizon)
            recording.actions.append((stamp, model_rows(plan)))
            if not rows or (not job.memory and rng.random() < LED):
                rows = list(plan.astype(np.float64))
        for row in rows:
            outcome = env.step(row)
            done, success = outcome.done, outcome.success
            if done:
                break
    folder = RolloutFolder(job.folder)
    queries = keep(job.key, recording, folder)
    return {
        "instruction": env.instruction,
        "success": success,
        "steps": env.step_count,
        "held": schedule.held,
        "cue_steps": list(schedule.cue),
        "frames": queries,
    }


def keep(name: str, recording: Recording, folder: RolloutFolder) -> int:
    """Write bag and index; returns the queries in it. What is there of an episode that was cut off is replaced."""
    bag = folder.bags / name
    for leftover in (bag, bag.with_name(f"{name}.incomplete")):
        shutil.rmtree(leftover, ignore_errors=True)
    write_recording(bag, recording)
    rollout = index_rollout(bag)
    save_rollout(folder.index / f"{name}.npz", rollout)
    return len(rollout)


_loaded: dict[tuple[str, str], Policy] = {}


def _policy(job: RolloutJob) -> Policy:
    """Loaded once a process."""
    from aura_ros.policy import load_policy

    name = (job.policy, job.memory)
    if name not in _loaded:
        _loaded.clear()
        _loaded[name] = load_policy(
            backbone=job.backbone,
            checkpoint=Path(job.policy),
            device=job.device,
            memory_checkpoint=job.memory or UNTRAINED,
        )
    return _loaded[name]


def jobs(template: RolloutJob, tasks: Sequence[int], numbers: range, split: str) -> list[RolloutJob]:
    """Episodes of some tasks; with split "mixed" every second state is displaced."""
    pairs = 2 if template.episode.has_cue else 1
    return [
        dataclasses.replace(
            template,
            task=task,
            number=number,
            displaced=split == "displaced" or (split == "mixed" and number // pairs % 2 == 1),
        )
        for task in tasks
        for number in numbers
    ]
