"""What a training of a memory leaves on the disk: its state, to go on from, and the finished memory."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable
from pathlib import Path

from aura_ros.memory.baseline_file import save_baseline
from aura_ros.memory.baselines import Baseline
from aura_ros.memory.module import export_numpy
from aura_ros.training.interrupts import interrupts_held
from aura_ros.training.residual import ResidualStep, ResidualTrainer
from aura_ros.training.resume import optimiser_tensors, read_state, restore_optimiser, under, write_state
from aura_ros.training.train import Memory

SAVE_EVERY = 250


def fit(trainer: ResidualTrainer, state: Path, report: Callable[[ResidualStep], None]) -> None:
    """Train to the last step, from `state` if it is there; it is written now and then, and on Ctrl-C. Raises UserError."""
    if state.exists():
        load_state(trainer, state)
    try:
        while trainer.step < trainer.config.steps:
            with interrupts_held():
                done = trainer.one_step()
            report(done)
            if trainer.step % SAVE_EVERY == 0:
                save_state(trainer, state)
    except KeyboardInterrupt:
        save_state(trainer, state)
        raise KeyboardInterrupt(f"run it again to go on from step {trainer.step:,}") from None
    save_state(trainer, state)
    trainer.module.eval()


def save_memory(module: Memory, path: Path) -> str:
    """Write the finished memory or baseline; returns its hash. Raises UserError."""
    return save_baseline(module, path) if isinstance(module, Baseline) else export_numpy(module, path)


def identity(trainer: ResidualTrainer) -> str:
    """What a training must have in common with one that it goes on with."""
    data = trainer.data
    known = {
        "config": dataclasses.asdict(trainer.config),
        "memory": trainer.module.config.to_json(),
        "head": data.head,
        "hidden": zlib.crc32(data.hidden.tobytes()),
        "target": zlib.crc32(data.target.tobytes()),
    }
    return json.dumps(known, sort_keys=True)


def save_state(trainer: ResidualTrainer, path: Path) -> None:
    """Everything that going on needs, whole or not at all. Raises UserError."""
    tensors = {f"module.{name}": tensor for name, tensor in trainer.module.state_dict().items()}
    tensors |= optimiser_tensors(trainer.optimiser)
    numbers = {name: repr(getattr(trainer, name)) for name in ("error", "base_error", "reached")}
    metadata = {
        "step": str(trainer.step),
        "course": json.dumps(trainer.course),
        "identity": identity(trainer),
    }
    write_state(path, tensors, metadata | numbers)


def load_state(trainer: ResidualTrainer, path: Path) -> None:
    """Go on from there. Raises UserError for a file of another training, or one that is broken."""
    tensors, metadata = read_state(path, identity(trainer), "options or rollouts")
    trainer.module.load_state_dict(under(tensors, "module."))
    restore_optimiser(trainer.optimiser, tensors)
    trainer.step, trainer.course = int(metadata["step"]), json.loads(metadata["course"])
    for name in ("error", "base_error", "reached"):
        setattr(trainer, name, float(metadata[name]))
