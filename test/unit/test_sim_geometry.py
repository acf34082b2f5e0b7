"""Quaternion to axis-angle: one rotation, one vector."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aura_ros.errors import UserError
from aura_ros.geometry import GRIPPER_DOWN_XYZW, IDENTITY_XYZW, quaternion_to_axis_angle

components = st.floats(-1, 1, allow_nan=False)
quaternions = st.tuples(components, components, components, components).filter(
    lambda q: np.linalg.norm(q) > 1e-3
)


def matrix_of_quaternion(q):
    x, y, z, w = np.asarray(q) / np.linalg.norm(q)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def matrix_of_axis_angle(v):
    angle = np.linalg.norm(v)
    if angle == 0:
        return np.eye(3)
    x, y, z = v / angle
    k = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + math.sin(angle) * k + (1 - math.cos(angle)) * (k @ k)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(quaternions, st.sampled_from([IDENTITY_XYZW, GRIPPER_DOWN_XYZW]))
def test_axis_angle_is_the_same_rotation_and_the_same_for_both_signs(q, reference):
    vector = quaternion_to_axis_angle(q, reference)
    np.testing.assert_array_equal(vector, quaternion_to_axis_angle(np.negative(q), reference))
    np.testing.assert_allclose(matrix_of_axis_angle(vector), matrix_of_quaternion(q), atol=1e-9)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(quaternions)
def test_default_branch_has_angles_up_to_half_a_turn(q):
    assert np.linalg.norm(quaternion_to_axis_angle(q)) <= math.pi + 1e-12


@pytest.mark.parametrize(
    ("quaternion", "expected"),
    [
        ([0, 0, 0, 1], [0, 0, 0]),
        ([0, 0, 0, -1], [0, 0, 0]),
        ([1, 0, 0, 0], [math.pi, 0, 0]),
        ([-1, 0, 0, 0], [math.pi, 0, 0]),
        ([0, 0, math.sqrt(0.5), math.sqrt(0.5)], [0, 0, math.pi / 2]),
    ],
)
def test_quaternion_order_is_xyzw_and_both_signs_of_a_half_turn_agree(quaternion, expected):
    np.testing.assert_allclose(quaternion_to_axis_angle(quaternion), expected, atol=1e-15)


@pytest.mark.parametrize("w", [-0.2, -1e-3, -1e-12, 0.0, 1e-12, 1e-3, 0.2])
def test_gripper_pointing_down_does_not_flip_when_w_changes_sign(w):
    quaternion = [math.sqrt(1 - w * w), 0, 0, w]
    vector = quaternion_to_axis_angle(quaternion, GRIPPER_DOWN_XYZW)
    np.testing.assert_allclose(vector, [2 * math.acos(w), 0, 0], atol=1e-9)


def test_tiny_rotation_keeps_its_size_instead_of_becoming_zero():
    np.testing.assert_allclose(quaternion_to_axis_angle([0, 5e-10, 0, 1]), [0, 1e-9, 0], rtol=1e-9)


def test_input_is_not_changed():
    quaternion = np.array([0.0, 0.0, 0.0, -2.0])
    quaternion_to_axis_angle(quaternion)
    np.testing.assert_array_equal(quaternion, [0, 0, 0, -2])


@pytest.mark.parametrize("quaternion", [[0, 0, 0, 0], [0, 0, 1], [0, math.nan, 0, 1], [math.inf, 0, 0, 0]])
def test_what_is_no_orientation_is_refused_in_one_line_naming_the_order(quaternion):
    with pytest.raises(UserError, match=r"\[x, y, z, w\]") as caught:
        quaternion_to_axis_angle(quaternion)
    assert "\n" not in str(caught.value)
