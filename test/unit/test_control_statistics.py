"""Percentiles over a window and counts by reason."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aura_ros.control.statistics import OTHERS, Rejections, SlidingWindow, without_numbers


@given(st.lists(st.floats(-1e6, 1e6), max_size=50), st.integers(1, 20))
def test_percentiles_and_mean_are_those_of_the_latest_values(values, size):
    window = SlidingWindow(size)
    for value in values:
        window.add(value)
    latest = values[-size:]
    assert len(window) == len(latest)
    if not latest:
        assert (window.percentiles(50, 99), window.mean()) == ((0.0, 0.0), 0.0)
        return
    assert window.percentiles(50, 95, 99) == pytest.approx(np.percentile(latest, [50, 95, 99]))
    assert window.mean() == pytest.approx(np.mean(latest))


def test_a_cleared_window_is_empty():
    window = SlidingWindow(3)
    window.add(1)
    window.clear()
    assert (len(window), window.mean()) == (0, 0.0)


def test_a_window_of_another_size_keeps_the_latest_numbers():
    window = SlidingWindow(3)
    for value in (1, 2, 3):
        window.add(value)
    window.resize(2)
    assert window.mean() == 2.5
    window.resize(4)
    for value in (4, 5, 6):
        window.add(value)
    assert (len(window), window.mean()) == (4, 4.5)


def test_rejections_are_counted_by_reason_and_sorted():
    rejections = Rejections()
    assert [rejections.add(reason) for reason in ("late", "bad", "late")] == [1, 1, 2]
    assert rejections.items() == [("bad", 1), ("late", 2)]


def test_reasons_stay_few_whatever_a_publisher_sends():
    rejections = Rejections()
    for index in range(3 * Rejections.MOST):
        rejections.add(f"reason {index}")
    rejections.add("reason 0")
    counts = dict(rejections.items())
    assert len(counts) == Rejections.MOST + 1
    assert counts[OTHERS] == 2 * Rejections.MOST
    assert counts["reason 0"] == 2


def test_counts_are_not_lost_between_threads():
    rejections = Rejections()
    threads = [
        threading.Thread(target=lambda: [rejections.add("bad") for _ in range(1000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rejections.items() == [("bad", 4000)]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("image has 399360 bytes", "image has # bytes"),
        ("image is 410x308", "image is #"),
        ("image step is 0", "image step is #"),
        ("64 rgb8 pixels", "# rgb8 pixels"),
        ("joint 'panda_finger_joint2' has position nan", "joint 'panda_finger_joint2' has position #"),
        ("arm_2/state: pose position [nan, -1.5e-07, inf]", "arm_2/state: pose position [#, #, #]"),
        ("encoding 'bayer 8' of the banana", "encoding 'bayer 8' of the banana"),
        ("streams are -0.153 s apart.", "streams are # s apart."),
    ],
)
def test_numbers_leave_a_reason_and_names_stay(reason, expected):
    assert without_numbers(reason) == expected


@given(st.integers() | st.floats())
def test_one_kind_of_fault_is_one_reason_whatever_the_number(number):
    assert without_numbers(f"position is {number} m") == "position is # m"
