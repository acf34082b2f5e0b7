"""Train a memory as a residual on a frozen backbone's chunks: behaviour cloning, a narrow code, few writes.

The paper's objective (section 3.4) with the action in place of a class. What its penalty is tied to is how much of the
backbone's error the memory takes away: first the gate is held open, until it is known how much that can be; then writes are
penalised as long as the error stays near it. So the gate can't close before there is something to write.
B = batch, Q = queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from aura_ros.config import check_fields, option
from aura_ros.errors import UserError
from aura_ros.memory.baseline_config import BaselineConfig
from aura_ros.memory.baselines import Recalled
from aura_ros.memory.config import GATED_VARIANTS, MemoryConfig
from aura_ros.memory.module import logistic_noise
from aura_ros.training.objective import learning_rate
from aura_ros.training.rollouts import RolloutData
from aura_ros.training.scan import Sequence
from aura_ros.training.selection import alike, before_cue, cue_queries, episode_weights, held_out
from aura_ros.training.settings import SMALLEST_LR
from aura_ros.training.train import Memory, build, run_memory

MOMENTUM = 0.98
# Size up to which a residual is penalised by its square where the cue was left out, controller units.
SMALL = 0.3
# Steps without a finite gradient after which a training has exploded.
MOST_SKIPPED = 100


@dataclass(frozen=True)
class ResidualTrainConfig:
    """How a memory is trained on rollouts. Checked at construction; raises UserError naming the field."""

    steps: int = option(4000, "gradient steps", minimum=1, maximum=10_000_000)
    batch: int = option(64, "episodes a step", minimum=1, maximum=65_536)
    seed: int = option(0, "of weights, batches, noise and codes", minimum=0, maximum=2**31 - 1)
    lr: float = option(2e-3, "AdamW's learning rate at its peak", minimum=SMALLEST_LR, maximum=1.0)
    warmup: int = option(100, "steps of linear warm-up", minimum=0, maximum=1_000_000)
    lr_floor: float = option(
        0.02, "learning rate at the end, as a share of the peak", minimum=0.0, maximum=1.0
    )
    weight_decay: float = option(
        0.5, "AdamW's: at 0.01 an attention cache fits what it is trained on alone", minimum=0.0, maximum=10.0
    )
    clip: float = option(1.0, "largest norm of the gradient", minimum=1e-6, maximum=1e6)
    beta: float = option(
        1e-4, "weight of the code's KL divergence where actions are asked for", minimum=0.0, maximum=10.0
    )
    gamma: float = option(0.02, "weight of the write rate", minimum=0.0, maximum=100.0)
    opened: float = option(
        0.4, "share of the steps, the first, with the gate held open", minimum=0.0, maximum=1.0
    )
    slack: float = option(
        0.05,
        "no write is penalised where the error is larger than with an open gate by this share of the backbone's",
        minimum=1e-6,
        maximum=1.0,
    )
    rest: float = option(
        0.1, "weight of the residual's size where nothing is asked", minimum=0.0, maximum=100.0
    )
    gate_noise: float = option(
        0.3, "scale of the logistic noise on the gate's logit", minimum=0.0, maximum=10.0
    )
    state_noise: float = option(
        0.2, "noise on hidden states, in units of their spread", minimum=0.0, maximum=10.0
    )
    recombine: float = option(
        0.5,
        "share of cue episodes with the hold of another one of the same task and cue",
        minimum=0.0,
        maximum=1.0,
    )
    untold: float = option(
        0.3,
        "share of cue episodes whose hold ends before their cue, where nothing is to be changed: silence is no target",
        minimum=0.0,
        maximum=1.0,
    )
    silence: float = option(
        3.0, "weight of the residual's size where the cue was left out", minimum=0.0, maximum=100.0
    )
    bound: float = option(
        10.0,
        "weight of what a residual takes the action beyond one controller unit by, or beyond all that is asked for",
        minimum=0.0,
        maximum=1e4,
    )
    validate_every: int = option(250, "steps between validations", minimum=1, maximum=10_000_000)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class ResidualStep:
    """After a gradient step. error: L1 where actions are asked for, as a share of the backbone's own. rate: of writes.

    penalised: share of the penalty in force. validation: error and rate on the episodes held out, where it was due.
    """

    step: int
    error: float
    rate: float
    penalised: float
    validation: tuple[float, float] | None = None


@dataclass(frozen=True)
class _Batch:
    """inputs [B, Q, hidden_dim] standardised; base, target [B, Q, out]; asked bool [B, Q, out]; valid float [B, Q].

    told: bool [B, 1, 1], False where the cue was left out and nothing is to be changed.
    """

    inputs: Tensor
    base: Tensor
    target: Tensor
    asked: Tensor
    valid: Tensor
    told: Tensor


class ResidualTrainer:
    """Trains step by step. The same data and configurations give the same weights on one machine with one thread."""

    def __init__(
        self, data: RolloutData, memory: MemoryConfig | BaselineConfig, config: ResidualTrainConfig
    ) -> None:
        """Raises UserError where memory and rollouts do not fit."""
        for field, wanted in (("input_dim", data.hidden.shape[2]), ("out_dim", data.base.shape[2])):
            if getattr(memory, field) != wanted:
                raise UserError(
                    f"memory {field} is {getattr(memory, field)}, the rollouts have {wanted}; make it so"
                )
        self.config, self.data = config, data
        self.held = np.array([held_out(line) for line in data.lines])
        if self.held.all():
            self.held[:] = False
        rows = np.concatenate([data.hidden[e, :n] for e, n in enumerate(data.lengths) if not self.held[e]])
        self.mean = rows.mean(0)
        self.spread = rows.std(0) + 1e-3 * max(float(rows.std(0).max()), 1e-6)
        torch.manual_seed(config.seed)
        self.module: Memory = build(memory)
        self.gated = isinstance(memory, MemoryConfig) and memory.variant in GATED_VARIANTS
        self.optimiser = torch.optim.AdamW(
            self.module.parameters(), lr=config.lr, weight_decay=config.weight_decay
        )
        # Joint positions are asked for beyond one unit; deltas are not.
        self.reach = max(1.0, float(np.nanmax(np.abs(data.target))))
        self.weights = episode_weights(data, self.held)
        self.alike = alike(data, self.held)
        self.step = self.skipped = 0
        # Running L1 of the backbone and of both together; what the latter was when the gate was let go.
        self.base_error = self.error = math.nan
        self.reached = math.inf
        self.course: list[dict[str, Any]] = []

    def train(self, report: Callable[[ResidualStep], None] = lambda step: None) -> Memory:
        """To the last step. Raises UserError when it explodes."""
        while self.step < self.config.steps:
            report(self.one_step())
        return self.module.eval()

    def one_step(self) -> ResidualStep:
        """One gradient step, and a validation where one is due."""
        config, module = self.config, self.module
        # Of the step's number alone: what is left out or stopped changes nothing of the others.
        rng = np.random.default_rng([config.seed, self.step])
        torch.manual_seed(int(rng.integers(2**31)))
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.step, config.steps, config.lr, config.warmup, config.lr_floor)
        module.train()
        episodes = rng.choice(len(self.data.lengths), config.batch, p=self.weights)
        batch = self._batch(episodes, rng)
        opened = self.gated and self.step < config.opened * config.steps
        noise = (
            config.gate_noise * logistic_noise(batch.valid.shape)
            if self.gated and config.gate_noise
            else None
        )
        force = torch.ones(batch.valid.shape, dtype=torch.bool) if opened else None
        done = run_memory(module, batch.inputs, noise=noise, force=force)
        output, mu, logvar = _head(module, done)
        gap, told = batch.base + output - batch.target, batch.asked & batch.told
        miss = _mean(gap[told].abs())
        with torch.no_grad():
            alone = _mean((batch.base - batch.target)[told].abs())
        # Either target costs the same L1 on average: nothing else keeps silence from becoming one of them. Small changes
        # are nearly free, for all that the backbone does not know is not the cue.
        untold = gap[batch.asked & ~batch.told]
        silent = _mean(huber_loss(untold, torch.zeros_like(untold), reduction="none", delta=SMALL))
        asked = batch.asked.any(dim=-1)
        kl = 0.5 * (mu.square() + logvar.exp() - 1 - logvar).sum(-1)[asked].mean()
        rate = (done.gate * batch.valid).sum() / batch.valid.sum()
        if told.any():
            self._follow(float(miss.detach()), float(alone), opened)
        penalised = self._penalised(opened)
        # There no error holds it, and a chunk beyond the limit is a fault even if nobody executes it.
        rest = _mean(output[(batch.valid > 0) & ~asked].abs())
        # A chunk beyond the policy's limit is a fault; L1 is as content with one past the target as with one short of it.
        reach = batch.base.abs().clamp(min=self.reach)
        beyond = _mean(((batch.base + output).abs() - reach).clamp(min=0.0)[batch.valid > 0])
        total = miss + config.silence * silent + config.bound * beyond + config.beta * kl + config.rest * rest
        if penalised:
            total = total + config.gamma * penalised * rate * self.base_error
        self.optimiser.zero_grad(set_to_none=True)
        total.backward()
        if opened:
            # It decides nothing yet, and is let go as open as it was initialised: what it would learn of writes that are
            # made anyway is to stop most of them, before there is anything to lose.
            for parameter in module.get_submodule("gate").parameters():
                parameter.grad = None
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), config.clip)
        if torch.isfinite(norm):
            self.optimiser.step()
            self.skipped = 0
        else:
            self.skipped += 1
            if self.skipped > MOST_SKIPPED or not math.isfinite(float(alone)):
                raise UserError(
                    f"training exploded: no gradient was finite in the last {self.skipped} steps, up to {self.step + 1}; "
                    "lower lr, or look for wrong actions in the rollouts"
                )
        self.step += 1
        validation = None
        if self.step % config.validate_every == 0 or self.step == config.steps:
            validation = self.validate()
            self.course.append(
                {
                    "step": self.step,
                    "error": self.error / self.base_error,
                    "rate": float(rate.detach()),
                    "validation_error": validation[0],
                    "validation_rate": validation[1],
                }
            )
        return ResidualStep(
            self.step, self.error / self.base_error, float(rate.detach()), penalised, validation
        )

    def _follow(self, miss: float, alone: float, opened: bool) -> None:
        """Keep the running errors."""
        if math.isfinite(miss) and math.isfinite(alone):
            first = math.isnan(self.error)
            self.error = miss if first else MOMENTUM * self.error + (1 - MOMENTUM) * miss
            self.base_error = alone if first else MOMENTUM * self.base_error + (1 - MOMENTUM) * alone
        if opened:
            self.reached = self.error

    def _penalised(self, opened: bool) -> float:
        """1 where the error is as with an open gate, 0 where it is larger by the slack."""
        if not self.gated or opened:
            return 0.0
        # What goes on to be learned with a free gate is asked for too.
        self.reached = min(self.reached, self.error)
        slack = self.config.slack * self.base_error
        return min(max((self.reached + slack - self.error) / slack, 0.0), 1.0)

    def validate(self) -> tuple[float, float]:
        """Error, as a share of the backbone's, and write rate, on the episodes held out, or on all where there are none."""
        error, rate, _ = self.judge()
        return error, rate

    @torch.no_grad()
    def judge(self) -> tuple[float, float, tuple[int, int]]:
        """As `validate`; and in how many of the cue episodes a query that saw the cue was written, and of how many."""
        episodes = np.flatnonzero(self.held) if self.held.any() else np.arange(len(self.held))
        self.module.eval()
        batch = self._batch(episodes, None)
        done = run_memory(self.module, batch.inputs)
        output, _, _ = _head(self.module, done)
        miss = (batch.base + output - batch.target)[batch.asked].abs().mean()
        alone = (batch.base - batch.target)[batch.asked].abs().mean()
        fired = (done.fired * batch.valid).numpy() > 0
        rate = fired.sum() / float(batch.valid.sum())
        seen = [cue_queries(self.data.lines[episode], self.data.head) for episode in episodes]
        wrote = [bool(fired[row, queries].any()) for row, queries in enumerate(seen) if queries]
        return float(miss / alone), float(rate), (sum(wrote), len(wrote))

    def _batch(self, episodes: Any, rng: np.random.Generator | None) -> _Batch:
        """rng: of training's noise, and of where episodes begin; None: they are as they were."""
        data = self.data
        parts, untold = zip(*(self._pieces(int(episode), rng) for episode in episodes), strict=True)
        lengths = np.array([sum(last - first for _, first, last in pieces) for pieces in parts])
        longest = int(lengths.max())
        shape = (len(parts), longest)
        hidden = np.zeros((*shape, data.hidden.shape[2]), np.float32)
        base = np.zeros((*shape, data.base.shape[2]), np.float32)
        target = np.full((*shape, data.base.shape[2]), np.nan, np.float32)
        for row, pieces in enumerate(parts):
            at = 0
            for episode, first, last in pieces:
                rows = slice(at, at + last - first)
                hidden[row, rows] = (data.hidden[episode, first:last] - self.mean) / self.spread
                base[row, rows] = data.base[episode, first:last]
                target[row, rows] = data.target[episode, first:last]
                at += last - first
        if rng is not None:
            hidden += self.config.state_noise * rng.standard_normal(hidden.shape, np.float32)
        valid = np.arange(longest) < lengths[:, None]
        hidden[~valid] = 0.0
        asked = np.isfinite(target) & valid[..., None]
        told = ~np.array(untold)[:, None, None]
        target = np.where(told, target, base)
        return _Batch(
            torch.from_numpy(hidden.astype(np.float32)),
            torch.from_numpy(base),
            torch.from_numpy(np.where(asked, target, 0.0).astype(np.float32)),
            torch.from_numpy(asked),
            torch.from_numpy(valid.astype(np.float32)),
            torch.from_numpy(told),
        )

    def _pieces(
        self, episode: int, rng: np.random.Generator | None
    ) -> tuple[list[tuple[int, int, int]], bool]:
        """(episode, first query, last query, exclusive) of what a row of a batch is made of; whether its cue is left out."""
        data, length = self.data, int(self.data.lengths[episode])
        if rng is None:
            return [(episode, 0, length)], False
        held = self._held_queries(episode)
        if not held:
            return [(episode, 0, length)], False
        other = int(rng.choice(self.alike[episode])) if rng.random() < self.config.recombine else episode
        # An episode may begin at any time before its cue: time itself must tell nothing.
        before = before_cue(data.lines[other], data.head)
        first = int(rng.integers(0, before + 1))
        untold = rng.random() < self.config.untold
        last = before if untold else self._held_queries(other)
        return [(other, first, last), (episode, held, length)], untold

    def _held_queries(self, episode: int) -> int:
        """Queries of its hold."""
        return int(self.data.lines[episode].get("held", 0)) // int(self.data.head["memory_step_period"])

    def finished(self) -> Memory:
        """The memory for hidden states as they are: the standardisation becomes part of its first layer."""
        module = build(self.module.config)
        module.load_state_dict(self.module.state_dict())
        with torch.no_grad():
            layer: Any = module.encoder
            layer = layer[0] if isinstance(layer, torch.nn.Sequential) else layer
            mean, spread = (torch.from_numpy(x.astype(np.float64)) for x in (self.mean, self.spread))
            weight = layer.weight.double() / spread
            layer.bias.copy_(layer.bias.double() - weight @ mean)
            layer.weight.copy_(weight)
        return module.eval()


def _mean(values: Tensor) -> Tensor:
    """Zero where there is none."""
    return values.mean() if values.numel() else values.new_zeros(())


def _head(module: Memory, done: Sequence | Recalled) -> tuple[Tensor, Tensor, Tensor]:
    output: tuple[Tensor, Tensor, Tensor] = module.head(done.reads, done.encoded)
    return output
