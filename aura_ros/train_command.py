"""`aura train backbone`: a policy from demonstrations, in one checkpoint that every node and command takes."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from aura_ros.errors import UserError
from aura_ros.files import write_json
from aura_ros.preflight import check_json


def _text(help_text: str, metavar: str) -> Any:
    return tyro.conf.arg(help=help_text, metavar=metavar)


@dataclasses.dataclass(frozen=True)
class TrainBackbone:
    """Train the compact OpenVLA-OFT network on folders of demonstrations (`aura collect`, or a robot's bags).

    Killed or interrupted, the same command goes on from OUT's .training file.
    """

    demos: Annotated[list[Path], _text("folders of demonstrations", "DIR ...")]
    out: Annotated[Path, _text("checkpoint to make, .safetensors", "CKPT")]
    steps: Annotated[int, _text("gradient steps", "INT")] = 6000
    batch: Annotated[int, _text("samples a step", "INT")] = 32
    lr: Annotated[float, _text("learning rate at its peak", "FLOAT")] = 8e-4
    seed: Annotated[int, _text("of weights, batches and jitter", "INT")] = 0
    init: Annotated[Path | None, _text("checkpoint to go on from; none: random weights", "CKPT")] = None
    blind: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        _text("show grey in place of images, in training and ever after", ""),
    ] = False
    device: Annotated[str, _text("auto, cpu or cuda", "NAME")] = "auto"
    threads: Annotated[int, _text("of the CPU; 0: one for each core", "INT")] = 0
    fresh: Annotated[bool, tyro.conf.FlagCreatePairsOff, _text("begin anew, whatever is there", "")] = False
    json: Annotated[Path | None, _text("write the course of the training to this file", "PATH")] = None


def run_train_backbone(command: TrainBackbone) -> int:
    """Run `aura train backbone`; returns the exit status. Raises UserError for what was given wrong."""
    out, state = check(command)
    import torch

    from aura_ros.bench.recall.clock import progress
    from aura_ros.training.backbone import BackboneTrainConfig, BackboneTrainer, TrainStep, fit
    from aura_ros.training.demo_data import load_data
    from aura_ros.training.demonstrations import DemoFolder

    config = BackboneTrainConfig(
        steps=command.steps, batch=command.batch, lr=command.lr, seed=command.seed, blind=command.blind
    )
    device = command.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise UserError("device 'cuda' is not here; give --device cpu or auto")
    torch.set_num_threads(command.threads or os.cpu_count() or 1)
    data = load_data([DemoFolder(folder) for folder in command.demos], config.policy_weight)
    trainer = BackboneTrainer(data, config, init=command.init, device=device)
    if state.exists() and not command.fresh:
        trainer.load_state(state)
    course: list[dict[str, Any]] = []
    with progress("training", config.steps) as shown:
        shown.say(
            f"{data.episodes} demonstrations, {len(data.samples):,} samples, {len(data.instructions)} instructions; "
            f"begins at step {trainer.step:,} of {config.steps:,}, on {device}"
        )

        def report(done: TrainStep) -> None:
            shown.step(done.step, f"L1 {done.loss:.4f}")
            if done.validation is not None:
                course.append(dataclasses.asdict(done))
                shown.say(
                    f"step {done.step:,}: L1 {done.loss:.4f}, on held out episodes {done.validation:.4f}"
                )

        fit(trainer, state, out, report)
    if command.json is not None:
        write_json(command.json, {"config": dataclasses.asdict(config), "course": course})
    sys.stdout.write(
        f"{out}: {out.stat().st_size / 1e6:.1f} MB, best held out L1 {trainer.best_loss:.4f}; "
        f"{state} may be deleted\n"
    )
    return 0


def check(command: TrainBackbone) -> tuple[Path, Path]:
    """The checkpoint and the file to go on from. Raises UserError before anything slow is done."""
    out = command.out
    if out.suffix != ".safetensors" or not out.parent.is_dir():
        raise UserError(f"out '{out}' is not allowed; give a .safetensors file in a folder that exists")
    if command.device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device '{command.device}' is unknown; choose one of auto, cpu, cuda")
    if not 0 <= command.threads <= 1024:
        raise UserError(f"threads {command.threads} is not allowed; it must be from 0 to 1024")
    if command.init is not None and not command.init.is_file():
        raise UserError(f"init '{command.init}' is no file; give a checkpoint of `aura train backbone`")
    if command.json is not None:
        check_json(command.json)
    return out, out.with_suffix(".training")
