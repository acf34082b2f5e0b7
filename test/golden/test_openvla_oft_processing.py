"""Our image pipeline against TensorFlow's, run by the reference's own functions."""

from __future__ import annotations

import io

import numpy as np
import pytest
import simplejpeg
from openvla_oft_tiny import DATA
from PIL import Image

from aura_ros.backbones.openvla_oft.config import ImageConfig
from aura_ros.backbones.openvla_oft.processing import (
    centre_crop,
    jpeg_round_trip,
    normalise_pixels,
    prepare_image,
    resize_lanczos3,
)

FRAMES = ("sim256", "cam480x640")


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(DATA / "golden_preprocess.npz") as stored:
        return dict(stored)


def assert_nearly_equal(ours: np.ndarray, reference: np.ndarray, share: float) -> None:
    difference = np.abs(ours.astype(int) - reference.astype(int))
    assert difference.max() <= 1
    assert (difference > 0).mean() <= share


@pytest.mark.parametrize("frame", FRAMES)
def test_lanczos3_resize_equals_tensorflow(frame, recorded):
    ours = resize_lanczos3(recorded[f"{frame}.in"], 224, 224)
    assert_nearly_equal(ours, recorded[f"{frame}.resized_nojpeg"], 1e-4)


@pytest.mark.parametrize("frame", FRAMES)
def test_jpeg_round_trip_then_resize_equals_tensorflow(frame, recorded):
    ours = resize_lanczos3(jpeg_round_trip(recorded[f"{frame}.in"]), 224, 224)
    assert_nearly_equal(ours, recorded[f"{frame}.resized"], 1e-4)
    # Without the round trip the images are far apart, so the comparison above covers it.
    assert np.abs(recorded[f"{frame}.resized"].astype(int) - recorded[f"{frame}.resized_nojpeg"]).max() > 5


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize(
    ("quality", "subsampling", "fastdct", "fastupsample"),
    [
        (94, 2, True, False),
        (96, 2, True, False),
        (95, 0, True, False),
        (95, 2, False, False),
        (95, 2, True, True),
    ],
)
def test_any_other_jpeg_setting_is_told_from_the_reference(
    frame, quality, subsampling, fastdct, fastupsample, recorded
):
    buffer = io.BytesIO()
    Image.fromarray(recorded[f"{frame}.in"]).save(buffer, "JPEG", quality=quality, subsampling=subsampling)
    decoded = simplejpeg.decode_jpeg(buffer.getvalue(), fastdct=fastdct, fastupsample=fastupsample)
    assert not np.array_equal(decoded, jpeg_round_trip(recorded[f"{frame}.in"]))
    # A third of the values and more: that the bound of 1e-4 above holds leaves no room for another JPEG.
    difference = np.abs(resize_lanczos3(decoded, 224, 224).astype(int) - recorded[f"{frame}.resized"])
    assert (difference > 0).mean() > 0.1
    assert difference.max() > 1


@pytest.mark.parametrize("frame", FRAMES)
def test_centre_crop_equals_tensorflow_exactly(frame, recorded):
    ours = centre_crop(recorded[f"{frame}.resized"], 0.9)
    np.testing.assert_array_equal(ours, recorded[f"{frame}.cropped"])


@pytest.mark.parametrize("frame", FRAMES)
def test_resize_then_crop_equals_tensorflow(frame, recorded):
    resized = resize_lanczos3(jpeg_round_trip(recorded[f"{frame}.in"]), 224, 224)
    assert_nearly_equal(centre_crop(resized, 0.9), recorded[f"{frame}.cropped"], 1e-4)


@pytest.mark.parametrize("frame", FRAMES)
def test_normalised_pixels_equal_the_reference_processor(frame, recorded):
    ours = normalise_pixels(recorded[f"{frame}.cropped"])[:, ::8, ::8]
    np.testing.assert_allclose(ours, recorded[f"{frame}.pixel_values_stride8"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("view", ["true", "raw"])
def test_the_whole_pipeline_equals_the_reference_from_both_input_paths(frame, view, recorded):
    # `.in` is what the reference's pipeline was given: for LIBERO `raw[::-1, ::-1]`.
    given = recorded[f"{frame}.in"]
    seen = given[::-1, ::-1] if view == "raw" else given[:, ::-1]
    ours = prepare_image(seen, ImageConfig(size=224, mirror=True), view)[:, ::8, ::8]
    difference = np.abs(ours - recorded[f"{frame}.pixel_values_stride8"])
    assert difference.max() <= 1.0 / 255 / 0.224 + 1e-6  # one grey level of the smallest standard deviation
    assert (difference > 1e-5).mean() <= 1e-3  # of a sample of 4704; on all values it is 1e-4, above
