"""Baselines of the memory: both forms of each agree, none sees the future, and none holds more than it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from aura_ros.bench.recall.tasks import SPARSE, evaluation_episodes
from aura_ros.errors import UserError
from aura_ros.memory.baselines import (
    GATED_DELTA,
    GROWING,
    HEAVY_HITTERS,
    KINDS,
    WINDOW,
    Baseline,
    BaselineConfig,
    build_baseline,
)
from aura_ros.training.objective import Objective, learning_rate
from aura_ros.training.settings import ObjectiveConfig, TrainConfig
from aura_ros.training.train import batches

STEPS = 150  # more than two chunks, and than any budget's rows


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def baseline(kind: str, **changes) -> Baseline:
    values = {"input_dim": 7, "dk": 6, "dv": 5, "budget": 400, "sinks": 2, **changes}
    return build_baseline(BaselineConfig(kind=kind, **values)).double().eval()


def inputs(seed: int = 0, batch: int = 3, steps: int = STEPS) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((batch, steps, 7)) * 2)


@pytest.mark.parametrize("kind", KINDS)
def test_all_steps_at_once_equal_one_after_the_other_with_their_gradients(kind):
    one, two = baseline(kind), baseline(kind)
    weights = torch.from_numpy(np.random.default_rng(1).standard_normal((3, STEPS, 5)))
    done, twin = one.run_sequence(inputs()), two.run_stepwise(inputs())
    np.testing.assert_allclose(done.reads.detach(), twin.reads.detach(), rtol=0, atol=1e-12)
    assert float(done.reads.detach().std()) > 0.01
    for result in (done, twin):
        (result.reads * weights).sum().backward()
    compared = 0
    for (name, mine), other in zip(one.named_parameters(), two.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name
        if mine.grad is not None:
            assert float(other.grad.abs().max()) > 0, name
            np.testing.assert_allclose(mine.grad, other.grad, rtol=1e-9, atol=1e-9, err_msg=name)
            compared += 1
    assert compared == (12 if kind == GATED_DELTA else 9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["run_sequence", "run_stepwise"])
def test_future_inputs_never_change_past_reads(kind, form):
    module, before = baseline(kind), inputs()
    after = before.clone()
    after[:, 90:] = inputs(seed=5)[:, 90:]
    one, two = (getattr(module, form)(x).reads.detach() for x in (before, after))
    np.testing.assert_allclose(one[:, :90], two[:, :90], rtol=0, atol=1e-13)
    assert not torch.allclose(one[:, 90], two[:, 90])


@pytest.mark.parametrize("kind", KINDS)
def test_writes_at_every_step_as_training_reads_it(kind):
    done = baseline(kind).run_sequence(inputs())
    for name in ("gate", "soft", "fired"):
        value = getattr(done, name)
        assert value.shape == (3, STEPS)
        assert bool((value == 1).all())
    assert done.fired.dtype == torch.bool
    assert done.encoded.shape == (3, STEPS, 64)


def test_bytes_are_those_of_the_paper():
    growing, window, heavy, delta = (build_baseline(BaselineConfig(kind=kind)) for kind in KINDS)
    assert growing.state_bytes(16) < 4224 < growing.state_bytes(17)
    assert growing.state_bytes(100_000) == 25_600_000
    assert window.state_bytes(3) == 3 * 256
    assert window.state_bytes(10**6) == 16 * 256
    # Its rows also hold mass and step, and fill the memory's 4,224 bytes to the last one.
    assert heavy.state_bytes(10**6) == 4224
    assert delta.state_bytes(1) == delta.state_bytes(10**6) == 32 * 32 * 4


def seen_from(module: Baseline, at: int) -> list[int]:
    """The steps whose inputs the read at a step depends on."""
    x = inputs(batch=1).requires_grad_()
    module.run_stepwise(x).reads[0, at].sum().backward()
    return x.grad[0].abs().sum(dim=-1).nonzero()[:, 0].tolist()


def test_window_holds_its_rows_and_no_more():
    module, at = baseline(WINDOW), 120
    rows = module.config.rows
    assert rows == 400 // 44 == 9
    assert seen_from(module, at) == [0, 1, *range(at - rows + 3, at + 1)]


def test_growing_cache_forgets_nothing():
    assert seen_from(baseline(GROWING), 120) == list(range(121))


def held_by_heavy_hitters(q, k, **changes) -> list[set[int]]:
    module = baseline(HEAVY_HITTERS, budget=6 * 52, **changes)
    assert module.config.rows == 6
    return [set(steps[0].tolist()) for _, _, steps, _ in module._walk(q, k, k)]


def test_heavy_hitter_stays_and_the_lightest_goes():
    k = torch.zeros(1, 40, 6, dtype=torch.float64)
    k[0, :, 0] = 1.0
    k[0, 3] = torch.tensor([8.0, 0, 0, 0, 0, 0])
    q = torch.zeros(1, 40, 6, dtype=torch.float64)
    q[0, :, 0] = 10.0
    held = held_by_heavy_hitters(q, k)
    assert all(3 in steps for steps in held[3:])
    # With nothing to tell them apart but age, what came first has drawn most.
    assert 12 not in held[-1]
    for t, steps in enumerate(held):
        assert len(steps) == min(t + 1, 6)
        assert set(range(max(t - 2, 0), t + 1)) <= steps, "the latest half is never evicted"


def test_rows_of_each_episode_are_evicted_on_their_own():
    rng = np.random.default_rng(4)
    q, k = (torch.from_numpy(rng.standard_normal((2, 40, 6)) * 3) for _ in range(2))
    module = baseline(HEAVY_HITTERS, budget=6 * 52)
    together = [steps for _, _, steps, _ in module._walk(q, k, k)]
    for row in range(2):
        alone = [steps for _, _, steps, _ in module._walk(q[row, None], k[row, None], k[row, None])]
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))
    assert not torch.equal(together[-1][0], together[-1][1])


def test_strong_decay_over_a_chunk_stays_finite():
    module = baseline(GATED_DELTA)
    module.decay_log.data.fill_(6.0)
    done = module.run_sequence(inputs())
    np.testing.assert_allclose(
        done.reads.detach(), module.run_stepwise(inputs()).reads.detach(), rtol=0, atol=1e-12
    )
    done.reads.square().sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in module.parameters() if p.grad is not None)


def test_same_seed_same_weights_and_the_generator_is_left_alone():
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    one, two, other = (build_baseline(BaselineConfig(seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), wanted)
    assert torch.equal(one.to_k.weight, two.to_k.weight)
    assert not torch.equal(one.to_k.weight, other.to_k.weight)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "lstm"}, "kind 'lstm' is not known; choose one of: growing_kv"),
        ({"kind": WINDOW, "budget": 300}, "budget 300 holds 1 rows of window_kv"),
        ({"kind": WINDOW, "sinks": 16}, "sinks 16 must be fewer than the 16 rows"),
        ({"dk": 0}, "dk 0 is out of range; allowed: 1 to 1024"),
    ],
)
def test_impossible_configuration_is_one_line(values, message):
    with pytest.raises(UserError, match=message):
        BaselineConfig(**values)


@pytest.mark.parametrize("kind", [GROWING, GATED_DELTA])
def test_learns_sparse_recall_in_300_steps(kind):
    torch.manual_seed(0)
    config, module = TrainConfig(steps=300), build_baseline(BaselineConfig(kind=kind)).train()
    optimiser = torch.optim.AdamW(module.parameters(), lr=config.lr)
    loss_of = Objective(ObjectiveConfig(gamma=0.0), config.steps)
    for step, episodes in zip(range(config.steps), batches(config, SPARSE), strict=False):
        optimiser.param_groups[0]["lr"] = learning_rate(step, config.steps, config.lr, 30, config.lr_floor)
        targets = torch.from_numpy(episodes.targets)
        done = module.run_sequence(torch.from_numpy(episodes.observations))
        logits, mu, logvar = module.head(done.reads[targets >= 0])
        loss = loss_of(step, logits, targets[targets >= 0], mu, logvar, done.soft, done.gate)
        optimiser.zero_grad()
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), config.clip)
        optimiser.step()
    module.eval()
    episodes = evaluation_episodes(SPARSE, 512)
    targets = torch.from_numpy(episodes.targets)
    with torch.no_grad():
        reads = module.run_sequence(torch.from_numpy(episodes.observations)).reads
        logits, _, _ = module.head(reads[targets >= 0])
    right = (logits.argmax(-1) == targets[targets >= 0]).double().mean()
    assert float(right) > 0.95
    assert float(functional.cross_entropy(logits, targets[targets >= 0])) < 0.3
