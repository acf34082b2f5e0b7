"""The write budget: writes stay under it whatever the gate says, and the threshold comes back."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aura_ros.control.write_budget import GAIN, WriteBudget

SHARE, OWN, WINDOW = 0.1, 0.5, 100


def run(budget, probabilities):
    """Whether each step wrote, and the thresholds that it was decided by."""
    wrote, thresholds = [], []
    for probability in probabilities:
        thresholds.append(budget.threshold)
        wrote.append(bool(probability > budget.threshold))
        budget.after(wrote[-1])
    return np.array(wrote), np.array(thresholds)


def most_in(wrote, window):
    """The most writes in any `window` steps in a row."""
    total = np.concatenate([[0], np.cumsum(wrote)])
    return int(max(total[window:] - total[:-window], default=total[-1]))


def stationary(rng):
    return rng.uniform(0, 1, 2000)


def sure(rng):
    return np.ones(2000)


def bursts(rng):
    quiet = rng.uniform(0, 0.3, (10, 150))
    loud = rng.uniform(0.8, 1.0, (10, 50))
    return np.concatenate([quiet, loud], axis=1).reshape(-1)


def drift(rng):
    return np.clip(np.linspace(0.2, 0.95, 2000) + rng.normal(0, 0.1, 2000), 0, 1)


@pytest.mark.parametrize("stream", [stationary, sure, bursts, drift])
def test_no_window_has_more_writes_than_the_budget(stream):
    probabilities = stream(np.random.default_rng(3))
    assert (probabilities > OWN).mean() > 2 * SHARE, "without a budget there are far more"
    wrote, thresholds = run(WriteBudget(SHARE, OWN, WINDOW), probabilities)
    assert most_in(wrote, WINDOW) <= SHARE * WINDOW
    assert thresholds.min() >= OWN
    assert thresholds.max() <= 1.0


@pytest.mark.parametrize("stream", [stationary, sure, drift])
def test_a_gate_that_wants_more_gets_nearly_the_whole_budget(stream):
    wrote, _ = run(WriteBudget(SHARE, OWN, WINDOW), stream(np.random.default_rng(3)))
    assert wrote[-500:].mean() >= 0.8 * SHARE


def test_writes_are_spread_and_not_spent_at_the_window_s_begin():
    wrote, _ = run(WriteBudget(SHARE, OWN, WINDOW), np.full(2000, 0.9))
    gaps = np.diff(np.flatnonzero(wrote[500:]))
    assert gaps.max() <= 3 / SHARE
    assert gaps.min() >= 0.3 / SHARE


def test_the_steps_that_are_written_are_those_the_gate_is_surest_of():
    probabilities = stationary(np.random.default_rng(5))
    wrote, _ = run(WriteBudget(SHARE, OWN, WINDOW), probabilities)
    assert probabilities[wrote][50:].mean() > 0.85 > probabilities[probabilities > OWN].mean()


def test_the_threshold_returns_to_the_own_one_when_writes_are_rare():
    budget = WriteBudget(SHARE, OWN, WINDOW)
    run(budget, np.full(300, 0.95))
    assert budget.threshold > 0.8
    run(budget, np.zeros(WINDOW))
    assert budget.threshold == OWN
    wrote, thresholds = run(budget, np.where(np.arange(400) % 20 == 0, 0.9, 0.0))
    assert wrote.sum() == 20, "half the budget: every one of them is written"
    assert thresholds.max() <= OWN + 2 * GAIN


def test_a_budget_of_a_write_a_step_changes_nothing():
    probabilities = stationary(np.random.default_rng(7))
    wrote, _ = run(WriteBudget(1.0, OWN, WINDOW), probabilities)
    assert wrote.tolist() == (probabilities > OWN).tolist()


def test_without_a_budget_the_threshold_never_moves():
    budget = WriteBudget(0.0, OWN, WINDOW)
    wrote, thresholds = run(budget, stationary(np.random.default_rng(1)))
    assert set(thresholds) == {OWN}
    assert wrote.mean() > 0.4


def test_a_budget_of_less_than_one_write_a_window_still_writes():
    wrote, _ = run(WriteBudget(0.004, OWN, WINDOW), np.full(2000, 0.9))
    assert 4 <= wrote.sum() <= 8
    assert most_in(wrote, 250) == 1


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=300),
    st.floats(0.01, 1.5),
    st.floats(0, 1),
    st.integers(1, 60),
)
def test_the_budget_holds_for_any_gate(probabilities, share, own, window):
    wrote, thresholds = run(WriteBudget(share, own, window), probabilities)
    span = max(window, int(np.ceil(1 / share - 1e-9)))
    assert most_in(wrote, span) <= share * span + 1e-6
    assert thresholds.min() >= own
    assert thresholds.max() <= 1.0


def test_what_was_written_stays_counted_when_the_budget_changes():
    budget = WriteBudget(SHARE, OWN, 20)
    wrote, _ = run(budget, [0.9, 0.9])
    assert wrote.all()
    budget.change(SHARE, 0.6, 20)
    assert budget.threshold == 1.0, "two of twenty are used up"
    budget.change(0.0, 0.6, 20)
    assert budget.threshold == 0.6


@pytest.mark.parametrize("steps", [0, 1, 7, 150, 333])
def test_a_restored_budget_goes_on_exactly(steps):
    probabilities = stationary(np.random.default_rng(9))
    whole, first = WriteBudget(SHARE, OWN, 30), WriteBudget(SHARE, OWN, 30)
    expected, _ = run(whole, probabilities)
    run(first, probabilities[:steps])
    second = WriteBudget(SHARE, OWN, 30)
    second.restore(**json.loads(json.dumps(first.saved())))
    wrote, _ = run(second, probabilities[steps:])
    assert wrote.tolist() == expected[steps:].tolist()


def test_a_new_life_begins_with_the_whole_budget():
    budget = WriteBudget(SHARE, OWN, WINDOW)
    probabilities = stationary(np.random.default_rng(2))
    first, _ = run(budget, probabilities)
    budget.clear()
    again, _ = run(budget, probabilities)
    assert again.tolist() == first.tolist()
