"""`aura bench node` as a user runs it: real processes, numbers in a file, and nothing left running."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("aura_ros.msg", reason="the messages are not built")


@pytest.mark.slow
def test_bench_node_measures_every_figure_and_ends_its_processes(tmp_path):
    out = tmp_path / "bench.json"
    command = [sys.executable, "-m", "aura_ros", "bench", "node", "--seconds", "5", "--idle-seconds", "2"]
    done = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {
        *("callback_ms_p99", "overhead_ms_p50", "overhead_ms_p99", "jitter_ms_p99", "idle_cpu_percent"),
        *("inference_ms_p50", "conditions"),
    } <= set(found)
    assert found["queries"] >= 5
    assert 0 < found["overhead_ms_p50"] < found["inference_ms_p50"]
    assert found["conditions"]["torch_threads"] == 1


def test_bench_node_refuses_in_one_line_what_makes_no_sense():
    command = [sys.executable, "-m", "aura_ros", "bench", "node", "--seconds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "seconds 1.0 is out of range; allowed: 5.0 to 3600.0" in done.stderr
