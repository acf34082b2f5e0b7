"""Compute shipped cells again from their checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aura_ros.bench.recall.cells import Cell, load_memory
from aura_ros.bench.recall.store import read_lines
from aura_ros.errors import UserError

# An answer or a write may turn where a sum is rounded otherwise: a few of the 32,768 answers, of the 393,216 steps.
ACCURACY_OFF, WRITES_OFF = 2e-4, 2e-4


@dataclass(frozen=True)
class Check:
    """One cell, computed now and as recorded."""

    key: str
    accuracy: float
    recorded_accuracy: float
    write_rate: float
    recorded_write_rate: float

    @property
    def equal(self) -> bool:
        """Whether both agree up to rounding on other machines."""
        return (
            abs(self.accuracy - self.recorded_accuracy) <= ACCURACY_OFF
            and abs(self.write_rate - self.recorded_write_rate) <= WRITES_OFF
        )


def verify(folder: str | Path, count: int = 3, seed: int = 0) -> Iterator[Check]:
    """Judge `count` random cells that have a checkpoint. Raises UserError if there are none, or a file is missing."""
    import torch

    from aura_ros.bench.recall.scores import evaluate

    if count < 1:
        raise UserError(f"count {count} is not allowed; it must be 1 or more")
    folder = Path(folder)
    kept = [record for record in read_lines(folder) if record["checkpoint"]]
    if not kept:
        raise UserError(f"'{folder}' has no cell with a checkpoint; give the folder of a sweep")
    torch.set_num_threads(1)
    chosen = np.random.default_rng(seed).permutation(len(kept))[:count]
    for index in sorted(chosen):
        record = kept[index]
        cell = Cell.from_dict(record["config"])
        module = load_memory(cell, folder / "checkpoints" / record["checkpoint"])
        scores = evaluate(module, cell.make_task())
        yield Check(
            record["key"], scores.accuracy, record["accuracy"], scores.write_rate, record["write_rate"]
        )
