"""The memories that the package carries: what loads by default, whose they are, and documents that speak of these files."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from aura_ros.backbones.openvla_oft.checkpoint import load_checkpoint
from aura_ros.backbones.registry import shipped_checkpoint
from aura_ros.bench.arms import TRAINED, WITHOUT, arm_file, load_arm
from aura_ros.errors import UserError
from aura_ros.policy import Observation, Policy, PolicyConfig, load_policy
from aura_ros.policy.loading import shipped_memory
from tools import load_tool

ROOT = Path(__file__).resolve().parents[2]
MEMORIES = ROOT / "checkpoints" / "memories"


@pytest.fixture(scope="module")
def tool():
    """tools/update_closed_loop.py as a module."""
    return load_tool("update_closed_loop")


def test_the_gated_one_is_what_loads_with_the_shipped_policy_and_untrained_can_be_had():
    policy = load_policy(backbone="compact")
    assert Path(policy.memory_checkpoint) == shipped_memory()
    assert policy.memory.config.backbone == policy.backbone.info.checkpoint_hash
    assert (policy.memory.state_bytes, policy.memory.config.memory_step_period) == (4224, 8)
    assert load_policy(backbone="compact", memory_checkpoint="untrained").memory_checkpoint == ""
    # By the backbone's hash, not by how it was named; what it does not fit goes without.
    assert (
        Path(load_policy(backbone="compact", checkpoint=shipped_checkpoint()).memory_checkpoint)
        == shipped_memory()
    )
    others = [{"memory_state_dim": 16}, {"memory_step_period": 1}, {"checkpoint": "random"}]
    assert {load_policy(backbone="compact", **other).memory_checkpoint for other in others} == {""}


def test_every_arm_of_the_panel_has_one_of_the_shipped_policy():
    backbone = load_checkpoint(shipped_checkpoint()).sha256()
    assert {path.stem for path in MEMORIES.glob("*.safetensors")} == set(TRAINED)
    for arm in TRAINED:
        assert load_arm(MEMORIES / f"{arm}.safetensors").config.backbone == backbone, arm


@pytest.mark.parametrize("arm", TRAINED)
def test_every_arm_acts_in_a_policy(arm):
    backbone = load_policy(backbone="compact").backbone
    memory = load_arm(MEMORIES / f"{arm}.safetensors")
    policy = Policy(backbone, memory, PolicyConfig(), arm)
    picture = np.zeros((256, 256, 3), np.uint8)
    seen = Observation(dict.fromkeys(backbone.info.cameras, picture), np.zeros(8, np.float32), "do it")
    chunks = [policy.act(seen).chunk.data for _ in range(2)]
    assert np.isfinite(chunks).all()


def test_card_and_document_are_what_the_tool_makes_of_the_files(tool):
    assert tool.card(tool.CARD.read_text()) == tool.CARD.read_text()
    assert tool.document(tool.DOCUMENT.read_text()) == tool.DOCUMENT.read_text()


def test_the_panel_is_of_held_out_states_and_of_these_memories(tool):
    lines = tool.lines()
    assert {line["init_state"] for line in lines} <= set(range(40, 50))
    backbone = load_checkpoint(shipped_checkpoint()).sha256()
    for arm in {line["arm"] for line in lines}:
        weights = "" if arm in WITHOUT else f"-{crc32(arm_file(MEMORIES, arm).read_bytes()):08x}"
        assert {line["identity"] for line in lines if line["arm"] == arm} == {f"{backbone[:16]}-256{weights}"}
    for line in lines:
        if line["arm"] == "aura":
            assert line["state_bytes_first"] == line["state_bytes_last"] == 4224


def test_the_readme_says_what_the_panel_says(tool):
    cued = [line for line in tool.lines() if line["task"].startswith("cue_") and line["delay"] == 80]
    arms = {arm: [line for line in cued if line["arm"] == arm] for arm in ("base", "aura", "swap")}
    good = {arm: f"{sum(line['success'] for line in own)} of {len(own)}" for arm, own in arms.items()}
    writes = sum(line["writes"] for line in arms["aura"]) / len(arms["aura"])
    turned = sum(line["wrong"] for line in arms["swap"])
    assert turned == sum(line["wrong"] or line["success"] for line in arms["swap"])
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert (
        f"{good['base']} episodes succeed without it and {good['aura']} with it, at {writes:.1f} writes an episode"
        in readme
    )
    assert f"it goes to the other target in all {turned}" in readme
    late = [line for line in tool.lines() if line["delay"] == 800]
    good = {arm: [line["success"] for line in late if line["arm"] == arm] for arm in ("aura", "kv")}
    assert (
        f"it is {sum(good['aura'])} of {len(good['aura'])}, where attention over everything guesses" in readme
    )
    assert f"guesses, {sum(good['kv'])} of {len(good['kv'])}" in readme


def test_where_it_is_missing_that_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr("aura_ros.policy.loading.share_directory", lambda: tmp_path)
    with pytest.raises(
        UserError, match=r"the shipped memory '.*aura.safetensors' is missing; install the package"
    ):
        load_policy(backbone="compact")
