"""`aura index`: a robot's own bags in place of the simulator's, resumable, each mistake in one line."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from test_training_demonstrations import recorded

from aura_ros.training.demo_bags import write_recording
from aura_ros.training.demo_data import load_data
from aura_ros.training.demonstrations import DemoFolder


@pytest.fixture
def run_index(aura, tmp_path):
    """Run `aura index ...` in a folder with bags a/demo and b/demo; returns (exit status, stdout, stderr)."""
    for place in "ab":
        write_recording(tmp_path / place / "demo", recorded())

    return functools.partial(aura, "index")


def test_bags_of_one_name_become_demonstrations_that_training_reads(run_index, tmp_path):
    status, said, _ = run_index("a/demo", "b/demo", "--out", "demos", "--jobs", 1)
    assert (status, said) == (0, "demos: 2 demonstrations, 8 samples\n")
    data = load_data([DemoFolder(tmp_path / "demos")], 2.0)
    assert (data.episodes, len(data.samples), data.instructions) == (2, 8, ("pick up the soup",))
    before = (tmp_path / "demos" / "episodes.jsonl").read_bytes()
    assert run_index("a/demo", "b/demo", "--out", "demos", "--jobs", 1)[:2] == (0, said)
    assert (tmp_path / "demos" / "episodes.jsonl").read_bytes() == before
    # What was deleted is made again, and counts once.
    next((tmp_path / "demos" / "index").iterdir()).unlink()
    assert run_index("a/demo", "b/demo", "--out", "demos", "--jobs", 1)[:2] == (0, said)
    assert load_data([DemoFolder(tmp_path / "demos")], 2.0).episodes == 2
    assert run_index("a/demo", "--out", "told", "--instruction", "wave", "--jobs", 1)[0] == 0
    assert load_data([DemoFolder(tmp_path / "told")], 2.0).instructions == ("wave",)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["none"], "bag 'none' is no folder"),
        (["a/demo", "--fingers", "left"], "fingers 'left' is not allowed"),
        (["a/demo", "--fingers", "left,right"], "'left' is missing: name this robot's fingers"),
        (["a"], "a is not a bag"),
        (["mute"], "says no instruction; give --instruction TEXT"),
        (["short"], "has no observation with an action for each of its next eight periods"),
        (["a/demo", "--jobs", "-1"], "from 0 to 1024 jobs"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(run_index, tmp_path, given, said):
    write_recording(tmp_path / "mute", dataclasses.replace(recorded(), instruction=" "))
    write_recording(tmp_path / "short", recorded(steps=3))
    status, _, error = run_index(*given, "--out", "demos", *([] if "--jobs" in given else ["--jobs", 1]))
    assert status == 2
    assert said in error.splitlines()[-1]
    assert "Traceback" not in error


def test_a_robot_with_other_finger_names_is_read(run_index, tmp_path):
    names = [*(f"joint{i}" for i in range(7)), "left", "right"]
    write_recording(tmp_path / "own", recorded(names=names))
    assert run_index("own", "--out", "demos", "--fingers", "left, right", "--jobs", 1)[0] == 0
    samples = load_data([DemoFolder(tmp_path / "demos")], 2.0).samples
    np.testing.assert_allclose(samples.proprio[0, 6:], recorded().robot[0][0][-2:], atol=1e-6)
