"""`aura sim` as a user runs it: a whole episode on real LIBERO, and what happens when a part of it dies."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("aura_ros.msg", reason="the messages are not built")
pytest.importorskip("torch", reason="torch is not installed")

from real_libero import needs_libero

from aura_ros.report.bag import repair_bag
from aura_ros.report.reading import read_bag, summarize_bag

ROOT = Path(__file__).resolve().parents[2]
NODES = {"gate_recorder", "policy_node", "libero_sim"}
MODULE = "aura_ros.nodes"


def process_start(pid: int) -> str | None:
    """When a process began, in clock ticks; None when it has ended (a zombie has, too)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def peak_mb(pid: int) -> float:
    """The most memory that a process had resident (VmHWM), in MB."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)


class AuraSim:
    """`aura sim` in a folder of its own. stdout and stderr go to files."""

    def __init__(self, folder: Path, *arguments: str, name: str = "run"):
        self.folder, self.out, self.err = folder, folder / f"{name}.out", folder / f"{name}.err"
        command = [sys.executable, "-u", "-m", "aura_ros.cli", "sim", *arguments]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.popen = subprocess.Popen(
                command, cwd=folder, stdout=out, stderr=err, env={**os.environ, "PYTHONPATH": str(ROOT)}
            )
        self.born: dict[int, str] = {}
        self.peaks: dict[str, float] = {}
        self._over = threading.Event()

    @property
    def stderr(self) -> str:
        return self.err.read_text()

    @property
    def nodes(self) -> dict[str, int]:
        """The node processes that this run started and that still live, by name."""
        found = {}
        for pid in [int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal()]:
            try:
                parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            except OSError:
                continue
            if parent == self.popen.pid and MODULE in words:
                found[words[words.index(MODULE) + 1]] = pid
                if start := process_start(pid):
                    self.born[pid] = start
        return found

    @property
    def survivors(self) -> list[int]:
        return [pid for pid, start in self.born.items() if process_start(pid) == start]

    def wait_for(self, condition, timeout: float = 90.0, what: str = "") -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline or (self.popen.poll() is not None and not condition()):
                pytest.fail(f"{what or 'the condition'} did not come true; stderr:\n{self.stderr}")
            self._over.wait(0.05)

    def wait_until_running(self) -> dict[str, int]:
        """Until memory steps flow; returns the nodes."""
        self.wait_for(lambda: "running: 80 steps" in self.stderr, what="the tenth memory step")
        nodes = self.nodes
        assert set(nodes) == NODES
        return nodes

    def wait(self, timeout: float = 120.0) -> int:
        """Exit status. Notes the nodes' peak memory on the way."""
        deadline = time.monotonic() + timeout
        while self.popen.poll() is None:
            if time.monotonic() > deadline:
                pytest.fail(f"`aura sim` did not end within {timeout} s; stderr:\n{self.stderr}")
            for name, pid in self.nodes.items():
                self.peaks[name] = max(self.peaks.get(name, 0.0), peak_mb(pid))
            self._over.wait(0.2)
        return self.popen.returncode

    def close(self) -> None:
        if self.popen.poll() is None:
            self.nodes  # noqa: B018 (notes who must be ended)
            self.popen.kill()
            self.popen.wait()
        for pid in self.survivors:
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def aura_sim(tmp_path):
    """Start `aura sim --record <tmp_path>/bag ARGS` on a task of 520 steps; ended with its nodes after the test."""
    runs: list[AuraSim] = []

    def start(*arguments: str, bag: str = "bag") -> AuraSim:
        runs.append(
            AuraSim(
                tmp_path,
                "--suite",
                "libero_10",
                "--task",
                "0",
                "--record",
                str(tmp_path / bag),
                *arguments,
                name=bag,
            )
        )
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def messages(bag: Path, topic: str) -> list:
    return [found.message for found in read_bag(bag, [topic])]


def chunks(bag: Path) -> list[tuple[int, int, bytes]]:
    """(stamp in ns, sequence, data) of every chunk."""
    found = messages(bag, "/action_chunk")
    return [
        (m.header.stamp.sec * 10**9 + m.header.stamp.nanosec, m.sequence, m.data.tobytes()) for m in found
    ]


# One whole episode on real LIBERO


_episodes: list[AuraSim] = []


