"""A query from observation to action chunk: frozen backbone, one memory step, residual, units, check."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from aura_ros.backbones.base import Backbone
from aura_ros.errors import UserError
from aura_ros.memory import MemoryConfig, MemoryStep, NumpyMemory, Variant
from aura_ros.policy.units import to_si
from aura_ros.types import ActionChunk, BackboneInfo, FloatArray, Observation


@dataclass(frozen=True)
class PolicyConfig:
    """action_limit: largest magnitude of an action, controller units; beyond it the chunk is rejected.

    memory_step_period: control steps between two queries, hence between two memory steps. None: the
    backbone's horizon, the chunk being executed to its end.
    """

    action_limit: float = 1.5
    memory_step_period: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.action_limit) and self.action_limit > 0):
            raise UserError(
                f"action_limit {self.action_limit} is not allowed; it must be positive and finite"
            )
        if self.memory_step_period is not None and self.memory_step_period < 1:
            raise UserError(
                f"memory_step_period {self.memory_step_period} is not allowed; it must be at least 1"
            )


@dataclass(frozen=True)
class PolicyStep:
    """One query. Its arrays are its own and stay valid.

    chunk: SI units. memory_step: what the gate did; its output is the residual, controller units, flat.
    hidden_state: float32 [hidden_dim]. base_chunk: float32 [horizon, dim], controller units, no residual.
    timing_ms: milliseconds by stage; "total" is the whole query.
    """

    chunk: ActionChunk
    memory_step: MemoryStep
    hidden_state: FloatArray
    base_chunk: FloatArray
    timing_ms: dict[str, float]


class ActionRejected(RuntimeError):  # noqa: N818 (the name says what happened to the actions)
    """A chunk with a value that is not finite or beyond the limit: nothing of it may be executed.

    row, name, value, limit: the first such value, controller units. memory_step, hidden_state, base_chunk: as
    in `PolicyStep`. The memory did step: its state is that after the observation, and consistent.
    """

    def __init__(
        self,
        row: int,
        name: str,
        value: float,
        limit: float,
        *,
        memory_step: MemoryStep,
        hidden_state: FloatArray,
        base_chunk: FloatArray,
    ) -> None:
        super().__init__(
            f"action chunk rejected: row {row}, '{name}' is {value:g} controller units; "
            f"it must be finite and within +-{limit:g}"
        )
        self.row = row
        self.name = name
        self.value = value
        self.limit = limit
        self.memory_step = memory_step
        self.hidden_state = hidden_state
        self.base_chunk = base_chunk


class Policy:
    """A frozen backbone whose chunk a gated memory corrects (paper sections 3.1 and 6.5).

    Called from one thread, but for `change`. `act` steps the memory exactly once; nothing else but `reset` changes it.
    """

    def __init__(
        self,
        backbone: Backbone,
        memory: NumpyMemory,
        config: PolicyConfig | None = None,
        memory_checkpoint: str = "",
    ) -> None:
        """memory_checkpoint: where the memory came from; "": it is untrained.

        Raises `UserError` if the memory was made for another backbone, hidden state, chunk or step period.
        """
        self.memory_checkpoint = memory_checkpoint
        self.config = config or PolicyConfig()
        self.backbone = backbone
        self.memory = memory
        # Write or skip at every step whatever the gate says (True, False); None: the gate decides.
        self.force: bool | None = None
        self._stepping = threading.Lock()  # held during a memory step, never during inference
        _check_fit(backbone.info, memory.config, self.memory_step_period)

    @property
    def memory_step_period(self) -> int:
        """Control steps between two queries."""
        return self.config.memory_step_period or self.backbone.info.action.horizon

    def change(self, *, threshold: float, force: bool | None, action_limit: float) -> None:
        """Let the next memory step use these, all of them; may be called from any thread.

        Waits for a memory step under way (microseconds), not for inference. Raises `UserError`, nothing changed, for a
        value that is not allowed.
        """
        if force is not None and not self.memory.config.has_fast_weights:
            raise UserError(
                f"gate.mode cannot force memory variant '{self.memory.config.variant.value}', which has no gated write; "
                "choose learned"
            )
        config = dataclasses.replace(self.config, action_limit=action_limit)
        with self._stepping:
            self.memory.threshold = threshold
            self.force, self.config = force, config

    def act(self, observation: Observation) -> PolicyStep:
        """Answer one observation.

        Raises `UserError` for an observation that does not fit, or a hidden state that is not finite (the
        memory is then as it was); `ActionRejected` for a chunk that must not be executed. Never clamps.
        """
        begin = time.perf_counter()
        output = self.backbone.infer(observation)
        spec = self.backbone.info.action
        if output.base_chunk.shape != (spec.horizon, spec.dim):
            raise UserError(
                f"backbone '{self.backbone.info.name}' gave a chunk {list(output.base_chunk.shape)}; "
                f"its info says [{spec.horizon}, {spec.dim}]"
            )
        before = time.perf_counter()
        with self._stepping:
            # What has no gate, as the caches that a memory is compared with, takes no word on it either.
            forced = {} if self.force is None else {"force": self.force}
            step = self.memory.step(output.hidden_state, **forced)
            limit = self.config.action_limit
        # The memory reuses its output buffer at its next step.
        step = dataclasses.replace(step, output=step.output.copy())
        after = time.perf_counter()
        controller = output.base_chunk + step.output.reshape(spec.horizon, spec.dim)
        bad = np.argwhere(~(np.abs(controller) <= limit))
        if len(bad):
            row, column = (int(index) for index in bad[0])
            raise ActionRejected(
                row,
                spec.names[column],
                float(controller[row, column]),
                limit,
                memory_step=step,
                hidden_state=output.hidden_state,
                base_chunk=output.base_chunk,
            )
        # After the check, which it would blind. A residual moves a two-valued column's decision, not its values.
        for column in self.backbone.info.binary_columns:
            controller[:, column] = controller[:, column] > 0.5
        chunk = ActionChunk(to_si(controller, spec), spec, observation.stamp_ns)
        timing = {
            **output.timing_ms,
            "memory": 1e3 * (after - before),
            "total": 1e3 * (time.perf_counter() - begin),
        }
        return PolicyStep(chunk, step, output.hidden_state, output.base_chunk, timing)

    def reset(self) -> None:
        """Clear the memory for a new episode."""
        self.memory.reset()

    def warm_up(self, instruction: str | None = None) -> None:
        """Check and warm the backbone, with the instruction to come if known; the memory is not stepped."""
        self.backbone.warm_up(instruction)

    def close(self) -> None:
        """Free the backbone's weights."""
        self.backbone.close()


