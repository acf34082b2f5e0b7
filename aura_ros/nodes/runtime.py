"""Life of a node's process: start, signals, a clean end and the exit status."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import rclpy
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions

from aura_ros.errors import UserError

# A Python signal handler runs when the wait in C returns, so this bounds the reaction to Ctrl-C.
SPIN_TIMEOUT_S = 0.1


class Log:
    """A node's logger, with the traceback where an exception is given."""

    def __init__(self, logger: Any):
        self._logger = logger

    def info(self, text: str) -> None:
        """What happened."""
        self._logger.info(text)

    def warning(self, text: str) -> None:
        """What is not as it should be."""
        self._logger.warning(text)

    def error(self, text: str, exc: BaseException | None = None) -> None:
        """What went wrong."""
        trace = "".join(traceback.format_exception(exc)) if exc is not None else ""
        self._logger.error(f"{text}\n{trace}" if trace else text)


class RunnableNode(Protocol):
    """What `run` needs of a node beside being an rclpy Node."""

    finished: threading.Event
    exit_code: int

    def stop(self) -> None:
        """Publish the safe stop, end threads, close files. Called once, while the context is still valid."""


def run(make_node: Callable[[], Node], name: str) -> None:
    """Run a node until it sets `finished` or a signal comes, then stop it and exit the process.

    Exit status: 0 after INT or TERM (also when it comes twice), 2 for a user's mistake (one line on stderr),
    else the node's own `exit_code`.
    """
    stopping = threading.Event()
    node: Node | None = None

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stopping.set()
        if getattr(node, "loading", False):
            os._exit(0)

    # rclpy's own handlers shut the context down first, and a safe stop could no longer be published.
    try:
        rclpy.init(args=sys.argv, signal_handler_options=SignalHandlerOptions.NO)
    except (RuntimeError, ValueError) as error:
        # Arguments that ROS cannot parse; its text ends in places of its own source.
        reason = " ".join(str(error).split()).split(", at /")[0]
        sys.stderr.write(f"{name}: {reason}; see --ros-args in the ROS documentation\n")
        sys.exit(2)
    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    code = 0
    executor = SingleThreadedExecutor()
    try:
        node = make_node()
        executor.add_node(node)
        while not stopping.is_set() and not node.finished.is_set():  # type: ignore[attr-defined]
            executor.spin_once(timeout_sec=SPIN_TIMEOUT_S)
    except UserError as mistake:
        sys.stderr.write(f"{name}: {mistake}\n")
        code = 2
    except ExternalShutdownException:
        pass
    finally:
        if node is not None:
            node.stop()  # type: ignore[attr-defined]
            code = code or node.exit_code  # type: ignore[attr-defined]
            executor.shutdown(timeout_sec=1.0)
            node.destroy_node()
        rclpy.try_shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    # OSMesa and Fast DDS both have threads that may outlive the interpreter's own teardown.
    os._exit(code)
