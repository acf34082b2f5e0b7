"""The image pipeline against its plain formulas, bit for bit; both input paths; odd images."""

from __future__ import annotations

import io

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from aura_ros.backbones.openvla_oft import processing
from aura_ros.backbones.openvla_oft.config import ImageConfig
from aura_ros.backbones.openvla_oft.processing import (
    PIXEL_MEAN,
    PIXEL_STD,
    centre_crop,
    describe_steps,
    jpeg_round_trip,
    lanczos3_weights,
    normalise_pixels,
    orient,
    prepare_image,
    prepare_images,
    resize_lanczos3,
)
from aura_ros.errors import UserError

LIBERO = ImageConfig(size=224, mirror=True)
CAMERAS = [(256, 256), (224, 224), (480, 640), (128, 128), (223, 225)]
EDGES = [(1, 1), (1, 2), (2, 1), (1, 300), (257, 1), (3, 500), (500, 3), (7, 9)]


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def black_and_white(height: int, width: int, seed: int = 0) -> np.ndarray:
    """The hardest steps: overshoot below 0 and above 255."""
    return np.where(noise(height, width, seed) > 127, 255, 0).astype(np.uint8)


def waves(height: int, width: int, seed: int = 0) -> np.ndarray:
    y, x = np.mgrid[0:height, 0:width]
    values = [127 + 120 * np.sin(x / (5 + 7 * c) + y / (11 + c) + seed) for c in range(3)]
    return np.stack(values, axis=-1).astype(np.uint8)


