"""Auxiliary heads of training that must say where things are, so that images are read for that; dropped after."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from aura_ros.training.demonstrations import KEYPOINT_NAMES, LIT
from aura_ros.types import FloatArray

# Of the cross-entropy of what is lit, beside the mean L1 of positions.
LIT_WEIGHT = 0.2


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
    are in fewer steps. pooled: the named objects, and which of them is lit, from the one vector that a memory is given: what
    it does not hold no memory can keep.
    """

    def __init__(self, hidden: int, keypoints: int, cameras: int, proprio_dim: int) -> None:
        super().__init__()
        self.cameras, self.named = cameras, keypoints - len(KEYPOINT_NAMES)
        self.late = KeypointHead(hidden, keypoints)
        # One more than there are is none.
        self.where = nn.Linear(hidden, max(self.named, 1) * 3)
        self.lit = nn.Linear(hidden, self.named + 1)
        heads = cameras if self.named else 0
        self.early = nn.ModuleList(KeypointHead(hidden, self.named) for _ in range(heads))
        # A camera on the hand sees where objects are from there.
        self.hand = nn.ModuleList(
            nn.Linear(proprio_dim, self.named * 3, bias=False) for _ in range(heads if proprio_dim else 0)
        )

    def loss(
        self, rows: Tensor, patches: Tensor, pooled: Tensor, proprio: Tensor, points: Tensor, lit: Tensor
    ) -> Tensor:
        """Mean L1 where `points` are known, [B, keypoints, 3], normalised, and the cross-entropy of what is lit.

        rows, patches: of all cameras' images, [B, cameras x R, hidden]. pooled: [B, hidden]. proprio: normalised, [B, P].
        lit: int64 [B], as `lit_objects` gives it.
        """
        first = len(KEYPOINT_NAMES)
        late, named = self.late(rows), points[:, first:]
        parts = [_off(late[:, :first], points[:, :first]), _off(late[:, first:], named)]
        if self.named:
            parts.append(_off(self.where(pooled).unflatten(-1, (-1, 3)), named))
        for camera, part in enumerate(patches.chunk(self.cameras, dim=1) if self.named else ()):
            early = self.early[camera](part)
            if self.hand:
                early = early + self.hand[camera](proprio).unflatten(-1, (-1, 3))
            parts.append(_off(early, named))
        known = [part for part in parts if part is not None]
        loss = torch.stack(known).mean() if known else late.new_zeros(())
        return loss + LIT_WEIGHT * functional.cross_entropy(self.lit(pooled), lit)


def _off(found: Tensor, points: Tensor) -> Tensor | None:
    """Mean L1 of the known; None where nothing is."""
    known = torch.isfinite(points)
    # Chosen before they are compared: the gradient of what is not known would be NaN, not 0.
    return (found[known] - points[known]).abs().mean() if bool(known.any()) else None


def lit_objects(points: FloatArray, names: Sequence[str]) -> npt.NDArray[np.int64]:
    """Which named keypoint lies where the lit one does, int64 [F]; as many as there are where none is lit.

    points: float32 [F, K, 3], m; names: K.
    """
    first = len(KEYPOINT_NAMES)
    none = len(names) - first
    if LIT not in names:
        return np.full(len(points), none, np.int64)
    at = list(names).index(LIT)
    off = np.abs(points[:, first:] - points[:, at, None]).sum(-1)
    # NaN where nothing is lit, or the object is not known.
    off[:, at - first] = np.inf
    off = np.where(np.isnan(off), np.inf, off)
    return np.where(off.min(axis=1) == 0.0, off.argmin(axis=1), none)


def normalised_points(points: FloatArray) -> FloatArray:
    """float32 [F, K, 3], m, NaN where unknown -> the same with each column's mean 0 and spread about 1."""
    with warnings.catch_warnings():
        # A column that is known nowhere stays NaN.
        warnings.simplefilter("ignore", RuntimeWarning)
        middle, spread = np.nanmean(points, axis=0), np.nanstd(points, axis=0)
    return ((points - middle) / (spread + 1e-3)).astype(np.float32)
