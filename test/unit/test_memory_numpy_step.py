"""The control loop's NumPy step against its reference, the torch module, and what an error leaves alone."""

import json
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aura_ros.errors import UserError
from aura_ros.memory import MemoryConfig, MemoryModule, NumpyMemory, Variant, build_untrained
from aura_ros.memory.module import arrays_of
from aura_ros.memory.numpy_step import scheduled_draw

STEPPED = [v for v in Variant if v is not Variant.FULL_RECURRENCE]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def config_of(**changes) -> MemoryConfig:
    return MemoryConfig(**({"input_dim": 20, "out_dim": 6} | changes))


def memory_of(**changes) -> NumpyMemory:
    return NumpyMemory.from_checkpoint(build_untrained(config_of(**changes)))


def twins_of(**changes) -> tuple[MemoryModule, NumpyMemory]:
    module = MemoryModule(config_of(**changes))
    # Statistics other than 0 and 1, as after training.
    torch.manual_seed(0)
    module.train()(torch.randn(16, 10, module.config.input_dim))
    return module.eval(), NumpyMemory.from_arrays(module.config, arrays_of(module))


def median_probability(inputs: np.ndarray, **changes) -> float:
    """A threshold at which a free gate does both."""
    memory = twins_of(**changes)[1]
    return float(np.median([memory.step(x, count % 3 == 0).probability for count, x in enumerate(inputs)]))


def inputs_of(steps: int, width: int = 20, seed: int = 1, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal((steps, width))).astype(np.float32)


def snapshot(memory: NumpyMemory) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in memory.state_dict().items()}


def compare(module, memory, inputs, forces, atol=1e-5):
    """Step both; return the decisions where the probability is clear of the threshold."""
    state, clear = module.initial_state(1), []
    variance = float(getattr(module, "surprise_variance", 1.0))
    per_std = (variance + 1e-5) ** -0.5
    for x, force in zip(inputs, forces, strict=True):
        with torch.no_grad():
            output, state, info = module.step(torch.from_numpy(x)[None], state, force)
        ours = memory.step(x, force)
        np.testing.assert_allclose(ours.output, output[0].numpy(), rtol=0, atol=atol)
        np.testing.assert_allclose(ours.probability, float(info.probability), rtol=0, atol=atol)
        scale = max(1.0, abs(float(info.surprise)))
        np.testing.assert_allclose(ours.surprise, float(info.surprise), rtol=0, atol=atol * scale)
        normalised = float(info.surprise_normalised)
        scale = max(1.0, abs(normalised), scale * per_std)
        np.testing.assert_allclose(ours.surprise_normalised, normalised, rtol=0, atol=atol * scale)
        if abs(ours.probability - module.config.threshold) > 1e-4 or force is not None:
            assert ours.fired == bool(info.fired)
            clear.append(ours.fired)
        elif ours.fired != bool(info.fired):
            break
    saved = memory.state_dict()
    np.testing.assert_allclose(saved["fast_weights"], state.fast_weights[0].numpy(), rtol=0, atol=atol)
    np.testing.assert_allclose(saved["previous_read"], state.previous_read[0].numpy(), rtol=0, atol=atol)
    return clear


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(
    ("kind", "width"),
    # 20: folded into one matrix. 300: kept as projection then rows, since that is cheaper.
    [("encoder", 20), ("projection", 20), ("projection", 300)],
)
def test_equals_torch_over_1000_steps_with_forced_decisions(kind, width, normalise):
    # Unnormalised keys are stable only while eta |k|^2 < 1: a smaller eta sees to that.
    module, memory = twins_of(input_kind=kind, input_dim=width, normalise_keys=normalise, eta_init=0.2)
    forces = [bool(f) for f in np.random.default_rng(2).random(1000) < 0.4]
    fired = compare(module, memory, inputs_of(1000, width), forces)
    assert fired == forces
    assert memory.state_norm > 0.1


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("kind", "width"), [("encoder", 20), ("projection", 20), ("projection", 300)])
def test_decides_as_torch_does_when_the_gate_is_free(kind, width, normalise):
    inputs = inputs_of(500, width)
    changes = {"input_kind": kind, "input_dim": width, "normalise_keys": normalise, "eta_init": 0.2}
    threshold = median_probability(inputs, **changes)
    module, memory = twins_of(threshold=threshold, **changes)
    fired = compare(module, memory, inputs, [None] * 500)
    assert len(fired) > 450
    assert 25 < sum(fired) < len(fired) - 25


