"""What the nodes cost: real processes, cameras streaming, a player at its rate; and an active node with nothing to do.

Callbacks and overhead are the policy node's own measurements, and the period's error the player's, from `/diagnostics`.
CPU is what the kernel counted for the process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions

from aura_ros.errors import UserError
from aura_ros.msg import ActionChunk
from aura_ros.nodes import conversions, qos
from aura_ros.nodes.bench_config import NodeBenchConfig
from aura_ros.types import LIBERO_ACTION_SPEC

START_S = 60.0
GRACE_S = 3.0
PLAYER = "bench_player"
COLUMNS = LIBERO_ACTION_SPEC.names
HORIZON = 8


class Bench:
    """The processes, and this process's ear on them. Ends what it started, whatever happens."""

    def __init__(self, config: NodeBenchConfig, say: Callable[[str], None]) -> None:
        self.config, self._say = config, say
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs = tempfile.TemporaryDirectory(prefix="aura_bench_")
        self._diagnostics: dict[str, dict[str, str]] = {}

    def __enter__(self) -> Bench:
        rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
        self.node = Node("aura_bench")
        self.executor = SingleThreadedExecutor()
        self.executor.add_node(self.node)
        self.node.create_subscription(DiagnosticArray, "/diagnostics", self._heard, qos.RELIABLE)
        self._chunks = self.node.create_publisher(ActionChunk, f"{PLAYER}/action_chunk", qos.RELIABLE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in (signal.SIGINT, signal.SIGKILL):
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(number)
            deadline = time.monotonic() + GRACE_S
            for process in self._processes:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    continue
        self.executor.shutdown(timeout_sec=1.0)
        self.node.destroy_node()
        rclpy.try_shutdown()
        self._logs.cleanup()

    def run(self) -> dict[str, Any]:
        """Measure; returns the numbers. Raises UserError where a node did not come up."""
        config = self.config
        policy = self._start(
            "policy_node", "", {"mode": "realtime", "instruction": "bench", "enabled_at_start": True}
        )
        self._say(f"an active node without cameras, {config.idle_seconds:g} s")
        begun, cpu = time.monotonic(), _cpu_s(policy)
        self._spin(config.idle_seconds)
        idle = (_cpu_s(policy) - cpu) / (time.monotonic() - begun)
        self._start(
            "synthetic_source", "", {"camera_rate": config.camera_rate, "image_size": config.image_size}
        )
        self._start("chunk_player", f"/{PLAYER}", {"chunk_timeout": 5.0})
        self._say(
            f"two cameras of {config.image_size}x{config.image_size} at {config.camera_rate:g} Hz, a player at "
            f"{config.control_rate:g} Hz, {config.seconds:g} s"
        )
        begun, cpu = time.monotonic(), _cpu_s(policy)
        self._play(config.seconds)
        busy = (_cpu_s(policy) - cpu) / (time.monotonic() - begun)
        self._diagnostics.clear()
        self._wait(lambda: len(self._diagnostics) == 2, "the nodes' diagnostics")
        node, player = (
            self._diagnostics["policy_node: policy"],
            self._diagnostics[f"{PLAYER}/chunk_player: player"],
        )
        return {
            "callback_ms_p50": float(node["callback_ms p50"]),
            "callback_ms_p99": float(node["callback_ms p99"]),
            "overhead_ms_p50": float(node["overhead_ms p50"]),
            "overhead_ms_p99": float(node["overhead_ms p99"]),
            "inference_ms_p50": float(node["inference_p50_ms"]),
            "inference_ms_p99": float(node["inference_p99_ms"]),
            "queries": int(node["queries"]),
            "jitter_ms_p50": float(player["period_error_ms p50"]),
            "jitter_ms_p99": float(player["period_error_ms p99"]),
            "player_rate_hz": float(player["rate_hz"]),
            "idle_cpu_percent": round(100 * idle, 2),
            "busy_cpu_percent": round(100 * busy, 2),
        }

    def _start(self, name: str, namespace: str, parameters: dict[str, Any]) -> subprocess.Popen[bytes]:
        """Start a node's process; a lifecycle node is configured and activated."""
        options = [word for key, value in parameters.items() for word in ("-p", f"{key}:={value}")]
        options += ["-r", f"__ns:={namespace}"] if namespace else []
        log = Path(self._logs.name) / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "aura_ros.nodes", name, "--ros-args", *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(process)
        if name != "synthetic_source":
            client: Any = self.node.create_client(ChangeState, f"{namespace}/{name}/change_state")
            self._wait(lambda: client.service_is_ready() or process.poll() is not None, name)
            for transition in (Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_ACTIVATE):
                future = client.call_async(ChangeState.Request(transition=Transition(id=transition)))
                self._wait(partial(_either, future.done, process), name)
                if process.poll() is not None or not future.result().success:
                    said = log.read_text(errors="replace").strip().splitlines()
                    raise UserError(f"{name} did not start: {said[-1] if said else 'it said nothing'}")
        return process

    def _play(self, seconds: float) -> None:
        """Send the player chunk after chunk, each before the last one is through."""
        period_s = 1.0 / self.config.control_rate
        msg = ActionChunk(
            epoch=time.time_ns(), control_mode=int(LIBERO_ACTION_SPEC.control_mode), horizon=HORIZON
        )
        msg.names, msg.units = list(COLUMNS), list(LIBERO_ACTION_SPEC.units)
        msg.period = conversions.to_duration(period_s)
        msg.data = np.zeros(HORIZON * len(COLUMNS), np.float32).tolist()
        end = following = time.monotonic()
        end += seconds
        while time.monotonic() < end:
            msg.header.stamp = self.node.get_clock().now().to_msg()
            self._chunks.publish(msg)
            msg.sequence += 1
            following += period_s * HORIZON / 2
            while (left := following - time.monotonic()) > 0:
                self.executor.spin_once(timeout_sec=left)

    def _heard(self, msg: DiagnosticArray) -> None:
        for entry in msg.status:
            self._diagnostics[entry.name] = {value.key: value.value for value in entry.values}

    def _spin(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.executor.spin_once(timeout_sec=left)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            if time.monotonic() > deadline:
                raise UserError(f"{what} did not come within {START_S:g} s; see `aura doctor`")
            self.executor.spin_once(timeout_sec=0.05)


def _either(done: Callable[[], bool], process: subprocess.Popen[bytes]) -> bool:
    """Whether something is done, or the process that would do it has ended."""
    return done() or process.poll() is not None


def _cpu_s(process: subprocess.Popen[bytes]) -> float:
    """Seconds of CPU that a process has used, user and system."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
