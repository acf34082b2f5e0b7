"""Real-time queries: at the period, about something new, without bursts, early where a player would run dry."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aura_ros.control.schedule import NS, PlayerReport, QuerySchedule

STEP_NS = 100_000_000
T0 = 5_000_000_000
ROW_NS, LATENCY_NS = 50_000_000, 120_000_000


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


# -- prefetch ---------------------------------------------------------------------------------------------------


def test_an_early_query_does_not_wait_for_the_grid_and_the_grid_begins_anew_there():
    schedule = QuerySchedule(STEP_NS)
    schedule.due({"a": 1}, T0)
    early = T0 + 6 * STEP_NS // 10
    assert not schedule.due({"a": 2}, early)
    assert schedule.due({"a": 2}, early, early=True)
    assert not schedule.due({"a": 3}, T0 + STEP_NS)
    assert not schedule.due({"a": 3}, early + STEP_NS - 1)
    assert schedule.due({"a": 3}, early + STEP_NS)


def test_an_early_query_is_never_less_than_half_a_period_after_the_last_one():
    schedule = QuerySchedule(STEP_NS)
    schedule.due({"a": 1}, T0)
    assert not schedule.due({"a": 2}, T0 + STEP_NS // 2 - 1, early=True)
    assert schedule.due({"a": 2}, T0 + STEP_NS // 2, early=True)
    # Also where the last one was late and the grid would have it sooner.
    late = QuerySchedule(STEP_NS)
    late.due({"a": 1}, T0)
    late.due({"a": 2}, T0 + 19 * STEP_NS // 10)
    assert not late.due({"a": 3}, T0 + 2 * STEP_NS)
    assert late.due({"a": 3}, T0 + 24 * STEP_NS // 10)


def test_the_same_messages_are_not_asked_about_again_however_dry_the_player_is():
    schedule = QuerySchedule(STEP_NS)
    schedule.due({"a": 1}, T0)
    for later in range(1, 40):
        assert not schedule.due({"a": 1}, T0 + later * STEP_NS, early=True)
    assert schedule.due({"a": 2}, T0 + 40 * STEP_NS, early=True)


def test_the_first_query_of_an_epoch_is_due_at_once_also_when_early():
    schedule = QuerySchedule(STEP_NS)
    assert schedule.due({"a": 1}, 1, early=True)
    schedule.clear()
    assert schedule.due({"a": 1}, 2, early=True)


@given(st.lists(st.tuples(st.integers(1, 3 * STEP_NS), st.booleans()), min_size=2, max_size=60))
def test_queries_keep_half_a_period_apart_whatever_the_player_says(looks):
    schedule, now, due = QuerySchedule(STEP_NS), T0, []
    for index, (delay, early) in enumerate(looks):
        now += delay
        if schedule.due({"a": index}, now, early):
            due.append(now)
    assert all(later - earlier >= STEP_NS // 2 for earlier, later in pairwise(due))


@pytest.mark.parametrize(("rows_left", "dry"), [(0, True), (3, True), (4, False), (8, False)])
def test_a_player_runs_dry_when_its_rows_end_before_a_chunk_could_come(rows_left, dry):
    # 120 ms of latency and a row of 50 ms to spare: three rows end in 150 ms, four in 200.
    assert PlayerReport(7, rows_left, T0).runs_dry(7, T0, ROW_NS, LATENCY_NS) is dry


def test_rows_that_were_played_since_the_report_are_gone():
    report = PlayerReport(7, 4, T0)
    assert not report.runs_dry(7, T0 + 29_000_000, ROW_NS, LATENCY_NS)
    assert report.runs_dry(7, T0 + 30_000_000, ROW_NS, LATENCY_NS)


@pytest.mark.parametrize(("epoch", "age_ns"), [(8, 0), (6, 0), (7, NS + 1)])
def test_a_report_of_another_epoch_or_an_old_one_says_nothing(epoch, age_ns):
    report = PlayerReport(7, 0, T0)
    assert not report.runs_dry(epoch, T0 + age_ns, ROW_NS, LATENCY_NS)
    assert PlayerReport(7, 5, T0).depth(epoch, T0 + age_ns) == 0


def test_the_queue_s_depth_is_what_the_player_reported():
    assert PlayerReport(7, 5, T0).depth(7, T0 + NS) == 5
