"""`aura eval`: what it refuses, its table, and a real episode of an untrained policy, kept and not run again."""

from __future__ import annotations

import functools
import json

import pytest
from real_libero import needs_libero

from aura_ros.bench.evaluation import JUDGED, EvalJob, table
from aura_ros.errors import UserError
from aura_ros.eval_command import FIRST_SEED, Eval, plan
from aura_ros.sim.instruction import told_item
from aura_ros.training.collection import CollectJob


@pytest.fixture
def run_eval(aura, tmp_path):
    """Run `aura eval ...` in a folder with an untrained checkpoint; returns (exit status, stdout, stderr)."""
    (tmp_path / "c.safetensors").touch()

    return functools.partial(aura, "eval")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["none.safetensors", "--tasks", "0"], "checkpoint 'none.safetensors' is no file"),
        (
            ["c.safetensors", "--tasks", "0", "--blind", "b.safetensors"],
            "checkpoint 'b.safetensors' is no file",
        ),
        (["c.safetensors", "--tasks", "12"], "tasks '12' is not allowed"),
        (["c.safetensors", "--tasks", ""], "tasks and states must name at least one each"),
        (["c.safetensors", "--tasks", "0", "--split", "both"], "split 'both' is unknown"),
        (["c.safetensors", "--tasks", "0", "--fixture-seeds", "0"], "fixture_seeds 0 is not allowed"),
        (
            ["c.safetensors", "--tasks", "0", "--suite", "libero_10", "--instructions", "others"],
            "instructions 'others' is for libero_object",
        ),
        (
            ["c.safetensors", "--tasks", "0", "--instructions", "all"],
            "instructions 'all' is unknown; choose one of own, others",
        ),
        (["c.safetensors", "--tasks", "0", "--protocol", "OFT"], "protocol 'OFT' is unknown"),
        (
            ["c.safetensors", "--tasks", "0", "--protocol", "oft", "--split", "displaced"],
            "protocol 'oft' has official states",
        ),
        (
            ["--tasks", "0", "--backbone", "openvla_oft"],
            "backbone 'openvla_oft' has no checkpoint of its own",
        ),
    ],
)
def test_mistakes_are_one_line_and_exit_2(run_eval, given, said):
    status, _, error = run_eval(*given)
    assert (status, error.count("\n")) == (2, 1)
    assert said in error


def result(arm, task, success, displaced=False, told=-1):
    return {
        "arm": arm,
        "suite": "libero_object",
        "task": task,
        "displaced": displaced,
        "instruction_of": told,
        "success": success,
        "wrong": "" if success else "milk_1",
        "problem": "",
        "steps": 120,
        "ms_per_query": 20.0,
    }


def test_the_table_pools_an_arm_and_splits_are_rows_of_their_own():
    rows = table(
        [
            *(result("policy", task, number < 9) for task in (0, 2) for number in range(10)),
            *(result("blind", 0, False, displaced=True) for _ in range(10)),
        ]
    )
    assert [row[:5] for row in rows] == [
        ("blind", "libero_object 0", "displaced", "0/10", "0 %"),
        ("blind", "all", "displaced", "0/10", "0 %"),
        ("policy", "libero_object 0", "official", "9/10", "90 %"),
        ("policy", "libero_object 2", "official", "9/10", "90 %"),
        ("policy", "all", "official", "18/20", "90 %"),
    ]
    assert rows[-1][5:7] == ("70-97 %", "2")


def test_the_object_of_an_instruction_must_be_in_the_scene():
    items = ["alphabet_soup_1", "basket_1", "cream_cheese_1"]
    assert told_item("pick up the cream cheese and place it in the basket", items) == "cream_cheese_1"
    with pytest.raises(UserError, match="the scene has no 'milk' to fetch, only alphabet_soup_1, basket_1"):
        told_item("pick up the milk and place it in the basket", items)


