"""Say what a baseline of the memory is: its core and its sizes. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from aura_ros.config import check_fields, option
from aura_ros.errors import UserError
from aura_ros.memory.config import HEAD_INPUTS, INPUT_KINDS

GROWING, WINDOW, HEAVY_HITTERS, GATED_DELTA = "growing_kv", "window_kv", "heavy_hitter_kv", "gated_delta_net"
KINDS = (GROWING, WINDOW, HEAVY_HITTERS, GATED_DELTA)
FLOAT_BYTES = 4
# As in `aura_ros.memory.config`: left out of the text at these values.
LATER: dict[str, Any] = {
    "input_kind": "encoder",
    "residual": False,
    "head_input": "read",
    "head_hidden": 0,
    "memory_step_period": 1,
    "backbone": "",
}
# Beside its key and value, a row of the heavy-hitter cache holds the mass it has drawn and the step it came from.
HEAVY_EXTRA_BYTES = 8


@dataclass(frozen=True)
class BaselineConfig:
    """Everything that fixes a baseline but its weights. Checked at construction; raises UserError naming the field.

    budget: 4,224 bytes, the memory's state at N = 32, hold 16 rows of either cache at dk = dv = 32.
    """

    input_dim: int = option(6, "width of an observation", minimum=1, maximum=65_536)
    out_dim: int = option(4, "classes to answer with", minimum=1, maximum=65_536)
    kind: str = option(GROWING, "the core", choices=KINDS)
    d_model: int = option(64, "width of the encoded observation", minimum=1, maximum=4096)
    hidden: int = option(64, "width inside the encoder", minimum=1, maximum=4096)
    dk: int = option(32, "width of a key", minimum=1, maximum=1024)
    dv: int = option(32, "width of a value", minimum=1, maximum=1024)
    budget: int = option(
        4224, "bytes of window_kv and heavy_hitter_kv, batch 1, float32", minimum=16, maximum=2**31
    )
    sinks: int = option(4, "first steps that window_kv keeps for good", minimum=0, maximum=4096)
    input_kind: str = option("encoder", "as of a memory", choices=INPUT_KINDS)
    residual: bool = option(False, "the output starts at zero")
    head_input: str = option("read", "as of a memory", choices=HEAD_INPUTS)
    head_hidden: int = option(0, "width of the last layers; 0: dv", minimum=0, maximum=4096)
    memory_step_period: int = option(1, "control steps between two steps", minimum=1, maximum=1_000_000)
    backbone: str = option("", "hash of the backbone it was trained for")
    seed: int = option(0, "of the initial weights", minimum=0, maximum=2**31 - 1)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind in (WINDOW, HEAVY_HITTERS) and self.rows < 2:
            raise UserError(
                f"budget {self.budget} holds {self.rows} rows of {self.kind}; give 2 rows or more"
            )
        if self.kind == WINDOW and self.sinks >= self.rows:
            raise UserError(f"sinks {self.sinks} must be fewer than the {self.rows} rows that budget allows")

    @property
    def variant(self) -> str:
        """The kind, by the name that a memory's configuration has for it."""
        return self.kind

    @property
    def row_bytes(self) -> int:
        """Bytes of one step in a cache."""
        extra = HEAVY_EXTRA_BYTES if self.kind == HEAVY_HITTERS else 0
        return FLOAT_BYTES * (self.dk + self.dv) + extra

    @property
    def rows(self) -> int:
        """Steps that the budget holds."""
        return self.budget // self.row_bytes

    def to_json(self) -> str:
        """One line of JSON with sorted keys, the same text for the same configuration."""
        values = dataclasses.asdict(self)
        return json.dumps(
            {n: v for n, v in values.items() if n not in LATER or LATER[n] != v}, sort_keys=True
        )

    @classmethod
    def from_json(cls, text: str) -> BaselineConfig:
        """Read what `to_json` wrote. Raises UserError on malformed text, unknown fields, values that do not fit."""
        try:
            values: Any = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"baseline configuration is not JSON ({error}); train it again") from error
        if not isinstance(values, dict):
            raise UserError("baseline configuration is not a JSON object; train it again")
        known = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - set(known)):
            raise UserError(
                f"baseline configuration has unknown fields {unknown}; known are {sorted(known)}; "
                "it was written by a newer version"
            )
        for name, value in values.items():
            if type(value) is not known[name]:
                raise UserError(
                    f"baseline configuration: {name} is {value!r}; allowed: {known[name].__name__}; train it again"
                )
        return cls(**values)
