"""Start simulator, policy and recorder as processes, drive the policy's lifecycle, and end them all together.

What a launch file does, for people who have pip and no `ros2 launch`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rclpy
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions

from aura_ros.errors import UserError
from aura_ros.msg import EpisodeStatus, GateEvent, PolicyInfo, PolicyStatus
from aura_ros.nodes import qos
from aura_ros.nodes.sim_config import INTERRUPTED

# A node has this long to end after a signal before the next, harder one.
GRACE_S = 3.0
# How long the last messages of an ended simulator are waited for.
LAST_WORDS_S = 0.5
NODES = ("gate_recorder", "policy_node", "libero_sim")
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Plan:
    """What to run. Parameters are per node, on top of the installed YAML.

    config: the YAML file. logs: folder for the nodes' output. sim_python: interpreter of the simulator, for an
    environment of its own; None: this one.
    """

    config: Path
    logs: Path
    parameters: dict[str, dict[str, Any]]
    sim_python: str | None = None


@dataclass
class Seen:
    """The newest message of each kind, and the gate's counts."""

    episode: EpisodeStatus | None = None
    gate: GateEvent | None = None
    info: PolicyInfo | None = None
    status: PolicyStatus | None = None
    steps: int = 0
    writes: int = 0


@dataclass
class Outcome:
    """How the run ended. code: 0 the episode ran to its end or was interrupted, 1 a node failed, 2 a user's mistake."""

    code: int
    problem: str
    interrupted: bool
    seen: Seen


@dataclass
class Child:
    """A node's process."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


class Observer(Node):
    """Watches the run's topics for the progress display and calls the policy's lifecycle service."""

    def __init__(self) -> None:
        super().__init__("aura_sim")
        self.seen = Seen()
        self.create_subscription(GateEvent, "policy_node/gate", self._on_gate, qos.RELIABLE)
        self.create_subscription(PolicyInfo, "policy_node/info", self._keep("info"), qos.LATCHED)
        self.create_subscription(PolicyStatus, "policy_node/status", self._keep("status"), qos.RELIABLE)
        self.create_subscription(EpisodeStatus, "episode", self._keep("episode"), qos.LATCHED)
        self.lifecycle: Any = self.create_client(ChangeState, "policy_node/change_state")

    def stranger(self) -> str:
        """Says which node of another run is heard here, whose messages would mix with this run's; else nothing."""
        # Nodes of a robot's own namespaces are no strangers: their topics have other names.
        names = [name for name, namespace in self.get_node_names_and_namespaces() if namespace == "/"]
        for name in (*NODES, self.get_name()):
            if names.count(name) > 1:
                return f"another {name} runs in ROS domain {os.environ.get('ROS_DOMAIN_ID') or 0}"
        return ""

    def episode_over(self) -> bool:
        """Whether the simulator told the episode's end."""
        return self.seen.episode is not None and self.seen.episode.phase == EpisodeStatus.FINISHED

    def _keep(self, name: str) -> Callable[[Any], None]:
        return lambda msg: setattr(self.seen, name, msg)

    def _on_gate(self, msg: GateEvent) -> None:
        seen = self.seen
        seen.gate, seen.steps, seen.writes = msg, seen.steps + 1, seen.writes + (msg.bytes_written > 0)