@pytest.fixture
def episode(ros_domain, tmp_path_factory):
    """80 control steps through simulator, policy and recorder, images recorded; run once for all tests."""
    if not _episodes:
        folder = tmp_path_factory.mktemp("episode")
        bag, summary = str(folder / "bag"), str(folder / "summary.json")
        # Untrained its gate fires without a cue to fire at.
        too = ("--record-images", "--record-latents", "--memory-checkpoint", "untrained")
        run = AuraSim(folder, "--max-steps", "80", "--record", bag, "--json", summary, *too)
        try:
            run.wait()
        finally:
            run.close()
        _episodes.append(run)
    return _episodes[0]


@needs_libero
def test_the_demo_acts_on_what_it_saw_and_pictures_what_the_gate_saw(ros_domain, tmp_path):
    demo = re.search(r"bin/aura sim (.*)", (ROOT / "Makefile").read_text())[1].split()
    run = AuraSim(tmp_path, *demo, "--record", str(tmp_path / "bag"), "--json", str(tmp_path / "s.json"))
    try:
        assert run.wait() == 0, run.stderr
    finally:
        run.close()
    summary = json.loads((tmp_path / "s.json").read_text())
    assert (summary["success"], summary["reason"], summary["trained"]) == (True, "success", True)
    assert summary["steps"] < 250
    # While the mug was lit.
    assert [step for step in summary["fired_steps"] if 84 <= step < 104]
    first, *seen, last = (np.asarray(Image.open(tmp_path / path)) for path in summary["frames"])
    assert first.shape == last.shape == (256, 512, 3)
    assert np.abs(first.astype(int) - last).mean() > 2
    assert str(summary["frames"][-1]) in run.out.read_text()
    fired = [f"gate-{step:04d}.png" for step in summary["fired_steps"]]
    assert [Path(path).name for path in summary["frames"][1:-1]] == fired
    assert len(fired) == len(seen) == summary["fired"]
    assert all(image.shape == first.shape for image in seen)


@needs_libero
def test_real_episode_ends_with_a_complete_summary(episode):
    assert episode.popen.returncode == 0, episode.stderr
    summary = json.loads((episode.folder / "summary.json").read_text())
    assert summary["success"] is False
    assert (summary["steps"], summary["queries"], summary["memory_steps"]) == (80, 10, 10)
    assert summary["state_bytes_first"] == summary["state_bytes_last"] == 4224
    assert 0 < summary["writes"] <= 10
    assert summary["writes_per_second"] == pytest.approx(summary["writes"] / 4.0)
    assert 0 < summary["latency_ms"]["p50"] <= summary["latency_ms"]["p95"] <= summary["latency_ms"]["p99"]
    assert summary["bag"] == str(episode.folder / "bag")
    assert summary["bag"] in episode.out.read_text()
    assert "untrained" in episode.out.read_text()
    assert episode.survivors == []


@needs_libero
def test_real_episode_has_one_gate_event_of_constant_state_per_query(episode):
    bag = episode.folder / "bag"
    events = messages(bag, "/policy_node/gate")
    assert [e.step for e in events] == list(range(1, 11))
    assert {e.state_bytes for e in events} == {4224}
    assert len({e.epoch for e in events}) == 1
    assert [e.sequence for e in events] == [sequence for _, sequence, _ in chunks(bag)] == list(range(10))


@needs_libero
def test_real_episode_has_the_hidden_state_of_every_memory_step(episode):
    latents = messages(episode.folder / "bag", "/policy_node/latent")
    assert [latent.step for latent in latents] == list(range(1, 11))
    states = np.stack([np.asarray(latent.data) for latent in latents])
    assert np.isfinite(states).all()
    assert not np.array_equal(states[0], states[-1])


@needs_libero
def test_real_episode_has_chunk_stamps_a_horizon_apart(episode):
    stamps = [stamp for stamp, _, _ in chunks(episode.folder / "bag")]
    assert {b - a for a, b in pairwise(stamps)} == {400_000_000}


@needs_libero
def test_real_episode_is_read_by_mcap_too(episode):
    reader = pytest.importorskip("mcap_ros2.reader", reason="needs the [test] extra")
    theirs = reader.read_ros2_messages(str(episode.folder / "bag" / "bag_0.mcap"), topics=["/action_chunk"])
    assert [bytes(memoryview(np.asarray(m.ros_msg.data, np.float32))) for m in theirs] == [
        data for _, _, data in chunks(episode.folder / "bag")
    ]


