"""Cue tasks: what lights up when, and that nothing but the cue tells the target."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from real_libero import needs_libero

from aura_ros.errors import UserError
from aura_ros.sim.cues import (
    CUE_TASKS,
    FLASH,
    GAP,
    LEAD,
    cue_task,
    official,
    schedule,
    waypoint_at,
    waypoints,
)
from aura_ros.sim.suites import CUE_SUITES, SUITES, EpisodeConfig

CUED = [(suite, task) for suite, tasks in CUE_TASKS.items() for task in range(len(tasks))]


def episodes(suite, task, count=60, **changes):
    """Both cues of some states."""
    for number in range(count):
        config = EpisodeConfig(suite=suite, task=task, init_state=number % 50, seed=number, **changes)
        yield config, dataclasses.replace(config, cue=1)


def test_the_suites_and_the_table_of_cue_tasks_agree():
    assert set(CUE_TASKS) == set(CUE_SUITES)
    for suite, tasks in CUE_TASKS.items():
        assert SUITES[suite].tasks == len(tasks)


@pytest.mark.parametrize(("suite", "task"), CUED)
def test_nothing_but_what_lights_up_for_the_target_depends_on_the_cue(suite, task):
    for first, second in episodes(suite, task):
        one, other = schedule(first), schedule(second)
        assert (one.held, one.cue) == (other.held, other.cue)
        names = [candidate.shown_by for candidate in cue_task(first).candidates]
        exchanged = dict(zip(names, reversed(names), strict=True))
        assert [dataclasses.replace(f, item=exchanged.get(f.item, f.item)) for f in one.flashes] == list(
            other.flashes
        )
        np.testing.assert_array_equal(waypoints(first, one.held), waypoints(second, other.held))


@pytest.mark.parametrize("delay", [20, 57, 80, 2000])
@pytest.mark.parametrize(("suite", "task"), CUED)
def test_the_cue_ends_its_delay_before_the_decision_where_a_query_is_due(suite, task, delay):
    for config, _ in episodes(suite, task, 20, delay=delay):
        shown = schedule(config)
        assert shown.held - shown.cue[1] == delay
        assert shown.held % 8 == 0
        assert shown.cue[1] - shown.cue[0] == FLASH
        target = cue_task(config).candidates[config.cue].shown_by
        assert shown.lit(shown.cue[0]) == shown.lit(shown.cue[1] - 1) == (target,)
        assert shown.lit(shown.held) == ()
        # Two or three queries see it, whenever it begins.
        assert sum(shown.cue[0] <= 8 * query < shown.cue[1] for query in range(shown.held // 8)) >= 2


@pytest.mark.parametrize(("suite", "task"), CUED)
def test_flashes_are_alike_apart_and_mean_nothing_but_the_cue(suite, task):
    distractors = 0
    for config, _ in episodes(suite, task):
        shown, known = schedule(config), cue_task(config)
        for flash, following in zip(shown.flashes, shown.flashes[1:], strict=False):
            assert following.start - flash.stop >= GAP
        assert all(flash.stop - flash.start == FLASH and flash.stop <= shown.held for flash in shown.flashes)
        candidates = [c.shown_by for c in known.candidates]
        telling = [flash for flash in shown.flashes if flash.item in candidates]
        assert len(telling) == (2 if known.both else 1)
        # With two the last one tells.
        assert (telling[-1].start, telling[-1].stop) == shown.cue
        assert {flash.item for flash in shown.flashes} - set(candidates) <= set(known.distractors)
        distractors += len(shown.flashes) - len(telling)
    assert distractors > 60
    assert not set(known.distractors) & set(candidates)


def test_the_cue_begins_at_any_time():
    starts = np.array([schedule(config).cue[0] for config, _ in episodes("cue_object", 0, 600)])
    assert starts.min() < 10
    assert starts.max() > LEAD - 10
    counts, _ = np.histogram(starts, bins=4, range=(0, LEAD))
    assert counts.min() > 100


def test_the_sweep_ends_where_it_began_and_visits_all_of_its_waypoints():
    config = EpisodeConfig(suite="cue_place", delay=400)
    held = schedule(config).held
    points = waypoints(config, held)
    visited = np.stack([waypoint_at(points, step, held) for step in range(held)])
    np.testing.assert_array_equal(visited[-30:], np.zeros((30, 3)))
    assert len(np.unique(visited, axis=0)) == len(points)


def test_official_tasks_have_neither_cue_nor_hold():
    config = EpisodeConfig(suite="libero_10")
    assert schedule(config).held == 0
    assert official(config) is config
    with pytest.raises(UserError, match="suite 'libero_10' has no cue; choose one of cue_object"):
        cue_task(config)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"suite": "libero_10", "cue": 1}, "cue 1 is out of range"),
        ({"suite": "libero_10", "named": True}, "named is for cue_object"),
        ({"suite": "cue_place", "cue": 2}, "cue 2 is out of range"),
        ({"suite": "cue_place", "delay": 19}, "delay 19 is out of range"),
        ({"suite": "cue_place", "delay": 2001}, "delay 2001 is out of range"),
        ({"suite": "cue_order", "task": 2}, "task 2 is out of range"),
    ],
)
def test_what_is_out_of_range_is_named(given, said):
    with pytest.raises(UserError, match=said):
        EpisodeConfig(**given)


@pytest.fixture(scope="module")
def place():
    from aura_ros.sim.libero import LiberoEnv

    with LiberoEnv(EpisodeConfig(suite="cue_place", image_size=64)) as env:
        yield env


def seen_after_the_cue(env, config):
    """What a robot shows at every query from the end of the cue on, and at the decision the whole state."""
    env.begin(config)
    shown = env.hold.schedule
    frames = []
    while env.held:
        if env.step_count % 8 == 0 and env.step_count >= shown.cue[1]:
            seen = env.observe()
            frames.append(
                np.concatenate([*(i.ravel() / 255 for i in seen.images.values()), seen.joint_positions])
            )
        # What is asked for in the hold is not done.
        env.step(np.full(7, 0.9))
    return np.stack(frames), env.domain.sim.get_state().flatten().tobytes()


@needs_libero
def test_after_the_cue_a_classifier_of_what_is_seen_is_at_chance(place):
    features, labels = [], []
    for number in range(3):
        config = dataclasses.replace(place.config, init_state=number, seed=number, displaced=number, delay=20)
        found = [seen_after_the_cue(place, dataclasses.replace(config, cue=cue)) for cue in (0, 1)]
        # Each state has both cues, and not a bit differs: whatever is learned of them is right half of the time.
        np.testing.assert_array_equal(found[0][0], found[1][0])
        assert found[0][1] == found[1][1]
        for cue, (frames, _) in enumerate(found):
            features += list(frames[:, ::7])
            labels += [cue] * len(frames)
    x, y = np.array(features), np.array(labels)
    nearest = np.abs(x[:, None] - x[None]).sum(-1) + 1e9 * np.eye(len(x))
    ties = nearest <= nearest.min(axis=1, keepdims=True)
    guessed = (ties * y).sum(1) / ties.sum(1)
    assert np.abs(guessed - y).mean() >= 0.5


@needs_libero
def test_the_cue_is_seen_while_it_is_lit_and_leaves_nothing_behind(place):
    config = dataclasses.replace(place.config, delay=20)
    place.begin(config)
    shown, model = place.hold.schedule, place.domain.sim.model._model
    before = model.geom_rgba.copy(), model.geom_matid.copy()

    def magenta(image):
        red, green, blue = (image[..., channel].astype(int) for channel in range(3))
        return int(((red > 100) & (green < 60) & (blue > 100)).sum())

    lit, dark = [], []
    while place.held:
        if place.step_count % 8 == 0:
            (lit if shown.lit(place.step_count) else dark).append(magenta(place.render("agentview")))
        place.step(np.zeros(7))
    assert min(lit) > 20
    assert max(dark) == 0
    np.testing.assert_array_equal(model.geom_rgba, before[0])
    np.testing.assert_array_equal(model.geom_matid, before[1])


@needs_libero
def test_the_arm_moves_during_the_hold_and_ends_where_it_began(place):
    from aura_ros.sim.scene import SceneReader

    place.begin(dataclasses.replace(place.config, delay=60, cue=1))
    reader = SceneReader(place)
    home, way, items = reader.read().hand, [], place._object_positions()
    while place.held:
        outcome = place.step(np.zeros(7))
        way.append(reader.read().hand)
        assert not outcome.done
    assert np.linalg.norm(np.diff(way, axis=0), axis=1).sum() > 0.3
    np.testing.assert_allclose(way[-1], home, atol=0.01)
    for name, position in place._object_positions().items():
        np.testing.assert_allclose(position, items[name], atol=1e-3)


@needs_libero
def test_the_expert_says_during_the_hold_what_it_would_do(place):
    from aura_ros.sim.relabel import relabel
    from aura_ros.sim.scene import SceneReader

    place.begin(dataclasses.replace(place.config, delay=20))
    before = place.domain.sim.get_state().flatten()
    plan = relabel(place, SceneReader(place))
    assert np.abs(plan[:, :3]).max() > 0.3
    np.testing.assert_array_equal(place.domain.sim.get_state().flatten(), before)
    assert place.held
    assert place.step_count == 0


@needs_libero
@pytest.mark.parametrize("cue", [0, 1])
def test_the_expert_reaches_the_target_that_was_shown(place, cue):
    from aura_ros.sim.expert import decide
    from aura_ros.sim.scene import SceneReader

    place.begin(dataclasses.replace(place.config, delay=20, cue=cue, init_state=3))
    reader, done = SceneReader(place), False
    while not done:
        outcome = place.step(decide(reader.read()).action)
        done = outcome.done
    assert outcome.success
    other = cue_task(place.config).candidates[1 - cue].goal
    assert not place.domain._eval_predicate(list(other))
