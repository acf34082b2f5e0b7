"""Camera images to network input: what the reference does with TensorFlow, without it.

Source: `resize_image_for_policy`, `center_crop_image` and `PrismaticImageProcessor` of moojink/openvla-oft
@213c5ff. Steps: orientation, JPEG round trip, lanczos3 resize, centre crop, normalisation; `describe_steps`
says them in words. Each step works in the layout and in place where that is fastest, and keeps the float32
operations of the plain formula and their order, so that its bits are those of the plain formula.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

from aura_ros.backbones.openvla_oft.config import ImageConfig
from aura_ros.errors import UserError
from aura_ros.types import FloatArray, ImageArray

JPEG_QUALITY = 95
JPEG_MAX_SIDE = 65500  # libjpeg's JPEG_MAX_DIMENSION
LANCZOS_RADIUS = 3.0
VIEWS = ("true", "raw")
# One row for each tower: DINOv2 uses ImageNet's statistics, SigLIP 0.5.
PIXEL_MEAN = np.array([[0.485, 0.456, 0.406], [0.5, 0.5, 0.5]], np.float32)
PIXEL_STD = np.array([[0.229, 0.224, 0.225], [0.5, 0.5, 0.5]], np.float32)
FLOAT32_ROUNDING = 2.0**-24
BLOCK_COLUMNS = 32  # made by one product; at 256 and 640 columns to 224, 16 and 56 are no faster


def describe_steps(config: ImageConfig) -> str:
    """What `prepare_image` does to the true view before normalisation, in words and in order."""
    if config.blank:
        return "grey, whatever the camera shows"
    steps = [
        "mirror left-right" if config.mirror else "no mirror",
        f"JPEG quality {JPEG_QUALITY} 4:2:0" if config.jpeg else "no JPEG",
        f"lanczos3 resize to {config.size} x {config.size}",
        f"centre crop of {config.crop_area:g} of the area" if config.crop_area != 1.0 else "no crop",
    ]
    return " -> ".join(steps)


def orient(image: ImageArray, mirror: bool, view: str = "true") -> ImageArray:
    """Bring an image to the orientation of training.

    view: "true" for a camera's upright view, "raw" for MuJoCo's bottom-up buffer, whose true view is
    `raw[::-1]`. With `mirror`, raw gives `raw[::-1, ::-1]`, what OpenVLA-OFT was trained on in LIBERO.
    This is the only place that turns or mirrors an image. The result is contiguous.
    """
    if view not in VIEWS:
        raise UserError(f"view '{view}' is unknown; choose one of: {', '.join(VIEWS)}")
    upright = image[::-1] if view == "raw" else image
    if not mirror:
        return np.ascontiguousarray(upright)
    mirrored = np.empty_like(image, order="C")
    for channel in range(image.shape[2]):  # four times faster than NumPy's copy of reversed 3-byte pixels
        mirrored[:, :, channel] = upright[:, ::-1, channel]
    return mirrored


def jpeg_round_trip(image: ImageArray) -> ImageArray:
    """Encode and decode again: the training images went through this. Raises `UserError` as `encode_jpeg` does."""
    return decode_jpeg(encode_jpeg(image))


def encode_jpeg(image: ImageArray) -> bytes:
    """Quality 95 with 4:2:0 chroma, as the reference. Raises `UserError` for a side that JPEG cannot hold."""
    if max(image.shape[:2]) > JPEG_MAX_SIDE:
        raise UserError(
            f"image of {image.shape[0]} x {image.shape[1]} pixels is too large for JPEG; a side may have at most "
            f"{JPEG_MAX_SIDE}: crop or shrink it"
        )
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling=2)
    return buffer.getvalue()


def decode_jpeg(data: bytes) -> ImageArray:
    """Pixels, uint8 [H, W, 3] RGB. Fast DCT and plain chroma upsampling are what TensorFlow's decoder uses: equal bytes.

    Raises `ValueError` for what is no whole JPEG.
    """
    return simplejpeg.decode_jpeg(data, fastdct=True, fastupsample=False)


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


@lru_cache(maxsize=16)
def _lanczos3_taps(source: int, target: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]:
    """The non-zero part of `lanczos3_weights`: source positions and weights, both [target, taps]."""
    weights = lanczos3_weights(source, target)
    used = weights != 0.0
    first = used.argmax(axis=1)
    taps = int((source - used[:, ::-1].argmax(axis=1) - first).max())
    positions = np.minimum(first, source - taps)[:, None] + np.arange(taps)
    return positions, np.take_along_axis(weights, positions, axis=1)


def resize_lanczos3(image: ImageArray, height: int, width: int) -> ImageArray:
    """uint8 [H, W, 3] -> uint8 [height, width, 3], antialiased, rounded and clipped.

    Rows first, then columns: `rint(weights @ (weights @ image))` with two float32 products.
    """
    rows, columns, channels = image.shape
    if (rows, columns) == (height, width):
        return image.copy()  # the weights are the unit matrix
    flat = lanczos3_weights(rows, height) @ image.reshape(rows, columns * channels).astype(np.float32)
    return _resize_columns(flat.reshape(height, columns, channels), width)


def _resize_columns(across: FloatArray, width: int) -> ImageArray:
    """float32 [height, W, 3] -> uint8 [height, width, 3], equal to `rint(np.matmul(weights, across))`.

    `np.matmul` does a thin, mostly zero product per row. Here a block of columns is made for all rows at
    once, from the source columns it needs. The order of a sum may then differ, which matters only to a value
    within float32's error bound of a half: such values are summed in float64, and where even the plain
    product's own error could turn the rounding, its row is made by the plain product.
    """
    height, columns, channels = across.shape
    weights = lanczos3_weights(columns, width)
    positions, taps = _lanczos3_taps(columns, width)
    # A sum of n products differs from the true one by at most this share of the sum of their sizes, in any
    # order (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1); 1.001 covers second order.
    share = 1.001 * taps.shape[1] * FLOAT32_ROUNDING
    largest = float(np.abs(taps).sum(axis=1).max()) * float(max(across.max(), -across.min()))
    sure = 0.5 - 2.0 * share * largest  # two sums, each with its error
    planes = np.ascontiguousarray(across.transpose(0, 2, 1)).reshape(height * channels, columns)
    values = np.empty((height * channels, width), np.float32)
    for left in range(0, width, BLOCK_COLUMNS):
        right = min(left + BLOCK_COLUMNS, width)
        needed = slice(positions[left, 0], positions[right - 1, -1] + 1)
        np.matmul(planes[:, needed], weights[left:right, needed].T, out=values[:, left:right])
    rounded = np.rint(values)
    values -= rounded
    np.abs(values, out=values)
    plane, column = np.divmod(np.flatnonzero(values > sure), width)
    pixels = np.clip(rounded, 0, 255, out=rounded).astype(np.uint8).reshape(height, channels, width)
    resized = np.empty((height, width, channels), np.uint8)
    for channel in range(channels):
        resized[:, :, channel] = pixels[:, channel]
    terms = planes[plane[:, None], positions[column]].astype(np.float64) * taps[column]
    exact = terms.sum(axis=1)
    row, channel_of = np.divmod(plane, channels)
    resized[row, column, channel_of] = np.clip(np.rint(exact), 0, 255)
    to_half = np.abs(exact - np.floor(exact) - 0.5)
    open_rows = np.unique(row[to_half <= share * np.abs(terms).sum(axis=1)])
    resized[open_rows] = np.clip(np.rint(np.matmul(weights, across[open_rows])), 0, 255)
    return resized


def centre_crop(image: ImageArray, area: float) -> ImageArray:
    """Keep the central `area` (0..1] of a uint8 [H, W, 3] image and scale it back to [H, W, 3].

    Bilinear with corners aligned (`tf.image.crop_and_resize`), in float32 and in TensorFlow's order.
    """
    if area == 1.0:
        return image
    height, width, channels = image.shape
    values = image.reshape(height, width * channels).astype(np.float32)
    values *= np.float32(1.0 / 255.0)
    # Columns, then rows. Single numbers of a row are gathered faster than pixels of three.
    low, share = _crop_positions(width, area)
    high = np.minimum(low + 1, width - 1)
    channel = np.arange(channels)
    columns = [(taken[:, None] * channels + channel).ravel() for taken in (low, high)]
    values = _interpolate(values, columns[0], columns[1], share.repeat(channels), axis=1)
    low, share = _crop_positions(height, area)
    values = _interpolate(values, low, np.minimum(low + 1, height - 1), share[:, None], axis=0)
    # saturate_cast of value * 255.5 truncates; this is TensorFlow's float to uint8 rule. It has nothing to
    # saturate: interpolation between numbers in [0, 1] with a share below 1 stays in [0, 1] in float32 too.
    values *= np.float32(255.5)
    return values.astype(np.uint8).reshape(height, width, channels)


def _interpolate(
    values: FloatArray,
    low: npt.NDArray[np.intp],
    high: npt.NDArray[np.intp],
    share: FloatArray,
    axis: int,
) -> FloatArray:
    """`first + (second - first) * share` of the entries at `low` and `high` along `axis`."""
    # Mode "clip" skips the check of the indices, which are inside.
    first = values.take(low, axis, mode="clip")
    result = values.take(high, axis, mode="clip")
    result -= first
    result *= share
    result += first
    return result


@lru_cache(maxsize=16)
def _crop_positions(size: int, area: float) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]:
    if size == 1:
        return np.zeros(1, np.intp), np.zeros(1, np.float32)
    side = np.sqrt(np.float32(area))
    start = (np.float32(1.0) - side) / np.float32(2.0)
    end = start + side
    step = (end - start) * np.float32(size - 1) / np.float32(size - 1)
    positions = (start * np.float32(size - 1) + np.arange(size, dtype=np.float32) * step).astype(np.float32)
    low = np.floor(positions).astype(np.intp)
    return low, (positions - low).astype(np.float32)


def normalise_pixels(image: ImageArray) -> FloatArray:
    """uint8 [H, W, 3] -> float32 [6, H, W]: DINOv2's three channels, then SigLIP's."""
    pixels = np.empty((6, *image.shape[:2]), np.float32)
    _normalise_into(pixels, image)
    return pixels


def _normalise_into(pixels: FloatArray, image: ImageArray) -> None:
    for channel in range(3):  # one at a time: a plane stays in the cache
        plane = image[:, :, channel].astype(np.float32)
        plane /= np.float32(255.0)
        for tower in range(2):
            result = pixels[3 * tower + channel]
            np.subtract(plane, PIXEL_MEAN[tower, channel], out=result)
            result /= PIXEL_STD[tower, channel]


def prepare_image(image: ImageArray, config: ImageConfig, view: str = "true") -> FloatArray:
    """One camera image of any size, uint8 [H, W, 3] RGB -> float32 [6, size, size]."""
    return prepare_images([image], config, view)


def prepare_images(images: Sequence[ImageArray], config: ImageConfig, view: str = "true") -> FloatArray:
    """n camera images of any sizes, uint8 [H, W, 3] RGB -> float32 [6 n, size, size], in their order.

    Equal to the images of `prepare_image` put together, without the copy.
    """
    pixels = np.empty((6 * len(images), config.size, config.size), np.float32)
    if config.blank:
        pixels[:] = 0.0
        return pixels
    for index, image in enumerate(images):
        image = shrink(orient(image, config.mirror, view), config)
        _normalise_into(pixels[6 * index : 6 * index + 6], centre_crop(image, config.crop_area))
    return pixels


def shrink(image: ImageArray, config: ImageConfig, *, was_jpeg: bool = False) -> ImageArray:
    """An oriented image through JPEG to the network's size, before its crop: uint8 [size, size, 3].

    was_jpeg: it comes from one of `encode_jpeg`, and has been through that already.
    """
    if config.jpeg and not was_jpeg:
        image = jpeg_round_trip(image)
    return resize_lanczos3(image, config.size, config.size)
