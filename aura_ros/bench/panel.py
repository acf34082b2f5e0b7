"""The panel: what each arm does from the very same moment of an episode on, on tasks that need a memory and on others.

The hold of a cue task does not depend on the arm, so its frames are seen once, each arm's memory is stepped over their
hidden states, and the simulation is put back to the decision for each. Both cues of a state share their frames but for
those in which different objects are lit.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from zlib import crc32

import numpy as np

from aura_ros.bench.arms import WITHOUT, ForcedMemory, Remembered, arm_file, follow, load_arm, note
from aura_ros.bench.evaluation import JUDGED
from aura_ros.bench.parallel import Result
from aura_ros.sim.cues import Schedule, cue_task
from aura_ros.sim.suites import EpisodeConfig, EpisodeVoidError
from aura_ros.training.holding import Moment, act_from, hold, observation
from aura_ros.types import FloatArray

if TYPE_CHECKING:
    from aura_ros.backbones.base import Backbone
    from aura_ros.memory import NumpyMemory
    from aura_ros.sim.libero import LiberoEnv


@dataclass(frozen=True)
class PanelJob:
    """All arms and both cues of one moment. Fields as in `EpisodeConfig`, but `displaced` only says whether.

    arms: in any order. memories: folder of their weights. checkpoint: of the backbone. identities: of each arm, what tells
    its results from those of other weights. delay: of cue tasks. record: folder for bags of aura's episodes; "": none.
    """

    suite: str
    task: int
    init_state: int
    seed: int
    delay: int
    displaced: bool
    arms: tuple[str, ...]
    memories: str
    checkpoint: str
    backbone: str = "compact"
    device: str = "cpu"
    image_size: int = 256
    identities: tuple[tuple[str, str], ...] = ()
    record: str = ""

    @property
    def key(self) -> str:
        """Unique among jobs."""
        split = "displaced" if self.displaced else "official"
        return f"{self.suite}-t{self.task}-{split}-d{self.delay}-i{self.init_state}-s{self.seed}"

    def episode(self, cue: int = 0) -> EpisodeConfig:
        """Raises UserError for what is out of range."""
        config = EpisodeConfig(
            suite=self.suite,
            task=self.task,
            init_state=self.init_state,
            seed=self.seed,
            displaced=JUDGED + self.seed if self.displaced else 0,
            image_size=self.image_size,
        )
        return dataclasses.replace(config, cue=cue, delay=self.delay) if config.has_cue else config

    def line_key(self, cue: int, arm: str) -> str:
        """Unique among episodes."""
        return f"{self.key}-c{cue}-{arm}"

    def identity(self, arm: str) -> str:
        """Of the backbone and the arm's memory."""
        return dict(self.identities).get(arm, "")

    @property
    def cues(self) -> tuple[int, ...]:
        """Both, of a cue task."""
        return (0, 1) if self.episode().has_cue else (0,)


def play(job: PanelJob) -> Result:
    """All episodes of a job; what a worker does."""
    from aura_ros.sim.pool import environment

    env = environment(job.episode())
    try:
        backbone = _backbone(job)
        moment = hold(env, [job.episode(cue) for cue in job.cues], backbone)
        lines = []
        for cue in job.cues:
            counted: dict[str, Remembered] = {}
            # first-k writes as often as aura did.
            for arm in sorted(job.arms, key=lambda arm: arm != "aura"):
                lines.append(_play(env, job, backbone, moment, cue, arm, counted))
    except EpisodeVoidError as error:
        return {"key": job.key, "episodes": [], "problem": str(error)}
    return {"key": job.key, "episodes": lines, "problem": ""}


