"""Our OpenVLA-OFT against the reference, at every recorded stage."""

from __future__ import annotations

import dataclasses
import json
import types

import numpy as np
import pytest
import torch
from openvla_oft_tiny import DATA, EMBED, golden, prompt_tensor, tiny_model, tiny_tensors

from aura_ros.backbones.openvla_oft.api import OpenVlaOft
from aura_ros.backbones.openvla_oft.config import OPENVLA_OFT_7B
from aura_ros.backbones.openvla_oft.language import BidirectionalLlama
from aura_ros.backbones.openvla_oft.model import build_on_meta, load_weights, unused_key
from aura_ros.errors import UserError

ATOL = 1e-4
RUNS = {"A": (2, 8), "B": (1, 0)}


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    return golden()


@pytest.fixture(scope="module")
def models() -> dict[str, OpenVlaOft]:
    return {run: tiny_model(cameras, proprio) for run, (cameras, proprio) in RUNS.items()}


def run_inputs(recorded, run):
    cameras, proprio_dim = RUNS[run]
    ids = prompt_tensor(recorded["in.input_ids"])
    pixels = torch.from_numpy(recorded["in.pixel_values"][:, : 6 * cameras])
    return ids, pixels, torch.from_numpy(recorded["in.proprio_normalised"]) if proprio_dim else None


def run_stages(model: OpenVlaOft, inputs) -> dict[str, np.ndarray]:
    """Every stage the golden data has, captured by hooks from one `predict`."""
    stages: dict[str, np.ndarray] = {}
    net = model.model

    def keep(name, pick=lambda args, kwargs, out: out):
        def hook(module, args, kwargs, out):
            value = pick(args, kwargs, out)
            stages[name] = (value[0] if isinstance(value, tuple) else value).float().numpy().copy()

        return hook

    handles = [
        net.vision_backbone.register_forward_hook(keep("patch_features"), with_kwargs=True),
        net.projector.register_forward_hook(keep("projected_patches"), with_kwargs=True),
        net.language_model.model.register_forward_hook(
            keep("inputs_embeds", lambda args, kwargs, out: kwargs["inputs_embeds"]), with_kwargs=True
        ),
        net.language_model.model.layers[0].register_forward_hook(keep("layer0_out"), with_kwargs=True),
        net.action_head.register_forward_hook(
            keep("head_hidden_slice", lambda args, kwargs, out: args[0]), with_kwargs=True
        ),
    ]
    prediction = model.predict(*inputs)
    for handle in handles:
        handle.remove()
    stages["last_hidden"] = prediction.hidden_states.float().numpy()
    stages["actions_normalised"] = prediction.actions_normalised
    stages["actions"] = prediction.actions
    return stages


@pytest.mark.parametrize("run", RUNS)
def test_every_stage_equals_the_reference(run, models, recorded):
    stages = run_stages(models[run], run_inputs(recorded, run))
    expected = {name[2:]: value for name, value in recorded.items() if name.startswith(f"{run}.")}
    assert {"patch_features", "inputs_embeds", "last_hidden", "actions"} <= expected.keys() <= stages.keys()
    for name, value in expected.items():
        assert stages[name].shape == value.shape, name
        np.testing.assert_allclose(stages[name], value, rtol=0, atol=ATOL, err_msg=name)


def test_pooled_is_the_mean_of_the_final_norm_over_the_whole_sequence(models, recorded):
    pooled = models["A"].predict(*run_inputs(recorded, "A")).pooled
    assert pooled.dtype == np.float32
    np.testing.assert_allclose(pooled, recorded["A.last_hidden"][0].mean(axis=0), rtol=0, atol=1e-5)


def test_a_causal_trunk_fails_the_start_up_check(models, recorded):
    model = tiny_model()
    trunk = model.model.language_model
    trunk.check_bidirectional()
    bidirectional = type(trunk).attention_mask
    trunk.attention_mask = types.MethodType(lambda self, valid: bidirectional(self, valid).tril(), trunk)
    # The patched model must be the reference's causal run, else the check below proves nothing.
    np.testing.assert_allclose(
        model.predict(*run_inputs(recorded, "A")).actions, recorded["X.actions_fork_eager"], rtol=0, atol=ATOL
    )
    with pytest.raises(UserError, match=r"causal.*transformers"):
        model.warm_up()