def stripes(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Neighbouring grey levels in turn: at half the size every mean is a half, where rounding is decided."""
    columns = 100 + seed % 50 + np.arange(width) % 2
    return np.broadcast_to(columns[None, :, None], (height, width, 3)).astype(np.uint8)


def naive_resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    rows, columns, channels = image.shape
    flat = lanczos3_weights(rows, height) @ image.reshape(rows, columns * channels).astype(np.float32)
    resized = np.matmul(lanczos3_weights(columns, width), flat.reshape(height, columns, channels))
    return np.clip(np.rint(resized), 0, 255).astype(np.uint8)


def naive_crop(image: np.ndarray, area: float) -> np.ndarray:
    if area == 1.0:
        return image
    values = image.astype(np.float32) * np.float32(1.0 / 255.0)
    side = np.sqrt(np.float32(area))
    start = (np.float32(1.0) - side) / np.float32(2.0)
    for axis in (1, 0):
        size = image.shape[axis]
        last = np.float32(size - 1)
        step = ((start + side) - start) * last / last
        positions = (start * last + np.arange(size, dtype=np.float32) * step).astype(np.float32)
        low = np.floor(positions).astype(np.intp)
        high = np.minimum(low + 1, size - 1)
        share = (positions - low).astype(np.float32)
        share = share[:, None] if axis == 1 else share[:, None, None]
        first, second = values.take(low, axis), values.take(high, axis)
        values = first + (second - first) * share
    return (np.clip(values, 0.0, 1.0) * np.float32(255.5)).clip(0, 255).astype(np.uint8)


def naive_normalise(image: np.ndarray) -> np.ndarray:
    channels = image.transpose(2, 0, 1).astype(np.float32) / np.float32(255.0)
    both = (channels[None] - PIXEL_MEAN[:, :, None, None]) / PIXEL_STD[:, :, None, None]
    return both.reshape(6, *image.shape[:2])


def naive_jpeg(image: np.ndarray) -> np.ndarray:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=95, subsampling=2)
    return simplejpeg.decode_jpeg(buffer.getvalue(), fastdct=True, fastupsample=False)


def after_orientation(image: np.ndarray, config: ImageConfig) -> np.ndarray:
    """The plain pipeline on an image that is already as in training."""
    image = np.ascontiguousarray(image)
    image = naive_jpeg(image) if config.jpeg else image
    return naive_normalise(naive_crop(naive_resize(image, config.size, config.size), config.crop_area))


def assert_same_bits(ours: np.ndarray, naive: np.ndarray) -> None:
    assert (ours.dtype, ours.shape) == (naive.dtype, naive.shape)
    differing = int((ours != naive).sum())
    assert ours.tobytes() == naive.tobytes(), f"{differing} of {ours.size} values differ"


# The optimised steps against the plain formulas.


@pytest.mark.parametrize("make", [noise, black_and_white, waves, stripes])
@pytest.mark.parametrize("shape", CAMERAS + EDGES)
def test_the_blocked_resize_has_the_bits_of_the_two_plain_products(make, shape):
    for seed in range(2):
        image = make(*shape, seed)
        assert_same_bits(resize_lanczos3(image, 224, 224), naive_resize(image, 224, 224))
        assert_same_bits(resize_lanczos3(image, 37, 50), naive_resize(image, 37, 50))


@pytest.mark.parametrize("seed", range(30))
def test_the_resize_has_the_plain_bits_between_random_sizes(seed):
    rng = np.random.default_rng(100 + seed)
    rows, columns = rng.integers(1, 400, 2)
    height, width = rng.integers(1, 300, 2)
    image = (noise, black_and_white, waves)[seed % 3](rows, columns, seed)
    assert_same_bits(resize_lanczos3(image, height, width), naive_resize(image, height, width))


@pytest.mark.parametrize("seed", [0, 1, 28, 49])
def test_values_at_a_half_round_as_in_the_plain_products(seed):
    # Each mean of two stripes is x.5 but for float32's rounding, so no value is left to luck.
    image = stripes(448, 448, seed)
    flat = (lanczos3_weights(448, 224) @ image.reshape(448, -1).astype(np.float32)).reshape(224, 448, 3)
    plain = np.matmul(lanczos3_weights(448, 224), flat)
    assert (np.abs(plain - np.floor(plain) - 0.5) < 1e-4).mean() > 0.9
    assert_same_bits(resize_lanczos3(image, 224, 224), naive_resize(image, 224, 224))


def test_a_last_bit_error_of_the_blocked_product_does_not_reach_the_pixels(monkeypatch):
    # Stand in for another BLAS: every sum of the blocks is off by two units in the last place, either way.
    image = noise(256, 256, 5)
    expected = naive_resize(image, 224, 224)
    signs = np.random.default_rng(6).choice(np.array([-1.0, 1.0], np.float32), (672, 224))
    plain_product = np.matmul

    def shaken(first, second, out=None):
        result = plain_product(first, second, out=out)
        if out is not None:
            out += 2 * signs[:, : out.shape[1]] * np.spacing(out)
        return result

    monkeypatch.setattr(processing.np, "matmul", shaken)
    assert_same_bits(resize_lanczos3(image, 224, 224), expected)


@pytest.mark.parametrize("area", [0.9, 0.5, 0.01, 0.999999])
@pytest.mark.parametrize("make", [noise, black_and_white])
@pytest.mark.parametrize("shape", [(224, 224), (2, 2), (2, 9), (112, 80)])
def test_the_in_place_crop_has_the_plain_bits(shape, make, area):
    image = make(*shape)
    assert_same_bits(centre_crop(image, area), naive_crop(image, area))


def test_normalisation_by_planes_has_the_plain_bits_for_every_grey_level():
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)
    for image in (levels, noise(31, 17), noise(20, 30)[::-1, ::2]):
        assert_same_bits(normalise_pixels(image), naive_normalise(image))


@pytest.mark.parametrize("view", ["true", "raw"])
@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("shape", CAMERAS + EDGES)
def test_the_whole_pipeline_has_the_plain_bits(shape, mirror, view):
    config = ImageConfig(size=224, mirror=mirror)
    image = noise(*shape, seed=3)
    turned = image[::-1] if view == "raw" else image
    turned = turned[:, ::-1] if mirror else turned
    assert_same_bits(prepare_image(image, config, view), after_orientation(turned, config))


@pytest.mark.parametrize(
    "config", [ImageConfig(2), ImageConfig(64, jpeg=False), ImageConfig(33, crop_area=1.0)]
)
def test_other_configs_have_the_plain_bits(config):
    image = waves(61, 87)
    assert_same_bits(prepare_image(image, config), after_orientation(image, config))


def test_images_prepared_together_equal_the_images_prepared_alone():
    images = [noise(256, 256, 1), waves(48, 64), noise(1, 1, 2)]
    alone = [prepare_image(image, LIBERO, "raw") for image in images]
    assert_same_bits(prepare_images(images, LIBERO, "raw"), np.concatenate(alone))


# Orientation.


@pytest.mark.parametrize("shape", [(256, 256), (48, 64), (3, 500), (1, 1)])
def test_simulator_buffer_and_camera_topic_give_the_reference_pixels(shape):
    raw = noise(*shape, seed=7)
    reference = after_orientation(raw[::-1, ::-1], LIBERO)  # get_libero_image, then the reference's pipeline
    camera_topic = np.ascontiguousarray(raw[::-1])
    assert_same_bits(prepare_image(raw, LIBERO, "raw"), reference)
    assert_same_bits(prepare_image(camera_topic, LIBERO), reference)


def test_only_the_frame_turned_once_equals_the_reference():
    raw = waves(64, 80)
    reference = after_orientation(raw[::-1, ::-1], LIBERO)
    unturned = ImageConfig(size=224)
    turned_once = orient(raw, True, "raw")
    turned_twice = orient(turned_once, True, "raw")
    for frame, equal in ((raw, False), (turned_once, True), (turned_twice, False)):
        assert np.array_equal(prepare_image(frame, unturned), reference) is equal
    # Neither half of the turn is enough, and a frame turned by its sender must not be turned again.
    assert not np.array_equal(prepare_image(raw, unturned, "raw"), reference)
    assert not np.array_equal(prepare_image(raw, LIBERO), reference)
    assert not np.array_equal(prepare_image(turned_once, LIBERO, "raw"), reference)


def test_orient_is_the_one_place_that_turns_an_image(monkeypatch):
    calls = []

    def leave(image, mirror, view="true"):
        calls.append((mirror, view))
        return image

    raw = waves(64, 80)
    monkeypatch.setattr(processing, "orient", leave)
    assert_same_bits(prepare_image(raw, LIBERO, "raw"), after_orientation(raw, LIBERO))
    assert calls == [(True, "raw")]


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("view", ["true", "raw"])
def test_orient_moves_pixels_whole_and_leaves_its_input(mirror, view):
    image = noise(5, 7)
    before = image.copy()
    oriented = orient(image, mirror, view)
    assert oriented.flags.c_contiguous
    expected = before[:: -1 if view == "raw" else 1, :: -1 if mirror else 1]
    np.testing.assert_array_equal(oriented, expected)
    np.testing.assert_array_equal(image, before)


def test_the_steps_are_told_in_words_and_in_order():
    assert describe_steps(LIBERO) == (
        "mirror left-right -> JPEG quality 95 4:2:0 -> lanczos3 resize to 224 x 224 -> "
        "centre crop of 0.9 of the area"
    )
    assert describe_steps(ImageConfig(size=112, jpeg=False, crop_area=1.0)) == (
        "no mirror -> no JPEG -> lanczos3 resize to 112 x 112 -> no crop"
    )


def test_the_steps_run_in_the_order_they_are_told(monkeypatch):
    ran = []
    for name in ("orient", "jpeg_round_trip", "resize_lanczos3", "centre_crop"):
        step = getattr(processing, name)

        def record(*arguments, name=name, step=step):
            ran.append(name)
            return step(*arguments)

        monkeypatch.setattr(processing, name, record)
    prepare_image(noise(20, 30), LIBERO)
    assert ran == ["orient", "jpeg_round_trip", "resize_lanczos3", "centre_crop"]
    words = describe_steps(LIBERO).split(" -> ")
    assert [word.split()[0] for word in words] == ["mirror", "JPEG", "lanczos3", "centre"]


# Odd images.


def strided(image: np.ndarray) -> np.ndarray:
    wide = np.zeros((2 * image.shape[0], 3 * image.shape[1], 3), np.uint8)
    wide[::2, ::3] = image
    return wide[::2, ::3]


def reversed_channels(image: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(image[:, :, ::-1])[:, :, ::-1]


def read_only(image: np.ndarray) -> np.ndarray:
    image = image.copy()
    image.setflags(write=False)
    return image


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("layout", [strided, reversed_channels, read_only, np.asfortranarray])
def test_the_memory_layout_of_an_image_does_not_matter(layout, mirror):
    config = ImageConfig(size=56, mirror=mirror)
    image = noise(60, 70)
    for view in ("true", "raw"):
        assert_same_bits(prepare_image(layout(image), config, view), prepare_image(image, config, view))


@pytest.mark.parametrize(
    "config", [LIBERO, ImageConfig(size=2, jpeg=False), ImageConfig(size=224, jpeg=False)]
)
@pytest.mark.parametrize("shape", EDGES)
def test_every_small_shape_gives_finite_pixels_and_keeps_the_image(shape, config):
    image = noise(*shape)
    before = image.copy()
    pixels = prepare_image(image, config)
    assert pixels.shape == (6, config.size, config.size)
    assert np.isfinite(pixels).all()
    np.testing.assert_array_equal(image, before)


def test_a_large_photograph_has_the_plain_bits():
    image = waves(1500, 2000)
    assert_same_bits(prepare_image(image, LIBERO), after_orientation(image[:, ::-1], LIBERO))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (6, 1)])
def test_the_crop_of_a_single_row_or_column_keeps_it(shape):
    image = np.full((*shape, 3), 90, np.uint8)
    np.testing.assert_array_equal(centre_crop(image, 0.9), image)


def test_a_resize_to_the_same_size_gives_an_image_of_its_own():
    image = noise(20, 30)
    resized = resize_lanczos3(read_only(image), 20, 30)
    resized[:] = 0
    assert image.any()
    assert_same_bits(resize_lanczos3(image, 20, 30), naive_resize(image, 20, 30))


@pytest.mark.parametrize("shape", [(1, 65501), (65501, 1)])
def test_an_image_too_long_for_jpeg_is_refused_in_one_line(shape):
    image = np.zeros((*shape, 3), np.uint8)
    with pytest.raises(UserError, match=f"{shape[0]} x {shape[1]} .*at most 65500"):
        jpeg_round_trip(image)
    longest = image[:65500, :65500]
    assert jpeg_round_trip(longest).shape == longest.shape
