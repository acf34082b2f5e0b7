"""The player's decisions: rows, holds, stops, latched faults, and bounds that hold for whatever comes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aura_ros.control.commands import (
    ALLOWED,
    COMMAND_TYPES,
    check_columns,
    check_pair,
    command_values,
)
from aura_ros.control.limits import Limits
from aura_ros.control.playback import PlayState, Rows
from aura_ros.control.player import UNMEASURED, Bounds, ChunkKind, Kind, Player
from aura_ros.errors import UserError
from aura_ros.types import ControlMode

PERIOD = 50_000_000
TWIST = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
JOINTS = ("j1", "j2")


def player(
    mode=ControlMode.JOINT_POSITION,
    columns=JOINTS,
    limits=None,
    timeout_s=0.5,
    cross_fade=0,
    deviation=np.inf,
    measures=False,
):
    anything = (np.inf,) * len(columns)
    limits = limits or Limits(columns, (-np.inf,) * len(columns), anything, anything)
    bounds = Bounds(limits, round(timeout_s * 1e9), cross_fade, deviation)
    return Player(ChunkKind(columns, mode), bounds, measures=mode == ControlMode.JOINT_POSITION or measures)


def offer(player, data, sequence=0, stamp=0, now=0, measured=(0.0, 0.0), epoch=1, **changed):
    mode = changed.get("mode", player.kind.mode)
    names, period = changed.get("names", player.kind.columns), changed.get("period", PERIOD)
    at = None if measured is None else np.asarray(measured, np.float32)
    kind = (names, changed.get("units", ("rad",) * len(names)), mode, period)
    rows = Rows(epoch, sequence, stamp, np.asarray(data, np.float32))
    return player.offer(rows, kind, now, changed.get("steady", now), at)


def tick(player, now=0, measured=None, steady=None):
    return player.tick(now, now if steady is None else steady, measured)


def limits(step=0.1, low=-1.0, high=1.0, columns=JOINTS):
    n = len(columns)
    return Limits(columns, (low,) * n, (high,) * n, (step,) * n)


def test_nothing_is_commanded_before_the_first_chunk():
    own = player()
    command = tick(own, 0, np.zeros(2, np.float32))
    assert (command.kind, command.values) == (Kind.NOTHING, None)
    assert own.state == (PlayState.IDLE, "waiting for a chunk")


def test_positions_hold_the_last_row_when_rows_run_out_then_where_they_are_measured():
    own = player(timeout_s=0.2)
    offer(own, [[0.1, 0.2], [0.2, 0.3]])
    kinds = [tick(own, k * PERIOD, np.full(2, 0.15, np.float32)) for k in range(7)]
    assert [c.kind for c in kinds] == [Kind.ROW] * 2 + [Kind.HOLD] * 3 + [Kind.STOP] * 2
    assert np.allclose(kinds[4].values, [0.2, 0.3])
    assert np.allclose(kinds[6].values, 0.15)
    assert own.state == (PlayState.HOLDING, "no chunk for more than 0.2 s: stopped")


def test_without_fresh_measurements_nothing_more_is_taken_though_the_target_is_known():
    own = player(timeout_s=0.2)
    offer(own, [[0.1, 0.1]] * 2)
    tick(own)
    assert offer(own, [[0.1, 0.1]] * 8, sequence=1, measured=None).dropped == UNMEASURED
    kinds = [tick(own, k * PERIOD).kind for k in range(1, 7)]
    assert kinds[0] is Kind.ROW  # what was taken is played
    assert kinds[-1] is Kind.STOP
    assert own.state[1].endswith(f"the last one was {UNMEASURED}")


def test_a_stop_holds_one_measured_position_it_does_not_follow_a_sinking_arm():
    own = player()
    offer(own, [[0.1, 0.1]])
    tick(own, 0, np.zeros(2, np.float32))
    own.set_emergency(True)
    stops = [tick(own, k, np.full(2, -0.1 * k, np.float32)).values for k in (1, 2, 3)]
    assert np.allclose(stops, -0.1)


def test_positions_that_were_never_measured_are_not_made_up():
    own = player()
    assert offer(own, [[0.1, 0.1]], measured=None).dropped == "joint positions were not measured"
    own.set_emergency(True)
    assert tick(own, 0, None).values is None


@pytest.mark.parametrize(
    "mode", [ControlMode.CARTESIAN_DELTA, ControlMode.JOINT_DELTA, ControlMode.JOINT_VELOCITY]
)
def test_deltas_and_velocities_stop_with_zero(mode):
    own = player(mode, timeout_s=0.1)
    offer(own, [[0.1, 0.1]], measured=None)
    commands = [tick(own, k * PERIOD, None) for k in range(5)]
    assert [c.kind for c in commands] == [Kind.ROW, Kind.HOLD, Kind.HOLD, Kind.STOP, Kind.STOP]
    assert all(not c.values.any() for c in commands[1:])


def test_after_a_time_out_the_next_chunk_is_played_from_row_0():
    own = player(timeout_s=0.1)
    offer(own, [[0.1, 0.1]] * 2)
    for k in range(6):
        tick(own, k * PERIOD, np.zeros(2, np.float32))
    assert offer(own, [[0.0, 0.05]] * 2, sequence=1, stamp=6 * PERIOD, now=7 * PERIOD).start == 0
    assert tick(own, 7 * PERIOD, None).kind is Kind.ROW


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([[0.05, 0.05], [np.nan, 0.1]], "row 1 has j1 = nan; finite numbers are needed"),
        ([[0.05, np.inf]], "row 0 has j2 = inf; finite numbers are needed"),
        ([[0.05, 1.5]], "row 0 has j2 = 1.5; allowed: -1 to 1"),
        ([[0.05, 0.05], [0.05, 0.3]], "row 1 moves j2 by 0.25; allowed in a row: 0.1"),
        ([[0.0, 0.2]], "row 0 moves j2 by 0.2; allowed in a row: 0.1"),
    ],
)
def test_what_must_not_be_played_is_a_latched_fault_never_clamped(data, said):
    own = player(limits=limits())
    offer(own, [[0.0, 0.0]])
    tick(own)
    assert offer(own, data, sequence=1, stamp=PERIOD).refused == said
    assert tick(own, PERIOD, np.zeros(2, np.float32)).kind is Kind.STOP
    assert own.state == (PlayState.FAULT, f"chunk 1 refused: {said}")
    assert offer(own, [[0.0, 0.0]], sequence=2, stamp=PERIOD).dropped == "it came during a fault"
    assert own.clear_fault() == (True, f"cleared: chunk 1 refused: {said}")
    assert offer(own, [[0.0, 0.0]], sequence=3, stamp=PERIOD).accepted


def test_the_first_row_after_a_splice_is_measured_from_what_was_commanded_last():
    own = player(limits=limits(step=0.1))
    offer(own, [[0.1, 0], [0.2, 0], [0.3, 0]])
    tick(own, 0, None)
    tick(own, PERIOD, None)  # at 0.2 now, wherever the arm is
    wrong = offer(own, [[0.4, 0.0]], sequence=1, stamp=2 * PERIOD, measured=(0.35, 0.0))
    assert wrong.refused == "row 0 moves j1 by 0.2; allowed in a row: 0.1"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mode": 1}, "chunk's control_mode is cartesian_delta; this player plays joint_position"),
        ({"mode": 77}, "chunk's control_mode is 77; this player plays joint_position"),
        ({"names": ("j2", "j1")}, "chunk's columns are j2, j1; this player plays j1, j2"),
        ({"period": 0}, "chunk's period is 0 s; allowed: 0.005 s or more"),
    ],
)
def test_a_chunk_of_another_kind_is_a_fault(changed, said):
    own = player()
    assert offer(own, [[0.0, 0.0]], **changed).refused == said
    assert own.state[0] is PlayState.FAULT


def test_the_period_of_the_first_chunk_is_that_of_all():
    own = player()
    offer(own, [[0.0, 0.0]])
    wrong = offer(own, [[0.0, 0.0]], sequence=1, period=2 * PERIOD)
    assert wrong.refused == "chunk's period is 0.1 s; allowed: 0.05 s"


def test_a_chunk_that_is_not_in_si_is_a_fault():
    own = player()
    said = "chunk's units are deg; this player plays SI: m, rad, m/s, rad/s, 1"
    assert offer(own, [[0.0, 0.0]], units=("rad", "deg")).refused == said


def test_a_period_that_would_be_a_busy_loop_is_a_fault():
    assert "allowed: 0.005 s or more" in offer(player(), [[0.0, 0.0]], period=100_000).refused


def test_an_old_plan_is_not_played_and_one_from_the_future_neither():
    own = player(timeout_s=0.5)
    assert offer(own, [[0.0, 0.0]], stamp=0, now=3600 * 10**9).dropped == "too old: 3600.000 s"
    assert offer(own, [[0.0, 0.0]], stamp=10**9, now=0).dropped == "from the future: synchronise the clocks"
    assert own.state == (PlayState.IDLE, "waiting for a chunk")


def test_it_times_out_by_the_steady_clock_when_simulated_time_stands_still():
    own = player(ControlMode.CARTESIAN_DELTA, TWIST, timeout_s=0.5)
    offer(own, np.full((8, 7), 0.01), measured=None)
    tick(own, 0)
    assert own.watch(0, 4 * 10**8, None).kind is Kind.NOTHING  # not yet, and no row is played between ticks
    assert own.watch(0, 6 * 10**8, None).kind is Kind.STOP


def test_after_a_clock_that_went_back_it_stops_and_goes_on_with_the_next_chunk():
    own = player(ControlMode.CARTESIAN_DELTA, TWIST)
    offer(own, np.full((8, 7), 0.01), measured=None, stamp=10**9, now=10**9)
    tick(own, 10**9)
    own.clock_went_back()
    assert tick(own, 0, steady=10**9).kind is Kind.STOP
    assert "the clock went back" in own.state[1]
    assert offer(own, np.full((8, 7), 0.01), sequence=1, measured=None, steady=10**9).start == 0
    assert tick(own, 0, steady=10**9).kind is Kind.ROW


def test_a_stop_falls_silent_after_a_second_for_somebody_else_may_drive():
    own = player(ControlMode.CARTESIAN_DELTA, TWIST)
    offer(own, np.full((8, 7), 0.01), measured=None)
    tick(own)
    own.set_emergency(True)
    kinds = [tick(own, k * 10**8).kind for k in range(1, 14)]
    assert kinds[:11] == [Kind.STOP] * 11
    assert kinds[12] is Kind.NOTHING


def test_a_fault_before_anything_was_played_commands_nothing():
    own = player()
    own.set_emergency(True)
    assert tick(own, 0, np.ones(2, np.float32)) == tick(own, 1) == own.stop(2, None)
    assert tick(own).kind is Kind.NOTHING


def test_without_a_measurement_a_stop_holds_where_it_was_told_to_be():
    own = player()
    offer(own, [[0.1, 0.2]] * 2)
    tick(own)
    own.set_emergency(True)
    assert np.allclose(tick(own, 1).values, [0.1, 0.2])


def test_an_arm_that_does_not_follow_is_a_fault_at_the_next_chunk():
    own = player(deviation=0.3)
    offer(own, [[0.1, 0.1], [0.2, 0.5]])
    tick(own)
    tick(own, PERIOD)
    wrong = offer(own, [[0.2, 0.5]], sequence=1, stamp=PERIOD, now=PERIOD, measured=(0.1, 0.1))
    assert wrong.refused == "j2 is 0.4 from where it was told to be; allowed: 0.3"


def test_tighter_limits_hold_for_what_is_left_too():
    own = player(limits=limits(step=0.1))
    offer(own, [[0.05, 0.0], [0.1, 0.0], [0.15, 0.0]])
    tick(own)
    own.apply(Bounds(limits(step=0.01), 10**9))
    assert tick(own, PERIOD).kind is Kind.STOP
    assert "rows left to play are beyond the new limits: row 0 moves j1 by 0.05" in own.state[1]


def test_a_value_of_exactly_its_bound_is_allowed_though_float32_rounds_it_up():
    own = player(limits=limits(low=-0.05, high=0.05, step=0.05))
    assert offer(own, [[0.05, -0.05]]).accepted


def test_a_chunk_that_comes_during_the_last_row_waits_for_that_rows_end():
    own = player()
    assert own.waiting
    offer(own, [[0.1, 0.1]])
    tick(own)
    assert not own.waiting  # the row is being executed
    tick(own, PERIOD)
    assert own.waiting


def test_a_hold_says_why_the_chunks_that_came_were_not_taken():
    own = player(ControlMode.CARTESIAN_DELTA, TWIST, timeout_s=0.2)
    offer(own, np.full((1, 7), 0.01), epoch=9, measured=None)
    tick(own)
    offer(own, np.full((1, 7), 0.01), epoch=3, measured=None)
    tick(own, 10**9)
    assert own.state[1].endswith("stopped; the last one was of an older epoch")


def test_an_emergency_stop_cannot_be_cleared_while_it_is_pressed():
    own = player()
    own.set_emergency(True)
    assert own.clear_fault() == (False, "the emergency stop is still pressed; release it first")
    own.set_emergency(False)
    assert own.state == (PlayState.FAULT, "emergency stop")
    assert own.clear_fault() == (True, "cleared: emergency stop")


def test_the_end_stops_only_what_ever_moved():
    own = player(ControlMode.CARTESIAN_DELTA, TWIST)
    assert own.stop(0, None).kind is Kind.NOTHING
    offer(own, np.full((2, 7), 0.01), measured=None)
    tick(own, 0, None)
    assert own.stop(0, None).kind is Kind.STOP
    assert tick(own, 1, None).kind is Kind.NOTHING


steps = st.integers(-300, 300).map(lambda k: k / 1000)
happenings = st.lists(
    st.one_of(
        st.just("tick"),
        st.just("late"),
        st.just("clear"),
        st.lists(st.tuples(steps, steps), min_size=1, max_size=6),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(happenings, st.integers(0, 3), st.sampled_from([ControlMode.JOINT_POSITION, ControlMode.JOINT_DELTA]))
def test_no_command_steps_further_than_its_bound_at_any_splice(happening, cross_fade, mode):
    """Judged from outside: an arm that is always where it was last told to be."""
    bound = 0.1
    own = player(mode, limits=limits(step=bound), timeout_s=0.2, cross_fade=cross_fade)
    arm, now, sequence = np.zeros(2, np.float32), 0, 0
    for event in happening:
        if isinstance(event, list):
            sequence += 1
            data = np.cumsum(np.asarray(event, np.float32), axis=0) + arm if mode == 3 else event
            offer(own, data, sequence=sequence, stamp=now - 2 * PERIOD, now=now, measured=arm)
        elif event == "clear":
            own.clear_fault()
        else:
            now += PERIOD if event == "tick" else 5 * PERIOD
            values = tick(own, now, arm).values
            if values is None:
                continue
            moved = values - arm if mode == ControlMode.JOINT_POSITION else values
            assert np.abs(moved).max() <= bound * (1 + 1e-4)
            arm = arm + moved


def test_the_table_of_modes_and_commands_is_held_and_refusals_say_what_goes():
    assert set(ALLOWED) == set(ControlMode)
    assert {command for own in ALLOWED.values() for command in own} == set(COMMAND_TYPES)
    with pytest.raises(
        UserError, match="cartesian_delta cannot drive command_type 'joint_trajectory'; it drives: twist"
    ):
        check_pair(ControlMode.CARTESIAN_DELTA, "joint_trajectory")


def test_columns_that_a_command_has_no_place_for_are_named():
    check_columns(TWIST, "gripper", "twist", ())
    check_columns(("j2", "j1"), "", "float64_array", ("j1", "j2"))
    with pytest.raises(UserError, match="gripper column 'hand' is not in the chunk; its columns are: x, y"):
        check_columns(("x", "y"), "hand", "twist", ())
    with pytest.raises(UserError, match="missing j3, left over j2"):
        check_columns(("j1", "j2"), "", "float64_array", ("j1", "j3"))


def test_a_delta_over_its_period_is_a_velocity():
    row = np.array([0.05, -0.1], np.float32)
    assert np.allclose(command_values(ControlMode.JOINT_DELTA, row, 0.05), [1.0, -2.0])
    assert np.allclose(command_values(ControlMode.JOINT_VELOCITY, row, 0.05), row)


def test_joint_deltas_add_up_from_where_the_arm_is_measured_and_then_from_the_target():
    own = player(ControlMode.JOINT_DELTA, measures=True)
    offer(own, [[0.1, -0.1]] * 3, measured=(1.0, 2.0))
    tick(own, 0, np.array([1.0, 2.0], np.float32))
    assert np.allclose(own.positions_ahead(), [[1.1, 1.9], [1.2, 1.8], [1.3, 1.7]])
    # The arm lags; what comes next starts from the target.
    tick(own, PERIOD, np.array([1.0, 2.0], np.float32))
    assert np.allclose(own.target, [1.2, 1.8])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"step": (0.1,)}, "limits.step has 1 numbers for 2 columns"),
        ({"lower": (1.0, -1.0)}, "limits of j1 are 1.0 to 1.0; lower must be below upper"),
        ({"step": (0.0, 1.0)}, "limits.step of j1 is 0.0; it must be positive"),
        ({"upper": (np.nan, 1.0)}, "holds NaN"),
    ],
)
def test_limits_that_make_no_sense_are_refused(changed, said):
    own = {"lower": (-1.0, -1.0), "upper": (1.0, 1.0), "step": (0.1, 0.1), **changed}
    with pytest.raises(UserError, match=said):
        Limits(JOINTS, **own)
