"""`aura sim`: check what was given, run the nodes, show progress, sum the episode up."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from aura_ros.config import check_value
from aura_ros.errors import UserError
from aura_ros.nodes.policy_config import PolicyNodeConfig
from aura_ros.nodes.sim_config import SimNodeConfig
from aura_ros.share import share_directory

CONTROL_PERIOD_S = 0.05
QUICK_DISCOVERY = "fastdds_fast_discovery.xml"


def run_sim(
    *,
    sim: dict[str, Any],
    policy: dict[str, Any],
    record: Path | None,
    record_images: bool,
    json_path: Path | None,
    sim_python: str | None,
) -> int:
    """Run one episode and print its summary; returns the exit status.

    sim, policy: values given on the command line, by field of `SimNodeConfig` and `PolicyNodeConfig`; what is not
    given comes from config/libero_sim.yaml. Raises UserError before anything is started or written.
    """
    share = share_directory()
    config_file = share / "config" / "libero_sim.yaml"
    sim_config = _checked(SimNodeConfig, config_file, "libero_sim", sim)
    policy_config = _checked(PolicyNodeConfig, config_file, "policy_node", policy)
    for what, path in (
        ("checkpoint", policy_config.checkpoint),
        ("memory checkpoint", policy_config.memory__checkpoint),
    ):
        if path and not Path(path).exists():
            raise UserError(f"{what} '{path}' does not exist; give an existing file or folder")
    if json_path is not None and (json_path.is_dir() or not json_path.resolve().parent.is_dir()):
        raise UserError(f"json '{json_path}' cannot be written; give a file in an existing folder")
    run_directory = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    while run_directory.exists():
        run_directory = run_directory.with_name(run_directory.name + "x")
    bag = (record or run_directory / "bag").resolve()
    _check_bag(bag)
    try:
        (run_directory / "logs").mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"folder '{run_directory}' cannot be made ({error.strerror}); run where you may write"
        ) from None
    _prepare_environment(share)

    # rclpy is imported here: `aura --help` and mistakes above need no ROS.
    from aura_ros.nodes.supervisor import Plan, Supervisor

    plan = Plan(
        config=config_file,
        logs=(run_directory / "logs").resolve(),
        parameters={
            "libero_sim": sim,
            "policy_node": {
                **{k.replace("__", "."): v for k, v in policy.items()},
                "wait_for_gate_subscribers": 2,
            },
            "gate_recorder": {"output": str(bag), "record_images": record_images},
        },
        sim_python=sim_python,
    )
    console = Console(stderr=True)
    console.print(
        f"{sim_config.suite} task {sim_config.task}, initial state {sim_config.init_state}, seed {sim_config.seed}; "
        f"bag: {bag}"
    )
    with _Display(console, sim_config) as display:
        outcome = Supervisor(plan, display.update).run()
    if outcome.code == 2:
        # Nothing ran: a bag of empty heartbeats would only mislead.
        for leftover in (bag, bag.with_name(bag.name + ".incomplete")):
            shutil.rmtree(leftover, ignore_errors=True)
        raise UserError(outcome.problem)
    if outcome.problem:
        console.print(f"[red]{outcome.problem}[/red]", highlight=False)
    if not bag.is_dir():
        return outcome.code or 1
    summary = summarize(bag, outcome.seen)
    if json_path is not None:
        temporary = json_path.with_name(f".{json_path.name}.tmp")
        temporary.write_text(json.dumps(summary, indent=2) + "\n")
        os.replace(temporary, json_path)
    sys.stdout.write(describe(summary, outcome.seen, outcome.interrupted))
    return outcome.code


def summarize(bag: Path, seen: Any) -> dict[str, Any]:
    """The episode in numbers, counted from the bag's own messages."""
    from aura_ros.report.reading import read_bag, summarize_bag

    counted = summarize_bag(bag)
    statuses = [m.message for m in read_bag(bag) if m.topic.endswith("/status") and m.message.queries]
    gates = [m.message for m in read_bag(bag) if m.topic.endswith("/gate")]
    last = statuses[-1] if statuses else None
    episode = counted.episodes[-1] if counted.episodes else None
    steps = episode.steps if episode else 0
    seconds = steps * CONTROL_PERIOD_S
    return {
        "success": bool(episode and episode.success),
        "reason": episode.reason if episode else "the episode did not end",
        "steps": steps,
        "queries": counted.messages.get("/action_chunk", 0),
        "memory_steps": counted.gate.steps,
        "fired": counted.gate.fired,
        "writes": counted.gate.writes,
        "write_rate": counted.gate.write_rate,
        "writes_per_second": counted.gate.writes / seconds if seconds else 0.0,
        "state_bytes_first": int(gates[0].state_bytes) if gates else 0,
        "state_bytes_last": int(gates[-1].state_bytes) if gates else 0,
        "latency_ms": {
            "p50": float(last.inference_p50_ms) if last else 0.0,
            "p95": float(last.inference_p95_ms) if last else 0.0,
            "p99": float(last.inference_p99_ms) if last else 0.0,
        },
        "backbone": seen.info.backbone if seen.info else "",
        "checkpoint": seen.info.checkpoint if seen.info else "",
        "trained": bool(seen.info.trained) if seen.info else False,
        "bag": str(bag),
    }


