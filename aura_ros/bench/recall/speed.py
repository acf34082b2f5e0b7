"""Gradient steps a second of the chunked scan and of the step-by-step loop, the same model, interleaved in one run."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from aura_ros.memory.config import MemoryConfig
from aura_ros.memory.module import MemoryModule
from aura_ros.training.episodes import Task
from aura_ros.training.objective import Objective
from aura_ros.training.settings import ENGINES, ObjectiveConfig, TrainConfig
from aura_ros.training.train import batches, gradient_step


@dataclass(frozen=True)
class Speed:
    """Seconds of a gradient step at one state size: median over the rounds of each engine."""

    state_dim: int
    batch: int
    chunked_s: float
    stepwise_s: float

    @property
    def ratio(self) -> float:
        """How many times more steps a second the chunked scan makes."""
        return self.stepwise_s / self.chunked_s


def measure(task: Task, dims: tuple[int, ...], batch: int, rounds: int) -> Iterator[Speed]:
    """One `Speed` for each size; a round is one step of each engine on the same batch, data made beforehand."""
    torch.set_num_threads(1)
    for dim in dims:
        config = MemoryConfig(input_dim=task.input_dim, out_dim=task.classes, dk=dim, dv=dim)
        times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
        runs = {}
        for engine in ENGINES:
            settings = TrainConfig(steps=rounds + 1, batch=batch, engine=engine)
            module = MemoryModule(config).train()
            optimiser = torch.optim.AdamW(module.parameters(), lr=settings.lr)
            runs[engine] = (module, optimiser, Objective(ObjectiveConfig(), settings.steps), settings)
        made = list(
            itertools.islice(batches(dataclasses.replace(TrainConfig(), batch=batch), task), rounds + 1)
        )
        for index, episodes in enumerate(made):
            for engine, (module, optimiser, objective, settings) in runs.items():
                begin = time.perf_counter()
                gradient_step(module, optimiser, objective, settings, index, episodes, opened=False)
                if index:  # the first warms up
                    times[engine].append(time.perf_counter() - begin)
        yield Speed(dim, batch, *(float(np.median(times[engine])) for engine in ENGINES))
