"""One memory step per stamp, at one period."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aura_ros.control.lockstep import Lockstep, Verdict
from aura_ros.errors import UserError

STEP_NS = 400_000_000


def answered(stamp_ns=STEP_NS, answer="chunk"):
    lockstep = Lockstep(STEP_NS)
    lockstep.answered(stamp_ns, answer)
    return lockstep


def test_the_first_observation_is_a_step_at_any_stamp():
    assert Lockstep(STEP_NS).verdict(123) is Verdict.STEP


def test_a_stamp_again_is_a_repeat_with_the_same_answer():
    lockstep = answered()
    assert lockstep.verdict(STEP_NS) is Verdict.REPEAT
    assert lockstep.answer == "chunk"
    assert lockstep.verdict(STEP_NS) is Verdict.REPEAT


def test_an_older_stamp_is_a_jump_back():
    assert answered().verdict(STEP_NS - 1) is Verdict.JUMP_BACK


@pytest.mark.parametrize("error_ns", [0, 1_000_000, -1_000_000])
def test_the_next_period_is_a_step_within_a_millisecond(error_ns):
    assert answered().verdict(2 * STEP_NS + error_ns) is Verdict.STEP


@pytest.mark.parametrize("gap", [STEP_NS // 2, STEP_NS + 1_000_001, 2 * STEP_NS])
def test_another_period_is_refused_naming_both(gap):
    lockstep = answered()
    with pytest.raises(UserError, match=rf"come {gap / 1e9:.3f} s apart.*every 0\.400 s"):
        lockstep.verdict(STEP_NS + gap)


def test_an_allowed_gap_is_allowed_once():
    lockstep = answered()
    lockstep.allow_gap()
    assert lockstep.verdict(STEP_NS) is Verdict.REPEAT
    assert lockstep.verdict(9 * STEP_NS) is Verdict.STEP
    lockstep.answered(9 * STEP_NS, "next")
    with pytest.raises(UserError, match="apart"):
        lockstep.verdict(12 * STEP_NS)


def test_a_new_epoch_forgets_stamp_answer_and_allowance():
    lockstep = answered()
    lockstep.allow_gap()
    lockstep.clear()
    assert (lockstep.stamp_ns, lockstep.answer, lockstep.any_gap) == (None, None, False)
    assert lockstep.verdict(5) is Verdict.STEP


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_a_verdict_or_a_refusal_for_every_pair_of_stamps(last, stamp):
    lockstep = answered(last)
    try:
        verdict = lockstep.verdict(stamp)
    except UserError:
        assert abs(stamp - last - STEP_NS) > 1_000_000
        return
    expected = Verdict.REPEAT if stamp == last else Verdict.JUMP_BACK if stamp < last else Verdict.STEP
    assert verdict is expected
