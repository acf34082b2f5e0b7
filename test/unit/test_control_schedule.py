"""Real-time queries: at the period, about something new, without bursts."""

from hypothesis import given
from hypothesis import strategies as st

from aura_ros.control.schedule import QuerySchedule

STEP_NS = 100_000_000
T0 = 5_000_000_000


def test_the_first_query_is_due_at_once():
    assert QuerySchedule(STEP_NS).due({"a": 1}, T0)


def test_the_next_query_is_due_a_period_later_and_not_before():
    schedule = QuerySchedule(STEP_NS)
    schedule.due({"a": 1}, T0)
    assert not schedule.due({"a": 2}, T0 + STEP_NS - 1)
    assert schedule.due({"a": 2}, T0 + STEP_NS)


def test_the_same_messages_are_never_due_again_and_any_newer_one_makes_a_new_set():
    schedule = QuerySchedule(STEP_NS)
    assert schedule.due({"a": 1, "b": 1}, T0)
    assert not schedule.due({"a": 1, "b": 1}, T0 + 50 * STEP_NS)
    assert schedule.due({"a": 1, "b": 2}, T0 + 50 * STEP_NS)
    assert not schedule.due({"a": 1, "b": 2}, T0 + 60 * STEP_NS)


def test_messages_that_wait_for_their_turn_are_not_used_up():
    schedule = QuerySchedule(STEP_NS)
    schedule.due({"a": 1}, T0)
    assert not schedule.due({"a": 2}, T0 + 1)
    assert schedule.due({"a": 2}, T0 + STEP_NS)


def test_a_late_query_shifts_the_grid_instead_of_causing_a_burst():
    schedule = QuerySchedule(STEP_NS)
    schedule.due({"a": 0}, T0)
    late = T0 + 10 * STEP_NS + 7
    assert schedule.due({"a": 1}, late)
    assert not schedule.due({"a": 2}, late + STEP_NS - 1)
    assert schedule.due({"a": 2}, late + STEP_NS)


def test_a_query_that_is_a_little_late_keeps_the_grid():
    schedule = QuerySchedule(STEP_NS)
    schedule.due({"a": 0}, T0)
    schedule.due({"a": 1}, T0 + STEP_NS)
    assert schedule.due({"a": 2}, T0 + 2 * STEP_NS + 30)
    assert schedule.due({"a": 3}, T0 + 3 * STEP_NS)


def test_a_new_epoch_queries_at_once_and_about_whatever_there_is():
    schedule = QuerySchedule(STEP_NS)
    schedule.due({"a": 1}, T0)
    schedule.clear()
    assert schedule.due({"a": 1}, T0 + 1)


@given(st.lists(st.integers(1, 3 * STEP_NS), min_size=2, max_size=60))
def test_never_more_queries_than_periods_whatever_the_delays(delays):
    schedule, now, due = QuerySchedule(STEP_NS), T0, []
    for index, delay in enumerate(delays):
        now += delay
        if schedule.due({"a": index}, now):
            due.append(now)
    # A query that was late takes its delay from the next period, once.
    assert all(later - earlier >= STEP_NS for earlier, later in zip(due, due[2:], strict=False))
