"""Denoising of action chunks: DDIM with the squared cosine schedule, and the step's embedding.

Source: DDIM (Song et al. 2021, eq. 12, eta = 0) with the defaults of diffusers' DDIMScheduler that
moojink/openvla-oft @213c5ff uses: epsilon prediction, "leading" timesteps, the predicted chunk clipped to +-1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from aura_ros.backbones.openvla_oft.config import DIFFUSION_TRAIN_STEPS

MAX_BETA = 0.999


def timesteps(steps: int, train_steps: int = DIFFUSION_TRAIN_STEPS) -> list[int]:
    """The noise levels visited, from the noisiest down to 0."""
    stride = train_steps // steps
    return [index * stride for index in reversed(range(steps))]


def signal_shares(train_steps: int = DIFFUSION_TRAIN_STEPS) -> Tensor:
    """float32 [train_steps]: the share of signal (alpha bar) left at each noise level."""

    def bar(time: float) -> float:
        return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2

    betas = [
        min(1 - bar((step + 1) / train_steps) / bar(step / train_steps), MAX_BETA)
        for step in range(train_steps)
    ]
    return torch.cumprod(1.0 - torch.tensor(betas, dtype=torch.float32), dim=0)


def ddim_step(noise: Tensor, timestep: int, actions: Tensor, steps: int, shares: Tensor) -> Tensor:
    """One step towards less noise. noise: predicted; actions: noisy, same shape. Returns less noisy actions."""
    before = timestep - DIFFUSION_TRAIN_STEPS // steps
    now = shares[timestep]
    # Below the first level nothing is left of the noise.
    then = shares[before] if before >= 0 else torch.tensor(1.0)
    clean = ((actions - (1 - now) ** 0.5 * noise) / now**0.5).clamp(-1.0, 1.0)
    return then**0.5 * clean + (1 - then) ** 0.5 * noise


def step_embedding(timestep: int, width: int) -> Tensor:
    """Sines, then cosines of the noise level, float32 [width]."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half) * -math.log(10000) / (half - 1))
    angles = timestep * frequencies
    return torch.cat([angles.sin(), angles.cos()])
