"""`aura certify`: what a memory may cost in value, measured on a checkpoint, on a bag, or proved on a small process."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Annotated, Any
from zlib import crc32

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from aura_ros.errors import UserError
from aura_ros.preflight import check_json

LATENT, CHUNK = "aura_ros/msg/Latent", "aura_ros/msg/ActionChunk"
SOURCE = (
    "Bound: paper theorem 4.3; Subramanian et al., JMLR 23(12), 2022, theorems 9 and 27. "
    "Measured on visited histories (A5): a diagnostic, no guarantee."
)


def _text(help_text: str, metavar: str) -> Any:
    return tyro.conf.arg(help=help_text, metavar=metavar)


@dataclasses.dataclass(frozen=True)
class Certify:
    """Measure epsilon, delta and the value-loss bound of a memory; say when the bound is vacuous."""

    checkpoint: Annotated[
        Path | None, tyro.conf.Positional, _text("memory of a recall task (.safetensors)", "CKPT")
    ] = None
    bag: Annotated[
        Path | None, _text("bag with a policy's hidden states, or a folder of such bags", "DIR")
    ] = None
    pomdp: Annotated[
        bool, tyro.conf.FlagCreatePairsOff, _text("prove it on a process whose value is known", "")
    ] = False
    task: Annotated[str, _text("CKPT: recall task; empty: by the memory's widths", "NAME")] = ""
    episodes: Annotated[int, _text("CKPT: evaluation episodes, half of them to fit heads", "INT")] = 1024
    teacher: Annotated[
        Path | None, _text("CKPT: teacher that its training kept; none: one is made", "PATH")
    ] = None
    teacher_steps: Annotated[int, _text("CKPT: gradient steps that the EMA teacher follows", "INT")] = 200
    teacher_lr: Annotated[float, _text("CKPT: their learning rate; 3e-3: training's peak", "FLOAT")] = 6e-5
    memory: Annotated[
        Path | None, _text("bag: memory to step over it; none: an untrained one, N = 32", "PATH")
    ] = None
    noise: Annotated[str, _text("pomdp: how often readings are wrong, comma separated", "P,...")] = (
        "0.1,0.25,0.4"
    )
    levels: Annotated[str, _text("pomdp: levels of belief the memory tells apart", "INT,...")] = (
        "9,17,33,65,129,257"
    )
    rounds: Annotated[int, _text("pomdp: steps until the doors are drawn anew", "INT")] = 5
    discount: Annotated[float, _text("of rewards, by memory step", "FLOAT")] = 0.9
    resamples: Annotated[int, _text("of the bootstrap", "INT")] = 10_000
    seed: Annotated[int, _text("of teacher, bootstrap and untrained memory", "INT")] = 0
    json: Annotated[Path | None, _text("write the numbers to this file", "PATH")] = None


def run_certify(command: Certify) -> int:
    """Run `aura certify`; returns the exit status. Raises UserError for what was given wrong."""
    given = [command.checkpoint is not None, command.bag is not None, command.pomdp]
    if sum(given) != 1:
        raise UserError(f"certify was given {sum(given)} of CKPT, --bag DIR and --pomdp; give one of them")
    if not 100 <= command.resamples <= 1_000_000:
        raise UserError(f"resamples {command.resamples} is not allowed; give 100 to 1000000")
    if not 0 <= command.seed < 2**31:
        raise UserError(f"seed {command.seed} is not allowed; give 0 to {2**31 - 1}")
    if command.json is not None:
        check_json(command.json)
    if command.pomdp:
        numbers = _pomdp(command)
    else:
        numbers = _checkpoint(command) if command.bag is None else _bag(command)
    if command.json is not None:
        from aura_ros.files import write_json

        write_json(command.json, numbers)
    return 0


def _checkpoint(command: Certify) -> dict[str, Any]:
    from aura_ros.bench.certificate import paper
    from aura_ros.bench.certificate.recall import RecallConfig, certify_recall
    from aura_ros.bench.recall.tasks import find_task, fitting_task
    from aura_ros.memory.checkpoint import load_checkpoint

    config = RecallConfig(
        episodes=command.episodes,
        teacher_steps=command.teacher_steps,
        teacher_lr=command.teacher_lr,
        discount=command.discount,
        resamples=command.resamples,
        seed=command.seed,
    )
    held = load_checkpoint(str(command.checkpoint))
    task = find_task(fitting_task(held.config.input_dim, held.config.out_dim, command.task))

    import torch

    from aura_ros.memory.module import load_module

    torch.set_num_threads(1)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as shown:
        bar = shown.add_task("teacher", total=config.teacher_steps)

        def report(done: int, total: int) -> None:
            shown.update(bar, completed=done)
            if done == total:
                shown.console.print(f"teacher made; measuring with {config.resamples} resamples")

        kept = None if command.teacher is None else load_module(str(command.teacher)).eval()
        found = certify_recall(load_module(str(command.checkpoint)), task, config, report, kept)
    _say(
        f"{command.checkpoint}: {held.config.variant.value}, N = {held.config.dv}, {found.task}, {found.queries} "
        f"queries of {config.episodes - config.episodes // 2} episodes, accuracy {found.accuracy:.4f}"
    )
    _say(
        f"teacher: {command.teacher}, kept in training"
        if command.teacher is not None
        else f"teacher: made, EMA 0.95 over {config.teacher_steps} gradient steps from the checkpoint, learning rate "
        f"{config.teacher_lr:g}, no write penalty, seed {config.seed}"
    )
    _header()
    _error("epsilon: 1 - p(right answer)", found.epsilon)
    _error("delta, TV of answers (sum |p - q|)", found.delta_tv)
    _error("delta, W1 of codes (1-D, averaged)", found.delta_w1)
    _error("one-step value residual", found.residual)
    _forms(found.forms, found.span)
    loss = found.loss
    _say(f"true value loss at queries: mean {loss.value:.4g} [{loss.low:.4g}, {loss.high:.4g}]")
    _say(SOURCE)
    _say(
        "delta compares with the teacher (4.4), not with the law of the next state that AP2 asks for, and scales with the "
        "teacher's learning rate: "
        + (
            "here that of its training."
            if command.teacher is not None
            else f"here {config.teacher_lr:g}, chosen for a teacher made afterwards; one that training kept (`aura "
            "recall train --teacher`, then --teacher) is to be preferred."
        )
    )
    _say(paper.recall_line())
    return {
        "kind": "recall",
        "checkpoint": str(command.checkpoint),
        "weights_hash": held.weights_hash,
        "teacher": {
            "source": "made",
            "steps": config.teacher_steps,
            "lr": config.teacher_lr,
            "seed": config.seed,
        }
        if command.teacher is None
        else {
            "source": "kept in training",
            "checkpoint": str(command.teacher),
            "weights_hash": load_checkpoint(command.teacher).weights_hash,
        },
        "config": dataclasses.asdict(config),
        **dataclasses.asdict(found),
    }


def _bag(command: Certify) -> dict[str, Any]:
    from aura_ros.bench.certificate import paper
    from aura_ros.bench.certificate.stream import certify_stream
    from aura_ros.memory import MemoryConfig, NumpyMemory, build_untrained

    assert command.bag is not None
    stream = read_streams(command.bag)
    if command.memory is not None:
        memory, name = NumpyMemory.load(command.memory), str(command.memory)
    else:
        width, columns = stream.hidden.shape[1], stream.actions.shape[1]
        config = MemoryConfig(
            input_dim=width, out_dim=columns, input_kind="projection", residual=True, seed=command.seed
        )
        memory, name = NumpyMemory.from_checkpoint(build_untrained(config)), f"untrained, seed {command.seed}"
    found = certify_stream(stream, memory, command.discount, command.resamples, command.seed)
    _say(
        f"{command.bag}: {found.tuples} tuples of hidden states of {stream.hidden.shape[1]}, heads fitted on the first "
        f"half, {found.judged} judged; memory: {name}, {memory.state_bytes} bytes, writes {100 * found.write_rate:.1f} %"
    )
    _header()
    _error("epsilon: action, share of its range", found.epsilon)
    _error("delta, W1 of reads (1-D, averaged)", found.delta_w1)
    _error("one-step value residual", found.residual)
    _say(
        f"heads that always say the mean: epsilon {found.epsilon_of_mean:.4g}, delta {found.delta_w1_of_mean:.4g}; "
        f"spread of a read {found.spread:.4g}; no TV: the actions are continuous; blocks of {found.block} drawn"
    )
    _forms(found.forms, found.span)
    _say(SOURCE)
    _say(paper.STREAM_LINE)
    return {
        "kind": "stream",
        "bag": str(command.bag),
        "memory": name,
        "memory_hash": memory.weights_hash,
        "discount": command.discount,
        "resamples": command.resamples,
        **dataclasses.asdict(found),
    }


def read_streams(path: Path) -> Any:
    """A bag's stream, or those of all bags of a folder, one after the other. Raises UserError as `read_stream` does."""
    from aura_ros.bench.certificate.stream import Stream

    inside = sorted(found.parent for found in path.glob("*/metadata.yaml")) if path.is_dir() else []
    if (path / "metadata.yaml").exists() or not inside:
        return read_stream(path)
    # Heads are fitted on the first half and judged on the second: neither may be of some tasks alone. Both cues of a
    # state, whose names differ in what follows "-c", are in the same half.
    inside.sort(key=lambda bag: (crc32(bag.name.rsplit("-c", 1)[0].encode()), bag.name))
    streams = [read_stream(bag) for bag in inside]
    widths = {(s.hidden.shape[1], s.actions.shape[1]) for s in streams}
    if len(widths) != 1:
        raise UserError(
            f"the bags in {path} have hidden states and actions of sizes {sorted(widths)}; one is needed"
        )
    epochs, last = [], 0
    for stream in streams:
        epochs.append(stream.epoch + last)
        last = int(epochs[-1].max()) + 1
    return Stream(
        hidden=np.concatenate([stream.hidden for stream in streams]),
        actions=np.concatenate([stream.actions for stream in streams]),
        epoch=np.concatenate(epochs),
        step=np.concatenate([stream.step for stream in streams]),
    )


