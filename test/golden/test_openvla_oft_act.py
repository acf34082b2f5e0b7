"""A published checkpoint folder with its tokenizer, from observation to chunk, and its weights for ever the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from llama_like import write_tokenizer
from oft_folder import write_folder

from aura_ros.backbones import registry
from aura_ros.backbones.openvla_oft import OpenVlaOft
from aura_ros.backbones.openvla_oft.layout import FolderOptions
from aura_ros.backbones.openvla_oft.processing import prepare_image
from aura_ros.errors import UserError
from aura_ros.memory import MemoryConfig, MemoryModule
from aura_ros.types import Observation

INSTRUCTION = "put the black bowl in the basket"
PROPRIO = np.array([0.1, -0.2, 0.9, 0.3, -0.1, 0.2, 0.3, -0.3], np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tokenizer(write_folder(tmp_path_factory.mktemp("act") / "oft", dtype=torch.float32))


@pytest.fixture(scope="module")
def model(folder) -> OpenVlaOft:
    loaded = OpenVlaOft.from_checkpoint(folder, dtype="float32")
    loaded.warm_up()
    return loaded


def observe(seed: int = 0, instruction: str = INSTRUCTION) -> Observation:
    random = np.random.default_rng(seed)
    images = {name: random.integers(0, 256, (96, 128, 3), dtype=np.uint8) for name in ("agentview", "wrist")}
    return Observation(images, PROPRIO, instruction)


def test_act_is_predict_on_prepared_images_prompt_and_proprioception(model):
    observation = observe()
    pixels = np.concatenate(
        [prepare_image(image, model.config.image) for image in observation.images.values()]
    )
    bounds = model.statistics.proprio
    low, high = np.array(bounds.low), np.array(bounds.high)
    proprio = np.clip(2 * (PROPRIO - low) / (high - low + 1e-8) - 1, -1, 1).astype(np.float32)
    # BOS and "In: What action ... to put the black bowl in the basket?\nOut:"; 29871 is for predict to append.
    ids = model._prompts.ids(INSTRUCTION)[:, :-1]
    by_hand = model.predict(ids, pixels[None], proprio)
    acted = model.act(observation)
    np.testing.assert_array_equal(acted.actions, by_hand.actions)
    np.testing.assert_array_equal(acted.pooled, by_hand.pooled)
    assert (acted.actions.shape, acted.actions_normalised.shape, acted.pooled.shape) == (
        (8, 7),
        (8, 7),
        (64,),
    )
    assert acted.hidden_states.shape == (1, ids.shape[1] + 1 + model.config.prefix_rows + 57, 64)
    served = model.infer(observation)
    np.testing.assert_array_equal(served.hidden_state, acted.pooled)
    np.testing.assert_array_equal(served.base_chunk[:, :6], acted.actions[:, :6].astype(np.float32))
    np.testing.assert_array_equal(served.base_chunk[:, 6], acted.actions[:, 6] > 0.5)


def test_the_mirror_is_an_option_of_the_checkpoint_and_named(folder):
    plain = OpenVlaOft.from_checkpoint(folder, dtype="float32", options=FolderOptions(mirror=False))
    mirrored = OpenVlaOft.from_checkpoint(folder, dtype="float32")
    assert "mirror left-right" in mirrored.info.image_rotation
    assert "no mirror" in plain.info.image_rotation
    seen = observe()
    flipped = Observation({n: i[:, ::-1] for n, i in seen.images.items()}, seen.proprio, seen.instruction)
    np.testing.assert_array_equal(plain.act(flipped).actions, mirrored.act(seen).actions)
    assert np.abs(plain.act(seen).actions - mirrored.act(seen).actions).max() > 1e-3
    # Another mirror, another network: the identity says so.
    assert plain.info.checkpoint_hash != mirrored.info.checkpoint_hash


def test_options_replace_what_a_checkpoint_does_not_say(folder):
    options = FolderOptions(cameras=("front", "hand"), horizon=5)
    model = OpenVlaOft.from_checkpoint(folder, dtype="float32", options=options)
    assert (model.info.cameras, model.info.action.horizon) == (("front", "hand"), 5)
    images = dict(zip(("front", "hand"), observe().images.values(), strict=True))
    assert model.act(Observation(images, PROPRIO, INSTRUCTION)).actions.shape == (5, 7)
    with pytest.raises(UserError, match="camera 'front' is missing"):
        model.act(observe())


@pytest.mark.parametrize(
    ("instruction", "why"),
    [("", "blank"), (" \n", "blank"), ("pick\nup", "U\\+000A"), ("pick\x00up", "U\\+0000"), ("a" * 10_000, "shorten"),
     ("a" * 2_000_000, "shorten"), ("put </s> down", "control token")],
)  # fmt: skip
def test_an_instruction_that_cannot_be_used_is_one_line_and_the_model_goes_on(model, instruction, why):
    with pytest.raises(UserError, match=why) as refused:
        model.act(observe(instruction=instruction))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400
    assert model.act(observe()).actions.shape == (8, 7)


@pytest.mark.parametrize("changes", [{"proprio": np.zeros(7, np.float32)}, {"images": {}}])
def test_an_observation_that_does_not_fit_is_refused(model, changes):
    seen = observe()
    parts = {"images": seen.images, "proprio": seen.proprio, "instruction": INSTRUCTION, **changes}
    with pytest.raises(UserError, match=r"7 values.*8|camera 'agentview' is missing"):
        model.act(Observation(**parts))


def test_arrays_of_another_shape_are_refused_by_name(model):
    ids, pixels, proprio = np.array([[1, 512, 29901]]), np.zeros((1, 12, 56, 56), np.float32), PROPRIO
    for arrays, named in (
        ((ids[0], pixels, proprio), "input_ids"),
        ((np.array([[1, 40_000]]), pixels, proprio), "input_ids"),
        ((np.array([[1, -1]]), pixels, proprio), "input_ids"),
        ((ids, pixels[:, :6], proprio), "2 cameras"),
        ((ids, pixels[..., :28], proprio), "pixel_values"),
        ((ids, pixels, proprio[:7]), "7 values"),
        ((ids, pixels, None), "8"),
        ((ids, pixels, proprio, np.zeros((1, 8, 6))), "noise"),
    ):
        with pytest.raises(UserError, match=named):
            model.predict(*arrays)


def test_training_a_memory_on_its_hidden_states_leaves_every_weight_as_it_was(model):
    before = model.weights_sha256()
    torch.manual_seed(0)
    memory = MemoryModule(
        MemoryConfig(input_dim=64, input_kind="projection", out_dim=56, memory_step_period=8)
    )
    optimiser = torch.optim.SGD([*memory.parameters(), *model.model.parameters()], lr=1.0, weight_decay=0.5)
    weights = [p.clone() for p in memory.parameters()]
    for seed in range(3):
        acted = model.act(observe(seed))
        # Copied, for a tensor of inference mode takes no part in training at all.
        hidden = torch.from_numpy(acted.pooled.copy())[None, None]
        output, _, _ = memory(hidden)
        loss = (output - torch.from_numpy(acted.actions_normalised).reshape(1, 1, -1)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert any(not torch.equal(old, new) for old, new in zip(weights, memory.parameters(), strict=True))
    assert all(p.grad is None for p in model.model.parameters())
    assert model.weights_sha256() == before


def test_the_hash_of_the_weights_changes_with_one_bit(folder):
    model = OpenVlaOft.from_checkpoint(folder, dtype="float32")
    before = model.weights_sha256()
    with torch.no_grad():
        model.model.projector.fc3.bias[0] = torch.nextafter(
            model.model.projector.fc3.bias[0], torch.tensor(torch.inf)
        )
    assert model.weights_sha256() != before


def test_a_folder_without_a_tokenizer_predicts_and_says_why_it_does_no_more(tmp_path):
    model = OpenVlaOft.from_checkpoint(write_folder(tmp_path / "oft"))
    assert model.predict([[1, 512]], np.zeros((1, 12, 56, 56)), PROPRIO).actions.shape == (8, 7)
    for call in (model.warm_up, lambda: model.act(observe())):
        with pytest.raises(UserError, match=r"tokenizer\.json"):
            call()


def test_a_folder_with_only_the_sentencepiece_file_says_how_to_convert_it(tmp_path):
    folder = write_folder(tmp_path / "oft")
    (folder / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(UserError, match="save_pretrained"):
        OpenVlaOft.from_checkpoint(folder)


def test_act_runs_in_inference_mode_as_infer_does(model):
    # Else a network that keeps buffers from one query could not be called by the other.
    assert model.act(observe()).hidden_states.is_inference()


class Off(torch.nn.Module):
    """The network with its actions moved, as a wrong compiler or graph would."""

    def __init__(self, inner: torch.nn.Module, by: float) -> None:
        super().__init__()
        self.inner, self.by = inner, by

    def forward(self, *arguments, **named):
        output = self.inner(*arguments, **named)
        return dataclasses.replace(output, actions_normalised=output.actions_normalised + self.by)


@pytest.mark.parametrize(("by", "refused"), [(1e-5, False), (0.01, True), (float("nan"), True)])
def test_an_accelerated_network_that_is_off_by_more_than_rounding_is_refused_at_start(folder, by, refused):
    model = OpenVlaOft.from_checkpoint(folder, dtype="float32")
    model._run = Off(model.model, by)
    if refused:
        with pytest.raises(UserError, match="accelerated network"):
            model.warm_up()
    else:
        model.warm_up()
        assert isinstance(model.served_model, Off)


def test_scale_and_period_of_another_robot_are_options_and_named(folder):
    options = FolderOptions(scale=(1.0,) * 7, period_s=0.1)
    model = OpenVlaOft.from_checkpoint(folder, options=options)
    assert (model.info.action.scale, model.info.action.period_s) == ((1.0,) * 7, 0.1)
    assert "cartesian_delta in frame 'base', 1 SI a unit, every 0.1 s" in model.info.details
    libero = OpenVlaOft.from_checkpoint(folder)
    assert "0.05, 0.5, 1 SI a unit, every 0.05 s" in libero.info.details
    with pytest.raises(UserError, match="as many"):
        OpenVlaOft.from_checkpoint(folder, options=FolderOptions(scale=(1.0, 2.0)))


@pytest.mark.parametrize("name", ["openvla_oft", "compact"])
def test_options_that_a_file_cannot_take_are_refused_and_not_dropped(name, tmp_path):
    path = tmp_path / "saved.safetensors"
    OpenVlaOft.random_compact().save(path)
    options = FolderOptions(mirror=False, horizon=3)
    for call in (registry.load_backbone, registry.check_checkpoint):
        with pytest.raises(UserError, match=r"mirror, horizon can be said .*saved\.safetensors") as refused:
            call(name, path, options=options)
        assert "\n" not in str(refused.value)
        call(name, path, options=FolderOptions())
