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

from aura_ros.config import check_fields, option
from aura_ros.errors import UserError
from aura_ros.memory.module import NORM_EPSILON, ActionHead, mlp

GROWING, WINDOW, HEAVY_HITTERS, GATED_DELTA = "growing_kv", "window_kv", "heavy_hitter_kv", "gated_delta_net"
KINDS = (GROWING, WINDOW, HEAVY_HITTERS, GATED_DELTA)
FLOAT_BYTES = 4
# The age bias starts weak, for tasks whose answer may be long ago, and must be able to grow a hundredfold within a few
# hundred steps of an optimiser that changes every number at the same speed.
AGE_RATE = 4.0
# Beside its key and value, a row of the heavy-hitter cache holds the mass it has drawn and the step it came from.
HEAVY_EXTRA_BYTES = 8


@dataclass(frozen=True)
class BaselineConfig:
    """Everything that fixes a baseline but its weights. Checked at construction; raises UserError naming the field.

    budget: 4,224 bytes, the memory's state at N = 32, hold 16 rows of either cache at dk = dv = 32.
    """

    input_dim: int = option(6, "width of an observation", minimum=1, maximum=65_536)
    out_dim: int = option(4, "classes to answer with", minimum=1, maximum=65_536)
    kind: str = option(GROWING, "the core", choices=KINDS)
    d_model: int = option(64, "width of the encoded observation", minimum=1, maximum=4096)
    hidden: int = option(64, "width inside the encoder", minimum=1, maximum=4096)
    dk: int = option(32, "width of a key", minimum=1, maximum=1024)
    dv: int = option(32, "width of a value", minimum=1, maximum=1024)
    budget: int = option(
        4224, "bytes of window_kv and heavy_hitter_kv, batch 1, float32", minimum=16, maximum=2**31
    )
    sinks: int = option(4, "first steps that window_kv keeps for good", minimum=0, maximum=4096)
    seed: int = option(0, "of the initial weights", minimum=0, maximum=2**31 - 1)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind in (WINDOW, HEAVY_HITTERS) and self.rows < 2:
            raise UserError(
                f"budget {self.budget} holds {self.rows} rows of {self.kind}; give 2 rows or more"
            )
        if self.kind == WINDOW and self.sinks >= self.rows:
            raise UserError(f"sinks {self.sinks} must be fewer than the {self.rows} rows that budget allows")

    @property
    def row_bytes(self) -> int:
        """Bytes of one step in a cache."""
        extra = HEAVY_EXTRA_BYTES if self.kind == HEAVY_HITTERS else 0
        return FLOAT_BYTES * (self.dk + self.dv) + extra

    @property
    def rows(self) -> int:
        """Steps that the budget holds."""
        return self.budget // self.row_bytes


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
            self.encoder = mlp(config.input_dim, config.hidden, config.d_model)
            self.to_q = nn.Linear(config.d_model, config.dk, bias=False)
            self.to_k = nn.Linear(config.d_model, config.dk, bias=False)
            self.to_v = nn.Linear(config.d_model, config.dv, bias=False)
            self.head = ActionHead(config.dv, config.out_dim, residual=False)
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

    def scores(self, overlap: Tensor, ages: Tensor) -> Tensor:
        """overlap: q k, any shape; ages: integers of a shape that fits it."""
        ages = ages.clamp(min=0).to(overlap.dtype)
        linear, log = torch.exp(AGE_RATE * self.age_linear), torch.exp(AGE_RATE * self.age_log)
        bias = linear * ages + log * torch.log1p(ages)
        return overlap / math.sqrt(self.config.dk) - bias

    def visible(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """What each step attends to, bool [T, T] or [B, T, T], and the ages it sees there, [T, T]."""
        return _ages(k) >= 0, _ages(k)

    def all_at_once(self, z: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Plain masked attention."""
        seen, ages = self.visible(q, k)
        scores = self.scores(q @ k.transpose(1, 2), ages).masked_fill(~seen, -math.inf)
        return torch.softmax(scores, dim=-1) @ v

    def one_by_one(self, z: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The cache is the list of rows."""
        reads = []
        for t in range(k.shape[1]):
            ages = torch.arange(t, -1, -1, device=k.device)
            reads.append(self.attend(q[:, t], k[:, : t + 1], v[:, : t + 1], ages)[0])
        return torch.stack(reads, dim=1)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, ages: Tensor) -> tuple[Tensor, Tensor]:
        """Read [B, dv] and weights [B, n] of a query [B, dk] over n rows; ages: [n] or [B, n]."""
        scores = self.scores(torch.einsum("bk,bnk->bn", q, keys), ages)
        weights = torch.softmax(scores, dim=-1)
        return torch.einsum("bn,bnv->bv", weights, values), weights

    def state_bytes(self, steps: int) -> int:
        """A row a step."""
        return self.config.row_bytes * steps


class WindowKV(GrowingKV):
    """Attention over the first `sinks` steps and the latest ones (Xiao et al. 2024, StreamingLLM), in a fixed budget.

    Ages are those within the cache, as there: a sink is as old as if the rows between had never been.
    """

    def visible(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Sinks and window."""
        rows, sinks = self.config.rows, self.config.sinks
        ages, step = _ages(k), torch.arange(k.shape[1], device=k.device)
        sink = (step < sinks)[None]
        seen = (ages >= 0) & (sink | (ages < rows - sinks))
        return seen, torch.where(sink, torch.minimum(ages, rows - 1 - step[None]), ages)

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

    @torch.no_grad()
    def visible(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Run the cache once for what it holds at each step."""
        seen = torch.zeros(k.shape[0], k.shape[1], k.shape[1], dtype=torch.bool, device=k.device)
        for t, (_, _, steps, _) in enumerate(self._walk(q, k, k)):
            seen[:, t].scatter_(1, steps, True)
        return seen, _ages(k)

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
        keys, values = k[:, :0], v[:, :0]
        steps = torch.zeros(batch, 0, dtype=torch.long, device=k.device)
        mass = k.new_zeros(batch, 0)
        for t in range(length):
            if keys.shape[1] == self.config.rows:
                # Rows are in the order of their steps, so the latest stand at the end.
                victim = mass[:, : self.config.rows - latest + 1].argmin(dim=1)
                kept = torch.ones_like(mass, dtype=torch.bool).scatter_(1, victim[:, None], False)
                order = kept.nonzero()[:, 1].reshape(batch, -1)
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


def _ages(k: Tensor) -> Tensor:
    """How many steps ago each step (column) was, seen from each (row): [T, T], negative for the future."""
    step = torch.arange(k.shape[1], device=k.device)
    return step[:, None] - step[None, :]


def _rows(held: Tensor, order: Tensor) -> Tensor:
    """Rows [B, n, .] by index [B, m]."""
    return held.gather(1, order[..., None].expand(-1, -1, held.shape[2]))
