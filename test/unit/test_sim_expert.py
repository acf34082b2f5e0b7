"""The scripted expert on real LIBERO: a function of the state, able to relabel, and it solves tasks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from real_libero import needs_libero

from aura_ros.errors import UserError
from aura_ros.sim.expert import DOWN, Phase, decide, plan_grasp, rotation_vector, yaw_of
from aura_ros.sim.scene import Goal, Item, Scene
from aura_ros.sim.suites import EpisodeConfig


def box(name, centre, size, held=False):
    """An upright box by its corners."""
    signs = np.array(np.meshgrid([-1, 1], [-1, 1], [-1, 1])).reshape(3, -1).T
    return Item(name, np.asarray(centre) + signs * np.asarray(size) / 2, held)


def turned(yaw):
    """The hand pointing down, turned about the vertical."""
    c, s = math.cos(yaw), math.sin(yaw)
    return np.array([[c, -s, 0], [s, c, 0], [0, 0, 1.0]]) @ DOWN


def scene(item, hand, opening=0.08, closing=0.0, done=False, others=()):
    """One object, one basket at x = 0.3."""
    goal = Goal(item.name, "basket", np.array([0.3, 0.0, 0.02]), 0.1, done)
    items = {other.name: other for other in (item, *others)}
    return Scene(np.asarray(hand, float), DOWN, opening, closing, items, (goal,))


def test_a_grasp_is_across_the_narrow_side():
    along_x = box("a", [0.1, 0.0, 0.02], [0.09, 0.03, 0.04])
    along_y = box("b", [0.1, 0.0, 0.02], [0.03, 0.09, 0.04])
    assert abs(plan_grasp(along_x, DOWN).yaw) < 0.1
    assert abs(abs(plan_grasp(along_y, DOWN).yaw) - math.pi / 2) < 0.1
    np.testing.assert_allclose(plan_grasp(along_x, DOWN).position[:2], [0.1, 0.0], atol=1e-6)


def test_a_grasp_turns_away_from_a_neighbour_that_the_fingers_would_land_on():
    square = box("a", [0.1, 0.0, 0.02], [0.04, 0.04, 0.04])
    beside = box("b", [0.1, 0.055, 0.03], [0.02, 0.03, 0.06])
    assert abs(plan_grasp(square, DOWN).yaw) < 0.1
    assert abs(plan_grasp(square, DOWN, [beside]).yaw) > 0.6


def test_the_phase_follows_from_the_geometry_alone():
    item = box("soup", [0.0, 0.0, 0.03], [0.05, 0.05, 0.06])
    grasp = plan_grasp(item, DOWN).position
    held = box("soup", [0.0, 0.0, 0.03], [0.05, 0.05, 0.06], held=True)
    lifted = box("soup", [0.0, 0.0, 0.3], [0.05, 0.05, 0.06], held=True)
    over = box("soup", [0.3, 0.0, 0.3], [0.05, 0.05, 0.06], held=True)
    low = box("soup", [0.3, 0.0, 0.11], [0.05, 0.05, 0.06], held=True)
    loose = box("soup", [0.3, 0.0, 0.09], [0.05, 0.05, 0.06])
    for what, wanted, gripper in (
        (scene(item, [-0.2, 0.1, 0.3]), Phase.APPROACH, -1),
        (scene(item, [0.003, 0.0, 0.15]), Phase.DESCEND, -1),
        (scene(item, grasp), Phase.GRASP, 1),
        (scene(held, grasp, opening=0.05), Phase.LIFT, 1),
        (scene(lifted, [0.0, 0.0, 0.3], opening=0.05), Phase.CARRY, 1),
        (scene(over, [0.3, 0.0, 0.3], opening=0.05), Phase.LOWER, 1),
        (scene(low, [0.3, 0.0, 0.11], opening=0.05), Phase.RELEASE, -1),
        # Fingers that open around it as it falls do not close again.
        (scene(loose, [0.3, 0.0, 0.13], opening=0.055, closing=-0.1), Phase.RELEASE, -1),
        (scene(item, [0.0, 0.0, 0.3], done=True), Phase.DONE, -1),
    ):
        found = decide(what)
        assert (found.phase, found.action[6]) == (wanted, gripper)
        assert np.abs(found.action).max() <= 1.0
        np.testing.assert_array_equal(decide(what).action, found.action)


def test_a_hand_beside_a_tall_object_rises_before_it_moves_over():
    item = box("soup", [0.0, 0.0, 0.03], [0.05, 0.05, 0.06])
    bottle = box("bottle", [0.1, 0.0, 0.07], [0.05, 0.05, 0.14])
    found = decide(scene(item, [0.2, 0.0, 0.05], others=[bottle]))
    assert found.phase is Phase.RISE
    assert found.action[2] == 1.0
    np.testing.assert_allclose(found.action[:2], 0.0)


@pytest.mark.parametrize("yaw", [-1.2, 0.0, 0.7])
def test_yaw_and_rotation_vector_are_of_the_same_turn(yaw):
    assert yaw_of(turned(yaw)) == pytest.approx(yaw)
    np.testing.assert_allclose(rotation_vector(turned(yaw) @ DOWN.T), [0, 0, yaw], atol=1e-12)


@pytest.fixture(scope="module")
def env():
    """libero_object task 0, built once."""
    from aura_ros.sim.libero import LiberoEnv

    with LiberoEnv(EpisodeConfig(suite="libero_object", task=0, image_size=64)) as made:
        yield made


@needs_libero
def test_the_expert_solves_a_real_episode_official_and_displaced(env):
    from aura_ros.sim.scene import SceneReader

    for displaced in (0, 3):
        env.reset(init_state=5, displaced=displaced)
        reader = SceneReader(env)
        done = False
        while not done:
            result = env.step(decide(reader.read()).action)
            done = result.done
        assert result.success
        assert env.step_count < 150


@needs_libero
def test_asking_the_expert_leaves_the_simulation_where_it_was(env):
    from aura_ros.sim.relabel import relabel
    from aura_ros.sim.scene import SceneReader

    def drive(asks):
        env.reset(init_state=2, displaced=0)
        reader, places = SceneReader(env), []
        for step in range(60):
            if asks and step % 8 == 0:
                label = relabel(env, reader)
                assert label.shape == (8, 7)
                assert label.dtype == np.float32
                np.testing.assert_allclose(label[0], decide(reader.read()).action, atol=1e-4)
            env.step(decide(reader.read()).action)
            places.append(reader.read())
        assert env.step_count == 60
        return places

    plain, asked = drive(False), drive(True)
    for one, other in zip(plain, asked, strict=True):
        np.testing.assert_allclose(one.hand, other.hand, atol=1e-4)
        for name, item in one.items.items():
            np.testing.assert_allclose(item.centre, other.items[name].centre, atol=1e-4)


@needs_libero
def test_displaced_arrangements_are_seeded_bounded_apart_and_at_rest(env):
    from aura_ros.sim.displaced import GAP_M, MOVED_M, REACH_M
    from aura_ros.sim.scene import SceneReader

    def items(**where):
        env.reset(**where)
        return SceneReader(env).read().items

    official = items(init_state=41, displaced=0)
    first, other, again = (items(init_state=41, displaced=k) for k in (1, 2, 1))
    for name in official:
        np.testing.assert_array_equal(first[name].points, again[name].points)
        moved = np.abs(first[name].centre - official[name].centre)
        assert (moved[:2] <= REACH_M + MOVED_M).all()
    assert max(np.linalg.norm(first[name].centre - other[name].centre) for name in official) > 0.02
    places = list(first.values())
    for index, one in enumerate(places):
        for two in places[index + 1 :]:
            gap = np.maximum(one.low - two.high, two.low - one.high)[:2].max()
            assert gap > GAP_M - 2 * MOVED_M


@needs_libero
def test_a_goal_that_is_no_placing_is_refused():
    from aura_ros.sim.libero import LiberoEnv
    from aura_ros.sim.scene import SceneReader

    with LiberoEnv(EpisodeConfig(suite="libero_goal", task=7)) as made:
        made.reset()
        with pytest.raises(UserError, match="only puts objects into or onto places"):
            SceneReader(made)