def read_stream(bag: Path) -> Any:
    """A bag's hidden states and the chunks of the same observations, as a `Stream`.

    Raises UserError when it has no hidden states, those of several policies, or of several sizes.
    """
    from aura_ros.bench.certificate.stream import Stream
    from aura_ros.report.reading import read_bag, summarize_bag

    kinds = {topic: kind for topic, kind in summarize_bag(bag).types.items() if kind in (LATENT, CHUNK)}
    for kind, hint in ((LATENT, "; record with publish_latent and record_latents"), (CHUNK, "")):
        topics = [topic for topic, of in kinds.items() if of == kind]
        if len(topics) != 1:
            raise UserError(f"bag {bag} has {len(topics)} topics of {kind}; one is needed{hint}")
    latents, chunks = [], {}
    for topic, _, message in read_bag(bag, list(kinds)):
        stamp = message.header.stamp
        key = (int(message.epoch), int(stamp.sec), int(stamp.nanosec))
        if kinds[topic] == LATENT:
            latents.append((key, int(message.step), np.asarray(message.data, np.float32)))
        else:
            chunks[key] = np.asarray(message.data, float)
    for what, sizes in (
        ("hidden states", {len(data) for _, _, data in latents}),
        ("action chunks", {len(data) for data in chunks.values()}),
    ):
        if len(sizes) != 1:
            raise UserError(f"bag {bag} has {what} of sizes {sorted(sizes)}; one size is needed")
    unknown = np.full(len(next(iter(chunks.values()))), math.nan)
    # Epochs are unsigned 64-bit; only whether they differ matters.
    numbers = {epoch: index for index, epoch in enumerate(dict.fromkeys(key[0] for key, _, _ in latents))}
    return Stream(
        hidden=np.stack([data for _, _, data in latents]),
        actions=np.stack([chunks.get(key, unknown) for key, _, _ in latents]),
        epoch=np.array([numbers[key[0]] for key, _, _ in latents]),
        step=np.array([step for _, step, _ in latents]),
    )


