"""Camera images to network input: what the reference does with TensorFlow, without it.

Source: `resize_image_for_policy`, `center_crop_image` and `PrismaticImageProcessor` of moojink/openvla-oft
@213c5ff. Steps: orientation, JPEG round trip, lanczos3 resize, centre crop, normalisation.
"""

from __future__ import annotations

import io
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

from aura_ros.backbones.openvla_oft.config import ImageConfig
from aura_ros.errors import UserError
from aura_ros.types import FloatArray, ImageArray

JPEG_QUALITY = 95
LANCZOS_RADIUS = 3.0
VIEWS = ("true", "raw")
# One row for each tower: DINOv2 uses ImageNet's statistics, SigLIP 0.5.
PIXEL_MEAN = np.array([[0.485, 0.456, 0.406], [0.5, 0.5, 0.5]], np.float32)
PIXEL_STD = np.array([[0.229, 0.224, 0.225], [0.5, 0.5, 0.5]], np.float32)


def orient(image: ImageArray, mirror: bool, view: str = "true") -> ImageArray:
    """Bring an image to the orientation of training.

    view: "true" for a camera's upright view, "raw" for MuJoCo's bottom-up buffer, whose true view is
    `raw[::-1]`. With `mirror`, raw gives `raw[::-1, ::-1]`, what OpenVLA-OFT was trained on in LIBERO.
    """
    if view not in VIEWS:
        raise UserError(f"view '{view}' is unknown; choose one of: {', '.join(VIEWS)}")
    upright = image[::-1] if view == "raw" else image
    return np.ascontiguousarray(upright[:, ::-1] if mirror else upright)


def jpeg_round_trip(image: ImageArray) -> ImageArray:
    """Encode at quality 95 with 4:2:0 chroma and decode again: the training images went through this.

    Fast DCT and plain chroma upsampling are what TensorFlow's decoder uses; with them the bytes are equal.
    """
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling=2)
    return simplejpeg.decode_jpeg(buffer.getvalue(), fastdct=True, fastupsample=False)


@lru_cache(maxsize=16)
def lanczos3_weights(source: int, target: int) -> npt.NDArray[np.float32]:
    """Resampling matrix float32 [target, source] of `tf.image.resize(method="lanczos3", antialias=True)`.

    The kernel is stretched by source / target when shrinking. Pillow's LANCZOS quantises its weights and
    differs by up to 20 grey levels.
    """
    step = source / target
    stretch = max(step, 1.0)
    centres = (np.arange(target) + 0.5) * step
    offset = np.abs(np.arange(source)[None] + 0.5 - centres[:, None]) / stretch
    weights = np.where(offset < LANCZOS_RADIUS, np.sinc(offset) * np.sinc(offset / LANCZOS_RADIUS), 0.0)
    matrix = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    matrix.setflags(write=False)
    return matrix


def resize_lanczos3(image: ImageArray, height: int, width: int) -> ImageArray:
    """uint8 [H, W, 3] -> uint8 [height, width, 3], antialiased, rounded and clipped."""
    rows, columns, channels = image.shape
    flat = lanczos3_weights(rows, height) @ image.reshape(rows, columns * channels).astype(np.float32)
    across = flat.reshape(height, columns, channels)
    resized = np.matmul(lanczos3_weights(columns, width), across)
    return np.clip(np.rint(resized), 0, 255).astype(np.uint8)


def centre_crop(image: ImageArray, area: float) -> ImageArray:
    """Keep the central `area` (0..1] of a uint8 [H, W, 3] image and scale it back to [H, W, 3].

    Bilinear with corners aligned (`tf.image.crop_and_resize`), in float32 and in TensorFlow's order.
    """
    if area == 1.0:
        return image
    values = image.astype(np.float32) * np.float32(1.0 / 255.0)
    for axis in (1, 0):
        size = image.shape[axis]
        low, share = _crop_positions(size, area)
        share = share[:, None] if axis == 1 else share[:, None, None]
        high = np.minimum(low + 1, size - 1)
        first, second = values.take(low, axis), values.take(high, axis)
        values = first + (second - first) * share
    # saturate_cast of value * 255.5 truncates; this is TensorFlow's float to uint8 rule.
    return (np.clip(values, 0.0, 1.0) * np.float32(255.5)).clip(0, 255).astype(np.uint8)


@lru_cache(maxsize=16)
def _crop_positions(size: int, area: float) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]:
    side = np.sqrt(np.float32(area))
    start = (np.float32(1.0) - side) / np.float32(2.0)
    end = start + side
    step = (end - start) * np.float32(size - 1) / np.float32(size - 1)
    positions = (start * np.float32(size - 1) + np.arange(size, dtype=np.float32) * step).astype(np.float32)
    low = np.floor(positions).astype(np.intp)
    return low, (positions - low).astype(np.float32)


def normalise_pixels(image: ImageArray) -> FloatArray:
    """uint8 [H, W, 3] -> float32 [6, H, W]: DINOv2's three channels, then SigLIP's."""
    channels = image.transpose(2, 0, 1).astype(np.float32) / np.float32(255.0)
    both = (channels[None] - PIXEL_MEAN[:, :, None, None]) / PIXEL_STD[:, :, None, None]
    return both.reshape(6, *image.shape[:2])


def prepare_image(image: ImageArray, config: ImageConfig, view: str = "true") -> FloatArray:
    """One camera image of any size, uint8 [H, W, 3] RGB -> float32 [6, size, size]."""
    image = orient(image, config.mirror, view)
    if config.jpeg:
        image = jpeg_round_trip(image)
    image = resize_lanczos3(image, config.size, config.size)
    return normalise_pixels(centre_crop(image, config.crop_area))
