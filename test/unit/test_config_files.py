"""The YAML files that are shipped: whole, valid, and what their generator makes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from aura_ros.nodes.player_config import PlayerConfig
from aura_ros.nodes.policy_config import PolicyNodeConfig
from tools import load_tool

CONFIG = Path(__file__).resolve().parents[2] / "config"
NODES = {"policy_node": PolicyNodeConfig, "chunk_player": PlayerConfig}


def parameters(path):
    """Node -> fields of its configuration, as given in the file."""
    found = yaml.safe_load(path.read_text())
    return {
        node.removeprefix("/**/"): {
            name.replace(".", "__"): tuple(value) if isinstance(value, list) else value
            for name, value in body["ros__parameters"].items()
        }
        for node, body in found.items()
    }


@pytest.mark.parametrize("name", ["policy.yaml", "chunk_player.yaml"])
def test_a_documented_file_has_every_parameter_with_its_default(name):
    tool = load_tool("update_config")
    assert (CONFIG / name).read_text() == tool.text(name)
    ((node, given),) = parameters(CONFIG / name).items()
    assert set(given) == {field.name for field in dataclasses.fields(NODES[node])}
    assert NODES[node](**given) == NODES[node]()


@pytest.mark.parametrize("path", sorted(CONFIG.glob("robots/*.yaml")), ids=lambda path: path.stem)
def test_an_example_for_a_robot_is_valid_and_its_limits_are_bounded(path):
    given = parameters(path)
    policy, player = PolicyNodeConfig(**given["policy_node"]), PlayerConfig(**given["chunk_player"])
    assert policy.mode == "realtime"
    assert not policy.enabled_at_start
    assert len(player.limits__step) == len(player.columns)
    assert all(step < 10 for step in player.limits__step)
