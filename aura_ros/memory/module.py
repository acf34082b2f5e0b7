"""The paper's memory in torch: read, then gate, then maybe write (section 3, algorithm 1), and its baselines.

The naive reference of the NumPy step, and what training optimises. B = batch, T = steps, N = dk = dv.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from aura_ros.errors import UserError
from aura_ros.memory.checkpoint import (
    Arrays,
    MemoryCheckpoint,
    content_hash,
    load_checkpoint,
    save_checkpoint,
)
from aura_ros.memory.config import (
    ALWAYS_WRITE_VARIANTS,
    GATED_VARIANTS,
    TOKEN_HIDDEN,
    MemoryConfig,
    Variant,
)
from aura_ros.memory.layers import ActionHead, mlp

STATISTICS_MOMENTUM = 0.99
STATISTICS_EPSILON = 1e-5
# The smallest norm a key is divided by, so that a zero key stays zero.
NORM_EPSILON = 1e-12


@dataclass(frozen=True)
class MemoryState:
    """What is carried from step to step. A tensor that a variant lacks has width zero.

    fast_weights: W, [B, dk, dv]. previous_read: o of the step before, [B, dv].
    hidden: GRU state of `full_recurrence`, [B, gru_hidden].
    step: steps since the start; it only drives `periodic_write`.
    """

    fast_weights: Tensor
    previous_read: Tensor
    hidden: Tensor
    step: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes carried, counted from the tensors: 4,224 at N = 32, B = 1, float32 (paper section 3.2)."""
        return sum(t.numel() * t.element_size() for t in (self.fast_weights, self.previous_read, self.hidden))


@dataclass(frozen=True)
class StepInfo:
    """What one step decided. [B, ...] from `step`, [B, T, ...] from `forward`.

    probability: p. fired: bool. gate: the decision as a float that carries the gradient in training.
    surprise, surprise_normalised: detached. mu, logvar: the head's code, [..., dv], for the information
    bottleneck's KL. token_logits: [..., token_classes], of width zero but for `learned_token_gate`.
    """

    probability: Tensor
    fired: Tensor
    gate: Tensor
    surprise: Tensor
    surprise_normalised: Tensor
    mu: Tensor
    logvar: Tensor
    token_logits: Tensor


@dataclass(frozen=True)
class _Write:
    """The gate's part of a step: [B] each, as in StepInfo; soft: the probability with training's noise."""

    probability: Tensor
    soft: Tensor
    fired: Tensor
    gate: Tensor
    surprise: Tensor
    surprise_normalised: Tensor


def logistic_noise(shape: Sequence[int]) -> Tensor:
    """Standard logistic noise from torch's generator: what a Gumbel-sigmoid adds to a logit."""
    uniform = torch.rand(*shape).clamp(1e-6, 1 - 1e-6)
    return torch.log(uniform) - torch.log1p(-uniform)


