"""An auxiliary head of training that must say where things are, so that images are read for that; dropped after."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor, nn

from aura_ros.training.demonstrations import KEYPOINT_NAMES
from aura_ros.types import FloatArray


class KeypointHead(nn.Module):
    """Each keypoint as the mean of what every image row says of it, weighted by how sure the row is (soft argmax).

    A row of the hidden states belongs to a patch; in a mean over all rows one patch would count for next to nothing.
    """

    def __init__(self, hidden: int, keypoints: int) -> None:
        super().__init__()
        self.weigh = nn.Linear(hidden, keypoints)
        self.say = nn.Linear(hidden, keypoints * 3)

    def forward(self, rows: Tensor) -> Tensor:
        """Image rows, float [B, R, hidden] -> fp32 [B, keypoints, 3], normalised positions."""
        with torch.autocast(rows.device.type, enabled=False):
            weights = self.weigh(rows.float()).softmax(dim=1)
            said = self.say(rows.float()).unflatten(-1, (-1, 3))
            return torch.einsum("brk,brkc->bkc", weights, said)

    def loss(self, rows: Tensor, points: Tensor) -> Tensor:
        """Mean L1 where `points`, [B, keypoints, 3], are known, of what the instruction is about and of all else alike."""
        found, known = self(rows), torch.isfinite(points)
        middle = len(KEYPOINT_NAMES)
        parts = []
        for part in (slice(None, middle), slice(middle, None)):
            known_part = known[:, part]
            if bool(known_part.any()):
                # Chosen before they are compared: the gradient of what is not known would be NaN, not 0.
                off = found[:, part][known_part] - points[:, part][known_part]
                parts.append(off.abs().mean())
        return torch.stack(parts).mean() if parts else found.new_zeros(())


def normalised_points(points: FloatArray) -> FloatArray:
    """float32 [F, K, 3], m, NaN where unknown -> the same with each column's mean 0 and spread about 1."""
    with warnings.catch_warnings():
        # A column that is known nowhere stays NaN.
        warnings.simplefilter("ignore", RuntimeWarning)
        middle, spread = np.nanmean(points, axis=0), np.nanstd(points, axis=0)
    return ((points - middle) / (spread + 1e-3)).astype(np.float32)
