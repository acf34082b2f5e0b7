"""Which episodes exist, and what is said about one that doesn't."""

import pytest

from aura_ros.errors import UserError
from aura_ros.sim import SUITES, EpisodeConfig
from aura_ros.sim.suites import CUE_SUITES


@pytest.mark.parametrize(
    ("suite", "limit"),
    [
        ("libero_spatial", 220),
        ("libero_object", 280),
        ("libero_goal", 300),
        ("libero_10", 520),
        ("libero_90", 400),
    ],
)
def test_step_limit_is_that_of_the_published_protocol(suite, limit):
    assert EpisodeConfig(suite=suite).step_limit == limit
    assert EpisodeConfig(suite=suite, max_steps=33).step_limit == 33


def test_libero_90_has_ninety_tasks_and_the_others_ten():
    official = {name: suite.tasks for name, suite in SUITES.items() if name not in CUE_SUITES}
    assert official == {
        "libero_spatial": 10,
        "libero_object": 10,
        "libero_goal": 10,
        "libero_10": 10,
        "libero_90": 90,
    }
    assert EpisodeConfig(suite="libero_90", task=89).task == 89


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"suite": "libero10"}, ["suite 'libero10'", "libero_spatial, libero_object", "libero_10"]),
        ({"task": 10}, ["task 10", "0..9", "libero_10"]),
        ({"task": -1}, ["task -1", "0..9"]),
        ({"suite": "libero_90", "task": 90}, ["task 90", "0..89", "libero_90"]),
        ({"task": 1.5}, ["task 1.5", "whole numbers"]),
        ({"task": True}, ["task True", "whole numbers"]),
        ({"task": "3"}, ["task '3'", "whole numbers"]),
        ({"init_state": 50}, ["init_state 50", "0..49"]),
        ({"init_state": -1}, ["init_state -1", "0..49"]),
        ({"seed": -1}, ["seed -1", "0..4294967295"]),
        ({"seed": 2**32}, ["seed 4294967296", "0..4294967295"]),
        ({"max_steps": 0}, ["max_steps 0", "1..", "520"]),
        ({"settle_steps": -1}, ["settle_steps -1", "0..1000"]),
        ({"image_size": 8}, ["image_size 8", "16..1024 pixels"]),
        ({"action_limit": float("nan")}, ["action_limit nan", "above 0"]),
        ({"action_limit": 0}, ["action_limit 0", "above 0"]),
        ({"action_limit": "1"}, ["action_limit '1'", "above 0"]),
    ],
)
def test_bad_value_is_named_with_what_is_allowed_in_one_line(values, said):
    with pytest.raises(UserError) as caught:
        EpisodeConfig(**values)
    message = str(caught.value)
    assert "\n" not in message
    for part in said:
        assert part in message