class MemoryModule(nn.Module):
    """Any `Variant`, by its configuration. Same configuration, same initial weights.

    Running surprise statistics are updated at every training step and frozen in evaluation.
    """

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self._build(config)

    def _build(self, config: MemoryConfig) -> None:
        width, hidden, dk, dv = config.d_model, config.hidden, config.dk, config.dv
        if config.input_kind == "encoder":
            self.encoder: nn.Module = mlp(config.input_dim, hidden, width)
        else:
            self.encoder = nn.Linear(config.input_dim, width)
        if config.has_fast_weights:
            self.to_q = nn.Linear(width, dk, bias=False)
            self.to_k = nn.Linear(width, dk, bias=False)
            self.to_v = nn.Linear(width, dv, bias=False)
            # Scheduled variants carry an idle gate, so that all five have the same count (paper table 6).
            self.gate = mlp(width + dv + 1, hidden, 1)
            nn.init.constant_(self.gate.get_parameter("2.bias"), config.gate_bias_init)
            self.eta_raw = nn.Parameter(torch.tensor(math.log(config.eta_init)))
            self.alpha_raw = nn.Parameter(torch.tensor(math.log(config.alpha_init / (1 - config.alpha_init))))
            if config.predictor:
                self.predictor = mlp(dk + dv, hidden, width)
            self.surprise_mean: Tensor
            self.surprise_variance: Tensor
            self.surprise_ready: Tensor
            self.register_buffer("surprise_mean", torch.tensor(0.0))
            self.register_buffer("surprise_variance", torch.tensor(1.0))
            # 0 until the first training batch has set the statistics, then 1.
            self.register_buffer("surprise_ready", torch.tensor(0.0))
        if config.variant is Variant.LEARNED_TOKEN_GATE:
            self.token_head = mlp(width, TOKEN_HIDDEN, config.token_classes)
        if config.variant is Variant.FULL_RECURRENCE:
            self.cell = nn.GRUCell(width, config.gru_hidden)
            self.to_read = nn.Linear(config.gru_hidden, dv)
        if config.variant is Variant.NO_MEMORY:
            self.to_read = nn.Linear(width, dv)
        seen = width if config.head_sees_z else 0
        self.head = ActionHead(dv, config.out_dim, config.residual, seen, config.head_width)

    @property
    def eta(self) -> Tensor:
        """Inner learning rate, a positive scalar."""
        return torch.exp(self.eta_raw)

    @property
    def alpha(self) -> Tensor:
        """Decay of W at a write, a scalar in (0, 1)."""
        return torch.sigmoid(self.alpha_raw)

    def initial_state(self, batch: int) -> MemoryState:
        """Zeros, on the module's device and of its dtype."""
        like = self.head.to_mu.weight
        dk, dv = (self.config.dk, self.config.dv) if self.config.has_fast_weights else (0, 0)
        hidden = self.config.gru_hidden if self.config.variant is Variant.FULL_RECURRENCE else 0
        return MemoryState(
            like.new_zeros(batch, dk, dv), like.new_zeros(batch, dv), like.new_zeros(batch, hidden)
        )

    def step(
        self, inputs: Tensor, state: MemoryState | None = None, force: bool | Tensor | None = None
    ) -> tuple[Tensor, MemoryState, StepInfo]:
        """One memory step: [B, input_dim] -> output [B, out_dim], new state, info [B, ...].

        force: write (True) or skip (False) whatever the gate or schedule says; a bool or bool [B]. In
        training a forced gate keeps its soft gradient. Raises UserError on a wrong width, or when `force`
        is given to a variant without gated writes.
        """
        if inputs.ndim != 2 or inputs.shape[1] != self.config.input_dim:
            raise UserError(
                f"memory input is {list(inputs.shape)}; expected [batch, {self.config.input_dim}]"
            )
        return self._step_encoded(self.encoder(inputs), state or self.initial_state(len(inputs)), force)

    def forward(
        self, inputs: Tensor, state: MemoryState | None = None, force: bool | Tensor | None = None
    ) -> tuple[Tensor, MemoryState, StepInfo]:
        """`step` over a sequence: [B, T, input_dim] -> output [B, T, out_dim], last state, info [B, T, ...].

        force: as in `step`; a tensor is bool [B, T].
        """
        if inputs.ndim != 3 or inputs.shape[2] != self.config.input_dim or inputs.shape[1] < 1:
            raise UserError(
                f"memory input is {list(inputs.shape)}; expected [batch, steps >= 1, {self.config.input_dim}]"
            )
        z = self.encoder(inputs)
        state = state or self.initial_state(len(inputs))
        outputs, infos = [], []
        for t in range(inputs.shape[1]):
            forced = force[:, t] if isinstance(force, Tensor) else force
            output, state, info = self._step_encoded(z[:, t], state, forced)
            outputs.append(output)
            infos.append(info)
        stacked = {
            field.name: torch.stack([getattr(info, field.name) for info in infos], dim=1)
            for field in dataclasses.fields(StepInfo)
        }
        return torch.stack(outputs, dim=1), state, StepInfo(**stacked)

    def _step_encoded(
        self, z: Tensor, state: MemoryState, force: bool | Tensor | None
    ) -> tuple[Tensor, MemoryState, StepInfo]:
        if self.config.has_fast_weights:
            read, state, write = self.read_gate_write(z, state, force)
        elif force is not None:
            raise UserError(
                f"force: variant '{self.config.variant.value}' has no gated write; leave force unset"
            )
        else:
            read, state, write = self._read_ungated(z, state)
        output, mu, logvar = self.head(read, z)
        tokens = z.new_zeros(len(z), 0)
        if self.config.variant is Variant.LEARNED_TOKEN_GATE:
            tokens = self.token_head(z)
        info = StepInfo(
            write.probability,
            write.fired,
            write.gate,
            write.surprise,
            write.surprise_normalised,
            mu,
            logvar,
            tokens,
        )
        return output, state, info

    def read_gate_write(
        self, z: Tensor, state: MemoryState, force: bool | Tensor | None = None, noise: Tensor | None = None
    ) -> tuple[Tensor, MemoryState, _Write]:
        """Algorithm 1 of the paper, up to the action: z [B, d_model] -> read [B, dv], new state, the gate's part.

        noise: added to the gate's logit, [B], in place of what the estimator would draw.
        """
        q, k, v = self.to_q(z), self.to_k(z), self.to_v(z)
        if self.config.normalise_keys:
            q = functional.normalize(q, dim=-1, eps=NORM_EPSILON)
            k = functional.normalize(k, dim=-1, eps=NORM_EPSILON)
        W = state.fast_weights
        read = torch.einsum("bk,bkv->bv", q, W)
        error = torch.einsum("bk,bkv->bv", k, W) - v
        write = self._decide(z, state, error.detach().square().sum(-1), force, noise)
        candidate = (1 - self.alpha) * W - self.eta * 2 * torch.einsum("bk,bv->bkv", k, error)
        if self.training:
            gate = write.gate[:, None, None]
            W = gate * candidate + (1 - gate) * W
        else:
            # A choice, not a product: a skipped W keeps its very bytes, even beside an infinite candidate.
            W = torch.where(write.fired[:, None, None], candidate, W)
        return read, MemoryState(W, read, state.hidden, state.step + 1), write

    def _decide(
        self,
        z: Tensor,
        state: MemoryState,
        surprise: Tensor,
        force: bool | Tensor | None,
        noise: Tensor | None,
    ) -> _Write:
        """Whether each row writes. `surprise` is detached, [B]."""
        config = self.config
        normalised = self._normalise(surprise)
        if config.variant in GATED_VARIANTS:
            # The previous read is detached so that all gates of a sequence can be found by one scan
            # without gradient; W itself still carries the gradient from step to step.
            seen = torch.cat([z, state.previous_read.detach(), normalised[:, None]], dim=-1)
            logit = self.gate(seen).squeeze(-1) / config.temperature
            soft = probability = torch.sigmoid(logit)
            if noise is None and self.training and config.gate_estimator == "gumbel_sigmoid":
                noise = config.gate_noise * logistic_noise(logit.shape)
            if noise is not None:
                soft = torch.sigmoid(logit + noise / config.temperature)
            fired = soft > config.threshold
        else:
            soft = probability = self._schedule(surprise, state.step)
            fired = probability > 0.5
            if config.variant is Variant.RANDOM_WRITE:
                fired = torch.rand_like(surprise) < config.write_rate
        if force is not None:
            fired = torch.as_tensor(force, dtype=torch.bool, device=z.device).expand_as(fired)
        # Straight-through: the hard decision forward, the soft one's gradient backward.
        gate = fired.to(soft.dtype) + (soft - soft.detach())
        return _Write(probability, soft, fired, gate, surprise, normalised)

    def _schedule(self, like: Tensor, step: int) -> Tensor:
        """Probability of a write that no content decides, [B]."""
        if self.config.variant in ALWAYS_WRITE_VARIANTS:
            return torch.ones_like(like)
        if self.config.variant is Variant.RANDOM_WRITE:
            return torch.full_like(like, self.config.write_rate)
        return torch.full_like(like, float(step % self.config.write_interval == 0))

    def _normalise(self, surprise: Tensor) -> Tensor:
        """Standardise by the running statistics, [B] -> [B]. In training, update them first."""
        if self.training:
            # Momentum 0 makes the first batch set the statistics; no branch, so that a GPU need not wait.
            keep = STATISTICS_MOMENTUM * self.surprise_ready
            first = 1 - self.surprise_ready
            batch_mean = surprise.mean()
            centre = first * batch_mean + (1 - first) * self.surprise_mean
            spread = (surprise - centre).square().mean()
            # A batch that explodes leaves no trace.
            keep = torch.where(torch.isfinite(spread), keep, torch.ones_like(keep))
            new_mean, new_spread = (torch.nan_to_num(x, 0.0, 0.0, 0.0) for x in (batch_mean, spread))
            self.surprise_mean.copy_(keep * self.surprise_mean + (1 - keep) * new_mean)
            self.surprise_variance.copy_(keep * self.surprise_variance + (1 - keep) * new_spread)
            self.surprise_ready.copy_(torch.maximum(self.surprise_ready, (keep < 1).to(keep.dtype)))
        return (surprise - self.surprise_mean) / torch.sqrt(self.surprise_variance + STATISTICS_EPSILON)

    def _read_ungated(self, z: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState, _Write]:
        """The two baselines without fast weights: a GRU that always writes, or nothing at all."""
        hidden = state.hidden
        fired = z.new_zeros(len(z))
        if self.config.variant is Variant.FULL_RECURRENCE:
            hidden = self.cell(z, state.hidden)
            fired = z.new_ones(len(z))
            read = self.to_read(hidden)
        else:
            read = self.to_read(z)
        nothing = z.new_zeros(len(z))
        carried = MemoryState(state.fast_weights, state.previous_read, hidden, state.step + 1)
        return read, carried, _Write(fired, fired, fired > 0.5, fired, nothing, nothing)


