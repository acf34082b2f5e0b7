"""Training, and the chunked scan against the step-by-step memory, its naive twin: values, decisions and gradients."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from aura_ros.bench.recall.presets import PRESETS
from aura_ros.bench.recall.tasks import HARD, MAIN, SPARSE
from aura_ros.errors import UserError
from aura_ros.memory.config import MemoryConfig, Variant
from aura_ros.memory.module import MemoryModule, logistic_noise
from aura_ros.training import scan_numpy
from aura_ros.training.episodes import EVENT
from aura_ros.training.objective import Objective, ObjectiveConfig
from aura_ros.training.scan import delta_rule, normalised, run_sequence, run_stepwise, scan_gates
from aura_ros.training.scan_numpy import scan_gates_numpy
from aura_ros.training.settings import TrainConfig
from aura_ros.training.train import BLOCK, BLOCK_STEPS, TRAINING_SEED, batches, gradient_step, train

FAST = [v for v in Variant if v not in (Variant.FULL_RECURRENCE, Variant.NO_MEMORY, Variant.RANDOM_WRITE)]


def memory(variant=Variant.AURA, **changes) -> MemoryModule:
    config = MemoryConfig(input_dim=MAIN.input_dim, out_dim=4, variant=variant, dk=12, dv=10, **changes)
    return MemoryModule(config).double().train()


def inputs(count: int = 3) -> torch.Tensor:
    return torch.from_numpy(MAIN.episodes(count, np.random.default_rng(0)).observations).double()


@pytest.mark.parametrize(
    ("variant", "chunk"),
    [*((v, 40) for v in FAST), (Variant.AURA, 1), (Variant.AURA, 7), (Variant.AURA, 128)],
)
@pytest.mark.parametrize("normalise", [True, False])
def test_chunked_equals_stepwise_with_its_gradients(variant, chunk, normalise):
    # Keys that are not normalised make writes explode: a small step keeps the sums comparable.
    changes = {"normalise_keys": normalise, "gate_bias_init": 0.2, "eta_init": 0.5 if normalise else 0.02}
    one, two = memory(variant, **changes), memory(variant, **changes)
    noise = torch.from_numpy(np.random.default_rng(1).logistic(size=(3, 96)))
    done = run_sequence(one, inputs(), noise=noise, chunk=chunk)
    twin = run_stepwise(two, inputs(), noise=noise)
    assert torch.equal(done.fired, twin.fired)
    if variant in (Variant.AURA, Variant.LEARNED_TOKEN_GATE):
        assert 0 < int(done.fired.sum()) < done.fired.numel()
    for name in ("encoded", "reads", "soft", "gate", "fast_weights"):
        np.testing.assert_allclose(
            getattr(done, name).detach(), getattr(twin, name).detach(), rtol=0, atol=1e-12, err_msg=name
        )
    gated = variant in (Variant.AURA, Variant.LEARNED_TOKEN_GATE)
    if gated:  # nothing reads the statistics of a schedule
        assert torch.allclose(one.surprise_mean, two.surprise_mean, rtol=0, atol=1e-12)
        assert torch.allclose(one.surprise_variance, two.surprise_variance, rtol=0, atol=1e-12)
    weights = torch.from_numpy(np.random.default_rng(2).standard_normal(done.reads.shape))
    for result in (done, twin):
        ((result.reads * weights).sum() + result.gate.mean() + result.soft.square().mean()).backward()
    compared = 0
    for (name, mine), other in zip(one.named_parameters(), two.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name
        if mine.grad is not None:
            scale = max(1.0, float(other.grad.abs().max()))
            np.testing.assert_allclose(
                mine.grad / scale, other.grad / scale, rtol=0, atol=1e-12, err_msg=name
            )
            compared += 1
    assert compared == (13 if gated else 9)


def test_a_batch_that_explodes_spoils_neither_statistics_nor_weights():
    # Statistics first: the three forms agree that nothing was seen.
    calm, wild = torch.tensor([1.0, 2.0, 4.0]).double(), torch.tensor([1.0, torch.inf, 3.0]).double()
    for first in (calm, wild):
        kept = []
        for form in (MemoryModule._normalise, normalised, _numpy_statistics):
            module = memory()
            for surprise in (first, wild, calm):
                form(module, surprise)
            kept.append([float(getattr(module, f"surprise_{n}")) for n in ("mean", "variance", "ready")])
        assert np.isfinite(kept).all()
        np.testing.assert_allclose(kept[0], kept[1], rtol=0, atol=1e-12)
        np.testing.assert_allclose(kept[0], kept[2], rtol=0, atol=1e-12)
    # Weights: keys so long that W overflows float32 within an episode.
    module = MemoryModule(
        MemoryConfig(input_dim=MAIN.input_dim, out_dim=4, dk=8, dv=8, normalise_keys=False, eta_init=9.0)
    ).train()
    with torch.no_grad():
        module.to_k.weight.mul_(50)
    before = [p.clone() for p in module.parameters()]
    optimiser, loss_of = torch.optim.AdamW(module.parameters()), Objective(ObjectiveConfig(), 10)
    episodes = MAIN.episodes(4, np.random.default_rng(0))
    progress = gradient_step(module, optimiser, loss_of, TrainConfig(), 0, episodes, opened=True)
    assert not np.isfinite(progress.cross_entropy)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert loss_of.running_ce == np.inf


def _numpy_statistics(module, surprise):
    statistics = scan_numpy._Statistics(module)
    with np.errstate(invalid="ignore"):
        statistics.normalise(surprise.numpy())
    statistics.keep(module)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("ready", [False, True])
def test_the_numpy_scan_equals_the_tensors_scan(rate, ready):
    one, two = memory(gate_bias_init=0.2), memory(gate_bias_init=0.2)
    for module in (one, two):
        module.surprise_ready.fill_(float(ready))
    rng = np.random.default_rng(4)
    z, q, k, v = (torch.from_numpy(rng.standard_normal((5, 70, n))) * 0.3 for n in (64, 12, 12, 10))
    noise = torch.from_numpy(rng.logistic(size=(5, 70)))
    forced = torch.from_numpy(rng.random((5, 70)) < rate)
    for force in (None, forced):
        mine = scan_gates_numpy(
            one, *(x.numpy() for x in (z, q, k, v, noise)), None if force is None else force.numpy()
        )
        twin = scan_gates(two, z, q, k, v, noise, force)
        np.testing.assert_array_equal(mine[0], twin[0].numpy())
        for a, b in zip(mine[1:], twin[1:], strict=True):
            np.testing.assert_allclose(a, b.numpy(), rtol=0, atol=1e-12)
        for name in ("surprise_mean", "surprise_variance", "surprise_ready"):
            assert float(getattr(one, name)) == pytest.approx(float(getattr(two, name)), rel=0, abs=1e-12)


def test_a_forced_gate_writes_and_keeps_its_gradient():
    module = memory()
    force = torch.ones(3, 96, dtype=torch.bool)
    done = run_sequence(module, inputs(), force=force)
    assert bool(done.fired.all())
    assert torch.equal(done.gate.detach(), torch.ones(3, 96, dtype=torch.float64))
    done.gate.sum().backward()
    assert float(module.gate[2].weight.grad.abs().sum()) > 0


def test_evaluation_leaves_the_surprise_statistics_alone():
    module = memory().eval()
    before = float(module.surprise_mean)
    run_sequence(module, inputs())
    assert float(module.surprise_mean) == before


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.95, 0.999_999])
def test_a_fast_decay_stays_finite_and_exact_in_float32(alpha):
    rng = np.random.default_rng(5)
    q, k, v = (torch.from_numpy(rng.standard_normal((2, 300, 6))) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    gate, eta, decay = torch.ones(2, 300).double(), torch.tensor(0.4).double(), torch.tensor(alpha).double()
    exact, _ = delta_rule(q, k, v, gate, eta, decay, chunk=1)
    found, _ = delta_rule(q.float(), k.float(), v.float(), gate.float(), eta.float(), decay.float())
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-4 * float(exact.abs().max()))


def test_a_gate_that_never_fires_leaves_an_empty_memory():
    q, k, v = (torch.randn(2, 40, 6, dtype=torch.float64) for _ in range(3))
    reads, weights = delta_rule(
        q, k, v, torch.zeros(2, 40, dtype=torch.float64), torch.tensor(0.5), torch.tensor(0.1), 16
    )
    assert not reads.any()
    assert not weights.any()


def test_the_scan_agrees_with_the_trained_step_of_the_numpy_memory():
    from aura_ros.memory import MemoryCheckpoint, NumpyMemory
    from aura_ros.memory.checkpoint import content_hash
    from aura_ros.memory.module import arrays_of

    module = memory().float().eval()
    arrays = arrays_of(module)
    stepper = NumpyMemory.from_checkpoint(
        MemoryCheckpoint(module.config, arrays, content_hash(module.config.to_json(), arrays))
    )
    episode = inputs(1).float()
    done = run_sequence(module, episode)
    fired = [stepper.step(row.astype(np.float32)).fired for row in episode[0].numpy()]
    probability = done.soft[0].detach().numpy()
    clear = np.abs(probability - 0.5) > 1e-4
    np.testing.assert_array_equal(np.array(fired)[clear], done.fired[0].numpy()[clear])


def test_logistic_noise_is_seeded_and_standard():
    torch.manual_seed(3)
    first = logistic_noise((200, 200))
    torch.manual_seed(3)
    assert torch.equal(first, logistic_noise((200, 200)))
    assert abs(float(first.std()) - np.pi / np.sqrt(3)) < 0.05


def test_a_batch_that_asks_nothing_is_one_line():
    small = MemoryConfig(input_dim=SPARSE.input_dim, out_dim=4, dk=4, dv=4)
    task = dataclasses.replace(SPARSE, steps=2, event=0.99)
    with pytest.raises(
        UserError, match=r"batch of step 1 asks nothing \(1 episodes of 2 steps\); give a larger batch"
    ):
        train(small, task, TrainConfig(steps=5, batch=1), ObjectiveConfig())


@pytest.mark.parametrize(
    ("steps", "wild", "since"),
    [(3, range(3), 1), (3, range(2), None), (120, range(20, 120), 21), (120, range(21, 120), None)],
)  # fmt: skip
def test_a_training_that_ends_exploded_is_refused_with_the_step(steps, wild, since):
    made = []

    @dataclasses.dataclass(frozen=True)
    class Wild(type(SPARSE)):
        def episodes(self, count, rng):
            """Infinite in the batches named."""
            found = super().episodes(count, rng)
            for batch in range(BLOCK):
                if len(made) in wild:
                    found.observations[batch] = np.inf
                made.append(batch)
            return found

    task = Wild(SPARSE.name, SPARSE.symbols, 0.3, 0.9, 12)
    small = MemoryConfig(input_dim=SPARSE.input_dim, out_dim=4, d_model=4, hidden=4, dk=4, dv=4)
    settings = TrainConfig(steps=steps, batch=1, warmup=0)
    if since is None:
        train(small, task, settings, ObjectiveConfig())
        return
    with pytest.raises(
        UserError, match=rf"no gradient was finite from step {since} to the last, {steps}; lower lr"
    ):
        train(small, task, settings, ObjectiveConfig())


def test_blocks_of_data_are_bounded_and_those_of_the_presets_stay_as_they_were():
    drawn = []

    class Long:
        steps = 10**6

        def episodes(self, count, rng):
            """How many are asked for."""
            drawn.append(count)
            return SPARSE.episodes(count, rng)

    next(batches(TrainConfig(batch=2), Long()))
    next(batches(TrainConfig(batch=16), Long()))
    assert drawn == [4, 16]
    for cells in PRESETS.values():
        assert all(c.train.batch * BLOCK * c.training_task().steps <= BLOCK_STEPS for c in cells())


def test_a_curriculum_begins_with_a_quarter_of_the_events_then_half_and_never_touches_the_rest():
    settings = TrainConfig(steps=50, batch=4, curriculum=0.4)
    found = [(e.kinds == EVENT).sum(1) for e, _ in zip(batches(settings, HARD), range(60), strict=False)]
    bound = [HARD.easier(share).bindings for share in (0.25, 0.5, 1.0)]
    assert bound == [4, 8, 16]
    for step, events in enumerate(found):
        least = bound[(step >= 10) + (step >= 20)]
        assert least <= events.min(), step
        assert events.max() <= 2 * least, step
    plain = dataclasses.replace(settings, curriculum=0.0)
    first = next(batches(plain, HARD))
    whole = HARD.episodes(BLOCK * 4, np.random.default_rng([TRAINING_SEED, 0]))
    np.testing.assert_array_equal(first.observations, whole.observations[:4])
    assert SPARSE.easier(0.25) == SPARSE
