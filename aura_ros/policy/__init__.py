"""Backbone + memory + residual = `Policy.act(observation)`.

Importing this package imports no torch; a backbone and an untrained memory do when they are built.
"""

from aura_ros.policy.loading import load_policy
from aura_ros.policy.policy import ActionRejected, Policy, PolicyConfig, PolicyStep, load_memory
from aura_ros.policy.units import to_controller, to_si
from aura_ros.types import ActionChunk, ActionSpec, BackboneInfo, BackboneOutput, ControlMode, Observation

__all__ = [
    "ActionChunk",
    "ActionRejected",
    "ActionSpec",
    "BackboneInfo",
    "BackboneOutput",
    "ControlMode",
    "Observation",
    "Policy",
    "PolicyConfig",
    "PolicyStep",
    "load_memory",
    "load_policy",
    "to_controller",
    "to_si",
]
