"""Resets counted from one seeding, and another task's instruction in a task's scene."""

from __future__ import annotations

import numpy as np
import pytest
from real_libero import needs_libero

from aura_ros.errors import UserError
from aura_ros.sim.draws import Draws
from aura_ros.sim.suites import EpisodeConfig


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [1, 3, 4], [4, 2, 2, 0], [0, 2, 4]])
def test_a_reset_draws_what_it_would_after_all_before_it(order):
    np.random.seed(5)
    in_turn = [np.random.random() for _ in range(5)]
    drawn = []
    draws = Draws()
    np.random.seed(99)
    before = np.random.get_state()[1].copy()
    for number in order:
        draws.reset(lambda: drawn.append(np.random.random()), 5, number)
        assert drawn[-1] == in_turn[number]
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    draws.reset(lambda: drawn.append(np.random.random()), 6, 0)
    assert drawn[-1] == np.random.RandomState(6).random_sample()


def test_an_instruction_of_another_task_is_for_libero_object_alone():
    assert EpisodeConfig(suite="libero_object", instruction_of=3).instruction_of == 3
    with pytest.raises(UserError, match="instruction_of is for libero_object, not for libero_10"):
        EpisodeConfig(suite="libero_10", instruction_of=3)
    with pytest.raises(UserError, match="instruction_of 10 is out of range"):
        EpisodeConfig(suite="libero_object", instruction_of=10)


@needs_libero
def test_the_same_scene_with_another_instruction_wants_another_object():
    from aura_ros.sim.expert import decide
    from aura_ros.sim.pool import environment
    from aura_ros.sim.scene import SceneReader

    env = environment(EpisodeConfig(suite="libero_object", task=2, image_size=16))
    ends = {}
    for told in (-1, 4):
        env.reset(40, 1, 0, told)
        reader, done = SceneReader(env), False
        while not done:
            outcome = env.step(decide(reader.read()).action)
            done = outcome.done
        assert outcome.success
        ends[env.instruction] = reader.targets
    assert ends == {
        "pick up the salad dressing and place it in the basket": ("salad_dressing_1",),
        "pick up the ketchup and place it in the basket": ("ketchup_1",),
    }
    with pytest.raises(UserError, match="the scene has no 'orange_juice' to fetch, only alphabet_soup_1"):
        env.reset(40, 1, 0, 9)
