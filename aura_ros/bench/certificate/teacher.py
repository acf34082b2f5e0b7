"""The EMA teacher of a finished memory: what its weights average to when its training goes on for a little (paper 4.4).

Training may keep one (`aura recall train --teacher`). For a checkpoint without, one is made: a copy is trained on from
the checkpoint, at the rate that training ends with and without a write penalty, and the teacher follows the copy with
decay 0.95 (paper table 5). The checkpoint itself stays the policy that is judged.
How far such a teacher gets, and with it delta, goes with the rate: the one kept in training is to be preferred.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from aura_ros.memory.module import MemoryModule
from aura_ros.training.episodes import Task
from aura_ros.training.objective import Objective
from aura_ros.training.settings import ObjectiveConfig, TrainConfig
from aura_ros.training.teacher import EmaTeacher
from aura_ros.training.train import batches, gradient_step

FINAL_LR = TrainConfig().lr * TrainConfig().lr_floor


def ema_teacher(
    module: MemoryModule,
    task: Task,
    steps: int,
    seed: int = 0,
    lr: float = FINAL_LR,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> MemoryModule:
    """The teacher, in evaluation mode; `module` stays as it is. Seeded: the same arguments give the same weights."""
    settings = TrainConfig(steps=steps, seed=seed, lr=lr, warmup=0, lr_floor=1.0)
    objective = Objective(ObjectiveConfig(gamma=0.0), steps)
    torch.manual_seed(seed)
    student, teacher = copy.deepcopy(module).train(), EmaTeacher(module)
    optimiser = torch.optim.AdamW(student.parameters(), lr=lr)
    for step, episodes in zip(range(steps), batches(settings, task), strict=False):
        gradient_step(student, optimiser, objective, settings, step, episodes, opened=False)
        teacher.follow(student)
        report(step + 1, steps)
    return teacher.module
