"""`aura ...`: the package's jobs without a ROS command line."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import operator
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from aura_ros.backbones.openvla_oft.layout import FolderOptions
from aura_ros.bench.backbone_config import OPTIONS as BENCH_OPTIONS
from aura_ros.bench.backbone_config import BackboneBenchConfig
from aura_ros.certify_command import Certify, run_certify
from aura_ros.collect_command import Collect, run_collect
from aura_ros.endless_command import Endless, run_endless
from aura_ros.errors import UserError
from aura_ros.eval_command import Eval, run_eval
from aura_ros.expert_command import Expert, run_expert_command
from aura_ros.index_command import Index, run_index
from aura_ros.memory_command import TrainMemory, run_train_memory
from aura_ros.nodes.bench_config import OPTIONS as NODE_BENCH_OPTIONS
from aura_ros.nodes.bench_config import NodeBenchConfig
from aura_ros.nodes.options import POLICY_OPTIONS, SIM_OPTIONS, read_options
from aura_ros.nodes.policy_config import PolicyNodeConfig
from aura_ros.nodes.sim_config import SimNodeConfig
from aura_ros.panel_command import Panel, run_panel
from aura_ros.recall_command import COMMANDS as RECALL_COMMANDS
from aura_ros.recall_command import run as run_recall
from aura_ros.train_command import TrainBackbone, run_train_backbone

# Not given on the command line, so that the value in config/libero_sim.yaml stands; no argument can hold a NUL.
NOT_GIVEN = "\0"
# The policy's options that say what a checkpoint folder does not.
FOLDER_OPTIONS = {name: spec for name, spec in POLICY_OPTIONS.items() if spec.startswith("openvla_oft__")}
INTERRUPTED = 128 + signal.SIGINT  # the exit status that shells give to it


def _help(text: str, metavar: str, default: Any) -> Any:
    return tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint=f"(default: {default})")


def _group(name: str, text: str, commands: dict[str, type]) -> type:
    """A command that takes one of these commands: `aura <name> <command>`; it is found in the field `command`."""
    named = [Annotated[c, tyro.conf.subcommand(name=n, prefix_name=False)] for n, c in commands.items()]
    # A union needs two members, and a group may have one command; `None` cannot be chosen.
    one: Any = functools.reduce(operator.or_, named, Annotated[None, tyro.conf.Suppress])
    field = Annotated[one, tyro.conf.arg(help="what to do"), tyro.conf.OmitArgPrefixes]
    group = dataclasses.make_dataclass(name, [("command", field)])
    group.__doc__ = text
    return group


def _options(config_type: Any, **names: str) -> list[tuple[str, Any, Any]]:
    """Command line options from a configuration's fields: same default and description.

    They are read as text and converted with the field's own check, whose error says what is allowed in one line.
    names: option -> field.
    """
    hints = get_type_hints(config_type)
    fields = {f.name: f for f in dataclasses.fields(config_type)}
    options: list[tuple[str, Any, Any]] = []
    for option, name in names.items():
        spec = fields[name]
        help_text = spec.metadata["description"]
        if spec.metadata["choices"]:
            help_text += f" [{', '.join(map(str, spec.metadata['choices']))}]"
        default = "none" if spec.default == "" else spec.default
        hint: Any = Annotated[str, _help(help_text, hints[name].__name__.upper(), default)]
        options.append((option, hint, dataclasses.field(default=NOT_GIVEN)))
    return options


Sim = dataclasses.make_dataclass(
    "Sim",
    [
        *_options(SimNodeConfig, **SIM_OPTIONS),
        *_options(PolicyNodeConfig, **POLICY_OPTIONS),
        (
            "record",
            Annotated[Path | None, _help("bag directory to make", "PATH", "runs/<time>/bag")],
            dataclasses.field(default=None),
        ),
        (
            "record_images",
            Annotated[bool, tyro.conf.arg(help="record the camera images too")],
            dataclasses.field(default=False),
        ),
        (
            "record_latents",
            Annotated[bool, tyro.conf.arg(help="publish and record the policy's hidden states too")],
            dataclasses.field(default=False),
        ),
        (
            "json",
            Annotated[Path | None, _help("write the summary to this file", "PATH", "none")],
            dataclasses.field(default=None),
        ),
        (
            "sim_python",
            Annotated[
                str | None,
                _help("interpreter of the simulator, if LIBERO lives elsewhere", "STR", "this one"),
            ],
            dataclasses.field(default=None),
        ),
    ],
)
Sim.__doc__ = "Run one real LIBERO episode through ROS 2: simulator, policy and recorder as processes."


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Check what this machine has: ROS, messages, torch, MuJoCo, rendering."""

    quick: Annotated[bool, tyro.conf.arg(help="leave out the checks that take more than a few seconds")] = (
        False
    )


