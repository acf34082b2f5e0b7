"""`aura ...`: the package's jobs without a ROS command line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from aura_ros.errors import UserError
from aura_ros.nodes.policy_config import PolicyNodeConfig
from aura_ros.nodes.sim_config import SimNodeConfig


def _options(config_type: Any, *names: str, **renamed: str) -> list[tuple[str, Any, Any]]:
    """Command line options from a configuration's fields: same type, default and description.

    renamed: option name -> field name.
    """
    hints = get_type_hints(config_type)
    fields = {f.name: f for f in dataclasses.fields(config_type)}
    options: list[tuple[str, Any, Any]] = []
    for option, name in [*((n, n) for n in names), *renamed.items()]:
        spec = fields[name]
        help_text = spec.metadata["description"]
        if spec.metadata["choices"]:
            help_text += f" [{', '.join(map(str, spec.metadata['choices']))}]"
        # None: not given, so that the value in config/libero_sim.yaml stands.
        hint: Any = hints[name] | None
        options.append((option, Annotated[hint, tyro.conf.arg(help=help_text)], dataclasses.field(default=None)))
    return options


SIM_OPTIONS = ("suite", "task", "init_state", "seed", "max_steps", "image_size", "rate")
POLICY_OPTIONS = {
    "backbone": "backbone",
    "checkpoint": "checkpoint",
    "device": "device",
    "dtype": "dtype",
    "unnorm_key": "unnorm_key",
    "policy_seed": "seed",
    "memory_checkpoint": "memory__checkpoint",
    "memory_state_dim": "memory__state_dim",
    "gate_threshold": "gate__threshold",
    "action_limit": "action_limit",
}

Sim = dataclasses.make_dataclass(
    "Sim",
    [
        *_options(SimNodeConfig, *SIM_OPTIONS),
        *_options(PolicyNodeConfig, **POLICY_OPTIONS),
        (
            "record",
            Annotated[Path | None, tyro.conf.arg(help="bag directory to make; left out: runs/<time>/bag")],
            dataclasses.field(default=None),
        ),
        (
            "record_images",
            Annotated[bool, tyro.conf.arg(help="record the camera images too")],
            dataclasses.field(default=False),
        ),
        (
            "json",
            Annotated[Path | None, tyro.conf.arg(help="write the summary to this file")],
            dataclasses.field(default=None),
        ),
        (
            "sim_python",
            Annotated[
                str | None, tyro.conf.arg(help="interpreter of the simulator, if LIBERO lives elsewhere")
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


COMMANDS: dict[str, Any] = {"sim": Sim, "doctor": Doctor}


def run_sim(command: Any) -> int:
    """Run `aura sim`; returns the exit status."""
    from aura_ros.sim_run import run_sim as run

    given = {k: v for k, v in dataclasses.asdict(command).items() if v is not None}
    return run(
        sim={name: given[name] for name in SIM_OPTIONS if name in given},
        policy={field: given[option] for option, field in POLICY_OPTIONS.items() if option in given},
        record=command.record,
        record_images=command.record_images,
        json_path=command.json,
        sim_python=command.sim_python,
    )


def run_doctor(command: Doctor) -> int:
    """Run `aura doctor`; returns the exit status."""
    from aura_ros.doctor import run_doctor as run

    return run(quick=command.quick)


RUNNERS: dict[type, Callable[[Any], int]] = {Sim: run_sim, Doctor: run_doctor}


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
        message = " ".join(line for line in lines[1:] if line and not line.startswith("─"))
        message = re.split(r"For full helptext|Argument helptext:", message)[0].strip()
        raise UserError(f"{message} (see: aura {arguments[0] if arguments else ''} --help)") from None


def main() -> None:
    """Entry point of the `aura` command: 0 done, 1 failed, 2 a mistake in what was given (one line says which)."""
    try:
        command = parse(sys.argv[1:])
        status = RUNNERS[type(command)](command)
    except UserError as mistake:
        sys.stderr.write(f"aura: {mistake}\n")
        status = 2
    except BrokenPipeError:
        # The reader of our output went away (`aura ... | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)


if __name__ == "__main__":
    main()
