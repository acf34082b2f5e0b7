"""The interface every backbone has; the policy and the nodes know nothing else of it."""

from __future__ import annotations

from typing import Protocol

from aura_ros.types import BackboneInfo, BackboneOutput, Observation


class Backbone(Protocol):
    """A frozen policy: observation -> hidden state and base chunk.

    `infer` is a pure function of the observation: same input, same bytes. It is called from one thread.
    """

    @property
    def info(self) -> BackboneInfo:
        """Sizes, action columns and the identity of the weights; constant over the object's life."""
        ...

    def infer(self, observation: Observation) -> BackboneOutput:
        """One forward pass. Raises `UserError` if the observation does not fit `info`."""
        ...

    def warm_up(self, instruction: str | None = None) -> None:
        """Check the model and run it once on test images; raises `UserError` if a check fails.

        instruction: one to come, for models that are prepared for the length of a prompt.
        """
        ...

    def close(self) -> None:
        """Free the weights. `infer` must not be called afterwards; a second call does nothing."""
        ...