@pytest.mark.parametrize("variant", [v for v in STEPPED if v is not Variant.RANDOM_WRITE])
def test_every_variant_equals_torch(variant):
    module, memory = twins_of(variant=variant)
    compare(module, memory, inputs_of(100), [None] * 100)


@pytest.mark.parametrize("width", [20, 300])
@pytest.mark.parametrize("variant", ["aura", "no_memory", "periodic_write"])
def test_a_head_that_sees_what_is_seen_now_equals_torch(variant, width):
    changes = {"head_input": "read_and_z", "head_hidden": 24, "input_kind": "projection"}
    module, memory = twins_of(variant=variant, input_dim=width, **changes)
    compare(module, memory, inputs_of(200, width), [None] * 200)
    # The output differs where the input does, whatever was read.
    first, second = (memory_of(**changes).step(x).output.copy() for x in inputs_of(2))
    assert not np.array_equal(first, second)


def test_fields_that_came_later_leave_older_hashes_alone():
    text = config_of().to_json()
    assert not {"head_input", "head_hidden", "backbone"} & set(json.loads(text))
    changed = config_of(head_input="read_and_z", head_hidden=24)
    assert MemoryConfig.from_json(changed.to_json()) == changed


def test_random_write_equals_torch_when_forced():
    module, memory = twins_of(variant="random_write")
    compare(module, memory, inputs_of(100), [t % 3 == 0 for t in range(100)])


def test_unequal_dk_and_dv_equal_torch():
    module, memory = twins_of(dk=7, dv=12)
    compare(module, memory, inputs_of(200), [t % 2 == 0 for t in range(200)])
    assert memory.state_bytes == (7 * 12 + 12) * 4


def test_a_different_threshold_and_temperature_equal_torch():
    module, memory = twins_of(temperature=0.5, threshold=0.8)
    compare(module, memory, inputs_of(200), [None] * 200)


def test_full_recurrence_is_refused_by_name():
    with pytest.raises(UserError, match="full_recurrence"):
        memory_of(variant="full_recurrence")


def test_state_is_4224_bytes_from_live_arrays_and_does_not_grow():
    memory = memory_of()
    assert memory.state_bytes == 4_224
    for x in inputs_of(200):
        memory.step(x)
    assert memory.state_bytes == 4_224
    saved = memory.state_dict()
    assert saved["fast_weights"].nbytes + saved["previous_read"].nbytes == 4_224
    assert memory_of(variant="no_memory").state_bytes == 0


def test_not_fired_leaves_w_byte_identical():
    memory = memory_of()
    for x in inputs_of(5):
        memory.step(x, force=True)
    state = memory.state_dict()
    state["fast_weights"][0, :2] = [-0.0, 0.0]
    memory.load_state_dict(state)
    before = snapshot(memory)
    for x in inputs_of(50, seed=3):
        step = memory.step(x, force=False)
        assert (step.fired, step.written_bytes) == (False, 0)
    after = snapshot(memory)
    assert after["fast_weights"] == before["fast_weights"]
    assert after["previous_read"] != before["previous_read"]
    assert memory.writes == 5


def test_a_write_counts_its_bytes_only_if_w_changes():
    memory = memory_of()
    step = memory.step(inputs_of(1)[0], force=True)
    assert (step.fired, step.written_bytes, memory.writes) == (True, 32 * 32 * 4, 1)
    # No value to store and nothing to decay: the gate fires and W stays as it is.
    checkpoint = build_untrained(config_of())
    arrays = checkpoint.arrays | {"to_v.weight": np.zeros_like(checkpoint.arrays["to_v.weight"])}
    idle = NumpyMemory.from_arrays(checkpoint.config, arrays)
    for x in inputs_of(3):
        step = idle.step(x, force=True)
        assert (step.fired, step.written_bytes) == (True, 0)
    assert (idle.writes, idle.steps) == (0, 3)


