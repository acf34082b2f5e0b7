"""`aura sim`: check what was given, run the nodes, show progress, sum the episode up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from aura_ros.errors import UserError
from aura_ros.nodes.options import same_limit
from aura_ros.nodes.policy_config import PolicyNodeConfig
from aura_ros.nodes.sim_config import SimNodeConfig
from aura_ros.preflight import (
    check_bag,
    check_json,
    check_policy_files,
    check_python,
    check_renderer,
    node_config,
    prepare_environment,
    ros_domain_of_its_own,
)
from aura_ros.report.bag import incomplete, target
from aura_ros.share import share_directory
from aura_ros.sim.cues import schedule
from aura_ros.types import LIBERO_ACTION_SPEC

CONTROL_PERIOD_S = LIBERO_ACTION_SPEC.period_s


class Interrupts:
    """Counts INT and TERM from the first check to the last line of the summary, instead of dying of them."""

    def __init__(self) -> None:
        self.count = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        self._previous = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        """Whether a signal came."""
        return self.count > 0

    def _on_signal(self, *_: object) -> None:
        self.count += 1


def run_sim(
    *,
    sim: dict[str, Any],
    policy: dict[str, Any],
    record: Path | None,
    record_images: bool,
    record_latents: bool,
    json_path: Path | None,
    sim_python: str | None,
) -> int:
    """Run one episode and print its summary; returns the exit status.

    sim, policy: values given on the command line, by field of `SimNodeConfig` and `PolicyNodeConfig`; what is not
    given comes from config/libero_sim.yaml. Raises UserError before anything is started or written.
    """
    with Interrupts() as interrupted:
        share = share_directory()
        config_file = share / "config" / "libero_sim.yaml"
        sim = same_limit(sim, policy)
        sim_config = node_config(SimNodeConfig, config_file, "libero_sim", sim)
        policy_config = node_config(PolicyNodeConfig, config_file, "policy_node", policy)
        run_directory = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
        while run_directory.exists():
            run_directory = run_directory.with_name(run_directory.name + "x")
        bag = target(record or run_directory / "bag")
        check_policy_files(policy_config)
        if json_path is not None:
            check_json(json_path)
        check_bag(bag)
        check_renderer()
        python = check_python(sim_python)
        with ros_domain_of_its_own():
            if interrupted():
                return 0
            try:
                (run_directory / "logs").mkdir(parents=True)
            except OSError as error:
                raise UserError(
                    f"folder '{run_directory}' cannot be made ({error.strerror}); run where you may write"
                ) from None
            prepare_environment(share, (run_directory / "logs").resolve())
            if json_path is not None:
                json_path.unlink(missing_ok=True)  # an older result must not be taken for this run's

            # rclpy is imported here: `aura --help` and mistakes above need no ROS.
            from aura_ros.nodes.supervisor import Plan, Supervisor

            plan = Plan(
                config=config_file,
                logs=(run_directory / "logs").resolve(),
                parameters={
                    "libero_sim": {**sim, "frames": str(run_directory.resolve())},
                    "policy_node": {
                        **{k.replace("__", "."): v for k, v in policy.items()},
                        "wait_for_recorder": "gate_recorder",
                        "publish_latent": record_latents,
                    },
                    "gate_recorder": {
                        "output": str(bag),
                        "record_images": record_images,
                        "record_latents": record_latents,
                    },
                },
                sim_python=python,
            )
            console = Console(stderr=True)
            _say(
                console,
                f"{sim_config.suite} task {sim_config.task}, initial state {sim_config.init_state}, "
                f"seed {sim_config.seed}; bag: {bag}",
            )
            with _Display(console, sim_config) as display:
                outcome = Supervisor(plan, display.update, interrupted).run()
        return _conclude(outcome, bag, run_directory, json_path, console)


def _conclude(outcome: Any, bag: Path, pictures: Path, json_path: Path | None, console: Console) -> int:
    """Say what went wrong, print and write the summary; returns the exit status."""
    unfinished = incomplete(bag)
    code, problem = outcome.code, outcome.problem
    if code == 2 and not outcome.seen.steps:
        # Nothing ran: a bag of empty heartbeats would only mislead.
        for leftover in (bag, unfinished):
            shutil.rmtree(leftover, ignore_errors=True)
        raise UserError(problem)
    if code == 2:
        code = 1  # found out on the way, such as a full disk: what was recorded stays
    if not bag.is_dir():
        if unfinished.is_dir():
            problem, code = problem or "the recording was not finished", code or 1
            if str(unfinished) not in problem:
                problem += f"; what was recorded is in {unfinished}"
        elif outcome.interrupted:
            problem = "interrupted before anything was recorded"
    if problem:
        _say(console, problem, "red")
    if not bag.is_dir():
        return code
    summary = summarize(bag, outcome.seen)
    names = ["first.png", *sorted(path.name for path in pictures.glob("gate-*.png")), "last.png"]
    summary["frames"] = [str(pictures / name) for name in names if (pictures / name).exists()]
    if json_path is not None:
        json_path = json_path.resolve()  # a link stays one
        temporary = json_path.with_name(f".{json_path.name}.tmp")
        try:
            temporary.write_text(json.dumps(summary, indent=2) + "\n")
            os.replace(temporary, json_path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            _say(console, f"json '{json_path}' cannot be written ({error.strerror})", "red")
            code = code or 1
    sys.stdout.write(describe(summary, outcome.seen, outcome.interrupted))
    return code


def _say(console: Console, text: str, style: str = "") -> None:
    """One line as it is: brackets are no markup, and a path is not broken in two."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def summarize(bag: Path, seen: Any) -> dict[str, Any]:
    """The episode in numbers, counted from the bag's own messages."""
    from aura_ros.report.reading import read_bag, summarize_bag

    counted = summarize_bag(bag)
    by_end: dict[str, list[Any]] = {"status": [], "gate": [], "action_chunk": []}
    topics = [topic for topic in counted.messages if topic.rsplit("/", 1)[-1] in by_end]
    for found in read_bag(bag, topics) if topics else ():
        by_end[found.topic.rsplit("/", 1)[-1]].append(found.message)
    statuses = [message for message in by_end["status"] if message.queries]
    gates = by_end["gate"]
    # A repeated observation gets its chunk once more.
    chunks = {(message.epoch, message.sequence) for message in by_end["action_chunk"]}
    last = statuses[-1] if statuses else None
    episode = counted.episodes[-1] if counted.episodes else None
    # Without the simulator's last word: the steps that led to the last observation.
    stamps = [m.message.header.stamp for m in read_bag(bag) if m.topic.endswith("/action_chunk")]
    seen_s = (
        stamps[-1].sec - stamps[0].sec + (stamps[-1].nanosec - stamps[0].nanosec) / 1e9 if stamps else 0.0
    )
    steps = episode.steps if episode else round(seen_s / CONTROL_PERIOD_S)
    seconds = steps * CONTROL_PERIOD_S
    return {
        "success": bool(episode and episode.success),
        "reason": episode.reason if episode else "the episode did not end",
        "steps": steps,
        "queries": episode.queries if episode else len(chunks),
        "memory_steps": counted.gate.steps,
        "fired": counted.gate.fired,
        "writes": counted.gate.writes,
        "write_rate": counted.gate.write_rate,
        "fired_steps": fired_steps(gates),
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


def fired_steps(gates: list[Any]) -> list[int]:
    """Control steps, since the first observation, at which the gate fired."""
    stamps = [(gate.fired, gate.header.stamp.sec + gate.header.stamp.nanosec / 1e9) for gate in gates]
    return [round((at - stamps[0][1]) / CONTROL_PERIOD_S) for fired, at in stamps if fired]


def _listed(items: list[str], most: int = 12) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more if items else "none"


def describe(summary: dict[str, Any], seen: Any, interrupted: bool) -> str:
    """The summary as a person reads it."""
    latency = summary["latency_ms"]
    lines = [
        f"success         {'yes' if summary['success'] else 'no'} ({summary['reason']})",
        f"steps           {summary['steps']} control steps, {summary['queries']} queries",
        f"memory          {summary['writes']} writes in {summary['memory_steps']} steps "
        f"({100 * summary['write_rate']:.0f} %), {summary['writes_per_second']:.2f} writes/s of simulated time",
        f"gate fired at   control steps {_listed([str(step) for step in summary['fired_steps']])}",
        f"state           {summary['state_bytes_first']} bytes at the first step, {summary['state_bytes_last']} at the last",
        f"latency         p50 {latency['p50']:.1f} ms, p95 {latency['p95']:.1f} ms, p99 {latency['p99']:.1f} ms a query",
        f"bag             {summary['bag']}",
        f"frames          {_listed(summary['frames'])}",
    ]
    if interrupted:
        lines.insert(0, "interrupted; what follows is the episode up to then")
    notes = []
    if seen.info is not None and not seen.info.trained:
        notes.append(
            f"the {summary['backbone']} backbone has untrained, seeded random weights "
            f"({summary['checkpoint']}): the arm moves without aim and a success is not to be expected"
        )
    if seen.info is not None and seen.info.memory_checkpoint.startswith("untrained"):
        notes.append("the memory is untrained: its gate fires at random and its residual is zero")
    lines += [f"{'' if index else 'note':<15} {note}" for index, note in enumerate(notes)]
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
            "starting", total=config.episode().step_limit + schedule(config.episode()).held, note=""
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
            _say(self._console, f"{description}: {done} steps {note}")
