"""`aura expert`: what it refuses, its table, and a real episode counted, kept and not run again."""

from __future__ import annotations

import functools
import json

import pytest
from real_libero import needs_libero

from aura_ros.bench.expert import explain, table
from aura_ros.errors import UserError
from aura_ros.states import numbers


@pytest.fixture
def expert(aura):
    """Run `aura expert ...` in an empty folder; returns (exit status, stdout, stderr)."""
    return functools.partial(aura, "expert")


def result(state, success, failure="", task=3, displaced=0):
    return {
        "suite": "libero_object",
        "task": task,
        "init_state": state,
        "displaced": displaced,
        "success": success,
        "steps": 80 + state,
        "failure": failure,
    }


def test_lists_of_numbers():
    assert numbers("states", "0,4-6, 5,2", 9) == [0, 4, 5, 6, 2]
    assert numbers("states", "", 9) == []
    for bad in ("10", "3-2", "-1", "a", "1-", "1 2"):
        with pytest.raises(UserError, match="states '.*' is not allowed; give numbers or ranges from 0 to 9"):
            numbers("states", bad, 9)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--suite", "libero"], "suite 'libero' is unknown; choose one of libero_spatial"),
        (["--split", "moved"], "split 'moved' is unknown; choose one of official, displaced"),
        (["--tasks", "10"], "tasks '10' is not allowed; give numbers or ranges from 0 to 9"),
        (["--states", "50"], "states '50' is not allowed; give numbers or ranges from 0 to 49"),
        (["--jobs", "-1"], "jobs -1 is not allowed"),
        (["--seed", "-1"], "seed -1 is out of range"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(given, said, expert):
    status, _, error = expert(*given)
    assert status == 2
    assert said in error
    assert error.count("\n") == 1


def test_the_table_has_intervals_and_says_which_states_failed_and_why():
    rows = table(
        [
            *(result(s, True) for s in range(8)),
            result(8, False, "missed grasp, 3 tries"),
            result(9, False, "missed grasp, 3 tries"),
            result(1, True, displaced=1),
        ]
    )
    assert rows[0] == ("libero_object 3", "8/10", "49-94 %", "84, 87", "missed grasp, 3 tries: 8, 9")
    assert rows[1][0] == "libero_object 3 displaced"


def test_a_failure_is_explained_by_what_happened():
    low, high = [0.0] * 4, [0.0, 0.0, 0.1, 0.0]
    assert explain(["approach", "approach"], low) == "out of reach (last: approach)"
    assert explain(["grasp", "lift", "grasp", "approach"], low) == "missed grasp, 2 tries"
    assert explain(["grasp", "lift", "carry", "approach"], high) == "dropped on the way"
    assert explain(["grasp", "lift", "release", "approach"], high) == "timed out in approach"


@needs_libero
def test_a_real_episode_is_counted_kept_and_not_run_again(tmp_path, expert):
    call = ["--tasks", "9", "--states", "1", "--jobs", "1", "--out", "e.jsonl", "--json", "e.json"]
    status, text, _ = expert(*call)
    assert (status, "| libero_object 9 | 1/1 |" in text) == (0, True)
    (found,) = json.loads((tmp_path / "e.json").read_text())
    assert found["success"]
    before = (tmp_path / "e.jsonl").read_bytes()
    status, again, said = expert(*call)
    assert (status, again, said) == (0, text, "")
    assert (tmp_path / "e.jsonl").read_bytes() == before
