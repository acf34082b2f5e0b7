"""What parameters say about the gate, applied to a policy between two memory steps; with it the budget of writes."""

from __future__ import annotations

import copy
from typing import Any

from aura_ros.control.write_budget import WriteBudget
from aura_ros.errors import UserError
from aura_ros.memory import MemoryStep
from aura_ros.memory.config import GATED_VARIANTS
from aura_ros.nodes.policy_config import PolicyNodeConfig
from aura_ros.policy import Policy

FORCE = {"learned": None, "always": True, "never": False}


class GateSettings:
    """The gate of one policy. Not safe to use from several threads at once.

    step_s: seconds between memory steps.
    """

    def __init__(self, policy: Policy, step_s: float):
        self._policy, self._step_s = policy, step_s
        self.budget = WriteBudget(own=policy.memory.config.threshold)

    def apply(self, config: PolicyNodeConfig) -> None:
        """Use these parameters from the next memory step on. Raises UserError, nothing changed, for what cannot be."""
        memory = self._policy.memory.config
        if config.gate__writes_per_second > 0 and memory.variant not in GATED_VARIANTS:
            raise UserError(
                f"gate.writes_per_second {config.gate__writes_per_second:g} needs a learned gate, which memory variant "
                f"'{memory.variant.value}' has not; set it to 0"
            )
        own = config.gate__threshold if config.gate__threshold >= 0 else memory.threshold
        budget = copy.deepcopy(self.budget)
        budget.change(config.gate__writes_per_second * self._step_s, own, config.write_rate_window)
        self._policy.change(
            threshold=budget.threshold,
            force=FORCE[config.gate__mode],
            action_limit=config.action_limit,
        )
        self.budget = budget

    def stepped(self, step: MemoryStep) -> None:
        """Take a memory step into account. A forced one is not the gate's, and no budget holds it."""
        if self._policy.force is None and self.budget.share > 0:
            self.budget.after(step.written_bytes > 0)
            self._policy.memory.threshold = self.budget.threshold

    def begin(self, saved: dict[str, Any] | None) -> None:
        """A new life of the memory: the whole budget, or what `saved` gave of it."""
        self.budget.clear()
        if saved is not None:
            self.budget.restore(**saved)
        if self.budget.share > 0:
            self._policy.memory.threshold = self.budget.threshold

    def saved(self) -> dict[str, Any] | None:
        """The budget, for `begin` after a restart; None where there is none."""
        return self.budget.saved() if self.budget.share > 0 else None
