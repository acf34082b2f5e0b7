"""The gate's parameters on a policy: modes, thresholds and the budget of writes."""

import numpy as np
import pytest
from tiny_backbone import TinyBackbone, tiny_memory

from aura_ros.errors import UserError
from aura_ros.nodes.gate_settings import GateSettings
from aura_ros.nodes.policy_config import PolicyNodeConfig
from aura_ros.policy import Policy
from aura_ros.types import Observation

STEP_S = 0.4


def policy_with(**config):
    policy = Policy(TinyBackbone(), tiny_memory())
    settings = GateSettings(policy, STEP_S)
    settings.apply(PolicyNodeConfig(action_limit=100.0, **config))
    return policy, settings


def steps(policy, settings, count, first=0):
    made = []
    for stamp in range(first, first + count):
        step = policy.act(Observation({}, np.zeros(8, np.float32), "go", stamp)).memory_step
        settings.stepped(step)
        made.append(step)
    return made


def test_without_a_budget_everything_is_as_without_settings():
    plain = Policy(TinyBackbone(), tiny_memory())
    policy, settings = policy_with()
    made = steps(policy, settings, 40)
    expected = [plain.act(Observation({}, np.zeros(8, np.float32), "go", s)).memory_step for s in range(40)]
    for one, other in zip(made, expected, strict=True):
        assert (one.fired, one.probability, one.threshold) == (
            other.fired,
            other.probability,
            other.threshold,
        )
        assert one.output.tobytes() == other.output.tobytes()
    for name, array in plain.memory.state_dict().items():
        assert array.tobytes() == policy.memory.state_dict()[name].tobytes()


def test_always_writes_each_step_and_never_none_and_the_gate_s_own_probability_is_told():
    learned = steps(*policy_with(), 1)[0]
    for mode, fired in (("always", True), ("never", False)):
        policy, settings = policy_with(gate__mode=mode)
        made = steps(policy, settings, 10)
        assert [step.fired for step in made] == [fired] * 10
        assert [step.written_bytes > 0 for step in made] == [fired] * 10
        assert policy.memory.writes == 10 * fired
        assert {step.threshold for step in made} == {0.5}
        assert made[0].probability == learned.probability


def test_a_budget_holds_the_writes_and_its_threshold_is_that_of_the_step():
    policy, settings = policy_with(gate__threshold=0.0, gate__writes_per_second=0.25, write_rate_window=50)
    made = steps(policy, settings, 200)
    wrote = np.array([step.written_bytes > 0 for step in made])
    assert all(step.fired == (step.probability > step.threshold) for step in made)
    assert max(np.convolve(wrote, np.ones(50), "valid")) <= 0.25 * STEP_S * 50
    assert wrote.sum() >= 10
    assert len({step.threshold for step in made}) > 10
    settings.apply(PolicyNodeConfig(action_limit=100.0, gate__threshold=0.0))
    assert all(step.fired for step in steps(policy, settings, 20, first=200))


def test_forced_steps_are_no_part_of_the_budget():
    policy, settings = policy_with(gate__mode="always", gate__writes_per_second=0.25)
    assert len([step for step in steps(policy, settings, 100) if step.fired]) == 100
    settings.apply(PolicyNodeConfig(action_limit=100.0, gate__writes_per_second=0.25))
    assert steps(policy, settings, 1, first=100)[0].threshold == 0.5


def test_a_new_life_of_the_memory_has_the_whole_budget_and_a_restored_one_what_was_left():
    policy, settings = policy_with(gate__threshold=0.0, gate__writes_per_second=0.25)
    steps(policy, settings, 30)
    saved, threshold = settings.saved(), policy.memory.threshold
    assert threshold > 0.0
    settings.begin(None)
    assert policy.memory.threshold == 0.0
    settings.begin(saved)
    assert policy.memory.threshold == threshold


def test_a_budget_for_a_memory_without_a_learned_gate_is_refused_and_changes_nothing():
    policy = Policy(TinyBackbone(), tiny_memory(variant="write_every_step"))
    settings = GateSettings(policy, STEP_S)
    with pytest.raises(UserError, match="gate.writes_per_second 1 needs a learned gate.*write_every_step"):
        settings.apply(PolicyNodeConfig(gate__writes_per_second=1.0, action_limit=3.0))
    assert policy.config.action_limit == 1.5
