"""Cue tasks as a backbone is trained on: it must see what is lit, and must not act on it, for that is the memory's part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aura_ros.sim.cues import FLASH, GAP, Flash, Schedule, cue_task

if TYPE_CHECKING:
    from aura_ros.sim.libero import LiberoEnv

# Steps of the sweep that precede the expert at most, and between two flashes on average.
SWEPT, PAUSE = 48, 24


def practise(env: LiberoEnv, rng: np.random.Generator) -> None:
    """Put flashes at random, of any object that may light up, in place of an episode's own, and a short hold.

    What is lit says nothing of the target here, nor does the hold, which ends anywhere in a sweep.
    """
    task = cue_task(env.config)
    items = [*(candidate.shown_by for candidate in task.candidates), *task.distractors]
    held = int(rng.integers(0, SWEPT + 1))
    flashes, start = [], int(rng.integers(0, PAUSE))
    while start < env.max_steps:
        flashes.append(Flash(str(rng.choice(items)), start, start + FLASH))
        start += FLASH + GAP + int(rng.geometric(1 / PAUSE))
    env.hold.schedule = Schedule(held, tuple(flashes))
