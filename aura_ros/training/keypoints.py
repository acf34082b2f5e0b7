"""Auxiliary heads of training that must say where things are, so that images are read for that; dropped after."""

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


class Keypoints(nn.Module):
    """What hidden states, and patches before the trunk, must tell of positions.

    late: what the instruction is about, and every named object, from the image rows of the hidden states. early: the named
    objects, from each camera's patches and where the hand is: a short way to the towers, which learn where in a patch things
    are in fewer steps.
    """

    def __init__(self, hidden: int, keypoints: int, cameras: int, proprio_dim: int) -> None:
        super().__init__()
        self.cameras, self.named = cameras, keypoints - len(KEYPOINT_NAMES)
        self.late = KeypointHead(hidden, keypoints)
        heads = cameras if self.named else 0
        self.early = nn.ModuleList(KeypointHead(hidden, self.named) for _ in range(heads))
        # A camera on the hand sees where objects are from there.
        self.hand = nn.ModuleList(
            nn.Linear(proprio_dim, self.named * 3, bias=False) for _ in range(heads if proprio_dim else 0)
        )

    def loss(self, rows: Tensor, patches: Tensor, proprio: Tensor, points: Tensor) -> Tensor:
        """Mean L1 where `points` are known, [B, keypoints, 3], normalised.

        rows, patches: of all cameras' images, [B, cameras x R, hidden]. proprio: normalised, [B, P].
        """
        first = len(KEYPOINT_NAMES)
        late, named = self.late(rows), points[:, first:]
        parts = [_off(late[:, :first], points[:, :first]), _off(late[:, first:], named)]
        for camera, part in enumerate(patches.chunk(self.cameras, dim=1) if self.named else ()):
            early = self.early[camera](part)
            if self.hand:
                early = early + self.hand[camera](proprio).unflatten(-1, (-1, 3))
            parts.append(_off(early, named))
        known = [part for part in parts if part is not None]
        return torch.stack(known).mean() if known else late.new_zeros(())


def _off(found: Tensor, points: Tensor) -> Tensor | None:
    """Mean L1 of the known; None where nothing is."""
    known = torch.isfinite(points)
    # Chosen before they are compared: the gradient of what is not known would be NaN, not 0.
    return (found[known] - points[known]).abs().mean() if bool(known.any()) else None


def normalised_points(points: FloatArray) -> FloatArray:
    """float32 [F, K, 3], m, NaN where unknown -> the same with each column's mean 0 and spread about 1."""
    with warnings.catch_warnings():
        # A column that is known nowhere stays NaN.
        warnings.simplefilter("ignore", RuntimeWarning)
        middle, spread = np.nanmean(points, axis=0), np.nanstd(points, axis=0)
    return ((points - middle) / (spread + 1e-3)).astype(np.float32)
