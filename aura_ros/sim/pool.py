"""One LIBERO environment a process, kept from episode to episode: building one takes seconds and gigabytes."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from aura_ros.sim.libero import LiberoEnv
from aura_ros.sim.suites import EPISODE, EpisodeConfig

DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(EpisodeConfig)}

_kept: dict[EpisodeConfig, LiberoEnv] = {}


def environment(config: EpisodeConfig) -> LiberoEnv:
    """The environment of a configuration, not reset yet: that of the call before where only the episode differs.

    Raises as `LiberoEnv` does.
    """
    os.environ.setdefault("MUJOCO_GL", "osmesa")
    # A software renderer that starts threads of its own is slower where every core has a process.
    os.environ.setdefault("LP_NUM_THREADS", "1")
    wanted = dataclasses.replace(config, **{name: DEFAULTS[name] for name in EPISODE})
    if wanted not in _kept:
        for env in _kept.values():
            env.close()
        _kept.clear()
        _kept[wanted] = LiberoEnv(wanted)
    return _kept[wanted]
