"""Layers that a memory shares with what it is compared with: plain ones, and the head on what was read."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers of these widths with a ReLU between each two."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class ActionHead(nn.Module):
    """Action-information-bottleneck head (paper section 3.4): read o [B, dv] -> output [B, out_dim].

    z_dim: width of z, which the last layers see beside the code; 0: they do not. The bottleneck is on the read alone:
    what is seen now needs no memory. hidden: width of the last layers; 0 is dv.
    """

    def __init__(self, dv: int, out_dim: int, residual: bool, z_dim: int = 0, hidden: int = 0) -> None:
        super().__init__()
        hidden = hidden or dv
        self.to_mu = nn.Linear(dv, dv)
        self.to_logvar = nn.Linear(dv, dv)
        self.action = mlp(dv + z_dim, hidden, hidden, out_dim)
        self.sees_z = z_dim > 0
        if residual:
            # An untrained residual must leave the base policy's actions as they are, to the bit.
            for parameter in self.action[4].parameters():
                nn.init.zeros_(parameter)

    def forward(self, read: Tensor, z: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return output, mu and logvar. The code is sampled in training and is mu in evaluation.

        z: [B, z_dim], needed by a head that sees it.
        """
        mu, logvar = self.to_mu(read), self.to_logvar(read)
        code = mu
        if self.training:
            code = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)
        if self.sees_z:
            assert z is not None
            code = torch.cat([code, z], dim=-1)
        return self.action(code), mu, logvar
