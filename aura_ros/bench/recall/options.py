"""What each `aura recall` command takes, as dataclasses that the command line is made from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tyro


def _text(help_text: str, metavar: str) -> Any:
    return tyro.conf.arg(help=help_text, metavar=metavar)


Folder = Annotated[Path, tyro.conf.Positional, _text("folder of a sweep", "DIR")]
Json = Annotated[Path | None, _text("write the numbers to this file", "PATH")]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Train the cells of a preset that a folder lacks; interrupt and run again to go on."""

    preset: Annotated[str, _text("see `aura recall presets`", "NAME")] = "paper-main"
    out: Annotated[Path, _text("folder of the results", "DIR")] = Path("runs/recall")
    seeds: Annotated[str, _text("comma separated; empty: all of the preset", "0,1,...")] = ""
    budget: Annotated[str, _text("state sizes N, comma separated; empty: all", "16,32,...")] = ""
    variants: Annotated[str, _text("comma separated; empty: all", "NAME,...")] = ""
    steps: Annotated[int, _text("gradient steps; 0: the preset's own", "INT")] = 0
    jobs: Annotated[int, _text("processes; 0: one for each core", "INT")] = 0
    engine: Annotated[
        str, _text("processes, or ray (the cluster at RAY_ADDRESS, or a local one)", "NAME")
    ] = "processes"


@dataclasses.dataclass(frozen=True)
class Train:
    """Train one memory: a checkpoint, and a record of it beside that (.json)."""

    task: Annotated[str, _text("noisy_long_recall, hard_recall or sparse_recall", "NAME")] = (
        "noisy_long_recall"
    )
    variant: Annotated[str, _text("the memory, or what it is compared with", "NAME")] = "aura"
    budget: Annotated[int, _text("state size N", "INT")] = 32
    seed: Annotated[int, _text("of weights, data and noise", "INT")] = 0
    recipe: Annotated[
        str,
        _text(
            "aura, open, hard, paper, probe or kv; empty: the presets' for this task, length, variant and size",
            "NAME",
        ),
    ] = ""
    objective: Annotated[str, _text("paper or aura; empty: the recipe's", "NAME")] = ""
    steps: Annotated[int, _text("gradient steps; 0: the recipe's", "INT")] = 0
    batch: Annotated[int, _text("episodes a gradient step; 0: the recipe's", "INT")] = 0
    length: Annotated[int, _text("steps of an episode of sparse_recall; 0: its own", "INT")] = 0
    event: Annotated[float, _text("event probability of sparse_recall; 0: its own", "P")] = 0.0
    probe: Annotated[
        float,
        _text("how many of training's empty steps ask for a key (not sparse_recall); 0: the recipe's", "P"),
    ] = 0.0
    engine: Annotated[str, _text("chunked (all steps at once) or bptt (step by step)", "NAME")] = "chunked"
    out: Annotated[Path | None, _text("file to make; none: runs/recall/<key>.safetensors", "PATH")] = None
    teacher: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        _text("keep the EMA teacher too, as <out>.teacher.safetensors", ""),
    ] = False


@dataclasses.dataclass(frozen=True)
class Eval:
    """Judge a checkpoint on fixed episodes: accuracy, where it writes, the floors, its bytes."""

    checkpoint: Annotated[Path, tyro.conf.Positional, _text("trained memory or baseline", "CKPT")]
    task: Annotated[str, _text("recall task; empty: by the memory's widths", "NAME")] = ""
    steps: Annotated[int, _text("steps of an episode of sparse_recall; 0: its own", "INT")] = 0
    event: Annotated[float, _text("event probability of sparse_recall; 0: its own", "P")] = 0.0
    episodes: Annotated[int, _text("how many; 0: 4096, fewer where they are long", "INT")] = 0
    json: Json = None


@dataclasses.dataclass(frozen=True)
class Table:
    """Ours beside the paper's, every seed counted; reads only the folder's cells.jsonl."""

    folder: Folder
    only: Annotated[str, _text("sections, by their presets, comma separated; empty: all", "NAME,...")] = ""
    json: Json = None


@dataclasses.dataclass(frozen=True)
class Figures:
    """Draw the paper's figures 4 to 7 and 10 to 13 of what the folder has cells for."""

    folder: Folder
    out: Annotated[Path, _text("folder of the pictures", "DIR")] = Path("runs/figures")
    only: Annotated[str, _text("figures, comma separated; empty: all there are cells for", "4,5,...")] = ""


@dataclasses.dataclass(frozen=True)
class Verify:
    """Compute randomly chosen cells again from their checkpoints and compare; exit status 1 if one differs."""

    folder: Annotated[Path, tyro.conf.Positional, _text("folder of a sweep, or its cells.jsonl", "DIR")] = (
        Path("results")
    )
    count: Annotated[int, _text("how many", "INT")] = 3
    seed: Annotated[int | None, _text("of the choice, to repeat one; none: a fresh one, printed", "INT")] = (
        None
    )
    json: Json = None


@dataclasses.dataclass(frozen=True)
class Floors:
    """Count writes on each task's evaluation episodes: every event, what changes something, and with a default value.

    Only the last is a bound: of a memory that answers all and says class 0 where nothing is stored.
    """

    json: Json = None


@dataclasses.dataclass(frozen=True)
class Counts:
    """Parameters, those a gradient reaches, state bytes and allocator peaks of every variant."""

    batch: Annotated[int, _text("episodes of the training step", "INT")] = 64
    budget: Annotated[str, _text("state sizes N, comma separated", "16,32,...")] = "16,32,64"
    device: Annotated[str, _text("of the peaks: cpu or cuda", "NAME")] = "cpu"
    json: Json = None


@dataclasses.dataclass(frozen=True)
class Presets:
    """List the presets and how many cells each has."""

    json: Json = None


@dataclasses.dataclass(frozen=True)
class Speed:
    """Time a gradient step of the chunked scan and of the step-by-step loop, interleaved."""

    rounds: Annotated[int, _text("steps of each", "INT")] = 20
    batch: Annotated[int, _text("episodes a step", "INT")] = 64
    json: Json = None


COMMANDS: dict[str, type] = {
    "sweep": Sweep,
    "train": Train,
    "eval": Eval,
    "table": Table,
    "figures": Figures,
    "verify": Verify,
    "floors": Floors,
    "counts": Counts,
    "speed": Speed,
    "presets": Presets,
}
