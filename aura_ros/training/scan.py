"""A memory over a whole sequence at once: gates by a scan without gradient, then a chunked delta rule with one.

Equal to `MemoryModule.forward` (the naive twin) for every variant with fast weights. Within a chunk the writes are
a triangular system (the WY form of the delta rule, Yang et al. 2024, "Parallelizing linear transformers with the delta
rule over sequence length");
a decay is taken out by working on W divided by the product of decays so far. B = batch, T = steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from aura_ros.memory.config import ALWAYS_WRITE_VARIANTS, GATED_VARIANTS, Variant
from aura_ros.memory.module import NORM_EPSILON, STATISTICS_EPSILON, STATISTICS_MOMENTUM, MemoryModule
from aura_ros.training.scan_numpy import scan_gates_numpy

CHUNK = 128
# Natural logarithm of the largest decay within a chunk.
MOST_DECAY = 46.0


@dataclass(frozen=True)
class Sequence:
    """What a memory did over [B, T] steps.

    encoded: z, [B, T, d_model]. reads: o, [B, T, dv]. soft: the gate's probability (noise included), with
    gradient. gate: the hard decision with the soft one's gradient. fired: bool. surprise: normalised.
    fast_weights: W at the end, [B, dk, dv].
    """

    encoded: Tensor
    reads: Tensor
    soft: Tensor
    gate: Tensor
    fired: Tensor
    surprise: Tensor
    fast_weights: Tensor


def run_sequence(
    module: MemoryModule,
    inputs: Tensor,
    *,
    noise: Tensor | None = None,
    force: Tensor | None = None,
    chunk: int = CHUNK,
) -> Sequence:
    """Run a memory from its empty state over `inputs`, [B, T, input_dim].

    noise: added to the gate's logits before the temperature, [B, T]. force: bool [B, T], decisions in place of
    the gate's, whose gradient stays. In training the running surprise statistics are updated, once a step.
    """
    config = module.config
    z = module.encoder(inputs)
    q, k, v = module.to_q(z), module.to_k(z), module.to_v(z)
    if config.normalise_keys:
        q = functional.normalize(q, dim=-1, eps=NORM_EPSILON)
        k = functional.normalize(k, dim=-1, eps=NORM_EPSILON)
    if config.variant in GATED_VARIANTS:
        fired, previous, surprise = _scan(module, z, q, k, v, noise, force)
        seen = torch.cat([z, previous, surprise[..., None]], dim=-1)
        logit = module.gate(seen).squeeze(-1)
        soft = torch.sigmoid((logit if noise is None else logit + noise) / config.temperature)
        gate = fired.to(soft.dtype) + (soft - soft.detach())
    else:
        fired = scheduled(module, z, force)
        gate = soft = fired.to(z.dtype)
        surprise = torch.zeros_like(soft)
    reads, weights = delta_rule(q, k, v, gate, module.eta, module.alpha, chunk)
    return Sequence(z, reads, soft, gate, fired, surprise, weights)


def run_stepwise(
    module: MemoryModule, inputs: Tensor, *, noise: Tensor | None = None, force: Tensor | None = None
) -> Sequence:
    """The naive twin of `run_sequence`: one step after the other, exact backpropagation through time."""
    z = module.encoder(inputs)
    state = module.initial_state(len(inputs))
    if module.config.variant not in GATED_VARIANTS:
        force = scheduled(module, z, force)
    reads, writes = [], []
    for t in range(inputs.shape[1]):
        read, state, write = module.read_gate_write(
            z[:, t],
            state,
            None if force is None else force[:, t],
            None if noise is None else noise[:, t],
        )
        reads.append(read)
        writes.append(write)

    def stack(name: str) -> Tensor:
        return torch.stack([getattr(write, name) for write in writes], dim=1)

    return Sequence(
        z,
        torch.stack(reads, dim=1),
        stack("soft"),
        stack("gate"),
        stack("fired"),
        stack("surprise_normalised"),
        state.fast_weights,
    )


def ungated(module: MemoryModule, inputs: Tensor) -> Sequence:
    """The two baselines without fast weights: a GRU, which writes its state at every step, or the observation alone."""
    z = module.encoder(inputs)
    batch, steps = z.shape[:2]
    writes = module.config.variant is Variant.FULL_RECURRENCE
    if writes:
        hidden, states = module.initial_state(batch).hidden, []
        for t in range(steps):
            hidden = module.cell(z[:, t], hidden)
            states.append(hidden)
        reads = module.to_read(torch.stack(states, dim=1))
    else:
        reads = module.to_read(z)
    gate = z.new_full((batch, steps), float(writes))
    nothing = z.new_zeros(batch, steps)
    return Sequence(z, reads, gate, gate, gate > 0, nothing, z.new_zeros(batch, 0, 0))


def scheduled(module: MemoryModule, like: Tensor, force: Tensor | None = None) -> Tensor:
    """The writes of a variant whose gate no content decides, bool [B, T]."""
    config, (batch, steps) = module.config, like.shape[:2]
    if force is not None:
        return force
    if config.variant in ALWAYS_WRITE_VARIANTS:
        return torch.ones(batch, steps, dtype=torch.bool)
    if config.variant is Variant.RANDOM_WRITE:
        return torch.rand(batch, steps) < config.write_rate
    return (torch.arange(steps) % config.write_interval == 0).expand(batch, steps)


def _scan(
    module: MemoryModule,
    z: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    noise: Tensor | None,
    force: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`scan_gates` where the tensors are; on a CPU in NumPy, which shares their memory."""
    if z.device.type != "cpu":
        return scan_gates(module, z, q, k, v, noise, force)
    arrays = (x.detach().numpy() for x in (z, q, k, v))
    fired, previous, surprise = scan_gates_numpy(
        module, *arrays, *(None if x is None else x.numpy() for x in (noise, force))
    )
    return torch.from_numpy(fired), torch.from_numpy(previous), torch.from_numpy(surprise)


