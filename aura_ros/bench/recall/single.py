"""One memory by its own options: the cell it is, and a judgement of a checkpoint on any task that it fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aura_ros.bench.recall.cells import LONGEST, Cell
from aura_ros.bench.recall.paper import CONTROL_HZ
from aura_ros.bench.recall.presets import (
    AURA,
    EXPLOSIVE,
    HARD,
    HARD_PROBE,
    HARD_SMALL,
    OPEN,
    PAPER_RECIPE,
    PRESETS,
    PROBE,
    SMALLEST,
    kv,
    probed_hard,
)
from aura_ros.bench.recall.tasks import EVALUATION_EPISODES, find_task, fitting_task
from aura_ros.errors import UserError
from aura_ros.memory.baseline_config import HEAVY_HITTERS, KINDS, WINDOW
from aura_ros.training.settings import OBJECTIVES, PAPER, ObjectiveConfig, TrainConfig

if TYPE_CHECKING:
    from aura_ros.training.train import Memory

RECIPES = ("aura", "open", "hard", "paper", "probe", "kv")
# Up to it a memory learns the main task with the gate held open.
SMALL_MAIN = 16
# Of one gradient step: steps of all its episodes together. Of a judgement: numbers in all observations, 2 GiB of them.
MOST_TRAINED, MOST_JUDGED = 2**24, 2**29


@dataclass(frozen=True)
class Recipe:
    """How a cell is trained. label: its name in tables."""

    label: str
    train: TrainConfig
    objective: ObjectiveConfig
    probe: float
    normalise_keys: bool


def preset_recipe(task: str, length: int, variant: str, state_dim: int) -> Recipe | None:
    """How the first preset that has such a cell trains it; None: no preset has one."""
    wanted = (task, length, variant, state_dim)
    for cells in PRESETS.values():
        for cell in cells():
            if (cell.task, cell.task_steps, cell.variant, cell.state_dim) == wanted:
                return _of(cell, cell.label)
    return None


def _of(cell: Cell, label: str) -> Recipe:
    return Recipe(label, cell.train, cell.objective, cell.probe, cell.normalise_keys)


def named_recipe(name: str, task: str, length: int, variant: str, state_dim: int) -> Recipe:
    """The recipe of that name for any memory. Raises UserError for an unknown name."""
    if name not in RECIPES:
        raise UserError(f"recipe '{name}' is unknown; choose one of: {', '.join(RECIPES)}")
    normalise = task != "hard_recall"
    if name == "kv":
        cells = [cell for cell in kv() if cell.variant == variant] or kv()
        cell = next((cell for cell in cells if cell.task_steps == length), cells[0])
        return dataclasses.replace(_of(cell, name), normalise_keys=normalise)
    small = state_dim <= SMALLEST
    fitting = {"aura": AURA, "open": OPEN, "hard": HARD_SMALL if small else HARD, "paper": PAPER_RECIPE}
    probe = 0.0
    if name == "probe":
        hard = task == "hard_recall"
        probe = HARD_PROBE if hard else PROBE
        fitting[name] = probed_hard(state_dim) if hard else AURA
        normalise = not hard or state_dim == EXPLOSIVE
    return Recipe(name, *fitting[name], probe, normalise)


def _nearest_name(task: str, variant: str, state_dim: int) -> str:
    """The name of the recipe for a cell that no preset has: that of its neighbours in them."""
    if task == "hard_recall":
        return "hard"
    if variant in KINDS:
        return "kv"
    return "open" if task == "noisy_long_recall" and state_dim <= SMALL_MAIN else "aura"


def make_cell(
    *,
    task: str,
    variant: str,
    state_dim: int,
    seed: int,
    recipe: str = "",
    objective: str = "",
    steps: int = 0,
    batch: int = 0,
    length: int = 0,
    event: float = 0.0,
    probe: float = 0.0,
    engine: str = "chunked",
) -> Cell:
    """One cell by options. recipe: a name, "" for that of the presets; the rest, if not 0 or empty, in place of its own.

    Raises UserError for what is unknown, out of range, too large to train on, or asks nothing.
    """
    found: Any = find_task(task, length or None, event or None)
    chosen = None if recipe else preset_recipe(task, length, variant, state_dim)
    if chosen is None:
        name = recipe or _nearest_name(task, variant, state_dim)
        chosen = named_recipe(name, task, length, variant, state_dim)
    for option, value in (("steps", steps), ("batch", batch)):
        if value < 0:
            raise UserError(f"{option} {value} is not allowed; it must be 0 or more")
    if objective and objective not in OBJECTIVES:
        raise UserError(f"objective '{objective}' is unknown; choose one of: {', '.join(OBJECTIVES)}")
    label, asked = chosen.label, chosen.objective
    if objective and objective != asked.kind:
        asked = PAPER if objective == "paper" else ObjectiveConfig()
        label = f"{label}-{objective}"
    if probe and probe != chosen.probe:
        label = f"{label}-probe{probe:g}"
    changes: dict[str, Any] = {"engine": engine, "seed": seed}
    if steps:
        changes["steps"] = steps
    if batch:
        changes["batch"] = batch
    train = dataclasses.replace(chosen.train, **changes)
    if train.batch * found.steps > MOST_TRAINED:
        raise UserError(
            f"batch {train.batch} x length {found.steps} is {train.batch * found.steps:,} steps in one gradient step; "
            f"allowed: {MOST_TRAINED:,}; give a smaller batch or length"
        )
    _check_rows(variant, state_dim)
    return Cell(
        task=task,
        task_steps=length,
        task_event=event,
        variant=variant,
        state_dim=state_dim,
        seed=seed,
        normalise_keys=chosen.normalise_keys,
        label=label,
        train=train,
        objective=asked,
        probe=probe or chosen.probe,
    )


def _check_rows(variant: str, state_dim: int) -> None:
    """Raise UserError for a cache that as many bytes as a memory of this size do not hold."""
    if variant not in (WINDOW, HEAVY_HITTERS) or state_dim < 1:
        return
    for n in range(1, state_dim + 64):
        try:
            Cell(variant=variant, state_dim=n)
        except UserError:
            continue
        if n > state_dim:
            raise UserError(
                f"budget {state_dim} is not allowed: the bytes of a memory with N = {state_dim} do not hold two rows of "
                f"{variant}; give N = {n} or more"
            )
        return


def load_any(path: Path) -> Memory:
    """A memory or a trained baseline, whichever the file is. Raises UserError on a bad file."""
    from safetensors import SafetensorError, safe_open

    from aura_ros.memory import baseline_file
    from aura_ros.memory.module import load_module

    kind = None
    if path.is_file():
        try:
            with safe_open(path, framework="numpy") as tensors:
                kind = (tensors.metadata() or {}).get("format")
        except (OSError, SafetensorError):
            kind = None  # whoever reads it says why
    return baseline_file.load_baseline(path) if kind == baseline_file.FORMAT else load_module(path)


@dataclass(frozen=True)
class Judgement:
    """How a checkpoint did. scores: as `aura_ros.bench.recall.scores.Scores`; rates are fractions of steps."""

    checkpoint: str
    variant: str
    state_dim: int
    task: str
    steps: int
    event: float | None
    episodes: int
    chance: float
    state_bytes: int
    scores: Any

    @property
    def over_skip(self) -> float:
        """Writes over those of a memory that skips only what changes nothing."""
        return float(self.scores.write_rate * self.scores.floor_skip)

    def numbers(self) -> dict[str, Any]:
        """For JSON."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "scores"}
        more = {
            "writes_per_second": CONTROL_HZ * self.scores.write_rate,
            "ratio": self.scores.ratio,
            "over_skip": self.over_skip,
        }
        return {**fields, **dataclasses.asdict(self.scores), **more}

    def text(self) -> str:
        """For people."""
        s = self.scores
        fewer = f", {s.ratio:.2f}x fewer than every step" if s.write_rate else ""
        event = "" if self.event is None else f", events with probability {self.event:g}"
        soft = f"events {s.soft_event:.4f}, distractors {s.soft_distractor:.2g}, queries {s.soft_query:.2g}"
        return (
            f"{self.checkpoint}: {self.variant}, N = {self.state_dim}, on {self.task}, {self.steps:,} steps{event}, "
            f"{self.episodes:,} episodes\n"
            f"accuracy    {s.accuracy:.4f} (guessing {self.chance:.3f})\n"
            f"writes      {100 * s.write_rate:.2f} % of steps, {CONTROL_HZ * s.write_rate:.2f}/s at {CONTROL_HZ:g} Hz"
            f"{fewer}\n"
            f"floors      {s.floor_events:.2f}x events only, {s.floor_skip:.2f}x skipping redundant ones, "
            f"{s.floor_default:.2f}x with a default value; writes are {self.over_skip:.3f} x the skip floor's\n"
            f"gate fires  events {100 * s.event_rate:.2f} %, distractors {100 * s.distractor_rate:.2f} %, "
            f"filler {100 * s.filler_rate:.2f} %, queries {100 * s.query_rate:.2f} %\n"
            f"soft gate   {soft}\n"
            f"state       {self.state_bytes:,} bytes after {self.steps:,} steps, batch 1\n"
        )