@needs_libero
def test_real_episode_shows_a_lit_scene_that_changes(episode):
    for camera in ("agentview", "wrist"):
        found = messages(episode.folder / "bag", f"/images/{camera}")
        images = [np.asarray(m.data).reshape(m.height, m.width, 3) for m in found]
        assert len(images) >= 10
        assert all(image.std() > 20 and 20 < image.mean() < 235 for image in images)
        assert not np.array_equal(images[0], images[-1])


@needs_libero
def test_real_episode_stays_within_its_memory(episode):
    """Measured: policy node 0.49 GB, simulator 2.34 GB."""
    assert 100 < episode.peaks["policy_node"] < 1200
    assert 100 < episode.peaks["libero_sim"] < 3000


# When a part dies


def finished(bag: Path) -> list:
    return [e for e in messages(bag, "/episode") if e.phase == 2]


def one_line_with(stderr: str, text: str) -> str:
    lines = [line for line in stderr.splitlines() if text in line]
    assert len(lines) == 1, stderr
    assert "Traceback" not in stderr
    return lines[0]


@needs_libero
@pytest.mark.parametrize("victim", ["policy_node", "libero_sim"])
def test_killed_node_ends_the_run_with_its_name_and_a_whole_bag(aura_sim, tmp_path, victim):
    # The simulator's interpreter is named, as for an environment of its own.
    run = aura_sim("--sim-python", sys.executable, "--max-steps", "4000", "--json", "summary.json")
    nodes = run.wait_until_running()
    os.kill(nodes[victim], signal.SIGKILL)
    killed = time.monotonic()
    assert run.wait(timeout=30) == 1
    assert time.monotonic() - killed < 5.0 + 1.5, "1.5 s is for reading the bag"
    assert run.survivors == []
    line = one_line_with(run.stderr, "was killed by SIGKILL")
    assert line.startswith(f"{victim} was killed by SIGKILL")
    assert (tmp_path / "bag" / "metadata.yaml").is_file()
    summary = summarize_bag(tmp_path / "bag")
    assert summary.gate.steps >= 10
    assert summary.gate.state_bytes == (4224,)
    assert json.loads((tmp_path / "summary.json").read_text())["queries"] >= 10


@needs_libero
def test_killed_recorder_ends_the_run_and_what_was_flushed_can_be_mended(aura_sim, tmp_path):
    run = aura_sim("--max-steps", "4000")
    nodes = run.wait_until_running()
    # A flush happens every second.
    file = tmp_path / "bag.incomplete" / "bag_0.mcap"
    size = file.stat().st_size
    run.wait_for(lambda: file.stat().st_size > size, what="a flush")
    os.kill(nodes["gate_recorder"], signal.SIGKILL)
    assert run.wait(timeout=30) == 1
    assert run.survivors == []
    line = one_line_with(run.stderr, "gate_recorder was killed by SIGKILL")
    assert f"what was recorded is in {tmp_path / 'bag.incomplete'}" in line
    repair_bag(tmp_path / "bag")
    assert summarize_bag(tmp_path / "bag").gate.steps >= 5


@needs_libero
@pytest.mark.parametrize(
    "signals",
    [
        pytest.param([signal.SIGINT], id="int", marks=pytest.mark.slow),
        pytest.param([signal.SIGINT, signal.SIGINT], id="int-int"),
        pytest.param([signal.SIGTERM], id="term", marks=pytest.mark.slow),
    ],
)
def test_interrupted_run_keeps_its_bag_and_tells_what_was(aura_sim, tmp_path, signals):
    run = aura_sim("--max-steps", "4000", "--json", "summary.json")
    run.wait_until_running()
    for number in signals:
        run.popen.send_signal(number)
        run.wait_for(lambda: len(run.nodes) < 3, what="the end of the first node")
    assert run.wait(timeout=30) == 0
    assert run.survivors == []
    assert "Traceback" not in run.stderr
    assert run.out.read_text().startswith("interrupted; what follows")
    assert [e.reason for e in finished(tmp_path / "bag")] == ["interrupted"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["queries"] >= 10
    assert summary["reason"] == "interrupted"


@needs_libero
def test_interrupt_during_start_up_is_quiet(aura_sim, tmp_path):
    run = aura_sim()
    run.wait_for(lambda: set(run.nodes) == NODES, what="the nodes' processes")
    run.popen.send_signal(signal.SIGINT)
    assert run.wait(timeout=30) == 0
    assert run.survivors == []
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "bag.incomplete").exists()


