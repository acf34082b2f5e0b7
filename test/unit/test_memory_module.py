"""The torch module: the paper's step, its gradients, and what skipping leaves alone."""

import dataclasses
import math

import pytest
import torch

from aura_ros.errors import UserError
from aura_ros.memory import MemoryConfig, MemoryModule, Variant

FAST = [v for v in Variant if v not in (Variant.FULL_RECURRENCE, Variant.NO_MEMORY)]


@pytest.fixture(autouse=True)
def _one_thread_one_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def config_of(**changes) -> MemoryConfig:
    return MemoryConfig(**({"input_dim": 14, "out_dim": 4} | changes))


def inputs_of(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_state_is_4224_bytes_counted_from_tensors():
    assert MemoryModule(config_of()).initial_state(1).nbytes == 4_224


def test_state_bytes_do_not_grow_with_steps_or_depend_on_the_variant():
    for variant in FAST:
        module = MemoryModule(config_of(variant=variant)).eval()
        _, state, _ = module(inputs_of(1, 50, 14))
        assert state.nbytes == 4_224
    for variant, nbytes in ((Variant.FULL_RECURRENCE, 53 * 4), (Variant.NO_MEMORY, 0)):
        _, state, _ = MemoryModule(config_of(variant=variant)).eval()(inputs_of(1, 5, 14))
        assert state.nbytes == nbytes


@pytest.mark.parametrize("normalise", [True, False])
def test_one_step_is_the_papers_formulas_written_out(normalise):
    module = MemoryModule(config_of(normalise_keys=normalise, dk=5, dv=3)).eval()
    _, state, _ = module(inputs_of(1, 4, 14), force=True)
    x = inputs_of(1, 14, seed=2)
    with torch.no_grad():
        output, after, info = module.step(x, state)
        z = module.encoder(x)[0]
        q, k, v = (m.weight @ z for m in (module.to_q, module.to_k, module.to_v))
        if normalise:
            q, k = q / q.norm(), k / k.norm()
        W, previous = state.fast_weights[0], state.previous_read[0]
        read = W.T @ q
        error = W.T @ k - v
        surprise = (error**2).sum()
        normalised = (surprise - module.surprise_mean) / (module.surprise_variance + 1e-5).sqrt()
        p = torch.sigmoid(module.gate(torch.cat([z, previous, normalised[None]])))
        written = (1 - module.alpha) * W - module.eta * 2 * torch.outer(k, error)
        expected = module.head.action(module.head.to_mu(read))
    torch.testing.assert_close(output[0], expected)
    torch.testing.assert_close(info.surprise[0], surprise)
    torch.testing.assert_close(info.probability[0], p[0])
    assert bool(info.fired[0]) == (float(p) > 0.5)
    torch.testing.assert_close(after.fast_weights[0], written if float(p) > 0.5 else W)
    torch.testing.assert_close(after.previous_read[0], read)
    torch.testing.assert_close(module.eta, torch.tensor(0.5))
    torch.testing.assert_close(module.alpha, torch.tensor(0.01))


def test_temperature_and_threshold_are_two_things():
    x = inputs_of(1, 1, 14)
    base = MemoryModule(config_of()).eval()(x)[2]
    hot = MemoryModule(config_of(temperature=2.0)).eval()(x)[2]
    strict = MemoryModule(config_of(threshold=0.99)).eval()(x)[2]
    torch.testing.assert_close(torch.logit(hot.probability), torch.logit(base.probability) / 2)
    assert torch.equal(strict.probability, base.probability)
    assert base.fired.all()
    assert not strict.fired.any()


@pytest.mark.parametrize("variant", FAST)
def test_not_fired_leaves_w_byte_identical(variant):
    module = MemoryModule(config_of(variant=variant)).eval()
    with torch.no_grad():
        _, state, _ = module(inputs_of(3, 10, 14), force=True)
        # Zeros of both signs and huge values: what a product with g = 0 would not carry over.
        state.fast_weights[:, 0, :3] = torch.tensor([-0.0, 0.0, 3e38])
        before = state.fast_weights.numpy().tobytes()
        force = torch.tensor([False, True, False])
        _, after, info = module.step(inputs_of(3, 14), state, force)
    size = len(before) // 3
    blob = after.fast_weights.numpy().tobytes()
    assert [blob[i * size : (i + 1) * size] == before[i * size : (i + 1) * size] for i in range(3)] == [
        True,
        False,
        True,
    ]
    assert torch.equal(info.fired, force)


def test_fired_is_what_changes_w_without_force():
    module = MemoryModule(config_of(gate_bias_init=0.0)).eval()
    state, seen = None, set()
    for t in range(40):
        state = state or module.initial_state(1)
        with torch.no_grad():
            _, after, info = module.step(3 * inputs_of(1, 14, seed=t), state)
        changed = after.fast_weights.numpy().tobytes() != state.fast_weights.numpy().tobytes()
        assert changed == bool(info.fired)
        assert bool(info.fired) == bool(info.probability > 0.5)
        seen.add(changed)
        state = after
    assert seen == {True, False}


def test_gradients_reach_gate_inner_rates_and_projections():
    module = MemoryModule(config_of()).train()
    output, _, _ = module(inputs_of(8, 12, 14))
    output.square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    ("variant", "active"),
    [("aura", 21_447)]
    + [(v, 15_110) for v in ("fixed_size_state", "write_every_step", "random_write", "periodic_write")],
)
def test_gradient_active_counts_are_the_papers(variant, active):
    # The paper's counts are those of the sparse task (observation 6).
    module = MemoryModule(config_of(input_dim=6, variant=variant, predictor=True)).train()
    output, _, _ = module(inputs_of(4, 12, 6))
    output.sum().backward()
    assert sum(p.numel() for p in module.parameters() if p.grad is not None) == active
    assert sum(p.numel() for p in module.parameters()) == 29_767


