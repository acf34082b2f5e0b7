"""What the memory is compared with, to be trained as it is: attention caches that grow or keep a budget, Gated DeltaNet.

Around each core stand the memory's own encoder, projections and head, so that only the core differs. Every core has two
forms that agree: all steps at once, to train with, and step by step, as it would be deployed and as its bytes are
counted. All of them write at every step. B = batch, T = steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from aura_ros.memory.baseline_config import (
    FLOAT_BYTES,
    GATED_DELTA,
    GROWING,
    HEAVY_HITTERS,
    KINDS,
    WINDOW,
    BaselineConfig,
)
from aura_ros.memory.layers import ActionHead, mlp
from aura_ros.memory.module import NORM_EPSILON

__all__ = [
    "GATED_DELTA",
    "GROWING",
    "HEAVY_HITTERS",
    "KINDS",
    "WINDOW",
    "Baseline",
    "BaselineConfig",
    "Recalled",
    "build_baseline",
]

# The age bias starts weak, for tasks whose answer may be long ago, and must be able to grow a hundredfold within a few
# hundred steps of an optimiser that changes every number at the same speed.
AGE_RATE = 4.0
# Attention scores held at a time (64 MiB): a T x T matrix of a batch does not fit where T is long.
SCORES_AT_ONCE = 2**24


@dataclass(frozen=True)
class Recalled:
    """What a baseline did over [B, T] steps, with the names that training asks of a memory's `Sequence`.

    encoded: z, [B, T, d_model]. reads: o, [B, T, dv].
    """

    encoded: Tensor
    reads: Tensor

    @property
    def gate(self) -> Tensor:
        """It writes at every step: ones, [B, T]."""
        return self.encoded.new_ones(self.encoded.shape[:2])

    @property
    def soft(self) -> Tensor:
        """As `gate`."""
        return self.gate

    @property
    def fired(self) -> Tensor:
        """As `gate`, bool."""
        return self.gate > 0


class Baseline(nn.Module, ABC):
    """Encoder, projections and head as in `MemoryModule`, around a core. Same configuration, same initial weights."""

    def __init__(self, config: BaselineConfig) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            if config.input_kind == "encoder":
                self.encoder: nn.Module = mlp(config.input_dim, config.hidden, config.d_model)
            else:
                self.encoder = nn.Linear(config.input_dim, config.d_model)
            self.to_q = nn.Linear(config.d_model, config.dk, bias=False)
            self.to_k = nn.Linear(config.d_model, config.dk, bias=False)
            self.to_v = nn.Linear(config.d_model, config.dv, bias=False)
            self.head = ActionHead(
                config.dv,
                config.out_dim,
                config.residual,
                config.d_model if config.head_input == "read_and_z" else 0,
                config.head_hidden,
            )
            self.build(config)

    def run_sequence(self, inputs: Tensor) -> Recalled:
        """All steps at once from an empty state: [B, T, input_dim]."""
        z = self.encoder(inputs)
        return Recalled(z, self.all_at_once(z, self.to_q(z), self.to_k(z), self.to_v(z)))

    def run_stepwise(self, inputs: Tensor) -> Recalled:
        """The naive twin of `run_sequence`: one step after the other on the state that is carried."""
        z = self.encoder(inputs)
        return Recalled(z, self.one_by_one(z, self.to_q(z), self.to_k(z), self.to_v(z)))

    @abstractmethod
    def build(self, config: BaselineConfig) -> None:
        """Make the core's own parameters."""

    @abstractmethod
    def all_at_once(self, z: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Reads, [B, T, dv], of z [B, T, d_model], q and k [B, T, dk], v [B, T, dv]."""

    @abstractmethod
    def one_by_one(self, z: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `all_at_once`."""

    @abstractmethod
    def state_bytes(self, steps: int) -> int:
        """Bytes carried after `steps` steps, batch 1, float32, counted as one_by_one's tensors."""


class GrowingKV(Baseline):
    """Attention over all steps so far, this one included; the score has a learned bias by relative age.

    softmax(q k / sqrt(dk) - exp(a) age - exp(b) log(1 + age)): a step that came later can outweigh one of the same
    content, at any distance, and no position is learned, so that it runs at lengths it was not trained at.
    """

    def build(self, config: BaselineConfig) -> None:
        """Two learned scalars, a and b, in units in which a gradient step changes them as much as it should."""
        self.age_linear = nn.Parameter(torch.tensor(-4.0 / AGE_RATE))
        self.age_log = nn.Parameter(torch.tensor(-2.0 / AGE_RATE))

    def bias(self, ages: Tensor) -> Tensor:
        """What a row of an age, integers of any shape, has in its score beside q k / sqrt(dk)."""
        ages = ages.clamp(min=0).to(self.age_log.dtype)
        linear, log = torch.exp(AGE_RATE * self.age_linear), torch.exp(AGE_RATE * self.age_log)
        return -(linear * ages + log * torch.log1p(ages))

    def reach(self, rows: Tensor, first: int, last: int) -> Tensor:
        """Of rows [B, T, ...] those that some of the steps first..last - 1 may attend to."""
        return rows[:, :last]

    def visible(self, steps: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """What each of the steps, [n], attends to among the columns, [m]: bool [n, m], and the ages it sees there."""
        ages = steps[:, None] - columns[None, :]
        return ages >= 0, ages

    def all_at_once(self, z: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Plain masked attention, as many rows at a time as `SCORES_AT_ONCE` allows."""
        q, step, reads = q / math.sqrt(self.config.dk), torch.arange(k.shape[1], device=k.device), []
        for first, last in _parts(k.shape[1], k.shape[0] * k.shape[1]):
            columns = self.reach(step[None], first, last)[0]
            seen, ages = self.visible(step[first:last], columns)
            keys, values = self.reach(k, first, last), self.reach(v, first, last)
            # One pass over what all episodes have in common, and one over their own: scores are most of the work.
            bias = self.bias(ages).masked_fill(~seen, -math.inf)
            scores = torch.baddbmm(bias[None], q[:, first:last], keys.transpose(1, 2))
            reads.append(torch.softmax(scores, dim=-1) @ values)
        return torch.cat(reads, dim=1)

    def one_by_one(self, z: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The cache is the list of rows."""
        reads = []
        for t in range(k.shape[1]):
            ages = torch.arange(t, -1, -1, device=k.device)
            reads.append(self.attend(q[:, t], k[:, : t + 1], v[:, : t + 1], ages)[0])
        return torch.stack(reads, dim=1)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, ages: Tensor) -> tuple[Tensor, Tensor]:
        """Read [B, dv] and weights [B, n] of a query [B, dk] over n rows; ages: [n] or [B, n]."""
        scores = torch.einsum("bk,bnk->bn", q, keys) / math.sqrt(self.config.dk) + self.bias(ages)
        weights = torch.softmax(scores, dim=-1)
        return torch.einsum("bn,bnv->bv", weights, values), weights

    def state_bytes(self, steps: int) -> int:
        """A row a step."""
        return self.config.row_bytes * steps


class WindowKV(GrowingKV):
    """Attention over the first `sinks` steps and the latest ones (Xiao et al. 2024, StreamingLLM), in a fixed budget.

    Ages are those within the cache, as there: a sink is as old as if the rows between had never been.
    """

    def reach(self, rows: Tensor, first: int, last: int) -> Tensor:
        """The sinks, and from the first step's window to the last step."""
        sinks = self.config.sinks
        start = max(first + 1 - (self.config.rows - sinks), sinks)
        return torch.cat([rows[:, :sinks], rows[:, start:last]], dim=1)

    def visible(self, steps: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Sinks and window."""
        rows, sinks = self.config.rows, self.config.sinks
        ages, sink = steps[:, None] - columns[None, :], (columns < sinks)[None]
        seen = (ages >= 0) & (sink | (ages < rows - sinks))
        return seen, torch.where(sink, torch.minimum(ages, rows - 1 - columns[None]), ages)

    def one_by_one(self, z: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The oldest row that is no sink goes out when the cache is full."""
        rows, sinks = self.config.rows, self.config.sinks
        keys, values, reads = k[:, :0], v[:, :0], []
        for t in range(k.shape[1]):
            if keys.shape[1] == rows:
                keys = torch.cat([keys[:, :sinks], keys[:, sinks + 1 :]], dim=1)
                values = torch.cat([values[:, :sinks], values[:, sinks + 1 :]], dim=1)
            keys, values = torch.cat([keys, k[:, t, None]], 1), torch.cat([values, v[:, t, None]], 1)
            ages = torch.arange(keys.shape[1] - 1, -1, -1, device=k.device)
            reads.append(self.attend(q[:, t], keys, values, ages)[0])
        return torch.stack(reads, dim=1)

    def state_bytes(self, steps: int) -> int:
        """Never more than the budget."""
        return self.config.row_bytes * min(steps, self.config.rows)


class HeavyHitterKV(GrowingKV):
    """Attention in a fixed budget: the latest half of the rows, and those that have drawn most attention (Zhang et al.
    2023, H2O).

    When the cache is full, the row of the least accumulated attention goes out, of those outside the latest half.
    Which rows stay is decided without gradient; the reads over them have one.
    """

    def all_at_once(self, z: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention over what the cache holds at each step."""
        held, reads = self.held(q, k), []
        batch, length, rows = held.shape
        everyone, step = (
            torch.arange(batch, device=k.device)[:, None, None],
            torch.arange(length, device=k.device),
        )
        for first, last in _parts(length, batch * rows * (self.config.dk + self.config.dv)):
            steps = held[:, first:last]
            at = steps.clamp(min=0)
            bias = self.bias(step[first:last, None] - steps).masked_fill(steps < 0, -math.inf)
            overlap = torch.einsum("btk,btrk->btr", q[:, first:last], k[everyone, at])
            scores = overlap / math.sqrt(self.config.dk) + bias
            reads.append(torch.einsum("btr,btrv->btv", torch.softmax(scores, dim=-1), v[everyone, at]))
        return torch.cat(reads, dim=1)

    @torch.no_grad()
    def held(self, q: Tensor, k: Tensor) -> Tensor:
        """Run the cache once for the steps it holds at each step, [B, T, rows]; -1 where it is not full yet."""
        held = k.new_full((*k.shape[:2], self.config.rows), -1, dtype=torch.long)
        # The values change nothing about what stays.
        for t, (_, _, steps, _) in enumerate(self._walk(q, k, k[..., :0])):
            held[:, t, : steps.shape[1]] = steps
        return held

    def one_by_one(self, z: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keys, values, drawn mass and step of each row are the cache."""
        walk = self._walk(q, k, v)
        reads = [
            self.attend(q[:, t], keys, values, t - steps)[0]
            for t, (keys, values, steps, _) in enumerate(walk)
        ]
        return torch.stack(reads, dim=1)

    def _walk(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Rows at each step: keys [B, n, dk], values [B, n, .], steps they came from [B, n], mass drawn [B, n]."""
        batch, length, _ = k.shape
        latest = max(self.config.rows // 2, 1)
        others = torch.arange(self.config.rows - 1, device=k.device)
        keys, values = k[:, :0], v[:, :0]
        steps = torch.zeros(batch, 0, dtype=torch.long, device=k.device)
        mass = k.new_zeros(batch, 0)
        for t in range(length):
            if keys.shape[1] == self.config.rows:
                # Rows are in the order of their steps, so the latest stand at the end.
                victim = mass[:, : self.config.rows - latest + 1].argmin(dim=1)
                order = others + (others >= victim[:, None])
                keys, values = _rows(keys, order), _rows(values, order)
                steps, mass = steps.gather(1, order), mass.gather(1, order)
            keys, values = torch.cat([keys, k[:, t, None]], 1), torch.cat([values, v[:, t, None]], 1)
            steps = torch.cat([steps, steps.new_full((batch, 1), t)], dim=1)
            mass = torch.cat([mass, mass.new_zeros(batch, 1)], dim=1)
            with torch.no_grad():
                _, weights = self.attend(q[:, t], keys, values, t - steps)
            mass = mass + weights
            yield keys, values, steps, mass

    def state_bytes(self, steps: int) -> int:
        """Never more than the budget: mass (float32) and step (int32) count too."""
        return self.config.row_bytes * min(steps, self.config.rows)


class GatedDeltaNet(Baseline):
    """A delta-rule matrix that always writes, with decay and strength from the input (Yang et al. 2025, "Gated delta
    networks").

    W_t = a_t (I - b_t k_t k_t^T) W_{t-1} + b_t k_t v_t^T, o_t = W_t^T q_t; q and k of norm 1, b = sigmoid(.),
    a = exp(-exp(A) softplus(.)). The recurrence alone, without the block's convolutions, output norm and gate: what
    is compared is memories.
    """

    CHUNK = 64

    def build(self, config: BaselineConfig) -> None:
        """The two gates; decay starts near none."""
        self.to_strength = nn.Linear(config.d_model, 1)
        self.to_decay = nn.Linear(config.d_model, 1)
        self.decay_log = nn.Parameter(torch.tensor(0.0))
        nn.init.constant_(self.to_decay.bias, -4.0)

    def gates(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithm of the decay a, and strength b: [B, T] each."""
        decay = -torch.exp(self.decay_log) * functional.softplus(self.to_decay(z).squeeze(-1))
        return decay, torch.sigmoid(self.to_strength(z).squeeze(-1))

    def all_at_once(self, z: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """In chunks, each a triangular system; products of decays are those between two steps, never above 1."""
        q, k = (functional.normalize(x, dim=-1, eps=NORM_EPSILON) for x in (q, k))
        decay, strength = self.gates(z)
        weights, reads = k.new_zeros(k.shape[0], k.shape[2], v.shape[2]), []
        for start in range(0, k.shape[1], self.CHUNK):
            part = slice(start, start + self.CHUNK)
            total = torch.cumsum(decay[:, part], dim=1)
            # From after step j to after step t, for j <= t; above, exp of a number that must not overflow.
            between = torch.exp(torch.tril(total[:, :, None] - total[:, None, :])).tril()
            since = torch.exp(total)[..., None]
            qs, ks, b = q[:, part], k[:, part], strength[:, part]
            pull = (ks @ ks.transpose(1, 2) * between).tril(-1) * b[:, None, :]
            wrong = since * (ks @ weights) - v[:, part]
            error = torch.linalg.solve_triangular(pull, wrong, upper=False, unitriangular=True)
            written = b[..., None] * error
            reads.append(since * (qs @ weights) - (qs @ ks.transpose(1, 2) * between) @ written)
            left = between[:, -1, :, None] * ks
            weights = since[:, -1:] * weights - left.transpose(1, 2) @ written
        return torch.cat(reads, dim=1)

    def one_by_one(self, z: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As the formula says."""
        q, k = (functional.normalize(x, dim=-1, eps=NORM_EPSILON) for x in (q, k))
        decay, strength = self.gates(z)
        weights, reads = k.new_zeros(k.shape[0], k.shape[2], v.shape[2]), []
        for t in range(k.shape[1]):
            weights = torch.exp(decay[:, t, None, None]) * weights
            error = torch.einsum("bk,bkv->bv", k[:, t], weights) - v[:, t]
            weights = weights - strength[:, t, None, None] * torch.einsum("bk,bv->bkv", k[:, t], error)
            reads.append(torch.einsum("bk,bkv->bv", q[:, t], weights))
        return torch.stack(reads, dim=1)

    def state_bytes(self, steps: int) -> int:
        """W, whatever the number of steps."""
        return FLOAT_BYTES * self.config.dk * self.config.dv


CORES: dict[str, type[Baseline]] = {
    GROWING: GrowingKV,
    WINDOW: WindowKV,
    HEAVY_HITTERS: HeavyHitterKV,
    GATED_DELTA: GatedDeltaNet,
}


def build_baseline(config: BaselineConfig) -> Baseline:
    """Make the baseline that a configuration names."""
    return CORES[config.kind](config)


def _parts(length: int, scores: int) -> Iterator[tuple[int, int]]:
    """First and last (exclusive) of the steps that are done together, where each costs so many scores."""
    count = max(SCORES_AT_ONCE // scores, 1)
    for first in range(0, length, count):
        yield first, min(first + count, length)


def _rows(held: Tensor, order: Tensor) -> Tensor:
    """Rows [B, n, .] by index [B, m]."""
    return held.gather(1, order[..., None].expand(-1, -1, held.shape[2]))
