"""Our OpenVLA-OFT against the reference, at every recorded stage."""

from __future__ import annotations

import dataclasses
import json
import types
import warnings

import numpy as np
import pytest
import torch
from openvla_oft_tiny import DATA, EMBED, golden, prompt_tensor, tiny_model, tiny_tensors

from aura_ros.backbones.openvla_oft.api import OpenVlaOft
from aura_ros.backbones.openvla_oft.config import OPENVLA_OFT_7B
from aura_ros.backbones.openvla_oft.diffusion import signal_shares, step_embedding, timesteps
from aura_ros.backbones.openvla_oft.language import BidirectionalLlama
from aura_ros.backbones.openvla_oft.model import build_on_meta, load_weights, unused_key
from aura_ros.errors import UserError

ATOL = 1e-4
RUNS = {
    "A": {},
    "B": {"cameras": 1, "proprio_dim": 0},
    "C": {"cameras": 1, "proprio_dim": 0, "head": "discrete"},
    "E": {"head": "diffusion", "diffusion_steps": 5},
    "F": {"film": True},
}
STAGES = {
    "A": {"patch_features", "projected_patches", "inputs_embeds", "layer0_out", "actions_normalised"},
    "B": {"patch_features", "projected_patches", "inputs_embeds", "layer0_out"},
    "F": {"patch_features", "projected_patches"},
}


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    return golden()


@pytest.fixture(scope="module")
def models() -> dict[str, OpenVlaOft]:
    return {run: tiny_model(**changes) for run, changes in RUNS.items()}


