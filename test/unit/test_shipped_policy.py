"""The policy that the package carries: what loads by default, and a model card that speaks of that very file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aura_ros.backbones.openvla_oft.checkpoint import load_checkpoint
from aura_ros.backbones.registry import load_backbone, shipped_checkpoint
from aura_ros.errors import UserError
from aura_ros.sim.suites import INIT_STATES_PER_TASK
from aura_ros.training.collection import TRAINED_STATES
from tools import load_tool

ROOT = Path(__file__).resolve().parents[2]
CARD = ROOT / "checkpoints" / "README.md"


def test_it_is_what_loads_without_a_name_trained_and_small():
    backbone = load_backbone("compact")
    info = backbone.info
    backbone.close()
    assert info.trained
    assert Path(info.checkpoint) == shipped_checkpoint()
    assert info.checkpoint_hash == load_checkpoint(shipped_checkpoint()).sha256()
    assert shipped_checkpoint().stat().st_size <= 12_000_000


def test_its_card_is_what_the_tool_makes_of_the_file_and_its_results():
    # The tool refuses results of another file.
    assert load_tool("update_model_card").card(CARD.read_text()) == CARD.read_text()
    assert load_checkpoint(shipped_checkpoint()).sha256() in CARD.read_text()


def test_the_readme_says_what_the_results_say():
    lines = map(json.loads, (ROOT / "results" / "policy" / "eval.jsonl").read_text().splitlines())
    counts = {}
    for line in lines:
        if line["arm"] == "policy":
            split = (
                "told" if line["instruction_of"] >= 0 else "displaced" if line["displaced"] else "official"
            )
            good, tried = counts.get(split, (0, 0))
            counts[split] = good + line["success"], tried + 1
    said = {split: f"{good} of {tried}" for split, (good, tried) in counts.items()}
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert (
        f"{said['official']} held-out official states, {said['displaced']} with moved objects, and fetches what it is told "
        f"instead in {said['told']}" in readme
    )


def test_it_was_judged_on_states_that_no_demonstration_has():
    lines = (ROOT / "results" / "policy" / "eval.jsonl").read_text().splitlines()
    states = {json.loads(line)["init_state"] for line in lines}
    assert states == set(range(TRAINED_STATES, INIT_STATES_PER_TASK))


def test_where_it_is_missing_that_is_said(monkeypatch, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr("aura_ros.backbones.registry.share_directory", lambda: tmp_path)
    with pytest.raises(
        UserError, match=r"the shipped policy '.*compact.safetensors' is missing; install the package"
    ):
        load_backbone("compact")
