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
from aura_ros.training.demonstrations import LIT, DemoFolder


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
    # Known at every frame; but what is lit is nowhere where nothing lights up.
    known = [name != LIT for name in samples.keypoint_names]
    assert np.isfinite(samples.keypoints[:, known]).all()
    assert np.isnan(samples.keypoints[:, np.logical_not(known)]).all()
    assert set(np.unique(samples.actions[..., 6])) == {0.0, 1.0}
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "demos").rglob("*")}
    assert collect(*call)[:2] == (0, said + "\n")
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "demos").rglob("*")} == before
    (line,) = (tmp_path / "demos" / "episodes.jsonl").read_text().splitlines()
    assert json.loads(line)["instruction"].startswith("pick up the")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--delays", "5-80"], "delays '5-80' is not allowed; give 20 to 2000 control steps"),
        (["--delays", "80-20"], "delays '80-20' is not allowed"),
        (["--delays", "long"], "delays 'long' is not allowed; give control steps as 20-80 or 40"),
        (["--memory", "none.safetensors"], "memory 'none.safetensors' is not allowed; give a checkpoint"),
        (["--until", "lift"], "until is not for --latents"),
        (["--instructions", "mixed"], "instructions is not for --latents"),
        (["--backbone", "openvla_oft"], "backbone 'openvla_oft' has no checkpoint of its own"),
    ],
)
def test_mistakes_with_rollouts_are_one_line_and_make_nothing(collect, given, said, tmp_path):
    status, _, error = collect("--latents", "--out", "r", "--suite", "cue_place", "--tasks", "0", *given)
    assert (status, error.count("\n")) == (2, 1)
    assert said in error
    assert list(tmp_path.iterdir()) == []


def test_each_state_of_a_cue_task_has_both_cues_and_its_instruction_named_or_not():
    jobs = [CollectJob("d", "cue_object", 0, number, True, cues=4) for number in range(8)]
    episodes = [job.episode for job in jobs]
    assert [(e.cue, e.named) for e in episodes[:4]] == [(0, False), (1, False), (0, True), (1, True)]
    # Nothing else differs within a state.
    plain = [dataclasses.replace(e, cue=0, named=False) for e in episodes]
    assert len(set(plain[:4])) == len(set(plain[4:])) == 1
    assert plain[0] != plain[4]
    assert len({job.key for job in jobs}) == 8


@needs_libero
def test_rollouts_share_their_hold_and_say_what_is_right_after_it(collect, tmp_path):
    from aura_ros.training.rollouts import RolloutFolder

    call = [
        "--latents",
        "--out",
        "r",
        "--suite",
        "cue_place",
        "--tasks",
        0,
        "--episodes",
        2,
        "--split",
        "official",
    ]
    status, out, error = collect(*call, "--delays", "20", "--image-size", 64, "--jobs", 1)
    assert status == 0, error
    assert "2 rollouts" in out
    folder = RolloutFolder(tmp_path / "r")
    lines = sorted(folder.episodes(), key=lambda line: line["cue"])
    one, other = (folder.rollout(line) for line in lines)
    assert (lines[0]["held"], lines[0]["cue_steps"]) == (lines[1]["held"], lines[1]["cue_steps"])
    held = lines[0]["held"] // 8
    differs = [not np.array_equal(a, b) for a, b in zip(one.hidden[:held], other.hidden[:held], strict=True)]
    start, stop = lines[0]["cue_steps"]
    assert differs == [start <= 8 * query < stop for query in range(held)]
    # What is seen at the decision is the same, and what is right there too: the pudding must be picked up first.
    np.testing.assert_array_equal(one.hidden[held], other.hidden[held])
    assert np.isnan(one.target[:held]).all()
    assert np.isfinite(one.target[held:]).all()
    np.testing.assert_array_equal(one.target[held], other.target[held])
    before = (tmp_path / "r" / "episodes.jsonl").read_bytes()
    assert collect(*call, "--delays", "20", "--image-size", 64, "--jobs", 1)[0] == 0
    assert (tmp_path / "r" / "episodes.jsonl").read_bytes() == before
