"""One cell of a table: what is trained, and the record that is kept of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aura_ros.bench.recall.tasks import NoisyRecall, find_task
from aura_ros.config import check_fields, option
from aura_ros.errors import UserError
from aura_ros.memory.baseline_config import FLOAT_BYTES, KINDS, BaselineConfig
from aura_ros.memory.config import MemoryConfig, Variant
from aura_ros.training.settings import ObjectiveConfig, TrainConfig

if TYPE_CHECKING:
    from aura_ros.training.train import Memory

FORMAT = 1
HISTORY_POINTS = 60
LONGEST, MOST_LENGTHS = 10**6, 16


@dataclass(frozen=True)
class Cell:
    """What is trained. Checked at construction; raises UserError naming the field.

    label: which recipe, for tables. train.seed is overwritten by seed. A window_kv or heavy_hitter_kv has as many bytes
    as a memory of the same state_dim.
    """

    task: str = option("noisy_long_recall", "what is recalled")
    task_steps: int = option(
        0, "steps of an episode of sparse_recall; 0: the task's own", minimum=0, maximum=LONGEST
    )
    task_event: float = option(
        0.0, "event probability of sparse_recall; 0: its own", minimum=0.0, maximum=1.0
    )
    variant: str = option("aura", "the memory", choices=(*(v.value for v in Variant), *KINDS))
    state_dim: int = option(32, "N = dk = dv", minimum=1, maximum=1024)
    seed: int = option(0, "of weights, data and noise", minimum=0, maximum=2**31 - 1)
    normalise_keys: bool = option(True, "L2-normalise queries and keys")
    write_rate: float = option(0.15, "of random_write and periodic_write", minimum=1e-6, maximum=1.0)
    label: str = option("aura", "name of the recipe")
    train: TrainConfig = field(default_factory=TrainConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    probe: float = option(
        0.0,
        "noisy_long_recall, hard_recall: how many of training's empty steps ask for a key, unseen ones for class 0",
        minimum=0.0,
        maximum=1.0,
    )
    lengths: tuple[int, ...] = option(
        (), "further lengths of sparse_recall that it is judged at, ascending", minimum=1, maximum=LONGEST
    )

    def __post_init__(self) -> None:
        check_fields(self)
        find_task(self.task)
        self._check_lengths()
        self.training_task()
        # A budget that holds nothing must not end a sweep half way.
        self.memory()
        if self.train.seed != self.seed:
            object.__setattr__(self, "train", dataclasses.replace(self.train, seed=self.seed))

    def _check_lengths(self) -> None:
        """Raise UserError unless they are whole, ascending, few, and of a task that has lengths."""
        wrong = [n for n in self.lengths if isinstance(n, bool) or not isinstance(n, int)]
        if wrong:
            raise UserError(f"lengths has {wrong[0]!r}; allowed: whole numbers from 1 to {LONGEST}")
        if len(self.lengths) > MOST_LENGTHS or sorted(set(self.lengths)) != list(self.lengths):
            raise UserError(f"lengths {list(self.lengths)} must be ascending, at most {MOST_LENGTHS}")
        if self.lengths:
            self.make_task(self.lengths[0])

    def make_task(self, steps: int = 0) -> Any:
        """The task with its length, or one of `steps` steps, and its event probability."""
        return find_task(self.task, steps or self.task_steps or None, self.task_event or None)

    def training_task(self) -> Any:
        """What it is trained on: the task it is judged on, with probes."""
        task = self.make_task()
        if not self.probe:
            return task
        if not isinstance(task, NoisyRecall):
            raise UserError(
                f"probe {self.probe:g} is for noisy_long_recall and hard_recall; {self.task} asks anyway"
            )
        return dataclasses.replace(task, probe=self.probe)

    def memory(self) -> MemoryConfig | BaselineConfig:
        """The configuration of the memory, or of what stands in its place."""
        task, n = self.make_task(), self.state_dim
        if self.variant in KINDS:
            return BaselineConfig(
                input_dim=task.input_dim,
                out_dim=task.classes,
                kind=self.variant,
                dk=n,
                dv=n,
                budget=FLOAT_BYTES * (n * n + n),
                # A quarter of the rows that the budget holds: 4 of 16 at N = 32.
                sinks=min(4, n // 8),
                seed=self.seed,
            )
        return MemoryConfig(
            input_dim=task.input_dim,
            out_dim=task.classes,
            variant=Variant(self.variant),
            dk=n,
            dv=n,
            normalise_keys=self.normalise_keys,
            write_rate=self.write_rate,
            token_classes=task.token_classes,
            seed=self.seed,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` reads them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Cell:
        """Inverse of `to_dict`. Raises UserError for unknown or bad fields."""
        try:
            parts = {**values, "train": TrainConfig(**values["train"])}
            # JSON has no tuple.
            parts["lengths"] = tuple(values.get("lengths", ()))
            return cls(**{**parts, "objective": ObjectiveConfig(**values["objective"])})
        except (KeyError, TypeError) as error:
            raise UserError(f"cell has unknown or missing fields ({error}); train it again") from error

    @property
    def key(self) -> str:
        """A file name: readable, and unique by a hash over all that differs from the defaults.

        So a new field with a default renames nothing; `Store.missing` compares the whole configuration.
        """
        changed = _differences(self.to_dict(), Cell().to_dict())
        digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:8]
        length = f"-T{self.task_steps}" if self.task_steps else ""
        return f"{self.task}{length}-{self.variant}-N{self.state_dim}-{self.label}-s{self.seed}-{digest}"


def _differences(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """What of nested plain values is not the default."""
    return {
        name: _differences(value, defaults[name]) if isinstance(value, dict) else value
        for name, value in values.items()
        if value != defaults[name]
    }


def save_memory(module: Memory, path: Path) -> None:
    """Write a memory or a baseline. Raises UserError if it cannot be, or a weight is not finite."""
    from aura_ros.memory.baseline_file import save_baseline
    from aura_ros.memory.baselines import Baseline
    from aura_ros.memory.module import export_numpy

    save_baseline(module, path) if isinstance(module, Baseline) else export_numpy(module, path)


def load_memory(cell: Cell, path: Path) -> Memory:
    """Read what `save_memory` wrote of a cell. Raises UserError on a bad file."""
    from aura_ros.memory.baseline_file import load_baseline
    from aura_ros.memory.module import load_module

    return load_baseline(path) if cell.variant in KINDS else load_module(path)


def run_cell(
    cell: Cell,
    checkpoint: Path | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
    teacher: Path | None = None,
    source: str | None = None,
) -> dict[str, Any]:
    """Train, judge and describe one cell; writes the memory to `checkpoint` and its EMA teacher to `teacher`.

    source: the commit of the code that trains; none: that of now, before anything is trained.
    Deterministic on one machine with one thread. The record is what `results/cells.jsonl` holds, plus history.
    """
    import torch

    from aura_ros.bench.recall.scores import evaluate, evaluate_at, state_bytes
    from aura_ros.training.teacher import EmaTeacher
    from aura_ros.training.train import Progress, train

    source = commit() if source is None else source
    torch.set_num_threads(1)
    history: list[list[float]] = []
    every = max(cell.train.steps // HISTORY_POINTS, 1)
    sums = np.zeros(3)

    def note(progress: Progress) -> None:
        nonlocal sums
        sums += (progress.cross_entropy, progress.write_rate, progress.accuracy)
        if progress.step % every == 0:
            history.append([progress.step, *(round(float(x), 5) for x in sums / every)])
            sums = np.zeros(3)
        report(progress.step, cell.train.steps)

    averaged: list[EmaTeacher] = []

    def follow(student: Memory) -> None:
        if teacher is None:
            return
        if not averaged:
            averaged.append(EmaTeacher(student))
        averaged[0].follow(student)

    begin = time.process_time()
    task = cell.make_task()
    module = train(cell.memory(), cell.training_task(), cell.train, cell.objective, note, follow)
    trained = time.process_time() - begin
    scores = evaluate(module, task)
    if checkpoint is not None:
        save_memory(module, checkpoint)
    if teacher is not None:
        save_memory(averaged[0].module, teacher)
    further = [dataclasses.asdict(evaluate_at(module, cell.make_task(n), n)) for n in cell.lengths]
    parameters = list(module.parameters())
    return {
        "format": FORMAT,
        "key": cell.key,
        "task": cell.task,
        "variant": cell.variant,
        "state_dim": cell.state_dim,
        "seed": cell.seed,
        "steps": cell.train.steps,
        "objective": cell.objective.kind,
        "label": cell.label,
        **{name: _finite(value) for name, value in dataclasses.asdict(scores).items()},
        "selectivity": _finite(
            scores.event_rate / scores.distractor_rate if scores.distractor_rate else math.inf
        ),
        "params": sum(p.numel() for p in parameters),
        "gradient_active": sum(p.numel() for p in parameters if p.grad is not None),
        "state_bytes": state_bytes(module, task.steps),
        **({"at_lengths": further} if further else {}),
        "cpu_s": round(trained, 2),
        "checkpoint": checkpoint.name if checkpoint is not None else None,
        "commit": source,
        "versions": versions(),
        "config": cell.to_dict(),
        "history": history,
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity: None."""
    return value if math.isfinite(value) else None


def versions() -> dict[str, str]:
    """What computed the numbers."""
    import torch

    import aura_ros

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "aura_ros": aura_ros.__version__,
        "machine": platform.machine(),
    }


def commit() -> str:
    """The git commit of this source with "+" if it was changed; empty outside a repository."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True
        )
        if head.returncode:
            return ""
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", "../../../aura_ros"],
            cwd=here,
            capture_output=True,
            text=True,
        )
    except OSError:
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
