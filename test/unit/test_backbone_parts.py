"""Config, normalisation, tokenizers and image steps that need no network."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aura_ros.backbones.openvla_oft.config import COMPACT, OPENVLA_OFT_7B, ImageConfig, OftConfig, TowerConfig
from aura_ros.backbones.openvla_oft.normalisation import (
    COMPACT_STATISTICS,
    Bounds,
    binarise,
    normalise_proprio,
    select_statistics,
    unnormalise_actions,
)
from aura_ros.backbones.openvla_oft.processing import centre_crop, orient, prepare_image, resize_lanczos3
from aura_ros.backbones.openvla_oft.tokenizer import ByteTokenizer, LlamaTokenizer, prompt, prompt_ids
from aura_ros.errors import UserError


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("config", [COMPACT, OPENVLA_OFT_7B])
def test_a_config_survives_json(config):
    assert OftConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cameras": ()}, "cameras"),
        ({"cameras": ("a", "a")}, "cameras"),
        ({"patch": 15}, "multiple of patch 15"),
        ({"proprio_dim": -1}, "proprio_dim -1"),
        ({"binary_columns": (7,)}, "binary_columns"),
        ({"tokenizer": "bpe"}, "'bpe'.*byte"),
    ],
)
def test_a_bad_config_field_is_named(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(COMPACT, **change)


def test_a_tower_of_one_block_is_refused():
    with pytest.raises(UserError, match="depth 1"):
        TowerConfig(width=8, depth=1, heads=2, mlp_width=8)


def test_the_7b_sequence_has_about_601_rows():
    prompt_rows = 30
    assert OPENVLA_OFT_7B.prefix_rows + prompt_rows + OPENVLA_OFT_7B.placeholders + 1 == 600


def test_the_true_view_and_the_raw_buffer_give_identical_pixels():
    raw = noise(64, 48)
    config = ImageConfig(size=32, mirror=True)
    from_raw = prepare_image(raw, config, view="raw")
    np.testing.assert_array_equal(from_raw, prepare_image(raw[::-1], config, view="true"))
    np.testing.assert_array_equal(orient(raw, True, "raw"), raw[::-1, ::-1])
    assert not np.array_equal(from_raw, prepare_image(raw[::-1], ImageConfig(size=32)))


def test_an_unknown_view_is_refused():
    with pytest.raises(UserError, match=r"'upside'.*true, raw"):
        orient(noise(4, 4), False, "upside")


def test_a_resize_to_the_same_size_changes_nothing():
    image = noise(20, 30)
    np.testing.assert_array_equal(resize_lanczos3(image, 20, 30), image)


@pytest.mark.parametrize("value", [0, 1, 127, 254, 255])
def test_a_flat_image_stays_flat(value):
    image = np.full((33, 47, 3), value, np.uint8)
    resized = resize_lanczos3(image, 16, 16)
    assert set(np.unique(resized)) == {value}
    assert np.abs(centre_crop(resized, 0.9).astype(int) - value).max() <= 1


def test_the_crop_keeps_the_centre_and_drops_the_border():
    image = np.zeros((100, 100, 3), np.uint8)
    image[[0, -1]] = image[:, [0, -1]] = 255
    assert not centre_crop(image, 0.9).any()
    assert centre_crop(image, 1.0) is image


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.floats(-1, 1), min_size=8, max_size=8))
def test_proprioception_survives_normalisation_within_its_bounds(values):
    bounds = select_statistics(COMPACT_STATISTICS, None, action_dim=7, proprio_dim=8).proprio
    assert bounds is not None
    low, high = np.array(bounds.low), np.array(bounds.high)
    physical = (low + (np.array(values) + 1) / 2 * (high - low)).astype(np.float32)
    np.testing.assert_allclose(normalise_proprio(physical, bounds), values, rtol=0, atol=1e-4)


def test_a_column_that_never_moved_gives_finite_values():
    bounds = Bounds((0.3, -1.0), (0.3, 1.0), (True, True))
    for x in (0.3, 0.2, 5.0):
        normalised = normalise_proprio(np.array([x, 0.0], np.float32), bounds)
        assert np.isfinite(normalised).all()
        assert np.abs(normalised).max() <= 1.0
    np.testing.assert_allclose(unnormalise_actions(np.array([[0.7, 0.0]]), bounds), [[0.3, 0.0]], atol=1e-7)


def test_a_masked_column_passes_and_the_gripper_is_binary():
    bounds = select_statistics(COMPACT_STATISTICS, "libero_like", action_dim=7, proprio_dim=8).action
    actions = unnormalise_actions(np.array([[0.0] * 6 + [0.5], [1.0] * 6 + [0.51]]), bounds)
    np.testing.assert_allclose(actions[0], [0.0] * 6 + [0.5], atol=1e-7)
    np.testing.assert_allclose(actions[1, :6], bounds.high[:6], atol=1e-7)
    assert binarise(actions, (6,))[:, 6].tolist() == [0.0, 1.0]
    assert actions[1, 6] == 0.51


@pytest.mark.parametrize(
    ("statistics", "key", "message"),
    [
        ({"a": {}, "b": {}}, None, r"\['a', 'b'\]"),
        ({"a": {}, "b": {}}, "c", "'c' is unknown.*a, b"),
        ({"a": {}}, None, "no usable action"),
        ({"a": {"action": {"q01": [1.0], "q99": [0.0]}}}, None, "from 1.0 to 0.0"),
        ({"a": {"action": {"q01": [0.0], "q99": [float("nan")]}}}, None, "nan"),
        ({"a": {"action": {"q01": [0.0], "q99": [1.0, 2.0]}}}, None, "1 low, 2 high"),
    ],
)
def test_unusable_statistics_are_refused(statistics, key, message):
    with pytest.raises(UserError, match=message):
        select_statistics(statistics, key, action_dim=1, proprio_dim=0)


def test_the_prompt_is_openvlas_and_ends_in_the_empty_space_token_once():
    assert prompt("Pick UP") == "In: What action should the robot take to pick up?\nOut:"
    tokenizer = ByteTokenizer()
    ids = prompt_ids(tokenizer, "Pick UP")
    assert ids[0] == tokenizer.bos_id
    assert ids[-1] == tokenizer.empty_space_id
    assert bytes(i - tokenizer.first_byte_id for i in ids[1:-1]).decode() == prompt("pick up")

    class Ending(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [*super().encode(text), self.empty_space_id]

    assert prompt_ids(Ending(), "pick up") == ids


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.text(max_size=40))
def test_byte_ids_never_collide_with_special_tokens_or_leave_the_vocabulary(text):
    ids = ByteTokenizer().encode(text)
    assert ids[0] == ByteTokenizer.bos_id
    assert all(ByteTokenizer.first_byte_id <= i < ByteTokenizer.vocab for i in ids[1:])


def test_the_llama_tokenizer_reads_a_folder_and_adds_bos_itself(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "pick": 3, "up": 4}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = LlamaTokenizer(tmp_path)
    assert tokenizer.vocab == 5
    assert tokenizer.encode("pick up") == [1, 3, 4]
    assert prompt_ids(tokenizer, "pick")[-1] == 29871


def test_a_missing_or_broken_tokenizer_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        LlamaTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer"):
        LlamaTokenizer(tmp_path)


def test_the_parts_that_need_no_network_import_no_torch():
    modules = ("config", "processing", "normalisation", "tokenizer")
    imports = ", ".join(f"aura_ros.backbones.openvla_oft.{name}" for name in modules)
    code = f"import sys, aura_ros.backbones, {imports}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