@torch.no_grad()
def scan_gates(
    module: MemoryModule,
    z: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    noise: Tensor | None = None,
    force: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Step by step without gradient: decisions bool [B, T], reads of the step before [B, T, dv], surprise [B, T]."""
    config, (batch, steps, _) = module.config, z.shape
    weight, width = module.gate.get_parameter("0.weight"), config.d_model
    from_z = functional.linear(z, weight[:, :width], module.gate.get_parameter("0.bias"))
    from_read, from_surprise = weight[:, width:-1].T.contiguous(), weight[:, -1]
    last_weight, last_bias = module.gate.get_parameter("2.weight")[0], module.gate.get_parameter("2.bias")
    eta2, alpha = 2 * module.eta, module.alpha
    qk = torch.stack([q, k], dim=2)
    weights = z.new_zeros(batch, config.dk, config.dv)
    read = z.new_zeros(batch, config.dv)
    fired = torch.zeros(batch, steps, dtype=torch.bool)
    previous, surprises = z.new_zeros(batch, steps, config.dv), z.new_zeros(batch, steps)
    limit = config.threshold
    for t in range(steps):
        both = torch.bmm(qk[:, t], weights)
        error = both[:, 1] - v[:, t]
        surprise = normalised(module, error.square().sum(-1))
        hidden = from_z[:, t] + read @ from_read + surprise[:, None] * from_surprise
        logit = hidden.relu_() @ last_weight + last_bias
        if noise is not None:
            logit = logit + noise[:, t]
        on = torch.sigmoid(logit / config.temperature) > limit
        if force is not None:
            on = force[:, t]
        previous[:, t], surprises[:, t], fired[:, t] = read, surprise, on
        scale = on.to(z.dtype)[:, None, None]
        weights = weights * (1 - alpha * scale)
        weights = torch.baddbmm(weights, (-eta2 * scale) * k[:, t, :, None], error[:, None])
        read = both[:, 0]
    return fired, previous, surprises


def normalised(module: MemoryModule, surprise: Tensor) -> Tensor:
    """As `MemoryModule._normalise`, in training updating the running statistics in place."""
    if module.training:
        keep = STATISTICS_MOMENTUM if float(module.surprise_ready) else 0.0
        mean = surprise.mean()
        centre = module.surprise_mean if keep else mean
        spread = (surprise - centre).square().mean()
        if torch.isfinite(spread):
            module.surprise_mean.mul_(keep).add_((1 - keep) * mean)
            module.surprise_variance.mul_(keep).add_((1 - keep) * spread)
            module.surprise_ready.fill_(1.0)
    return (surprise - module.surprise_mean) / torch.sqrt(module.surprise_variance + STATISTICS_EPSILON)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, eta: Tensor, alpha: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Reads before each write, [B, T, dv], and W after the last, [B, dk, dv], from an empty W.

    W_t = (1 - g_t alpha) W_{t-1} - 2 eta g_t k_t (k_t^T W_{t-1} - v_t), read o_t = q_t^T W_{t-1}; differentiable
    in all arguments, the gate included.
    """
    batch, steps, dk = k.shape
    weights = k.new_zeros(batch, dk, v.shape[-1])
    reads = []
    # What decays over a chunk is divided by again: it must not come near the smallest float32.
    fastest = -math.log1p(-min(float(alpha.detach()), 1 - 1e-6))
    chunk = max(1, min(chunk, int(MOST_DECAY / max(fastest, 1e-9))))
    for start in range(0, steps, chunk):
        part = slice(start, start + chunk)
        read, weights = _chunk(q[:, part], k[:, part], v[:, part], gate[:, part], eta, alpha, weights)
        reads.append(read)
    return (reads[0] if len(reads) == 1 else torch.cat(reads, dim=1)), weights


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, eta: Tensor, alpha: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    keep = 1 - gate * alpha
    decay = torch.cumprod(keep, dim=1)
    # The product of decays before each step: U = W / decay needs none of its own.
    before = torch.cat([torch.ones_like(decay[:, :1]), decay[:, :-1]], dim=1)[..., None]
    strength = 2 * eta * gate / keep
    overlap = torch.tril(k @ k.transpose(1, 2), -1) * strength[:, None, :]
    error = torch.linalg.solve_triangular(overlap, k @ weights - v / before, upper=False, unitriangular=True)
    written = strength[..., None] * error
    read = before * (q @ weights - torch.tril(q @ k.transpose(1, 2), -1) @ written)
    return read, decay[:, -1, None, None] * (weights - k.transpose(1, 2) @ written)
