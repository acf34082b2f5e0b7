"""The compact OpenVLA-OFT: one model for tests and small machines, on the same code as the 7B."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aura_ros.backbones import load_backbone
from aura_ros.backbones.openvla_oft.api import OpenVlaOft
from aura_ros.backbones.openvla_oft.checkpoint import Checkpoint, random_tensors
from aura_ros.backbones.openvla_oft.config import COMPACT
from aura_ros.backbones.openvla_oft.inputs import PROMPT_CACHE
from aura_ros.backbones.openvla_oft.normalisation import COMPACT_STATISTICS
from aura_ros.errors import UserError
from aura_ros.policy import Policy, load_memory
from aura_ros.types import Observation

PROPRIO = np.array([0.0, 0.0, 0.9, 3.1, 0.0, 0.0, 0.02, -0.02], np.float32)


@pytest.fixture(scope="module")
def compact() -> OpenVlaOft:
    backbone = load_backbone("compact", "random", seed=3)
    assert isinstance(backbone, OpenVlaOft)
    return backbone


def random_images(seed: int, height: int = 128, width: int = 128) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for name in ("agentview", "wrist")}


def observe(seed: int = 0, instruction: str = "pick up the milk", **changes) -> Observation:
    return Observation(
        **{"images": random_images(seed), "proprio": PROPRIO, "instruction": instruction, **changes}
    )


def test_info_states_sizes_and_that_nothing_was_trained(compact):
    info = compact.info
    assert 2e6 <= info.parameters <= 4e6
    assert info.parameters == sum(p.numel() for p in compact.model.parameters())
    assert (info.name, info.hidden_dim, info.proprio_dim) == ("compact", 192, 8)
    assert info.cameras == ("agentview", "wrist")
    assert (info.checkpoint, info.trained) == ("random-init:seed=3", False)
    assert (info.action.horizon, info.action.dim) == (8, 7)


def test_the_same_observation_gives_the_same_bytes(compact):
    first, again = compact.infer(observe()), compact.infer(observe())
    assert first.hidden_state.tobytes() == again.hidden_state.tobytes()
    assert first.base_chunk.tobytes() == again.base_chunk.tobytes()
    assert first.hidden_state.dtype == first.base_chunk.dtype == np.float32
    assert first.hidden_state.shape == (192,)
    assert first.base_chunk.shape == (8, 7)
    assert {"preprocess", "forward", "postprocess", "backbone"} <= first.timing_ms.keys()


def test_the_hash_follows_the_seed_and_survives_inference(compact):
    compact.infer(observe())
    weights = dict(compact.model.named_parameters())
    after = Checkpoint(COMPACT, COMPACT_STATISTICS, weights, trained=False).sha256()
    fresh = Checkpoint(COMPACT, COMPACT_STATISTICS, random_tensors(COMPACT, 3), trained=False).sha256()
    assert compact.info.checkpoint_hash == after == fresh
    other = Checkpoint(COMPACT, COMPACT_STATISTICS, random_tensors(COMPACT, 4), trained=False).sha256()
    assert other != fresh


def test_random_weights_do_not_depend_on_or_disturb_the_global_generators():
    torch.manual_seed(0)
    np.random.seed(0)
    expected = torch.rand(1).item(), np.random.rand()
    torch.manual_seed(0)
    np.random.seed(0)
    load_backbone("compact", "random", seed=3)
    assert (torch.rand(1).item(), np.random.rand()) == expected


def test_the_backbone_is_frozen(compact):
    assert not any(p.requires_grad for p in compact.model.parameters())
    assert not compact.model.training
    prediction = compact.predict(compact._prompts.ids("pick"), torch.zeros(1, 12, 112, 112), torch.zeros(8))
    assert not prediction.hidden_states.requires_grad


def test_untrained_actions_stay_within_controller_units_and_vary_with_the_images(compact):
    chunks = np.stack([compact.infer(observe(seed)).base_chunk for seed in range(4)])
    black = {name: np.zeros((64, 64, 3), np.uint8) for name in compact.info.cameras}
    chunks = np.concatenate([chunks, compact.infer(observe(images=black)).base_chunk[None]])
    assert np.abs(chunks).max() <= 1.0
    assert chunks[..., :6].std(axis=0).mean() > 1e-3
    assert set(np.unique(chunks[..., 6])) <= {0.0, 1.0}


def test_each_input_reaches_the_hidden_state(compact):
    base = compact.infer(observe()).hidden_state
    for camera in compact.info.cameras:
        images = random_images(0)
        images[camera] = 255 - images[camera]
        assert np.abs(compact.infer(observe(images=images)).hidden_state - base).max() > 1e-4, camera
    moved = PROPRIO + np.float32(0.1)
    assert np.abs(compact.infer(observe(proprio=moved)).hidden_state - base).max() > 1e-4
    assert np.abs(compact.infer(observe(instruction="pick up the soup")).hidden_state - base).max() > 1e-4


def test_images_of_any_size_and_extra_cameras_are_taken(compact):
    images = {**random_images(0, 60, 80), "extra": np.zeros((4, 4, 3), np.uint8)}
    assert np.isfinite(compact.infer(observe(images=images)).base_chunk).all()


def test_a_missing_camera_is_named_with_those_needed(compact):
    images = random_images(0)
    del images["wrist"]
    with pytest.raises(UserError, match=r"'wrist' is missing.*\['agentview', 'wrist'\]"):
        compact.infer(observe(images=images))


def test_another_proprioception_size_is_refused(compact):
    with pytest.raises(UserError, match=r"7 values.*needs 8"):
        compact.infer(observe(proprio=PROPRIO[:7]))


@pytest.mark.parametrize("instruction", ["", "  \n"])
def test_a_blank_instruction_is_refused(compact, instruction):
    with pytest.raises(UserError, match="blank"):
        compact.infer(observe(instruction=instruction))


def test_an_instruction_longer_than_the_positions_is_refused(compact):
    with pytest.raises(UserError, match="shorten"):
        compact.infer(observe(instruction="x" * 3000))


def test_the_prompt_cache_is_bounded_and_keeps_the_ids(compact):
    first = compact._prompts.ids("task 0").clone()
    for number in range(PROMPT_CACHE + 10):
        compact._prompts.ids(f"task {number}")
    assert len(compact._prompts) == PROMPT_CACHE
    assert torch.equal(compact._prompts.ids("task 0"), first)


def test_warm_up_passes_and_a_closed_backbone_says_so():
    backbone = load_backbone("compact")
    backbone.warm_up()
    backbone.close()
    backbone.close()
    with pytest.raises(UserError, match="closed"):
        backbone.infer(observe())


def test_bfloat16_runs_near_fp32(compact):
    half = load_backbone("compact", "random", seed=3, dtype="bfloat16")
    assert half.info.checkpoint_hash == compact.info.checkpoint_hash
    difference = half.infer(observe()).base_chunk - compact.infer(observe()).base_chunk
    assert np.abs(difference[:, :6]).max() < 0.1


def test_a_policy_on_compact_with_an_untrained_memory_is_its_backbone(compact):
    policy = Policy(compact, load_memory(compact.info))
    step = policy.act(observe())
    np.testing.assert_array_equal(step.base_chunk, compact.infer(observe()).base_chunk)
    assert step.chunk.data[:, :3] == pytest.approx(0.05 * step.base_chunk[:, :3], abs=1e-7)
    assert {"forward", "memory", "total"} <= step.timing_ms.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "pi0"}, "'pi0' is unknown.*compact, openvla_oft"),
        ({"name": "openvla_oft"}, "no checkpoint"),
        ({"name": "compact", "dtype": "int8"}, "'int8'.*float32, bfloat16"),
        ({"name": "compact", "device": "tpu"}, "'tpu'"),
        ({"name": "compact", "device": "cuda:99"}, "not available"),
        ({"name": "openvla_oft", "checkpoint": "random"}, "no checkpoint"),
        ({"name": "compact", "unnorm_key": "bridge"}, "'bridge'.*aura_demonstrations"),
        ({"name": "compact", "checkpoint": "random", "unnorm_key": "bridge"}, "'bridge'.*libero_like"),
        ({"name": "compact", "checkpoint": "random", "seed": -1}, "seed -1"),
    ],
)
def test_bad_load_arguments_are_one_line_user_errors(arguments, message):
    with pytest.raises(UserError, match=message) as caught:
        load_backbone(**arguments)
    assert "\n" not in str(caught.value)
