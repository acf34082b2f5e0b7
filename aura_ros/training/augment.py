"""What a batch of images and numbers goes through in training; without any of it, what inference does. B = batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from aura_ros.backbones.openvla_oft.config import ImageConfig
from aura_ros.backbones.openvla_oft.processing import PIXEL_MEAN, PIXEL_STD


@dataclass(frozen=True)
class Jitter:
    """How much is varied. shift: pixels that the crop moves at most. light: share of contrast and brightness.

    A pixel of the network's image is about half a centimetre of the table; a shift blurs where things are by as much.
    """

    shift: float = 1.0
    light: float = 0.1


STILL = Jitter(shift=0.0, light=0.0)


def prepare_batch(
    images: npt.NDArray[np.uint8], config: ImageConfig, rng: np.random.Generator, jitter: Jitter
) -> Tensor:
    """uint8 [B, cameras, S, S, 3], uncropped -> float32 [B, 6 cameras, S, S], normalised for both towers.

    Each camera is cropped and lit on its own. With `STILL` the crop is inference's, in the middle.
    """
    batch, cameras, size = images.shape[:3]
    if config.blank:
        return torch.zeros(batch, 6 * cameras, size, size)
    count = batch * cameras
    pixels = torch.from_numpy(images).reshape(count, size, size, 3).permute(0, 3, 1, 2).float()
    side = math.sqrt(config.crop_area)
    # In units of grid_sample: the image is 2 wide.
    reach = 2.0 * jitter.shift / (size - 1)
    offsets = torch.from_numpy(rng.uniform(-reach, reach, (count, 1, 1, 2)).astype(np.float32))
    line = torch.linspace(-side, side, size)
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1)[None] + offsets
    pixels = functional.grid_sample(pixels, grid, padding_mode="border", align_corners=True)
    # In place, and each tower's mean and spread as one factor and one summand: it is a sixth of a step's time otherwise.
    if jitter.light:
        factor, level = rng.uniform(-jitter.light, jitter.light, (2, count, 1, 1, 1)).astype(np.float32)
        pixels.mul_(torch.from_numpy(1.0 + factor)).add_(torch.from_numpy(255.0 * level))
    pixels.clamp_(0.0, 255.0)
    both = torch.empty(count, len(PIXEL_MEAN), *pixels.shape[1:])
    for tower, (mean, std) in enumerate(zip(PIXEL_MEAN, PIXEL_STD, strict=True)):
        scale, offset = (torch.from_numpy(values).view(3, 1, 1) for values in (1 / (255 * std), -mean / std))
        torch.mul(pixels, scale, out=both[:, tower]).add_(offset)
    return both.reshape(batch, 6 * cameras, size, size)