OfFolder: Any = dataclasses.make_dataclass(
    "OfFolder", _options(PolicyNodeConfig, **FOLDER_OPTIONS), frozen=True, kw_only=True
)


@dataclasses.dataclass(frozen=True)
class Inspect(OfFolder):
    """Say what a published checkpoint folder holds and what is missing; exit status 2 if it cannot be loaded."""

    path: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(help="folder or owner/name@revision", metavar="DIR")
    ]
    quick: Annotated[bool, tyro.conf.arg(help="names and shapes only: no hash, no search for NaN")] = False
    json: Annotated[Path | None, _help("write the report to this file", "PATH", "none")] = None


@dataclasses.dataclass(frozen=True)
class Convert(OfFolder):
    """Copy a published checkpoint folder as safetensors only: no pickles, no code."""

    path: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(help="folder or owner/name@revision", metavar="DIR")
    ]
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(help="folder to make", metavar="OUT")]


BenchBackbone = dataclasses.make_dataclass(
    "BenchBackbone",
    [
        *_options(BackboneBenchConfig, **BENCH_OPTIONS),
        *_options(PolicyNodeConfig, **FOLDER_OPTIONS),
        (
            "random_weights",
            Annotated[
                bool, tyro.conf.arg(help="seeded random weights, made on the device; as fast as trained ones")
            ],
            dataclasses.field(default=False),
        ),
        (
            "json",
            Annotated[Path | None, _help("write the numbers to this file", "PATH", "none")],
            dataclasses.field(default=None),
        ),
    ],
)
BenchBackbone.__doc__ = (
    "Time one query of OpenVLA-OFT here, and each saving against the reference's forward pass."
)

BenchNode = dataclasses.make_dataclass(
    "BenchNode",
    [
        *_options(NodeBenchConfig, **NODE_BENCH_OPTIONS),
        (
            "json",
            Annotated[Path | None, _help("write the numbers to this file", "PATH", "none")],
            dataclasses.field(default=None),
        ),
    ],
)
BenchNode.__doc__ = "Measure what policy node and player cost beside inference, as real processes."


GROUPS: dict[str, dict[str, type]] = {
    "checkpoint": {"inspect": Inspect, "convert": Convert},
    "bench": {"backbone": BenchBackbone, "node": BenchNode},
    "recall": RECALL_COMMANDS,
    "train": {"backbone": TrainBackbone, "memory": TrainMemory},
}
COMMANDS: dict[str, Any] = {
    "sim": Sim,
    "checkpoint": _group("Checkpoint", "Look into OpenVLA-OFT checkpoint folders.", GROUPS["checkpoint"]),
    "bench": _group("Bench", "Measure what parts of this package cost on this machine.", GROUPS["bench"]),
    "recall": _group("Recall", "Train and judge memories on the paper's recall tasks.", RECALL_COMMANDS),
    "doctor": Doctor,
    "certify": Certify,
    "endless": Endless,
    "expert": Expert,
    "collect": Collect,
    "index": Index,
    "eval": Eval,
    "panel": Panel,
    "train": _group("Train", "Train what a policy is made of.", GROUPS["train"]),
}


def run_sim(command: Any) -> int:
    """Run `aura sim`; returns the exit status."""
    from aura_ros.sim_run import run_sim as run

    return run(
        sim=read_options(vars(command), SimNodeConfig, SIM_OPTIONS, NOT_GIVEN),
        policy=read_options(vars(command), PolicyNodeConfig, POLICY_OPTIONS, NOT_GIVEN),
        record=command.record,
        record_images=command.record_images,
        record_latents=command.record_latents,
        json_path=command.json,
        sim_python=command.sim_python,
    )


def run_doctor(command: Doctor) -> int:
    """Run `aura doctor`; returns the exit status."""
    from aura_ros.doctor import run_doctor as run

    return run(quick=command.quick)


def _folder_options(command: Any) -> FolderOptions:
    """What was said about a checkpoint folder. Raises UserError."""
    given = read_options(vars(command), PolicyNodeConfig, FOLDER_OPTIONS, NOT_GIVEN)
    return PolicyNodeConfig(**given).folder_options()