def judge_checkpoint(
    path: Path,
    *,
    task: str = "",
    steps: int = 0,
    event: float = 0.0,
    episodes: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Judgement:
    """Judge a checkpoint on fixed episodes of a task: by name, or by the memory's widths.

    steps, event: of sparse_recall, in place of its own. episodes: 0 for the usual number, fewer where they are long.
    Raises UserError for a file that is no memory, a task that it does not fit, and numbers out of range.
    """
    if not 0 <= steps <= LONGEST:
        raise UserError(f"steps {steps} is not allowed; give 1 to {LONGEST}, or 0 for the task's own")
    if not 0 <= event < 1:
        raise UserError(
            f"event {event:g} is not allowed; give a probability below 1, or 0 for the task's own"
        )
    if not 0 <= episodes <= 1_000_000:
        raise UserError(
            f"episodes {episodes} is not allowed; give 1 to 1000000, or 0 for {EVALUATION_EPISODES}"
        )
    if task:
        find_task(task, steps or None, event or None)

    import torch

    from aura_ros.bench.recall.scores import episodes_at, evaluate, state_bytes

    torch.set_num_threads(1)
    module = load_any(path)
    config = module.config
    name = fitting_task(config.input_dim, config.out_dim, task, f"checkpoint '{path}'")
    found: Any = find_task(name, steps or None, event or None)
    count = episodes or episodes_at(found.steps)
    if (numbers := count * found.steps * found.input_dim) > MOST_JUDGED:
        raise UserError(
            f"episodes {count} x steps {found.steps} x {found.input_dim} numbers of an observation is {numbers:,}; "
            f"allowed: {MOST_JUDGED:,}; give fewer episodes or steps"
        )
    say(f"judging on {count:,} episodes of {found.steps:,} steps")
    try:
        scores = evaluate(module, found, count)
    except ZeroDivisionError:
        raise UserError(
            f"{count} episodes of {found.steps} steps of {found.name} ask nothing; give more steps or episodes"
        ) from None
    return Judgement(
        checkpoint=str(path),
        variant=str(getattr(config.variant, "value", config.variant)),
        state_dim=config.dv,
        task=found.name,
        steps=found.steps,
        event=getattr(found, "event", None),
        episodes=count,
        chance=found.chance,
        state_bytes=state_bytes(module, found.steps),
        scores=scores,
    )
