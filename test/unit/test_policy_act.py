"""Policy.act: backbone, memory step, residual, units and the check of the chunk."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from aura_ros.errors import UserError
from aura_ros.memory import MemoryConfig, NumpyMemory, build_untrained
from aura_ros.policy import ActionRejected, Policy, PolicyConfig, load_memory, to_si
from aura_ros.types import LIBERO_ACTION_SPEC, BackboneInfo, BackboneOutput, Observation

HIDDEN = 24
INFO = BackboneInfo(
    name="fake",
    hidden_dim=HIDDEN,
    proprio_dim=8,
    cameras=("agentview",),
    action=LIBERO_ACTION_SPEC,
    checkpoint="fake",
    checkpoint_hash="0" * 64,
    parameters=0,
    trained=False,
)


class FakeBackbone:
    """Gives a seeded stream of hidden states and chunks."""

    def __init__(self, seed: int = 0) -> None:
        self.info = INFO
        self.rng = np.random.default_rng(seed)
        self.poison: tuple[int, int, float] | None = None
        self.bad_hidden = False
        self.warm_ups = self.closes = 0

    def infer(self, observation: Observation) -> BackboneOutput:
        hidden = self.rng.standard_normal(HIDDEN).astype(np.float32)
        chunk = self.rng.uniform(-1, 1, (8, 7)).astype(np.float32)
        if self.poison:
            row, column, value = self.poison
            chunk[row, column] = value
        if self.bad_hidden:
            hidden[3] = np.nan
        return BackboneOutput(hidden, chunk, {"forward": 1.0})

    def warm_up(self) -> None:
        self.warm_ups += 1

    def close(self) -> None:
        self.closes += 1


def observation(stamp_ns: int = 5) -> Observation:
    return Observation({}, np.zeros(8, np.float32), "push the button", stamp_ns)


def memory(residual: bool = True, **changes) -> NumpyMemory:
    sizes = {"input_dim": HIDDEN, "out_dim": 56, "memory_step_period": 8, **changes}
    return NumpyMemory.from_checkpoint(
        build_untrained(MemoryConfig(input_kind="projection", residual=residual, **sizes))
    )


def state(policy: Policy) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in policy.memory.state_dict().items()}


def test_an_untrained_memory_leaves_the_base_chunk_as_it_is():
    policy = Policy(FakeBackbone(), load_memory(INFO))
    for _ in range(4):
        step = policy.act(observation(stamp_ns=77))
        assert not step.memory_step.output.any()
        np.testing.assert_array_equal(step.chunk.data, to_si(step.base_chunk, LIBERO_ACTION_SPEC))
    assert step.chunk.stamp_ns == 77
    assert policy.memory.steps == 4


def test_the_residual_is_added_in_controller_units_before_scaling():
    policy = Policy(FakeBackbone(), memory(residual=False), PolicyConfig(action_limit=100))
    step = policy.act(observation())
    residual = step.memory_step.output.reshape(8, 7)
    assert np.abs(residual).max() > 1e-3
    np.testing.assert_allclose(
        step.chunk.data,
        (step.base_chunk + residual) * np.array(LIBERO_ACTION_SPEC.scale),
        rtol=1e-5,
        atol=1e-7,
    )


def test_a_step_stays_valid_after_the_next_one():
    policy = Policy(FakeBackbone(), memory(residual=False), PolicyConfig(action_limit=100))
    first = policy.act(observation())
    kept = first.memory_step.output.copy()
    assert not np.array_equal(policy.act(observation()).memory_step.output, kept)
    np.testing.assert_array_equal(first.memory_step.output, kept)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1.51, -1.51])
def test_a_bad_action_is_rejected_by_name_and_never_clamped(value):
    backbone = FakeBackbone()
    policy = Policy(backbone, memory())
    backbone.poison = (3, 5, value)
    with pytest.raises(ActionRejected, match=r"row 3, 'yaw'.*1\.5") as caught:
        policy.act(observation())
    error = caught.value
    assert (error.row, error.name, error.limit) == (3, "yaw", 1.5)
    np.testing.assert_equal(error.value, np.float32(value))
    assert "\n" not in str(error)


def test_the_limit_itself_is_allowed():
    backbone = FakeBackbone()
    backbone.poison = (0, 0, 1.5)
    assert Policy(backbone, memory()).act(observation()).chunk.data[0, 0] == pytest.approx(0.075)


def test_a_rejected_chunk_leaves_the_memory_as_the_same_step_without_rejection_does():
    rejecting, accepting = FakeBackbone(), FakeBackbone()
    rejecting.poison = (0, 0, np.nan)
    rejected, accepted = Policy(rejecting, memory()), Policy(accepting, memory())
    with pytest.raises(ActionRejected) as caught:
        rejected.act(observation())
    step = accepted.act(observation())
    assert state(rejected) == state(accepted)
    assert rejected.memory.steps == 1
    assert caught.value.memory_step.probability == step.memory_step.probability
    assert caught.value.memory_step.fired == step.memory_step.fired
    np.testing.assert_array_equal(caught.value.hidden_state, step.hidden_state)


def test_a_hidden_state_that_is_not_finite_leaves_the_memory_untouched():
    backbone = FakeBackbone()
    policy = Policy(backbone, memory())
    policy.act(observation())
    before = state(policy)
    backbone.bad_hidden = True
    with pytest.raises(UserError, match="NaN"):
        policy.act(observation())
    assert state(policy) == before


def test_warm_up_does_not_touch_the_memory_and_reset_clears_it():
    backbone = FakeBackbone()
    policy = Policy(backbone, memory())
    for _ in range(3):
        policy.act(observation())
    before = state(policy)
    policy.warm_up()
    assert backbone.warm_ups == 1
    assert state(policy) == before
    policy.reset()
    assert policy.memory.steps == 0
    assert policy.memory.state_norm == 0.0
    policy.close()
    assert backbone.closes == 1


@pytest.mark.parametrize(
    ("field", "found", "wanted"),
    [("input_dim", 25, 24), ("out_dim", 49, 56), ("memory_step_period", 1, 8)],
)
def test_a_memory_made_for_another_policy_is_refused_with_both_numbers(field, found, wanted):
    with pytest.raises(UserError, match=rf"{field} is {found} but must be {wanted}"):
        Policy(FakeBackbone(), memory(**{field: found}))


def test_the_step_period_of_the_config_counts():
    config = PolicyConfig(memory_step_period=4)
    Policy(FakeBackbone(), load_memory(INFO, memory_step_period=4), config)
    with pytest.raises(UserError, match="memory_step_period is 8 but must be 4"):
        Policy(FakeBackbone(), load_memory(INFO), config)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_action_limit_is_refused(limit):
    with pytest.raises(UserError, match="action_limit"):
        PolicyConfig(action_limit=limit)


def test_a_period_below_one_is_refused():
    with pytest.raises(UserError, match="memory_step_period 0"):
        PolicyConfig(memory_step_period=0)


def test_an_unknown_memory_variant_is_refused():
    with pytest.raises(UserError, match="variant is 'lstm'"):
        load_memory(INFO, variant="lstm")


def test_an_untrained_memory_depends_on_its_seed_alone(tmp_path):
    first, again, other = (load_memory(INFO, seed=seed) for seed in (1, 1, 2))
    assert first.weights_hash == again.weights_hash != other.weights_hash
    assert first.state_bytes == 4224
    path = tmp_path / "memory.safetensors"
    build_untrained(first.config, path)
    assert load_memory(INFO, path).weights_hash == first.weights_hash


def test_a_backbone_whose_chunk_differs_from_its_info_is_refused():
    class Short(FakeBackbone):
        def infer(self, observation: Observation) -> BackboneOutput:
            return BackboneOutput(np.zeros(HIDDEN, np.float32), np.zeros((4, 7), np.float32))

    with pytest.raises(UserError, match=r"\[4, 7\].*\[8, 7\]"):
        Policy(Short(), memory()).act(observation())


def test_importing_the_policy_imports_no_torch():
    code = "import sys, aura_ros.policy, aura_ros.backbones; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