def test_written_bytes_agree_with_what_changed():
    inputs, seen = inputs_of(60), set()
    threshold = median_probability(inputs)
    _, memory = twins_of(threshold=threshold)
    for x in inputs:
        before = snapshot(memory)["fast_weights"]
        step = memory.step(x)
        changed = snapshot(memory)["fast_weights"] != before
        assert step.written_bytes == (4096 if changed else 0)
        assert step.fired == changed == (step.probability > threshold)
        seen.add(changed)
    assert seen == {True, False}


def test_threshold_can_be_set_while_running_and_decides():
    memory, x = memory_of(), inputs_of(1)[0]
    p = memory.step(x).probability
    memory.reset()
    memory.threshold = p
    assert not memory.step(x).fired, "fires only above the threshold, not at it"
    memory.reset()
    memory.threshold = float(np.nextafter(p, 0))
    assert memory.step(x).fired
    for wrong in (-0.1, 1.1, float("nan"), "0.5", None):
        with pytest.raises(UserError, match="threshold"):
            memory.threshold = wrong
    assert memory.threshold == float(np.nextafter(p, 0))


def test_no_array_is_allocated_per_step():
    memory = memory_of(dk=64, dv=64, input_dim=256, input_kind="projection", out_dim=56)
    inputs = inputs_of(8, 256)
    for force in (True, False, None):
        for x in inputs:
            memory.step(x, force)
    tracemalloc.start()
    try:
        for count in range(400):
            memory.step(inputs[count % 8], (True, False, None)[count % 3])
        start, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for count in range(400):
            memory.step(inputs[count % 8], (True, False, None)[count % 3])
        end, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # W is 16,384 bytes, the projected rows 1,024; a step's result object and scalars are a few hundred.
    assert peak - start < 1000
    assert end - start < 200


def test_output_is_reused_by_the_next_step():
    memory = memory_of()
    first, second = (memory.step(x).output for x in inputs_of(2))
    assert first is second


def test_w_is_changed_in_place():
    memory = memory_of()
    live = memory._weights
    memory.step(inputs_of(1)[0], force=True)
    memory.reset()
    memory.step(inputs_of(1)[0], force=True)
    assert memory._weights is live


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("variant", STEPPED)
@pytest.mark.filterwarnings("error")
def test_a_non_finite_or_huge_input_is_refused_and_the_state_untouched(variant, bad):
    memory = memory_of(variant=variant)
    for x in inputs_of(5):
        memory.step(x)
    before = snapshot(memory)
    broken = inputs_of(1)[0]
    broken[3] = bad
    with pytest.raises(UserError) as refusal:
        memory.step(broken)
    assert "\n" not in str(refusal.value)
    assert snapshot(memory) == before


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [1e10, 1e15, 1e17, 1e19])
@pytest.mark.parametrize("kind", ["encoder", "projection"])
@pytest.mark.parametrize("normalise", [True, False])
def test_a_finite_input_either_steps_to_a_finite_state_or_is_refused(scale, kind, normalise):
    memory = memory_of(input_kind=kind, normalise_keys=normalise)
    refused = 0
    for x in inputs_of(30):
        before = snapshot(memory)
        try:
            memory.step(x * np.float32(scale), force=True)
        except UserError:
            refused += 1
            assert snapshot(memory) == before
        assert all(np.isfinite(array).all() for array in memory.state_dict().values())
    assert refused > 0 or scale < 1e19


@pytest.mark.filterwarnings("error")
def test_a_write_that_would_overflow_is_refused_and_the_state_untouched():
    memory = memory_of(normalise_keys=False, eta_init=10.0)
    inputs, before = inputs_of(400, scale=3.0), {}

    def step_until_refused():
        for x in inputs:
            before.update(snapshot(memory))
            memory.step(x, force=True)

    with pytest.raises(UserError, match="overflow"):
        step_until_refused()
    assert snapshot(memory) == before
    assert memory.steps > 5
    memory.reset()
    assert memory.step(inputs[0]).probability > 0