def _pomdp(command: Certify) -> dict[str, Any]:
    from aura_ros.bench.certificate.finite import certify
    from aura_ros.bench.certificate.process import DoorsConfig, histories

    levels = _numbers("levels", command.levels, int)
    processes = [
        DoorsConfig(rounds=command.rounds, noise=noise, discount=command.discount)
        for noise in _numbers("noise", command.noise, float)
    ]
    if bad := [level for level in levels if not 2 <= level <= 1025]:
        raise UserError(f"levels {bad[0]} is not allowed; give 2 to 1025")
    rows = []
    _say(
        "noise levels histories states  epsilon   delta residual     L_V    bound    tight true loss  |V*-V^| "
        "V* span writes  verdict"
    )
    for process in processes:
        tree = histories(process)
        for count in levels:
            row = certify(process, count, tree)
            rows.append(row)
            _say(
                f"{row.noise:>5g} {row.levels:>6} {row.histories:>9} {row.states:>6} {row.epsilon:>8.4f} "
                f"{row.delta:>7.4f} {row.residual:>8.4f} {row.lipschitz:>7.4f} {row.loose:>8.4f} {row.tight:>8.4f} "
                f"{row.loss:>9.4f} {row.value_error:>8.4f} {row.value_span:>7.3f} {100 * row.write_rate:>5.1f}%  "
                f"{row.verdict}"
            )
    _say(
        f"All exact, sup over every reachable history and action; bounded rewards alone promise {rows[0].span:.4g}. "
        "Bound: paper theorem 4.3; Subramanian et al., JMLR 23(12), 2022, theorems 9 and 27."
    )
    return {
        "kind": "pomdp",
        "processes": [dataclasses.asdict(process) for process in processes],
        "rows": [{**dataclasses.asdict(row), "holds": row.holds, "verdict": row.verdict} for row in rows],
    }