@pytest.mark.slow
@needs_libero
def test_interrupt_while_real_libero_is_built_ends_the_run_in_time(aura_sim):
    run = aura_sim()
    run.wait_for(lambda: "waiting for LIBERO" in run.stderr or len(run.nodes) == 3, what="the nodes")
    log = next(run.folder.glob("runs/*/logs")) / "policy_node.log"
    run.wait_for(lambda: "loaded in" in log.read_text(), what="the policy")
    run.popen.send_signal(signal.SIGINT)
    interrupted = time.monotonic()
    assert run.wait(timeout=30) == 0
    assert time.monotonic() - interrupted < 6.0
    assert run.survivors == []
    assert "Traceback" not in run.stderr


@needs_libero
def test_no_node_outlives_a_killed_run(aura_sim, tmp_path):
    run = aura_sim("--max-steps", "4000")
    run.wait_until_running()
    run.popen.kill()
    run.popen.wait()
    deadline = time.monotonic() + 5.0
    while run.survivors and time.monotonic() < deadline:
        run._over.wait(0.05)
    assert run.survivors == []
    assert summarize_bag(tmp_path / "bag").gate.steps >= 10


@pytest.mark.slow
@needs_libero
def test_full_disk_is_a_failure_that_keeps_what_was_recorded(aura_sim, tmp_path):
    run = aura_sim("--max-steps", "4000")
    recorder = run.wait_until_running()["gate_recorder"]
    size = (tmp_path / "bag.incomplete" / "bag_0.mcap").stat().st_size
    resource.prlimit(recorder, resource.RLIMIT_FSIZE, (size + 30_000, resource.RLIM_INFINITY))
    assert run.wait(timeout=120) == 1
    assert run.survivors == []
    line = one_line_with(run.stderr, "stopped: File too large")
    if not (tmp_path / "bag").exists():
        # Not even the index found room.
        assert f"{tmp_path / 'bag.incomplete'} (make it whole with" in line
        repair_bag(tmp_path / "bag")
    assert summarize_bag(tmp_path / "bag").gate.steps > 0


def test_simulator_that_never_began_is_no_success(aura_sim, tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && echo aura_ros\nexit 0\n')
    python.chmod(0o755)
    run = aura_sim("--sim-python", str(python))
    assert run.wait(timeout=60) == 1
    assert "libero_sim ended before the episode did" in one_line_with(run.stderr, "libero_sim")


@needs_libero
def test_foreign_policy_in_the_domain_is_refused_before_its_messages_mix_with_ours(
    aura_sim, start_process, tmp_path
):
    foreign = start_process("policy_node", "--ros-args", "-p", "mode:=lockstep")
    run = aura_sim()
    assert run.wait(timeout=60) == 2
    line = one_line_with(run.stderr, "another policy_node runs in ROS domain")
    assert line.startswith("aura: ")
    assert "set ROS_DOMAIN_ID" in line
    assert not (tmp_path / "bag").exists()
    assert foreign.popen.poll() is None


@pytest.mark.slow
@needs_libero
def test_memory_of_another_backbone_is_one_line_and_leaves_no_bag(aura_sim, tmp_path):
    from aura_ros.memory.config import MemoryConfig
    from aura_ros.memory.module import build_untrained

    build_untrained(MemoryConfig(input_dim=20, out_dim=56), tmp_path / "m.safetensors")
    run = aura_sim("--memory-checkpoint", "m.safetensors")
    assert run.wait(timeout=60) == 2
    assert " 20" in one_line_with(run.stderr, "aura: ")
    assert not (tmp_path / "bag").exists()
    assert run.survivors == []


# The same again


@pytest.mark.slow
@needs_libero
def test_same_seed_gives_the_same_trajectory_also_on_a_busy_machine(aura_sim, tmp_path):
    given = ["--task", "0", "--init-state", "1", "--seed", "5", "--max-steps", "120"]
    runs = {}
    for name in ("first", "second", "busy"):
        load = subprocess.Popen([sys.executable, "-c", BUSY]) if name == "busy" else None
        try:
            assert aura_sim(*given, bag=name).wait(timeout=300) == 0
        finally:
            if load is not None:
                load.kill()
                load.wait()
        runs[name] = chunks(tmp_path / name)
    assert len(runs["first"]) == 15
    assert runs["first"] == runs["second"] == runs["busy"]


# Ends by itself, should nobody end it.
BUSY = "import time\nend = time.monotonic() + 120\nwhile time.monotonic() < end: pass"