def test_surprise_is_detached():
    module = MemoryModule(config_of()).train()
    _, _, info = module(inputs_of(4, 3, 14))
    assert not info.surprise.requires_grad
    assert not info.surprise_normalised.requires_grad
    assert info.gate.requires_grad
    # W is empty at the first step, so k and v could reach the first gate through the surprise alone.
    module.zero_grad()
    _, _, info = module(inputs_of(4, 1, 14))
    info.probability.sum().backward()
    assert module.to_k.weight.grad is None
    assert module.to_v.weight.grad is None


def test_the_gate_sees_the_previous_read_without_gradient():
    module = MemoryModule(config_of()).train()
    state = module.initial_state(2)
    previous = torch.randn(2, 32, requires_grad=True)
    _, _, info = module.step(inputs_of(2, 14), dataclasses.replace(state, previous_read=previous))
    info.probability.sum().backward()
    assert previous.grad is None
    other = module.eval().step(inputs_of(2, 14), dataclasses.replace(state, previous_read=previous + 5.0))[2]
    assert not torch.allclose(other.probability, info.probability)


def test_straight_through_gate_is_hard_forward_and_soft_backward():
    module = MemoryModule(config_of()).train()
    _, _, info = module(inputs_of(8, 6, 14))
    assert torch.equal(info.gate, info.fired.float())
    (grad,) = torch.autograd.grad(info.gate.sum(), module.gate[2].bias, retain_graph=True)
    p = info.probability
    torch.testing.assert_close(grad[0], (p * (1 - p)).sum())


def test_a_forced_open_gate_keeps_its_soft_gradient_in_training():
    module = MemoryModule(config_of(gate_bias_init=-4.0)).train()
    _, _, info = module(inputs_of(4, 6, 14), force=True)
    assert info.fired.all()
    assert (info.probability < 0.5).all()
    (grad,) = torch.autograd.grad(info.gate.sum(), module.gate[2].bias)
    assert grad.abs() > 0


def test_gumbel_sigmoid_is_noisy_in_training_and_deterministic_in_evaluation():
    config = config_of(gate_estimator="gumbel_sigmoid", gate_bias_init=0.0)
    module, x = MemoryModule(config), inputs_of(1, 14).repeat(200, 1)
    fired = module.train().step(x)[2].fired
    assert 0.2 < fired.float().mean() < 0.8
    info = module.eval().step(x)[2]
    assert torch.equal(info.fired, info.probability > 0.5)
    assert info.fired.unique().numel() == 1
    quiet = MemoryModule(config_of(gate_estimator="gumbel_sigmoid", gate_noise=0.0)).train()
    assert quiet.step(x)[2].fired.unique().numel() == 1


def test_surprise_statistics_start_from_the_first_batch_move_in_training_and_freeze_in_evaluation():
    module = MemoryModule(config_of())
    module.eval()(inputs_of(4, 3, 14))
    assert (float(module.surprise_mean), float(module.surprise_variance)) == (0.0, 1.0)
    module.train()
    info = module.step(inputs_of(16, 14))[2]
    torch.testing.assert_close(module.surprise_mean, info.surprise.mean())
    torch.testing.assert_close(module.surprise_variance, info.surprise.var(unbiased=False))
    first, first_variance = module.surprise_mean.clone(), module.surprise_variance.clone()
    info = module.step(3 * inputs_of(16, 14, seed=5))[2]
    torch.testing.assert_close(module.surprise_mean, 0.99 * first + 0.01 * info.surprise.mean())
    spread = (info.surprise - first).square().mean()
    torch.testing.assert_close(module.surprise_variance, 0.99 * first_variance + 0.01 * spread)
    frozen = module.surprise_mean.clone()
    module.eval()(inputs_of(4, 3, 14))
    assert torch.equal(module.surprise_mean, frozen)