@pytest.mark.filterwarnings("error")
def test_a_single_overflowing_write_from_a_sound_state_is_refused():
    memory = memory_of(variant="write_every_step", eta_init=10.0)
    memory.load_state_dict(
        memory.state_dict() | {"fast_weights": np.eye(32, dtype=np.float32) * np.float32(3e18)}
    )
    before = snapshot(memory)
    x = inputs_of(1)[0]
    with pytest.raises(UserError, match="a write overflows"):
        memory.step(x)
    assert snapshot(memory) == before
    assert not memory.step(x, force=False).written_bytes


@pytest.mark.filterwarnings("error")
def test_an_overflowing_surprise_is_refused_even_where_nothing_is_written():
    memory = memory_of(normalise_keys=False)
    memory.load_state_dict(
        memory.state_dict() | {"fast_weights": np.eye(32, dtype=np.float32) * np.float32(3e18)}
    )
    before = snapshot(memory)
    with pytest.raises(UserError, match="the surprise overflows"):
        memory.step(inputs_of(1, scale=1000.0)[0], force=False)
    assert snapshot(memory) == before


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("variant", STEPPED)
def test_an_overflowing_output_is_refused(variant):
    checkpoint = build_untrained(config_of(variant=variant))
    huge = {"head.action.4.weight": np.full((6, 32), 1e30, np.float32)}
    memory = NumpyMemory.from_arrays(checkpoint.config, checkpoint.arrays | huge)
    before = snapshot(memory)
    with pytest.raises(UserError, match="the output overflows"):
        memory.step(inputs_of(1)[0])
    assert snapshot(memory) == before


@pytest.mark.parametrize(
    "wrong",
    [np.zeros(20), np.zeros(19, np.float32), np.zeros((1, 20), np.float32), np.zeros(20, np.float16)],
)
def test_a_wrong_shape_or_dtype_is_refused_with_both_named(wrong):
    memory = memory_of()
    with pytest.raises(UserError, match=r"float32 \[20\]"):
        memory.step(wrong)
    assert memory.steps == 0


def test_force_means_nothing_without_a_gated_write():
    with pytest.raises(UserError, match="no_memory"):
        memory_of(variant="no_memory").step(inputs_of(1)[0], force=True)


@pytest.mark.parametrize("variant", STEPPED)
def test_residual_starts_at_exact_zero(variant):
    memory = memory_of(variant=variant, residual=True, input_kind="projection")
    for x in inputs_of(20):
        assert memory.step(x).output.tobytes() == bytes(6 * 4)
    assert memory_of(variant=variant).step(inputs_of(1)[0]).output.any()


def test_schedules_in_numpy():
    decisions = {}
    for variant in STEPPED:
        memory = memory_of(variant=variant)
        decisions[variant] = [memory.step(x).fired for x in inputs_of(96)]
    assert all(decisions[Variant.WRITE_EVERY_STEP])
    assert all(decisions[Variant.FIXED_SIZE_STATE])
    assert [t for t, fired in enumerate(decisions[Variant.PERIODIC_WRITE]) if fired] == list(range(0, 96, 7))
    assert not any(decisions[Variant.NO_MEMORY])
    assert 4 <= sum(decisions[Variant.RANDOM_WRITE]) <= 26


def test_random_schedule_is_uniform_and_differs_by_seed_episode_and_step():
    draws = np.array([scheduled_draw(s, e, t) for s in range(5) for e in range(10) for t in range(100)])
    assert len(set(draws)) == len(draws)
    assert np.all((draws >= 0) & (draws < 1))
    assert abs(float(np.mean(draws < 0.15)) - 0.15) < 0.02
    assert scheduled_draw(3, 1, 4) == scheduled_draw(3, 1, 4)


