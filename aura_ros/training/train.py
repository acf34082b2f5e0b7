"""Train one memory, or a baseline of it, on one task."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from aura_ros.errors import UserError
from aura_ros.memory.baseline_config import BaselineConfig
from aura_ros.memory.baselines import Baseline, Recalled, build_baseline
from aura_ros.memory.config import GATED_VARIANTS, MemoryConfig, Variant
from aura_ros.memory.module import MemoryModule, logistic_noise
from aura_ros.training.episodes import Episodes, Task
from aura_ros.training.objective import Objective, ObjectiveConfig, learning_rate
from aura_ros.training.scan import Sequence, run_sequence, run_stepwise, ungated
from aura_ros.training.settings import ENGINES, TrainConfig

# What can be trained.
Memory = MemoryModule | Baseline
# Training data comes in blocks of this many batches, one generator call for all of them; in fewer where that would be
# more than so many steps of all episodes together.
BLOCK, BLOCK_STEPS = 20, 2**22
# A training whose last steps, so many or all, were left out has learned nothing that is worth keeping.
SKIPPED_AT_END = 100
# Share of the steps after which a gate is held open no longer.
OPEN_AT_MOST = 0.6
# Not 0..n, so that no training stream is an evaluation stream.
TRAINING_SEED = 7_919


@dataclass(frozen=True)
class Progress:
    """After a gradient step: its number, and the batch's plain losses. skipped: not finite, the weights stayed."""

    step: int
    cross_entropy: float
    write_rate: float
    accuracy: float
    skipped: bool = False


