"""Configuration as dataclasses: one place for a field's default, range and meaning.

The command line and the nodes' parameters are both derived from these fields, so that a value is described
and checked once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any, get_type_hints

from aura_ros.errors import UserError


def option(
    default: Any,
    description: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Collection[Any] | None = None,
    read_only: bool = True,
) -> Any:
    """Describe a dataclass field: default, meaning, allowed values, and whether it may change at run time.

    minimum and maximum are inclusive and apply to numbers, and to each element of a tuple of numbers.
    """
    metadata = {
        "description": description,
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
        "read_only": read_only,
    }
    return dataclasses.field(default=default, metadata=metadata)


def check_fields(config: Any) -> None:
    """Check every field of a dataclass made with `option`; call it from `__post_init__`.

    Raises UserError naming the field, the value and what is allowed.
    """
    for spec in dataclasses.fields(config):
        check_value(spec, getattr(config, spec.name))


def dotted(field_name: str) -> str:
    """`gate__threshold` in Python is `gate.threshold` for users, as in ROS parameters."""
    return field_name.replace("__", ".")


def check_value(spec: dataclasses.Field[Any], value: Any) -> None:
    """Check one value against its field. Raises UserError."""
    choices = spec.metadata.get("choices")
    if choices is not None and value not in choices:
        allowed = ", ".join(str(c) for c in choices)
        raise UserError(f"{dotted(spec.name)} '{value}' is not known; choose one of: {allowed}")
    low, high = spec.metadata.get("minimum"), spec.metadata.get("maximum")
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            continue
        outside = (low is not None and number < low) or (high is not None and number > high)
        if math.isnan(number) or outside:
            raise UserError(f"{dotted(spec.name)} {number} is out of range; allowed: {_range(low, high)}")


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"{low} to {high}"
    if low is not None:
        return f"{low} or more"
    return f"{high} or less" if high is not None else "any number"


def from_text(config_type: type, name: str, text: str) -> Any:
    """Read a field's value from text (a launch argument) and check it. Raises UserError.

    Text for a text field is taken as it is, so that "yes", "null" or "3.0" stay what they are.
    """
    spec = {f.name: f for f in dataclasses.fields(config_type)}[name]
    hint = get_type_hints(config_type)[name]
    value: Any = text
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise UserError(f"{name} '{text}' is not known; choose one of: true, false")
        value = text.lower() == "true"
    elif hint in (int, float):
        try:
            value = hint(text)
        except ValueError:
            kind = "a whole number" if hint is int else "a number"
            raise UserError(f"{name} '{text}' is not {kind}") from None
    check_value(spec, value)
    return value
