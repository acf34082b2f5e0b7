"""What a memory is trained for: answers on query steps, a narrow code, few writes (paper section 3.4), and when.

Two ways of asking for few writes: the paper's, which may collapse to never writing, and one that acts only once the
task is learned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from aura_ros.training.settings import ObjectiveConfig


@dataclass(frozen=True)
class Loss:
    """total has the gradient; the rest are plain numbers: cross-entropy, KL, penalty (weighted), hard write rate."""

    total: Tensor
    cross_entropy: float
    kl: float
    penalty: float
    write_rate: float


class Objective:
    """The loss of one batch; keeps the running cross-entropy."""

    MOMENTUM = 0.95

    def __init__(self, config: ObjectiveConfig, steps: int) -> None:
        self.config, self.steps = config, steps
        self.running_ce = math.inf

    def __call__(
        self,
        step: int,
        logits: Tensor,
        targets: Tensor,
        mu: Tensor,
        logvar: Tensor,
        soft: Tensor,
        gate: Tensor,
    ) -> Loss:
        """logits [M, classes], mu and logvar [M, dv] of the M query steps; soft and gate [B, T]."""
        c = self.config
        cross_entropy = functional.cross_entropy(logits, targets)
        kl = 0.5 * (mu.square() + logvar.exp() - 1 - logvar).sum(-1).mean()
        ce = float(cross_entropy.detach())
        if math.isinf(self.running_ce):
            self.running_ce = ce if math.isfinite(ce) else math.inf
        elif math.isfinite(ce):
            self.running_ce = self.MOMENTUM * self.running_ce + (1 - self.MOMENTUM) * ce
        gamma = c.gamma * min(1.0, (step + 1) / max(c.ramp * self.steps, 1e-9))
        if c.kind == "paper":
            penalty = gamma * functional.relu(soft.mean() - c.rho).square()
        else:
            learned = min(max((c.ce_high - self.running_ce) / (c.ce_high - c.ce_low), 0.0), 1.0)
            excess = functional.relu(gate.mean() - c.rho)
            penalty = gamma * learned * (excess.square() if c.squared else excess)
        total = cross_entropy + c.beta * kl + penalty
        return Loss(total, ce, float(kl.detach()), float(penalty.detach()), float(gate.detach().mean()))


def learning_rate(step: int, steps: int, peak: float, warmup: int, floor: float) -> float:
    """Linear warm-up, then constant, then over the second half down to `floor` x peak, linearly."""
    if step < warmup:
        return peak * (step + 1) / warmup
    half = steps / 2
    if step < half:
        return peak
    return peak * (1 - (1 - floor) * (step - half) / max(steps - half, 1))