def test_a_batch_of_one_does_not_make_the_statistics_nan():
    module = MemoryModule(config_of()).train()
    output, _, info = module(inputs_of(1, 5, 14))
    assert torch.isfinite(output).all()
    assert torch.isfinite(info.surprise_normalised).all()


def test_head_samples_in_training_and_is_its_mean_in_evaluation():
    module, x = MemoryModule(config_of()), inputs_of(2, 6, 14)
    module.train()
    assert not torch.equal(module(x)[0], module(x)[0])
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0])
    _, _, info = module(x)
    torch.testing.assert_close(module(x)[0], module.head.action(info.mu))


@pytest.mark.parametrize("variant", list(Variant))
@pytest.mark.parametrize("training", [True, False])
def test_residual_starts_at_exact_zero(variant, training):
    module = MemoryModule(config_of(variant=variant, residual=True)).train(training)
    output, _, _ = module(inputs_of(3, 8, 14))
    assert (output == 0.0).all()
    assert (MemoryModule(config_of(variant=variant)).train(training)(inputs_of(3, 8, 14))[0] != 0.0).any()


def test_a_residual_can_leave_zero():
    module = MemoryModule(config_of(residual=True)).train()
    module(inputs_of(3, 8, 14))[0].sum().backward()
    assert module.head.action[4].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("variant", [v for v in Variant if v is not Variant.RANDOM_WRITE])
def test_forward_is_step_by_step(variant):
    module, x = MemoryModule(config_of(variant=variant)).eval(), inputs_of(3, 9, 14)
    outputs, last, infos = module(x)
    state = None
    for t in range(9):
        output, state, info = module.step(x[:, t], state)
        torch.testing.assert_close(output, outputs[:, t])
        for field in dataclasses.fields(info):
            torch.testing.assert_close(getattr(info, field.name), getattr(infos, field.name)[:, t])
    torch.testing.assert_close(state.fast_weights, last.fast_weights)
    torch.testing.assert_close(state.hidden, last.hidden)


def test_schedules_write_as_often_as_they_say():
    x = inputs_of(64, 96, 14)
    rate = {}
    for variant in FAST:
        info = MemoryModule(config_of(variant=variant)).eval()(x)[2]
        rate[variant] = float(info.fired.float().mean())
    assert rate[Variant.WRITE_EVERY_STEP] == rate[Variant.FIXED_SIZE_STATE] == 1.0
    assert rate[Variant.PERIODIC_WRITE] == pytest.approx(14 / 96)
    assert rate[Variant.RANDOM_WRITE] == pytest.approx(0.15, abs=0.02)


def test_same_seed_same_weights_and_the_global_generator_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    one = MemoryModule(config_of(seed=5))
    assert torch.equal(torch.rand(2), expected)
    two = MemoryModule(config_of(seed=5))
    other = MemoryModule(config_of(seed=6))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.to_q.weight, other.to_q.weight)


def test_decay_and_normalised_keys_keep_w_bounded():
    # With |k| = 1, eta 0.5 and alpha 0.01 a write shrinks W by 0.99 and adds at most |v|.
    module = MemoryModule(config_of(variant="write_every_step")).eval()
    x = 5 * inputs_of(2, 400, 14)
    with torch.no_grad():
        v = module.to_v(module.encoder(x)).norm(dim=-1).max()
        _, state, _ = module(x)
    assert 0 < state.fast_weights.norm(dim=(1, 2)).max() <= v / 0.01
    assert math.isfinite(float(state.fast_weights.sum()))


def test_token_gate_gives_token_logits_and_others_none():
    assert MemoryModule(config_of(variant="learned_token_gate"))(inputs_of(2, 3, 14))[
        2
    ].token_logits.shape == (2, 3, 17)
    assert MemoryModule(config_of())(inputs_of(2, 3, 14))[2].token_logits.shape == (2, 3, 0)


def test_wrong_inputs_are_refused():
    module = MemoryModule(config_of())
    with pytest.raises(UserError, match="14"):
        module.step(inputs_of(2, 13))
    with pytest.raises(UserError, match="14"):
        module(inputs_of(2, 14))
    with pytest.raises(UserError, match="no_memory"):
        MemoryModule(config_of(variant="no_memory"))(inputs_of(2, 3, 14), force=True)
