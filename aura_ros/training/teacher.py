"""The EMA teacher: what a student's weights average to as it trains (paper section 4.4, table 5)."""

from __future__ import annotations

import copy
from typing import Generic, TypeVar

import torch
from torch import nn

DECAY = 0.95
Student = TypeVar("Student", bound=nn.Module)


class EmaTeacher(Generic[Student]):
    """Follows a student: after each of its gradient steps the teacher's weights move by 1 - decay towards its own."""

    def __init__(self, student: Student, decay: float = DECAY) -> None:
        self.module = copy.deepcopy(student).eval()
        self._decay = decay

    @torch.no_grad()
    def follow(self, student: Student) -> None:
        """Once after each gradient step."""
        theirs = student.state_dict()
        # Buffers too: the surprise is normalised by statistics that go with the weights.
        for name, kept in self.module.state_dict().items():
            kept.lerp_(theirs[name], 1 - self._decay)