def describe(summary: dict[str, Any], seen: Any, interrupted: bool) -> str:
    """The summary as a person reads it."""
    latency = summary["latency_ms"]
    lines = [
        f"success         {'yes' if summary['success'] else 'no'} ({summary['reason']})",
        f"steps           {summary['steps']} control steps, {summary['queries']} queries",
        f"memory          {summary['writes']} writes in {summary['memory_steps']} steps "
        f"({100 * summary['write_rate']:.0f} %), {summary['writes_per_second']:.2f} writes/s of simulated time",
        f"state           {summary['state_bytes_first']} bytes at the first step, {summary['state_bytes_last']} at the last",
        f"latency         p50 {latency['p50']:.1f} ms, p95 {latency['p95']:.1f} ms, p99 {latency['p99']:.1f} ms a query",
        f"bag             {summary['bag']}",
    ]
    if interrupted:
        lines.insert(0, "interrupted; what follows is the episode up to then")
    if seen.info is not None and not seen.info.trained:
        lines.append(
            f"note            the {summary['backbone']} backbone has untrained, seeded random weights "
            f"({summary['checkpoint']}): the arm moves without aim and a success is not to be expected"
        )
    if seen.info is not None and seen.info.memory_checkpoint.startswith("untrained"):
        lines.append(
            "                the memory is untrained too: its gate fires at random and its residual is zero"
        )
    return "\n".join(lines) + "\n"


class _Display:
    """Progress over control steps with the live write rate; quiet lines where there is no terminal."""

    def __init__(self, console: Console, config: SimNodeConfig):
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._console = console
        self._task = self._progress.add_task(
            "starting", total=config.max_steps or config.episode().step_limit, note=""
        )
        self._said = -1

    def __enter__(self) -> _Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, seen: Any) -> None:
        """Show the newest state of the run."""
        period = seen.info.memory_step_period if seen.info is not None else 0
        note, done = "", seen.steps * period
        if seen.gate is not None:
            note = f"write rate {100 * seen.gate.write_rate:.0f} %, {seen.gate.state_bytes} bytes"
        description = (
            "running" if seen.steps else ("waiting for LIBERO" if seen.info else "loading the policy")
        )
        self._progress.update(self._task, completed=done, description=description, note=note)
        tenth = seen.steps // 10
        if not self._console.is_terminal and tenth != self._said:
            self._said = tenth
            self._console.print(f"{description}: {done} steps {note}", highlight=False)


def _checked(config_type: Any, file: Path, node: str, given: dict[str, Any]) -> Any:
    """The node's configuration: defaults, the YAML's values, then what was given; checked as a whole."""
    fields = {f.name: f for f in dataclasses.fields(config_type)}
    for name, value in given.items():
        check_value(fields[name], value)
    document = yaml.safe_load(file.read_text())
    values = {k.replace(".", "__"): v for k, v in document[f"/**/{node}"]["ros__parameters"].items()}
    known = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in fields}
    return config_type(**{**known, **given})


def _check_bag(bag: Path) -> None:
    if bag.exists() and (not bag.is_dir() or any(bag.iterdir())):
        raise UserError(f"record '{bag}' exists and is not empty; give a new directory or remove it")
    parent = bag.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(
            f"record '{bag}' cannot be made in '{parent}'; give a directory in a place you may write"
        )


def _prepare_environment(share: Path) -> None:
    """Defaults that a person's own settings override: this machine only, quick discovery, rendering off screen."""
    os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    profile = share / "config" / QUICK_DISCOVERY
    if profile.is_file():
        # Fast DDS 2 (up to Jazzy) reads the old name, Fast DDS 3 the new one and warns about the old.
        old = os.environ.get("ROS_DISTRO") in ("humble", "iron", "jazzy")
        os.environ.setdefault(f"{'FASTRTPS' if old else 'FASTDDS'}_DEFAULT_PROFILES_FILE", str(profile))
    os.environ.setdefault("MUJOCO_GL", "osmesa")