def batches(config: TrainConfig, task: Task) -> Iterator[Episodes]:
    """Endless batches from the seed, made in blocks; the first ones of easier episodes with a curriculum."""
    rng = np.random.default_rng([TRAINING_SEED, config.seed])
    many = min(BLOCK, max(BLOCK_STEPS // (config.batch * task.steps), 1))
    easy = round(config.curriculum * config.steps)
    done = 0
    for until, share in ((easy // 2, 0.25), (easy, 0.5)):
        easier = task.easier(share) if done < until else task
        while done < until:
            yield from _block(easier, config.batch, min(many, until - done), rng)
            done += min(many, until - done)
    while True:
        yield from _block(task, config.batch, many, rng)


def _block(task: Task, batch: int, many: int, rng: np.random.Generator) -> Iterator[Episodes]:
    block = task.episodes(batch * many, rng)
    for start in range(0, len(block), batch):
        yield block.slice(slice(start, start + batch))


def build(config: MemoryConfig | BaselineConfig) -> Memory:
    """Make the memory or the baseline that a configuration names, untrained."""
    return build_baseline(config) if isinstance(config, BaselineConfig) else MemoryModule(config)


def run_memory(
    module: Memory,
    inputs: Tensor,
    *,
    noise: Tensor | None = None,
    force: Tensor | None = None,
    engine: str = ENGINES[0],
) -> Sequence | Recalled:
    """Run any memory or baseline from its empty state over inputs [B, T, input_dim].

    noise and force are for a gate, as in `run_sequence`; what has none ignores them. engine: as in `TrainConfig`.
    """
    chunked = engine == ENGINES[0]
    if isinstance(module, Baseline):
        return module.run_sequence(inputs) if chunked else module.run_stepwise(inputs)
    if not module.config.has_fast_weights:
        return ungated(module, inputs)
    run = run_sequence if chunked else run_stepwise
    return run(module, inputs, noise=noise, force=force)


def train(
    memory: MemoryConfig | BaselineConfig,
    task: Task,
    config: TrainConfig,
    objective: ObjectiveConfig,
    report: Callable[[Progress], None] = lambda progress: None,
    follow: Callable[[Memory], None] = lambda module: None,
) -> Memory:
    """Train a memory; the same configurations give the same weights on one machine with one thread.

    follow: gets the memory after each gradient step, as an EMA teacher does. Raises UserError for freeze_gate of what
    has no gate, a batch that asks nothing, and a training that ends in steps none of which was finite.
    """
    torch.manual_seed(config.seed)
    module = build(memory)
    module.train()
    if config.freeze_gate:
        if not hasattr(module, "gate"):
            name = memory.kind if isinstance(memory, BaselineConfig) else memory.variant.value
            raise UserError(f"freeze_gate: '{name}' has no gate; leave it false")
        module.gate.requires_grad_(False)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=config.lr)
    loss_of = Objective(objective, config.steps)
    opened = config.open_until > 0 and module.config.variant in GATED_VARIANTS
    learned = 0
    for step, episodes in zip(range(config.steps), batches(config, task), strict=False):
        # A memory too small for its task never gets there, and its gate must learn all the same.
        opened = opened and step < OPEN_AT_MOST * config.steps and not loss_of.running_ce < config.open_until
        progress = gradient_step(module, optimiser, loss_of, config, step, episodes, opened)
        learned = learned if progress.skipped else progress.step
        follow(module)
        report(progress)
    if config.steps - learned >= min(SKIPPED_AT_END, config.steps):
        raise UserError(
            f"training exploded: no gradient was finite from step {learned + 1} to the last, {config.steps}; "
            "lower lr or normalise keys"
        )
    return module.eval()


def gradient_step(
    module: Memory,
    optimiser: torch.optim.Optimizer,
    loss_of: Objective,
    config: TrainConfig,
    step: int,
    episodes: Episodes,
    opened: bool,
) -> Progress:
    """One batch forward, backward, and into the weights; opened: with the gate held open.

    Raises UserError for a batch that asks nothing.
    """
    for group in optimiser.param_groups:
        group["lr"] = learning_rate(step, config.steps, config.lr, config.warmup, config.lr_floor)
    inputs, targets = torch.from_numpy(episodes.observations), torch.from_numpy(episodes.targets)
    asked = targets >= 0
    if not asked.any():
        raise UserError(
            f"batch of step {step + 1} asks nothing ({len(episodes)} episodes of {targets.shape[1]} steps); give a "
            "larger batch, longer episodes or a smaller event probability"
        )
    done = rollout(module, inputs, config, opened)
    logits, mu, logvar = module.head(done.reads[asked])
    loss = loss_of(step, logits, targets[asked], mu, logvar, done.soft, done.gate)
    total = loss.total
    if isinstance(module, MemoryModule) and module.config.variant is Variant.LEARNED_TOKEN_GATE:
        total = total + token_gate_loss(module, done, torch.from_numpy(episodes.tokens), config.token_rate)
    optimiser.zero_grad(set_to_none=True)
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(
        [p for group in optimiser.param_groups for p in group["params"]], config.clip
    )
    # Writes of keys that are not normalised may explode on a batch: it must not spoil the weights for good.
    finite = bool(torch.isfinite(norm))
    if finite:
        optimiser.step()
    with torch.no_grad():
        accuracy = float((logits.argmax(-1) == targets[asked]).float().mean())
    return Progress(step + 1, loss.cross_entropy, loss.write_rate, accuracy, skipped=not finite)


def rollout(module: Memory, inputs: Tensor, config: TrainConfig, opened: bool) -> Sequence | Recalled:
    """One pass over a batch in training; a variant without fast weights has zeros for what it lacks."""
    batch, steps, _ = inputs.shape
    noise = force = None
    if config.gate_noise and module.config.variant in GATED_VARIANTS:
        noise = config.gate_noise * logistic_noise((batch, steps))
    if opened:
        force = torch.ones(batch, steps, dtype=torch.bool)
    done = run_memory(module, inputs, noise=noise, force=force, engine=config.engine)
    if isinstance(done, Sequence) and module.config.variant is Variant.LEARNED_TOKEN_GATE:
        # Answers and penalty must not teach this gate; only tokens do.
        done = dataclasses.replace(done, gate=done.gate.detach())
    return done


def token_gate_loss(module: MemoryModule, done: Sequence | Recalled, tokens: Tensor, rate: float) -> Tensor:
    """Teach the gate by tokens alone: fire at the fraction `rate` of steps whose token was predicted worst.

    The head predicts each token from the observation before. (The paper's token gate has no path from its loss to its
    gate, for the head reads z and not the memory: it can only close.)
    """
    logits = module.token_head(done.encoded[:, :-1])
    surprise = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    worst = torch.quantile(surprise.detach(), 1 - rate)
    wanted = (surprise.detach() > worst).to(done.soft.dtype)
    taught = functional.binary_cross_entropy(done.soft[:, 1:].flatten(), wanted)
    return surprise.mean() + taught
