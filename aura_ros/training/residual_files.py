"""What a training of a memory leaves on the disk: its state, to go on from, and the finished memory."""

from __future__ import annotations

import dataclasses
import json
import os
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from aura_ros.errors import UserError
from aura_ros.memory.baseline_file import save_baseline
from aura_ros.memory.baselines import Baseline
from aura_ros.memory.module import export_numpy
from aura_ros.training.interrupts import interrupts_held
from aura_ros.training.residual import ResidualStep, ResidualTrainer
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
    for number, state in trainer.optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{number}.{name}": tensor for name, tensor in state.items()}
    numbers = {name: repr(getattr(trainer, name)) for name in ("error", "base_error", "reached")}
    metadata = {
        "step": str(trainer.step),
        "course": json.dumps(trainer.course),
        "identity": identity(trainer),
    }
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        save_file(
            {n: t.detach().clone().contiguous() for n, t in tensors.items()}, temporary, metadata | numbers
        )
        os.replace(temporary, path)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"'{path}' cannot be written ({error}); make room, then run it again to go on"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def load_state(trainer: ResidualTrainer, path: Path) -> None:
    """Go on from there. Raises UserError for a file of another training, or one that is broken."""
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"'{path}' is no training to go on with ({error}); give --fresh to begin anew"
        ) from error
    if metadata.get("identity") != identity(trainer):
        raise UserError(
            f"'{path}' is a training with other options or rollouts; give --fresh to begin anew, or another --out"
        )
    states: dict[int, dict[str, Tensor]] = {}
    module: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part, rest = name.split(".", 1)
        if part == "module":
            module[rest] = tensor
        else:
            number, key = rest.split(".", 1)
            states.setdefault(int(number), {})[key] = tensor
    with torch.no_grad():
        trainer.module.load_state_dict(module)
    whole = trainer.optimiser.state_dict()
    trainer.optimiser.load_state_dict({"state": states, "param_groups": whole["param_groups"]})
    trainer.step, trainer.course = int(metadata["step"]), json.loads(metadata["course"])
    for name in ("error", "base_error", "reached"):
        setattr(trainer, name, float(metadata[name]))
