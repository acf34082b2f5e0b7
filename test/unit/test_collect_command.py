"""`aura collect`: what it refuses, and one real demonstration that goes on where it stopped."""

from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np
import pytest
from real_libero import needs_libero

from aura_ros.bench.evaluation import JUDGED
from aura_ros.collect_command import MAX_SEED
from aura_ros.eval_command import FIRST_SEED
from aura_ros.training.collection import TRAINED_STATES, CollectJob, _pushes, model_rows
from aura_ros.training.demonstrations import DemoFolder


@pytest.fixture
def collect(aura):
    """Run `aura collect ...` in an empty folder; returns (exit status, stdout, stderr)."""
    return functools.partial(aura, "collect")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--suite", "libero"], "suite 'libero' is unknown"),
        (["--split", "both"], "split 'both' is unknown; choose one of mixed, official, displaced"),
        (["--episodes", "0"], "episodes 0 is not allowed; it must be from 1"),
        (["--tasks", ""], "tasks '' is not allowed; name at least one"),
        (["--tasks", "10"], "tasks '10' is not allowed"),
        (["--image-size", "8"], "image_size 8 is out of range"),
        (["--policy", "none.safetensors"], "policy 'none.safetensors' is no file"),
        (["--jobs", "-2"], "jobs -2 is not allowed"),
        (["--frames-every", "0"], "frames_every 0 is not allowed"),
        (["--until", "grasp"], "until 'grasp' is unknown; choose one of end, lift"),
    ],
)
def test_mistakes_are_one_line_and_make_nothing(collect, given, said, tmp_path):
    given = given if "--tasks" in given else [*given, "--tasks", "0"]
    status, _, error = collect("--out", "demos", *given)
    assert (status, error.count("\n")) == (2, 1)
    assert said in error
    assert list(tmp_path.iterdir()) == []


def test_held_out_states_are_never_collected():
    jobs = [CollectJob("d", "libero_object", 0, number, True, seed=3) for number in range(200)]
    assert {job.episode.init_state for job in jobs} == set(range(TRAINED_STATES))
    assert len({(job.episode.init_state, job.episode.displaced, job.episode.seed) for job in jobs}) == 200
    assert all(job.episode.displaced for job in jobs)


def test_the_models_gripper_is_open_at_1():
    rows = model_rows([[0.5] * 6 + [-1.0], [0.5] * 6 + [1.0]])
    np.testing.assert_array_equal(rows[:, 6], [1.0, 0.0])
    np.testing.assert_array_equal(rows[:, :6], np.full((2, 6), 0.5))


def test_another_policy_s_episodes_are_others_and_no_seed_is_of_those_that_judge():
    job = CollectJob("d", "libero_object", 0, 3, True, policy="p.safetensors", policy_hash="a" * 64)
    assert job.key != dataclasses.replace(job, policy_hash="b" * 64).key
    most = CollectJob("d", "libero_object", 0, 3 * 30_000 - 1, True, seed=MAX_SEED)
    assert most.episode.seed < FIRST_SEED
    assert most.episode.displaced < JUDGED + FIRST_SEED


def test_another_seed_s_arrangements_are_others():
    # Correcting a policy in the arrangements that it was trained on would teach little.
    found = [
        {
            CollectJob("d", "libero_object", 0, number, True, seed=seed).episode.displaced
            for number in range(400)
        }
        for seed in (0, 1, 2)
    ]
    assert len(set.union(*found)) == 1200


def test_pushes_are_bursts_with_rests_between():
    pushes = _pushes(4000, np.random.default_rng(0)).any(1)
    assert 0.02 < pushes.mean() < 0.3
    assert np.abs(_pushes(400, np.random.default_rng(1))).max() <= 1.0
    np.testing.assert_array_equal(
        _pushes(300, np.random.default_rng(2)), _pushes(300, np.random.default_rng(2))
    )


@pytest.mark.slow
@needs_libero
def test_until_the_lift_is_half_of_a_demonstration_and_every_frame_a_sample(tmp_path, collect):
    call = [
        "--out",
        "demos",
        "--tasks",
        "9",
        "--episodes",
        "2",
        "--jobs",
        "1",
        "--frames-every",
        "8",
        "--until",
        "lift",
    ]
    status, text, _ = collect(*call)
    assert (status, text.splitlines()[0]) == (0, "task 9: 2 demonstrations of 2 episodes")
    folder = DemoFolder(tmp_path / "demos")
    for episode in folder.episodes():
        assert 30 < episode["steps"] < 90
        steps = folder.samples(episode).step
        assert set(np.diff(steps)[1:]) == {8}
        assert len(steps) == episode["frames"] >= episode["steps"] // 8 - 2
    status, _, error = collect(*call[:-2])
    assert (status, "'demos' has until 'lift', not 'end'; give another folder" in error) == (2, True)


@pytest.mark.slow
@needs_libero
def test_a_real_demonstration_is_kept_and_not_collected_twice(tmp_path, collect):
    call = ["--out", "demos", "--tasks", "9", "--episodes", "1", "--split", "displaced", "--jobs", "1"]
    status, text, _ = collect(*call)
    said, rate = text.splitlines()
    assert (status, said) == (0, "task 9: 1 demonstrations of 1 episodes")
    assert rate.startswith("1 episodes in ")
    folder = DemoFolder(tmp_path / "demos")
    (episode,) = folder.episodes()
    samples = folder.samples(episode)
    assert len(samples) == episode["frames"] > 20
    # Every rendered frame is a sample: pushed ones have a plan.
    first, second = samples.step[:2]
    assert samples.step.tolist() == sorted({first, *range(second, episode["steps"], 3)})
    assert (first, second in (1, 2, 3)) == (0, True)
    assert np.isfinite(samples.keypoints).all()
    assert set(np.unique(samples.actions[..., 6])) == {0.0, 1.0}
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "demos").rglob("*")}
    assert collect(*call)[:2] == (0, said + "\n")
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "demos").rglob("*")} == before
    (line,) = (tmp_path / "demos" / "episodes.jsonl").read_text().splitlines()
    assert json.loads(line)["instruction"].startswith("pick up the")
