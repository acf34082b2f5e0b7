"""Compute shipped cells again from their checkpoints."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aura_ros.bench.recall.cells import Cell, load_memory
from aura_ros.bench.recall.store import CHECKPOINTS
from aura_ros.bench.recall.table import Record, read_cells
from aura_ros.errors import UserError

# An answer or a write may turn where a sum is rounded otherwise: a few of the 32,768 answers, of the 393,216 steps.
ACCURACY_OFF, WRITES_OFF = 2e-4, 2e-4
LARGEST_SEED = 2**31 - 1


@dataclass(frozen=True)
class Check:
    """One cell at one length, computed now and as recorded. steps: of an episode; 0: the task's own."""

    key: str
    accuracy: float
    recorded_accuracy: float
    write_rate: float
    recorded_write_rate: float
    steps: int = 0

    @property
    def equal(self) -> bool:
        """Whether both agree up to rounding on other machines."""
        return (
            abs(self.accuracy - self.recorded_accuracy) <= ACCURACY_OFF
            and abs(self.write_rate - self.recorded_write_rate) <= WRITES_OFF
        )


@dataclass(frozen=True)
class Choice:
    """The cells that are computed again, of `kept` that have a checkpoint, and the seed that chose them."""

    folder: Path
    records: tuple[Record, ...]
    kept: int
    seed: int


def fresh_seed() -> int:
    """Another one each time."""
    return secrets.randbelow(LARGEST_SEED + 1)


def choose(folder: str | Path, count: int = 3, seed: int | None = None) -> Choice:
    """`count` random cells of a sweep's folder or its cells.jsonl, all where it has fewer.

    seed: of the choice, to repeat one; none: a fresh one. Raises UserError if none has a checkpoint, or a number is out
    of range.
    """
    if count < 1:
        raise UserError(f"count {count} is not allowed; it must be 1 or more")
    if seed is None:
        seed = fresh_seed()
    if not 0 <= seed <= LARGEST_SEED:
        raise UserError(f"seed {seed} is not allowed; it must be from 0 to {LARGEST_SEED}")
    folder = Path(folder)
    kept = [record for record in read_cells(folder) if record["checkpoint"]]
    if not kept:
        raise UserError(f"'{folder}' has no cell with a checkpoint; give the folder of a sweep")
    chosen = sorted(np.random.default_rng(seed).permutation(len(kept))[:count])
    place = folder if folder.is_dir() else folder.parent
    return Choice(place, tuple(kept[index] for index in chosen), len(kept), seed)


def judge_again(choice: Choice) -> Iterator[Check]:
    """Judge each chosen cell, and the shortest of its further lengths.

    Raises UserError where a checkpoint is missing, or is of another memory than its cell's.
    """
    import torch

    from aura_ros.bench.recall.scores import evaluate, evaluate_at

    torch.set_num_threads(1)
    for record in choice.records:
        cell = Cell.from_dict(record["config"])
        path = choice.folder / CHECKPOINTS / record["checkpoint"]
        module = load_memory(cell, path)
        if module.config != cell.memory():
            raise UserError(f"'{path}' is of another memory than its cell {cell.key}; run the sweep again")
        scores = evaluate(module, cell.make_task())
        yield Check(
            record["key"], scores.accuracy, record["accuracy"], scores.write_rate, record["write_rate"]
        )
        # The longer ones take minutes.
        for point in record.get("at_lengths", [])[:1]:
            steps = point["steps"]
            again = evaluate_at(module, cell.make_task(steps), steps)
            yield Check(
                *(record["key"], again.accuracy, point["accuracy"], again.write_rate, point["write_rate"]),
                steps,
            )


def verify(folder: str | Path, count: int = 3, seed: int | None = None) -> Iterator[Check]:
    """`judge_again` what `choose` chooses."""
    return judge_again(choose(folder, count, seed))
