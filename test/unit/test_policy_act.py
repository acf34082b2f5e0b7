"""Policy.act: backbone, memory step, residual, units and the check of the chunk."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
from tiny_backbone import INFO, TinyBackbone, tiny_memory

from aura_ros.errors import UserError
from aura_ros.memory import NumpyMemory, build_untrained
from aura_ros.policy import ActionRejected, Policy, PolicyConfig, load_memory, to_si
from aura_ros.types import LIBERO_ACTION_SPEC, BackboneOutput, Observation


def observation(stamp_ns: int = 5) -> Observation:
    return Observation({}, np.zeros(8, np.float32), "push the button", stamp_ns)


def state(policy: Policy) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in policy.memory.state_dict().items()}


def test_an_untrained_memory_leaves_the_base_chunk_as_it_is():
    policy = Policy(TinyBackbone(), load_memory(INFO))
    for _ in range(4):
        step = policy.act(observation(stamp_ns=77))
        assert not step.memory_step.output.any()
        np.testing.assert_array_equal(step.chunk.data, to_si(step.base_chunk, LIBERO_ACTION_SPEC))
    assert step.chunk.stamp_ns == 77
    assert policy.memory.steps == 4


def test_the_residual_is_added_in_controller_units_before_scaling():
    policy = Policy(TinyBackbone(), tiny_memory(residual=False), PolicyConfig(action_limit=100))
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
    policy = Policy(TinyBackbone(), tiny_memory(residual=False), PolicyConfig(action_limit=100))
    first = policy.act(observation(1))
    kept = first.memory_step.output.copy()
    assert not np.array_equal(policy.act(observation(2)).memory_step.output, kept)
    np.testing.assert_array_equal(first.memory_step.output, kept)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1.51, -1.51])
def test_a_bad_action_is_rejected_by_name_and_never_clamped(value):
    backbone = TinyBackbone()
    policy = Policy(backbone, tiny_memory())
    backbone.poison = (3, 5, value)
    with pytest.raises(ActionRejected, match=r"row 3, 'yaw'.*1\.5") as caught:
        policy.act(observation())
    error = caught.value
    assert (error.row, error.name, error.limit) == (3, "yaw", 1.5)
    np.testing.assert_equal(error.value, np.float32(value))
    assert "\n" not in str(error)


def test_the_limit_itself_is_allowed():
    backbone = TinyBackbone()
    backbone.poison = (0, 0, 1.5)
    assert Policy(backbone, tiny_memory()).act(observation()).chunk.data[0, 0] == pytest.approx(0.075)


@pytest.mark.parametrize("stamp_ns", range(3))
def test_a_residual_moves_a_binary_columns_decision_and_never_its_values(stamp_ns):
    policy = Policy(
        TinyBackbone(binary_columns=(6,)), tiny_memory(residual=False), PolicyConfig(action_limit=100)
    )
    step = policy.act(observation(stamp_ns))
    residual = step.memory_step.output.reshape(8, 7)[:, 6]
    assert np.abs(residual).max() > 1e-3
    gripper = step.chunk.data[:, 6]
    assert set(gripper) <= {0.0, 1.0}
    np.testing.assert_array_equal(gripper, step.base_chunk[:, 6] + residual > 0.5)
    # The other columns are numbers still.
    assert len(set(step.chunk.data[:, 5])) == 8


def test_a_residual_can_turn_a_binary_column_over():
    backbone = TinyBackbone(binary_columns=(6,))
    untrained = load_memory(backbone.info)
    checkpoint = build_untrained(untrained.config)
    bias = np.zeros((8, 7), np.float32)
    bias[:, 6] = -0.9
    arrays = {**checkpoint.arrays, "head.action.4.bias": bias.reshape(-1)}
    step = Policy(backbone, NumpyMemory.from_arrays(checkpoint.config, arrays)).act(observation(2))
    assert set(step.base_chunk[:, 6]) == {0.0, 1.0}
    assert not step.chunk.data[:, 6].any()


def test_the_compact_backbone_tells_its_gripper_column():
    from aura_ros.backbones import load_backbone

    info = load_backbone("compact").info
    assert [info.action.names[column] for column in info.binary_columns] == ["gripper"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 7.0, -7.0])
def test_a_bad_value_in_a_binary_column_is_rejected_and_not_decided(value):
    backbone = TinyBackbone(binary_columns=(6,))
    backbone.poison = (4, 6, value)
    with pytest.raises(ActionRejected, match="row 4, 'gripper'"):
        Policy(backbone, tiny_memory(residual=False), PolicyConfig(action_limit=5)).act(observation())


def test_a_rejected_chunk_leaves_the_memory_as_the_same_step_without_rejection_does():
    rejecting, accepting = TinyBackbone(), TinyBackbone()
    rejecting.poison = (0, 0, np.nan)
    rejected, accepted = Policy(rejecting, tiny_memory()), Policy(accepting, tiny_memory())
    with pytest.raises(ActionRejected) as caught:
        rejected.act(observation())
    step = accepted.act(observation())
    assert state(rejected) == state(accepted)
    assert rejected.memory.steps == 1
    assert caught.value.memory_step.probability == step.memory_step.probability
    assert caught.value.memory_step.fired == step.memory_step.fired
    np.testing.assert_array_equal(caught.value.hidden_state, step.hidden_state)


def test_a_hidden_state_that_is_not_finite_leaves_the_memory_untouched():
    backbone = TinyBackbone()
    policy = Policy(backbone, tiny_memory())
    policy.act(observation())
    before = state(policy)
    backbone.bad_hidden = True
    with pytest.raises(UserError, match="NaN"):
        policy.act(observation())
    assert state(policy) == before


def test_warm_up_does_not_touch_the_memory_and_reset_clears_it():
    backbone = TinyBackbone()
    policy = Policy(backbone, tiny_memory())
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
        Policy(TinyBackbone(), tiny_memory(**{field: found}))


def test_the_step_period_of_the_config_counts():
    config = PolicyConfig(memory_step_period=4)
    Policy(TinyBackbone(), load_memory(INFO, memory_step_period=4), config)
    with pytest.raises(UserError, match="memory_step_period is 8 but must be 4"):
        Policy(TinyBackbone(), load_memory(INFO), config)


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
    class Short(TinyBackbone):
        def infer(self, observation: Observation) -> BackboneOutput:
            return BackboneOutput(np.zeros(INFO.hidden_dim, np.float32), np.zeros((4, 7), np.float32))

    with pytest.raises(UserError, match=r"\[4, 7\].*\[8, 7\]"):
        Policy(Short(), tiny_memory()).act(observation())


def test_importing_the_policy_imports_no_torch():
    code = "import sys, aura_ros.policy, aura_ros.backbones; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_warming_up_prepares_for_the_instruction_to_come():
    backbone = TinyBackbone()
    policy = Policy(backbone, tiny_memory())
    policy.warm_up("put the cup down")
    assert backbone.warmed_for == "put the cup down"
    policy.warm_up()
    assert backbone.warmed_for is None


def test_a_change_waits_for_a_memory_step_under_way_and_applies_as_a_whole():
    policy = Policy(TinyBackbone(), tiny_memory())
    step, changed = policy.memory.step, threading.Event()

    def change():
        policy.change(threshold=1.0, force=True, action_limit=0.001)
        changed.set()

    caller = threading.Thread(target=change)

    def while_it_changes(hidden, force=None):
        caller.start()
        assert not changed.wait(0.2)
        return step(hidden, force)

    policy.memory.step = while_it_changes
    first = policy.act(observation(1))
    caller.join(10)
    policy.memory.step = step
    assert first.memory_step.threshold == 0.5
    assert first.memory_step.fired == (first.memory_step.probability > 0.5)
    with pytest.raises(ActionRejected, match=r"within \+-0.001") as rejected:
        policy.act(observation(2))
    assert (rejected.value.memory_step.threshold, rejected.value.memory_step.fired) == (1.0, True)


def test_a_change_does_not_wait_for_inference():
    backbone = TinyBackbone()
    policy = Policy(backbone, tiny_memory())
    backbone.release.clear()
    steps = []
    caller = threading.Thread(target=lambda: steps.append(policy.act(observation())))
    caller.start()
    assert backbone.entered.wait(10)
    policy.change(threshold=1.0, force=None, action_limit=1.5)
    backbone.release.set()
    caller.join(10)
    assert steps[0].memory_step.threshold == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [({"threshold": 1.5}, "threshold"), ({"action_limit": -1.0}, "action_limit")],
)
def test_a_change_that_is_refused_changes_nothing(change, message):
    policy = Policy(TinyBackbone(), tiny_memory())
    before = (policy.memory.threshold, policy.force, policy.config)
    with pytest.raises(UserError, match=message):
        policy.change(**({"threshold": 0.2, "force": True, "action_limit": 1.0} | change))
    assert (policy.memory.threshold, policy.force, policy.config) == before


def test_a_memory_without_a_gated_write_cannot_be_forced():
    policy = Policy(TinyBackbone(), tiny_memory(variant="no_memory"))
    with pytest.raises(UserError, match="gate.mode cannot force memory variant 'no_memory'"):
        policy.change(threshold=0.5, force=False, action_limit=1.5)
