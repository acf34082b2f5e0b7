"""Ready arrays for the network: what would run and give actions that look right is refused in one line."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aura_ros.backbones.openvla_oft.config import COMPACT
from aura_ros.backbones.openvla_oft.inputs import check_arrays
from aura_ros.errors import UserError

SIDE, CHANNELS = COMPACT.image.size, 6 * len(COMPACT.cameras)


def arrays() -> dict:
    return {
        "input_ids": np.array([[1, 5, 6]]),
        "pixel_values": np.zeros((1, CHANNELS, SIDE, SIDE), np.float32),
        "proprio_normalised": np.zeros(COMPACT.proprio_dim),
    }


def poisoned(name: str, value: float) -> np.ndarray:
    array = arrays()[name].copy()
    array.flat[-1] = value
    return array


MISTAKES = {
    "ids of floats": ("input_ids", [[1.0, 5.5]], "input_ids are float32; give integers"),
    "ids of truths": ("input_ids", [[True, False]], "input_ids are bool; give integers"),
    "ids of text": ("input_ids", "pick up the milk", "input_ids of type str is no array of numbers"),
    "ids of words": ("input_ids", [["pick", "up"]], "input_ids of type list is no array"),
    "ids of unequal rows": ("input_ids", [[1, 2], [3]], "input_ids of type list is no array"),
    "no ids": ("input_ids", None, "input_ids of type NoneType is no array"),
    "pixels of a camera": (
        "pixel_values",
        np.full((1, CHANNELS, SIDE, SIDE), 128, np.uint8),
        "pixel_values are uint8, not normalised; give floats",
    ),
    "pixels that are integers": (
        "pixel_values",
        np.full((1, CHANNELS, SIDE, SIDE), 128),
        "pixel_values are int64, not normalised",
    ),
    "NaN pixel": ("pixel_values", poisoned("pixel_values", np.nan), "pixel_values hold NaN or infinity"),
    "no pixels": ("pixel_values", None, "pixel_values of type NoneType"),
    "ragged pixels": ("pixel_values", [[0.0], [0.0, 1.0]], "pixel_values of type list"),
    "infinite proprioception": (
        "proprio_normalised",
        poisoned("proprio_normalised", np.inf),
        "proprioception hold NaN or infinity",
    ),
    "whole proprioception": ("proprio_normalised", [0] * COMPACT.proprio_dim, "proprioception are int64"),
    "proprioception of text": ("proprio_normalised", "home", "proprioception of type str"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_what_is_no_ready_array_is_refused_in_one_line(case):
    name, value, said = MISTAKES[case]
    with pytest.raises(UserError) as refused:
        check_arrays(COMPACT, **{**arrays(), name: value})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor, np.ndarray.tolist])
def test_arrays_tensors_and_lists_are_taken(kind):
    ids, pixels, proprio = check_arrays(COMPACT, **{name: kind(value) for name, value in arrays().items()})
    assert ids.dtype == torch.int64
    assert pixels.shape == (1, CHANNELS, SIDE, SIDE)
    assert proprio.shape == (1, COMPACT.proprio_dim)


def test_ids_of_any_whole_type_and_pixels_of_half_precision_are_taken():
    for dtype in (torch.int32, torch.uint8, torch.int64):
        ids = torch.tensor([[1, 5]], dtype=dtype)
        half = torch.zeros(1, CHANNELS, SIDE, SIDE, dtype=torch.bfloat16)
        assert check_arrays(COMPACT, ids, half, arrays()["proprio_normalised"])[0].dtype == torch.int64