def run_inputs(recorded, run):
    """ids, pixels, proprioception and noise, as arrays: the empty-space token is ours to append."""
    config = RUNS[run]
    pixels = recorded["in.pixel_values"][:, : 6 * config.get("cameras", 2)]
    proprio = recorded["in.proprio_normalised"] if config.get("proprio_dim", 8) else None
    return recorded["in.input_ids"], pixels, proprio, recorded["in.E_noise"] if run == "E" else None


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
        (net.language_model.lm_head or net.action_head).register_forward_hook(
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
    assert STAGES.get(run, set()) | {"last_hidden", "head_hidden_slice", "actions"} == expected.keys() - {
        "timesteps"
    }
    if run == "E":
        np.testing.assert_array_equal(timesteps(RUNS["E"]["diffusion_steps"]), expected.pop("timesteps"))
    for name, value in expected.items():
        assert stages[name].shape == value.shape, name
        # Five passes each multiply a difference of 1e-6 by about 2.5, the last norm by another 50; the last pass
        # alone is held to ATOL by the next test.
        atol = 1e-2 if run == "E" and name != "actions" else ATOL
        np.testing.assert_allclose(stages[name], value, rtol=0, atol=atol, err_msg=name)


def test_the_last_denoising_pass_equals_the_reference_from_its_own_noisy_actions(models, recorded):
    """The noisy actions before it follow from the recorded end: DDIM's last step solved for its input."""
    model, net = models["E"], models["E"].model
    bounds = model.statistics.action
    low, high = np.asarray(bounds.low), np.asarray(bounds.high)
    scaled = 2 * (recorded["E.actions"] - low) / (high - low + 1e-8) - 1
    clean = torch.from_numpy(np.where(bounds.mask, scaled, recorded["E.actions"]))[None]
    assert clean.abs().max() < 0.999  # a clipped value could not be solved for
    ids, *inputs, _ = run_inputs(recorded, "E")
    with torch.inference_mode():
        share = signal_shares()[0]
        predicted = net.action_head(torch.from_numpy(recorded["E.head_hidden_slice"]))
        noisy = (clean * share**0.5 + predicted * (1 - share) ** 0.5).float()
        prefix = net.prefix(
            prompt_tensor(ids), *(torch.from_numpy(x).reshape(1, *x.shape[-3:]) for x in inputs)
        )
        step = step_embedding(0, prefix.shape[-1]).expand(1, 1, -1)
        embeds, _ = net.assemble(
            prompt_tensor(ids), torch.cat([prefix, step], dim=1), None, net.noisy_action_projector(noisy)
        )
        hidden = net.language_model(embeds)
    np.testing.assert_allclose(hidden.numpy(), recorded["E.last_hidden"], rtol=0, atol=ATOL)


def test_a_padded_batch_equals_the_reference_on_every_row_in_use(models, recorded):
    ids, in_use = torch.from_numpy(recorded["in.P_input_ids"]), recorded["in.P_attention_mask"]
    # The reference's ids go on with the actions and </s>, which our layout adds itself.
    lengths = [int(used.sum()) - 57 for used in in_use]
    assert lengths[0] != lengths[1]
    pixels = np.concatenate([recorded["in.pixel_values"], recorded["in.P_pixel_values_row1"]])
    with torch.inference_mode():
        output = models["A"].model(
            ids, torch.from_numpy(pixels), torch.from_numpy(recorded["in.P_proprio"]), lengths
        )
    for row, length in enumerate(lengths):
        rows = models["A"].config.prefix_rows + length + 57
        expected = recorded["P.last_hidden"][row, :rows]
        np.testing.assert_allclose(output.hidden_states[row, :rows].numpy(), expected, rtol=0, atol=ATOL)
        np.testing.assert_allclose(output.pooled[row].numpy(), expected.mean(axis=0), rtol=0, atol=1e-5)


def test_pooled_is_the_mean_of_the_final_norm_over_the_whole_sequence(models, recorded):
    pooled = models["A"].predict(*run_inputs(recorded, "A")).pooled
    assert pooled.dtype == np.float32
    np.testing.assert_allclose(pooled, recorded["A.last_hidden"][0].mean(axis=0), rtol=0, atol=1e-5)


def test_a_causal_trunk_fails_the_start_up_check(models, recorded):
    model = tiny_model()
    trunk = model.model.language_model
    trunk.check_bidirectional()
    causal = lambda self, rows, valid, device: torch.ones(1, 1, rows, rows, dtype=torch.bool).tril()  # noqa: E731
    trunk.attention_mask = types.MethodType(causal, trunk)
    # The patched model must be the reference's causal run, else the check below proves nothing.
    np.testing.assert_allclose(
        model.predict(*run_inputs(recorded, "A")).actions, recorded["X.actions_fork_eager"], rtol=0, atol=ATOL
    )
    with pytest.raises(UserError, match=r"causal.*transformers"):
        model.warm_up()


def test_the_empty_space_token_is_appended_unless_already_last(models, recorded):
    ids, *rest = run_inputs(recorded, "A")
    appended = models["A"].predict(prompt_tensor(ids), *rest)
    np.testing.assert_array_equal(appended.actions, models["A"].predict(ids, *rest).actions)


def test_prompts_of_different_length_in_one_batch_equal_single_queries(models, recorded):
    long, pixels, proprio, _ = run_inputs(recorded, "A")
    long, short = prompt_tensor(long), prompt_tensor(recorded["in.input_ids_short"])
    lengths = [long.shape[1], short.shape[1]]
    batch = torch.nn.functional.pad(short, (0, lengths[0] - lengths[1]), value=7)
    for run in ("A", "F"):
        model = models[run]
        with torch.inference_mode():
            both = model.model(
                torch.cat([long, batch]),
                torch.from_numpy(pixels).expand(2, -1, -1, -1),
                torch.from_numpy(proprio).expand(2, -1),
                lengths,
            )
        for row, ids in enumerate((long, short)):
            alone = model.predict(ids, pixels, proprio)
            np.testing.assert_allclose(both.pooled[row].numpy(), alone.pooled, rtol=0, atol=1e-5)
            np.testing.assert_allclose(
                both.actions_normalised[row].numpy(), alone.actions_normalised, rtol=0, atol=1e-5
            )


def test_bfloat16_equals_the_reference_at_every_stage(recorded):
    model = tiny_model(dtype="bfloat16")
    assert model.model.language_model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert {p.dtype for p in model.model.parameters()} == {torch.bfloat16}
    # oneDNN rounds elsewhere on CPUs with bf16 units, so the plain kernels are compared: exact, wherever this ran.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own flags() sets a deprecated one
        with torch.backends.mkldnn.flags(enabled=False):
            stages = run_stages(model, run_inputs(recorded, "A"))
    expected = {name[2:]: value for name, value in recorded.items() if name.startswith("H.")}
    assert expected.keys() == {"patch_features", "projected_patches", "last_hidden", "actions"}
    for name, value in expected.items():
        np.testing.assert_allclose(stages[name], value, rtol=0, atol=1e-2, err_msg=name)


def test_bfloat16_by_this_machines_kernels_is_no_further_off_than_bfloat16_itself(recorded):
    actions = tiny_model(dtype="bfloat16").predict(*run_inputs(recorded, "A")).actions
    rounding = np.abs(recorded["H.actions"] - recorded["A.actions"]).max()
    assert np.abs(actions - recorded["H.actions"]).max() <= rounding


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
    tensors = {**tiny_tensors(config), "vision_backbone.featurizer.blocks.0.extra": torch.zeros(1)}
    assert EMBED in tensors
    with pytest.raises(UserError, match=r"blocks\.0\.extra"):
        load_weights(config, tensors, source="tiny", device=torch.device("cpu"), dtype=torch.float32)


def test_tiny_and_compact_are_the_same_code(models):
    compact = OpenVlaOft.random_compact(seed=0)
    assert type(compact) is type(models["A"])
    assert type(compact.model) is type(models["A"].model)
