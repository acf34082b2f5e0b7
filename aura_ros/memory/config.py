"""Say what a memory is: its variant, its sizes, and the shape of every tensor that follows from them."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from aura_ros.errors import UserError


class Variant(str, Enum):
    """The memory and its baselines (paper section 5.2).

    Five share one set of weights and differ only in who decides to write: `aura` (learned gate),
    `fixed_size_state` and `write_every_step` (always; the paper reports the same cell under two names),
    `random_write` and `periodic_write` (a schedule at `write_rate`, blind to content).
    """

    AURA = "aura"
    FIXED_SIZE_STATE = "fixed_size_state"
    WRITE_EVERY_STEP = "write_every_step"
    RANDOM_WRITE = "random_write"
    PERIODIC_WRITE = "periodic_write"
    FULL_RECURRENCE = "full_recurrence"
    NO_MEMORY = "no_memory"
    LEARNED_TOKEN_GATE = "learned_token_gate"


# In place of a checkpoint's path: a memory from a seed alone.
UNTRAINED = "untrained"
GATED_VARIANTS = frozenset({Variant.AURA, Variant.LEARNED_TOKEN_GATE})
ALWAYS_WRITE_VARIANTS = frozenset({Variant.FIXED_SIZE_STATE, Variant.WRITE_EVERY_STEP})
FAST_WEIGHT_VARIANTS = (
    GATED_VARIANTS | ALWAYS_WRITE_VARIANTS | frozenset({Variant.RANDOM_WRITE, Variant.PERIODIC_WRITE})
)

INPUT_KINDS = ("encoder", "projection")
HEAD_INPUTS = ("read", "read_and_z")
# Fields that came later, with the value that means what was before them: left out of the text there, so that the hashes
# of checkpoints that are older stay what they are.
_ANY = object()
LATER: dict[str, Any] = {"head_input": "read", "head_hidden": 0, "backbone": ""}
GATE_ESTIMATORS = ("straight_through", "gumbel_sigmoid")

# Hidden layer of the token-prediction head that `learned_token_gate` adds (paper table 6: 1,165 more).
TOKEN_HIDDEN = 14


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Everything that fixes a memory but its weights. Checked at construction.

    variant: a `Variant` or its name.
    input_dim: width of one input vector: an observation, or a backbone's hidden state (4096 for OpenVLA).
    out_dim: width of the output: classes of a recall task, or horizon * action_dim of a residual.
    input_kind: "encoder" = Linear, ReLU, Linear; "projection" = one Linear (paper figure 1, z = proj(h)).
    d_model: width of z. hidden: width inside encoder, gate and predictor (paper table 5: 64 each).
    dk, dv: rows (keys) and columns (values) of the fast-weight matrix W. The paper's N = dk = dv.
    gru_hidden: state width of `full_recurrence`. token_classes: outputs of `learned_token_gate`'s extra head.
    predictor: allocate the paper's unused predictor (paper B.2), only so that its counts can be reproduced;
        variants without fast weights have none.
    normalise_keys: L2-normalise q and k. With it a write is stable for eta < 1.
    residual: the last Linear starts at zero, so an untrained memory's output is exactly 0.0.
    head_input: what the last layers see: "read" = the code of the read o alone, as in the paper; "read_and_z" = z beside
        it, for a residual that depends on what is seen now too. head_hidden: their width; 0 is dv.
    backbone: checkpoint_hash of the backbone whose hidden states it was trained on; "": any of the same widths.
    temperature: the paper's tau in p = sigmoid(logit / tau). threshold: the gate fires when p > threshold.
        (The paper's figure 1 calls the threshold tau too; here they are two things.)
    gate_estimator: how a gradient passes the gate in training. gate_noise: scale of the logistic noise that
        "gumbel_sigmoid" adds to the logit in training.
    gate_bias_init: last bias of the gate at the start. eta_init, alpha_init: inner learning rate and decay
        at the start, both learned.
    write_rate: fraction of steps that `random_write` and `periodic_write` write (the paper's rho).
    memory_step_period: control steps between two memory steps that the memory was trained at.
    seed: of the weights' initialisation and of `random_write`'s schedule.

    Raises UserError that names the field, its value and what is allowed.
    """

    input_dim: int
    out_dim: int
    variant: Variant = Variant.AURA
    input_kind: str = "encoder"
    d_model: int = 64
    hidden: int = 64
    dk: int = 32
    dv: int = 32
    gru_hidden: int = 53
    token_classes: int = 17
    predictor: bool = False
    normalise_keys: bool = True
    residual: bool = False
    head_input: str = "read"
    head_hidden: int = 0
    backbone: str = ""
    temperature: float = 1.0
    threshold: float = 0.5
    gate_estimator: str = "straight_through"
    gate_noise: float = 1.0
    gate_bias_init: float = 1.0
    eta_init: float = 0.5
    alpha_init: float = 0.01
    write_rate: float = 0.15
    memory_step_period: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        names = [variant.value for variant in Variant]
        if self.variant not in names:
            raise _refused("variant", self.variant, "one of " + ", ".join(names))
        object.__setattr__(self, "variant", Variant(self.variant))
        for field, allowed in (
            ("input_kind", INPUT_KINDS),
            ("gate_estimator", GATE_ESTIMATORS),
            ("head_input", HEAD_INPUTS),
        ):
            if getattr(self, field) not in allowed:
                raise _refused(field, getattr(self, field), "one of " + ", ".join(allowed))
        for field in ("predictor", "normalise_keys", "residual"):
            if not isinstance(getattr(self, field), bool):
                raise _refused(field, getattr(self, field), "true or false")
        if not isinstance(self.backbone, str):
            raise _refused("backbone", self.backbone, "the hash of a backbone")
        # Upper limits keep a malformed checkpoint from asking for more memory than any machine has.
        self._check_integer("input_dim", 1, 65536)
        self._check_integer("out_dim", 1, 65536)
        for field in ("d_model", "hidden", "gru_hidden", "token_classes"):
            self._check_integer(field, 1, 4096)
        for field in ("dk", "dv"):
            self._check_integer(field, 1, 1024)
        self._check_integer("head_hidden", 0, 4096)
        self._check_integer("memory_step_period", 1, 1_000_000)
        self._check_integer("seed", 0, 2**63 - 1)
        self._check_number("temperature", 1e-3, 1e3)
        self._check_number("threshold", 0.0, 1.0)
        self._check_number("gate_noise", 0.0, 10.0)
        self._check_number("gate_bias_init", -20.0, 20.0)
        self._check_number("eta_init", 1e-6, 10.0)
        self._check_number("alpha_init", 1e-6, 0.999)
        self._check_number("write_rate", 1e-6, 1.0)

    def _check_integer(self, field: str, low: int, high: int) -> None:
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _refused(field, value, f"a whole number from {low} to {high}")

    def _check_number(self, field: str, low: float, high: float) -> None:
        value = getattr(self, field)
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not low <= value <= high:
            raise _refused(field, value, f"a number from {low:g} to {high:g}")
        object.__setattr__(self, field, float(value))

    @property
    def has_fast_weights(self) -> bool:
        """Whether the state is W and the previous read."""
        return self.variant in FAST_WEIGHT_VARIANTS

    @property
    def write_interval(self) -> int:
        """Steps from one write of `periodic_write` to the next; step 0 writes."""
        return max(1, round(1.0 / self.write_rate))

    @property
    def head_sees_z(self) -> bool:
        """Whether the last layers see z beside the read's code."""
        return self.head_input == "read_and_z"

    @property
    def head_width(self) -> int:
        """Of the last layers."""
        return self.head_hidden or self.dv

    def to_json(self) -> str:
        """One line of JSON with sorted keys, the same text for the same configuration."""
        values = dataclasses.asdict(self)
        values["variant"] = self.variant.value
        values = {name: value for name, value in values.items() if LATER.get(name, _ANY) != value}
        return json.dumps(values, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> MemoryConfig:
        """Read what `to_json` wrote. Raises UserError on malformed text, unknown or missing fields."""
        try:
            values: Any = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"memory configuration is not JSON ({error}); export the memory again") from error
        if not isinstance(values, dict):
            raise UserError("memory configuration is not a JSON object; export the memory again")
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise UserError(
                f"memory configuration has unknown fields {unknown}; known are {sorted(known)}; "
                "it was written by a newer version"
            )
        if missing := sorted({"input_dim", "out_dim"} - set(values)):
            raise UserError(f"memory configuration lacks {missing}; export the memory again")
        return cls(**values)


