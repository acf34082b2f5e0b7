"""One memory by its own options: the cell it is, and a judgement of a checkpoint on any task that it fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aura_ros.bench.recall.cells import LONGEST, Cell
from aura_ros.bench.recall.paper import CONTROL_HZ
from aura_ros.bench.recall.presets import AURA, HARD, OPEN, PAPER_RECIPE
from aura_ros.bench.recall.tasks import EVALUATION_EPISODES, TASKS, find_task
from aura_ros.errors import UserError
from aura_ros.training.settings import OBJECTIVES, PAPER, ObjectiveConfig

if TYPE_CHECKING:
    from aura_ros.training.train import Memory

RECIPES = {"aura": AURA, "open": OPEN, "hard": HARD, "paper": PAPER_RECIPE}
# Below it keys that are not normalised learn the hard task faster; up to it a memory learns with the gate held open.
SMALL_HARD, SMALL_MAIN = 24, 16


def recipe_for(task: str, state_dim: int) -> str:
    """The recipe that the presets train this task and size by."""
    if task == "hard_recall":
        return "hard"
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
    engine: str = "chunked",
) -> Cell:
    """One cell by options. recipe: a name, "" for the task's own; objective, steps, batch: in place of the recipe's.

    Raises UserError for what is unknown or out of range.
    """
    find_task(task, length or None, event or None)
    name = recipe or recipe_for(task, state_dim)
    if name not in RECIPES:
        raise UserError(f"recipe '{recipe}' is unknown; choose one of: {', '.join(RECIPES)}")
    for option, value in (("steps", steps), ("batch", batch)):
        if value < 0:
            raise UserError(f"{option} {value} is not allowed; it must be 0 or more")
    if objective and objective not in OBJECTIVES:
        raise UserError(f"objective '{objective}' is unknown; choose one of: {', '.join(OBJECTIVES)}")
    train, asked = RECIPES[name]
    if objective and objective != asked.kind:
        asked = PAPER if objective == "paper" else ObjectiveConfig()
        name = f"{name}-{objective}"
    changes: dict[str, Any] = {"engine": engine, "seed": seed}
    if steps:
        changes["steps"] = steps
    if batch:
        changes["batch"] = batch
    return Cell(
        task=task,
        task_steps=length,
        task_event=event,
        variant=variant,
        state_dim=state_dim,
        seed=seed,
        normalise_keys=task != "hard_recall" or state_dim >= SMALL_HARD,
        label=name,
        train=dataclasses.replace(train, **changes),
        objective=asked,
    )


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
    fitting = [t for t in TASKS.values() if (t.input_dim, t.classes) == (config.input_dim, config.out_dim)]
    if not fitting or (task and task not in [t.name for t in fitting]):
        wanted = ", ".join(f"{t.name} {t.input_dim} -> {t.classes}" for t in TASKS.values())
        raise UserError(
            f"checkpoint '{path}' is {config.input_dim} -> {config.out_dim}, which does not fit "
            f"{task or 'any recall task'}; allowed: {wanted}"
        )
    found: Any = find_task(task or fitting[0].name, steps or None, event or None)
    count = episodes or episodes_at(found.steps)
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