def test_random_schedule_goes_on_after_restore_and_changes_after_reset():
    inputs = inputs_of(60)
    memory = memory_of(variant="random_write", write_rate=0.5)
    for x in inputs[:30]:
        memory.step(x)
    saved = memory.state_dict()
    rest = [memory.step(x).fired for x in inputs[30:]]
    other = memory_of(variant="random_write", write_rate=0.5)
    other.load_state_dict(saved)
    assert [other.step(x).fired for x in inputs[30:]] == rest
    first = memory_of(variant="random_write", write_rate=0.5)
    schedule = [first.step(x).fired for x in inputs]
    first.reset()
    assert [first.step(x).fired for x in inputs] != schedule


def test_reset_is_the_same_as_new():
    memory = memory_of()
    fresh = [memory.step(x).output.tobytes() for x in inputs_of(20)]
    memory.reset()
    assert (memory.steps, memory.writes, memory.state_norm) == (0, 0, 0.0)
    assert [memory.step(x).output.tobytes() for x in inputs_of(20)] == fresh


def test_a_restored_state_goes_on_byte_for_byte():
    memory, other = memory_of(), memory_of()
    for x in inputs_of(20):
        memory.step(x)
    saved = memory.state_dict()
    other.load_state_dict(saved)
    assert (other.steps, other.writes) == (memory.steps, memory.writes)
    for x in inputs_of(20, seed=4):
        assert memory.step(x).output.tobytes() == other.step(x).output.tobytes()
    assert saved["steps"] == 20, "a saved state is a copy"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fast_weights", np.zeros((31, 32), np.float32)),
        ("fast_weights", np.zeros((32, 32), np.float64)),
        ("fast_weights", np.full((32, 32), np.nan, np.float32)),
        ("previous_read", np.full(32, np.inf, np.float32)),
        ("fast_weights", np.full((32, 32), 1e18, np.float32)),
        ("previous_read", np.zeros(33, np.float32)),
        ("steps", np.array(-1)),
        ("writes", np.array(1.0)),
        ("extra", np.zeros(1)),
    ],
)
def test_a_wrong_saved_state_is_refused_and_the_state_untouched(name, value):
    memory = memory_of()
    memory.step(inputs_of(1)[0])
    before = snapshot(memory)
    with pytest.raises(UserError, match=name):
        memory.load_state_dict(memory.state_dict() | {name: value})
    assert snapshot(memory) == before
    incomplete = memory.state_dict()
    del incomplete["fast_weights"]
    with pytest.raises(UserError, match="fast_weights"):
        memory.load_state_dict(incomplete)


def test_frobenius_norm_is_w_s():
    memory = memory_of()
    for x in inputs_of(10):
        memory.step(x, force=True)
    W = memory.state_dict()["fast_weights"].astype(np.float64)
    assert memory.state_norm == pytest.approx(np.sqrt((W**2).sum()), rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.floats(1e-3, 1e3), alpha=st.floats(0.01, 0.5))
def test_decay_bounds_w_for_any_stream(seed, scale, alpha):
    # |k| = 1 and eta 0.5: a write maps W to a contraction by (1 - alpha) or less, plus k v^T.
    memory = memory_of(variant="write_every_step", alpha_init=alpha, dk=8, dv=8)
    bound = 0.0
    for x in inputs_of(60, seed=seed, scale=scale):
        memory.step(x)
        v = float(np.linalg.norm(memory._value))
        contraction = max(1 - alpha, abs(1 - alpha - 1.0))
        bound = contraction * bound + v
        assert memory.state_norm <= bound * (1 + 1e-4) + 1e-6


@settings(max_examples=20, deadline=None)
@given(forces=st.lists(st.booleans(), min_size=1, max_size=40), seed=st.integers(0, 2**31))
def test_writes_are_exactly_the_forced_ones(forces, seed):
    memory = memory_of(dk=8, dv=8)
    total = sum(
        memory.step(x, force).written_bytes
        for x, force in zip(inputs_of(len(forces), seed=seed), forces, strict=True)
    )
    assert (memory.steps, memory.writes) == (len(forces), sum(forces))
    assert total == sum(forces) * 8 * 8 * 4
