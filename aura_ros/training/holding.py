"""The hold of a cue task, seen once for both cues: nothing in it depends on what is asked of the arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aura_ros.sim.cues import Schedule, schedule
from aura_ros.sim.suites import EpisodeConfig
from aura_ros.types import BackboneOutput, FloatArray, Observation

if TYPE_CHECKING:
    from aura_ros.backbones.base import Backbone
    from aura_ros.sim.libero import LiberoEnv


@dataclass(frozen=True)
class Moment:
    """When the policy begins to act: the simulation, what was seen until then with each cue, and when what was lit.

    hidden, base: for each cue float32 [Q, hidden_dim], and the backbone's chunks [Q, horizon, D], which were not executed.
    """

    snapshot: Any
    hidden: tuple[FloatArray, ...]
    base: tuple[FloatArray, ...]
    schedules: tuple[Schedule, ...]


def hold(env: LiberoEnv, configs: Sequence[EpisodeConfig], backbone: Backbone) -> Moment:
    """Begin an episode and let its hold pass, if it has one. Raises as `LiberoEnv.begin` does.

    configs: the same but for the cue. Frames in which the same is lit with both cues are seen once.
    """
    from aura_ros.sim.relabel import save

    env.begin(configs[0])
    schedules = tuple(schedule(config) for config in configs)
    seen: list[list[BackboneOutput]] = [[] for _ in configs]
    spec = backbone.info.action
    while env.held:
        for cue, shown in enumerate(schedules):
            if cue and shown.lit(env.step_count) == schedules[0].lit(env.step_count):
                seen[cue].append(seen[0][-1])
                continue
            env.hold.schedule = shown
            seen[cue].append(backbone.infer(observation(env, backbone)))
        for _ in range(spec.horizon):
            env.step(np.zeros(7))
    shape = (-1, spec.horizon, spec.dim)
    hidden = tuple(
        np.array([o.hidden_state for o in rows], np.float32).reshape(-1, backbone.info.hidden_dim)
        for rows in seen
    )
    base = tuple(np.array([o.base_chunk for o in rows], np.float32).reshape(shape) for rows in seen)
    return Moment(save(env), hidden, base, schedules)


def act_from(env: LiberoEnv, moment: Moment, config: EpisodeConfig, cue: int) -> None:
    """Put the simulation back to the moment, with the instruction and the goal of `config`."""
    from aura_ros.sim.relabel import restore

    restore(env, moment.snapshot)
    env.want(config)
    env.hold.schedule = moment.schedules[cue]


def observation(env: LiberoEnv, backbone: Backbone) -> Observation:
    """What a policy sees now."""
    from aura_ros.sim.libero import proprio

    seen = env.observe()
    images = {camera: seen.images[camera] for camera in backbone.info.cameras}
    return Observation(images, proprio(seen), env.instruction)