def _numbers(option: str, text: str, kind: type) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option} '{text}' is not allowed; give numbers separated by commas") from None


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _header() -> None:
    _say(f"{'':<36} {'mean [95 %]':<34} {'95 % quantile [95 %]':<34} largest")


def _error(name: str, found: Any) -> None:
    parts = [f"{e.value:.4g} [{e.low:.4g}, {e.high:.4g}]" for e in (found.mean, found.q95)]
    _say(f"{name:<36} {parts[0]:<34} {parts[1]:<34} {found.largest:.4g}")


def _forms(forms: tuple[Any, ...], span: float) -> None:
    _say(f"bound, where bounded rewards alone promise {span:.4g}:")
    for form in forms:
        parts = [
            f"{e.value:.4g} [{e.low:.4g}, {e.high:.4g}] {'VACUOUS' if vacuous else 'below the span'}"
            for e, vacuous in ((form.loose, form.vacuous_loose), (form.tight, form.vacuous_tight))
        ]
        _say(
            f"  {form.statistic:<7} {form.metric}, {form.lipschitz:.4g}: with L_V delta {parts[0]}; with the residual "
            f"{parts[1]}"
        )
    broken = [form for form in forms if form.order_broken]
    if broken:
        worst = broken[0]
        _say(
            f"  note: the residual is above L_V delta in {len(broken)} of {len(forms)} rows (first: {worst.residual:.4g} > "
            f"{worst.transition:.4g}); remark 4.4, that the second form is never looser, does not hold for such estimates"
        )