def arrays_of(module: MemoryModule) -> Arrays:
    """Return every parameter and buffer as a float32 array of its own, by name."""
    return {
        name: np.array(tensor.detach().cpu().to(torch.float32).numpy())
        for name, tensor in module.state_dict().items()
    }


def export_numpy(module: MemoryModule, path: str | os.PathLike[str]) -> str:
    """Write the module for `NumpyMemory.load` and `load_module`; return its weights_hash.

    Raises UserError when a weight is not finite or the file cannot be written.
    """
    return save_checkpoint(path, module.config, arrays_of(module))


def load_module(path: str | os.PathLike[str]) -> MemoryModule:
    """Read an exported memory back, in evaluation mode. Raises UserError on a bad file."""
    checkpoint = load_checkpoint(path)
    module = MemoryModule(checkpoint.config)
    module.load_state_dict({name: torch.from_numpy(array) for name, array in checkpoint.arrays.items()})
    return module.eval()


def build_untrained(config: MemoryConfig, path: str | os.PathLike[str] | None = None) -> MemoryCheckpoint:
    """Make a memory from the seed alone, for `NumpyMemory.from_checkpoint`. Same configuration, same hash.

    path: also write it there, for `NumpyMemory.load`. Raises UserError when that file cannot be written.
    """
    arrays = arrays_of(MemoryModule(config))
    if path is not None:
        save_checkpoint(path, config, arrays)
    return MemoryCheckpoint(config, arrays, content_hash(config.to_json(), arrays))
