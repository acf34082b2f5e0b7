"""Controller units and SI."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aura_ros.errors import UserError
from aura_ros.policy import to_controller, to_si
from aura_ros.types import LIBERO_ACTION_SPEC


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.floats(-1.5, 1.5, width=32), min_size=7, max_size=7))
def test_there_and_back_is_exact_to_a_millionth(row):
    controller = np.array([row], np.float32)
    back = to_controller(to_si(controller, LIBERO_ACTION_SPEC), LIBERO_ACTION_SPEC)
    assert back.dtype == np.float32
    np.testing.assert_allclose(back, controller, rtol=0, atol=1e-6)


def test_one_controller_unit_is_five_centimetres_and_half_a_radian():
    si = to_si(np.ones((8, 7), np.float32), LIBERO_ACTION_SPEC)
    np.testing.assert_allclose(si, np.tile([0.05, 0.05, 0.05, 0.5, 0.5, 0.5, 1.0], (8, 1)), rtol=1e-6)


@pytest.mark.parametrize("convert", [to_si, to_controller])
def test_a_wrong_number_of_columns_is_refused(convert):
    with pytest.raises(UserError, match=r"\[8, 6\].*7 columns"):
        convert(np.zeros((8, 6), np.float32), LIBERO_ACTION_SPEC)
