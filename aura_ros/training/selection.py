"""Of rollouts: which episodes are held out, how often the others are drawn, which are alike, where their cue begins."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from aura_ros.sim.cues import BETWEEN, FLASH
from aura_ros.training.rollouts import RolloutData

# A tenth of the states, with all their episodes, is for validation.
VALIDATION_SHARE = 10


def held_out(line: dict[str, Any]) -> bool:
    """By the state: episodes that share one, for they differ in the cue alone, are all held out or none is."""
    state = f"{line.get('suite')} {line.get('task')} {line.get('fixture_seed', line.get('id'))}"
    return zlib.crc32(state.encode()) % VALIDATION_SHARE == 0


def alike(data: RolloutData, held: Any) -> list[npt.NDArray[np.int64]]:
    """For each episode, those that are trained on and have its task and cue."""
    kinds = [(line.get("suite"), line.get("task"), line.get("cue")) for line in data.lines]
    groups: dict[Any, list[int]] = {}
    for episode, kind in enumerate(kinds):
        if not held[episode]:
            groups.setdefault(kind, []).append(episode)
    return [np.array(groups.get(kind, [episode])) for episode, kind in enumerate(kinds)]


def before_cue(line: dict[str, Any], head: dict[str, Any]) -> int:
    """Queries before the first that may see the cue."""
    cue = line.get("cue_steps") or [0, 0]
    # There another flash tells too, and comes before the one that is noted.
    first = cue[0] - (FLASH + BETWEEN[1] if line.get("suite") == "cue_order" else 0)
    return max(0, first // int(head["memory_step_period"]))


def episode_weights(data: RolloutData, held: Any) -> Any:
    """How often an episode is drawn: every suite as often as any other, those held out never."""
    suites = np.array([str(line.get("suite", "")) for line in data.lines])
    weights = np.array([0.0 if h else 1.0 for h in held])
    for suite in set(suites):
        weights[suites == suite] /= max(weights[suites == suite].sum(), 1e-12)
    return weights / weights.sum()


def cue_queries(line: dict[str, Any], head: dict[str, Any]) -> list[int]:
    """Queries at which the cue is lit; none without a cue."""
    start, stop = line.get("cue_steps") or (0, 0)
    period = int(head["memory_step_period"])
    return list(range(-(-start // period), -(-stop // period)))
