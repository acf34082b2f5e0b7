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
    positions,
)
from aura_ros.control.limits import Limits
from aura_ros.control.playback import PlayState, Rows
from aura_ros.control.player import ChunkKind, Kind, Player, unbounded
from aura_ros.errors import UserError
from aura_ros.types import ControlMode

PERIOD = 50_000_000
TWIST = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
JOINTS = ("j1", "j2")


def player(mode=ControlMode.JOINT_POSITION, columns=JOINTS, limits=None, timeout_s=0.5, cross_fade=0):
    measures = mode == ControlMode.JOINT_POSITION
    return Player(ChunkKind(columns, mode), limits or unbounded(columns), timeout_s, cross_fade, (), measures)


def offer(player, data, sequence=0, stamp=0, now=0, measured=(0.0, 0.0), epoch=1, **changed):
    mode = changed.get("mode", player.kind.mode)
    names, period = changed.get("names", player.kind.columns), changed.get("period", PERIOD)
    at = None if measured is None else np.asarray(measured, np.float32)
    return player.offer(
        Rows(epoch, sequence, stamp, np.asarray(data, np.float32)), names, mode, period, now, at
    )


def limits(step=0.1, low=-1.0, high=1.0, columns=JOINTS):
    n = len(columns)
    return Limits(columns, (low,) * n, (high,) * n, (step,) * n)


def test_nothing_is_commanded_before_the_first_chunk():
    own = player()
    command = own.tick(0, np.zeros(2, np.float32))
    assert (command.kind, command.values) == (Kind.NOTHING, None)
    assert own.state == (PlayState.IDLE, "waiting for a chunk")


def test_positions_hold_the_last_row_when_rows_run_out_then_where_they_are_measured():
    own = player(timeout_s=0.2)
    offer(own, [[0.1, 0.2], [0.2, 0.3]])
    kinds = [own.tick(k * PERIOD, np.full(2, 0.15, np.float32)) for k in range(7)]
    assert [c.kind for c in kinds] == [Kind.ROW] * 2 + [Kind.HOLD] * 3 + [Kind.STOP] * 2
    assert np.allclose(kinds[4].values, [0.2, 0.3])
    assert np.allclose(kinds[6].values, 0.15)
    assert own.state == (PlayState.HOLDING, "no chunk for more than 0.2 s: stopped")


def test_a_stop_holds_one_measured_position_it_does_not_follow_a_sinking_arm():
    own = player()
    offer(own, [[0.1, 0.1]])
    own.tick(0, np.zeros(2, np.float32))
    own.set_emergency(True)
    stops = [own.tick(k, np.full(2, -0.1 * k, np.float32)).values for k in (1, 2, 3)]
    assert np.allclose(stops, -0.1)


def test_positions_that_were_never_measured_are_not_made_up():
    own = player()
    assert offer(own, [[0.1, 0.1]], measured=None).dropped == "joint positions were not measured"
    own.set_emergency(True)
    assert own.tick(0, None).values is None


@pytest.mark.parametrize(
    "mode", [ControlMode.CARTESIAN_DELTA, ControlMode.JOINT_DELTA, ControlMode.JOINT_VELOCITY]
)
def test_deltas_and_velocities_stop_with_zero(mode):
    own = player(mode, timeout_s=0.1)
    offer(own, [[0.1, 0.1]], measured=None)
    commands = [own.tick(k * PERIOD, None) for k in range(5)]
    assert [c.kind for c in commands] == [Kind.ROW, Kind.HOLD, Kind.HOLD, Kind.STOP, Kind.STOP]
    assert all(not c.values.any() for c in commands[1:])


def test_after_a_time_out_the_next_chunk_is_played_from_row_0():
    own = player(timeout_s=0.1)
    offer(own, [[0.1, 0.1]] * 2)
    for k in range(6):
        own.tick(k * PERIOD, np.zeros(2, np.float32))
    assert offer(own, [[0.0, 0.05]] * 2, sequence=1, stamp=6 * PERIOD, now=7 * PERIOD).start == 0
    assert own.tick(7 * PERIOD, None).kind is Kind.ROW


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
    assert offer(own, data).refused == said
    assert own.tick(0, np.zeros(2, np.float32)).kind is Kind.STOP
    assert own.state == (PlayState.FAULT, f"chunk 0 refused: {said}")
    assert offer(own, [[0.0, 0.0]], sequence=1).dropped == "it came during a fault"
    assert own.clear_fault() == (True, f"cleared: chunk 0 refused: {said}")
    assert offer(own, [[0.0, 0.0]], sequence=2).accepted


def test_the_first_row_after_a_splice_is_measured_from_what_was_commanded_last():
    own = player(limits=limits(step=0.1))
    offer(own, [[0.1, 0], [0.2, 0], [0.3, 0]])
    own.tick(0, None)
    own.tick(PERIOD, None)  # at 0.2 now, wherever the arm is
    wrong = offer(own, [[0.4, 0.0]], sequence=1, stamp=2 * PERIOD, measured=(0.35, 0.0))
    assert wrong.refused == "row 0 moves j1 by 0.2; allowed in a row: 0.1"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mode": 1}, "chunk's control_mode is cartesian_delta; this player plays joint_position"),
        ({"mode": 77}, "chunk's control_mode is 77; this player plays joint_position"),
        ({"names": ("j2", "j1")}, "chunk's columns are j2, j1; this player plays j1, j2"),
        ({"period": 0}, "chunk's period is 0 s; allowed: a positive time"),
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


def test_an_emergency_stop_cannot_be_cleared_while_it_is_pressed():
    own = player()
    own.set_emergency(True)
    assert own.clear_fault() == (False, "the emergency stop is still pressed; release it first")
    own.set_emergency(False)
    assert own.state == (PlayState.FAULT, "emergency stop")
    assert own.clear_fault() == (True, "cleared: emergency stop")


def test_the_end_stops_only_what_ever_moved():
    own = player(ControlMode.CARTESIAN_DELTA, TWIST)
    assert own.stop(None).kind is Kind.NOTHING
    offer(own, np.full((2, 7), 0.01), measured=None)
    own.tick(0, None)
    assert own.stop(None).kind is Kind.STOP
    assert own.tick(1, None).kind is Kind.NOTHING


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
            values = own.tick(now, arm).values
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


def test_a_delta_over_its_period_is_a_velocity_and_summed_it_is_a_position():
    row = np.array([0.05, -0.1], np.float32)
    assert np.allclose(command_values(ControlMode.JOINT_DELTA, row, 0.05), [1.0, -2.0])
    assert np.allclose(command_values(ControlMode.JOINT_VELOCITY, row, 0.05), row)
    assert np.allclose(
        positions(ControlMode.JOINT_DELTA, row[None].repeat(2, 0), np.ones(2, np.float32))[1], [1.1, 0.8]
    )
    with pytest.raises(UserError, match="joint deltas need measured joint positions"):
        positions(ControlMode.JOINT_DELTA, row[None], None)


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
