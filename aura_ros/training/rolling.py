"""Roll episodes out for a memory: the frozen backbone looks on, and the scripted expert says what is right."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aura_ros.memory.config import UNTRAINED
from aura_ros.sim.libero import CONTROL_PERIOD_NS, JOINT_NAMES, LiberoEnv
from aura_ros.sim.suites import EpisodeConfig, EpisodeVoidError
from aura_ros.training.collection import TRAINED_STATES, model_rows
from aura_ros.training.demo_bags import Recording, write_recording
from aura_ros.training.demonstrations import FORMAT
from aura_ros.training.holding import Moment, act_from, hold, observation
from aura_ros.training.rollouts import RolloutFolder, index_rollout, save_rollout
from aura_ros.types import LIBERO_ACTION_SPEC

if TYPE_CHECKING:
    from aura_ros.policy import Policy

STREAM = 71_994
# Steps after the hold: a policy that is lost for longer teaches little.
MOST_STEPS = 160
# Share of the chunks that the expert's plan is executed of; the others are the policy's, from where it must go on.
LED = 0.7


@dataclass(frozen=True)
class RolloutJob:
    """The episodes of one state: one, or in a cue task one for each cue.

    policy: checkpoint of the backbone. memory: of the memory that drives with it; "": the expert leads.

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
    def cues(self) -> tuple[int, ...]:
        """Both, of a cue task."""
        return (0, 1) if EpisodeConfig(suite=self.suite, task=self.task).has_cue else (0,)

    def line_key(self, cue: int) -> str:
        """Unique among episodes."""
        return f"{self.key}-c{cue}" if len(self.cues) > 1 else self.key

    def episode(self, cue: int = 0) -> EpisodeConfig:
        """The same for both cues but for the cue. Raises UserError."""
        config = EpisodeConfig(suite=self.suite, task=self.task, image_size=self.image_size)
        fixtures = self.seed * 100_000 + self.number
        low, high = self.delays
        delay = int(np.random.default_rng([STREAM, self.task, fixtures]).integers(low, high + 1))
        return dataclasses.replace(
            config,
            init_state=self.number % TRAINED_STATES,
            seed=fixtures,
            displaced=fixtures + 1 if self.displaced else 0,
            cue=cue,
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
    """Run a state's episodes and keep them; what a worker does. Returns their lines."""
    from aura_ros.sim.pool import environment

    env, policy = environment(job.episode()), _policy(job)
    try:
        moment = hold(env, [job.episode(cue) for cue in job.cues], policy.backbone)
    except EpisodeVoidError as error:
        nothing = {"success": False, "steps": 0, "frames": 0, "problem": str(error)}
        return {"key": job.key, "episodes": [{**_line(job, cue), **nothing} for cue in job.cues]}
    return {"key": job.key, "episodes": [_roll(job, env, policy, moment, cue) for cue in job.cues]}


def _line(job: RolloutJob, cue: int) -> dict[str, Any]:
    """What is known of an episode before it is run."""
    config = job.episode(cue)
    names = ("suite", "task", "seed", "policy_hash", "memory_hash")
    return {
        "key": job.line_key(cue),
        "id": job.line_key(cue),
        **{name: getattr(job, name) for name in names},
        "init_state": config.init_state,
        "fixture_seed": config.seed,
        "displaced": config.displaced,
        "cue": cue,
        "delay": config.delay if config.has_cue else 0,
    }


def _roll(job: RolloutJob, env: LiberoEnv, policy: Policy, moment: Moment, cue: int) -> dict[str, Any]:
    """One episode from the decision on."""
    from aura_ros.policy.policy import ActionRejected
    from aura_ros.sim.actions import chunk_row_to_env
    from aura_ros.sim.relabel import relabel
    from aura_ros.sim.scene import SceneReader

    act_from(env, moment, job.episode(cue), cue)
    reader, rng = SceneReader(env), np.random.default_rng([STREAM, job.seed, job.task, job.number, cue])
    recording = Recording(env.instruction, JOINT_NAMES)
    schedule, horizon = moment.schedules[cue], LIBERO_ACTION_SPEC.horizon
    policy.reset()
    for query, (hidden, base) in enumerate(zip(moment.hidden[cue], moment.base[cue], strict=True)):
        policy.memory.step(hidden)
        recording.latents[query * horizon * CONTROL_PERIOD_NS] = (hidden, base)
    done = success = False
    while not done and env.step_count < schedule.held + MOST_STEPS:
        stamp = env.step_count * CONTROL_PERIOD_NS
        plan = relabel(env, reader, horizon)
        try:
            step = policy.act(observation(env, policy.backbone))
            recording.latents[stamp] = (step.hidden_state, step.base_chunk)
            rows = [chunk_row_to_env(row) for row in step.chunk.data]
        except ActionRejected as rejected:
            # Nothing of it may be executed: what is right is all that is left to do.
            recording.latents[stamp] = (rejected.hidden_state, rejected.base_chunk)
            rows = []
        recording.actions.append((stamp, model_rows(plan)))
        if not rows or (not job.memory and rng.random() < LED):
            rows = list(plan.astype(np.float64))
        try:
            for row in rows:
                outcome = env.step(row)
                done, success = outcome.done, outcome.success
                if done:
                    break
        except EpisodeVoidError as error:
            return {**_line(job, cue), "success": False, "steps": 0, "frames": 0, "problem": str(error)}
    return {
        **_line(job, cue),
        "instruction": env.instruction,
        "success": success,
        "steps": env.step_count,
        "held": schedule.held,
        "cue_steps": list(schedule.cue),
        "frames": keep(job.line_key(cue), recording, RolloutFolder(job.folder)),
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


def jobs(template: RolloutJob, tasks: Sequence[int], states: range, split: str) -> list[RolloutJob]:
    """States of some tasks; with split "mixed" every second one is displaced."""
    return [
        dataclasses.replace(
            template,
            task=task,
            number=number,
            displaced=split == "displaced" or (split == "mixed" and number % 2 == 1),
        )
        for task in tasks
        for number in states
    ]
