"""The small networks around the trunk: vision projector, proprioception projector, L1 action head.

Parameter names are the reference's, so that its checkpoints load by name.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

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
