"""The one-file checkpoint: a round trip keeps the identity, and no bad file is ever served."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from aura_ros.backbones import load_backbone
from aura_ros.backbones.openvla_oft.api import OpenVlaOft
from aura_ros.errors import UserError
from aura_ros.types import Observation

HEAD = "action_head.model.fc2.weight"


@pytest.fixture(scope="module")
def compact() -> OpenVlaOft:
    return OpenVlaOft.random_compact(seed=1)


@pytest.fixture(scope="module")
def saved(compact, tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "compact.safetensors"
    compact.save(path)
    return path


def read(path):
    with safe_open(str(path), framework="pt") as stored:
        return {name: stored.get_tensor(name) for name in stored.keys()}, dict(stored.metadata())  # noqa: SIM118


def rewrite(saved, tmp_path, change):
    """A copy of the saved file after `change(tensors, metadata)`."""
    tensors, metadata = read(saved)
    change(tensors, metadata)
    path = tmp_path / "changed.safetensors"
    save_file(tensors, path, metadata=metadata)
    return path


def test_a_round_trip_keeps_hash_and_actions(compact, saved):
    loaded = load_backbone("compact", saved)
    assert loaded.info.checkpoint_hash == compact.info.checkpoint_hash
    assert loaded.info.checkpoint == str(saved)
    assert loaded.info.trained is False
    image = np.zeros((32, 32, 3), np.uint8)
    seen = Observation({"agentview": image, "wrist": image}, np.zeros(8, np.float32), "push")
    assert loaded.infer(seen).base_chunk.tobytes() == compact.infer(seen).base_chunk.tobytes()
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]
    # Whoever may read other files of its owner may read it: nodes run as users of their own.
    (other := saved.parent / "other").touch()
    assert saved.stat().st_mode == other.stat().st_mode
    other.unlink()


def test_openvla_oft_takes_the_same_file(saved):
    assert load_backbone("openvla_oft", saved).info.name == "compact"


def drop_key(tensors, metadata):
    del tensors[HEAD]


def add_key(tensors, metadata):
    tensors["action_head.model.fc9.weight"] = torch.zeros(2)


def change_shape(tensors, metadata):
    tensors[HEAD] = torch.zeros(6, 192)


def put_nan(tensors, metadata):
    tensors[HEAD][0, 0] = float("nan")


def change_weight(tensors, metadata):
    tensors[HEAD][0, 0] += 1.0


def change_statistics(tensors, metadata):
    statistics = json.loads(metadata["dataset_statistics"])
    statistics["libero_like"]["action"]["q99"][0] = 0.5
    metadata["dataset_statistics"] = json.dumps(statistics)


def shorten_statistics(tensors, metadata):
    statistics = json.loads(metadata["dataset_statistics"])
    statistics["libero_like"]["action"] = {"q01": [0.0], "q99": [1.0]}
    metadata["dataset_statistics"] = json.dumps(statistics)


def empty_statistics(tensors, metadata):
    metadata["dataset_statistics"] = "{}"


def break_config(tensors, metadata):
    metadata["config"] = metadata["config"][:-1]


def unknown_config_field(tensors, metadata):
    metadata["config"] = json.dumps({**json.loads(metadata["config"]), "experts": 8})


def bad_config_value(tensors, metadata):
    config = json.loads(metadata["config"])
    config["image"]["crop_area"] = 2.0
    metadata["config"] = json.dumps(config)


def float_width(tensors, metadata):
    config = json.loads(metadata["config"])
    config["dino"]["width"] = 128.0
    metadata["config"] = json.dumps(config)


def nested_config(tensors, metadata):
    metadata["config"] = "[" * 100_000


def other_name(tensors, metadata):
    metadata["config"] = json.dumps({**json.loads(metadata["config"]), "name": "other"}, sort_keys=True)


def no_metadata(tensors, metadata):
    metadata.clear()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_key, rf"lacks 1 of .*{HEAD}"),
        (add_key, r"fc9"),
        (change_shape, rf"{HEAD}' has shape \[6, 192\]; expected \[7, 192\]"),
        (put_nan, rf"{HEAD}'.*not finite"),
        (change_weight, r"altered"),
        (change_statistics, r"altered"),
        (shorten_statistics, r"1 action columns; the model has 7"),
        (empty_statistics, r"no dataset statistics"),
        (break_config, r"config is malformed"),
        (unknown_config_field, r"experts"),
        (float_width, r"tower width 128.0 is not allowed"),
        (nested_config, r"config is malformed"),
        (bad_config_value, r"crop_area 2.0 is not allowed"),
        (other_name, r"holds 'other', not 'compact'"),
        (no_metadata, r"metadata"),
    ],
)
def test_a_changed_file_is_refused_in_one_line(saved, tmp_path, change, message):
    path = rewrite(saved, tmp_path, change)
    with pytest.raises(UserError, match=message) as caught:
        load_backbone("compact", path)
    assert str(path) in str(caught.value) or "statistics" in str(caught.value)
    assert "\n" not in str(caught.value)


def missing(saved, path):
    pass


def folder(saved, path):
    path.mkdir()


def empty(saved, path):
    path.write_bytes(b"")


def lfs_pointer(saved, path):
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 13\n")


def truncated(saved, path):
    path.write_bytes(saved.read_bytes()[:-1000])


def cut_header(saved, path):
    path.write_bytes(saved.read_bytes()[:100])


def text(saved, path):
    path.write_text("these are no weights, " * 10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (missing, "does not exist"),
        (folder, "is a folder"),
        (empty, "truncated"),
        (lfs_pointer, "git lfs pull"),
        (truncated, "truncated"),
        (cut_header, "truncated"),
        (text, "truncated or not safetensors"),
    ],
)
def test_a_path_without_a_usable_file_is_refused_in_one_line(saved, tmp_path, make, message):
    path = tmp_path / "bad.safetensors"
    make(saved, path)
    with pytest.raises(UserError, match=message) as caught:
        load_backbone("compact", path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.pt", "absent/model.safetensors"])
def test_a_path_that_cannot_be_saved_to_is_refused(compact, tmp_path, name):
    with pytest.raises(UserError, match="cannot be written"):
        compact.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
