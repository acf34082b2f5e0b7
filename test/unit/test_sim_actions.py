"""SI rows to controller units and back, and what is refused before it reaches the simulator."""

from dataclasses import replace

import numpy as np
import pytest

from aura_ros.errors import UserError
from aura_ros.sim.actions import ActionError, check_env_action, chunk_row_to_env, is_saturated
from aura_ros.types import LIBERO_ACTION_SPEC, ControlMode

SCALE = np.array(LIBERO_ACTION_SPEC.scale)


def test_metres_and_radians_become_controller_units():
    row = np.array([0.05, -0.025, 0, 0.5, -0.25, 0, 1], dtype=np.float32)
    action = chunk_row_to_env(row)
    assert action.dtype == np.float64
    np.testing.assert_allclose(action, [1, -0.5, 0, 1, -0.5, 0, -1], atol=1e-6)


@pytest.mark.parametrize(("openness", "command"), [(1.0, -1.0), (0.0, 1.0), (0.5, 0.0)])
def test_open_gripper_is_minus_one_to_the_environment(openness, command):
    assert chunk_row_to_env([0, 0, 0, 0, 0, 0, openness])[6] == command


def test_scaling_there_and_back_is_exact_to_1e_6():
    units = np.random.default_rng(0).uniform(-1.5, 1.5, (500, 7))
    for row in units:
        si = (row * SCALE).astype(np.float32)
        np.testing.assert_allclose(chunk_row_to_env(si)[:6], row[:6], atol=1e-6)


def test_scale_of_the_spec_is_used_not_a_constant():
    spec = replace(LIBERO_ACTION_SPEC, scale=(0.1, 0.1, 0.1, 1.0, 1.0, 1.0, 1.0))
    assert chunk_row_to_env([0.1, 0, 0, 0, 0, 0.5, 0], spec)[0] == 1.0
    assert chunk_row_to_env([0.1, 0, 0, 0, 0, 0.5, 0], spec)[5] == 0.5


@pytest.mark.parametrize(
    "spec",
    [
        replace(LIBERO_ACTION_SPEC, control_mode=ControlMode.JOINT_DELTA),
        replace(LIBERO_ACTION_SPEC, names=("gripper", "x", "y", "z", "roll", "pitch", "yaw")),
        replace(LIBERO_ACTION_SPEC, period_s=0.1),
    ],
)
def test_chunk_of_another_robot_is_refused(spec):
    with pytest.raises(UserError, match="LIBERO checkpoint"):
        chunk_row_to_env(np.zeros(7), spec)


def test_row_is_not_changed_in_place():
    row = np.array([0.05, 0, 0, 0, 0, 0, 1.0])
    chunk_row_to_env(row)
    np.testing.assert_array_equal(row, [0.05, 0, 0, 0, 0, 0, 1.0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 5, 6])
def test_not_finite_is_refused_and_the_column_named(bad, column):
    row = np.zeros(7)
    row[column] = bad
    for refuse in (chunk_row_to_env, lambda values: check_env_action(values, 1.5)):
        with pytest.raises(ActionError, match=f"'{LIBERO_ACTION_SPEC.names[column]}' is .*finite"):
            refuse(row)


@pytest.mark.parametrize("shape", [(6,), (8,), (8, 7), ()])
def test_wrong_shape_is_refused_and_named(shape):
    with pytest.raises(ActionError, match=r"shape \[.*expected \[7\]"):
        check_env_action(np.zeros(shape), 1.5)


def test_what_is_no_number_is_refused():
    with pytest.raises(ActionError, match="7 numbers"):
        check_env_action(["left"] * 7, 1.5)


def test_beyond_the_limit_is_refused_not_clamped_and_the_limit_named():
    row = np.zeros(7)
    row[2] = -1.51
    with pytest.raises(ActionError, match=r"'z' is -1\.51 controller units; allowed is -1\.5\.\.1\.5"):
        check_env_action(row, 1.5)
    row[2] = -1.49
    assert check_env_action(row, 1.5)[2] == -1.49


def test_rounding_of_float32_at_a_bound_is_neither_refused_nor_counted():
    row = chunk_row_to_env((np.array([1.5, 0, 0, 1, 0, 0, 0]) * SCALE).astype(np.float32))
    check_env_action(row, 1.5)
    at_one = chunk_row_to_env((np.array([1, -1, 1, 1, -1, 1, 0]) * SCALE).astype(np.float32))
    assert not is_saturated(at_one)


def test_saturation_counts_arm_deltas_only():
    assert is_saturated(np.array([0, 0, 0, 0, 0, 1.2, 0]))
    assert not is_saturated(np.array([0, 0, 0, 0, 0, 0, 1.2]))
