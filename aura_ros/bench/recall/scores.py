"""Judge a trained memory on fixed episodes: accuracy, where it writes, and the floors of those very episodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from aura_ros.bench.recall.tasks import (
    EVALUATION_EPISODES,
    EVALUATION_SEED,
    evaluation_episodes,
    write_floors,
)
from aura_ros.memory.baselines import Baseline
from aura_ros.training.episodes import DISTRACTOR, EVENT, FILLER, QUERY, Task
from aura_ros.training.train import Memory, run_memory

# Steps of all episodes together: of those run at once, and of those judged at another length.
STEPS_AT_ONCE, STEPS_AT_LENGTH = 2**19, 2**20
FEWEST_EPISODES = 16


@dataclass(frozen=True)
class Scores:
    """On fixed episodes: accuracy on queries; write rates, hard, overall and by kind of step; the floors beside them."""

    accuracy: float
    write_rate: float
    event_rate: float
    distractor_rate: float
    filler_rate: float
    query_rate: float
    soft_event: float
    soft_distractor: float
    soft_query: float
    floor_events: float
    floor_skip: float
    floor_default: float

    @property
    def ratio(self) -> float:
        """How many times fewer writes than writing at every step."""
        return 1.0 / self.write_rate if self.write_rate else math.inf


@dataclass(frozen=True)
class LengthScores:
    """On `episodes` fixed episodes of `steps` steps; state_bytes: carried after them, batch 1, float32."""

    steps: int
    accuracy: float
    write_rate: float
    state_bytes: int
    episodes: int


def state_bytes(module: Memory, steps: int) -> int:
    """Bytes carried after so many steps, batch 1, float32."""
    return module.state_bytes(steps) if isinstance(module, Baseline) else module.initial_state(1).nbytes


def episodes_at(steps: int) -> int:
    """How many episodes of a length are judged: the usual number, fewer where they are long."""
    return max(FEWEST_EPISODES, min(EVALUATION_EPISODES, STEPS_AT_LENGTH // steps))


def evaluate_at(module: Memory, task: Task, steps: int) -> LengthScores:
    """Judge on a task of `steps` steps, longer or shorter than what was trained on."""
    count = episodes_at(steps)
    scores = evaluate(module, task, count)
    return LengthScores(steps, scores.accuracy, scores.write_rate, state_bytes(module, steps), count)


@torch.no_grad()
def evaluate(module: Memory, task: Task, count: int = 0, batch: int = 512) -> Scores:
    """Judge on fixed episodes, the same for every memory; count: how many, 0 for the usual number.

    batch: episodes at once, fewer where they are long.
    """
    count = count or EVALUATION_EPISODES
    episodes = evaluation_episodes(task, count)
    batch = min(batch, max(STEPS_AT_ONCE // episodes.kinds.shape[1], 1))
    module = module.eval()
    torch.manual_seed(EVALUATION_SEED)
    right = asked = 0
    fired, soft = [], []
    for start in range(0, count, batch):
        part = episodes.slice(slice(start, start + batch))
        inputs, targets = torch.from_numpy(part.observations), torch.from_numpy(part.targets)
        done = run_memory(module, inputs)
        on = targets >= 0
        logits, _, _ = module.head(done.reads[on])
        right += int((logits.argmax(-1) == targets[on]).sum())
        asked += int(on.sum())
        fired.append(done.fired.numpy())
        soft.append(done.soft.numpy())
    all_fired, all_soft = np.concatenate(fired), np.concatenate(soft)
    floors = write_floors(episodes)

    def rate(values: Any, kind: int) -> float:
        chosen = values[episodes.kinds == kind]
        return float(chosen.mean()) if chosen.size else 0.0

    return Scores(
        accuracy=right / asked,
        write_rate=float(all_fired.mean()),
        event_rate=rate(all_fired, EVENT),
        distractor_rate=rate(all_fired, DISTRACTOR),
        filler_rate=rate(all_fired, FILLER),
        query_rate=rate(all_fired, QUERY),
        soft_event=rate(all_soft, EVENT),
        soft_distractor=rate(all_soft, DISTRACTOR),
        soft_query=rate(all_soft, QUERY),
        floor_events=floors.events,
        floor_skip=floors.skip,
        floor_default=floors.default,
    )