class Supervisor:
    """Runs a plan to its end. `run` returns only when every process it started has ended.

    interrupted: asked often; True (INT or TERM came) ends the run.
    """

    def __init__(self, plan: Plan, on_progress: Callable[[Seen], None], interrupted: Callable[[], bool]):
        self._plan, self._on_progress, self._interrupted = plan, on_progress, interrupted
        self._children: list[Child] = []
        # Elsewhere than on Linux, kill -9 of the supervisor leaves the nodes to their own time-outs.
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._transitions = [Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_ACTIVATE]

    def run(self) -> Outcome:
        """Start everything, wait for the episode's end or an interrupt, end everything."""
        self._plan.logs.mkdir(parents=True, exist_ok=True)
        executor: SingleThreadedExecutor | None = None
        try:
            # Before rclpy starts threads of its own: a fork of a process with threads may hang.
            for name in NODES:
                self._start(name)
            rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
            observer, executor = Observer(), SingleThreadedExecutor()
            executor.add_node(observer)
            problem, code = self._watch(observer, executor)
        finally:
            # The simulator first, then the policy, and the recorder last: it hears the others out.
            for name in reversed(NODES):
                self._end(name, executor)
            if executor is not None:
                executor.shutdown(timeout_sec=1.0)
                observer.destroy_node()
            rclpy.try_shutdown()
        return Outcome(code, problem, self._interrupted(), observer.seen)

    def _die_with_parent(self) -> None:
        """In a child: be told to end when the supervisor dies, however it dies."""
        if self._libc is not None:
            # Not INT: what a shell starts in the background ignores it until a handler is in place.
            self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    def _start(self, name: str) -> None:
        overrides = self._plan.logs / f"{name}.params.yaml"
        # JSON is YAML, and its strings stay strings ("yes", "3.0").
        parameters = {f"/**/{name}": {"ros__parameters": self._plan.parameters.get(name, {})}}
        overrides.write_text(json.dumps(parameters, ensure_ascii=False), encoding="utf-8")
        env = dict(os.environ)
        python = sys.executable
        if name == "libero_sim" and self._plan.sim_python:
            python = self._plan.sim_python
            # Another interpreter's ROS wheels must find their own libraries, so their start-up runs again.
            env.pop("_ROS_WHEELS_BOOTSTRAP_COMPLETE", None)
        command = [python, "-m", "aura_ros.nodes", name, "--ros-args"]
        command += ["--params-file", str(self._plan.config), "--params-file", str(overrides)]
        log = self._plan.logs / f"{name}.log"
        with log.open("wb") as output:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=env,
                    start_new_session=True,  # Ctrl-C reaches the children in our order, not all at once
                    preexec_fn=self._die_with_parent,
                )
            except OSError as error:
                raise UserError(
                    f"cannot start {name} with '{python}' ({error}); give a Python interpreter"
                ) from error
        self._children.append(Child(name, process, log))

    def _watch(self, observer: Observer, executor: SingleThreadedExecutor) -> tuple[str, int]:
        """Spin until a process ends, the run cannot go on or it is interrupted; returns problem and exit status."""
        pending: Any = None
        while not self._interrupted():
            executor.spin_once(timeout_sec=0.1)
            for child in self._children:
                if child.process.poll() is not None:
                    self._hear_last_words(observer, executor)
                    return self._judge(child, observer.seen)
            if self._transitions and (stranger := observer.stranger()):
                return f"{stranger}; set ROS_DOMAIN_ID to a number that nobody uses", 2
            if pending is not None and pending.done():
                result, pending = pending.result(), None
                if result is not None and result.success:
                    self._transitions.pop(0)
                elif self._transitions[0] == Transition.TRANSITION_ACTIVATE:
                    log = self._plan.logs / "policy_node.log"
                    return f"policy_node cannot be activated: {_last_line(log)}; its output is in {log}", 1
                else:
                    self._transitions.clear()  # the node says why and ends
            if pending is None and self._transitions and observer.lifecycle.service_is_ready():
                pending = observer.lifecycle.call_async(
                    ChangeState.Request(transition=Transition(id=self._transitions[0]))
                )
            self._on_progress(observer.seen)
        return "", 0

    def _hear_last_words(self, observer: Observer, executor: SingleThreadedExecutor) -> None:
        """Take what the ended process had sent: it waits in the subscriptions."""
        deadline = time.monotonic() + LAST_WORDS_S
        while not observer.episode_over() and time.monotonic() < deadline:
            executor.spin_once(timeout_sec=0.05)

    def _judge(self, ended: Child, seen: Seen) -> tuple[str, int]:
        code = ended.process.returncode
        if ended.name == "libero_sim" and code == 0:
            if seen.episode is None or seen.episode.phase != EpisodeStatus.FINISHED:
                return f"libero_sim ended before the episode did; its output is in {ended.log}", 1
            if seen.episode.reason == INTERRUPTED:
                return "libero_sim was interrupted by a signal that did not come from here", 1
            return "", 0
        # A node that ends for a user's mistake and the one that notices may end together: the mistake is the cause.
        for child in self._children:
            if child is not ended and child.process.poll() == 2:
                ended, code = child, 2
        said = _last_line(ended.log, errors_only=code < 0)
        if code == 2 and said:
            return said, 2
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return f"{ended.name} {how}{': ' + said if said else ''}; its output is in {ended.log}", 1

    def _end(self, name: str, executor: SingleThreadedExecutor | None) -> None:
        for child in (c for c in self._children if c.name == name):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
                if child.process.poll() is not None:
                    break
                child.process.send_signal(number)
                deadline = time.monotonic() + GRACE_S
                while child.process.poll() is None and time.monotonic() < deadline:
                    if executor is not None:
                        executor.spin_once(timeout_sec=0.05)
                    else:
                        time.sleep(0.05)
            child.process.wait()


def _last_line(log: Path, errors_only: bool = False) -> str:
    """The last thing a node said, without the logger's prefix; errors come first."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("[ERROR]", "[FATAL]"))]
    said = (errors or ([] if errors_only else lines) or [""])[-1]
    return said.split("]: ", 1)[1] if said.startswith("[") and "]: " in said else said
