"""Fixtures for every test that speaks ROS.

Each test gets a ROS domain of its own (`ros_domain`, automatic), so that nothing outside it is heard, also
when several test runs share a machine.

    def test_something(ros, start_process, tmp_path):
        node = ros.node("probe")                          # in this process; destroyed at the end
        publisher = node.create_publisher(...)
        process = start_process("gate_recorder", "--ros-args", "-p", f"output:={tmp_path / 'bag'}")
        ros.spin_until(lambda: publisher.get_subscription_count() > 0)   # a deadline, not a sleep
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0, process.output

A node in a process of its own is started with `start_process`; one in this process with `ros.node`, or made
by the test and handed to `ros.add`.
"""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 30.0
# Higher domains use ports that the kernel may have given to others.
DOMAINS = range(1, 102)
_turn = count(os.getpid())


@pytest.fixture(scope="session", autouse=True)
def ros_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Discovery on this machine only, and quick; logs in a temporary directory."""
    pytest.importorskip("rclpy", reason="rclpy is not installed")
    # Fast DDS 3 warns about the name that Fast DDS 2 reads.
    fast_dds_2 = os.environ.get("ROS_DISTRO", "kilted") in ("humble", "iron", "jazzy")
    profiles = "FASTRTPS_DEFAULT_PROFILES_FILE" if fast_dds_2 else "FASTDDS_DEFAULT_PROFILES_FILE"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
        patch.setenv(profiles, str(ROOT / "config" / "fastdds_fast_discovery.xml"))
        patch.setenv("ROS_LOG_DIR", str(tmp_path_factory.mktemp("ros_log")))
        yield


@pytest.fixture(autouse=True)
def ros_domain(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A ROS_DOMAIN_ID that no other test of this machine uses at the same time; locked by a file."""
    folder = Path(tempfile.gettempdir()) / f"aura_ros_domains_{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for _ in DOMAINS:
        # In turn: a domain just left may still hear the last words of a killed process.
        domain = DOMAINS[next(_turn) % len(DOMAINS)]
        with (folder / str(domain)).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            monkeypatch.setenv("ROS_DOMAIN_ID", str(domain))
            yield domain
            return
    pytest.fail(f"all ROS domains of {folder} are in use")


class Ros:
    """rclpy started for one test: nodes of this process on one executor."""

    def __init__(self) -> None:
        from rclpy.executors import SingleThreadedExecutor

        self.executor = SingleThreadedExecutor()

    def node(self, name: str, **options):
        """Make a plain node on the executor; options as for rclpy.node.Node."""
        from rclpy.node import Node

        return self.add(Node(name, **options))

    def add(self, node):
        """Put a node on the executor; it is stopped and destroyed after the test."""
        self.executor.add_node(node)
        return node

    def spin_until(self, predicate: Callable[[], bool], timeout: float = TIMEOUT_S, what: str = "") -> None:
        """Serve callbacks until the predicate holds; fail the test when it does not in `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not predicate():
            if time.monotonic() > deadline:
                pytest.fail(f"{what or 'the condition'} did not come true within {timeout} s")
            self.executor.spin_once(timeout_sec=0.02)

    def spin_for(self, seconds: float) -> None:
        """Serve callbacks for a time; only to show that something does NOT happen."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.executor.spin_once(timeout_sec=left)

    def close(self) -> None:
        for node in self.executor.get_nodes():
            if hasattr(node, "stop"):  # ours have threads of their own
                node.stop()
            self.executor.remove_node(node)
            node.destroy_node()
        self.executor.shutdown(timeout_sec=5.0)


@pytest.fixture
def ros(ros_domain: int) -> Iterator[Ros]:
    """rclpy for the test's own process, initialised in the test's domain and shut down after it."""
    import rclpy
    from rclpy.signals import SignalHandlerOptions

    rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
    helper = Ros()
    yield helper
    helper.close()
    rclpy.try_shutdown()


class Process:
    """A child process whose output (stdout and stderr together) is collected while it runs."""

    def __init__(self, command: list[str], **options) -> None:
        self._text = ""
        self._changed = threading.Condition()
        self._ended = False
        self.popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, **options
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """Everything written so far."""
        with self._changed:
            return self._text

    def wait_for_output(self, text: str, timeout: float = TIMEOUT_S) -> None:
        """Wait until `text` was written; fail the test when the process ends first or time is over."""
        with self._changed:
            self._changed.wait_for(lambda: text in self._text or self._ended, timeout)
            if text not in self._text:
                pytest.fail(f"'{text}' was not written; the output is:\n{self._text}")

    def send_signal(self, number: int) -> None:
        """Send a signal to this process alone."""
        self.popen.send_signal(number)

    def wait(self, timeout: float = TIMEOUT_S) -> int:
        """Exit status; negative for a signal. Fails the test when the process does not end in time."""
        try:
            status = self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the process did not end within {timeout} s; the output is:\n{self.output}")
        self._reader.join(timeout)
        return status

    def kill(self) -> None:
        """End the process at once, if it still runs."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGKILL)
            self.popen.wait()
        self._reader.join(5.0)

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self._changed:
                self._text += line
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self.popen.stdout.close()


@pytest.fixture
def start_process(ros_domain: int) -> Iterator[Callable[..., Process]]:
    """Start `python -m aura_ros.nodes NAME ARGS...` from the repository's root, in the test's domain.

    Further keywords go to subprocess.Popen. What still runs at the end of the test is killed, by its pid.
    """
    started: list[Process] = []

    def start(name: str, *arguments: str, **options) -> Process:
        process = Process([sys.executable, "-u", "-m", "aura_ros.nodes", name, *arguments], **options)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def start_arm(ros_domain: int) -> Iterator[Callable[..., Process]]:
    """Start the stand-in arm of test/helpers in the test's domain: `start_arm("command_type:=twist", ...)`.

    What still runs at the end of the test is killed, by its pid.
    """
    started: list[Process] = []

    def start(*parameters: str) -> Process:
        script = str(ROOT / "test" / "helpers" / "stand_in_arm.py")
        options = [word for parameter in parameters for word in ("-p", parameter)]
        process = Process([sys.executable, "-u", script, "--ros-args", *options])
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