def load_memory(
    info: BackboneInfo,
    checkpoint: str | Path | None = None,
    *,
    variant: Variant | str = Variant.AURA,
    state_size: int = 32,
    memory_step_period: int | None = None,
    seed: int = 0,
) -> NumpyMemory:
    """The memory for a backbone: from a checkpoint, or untrained from a seed.

    state_size: N = dk = dv of an untrained memory. memory_step_period: as in `PolicyConfig`.
    An untrained memory's output is exactly zero, so the policy is then its backbone. With a checkpoint only
    that file decides. Raises `UserError` for a bad file or one made for another backbone (in `Policy`).
    """
    if checkpoint is not None:
        return NumpyMemory.load(checkpoint)
    from aura_ros.memory import build_untrained

    config = MemoryConfig(
        input_dim=info.hidden_dim,
        out_dim=info.action.horizon * info.action.dim,
        variant=cast(Variant, variant),  # the config takes a name too, and refuses an unknown one
        input_kind="projection",
        dk=state_size,
        dv=state_size,
        residual=True,
        # Training starts from an open gate (+1) so that it learns what to write; an untrained one that is
        # deployed had better show both of its decisions.
        gate_bias_init=0.0,
        memory_step_period=memory_step_period or info.action.horizon,
        seed=seed,
    )
    return NumpyMemory.from_checkpoint(build_untrained(config))


def _check_fit(info: BackboneInfo, memory: Any, period: int) -> None:
    expected = {
        "input_dim": (memory.input_dim, info.hidden_dim, f"hidden_dim of backbone '{info.name}'"),
        "out_dim": (
            memory.out_dim,
            info.action.horizon * info.action.dim,
            f"horizon {info.action.horizon} x {info.action.dim} actions of backbone '{info.name}'",
        ),
        "memory_step_period": (
            memory.memory_step_period,
            period,
            "control steps between the policy's queries",
        ),
    }
    if memory.backbone and memory.backbone != info.checkpoint_hash:
        raise UserError(
            f"memory was trained on backbone {memory.backbone[:12]}, this one is {info.checkpoint_hash[:12]} "
            f"('{info.checkpoint}'); give that backbone, or train a memory for this one"
        )
    for field, (found, wanted, what) in expected.items():
        if found != wanted:
            raise UserError(
                f"memory {field} is {found} but must be {wanted}, the {what}; "
                "use a memory made for this policy"
            )
