"""`aura train memory`: a gated memory, or what it is compared with, from rollouts of a frozen backbone."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from aura_ros.errors import UserError
from aura_ros.files import write_json
from aura_ros.preflight import check_json

MAX_SEED = 2**31 - 1
# Arm -> the memory's variant, or the baseline's kind.
ARMS = {
    "aura": "aura",
    "aura-always": "write_every_step",
    "random": "random_write",
    "periodic": "periodic_write",
    "kv": "growing_kv",
    "window": "window_kv",
}
# As wide as a residual on 56 numbers needs; the state is none of it.
HEAD_HIDDEN = 128


def _text(help_text: str, metavar: str) -> Any:
    return tyro.conf.arg(help=help_text, metavar=metavar)


@dataclasses.dataclass(frozen=True)
class TrainMemory:
    """Train the memory's residual on a frozen backbone: behaviour cloning, a narrow code, few writes.

    The rollouts are those of `aura collect --latents`, or folders of bags indexed like them. The backbone itself is not
    read: its hidden states are in the rollouts, and its hash goes into the checkpoint.
    """

    rollouts: Annotated[list[Path], _text("folders of rollouts", "DIR ...")]
    out: Annotated[Path, _text("checkpoint to make, .safetensors", "CKPT")]
    arm: Annotated[str, _text("aura, or what it is compared with: " + ", ".join(list(ARMS)[1:]), "NAME")] = (
        "aura"
    )
    steps: Annotated[int, _text("gradient steps", "INT")] = 4000
    batch: Annotated[int, _text("episodes a step", "INT")] = 64
    lr: Annotated[float, _text("learning rate at its peak", "FLOAT")] = 2e-3
    weight_decay: Annotated[float, _text("AdamW's", "FLOAT")] = 0.5
    gamma: Annotated[float, _text("weight of the write rate", "FLOAT")] = 0.02
    state_dim: Annotated[int, _text("N: rows and columns of W; 32 is 4,224 bytes of state", "INT")] = 32
    write_rate: Annotated[
        float, _text("of the arms random and periodic; best what aura's came to", "FLOAT")
    ] = 0.1
    seed: Annotated[int, _text("of weights, batches and noise", "INT")] = 0
    fresh: Annotated[bool, tyro.conf.FlagCreatePairsOff, _text("begin anew, whatever is there", "")] = False
    json: Annotated[Path | None, _text("write the course of the training to this file", "PATH")] = None


def run_train_memory(command: TrainMemory) -> int:
    """Run `aura train memory`; returns the exit status. Raises UserError for what was given wrong.

    Killed or interrupted, the same command goes on from OUT's .training file.
    """
    check(command)
    import torch

    from aura_ros.bench.recall.clock import progress
    from aura_ros.training.residual import ResidualStep, ResidualTrainConfig, ResidualTrainer
    from aura_ros.training.residual_files import fit, save_memory
    from aura_ros.training.rollouts import RolloutFolder, load_rollouts

    config = ResidualTrainConfig(
        steps=command.steps,
        batch=command.batch,
        lr=command.lr,
        weight_decay=command.weight_decay,
        gamma=command.gamma,
        seed=command.seed,
    )
    # As many as the results depend on, to the last bit.
    torch.set_num_threads(1)
    data = load_rollouts([RolloutFolder(folder) for folder in command.rollouts])
    trainer = ResidualTrainer(data, memory_config(command, data), config)
    state = command.out.with_suffix(".training")
    if command.fresh:
        state.unlink(missing_ok=True)
    with progress("training", config.steps) as shown:
        asked = int(data.lengths.sum())
        shown.say(f"{len(data.lines)} rollouts, {asked:,} queries; backbone {data.head['backbone'][:12]}")

        def report(done: ResidualStep) -> None:
            shown.step(done.step, f"error {done.error:.3f}, writes {100 * done.rate:.0f} %")
            if done.validation is not None:
                error, rate = done.validation
                shown.say(
                    f"step {done.step:,}: error {done.error:.3f} of the backbone's, writes {100 * done.rate:.1f} %; "
                    f"held out {error:.3f}, {100 * rate:.1f} %"
                )

        fit(trainer, state, report)
    weights_hash = save_memory(trainer.finished(), command.out)
    if command.json is not None:
        write_json(command.json, {"config": dataclasses.asdict(config), "course": trainer.course})
    error, rate, (wrote, cued) = trainer.judge()
    cues = f", fired in the cue in {wrote} of {cued} episodes" if cued else ""
    sys.stdout.write(
        f"{command.out}: {command.arm}, held out error {error:.3f} of the backbone's, writes {100 * rate:.1f} % of the "
        f"queries{cues}; hash {weights_hash[:12]}; {state} may be deleted\n"
    )
    return 0


def memory_config(command: TrainMemory, data: Any) -> Any:
    """The configuration of the arm for some rollouts. Raises UserError."""
    from aura_ros.memory import MemoryConfig, Variant
    from aura_ros.memory.baseline_config import WINDOW, BaselineConfig

    kind = ARMS[command.arm]
    shared: dict[str, Any] = {
        "input_dim": data.hidden.shape[2],
        "out_dim": data.base.shape[2],
        "input_kind": "projection",
        "residual": True,
        "head_input": "read_and_z",
        "head_hidden": HEAD_HIDDEN,
        "memory_step_period": int(data.head["memory_step_period"]),
        "backbone": str(data.head["backbone"]),
        "seed": command.seed,
    }
    size = command.state_dim
    if kind.endswith("_kv"):
        # The bytes of a memory of that size; half its width then makes them a whole number of rows.
        budget = 4 * (size * size + size)
        width = size // 2 if kind == WINDOW else size
        return BaselineConfig(kind=kind, dk=width, dv=width, budget=budget, sinks=0, **shared)
    return MemoryConfig(variant=Variant(kind), dk=size, dv=size, write_rate=command.write_rate, **shared)


def check(command: TrainMemory) -> None:
    """Raise UserError for anything out of range, before anything slow is done."""
    if command.arm not in ARMS:
        raise UserError(f"arm '{command.arm}' is unknown; choose one of {', '.join(ARMS)}")
    if not command.rollouts:
        raise UserError("rollouts names no folder; give those of `aura collect --latents`")
    out = command.out
    if out.suffix != ".safetensors" or not out.parent.is_dir():
        raise UserError(f"out '{out}' is not allowed; give a .safetensors file in a folder that exists")
    if not 2 <= command.state_dim <= 1024:
        raise UserError(f"state_dim {command.state_dim} is not allowed; it must be from 2 to 1024")
    if not 0 <= command.seed <= MAX_SEED:
        raise UserError(f"seed {command.seed} is not allowed; it must be from 0 to {MAX_SEED}")
    if command.json is not None:
        check_json(command.json)
