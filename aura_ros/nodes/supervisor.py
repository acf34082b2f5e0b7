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

# A node has this long to end after a signal before the next, harder one.
GRACE_S = 3.0
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
    state_bytes_first: int = 0


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

    def _keep(self, name: str) -> Callable[[Any], None]:
        return lambda msg: setattr(self.seen, name, msg)

    def _on_gate(self, msg: GateEvent) -> None:
        seen = self.seen
        seen.gate, seen.steps, seen.writes = msg, seen.steps + 1, seen.writes + (msg.bytes_written > 0)
        seen.state_bytes_first = seen.state_bytes_first or msg.state_bytes


class Supervisor:
    """Runs a plan to its end. `run` returns only when every process it started has ended."""

    def __init__(self, plan: Plan, on_progress: Callable[[Seen], None]):
        self._plan, self._on_progress = plan, on_progress
        self._children: list[Child] = []
        self._signals = 0
        # Elsewhere than on Linux, kill -9 of the supervisor leaves the nodes to their own time-outs.
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._transitions = [Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_ACTIVATE]

    def run(self) -> Outcome:
        """Start everything, wait for the episode's end or a signal, end everything."""
        self._plan.logs.mkdir(parents=True, exist_ok=True)
        previous = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        executor: SingleThreadedExecutor | None = None
        try:
            # Before rclpy starts threads of its own: a fork of a process with threads may hang.
            for name in ("gate_recorder", "policy_node", "libero_sim"):
                self._start(name)
            rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
            observer, executor = Observer(), SingleThreadedExecutor()
            executor.add_node(observer)
            ended = self._watch(observer, executor)
            problem, code = self._judge(ended)
        finally:
            # The simulator first, then the policy, and the recorder last: it hears the others out.
            for name in ("libero_sim", "policy_node", "gate_recorder"):
                self._end(name, executor)
            if executor is not None:
                executor.shutdown(timeout_sec=1.0)
                observer.destroy_node()
            rclpy.try_shutdown()
            for number, handler in previous.items():
                signal.signal(number, handler)
        return Outcome(code, problem, self._signals > 0, observer.seen)

    def _on_signal(self, *_: Any) -> None:
        self._signals += 1

    def _die_with_parent(self) -> None:
        """In a child: be told to end when the supervisor dies, however it dies."""
        if self._libc is not None:
            self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGINT)

    def _start(self, name: str) -> None:
        overrides = self._plan.logs / f"{name}.params.yaml"
        # JSON is YAML, and its strings stay strings ("yes", "3.0").
        overrides.write_text(
            json.dumps({f"/**/{name}": {"ros__parameters": self._plan.parameters.get(name, {})}})
        )
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

    def _watch(self, observer: Observer, executor: SingleThreadedExecutor) -> Child | None:
        """Spin until a process ends (returned) or a signal comes (None)."""
        pending: Any = None
        while not self._signals:
            executor.spin_once(timeout_sec=0.1)
            for child in self._children:
                if child.process.poll() is not None:
                    return child
            if pending is not None and pending.done():
                result, pending = pending.result(), None
                if result is not None and result.success:
                    self._transitions.pop(0)
                else:
                    self._transitions.clear()  # the node says why and ends
            if pending is None and self._transitions and observer.lifecycle.service_is_ready():
                pending = observer.lifecycle.call_async(
                    ChangeState.Request(transition=Transition(id=self._transitions[0]))
                )
            self._on_progress(observer.seen)
        return None

    def _judge(self, ended: Child | None) -> tuple[str, int]:
        if ended is None:
            return "", 0
        code = ended.process.returncode
        if ended.name == "libero_sim" and code == 0:
            return "", 0
        # A node that ends for a user's mistake and the one that notices may end together: the mistake is the cause.
        for child in self._children:
            if child is not ended and child.process.poll() == 2:
                ended, code = child, 2
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        said = _last_line(ended.log)
        if code == 2 and said:
            return said, 2
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


def _last_line(log: Path) -> str:
    """The last thing a node said, without the logger's prefix."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("[ERROR]", "[FATAL]"))]
    said = (errors or lines or [""])[-1]
    return said.split("]: ", 1)[1] if said.startswith("[") and "]: " in said else said
