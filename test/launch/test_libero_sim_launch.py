"""`libero_sim.launch.py` on the real launch packages, with real LIBERO."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip(
    "launch_testing",
    reason="no launch packages here: run `make test-launch LAUNCH_SRC=DIR` with their sources",
)
pytest.importorskip("libero", reason="LIBERO is not installed: pip install 'aura_ros[libero]'")

from launching import alive, check_refused, child, end, start, wait_for

pytestmark = [pytest.mark.libero]

FILE = "libero_sim.launch.py"
BAD_ARGUMENTS = {
    "suite:=nope": "suite 'nope' is not known; choose one of: libero_spatial",
    "task:=77": "task 77 is out of range; allowed are the whole numbers 0..9",
    "task:=abc": "task 'abc' is not a whole number",
    "init_state:=50": "init_state 50 is out of range",
    "backbone:=x": "backbone 'x' is not known; choose one of: compact, openvla_oft",
    "checkpoint:=/nope": "checkpoint '/nope' does not exist",
    "memory_state_dim:=0": "memory_state_dim 0 is out of range; allowed: 1 to 1024",
}


def gates(bag):
    from aura_ros.report.reading import read_bag

    return [m.message for m in read_bag(bag) if m.topic == "/policy_node/gate"]


def recorded_bytes(folder):
    return sum(file.stat().st_size for file in folder.rglob("*.mcap"))


def test_an_episode_runs_ends_by_itself_and_leaves_a_bag_with_every_gate_event(tmp_path):
    process, log = start(tmp_path, FILE, "max_steps:=40", f"record:={tmp_path / 'bag'}")
    try:
        assert process.wait(timeout=120) == 0, log.read_text()
    finally:
        end(process)
    text = log.read_text()
    assert text.count("process has finished cleanly") == 3, text
    assert "Traceback" not in text
    assert "Caught exception" not in text
    recorded = gates(tmp_path / "bag")
    assert len(recorded) == 5
    assert {g.state_bytes for g in recorded} == {4224}


@pytest.mark.parametrize("argument", BAD_ARGUMENTS)
def test_a_bad_argument_is_one_line_and_starts_nothing(tmp_path, argument):
    check_refused(tmp_path, FILE, argument, BAD_ARGUMENTS[argument])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("victim", ["libero_sim", "policy_node"])
def test_a_killed_node_ends_the_others_within_5_s_and_the_bag_is_readable(tmp_path, victim):
    # The shipped policy is done before there is anything to kill.
    process, log = start(tmp_path, FILE, "checkpoint:=random", f"record:={tmp_path / 'bag'}")
    try:
        wait_for(lambda: "episode started" in log.read_text(), 90, "episode")
        pids = {name: child(log, name) for name in ("libero_sim", "policy_node", "gate_recorder")}
        # The file begins with definitions; 20 kB more are the messages of tens of steps, so of several queries.
        begun = recorded_bytes(tmp_path)
        wait_for(lambda: recorded_bytes(tmp_path) > begun + 20_000, 30, "recorded data")
        os.kill(pids[victim], signal.SIGKILL)
        killed = time.monotonic()
        assert process.wait(timeout=30) == 1
        assert time.monotonic() - killed < 6.0
        assert not any(alive(pid) for pid in pids.values())
    finally:
        end(process)
    assert f"{victim}" in log.read_text()
    assert len(gates(tmp_path / "bag")) >= 1


def test_interrupt_ends_with_status_0_of_every_node_and_a_closed_bag(tmp_path):
    process, log = start(tmp_path, FILE, f"record:={tmp_path / 'bag'}")
    try:
        wait_for(lambda: "episode started" in log.read_text(), 90, "episode")
        # As a terminal does: to the whole group, so that every node gets it from there and from launch.
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=30)
    finally:
        end(process)
    text = log.read_text()
    assert text.count("process has finished cleanly") == 3, text
    assert "Traceback" not in text
    gates(tmp_path / "bag")


def test_without_recording_no_bag_is_made_and_the_policy_does_not_wait_for_a_recorder(tmp_path):
    process, log = start(tmp_path, FILE, "record:=false", "max_steps:=8")
    try:
        assert process.wait(timeout=120) == 0, log.read_text()
    finally:
        end(process)
    assert not list(tmp_path.rglob("*.mcap"))


def test_the_simulator_runs_under_an_interpreter_of_its_own_in_a_namespace(tmp_path):
    wrapper = tmp_path / "sim_python"
    wrapper.write_text(f'#!/bin/sh\ntouch {tmp_path}/used\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    arguments = [f"sim_python:={wrapper}", "namespace:=left", "max_steps:=8", f"record:={tmp_path / 'bag'}"]
    process, log = start(tmp_path, FILE, *arguments)
    try:
        assert process.wait(timeout=120) == 0, log.read_text()
    finally:
        end(process)
    assert Path(tmp_path / "used").exists()
    from aura_ros.report.reading import summarize_bag

    assert summarize_bag(tmp_path / "bag").messages["/left/policy_node/gate"] == 1
