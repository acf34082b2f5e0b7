"""`aura train backbone`: a policy from demonstrations, in one checkpoint that every node and command takes."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from aura_ros.collect_command import MAX_SEED, Collect, run_collect
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
    precision: Annotated[
        str, _text("float32; bfloat16 is faster where the processor has it: avx512_bf16, amx, GPUs", "NAME")
    ] = "float32"
    threads: Annotated[int, _text("of the CPU; 0: one for each core", "INT")] = 0
    dagger: Annotated[
        int, _text("rounds in which the policy drives and the expert corrects it; needs LIBERO", "INT")
    ] = 0
    dagger_episodes: Annotated[int, _text("of each task in a round", "INT")] = 20
    dagger_steps: Annotated[int, _text("gradient steps after each round, on all demonstrations", "INT")] = (
        3000
    )
    jobs: Annotated[int, _text("processes that drive; 0: one for each core", "INT")] = 0
    fresh: Annotated[bool, tyro.conf.FlagCreatePairsOff, _text("begin anew, whatever is there", "")] = False
    json: Annotated[Path | None, _text("write the course of the training to this file", "PATH")] = None


def run_train_backbone(command: TrainBackbone) -> int:
    """Run `aura train backbone`; returns the exit status. Raises UserError for what was given wrong.

    Each round of DAgger leaves its folder and its checkpoint beside OUT; the last round's is OUT.
    """
    check(command)
    if command.dagger == 0:
        return _train(command)
    tasks, mixed = _tasks(command.demos)
    names = [command.out.with_suffix(f".round{number}.safetensors") for number in range(command.dagger)]
    demos = list(command.demos)
    round_of = dataclasses.replace(command, json=None)
    _train(dataclasses.replace(round_of, out=names[0]))
    for number, policy in enumerate(names, start=1):
        folder = command.out.with_suffix(f".dagger{number}")
        if command.fresh:
            shutil.rmtree(folder, ignore_errors=True)
        for suite, which in tasks.items():
            run_collect(
                Collect(
                    out=folder,
                    tasks=",".join(map(str, which)),
                    suite=suite,
                    episodes=command.dagger_episodes,
                    instructions="mixed" if mixed and suite == "libero_object" else "own",
                    policy=policy,
                    seed=command.seed + number,
                    jobs=command.jobs,
                )
            )
        demos.append(folder)
        out = names[number] if number < command.dagger else command.out
        # Half the rate: what was learned is to stay.
        steps, lr = command.dagger_steps, command.lr / 2
        _train(dataclasses.replace(command, demos=demos, out=out, init=policy, steps=steps, lr=lr))
    return 0


def _tasks(folders: list[Path]) -> tuple[dict[str, list[int]], bool]:
    """Suite -> tasks of some folders, and whether a scene had another task's instruction.

    Raises UserError for demonstrations of no LIBERO task.
    """
    from aura_ros.training.demonstrations import DemoFolder

    tasks: dict[str, set[int]] = {}
    mixed = False
    for folder in folders:
        for episode in DemoFolder(folder).episodes():
            if "suite" not in episode or "task" not in episode:
                raise UserError(
                    f"'{folder}' has episode {episode.get('id')!r} of no LIBERO task; a policy can only be corrected where "
                    "the expert can drive: leave --dagger out"
                )
            tasks.setdefault(str(episode["suite"]), set()).add(int(episode["task"]))
            mixed = mixed or int(episode.get("instruction_of", -1)) >= 0
    return {suite: sorted(which) for suite, which in tasks.items()}, mixed


def _train(command: TrainBackbone) -> int:
    """One training, to the end."""
    out, state = command.out, command.out.with_suffix(".training")
    import torch

    from aura_ros.bench.recall.clock import progress
    from aura_ros.training.backbone import BackboneTrainConfig, BackboneTrainer, TrainStep, fit
    from aura_ros.training.demo_data import load_data
    from aura_ros.training.demonstrations import DemoFolder

    config = BackboneTrainConfig(
        steps=command.steps,
        batch=command.batch,
        lr=command.lr,
        seed=command.seed,
        blind=command.blind,
        precision=command.precision,
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
    with progress("training", config.steps) as shown:
        shown.say(
            f"{data.episodes} demonstrations, {len(data.samples):,} samples, {len(data.instructions)} instructions; "
            f"begins at step {trainer.step:,} of {config.steps:,}, on {device}"
        )

        def report(done: TrainStep) -> None:
            shown.step(done.step, f"L1 {done.loss:.4f}")
            if done.validation is not None:
                shown.say(
                    f"step {done.step:,}: L1 {done.loss:.4f}, on held out episodes {done.validation:.4f}"
                )

        fit(trainer, state, out, report)
    if command.json is not None:
        write_json(command.json, {"config": dataclasses.asdict(config), "course": trainer.course})
    sys.stdout.write(
        f"{out}: {out.stat().st_size / 1e6:.1f} MB, best held out L1 {trainer.best_loss:.4f}; "
        f"{state} may be deleted\n"
    )
    return 0


def check(command: TrainBackbone) -> None:
    """Raise UserError for anything out of range, before anything slow is done."""
    if not command.demos:
        raise UserError("demos names no folder; give those of `aura collect` or `aura index`")
    out = command.out
    if out.suffix != ".safetensors" or not out.parent.is_dir():
        raise UserError(f"out '{out}' is not allowed; give a .safetensors file in a folder that exists")
    if command.device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device '{command.device}' is unknown; choose one of auto, cpu, cuda")
    ranges = (
        ("threads", 0, 1024),
        ("dagger", 0, 20),
        ("dagger_episodes", 1, 100_000),
        ("dagger_steps", 1, 10_000_000),
    )
    for name, low, high in (*ranges, ("jobs", 0, 1024)):
        value = getattr(command, name)
        if not low <= value <= high:
            raise UserError(f"{name} {value} is not allowed; it must be from {low} to {high}")
    if not 0 <= command.seed + command.dagger <= MAX_SEED:
        raise UserError(
            f"seed {command.seed} is not allowed; it must be from 0 to {MAX_SEED - command.dagger}"
        )
    if command.init is not None and not command.init.is_file():
        raise UserError(f"init '{command.init}' is no file; give a checkpoint of `aura train backbone`")
    if command.json is not None:
        check_json(command.json)