def run_inspect(command: Inspect) -> int:
    """Run `aura checkpoint inspect`; returns the exit status."""
    from aura_ros.checkpoint_command import run_inspect as run
    from aura_ros.preflight import check_json

    options = _folder_options(command)
    if command.json is not None:
        check_json(command.json)
    return run(command.path, options, quick=command.quick, json_path=command.json)


def run_convert(command: Convert) -> int:
    """Run `aura checkpoint convert`; returns the exit status."""
    from aura_ros.checkpoint_command import run_convert as run

    return run(command.path, command.out, _folder_options(command))


def run_bench_backbone(command: Any) -> int:
    """Run `aura bench backbone`; returns the exit status."""
    from aura_ros.bench.command import run_backbone as run
    from aura_ros.preflight import check_json

    values = read_options(vars(command), BackboneBenchConfig, BENCH_OPTIONS, NOT_GIVEN)
    folder = _folder_options(command)
    config = BackboneBenchConfig(random_weights=command.random_weights, folder=folder, **values)
    if command.json is not None:
        check_json(command.json)
    return run(config, command.json)


def run_bench_node(command: Any) -> int:
    """Run `aura bench node`; returns the exit status."""
    from aura_ros.node_bench_command import run_node_bench

    values = read_options(vars(command), NodeBenchConfig, NODE_BENCH_OPTIONS, NOT_GIVEN)
    return run_node_bench(NodeBenchConfig(**values), command.json)


RUNNERS: dict[type, Callable[[Any], int]] = {
    Sim: run_sim,
    Inspect: run_inspect,
    Convert: run_convert,
    BenchBackbone: run_bench_backbone,
    BenchNode: run_bench_node,
    **dict.fromkeys(RECALL_COMMANDS.values(), run_recall),
    Certify: run_certify,
    Endless: run_endless,
    Expert: run_expert_command,
    Collect: run_collect,
    Index: run_index,
    Eval: run_eval,
    Panel: run_panel,
    TrainBackbone: run_train_backbone,
    TrainMemory: run_train_memory,
    Doctor: run_doctor,
}


def parse(arguments: list[str]) -> Any:
    """Parse a command line. A mistake raises UserError in one line; --help exits."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="aura", args=arguments)
    except SystemExit as end:
        if end.code in (0, None):
            raise
        lines = [re.sub(r"[│╭╮╰╯]", "", line).strip() for line in said.getvalue().splitlines()]
        message = " ".join(line for line in lines[1:] if line.strip("─-"))
        message = re.split(r"For full helptext|Argument helptext:", message)[0].strip()
        known = [name for name in arguments[:1] if name in COMMANDS]
        known += [name for name in arguments[1:2] if known and name in GROUPS.get(known[0], {})]
        see = " ".join(["aura", *known, "--help"])
        raise UserError(f"{message} (see: {see})") from None


def main() -> None:
    """Entry point of the `aura` command: 0 done, 1 failed, 2 a mistake in what was given (one line says which).

    INT ends with 130 and one line; `aura sim` sums up the episode until then and ends with 0, also on TERM.
    """
    command: Any = None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command = parse(sys.argv[1:])
        command = getattr(command, "command", command)  # of a group, the command inside
        status = RUNNERS[type(command)](command)
        sys.stdout.flush()
    except UserError as mistake:
        sys.stderr.write(f"aura: {mistake}\n")
        status = 2
    except KeyboardInterrupt as interrupt:
        if isinstance(command, Sim):  # before or after its episode: nothing is lost
            status = 0
        else:
            sys.stderr.write(f"aura: interrupted; {str(interrupt) or 'run it again to have it whole'}\n")
            status = INTERRUPTED
    except PermissionError as refused:
        sys.stderr.write(
            f"aura: '{refused.filename}' may not be read or written by you; give a place that may\n"
        )
        status = 2
    except (MemoryError, RuntimeError) as short:
        # Torch has no class of its own for what the CPU's allocator refuses.
        if isinstance(short, RuntimeError) and "allocate memory" not in str(short):
            raise
        reason = " ".join(str(short).split())[:160] or "MemoryError"
        sys.stderr.write(f"aura: too little memory ({reason}); give smaller sizes, or fewer at once\n")
        status = 1
    except BrokenPipeError:
        # The reader of our output went away (`aura ... | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except OSError as failed:
        where = f" ('{failed.filename}')" if failed.filename else ""
        sys.stderr.write(f"aura: {failed.strerror or failed}{where}\n")
        status = 1
    finally:
        signal.signal(signal.SIGINT, before)
    sys.exit(status)


if __name__ == "__main__":
    main()
