"""What a memory is trained on: batches of sequences with answers asked for at some steps. B = episodes, T = steps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
# What a step is. Queries carry no information of their own.
FILLER, DISTRACTOR, EVENT, QUERY = range(4)
NO_TARGET = -1


@dataclass(frozen=True)
class Episodes:
    """A batch of episodes.

    observations: float32 [B, T, D]. targets: int64 [B, T], the class asked for, -1 on steps that are no query.
    kinds: uint8 [B, T], one of FILLER, DISTRACTOR, EVENT, QUERY.
    tokens: int64 [B, T], the observation as one of the task's `token_classes`: what it shows and whether it is flagged.
    changes: bool [B, T], events that change what is stored: a binding, or an overwrite with another value.
    news: bool [B, T], events that change what is stored where unseen keys already stand for class 0.
    """

    observations: FloatArray
    targets: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.uint8]
    tokens: npt.NDArray[np.int64]
    changes: npt.NDArray[np.bool_]
    news: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.observations)

    def slice(self, rows: slice) -> Episodes:
        """Some of the episodes."""
        parts = {f.name: getattr(self, f.name)[rows] for f in dataclasses.fields(self)}
        return Episodes(**parts)


class Task(Protocol):
    """Makes episodes; observations are [.., .., input_dim], answers one of `classes`."""

    @property
    def name(self) -> str:
        """What it is called in results."""
        ...

    @property
    def steps(self) -> int:
        """Of an episode."""
        ...

    @property
    def input_dim(self) -> int:
        """Width of an observation."""
        ...

    @property
    def classes(self) -> int:
        """Classes to answer with."""
        ...

    @property
    def token_classes(self) -> int:
        """Tokens an observation can be."""
        ...

    @property
    def chance(self) -> float:
        """Accuracy of guessing."""
        ...

    def episodes(self, count: int, rng: np.random.Generator) -> Episodes:
        """Make `count` episodes; the same generator state gives the same bytes."""
        ...

    def easier(self, share: float) -> Task:
        """The same task with this share of its events to remember, for the start of training."""
        ...
