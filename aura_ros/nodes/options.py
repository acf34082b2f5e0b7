"""What `aura sim` and the launch file offer: option -> field of a node's configuration. Imports no rclpy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from aura_ros.config import from_text
from aura_ros.errors import UserError

SIM_OPTIONS = {
    name: name
    for name in (
        *("suite", "task", "init_state", "seed", "displaced", "instruction_of"),
        *("cue", "delay", "named"),
        *("max_steps", "image_size", "rate"),
    )
}
POLICY_OPTIONS = {
    "backbone": "backbone",
    "checkpoint": "checkpoint",
    "device": "device",
    "dtype": "dtype",
    "accelerate": "accelerate",
    "unnorm_key": "unnorm_key",
    "cameras": "openvla_oft__cameras",
    "image_flip": "openvla_oft__image_flip",
    "horizon": "openvla_oft__horizon",
    "action_scale": "openvla_oft__action_scale",
    "period": "openvla_oft__period",
    "head": "openvla_oft__head",
    "film": "openvla_oft__film",
    "policy_seed": "seed",
    "memory_checkpoint": "memory__checkpoint",
    "memory_state_dim": "memory__state_dim",
    "gate_threshold": "gate__threshold",
    "action_limit": "action_limit",
}
# Of a policy on a robot, beside those.
ROBOT_OPTIONS = {
    "instruction": "instruction",
    "enabled_at_start": "enabled_at_start",
    "image_transport": "image_transport",
}


def read_options(
    texts: Mapping[str, str], config_type: type, options: Mapping[str, str], not_given: str
) -> dict[str, Any]:
    """Values of the options that were given, by field. Raises UserError naming the option.

    texts: option -> text, `not_given` where there is none.
    """
    values = {}
    for option, name in options.items():
        if texts[option] == not_given:
            continue
        try:
            values[name] = from_text(config_type, name, texts[option])
        except UserError as mistake:
            # The field `gate__threshold` is the parameter gate.threshold and the option --gate-threshold.
            names = re.escape(name).replace("__", r"(__|\.)")
            raise UserError(re.sub(names, option, str(mistake), count=1)) from None
    return values


def same_limit(sim: dict[str, Any], policy: Mapping[str, Any]) -> dict[str, Any]:
    """The simulator's values with the policy's action limit: else it would refuse what the policy was allowed."""
    return {**sim, "action_limit": policy["action_limit"]} if "action_limit" in policy else sim
