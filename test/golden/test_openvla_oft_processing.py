"""Our image pipeline against TensorFlow's, run by the reference's own functions."""

from __future__ import annotations

import numpy as np
import pytest
from openvla_oft_tiny import DATA

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
def test_centre_crop_equals_tensorflow(frame, recorded):
    assert_nearly_equal(centre_crop(recorded[f"{frame}.resized"], 0.9), recorded[f"{frame}.cropped"], 1e-3)


@pytest.mark.parametrize("frame", FRAMES)
def test_normalised_pixels_equal_the_reference_processor(frame, recorded):
    ours = normalise_pixels(recorded[f"{frame}.cropped"])[:, ::8, ::8]
    np.testing.assert_allclose(ours, recorded[f"{frame}.pixel_values_stride8"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("frame", FRAMES)
def test_the_whole_pipeline_equals_the_reference(frame, recorded):
    ours = prepare_image(recorded[f"{frame}.in"], ImageConfig(size=224))[:, ::8, ::8]
    difference = np.abs(ours - recorded[f"{frame}.pixel_values_stride8"])
    assert difference.max() <= 1.0 / 255 / 0.224 + 1e-6  # one grey level of the smallest standard deviation
    assert (difference > 1e-5).mean() <= 2e-3