def test_swapped_cameras_and_a_missing_empty_space_token_would_be_noticed(models, recorded):
    ids, pixels, proprio = run_inputs(recorded, "A")
    swapped = models["A"].predict(ids, pixels.roll(6, dims=1), proprio).actions
    assert np.abs(swapped - recorded["A.actions"]).max() > 0.05
    shorter = models["A"].predict(ids[:, :-1], pixels, proprio).actions
    assert np.abs(shorter - recorded["A.actions"]).max() > 0.05


def test_prompts_of_different_length_in_one_batch_equal_single_queries(models, recorded):
    long, pixels, proprio = run_inputs(recorded, "A")
    short = prompt_tensor(recorded["in.input_ids_short"])
    lengths = [long.shape[1], short.shape[1]]
    batch = torch.nn.functional.pad(short, (0, lengths[0] - lengths[1]), value=7)
    with torch.inference_mode():
        both = models["A"].model(
            torch.cat([long, batch]), pixels.expand(2, -1, -1, -1), proprio.expand(2, -1), lengths
        )
    for row, ids in enumerate((long, short)):
        alone = models["A"].predict(ids, pixels, proprio)
        np.testing.assert_allclose(both.pooled[row].numpy(), alone.pooled, rtol=0, atol=1e-5)
        np.testing.assert_allclose(
            both.actions_normalised[row].numpy(), alone.actions_normalised, rtol=0, atol=1e-5
        )


def test_bfloat16_keeps_the_rotary_frequencies_in_fp32_and_stays_near_the_reference(recorded):
    model = tiny_model(dtype="bfloat16")
    assert model.model.language_model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert {p.dtype for p in model.model.parameters()} == {torch.bfloat16}
    prediction = model.predict(*run_inputs(recorded, "A"))
    # Exact on CPUs without bf16 matrix units; those round elsewhere and move the actions by up to 0.02.
    np.testing.assert_allclose(prediction.actions, recorded["H.actions"], rtol=0, atol=0.05)


@pytest.mark.parametrize("theta", [10_000.0, 500.0])
def test_rotary_frequencies_follow_rope_theta(models, theta):
    language = dataclasses.replace(models["A"].config.language, rope_theta=theta)
    with torch.device("meta"):
        trunk = BidirectionalLlama(language)
    trunk.rebuild_rotary()
    expected = 1.0 / theta ** (np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(trunk.model.rotary_emb.inv_freq.numpy(), expected, rtol=1e-6)


def test_the_7b_preset_has_the_reference_names_and_shapes():
    shapes = json.loads((DATA / "openvla7b_oft_shapes.json").read_text())
    reference = {name: tuple(shape) for name, shape in _network_keys(shapes).items()}
    ours = {name: tuple(p.shape) for name, p in build_on_meta(OPENVLA_OFT_7B).named_parameters()}
    assert {name: shape for name, shape in ours.items() if reference.get(name) != shape} == {}
    left = [name for name in reference if name not in ours]
    assert left
    assert [name for name in left if not unused_key(name, OPENVLA_OFT_7B)] == []
    text = shapes["text_config_resolved"]
    language = OPENVLA_OFT_7B.language
    assert (text["rms_norm_eps"], text["rope_theta"]) == (language.rms_norm_eps, language.rope_theta)
    assert text["max_position_embeddings"] == language.max_positions


def _network_keys(shapes):
    vla = next(value for key, value in shapes.items() if isinstance(value, dict) and len(value) > 900)
    head = {f"action_head.{name}": shape for name, shape in shapes["action_head_l1"].items()}
    proprio = {f"proprio_projector.{n}": shape for n, shape in shapes["proprio_projector_libero"].items()}
    return {**vla, **head, **proprio}


def test_a_key_outside_the_allow_list_is_refused(models):
    config = models["A"].config
    tensors = {**tiny_tensors(proprio=True), "vision_backbone.featurizer.blocks.0.extra": torch.zeros(1)}
    assert EMBED in tensors
    with pytest.raises(UserError, match=r"blocks\.0\.extra"):
        load_weights(config, tensors, source="tiny", device=torch.device("cpu"), dtype=torch.float32)


def test_tiny_and_compact_are_the_same_code(models):
    compact = OpenVlaOft.random_compact(seed=0)
    assert type(compact) is type(models["A"])
    assert type(compact.model) is type(models["A"].model)