@needs_libero
def test_oft_s_protocol_seeds_once_a_task_and_takes_the_states_in_order(tmp_path):
    jobs = plan(Eval(None, "2,4", suite="libero_goal", protocol="oft"))
    assert len(jobs) == 100
    assert [(j.task, j.init_state, j.seed, j.resets) for j in jobs[48:52]] == [
        *((2, 48, 0, 48), (2, 49, 0, 49)),
        *((4, 0, 0, 0), (4, 1, 0, 1)),
    ]
    assert len({j.key for j in jobs}) == 100
    assert {j.episode.step_limit for j in jobs} == {300}


@needs_libero
def test_others_are_told_only_what_the_scene_has(tmp_path):
    jobs = plan(Eval(None, "0,2,4,8", instructions="others", states="40"))
    told = [(j.task, j.episode.instruction_of) for j in jobs]
    assert told == [(0, 2), (2, 0), (2, 4), (4, 0), (4, 2), (8, 0), (8, 2), (8, 4)]
    with pytest.raises(UserError, match="no scene of tasks 0,9 has the object of another"):
        plan(Eval(None, "0,9", instructions="others"))


def test_judged_episodes_are_none_that_was_trained_on():
    judged = [
        EvalJob("c", "libero_object", 0, state, FIRST_SEED + seed, True).episode
        for state in range(40, 50)
        for seed in range(3)
    ]
    trained = [
        CollectJob("d", "libero_object", 0, n, True, seed=s).episode for n in range(400) for s in range(3)
    ]
    assert not {e.init_state for e in judged} & {e.init_state for e in trained}
    assert not {e.seed for e in judged} & {e.seed for e in trained}
    assert not {e.displaced for e in judged} & {e.displaced for e in trained}
    assert min(e.displaced for e in judged) > JUDGED
    assert len(set(judged)) == 30


def test_lines_of_another_checkpoint_are_not_taken_for_this_one_s(run_eval, tmp_path):
    from aura_ros.backbones.openvla_oft.api import OpenVlaOft

    OpenVlaOft.random_compact(seed=1).save(tmp_path / "c.safetensors")
    job = EvalJob("", "libero_object", 9, 40, FIRST_SEED, False, identity="another")
    line = {**result("policy", 9, True), "key": job.key, "identity": "another"}
    (tmp_path / "e.jsonl").write_text(json.dumps(line) + "\n")
    status, _, error = run_eval("c.safetensors", "--tasks", 9, "--states", 40, "--out", "e.jsonl")
    assert status == 2
    assert f"'e.jsonl' has {job.key} of another checkpoint or image size; give another --out" in error
    assert (tmp_path / "e.jsonl").read_text() == json.dumps(line) + "\n"


def test_void_episodes_are_told_and_not_counted():
    void = {**result("policy", 0, False), "problem": "no arrangement 5 of libero_object is free"}
    assert table([void, result("policy", 0, True)])[0][3] == "1/1"
    assert table([void]) == []


@pytest.mark.slow
@needs_libero
def test_a_real_episode_is_judged_kept_and_not_run_again(run_eval, tmp_path):
    from aura_ros.backbones.openvla_oft.api import OpenVlaOft

    OpenVlaOft.random_compact(seed=1).save(tmp_path / "c.safetensors")
    call = [
        "c.safetensors",
        "--tasks",
        "9",
        "--states",
        "40",
        "--out",
        "e.jsonl",
        "--jobs",
        "1",
        "--json",
        "e.json",
    ]
    status, text, _ = run_eval(*call)
    assert status == 0
    assert "| policy | libero_object 9 | official | 0/1 |" in text
    (found,) = json.loads((tmp_path / "e.json").read_text())
    assert (found["steps"], found["queries"]) == (280, 35)
    before = (tmp_path / "e.jsonl").read_bytes()
    assert run_eval(*call)[:2] == (0, text)
    assert (tmp_path / "e.jsonl").read_bytes() == before
