"""The recall tasks: what a perfect listener would answer, and what it would have to write."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from aura_ros.bench.recall.tasks import (
    HARD,
    MAIN,
    SPARSE,
    TASKS,
    NoisyRecall,
    evaluation_episodes,
    find_task,
    fitting_task,
    write_floors,
)
from aura_ros.errors import UserError
from aura_ros.training.episodes import DISTRACTOR, EVENT, FILLER, NO_TARGET, QUERY


def made(task, count=200, seed=0):
    return task.episodes(count, np.random.default_rng(seed))


@pytest.mark.parametrize("task", [MAIN, HARD], ids=lambda t: t.name)
def test_a_listener_who_keeps_the_latest_value_of_each_key_answers_every_query(task):
    episodes = made(task, 50)
    for observations, targets, kinds, changes, news in zip(
        episodes.observations, episodes.targets, episodes.kinds, episodes.changes, episodes.news, strict=True
    ):
        stored: dict[int, int] = {}
        asked = []
        for t, row in enumerate(observations):
            key, value = row[: task.keys], row[task.keys : task.keys + task.values]
            bind, query = row[-2], row[-1]
            if bind:
                assert (key.sum(), value.sum(), query, kinds[t]) == (1, 1, 0, EVENT)
                k, v = int(key.argmax()), int(value.argmax())
                assert changes[t] == (stored.get(k) != v)
                assert news[t] == (stored.get(k, 0) != v)
                stored[k] = v
            elif query:
                assert (key.sum(), value.sum(), kinds[t]) == (1, 0, QUERY)
                asked.append(int(key.argmax()))
                assert targets[t] == stored[asked[-1]]
            else:
                assert kinds[t] == (DISTRACTOR if row.any() else FILLER)
                assert not changes[t]
                assert not news[t]
            assert (targets[t] == NO_TARGET) == (not query)
        assert len(stored) == task.bindings
        assert len(asked) == len(set(asked)) == task.queries


def test_probes_ask_for_the_value_so_far_and_for_class_0_of_an_unseen_key():
    plain, probed = made(MAIN, 60), made(dataclasses.replace(MAIN, probe=0.4), 60)
    assert not (plain.kinds[:, :-8] == QUERY).any()
    unseen = asked = 0
    for observations, targets, kinds in zip(probed.observations, probed.targets, probed.kinds, strict=True):
        stored: dict[int, int] = {}
        for row, target, kind in zip(observations, targets, kinds, strict=True):
            key, value = int(row[:8].argmax()), int(row[8:12].argmax())
            if row[-2]:
                stored[key] = value
            elif row[-1]:
                assert (row[:8].sum(), row[8:12].sum(), kind) == (1, 0, QUERY)
                assert target == stored.get(key, 0)
                unseen, asked = unseen + (key not in stored), asked + 1
            else:
                assert target == NO_TARGET
    assert unseen > 100
    zeros = (plain.kinds == FILLER).sum() / 60
    assert (asked / 60 - 8) / zeros == pytest.approx(0.4, abs=0.05)
    # Events are those of the task.
    assert (probed.kinds == EVENT).sum() == (plain.kinds == EVENT).sum()


def test_a_listener_who_keeps_the_latest_symbol_answers_every_query():
    episodes = made(dataclasses.replace(SPARSE, event=0.05))
    for observations, targets, kinds in zip(
        episodes.observations, episodes.targets, episodes.kinds, strict=True
    ):
        latest = None
        for row, target, kind in zip(observations, targets, kinds, strict=True):
            if row[-2]:
                latest = int(row[:4].argmax())
            assert row[:4].sum() == 1
            assert (kind == EVENT) == bool(row[-2])
            assert target == (latest if row[-1] else NO_TARGET)
        assert kinds[: len(kinds) // 2].tolist().count(EVENT) >= 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("noisy_long_recall", (9.27, 9.83, 12.40)),
        ("hard_recall", (5.72, 5.93, 6.55)),
        ("sparse_recall", (9.57, 11.86, 12.83)),
    ],
)
def test_the_floors_are_those_of_the_specification_up_to_sampling(name, expected):
    floors = write_floors(evaluation_episodes(TASKS[name]))
    # Sparse episodes are short: 4,096 of them still differ by 2.5 % from the specification's own draw.
    np.testing.assert_allclose(dataclasses.astuple(floors), expected, rtol=0.03)


def test_distractors_cover_half_of_the_filler_and_overwrites_three_tenths_of_the_bindings():
    kinds = made(MAIN, 4000).kinds
    events = (kinds == EVENT).sum(axis=1)
    assert abs(events.mean() - 8 * 1.3) < 0.08
    rest = (kinds == DISTRACTOR).sum() / ((kinds == DISTRACTOR) | (kinds == FILLER)).sum()
    assert abs(rest - 0.5) < 0.01


def test_the_same_generator_gives_the_same_bytes_and_another_gives_others():
    one, two, other = made(MAIN), made(MAIN), made(MAIN, seed=1)
    for field in dataclasses.fields(one):
        assert getattr(one, field.name).tobytes() == getattr(two, field.name).tobytes()
    assert one.observations.tobytes() != other.observations.tobytes()


def test_sizes_are_those_of_the_parameter_table():
    assert (MAIN.input_dim, MAIN.classes, HARD.input_dim, HARD.classes) == (14, 4, 26, 8)
    assert (SPARSE.input_dim, SPARSE.classes, MAIN.token_classes) == (6, 4, 17)


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda t: t.name)
def test_every_token_is_one_of_the_classes_and_tells_events_apart(task):
    episodes = made(task)
    assert 0 <= episodes.tokens.min() <= episodes.tokens.max() < task.token_classes
    events = set(episodes.tokens[episodes.kinds == EVENT].tolist())
    assert not events & set(episodes.tokens[episodes.kinds != EVENT].tolist())


def test_other_lengths_and_wrong_names_of_tasks():
    assert find_task("sparse_recall", 1024, 0.2).steps == 1024
    for call in (
        lambda: find_task("recall"),
        lambda: find_task("hard_recall", 200),
        lambda: find_task("sparse_recall", 1),
        lambda: find_task("sparse_recall", event=1.0),
        lambda: find_task("sparse_recall", event=float("nan")),
        lambda: NoisyRecall("x", 4, 4, 8, 8, 0.1, 0.5, 96),
        lambda: NoisyRecall("x", 8, 4, 8, 8, 0.1, 0.5, 20),
    ):
        with pytest.raises(UserError):
            call()


def test_widths_name_the_task_that_they_fit():
    assert fitting_task(14, 4) == "noisy_long_recall"
    assert fitting_task(6, 4, "sparse_recall") == "sparse_recall"
    with pytest.raises(
        UserError, match="x is 6 -> 4, which does not fit hard_recall; allowed: noisy_long_recall 14"
    ):
        fitting_task(6, 4, "hard_recall", "x")
    with pytest.raises(UserError, match="task 'chess' is unknown"):
        fitting_task(6, 4, "chess")