def _refused(field: str, value: object, allowed: str) -> UserError:
    return UserError(f"memory config: {field} is {value!r}; allowed: {allowed}")


def parameter_shapes(config: MemoryConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every learned tensor, as the torch module and its checkpoints have them.

    A Linear's weight is [out, in]. The sum of the products is the parameter count of paper table 6.
    """
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, inputs: int, outputs: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)

    width, hidden, dk, dv = config.d_model, config.hidden, config.dk, config.dv
    if config.input_kind == "encoder":
        linear("encoder.0", config.input_dim, hidden)
        linear("encoder.2", hidden, width)
    else:
        linear("encoder", config.input_dim, width)
    if config.has_fast_weights:
        linear("to_q", width, dk, bias=False)
        linear("to_k", width, dk, bias=False)
        linear("to_v", width, dv, bias=False)
        linear("gate.0", width + dv + 1, hidden)
        linear("gate.2", hidden, 1)
        shapes["eta_raw"] = ()
        shapes["alpha_raw"] = ()
        if config.predictor:
            linear("predictor.0", dk + dv, hidden)
            linear("predictor.2", hidden, width)
    if config.variant is Variant.LEARNED_TOKEN_GATE:
        linear("token_head.0", width, TOKEN_HIDDEN)
        linear("token_head.2", TOKEN_HIDDEN, config.token_classes)
    if config.variant is Variant.FULL_RECURRENCE:
        size = config.gru_hidden
        shapes["cell.weight_ih"] = (3 * size, width)
        shapes["cell.weight_hh"] = (3 * size, size)
        shapes["cell.bias_ih"] = (3 * size,)
        shapes["cell.bias_hh"] = (3 * size,)
        linear("to_read", size, dv)
    if config.variant is Variant.NO_MEMORY:
        linear("to_read", width, dv)
    linear("head.to_mu", dv, dv)
    linear("head.to_logvar", dv, dv)
    inside = config.head_width
    linear("head.action.0", dv + (width if config.head_sees_z else 0), inside)
    linear("head.action.2", inside, inside)
    linear("head.action.4", inside, config.out_dim)
    return shapes


def buffer_shapes(config: MemoryConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that is kept but not learned: the surprise's running statistics."""
    if not config.has_fast_weights:
        return {}
    return {"surprise_mean": (), "surprise_variance": (), "surprise_ready": ()}