def _play(
    env: LiberoEnv,
    job: PanelJob,
    backbone: Backbone,
    moment: Moment,
    cue: int,
    arm: str,
    counted: dict[str, Remembered],
) -> Result:
    """One arm's episode from the moment on."""
    from aura_ros.memory import NumpyMemory
    from aura_ros.policy import Policy
    from aura_ros.policy.policy import ActionRejected
    from aura_ros.policy.units import to_controller
    from aura_ros.sim.actions import chunk_row_to_env

    config = job.episode(cue)
    named = arm == "oracle" and config.has_cue
    act_from(env, moment, dataclasses.replace(config, named=True) if named else config, cue)
    memory = _memory(job, backbone, arm, counted)
    if isinstance(memory, NumpyMemory):
        # The schedule of `random_write` is this episode's, whatever this process has played before.
        memory.episode = crc32(job.line_key(cue, arm).encode())
    # What the other cue left behind, as if it were this one's.
    done = follow(memory, moment.hidden[1 - cue if arm == "swap" and len(moment.hidden) > 1 else cue])
    if arm == "zero":
        memory.reset()
    counted[arm] = done
    # Arms have all that a policy asks of a memory; only a node asks for more.
    policy = Policy(backbone, cast("NumpyMemory", memory))
    over = success = wrong = False
    problem = ""
    taken: list[float] = []
    kept = [*zip(moment.hidden[cue], moment.base[cue], strict=True)] if job.record and arm == "aura" else None
    first, period = env.step_count, backbone.info.action.horizon
    while not over:
        seen = observation(env, backbone)
        begin = time.perf_counter()
        try:
            step = policy.act(seen)
        except ActionRejected as rejected:
            # Nothing of it may be executed: a failure of the policy, not of the panel.
            note(done, rejected.memory_step)
            problem = str(rejected)
            break
        taken.append(1e3 * (time.perf_counter() - begin))
        note(done, step.memory_step)
        if kept is not None:
            kept.append((step.hidden_state, to_controller(step.chunk.data, step.chunk.spec)))
        for row in step.chunk.data:
            outcome = env.step(chunk_row_to_env(row))
            success = outcome.success
            wrong = not success and _other_reached(env, config)
            over = outcome.done or wrong
            if over:
                break
    if kept is not None:
        _record(Path(job.record) / job.line_key(cue, arm), env.instruction, kept, period)
    without = arm in WITHOUT
    fired = [] if without else [period * q for q, wrote in enumerate(done.fired) if wrote]
    active = _active(moment.schedules[cue], len(done.fired), period)
    return {
        "key": job.line_key(cue, arm),
        "task": f"{job.suite}_{job.task}",
        "delay": job.delay if config.has_cue else 0,
        "arm": arm,
        "init_state": job.init_state,
        "seed": job.seed,
        "displaced": job.displaced,
        "cue": cue,
        "success": success,
        "wrong": wrong,
        "steps": env.step_count,
        "held": first,
        "cue_steps": list(moment.schedules[cue].cue),
        "queries": len(done.fired),
        "queries_active": int(active.sum()),
        "writes": 0 if without else done.writes,
        "writes_active": 0 if without else int(np.sum(np.array(done.fired, bool) & active)),
        "state_bytes_first": 0 if without else done.bytes_first,
        "state_bytes_last": 0 if without else done.bytes_last,
        "fired_steps": fired,
        # The first query of a process warms up.
        "ms_per_query": float(np.median(taken)) if taken else 0.0,
        "problem": problem,
        "identity": job.identity(arm),
    }


def _record(path: Path, instruction: str, kept: list[tuple[FloatArray, FloatArray]], period: int) -> None:
    """A bag with `latent` and `action_chunk`: in the hold what the backbone would have done, then what the policy did."""
    import shutil

    from aura_ros.training.demo_bags import Recording, write_recording
    from aura_ros.types import LIBERO_ACTION_SPEC

    step_ns = round(period * LIBERO_ACTION_SPEC.period_s * 1e9)
    recording = Recording(instruction, (), chunk_topic="action_chunk")
    recording.latents = {query * step_ns: pair for query, pair in enumerate(kept)}
    for leftover in (path, path.with_name(f"{path.name}.incomplete")):
        shutil.rmtree(leftover, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_recording(path, recording)


def _active(shown: Schedule, queries: int, period: int) -> np.ndarray[Any, Any]:
    """Queries at which something was lit or the policy acted, bool [queries]: the others are idle, whatever the arm did."""
    steps = period * np.arange(queries)
    return np.array([step >= shown.held or bool(shown.lit(int(step))) for step in steps], bool)


def _other_reached(env: LiberoEnv, config: EpisodeConfig) -> bool:
    """Whether the other candidate's goal holds."""
    if not config.has_cue:
        return False
    return bool(env.domain._eval_predicate(list(cue_task(config).candidates[1 - config.cue].goal)))


_backbones: dict[tuple[str, ...], Backbone] = {}
_memories: dict[str, Any] = {}


def _backbone(job: PanelJob) -> Backbone:
    """Loaded once a process."""
    import torch

    from aura_ros.backbones.registry import load_backbone

    name = (job.backbone, job.checkpoint, job.device)
    if name not in _backbones:
        _backbones.clear()
        torch.set_num_threads(1)
        _backbones[name] = load_backbone(job.backbone, job.checkpoint or None, device=job.device)
    return _backbones[name]


def _memory(job: PanelJob, backbone: Backbone, arm: str, counted: dict[str, Remembered]) -> Any:
    """An arm's memory; its state is the last episode's."""
    from aura_ros.policy import load_memory

    if arm in WITHOUT:
        # Untrained, its residual is exactly zero.
        return load_memory(backbone.info)
    path = str(arm_file(Path(job.memories), arm))
    if path not in _memories:
        _memories[path] = load_arm(Path(path))
    memory = _memories[path]
    if arm == "first-k":
        # As many as aura writes in this episode, all at its start.
        writes = counted["aura"].writes
        force: Callable[[int], bool] = lambda step: step < writes  # noqa: E731 (named for what it is)
        return ForcedMemory(memory, force)
    return memory
