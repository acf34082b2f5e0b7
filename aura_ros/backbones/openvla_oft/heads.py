"""The small networks around the trunk: projectors of vision, proprioception and noise, and the action heads.

Parameter names are the reference's, so that its checkpoints load by name.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from aura_ros.backbones.openvla_oft.config import ACTION_BINS, PADDED_IDS

HEAD_BLOCKS = 2


class VisionProjector(nn.Module):
    """Patch features to the trunk's width: three layers, GELU between."""

    def __init__(self, vision_dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_dim, 4 * vision_dim)
        self.fc2 = nn.Linear(4 * vision_dim, hidden)
        self.fc3 = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[B, P, vision_dim] -> [B, P, hidden]."""
        x = functional.gelu(self.fc1(x))
        return self.fc3(functional.gelu(self.fc2(x)))


class ProprioProjector(nn.Module):
    """Normalised proprioception to one row of the sequence."""

    def __init__(self, proprio_dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(proprio_dim, hidden)
        self.fc2 = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[B, proprio_dim] -> [B, hidden]."""
        return self.fc2(functional.gelu(self.fc1(x)))


class NoisyActionProjector(nn.Module):
    """Each noisy action value to one row of the sequence (diffusion head)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(1, hidden)
        self.fc2 = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[B, horizon, action_dim] -> [B, horizon x action_dim, hidden]."""
        return self.fc2(functional.gelu(self.fc1(x.flatten(1)[..., None])))


class HeadBlock(nn.Module):
    """x + ReLU(Linear(LayerNorm(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return x + self.ffn(x)


class MlpResNet(nn.Module):
    """LayerNorm, Linear, ReLU, two residual blocks, LayerNorm, Linear."""

    def __init__(self, in_dim: int, width: int, out_dim: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(in_dim)
        self.fc1 = nn.Linear(in_dim, width)
        self.mlp_resnet_blocks = nn.ModuleList(HeadBlock(width) for _ in range(HEAD_BLOCKS))
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, horizon, in_dim] -> [B, horizon, out_dim]."""
        x = functional.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class L1ActionHead(nn.Module):
    """Trunk rows of the action values to normalised actions.

    The rows of one time step are laid side by side, so each step's actions come from action_dim rows.
    """

    def __init__(self, hidden: int, horizon: int, action_dim: int) -> None:
        super().__init__()
        self.horizon = horizon
        self.model = MlpResNet(hidden * action_dim, hidden, action_dim)

    def forward(self, rows: Tensor) -> Tensor:
        """[B, horizon x action_dim, hidden] -> [B, horizon, action_dim]."""
        return self.model(rows.reshape(len(rows), self.horizon, -1))


class NoisePredictor(nn.Module):
    """Holds the network one level deeper, as the reference's parameter names do."""

    def __init__(self, hidden: int, action_dim: int) -> None:
        super().__init__()
        self.mlp_resnet = MlpResNet(hidden * action_dim, hidden, action_dim)


class DiffusionActionHead(nn.Module):
    """Trunk rows of the noisy action values to the noise in them; the same network as the L1 head's."""

    def __init__(self, hidden: int, horizon: int, action_dim: int) -> None:
        super().__init__()
        self.horizon = horizon
        self.noise_predictor = NoisePredictor(hidden, action_dim)

    def forward(self, rows: Tensor) -> Tensor:
        """[B, horizon x action_dim, hidden] -> [B, horizon, action_dim]."""
        return self.noise_predictor.mlp_resnet(rows.reshape(len(rows), self.horizon, -1))


class DiscreteActions(nn.Module):
    """Token logits to normalised actions: the likeliest id of each value, as the centre of its bin.

    Ids count down from the end of the unpadded vocabulary; other ids are clipped into the bins, as the
    reference does.
    """

    def __init__(self, vocab: int, horizon: int, action_dim: int) -> None:
        super().__init__()
        self.last_id = vocab - PADDED_IDS
        self.shape = (horizon, action_dim)
        edges = np.linspace(-1.0, 1.0, ACTION_BINS)
        self.centres = (edges[:-1] + edges[1:]) / 2.0

    def forward(self, logits: Tensor) -> Tensor:
        """[B, horizon x action_dim, vocab] -> float64 [B, horizon, action_dim] on the CPU."""
        bins = (self.last_id - logits.argmax(dim=2) - 1).clamp(0, len(self.centres) - 1)
        return torch.from_numpy(self.centres[bins.cpu().numpy()]).reshape(len(logits), *self.shape)
