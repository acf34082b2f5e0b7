"""Node parameters declared from configuration dataclasses, and read back as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from rcl_interfaces.msg import (
    FloatingPointRange,
    IntegerRange,
    ParameterDescriptor,
    SetParametersResult,
)
from rclpy.exceptions import InvalidParameterValueException
from rclpy.node import Node
from rclpy.parameter import Parameter

from aura_ros.config import check_value, dotted
from aura_ros.errors import UserError

Config = TypeVar("Config")
UNBOUNDED = 2**62


def declare(node: Node, config_type: type[Config], defaults: Config | None = None) -> Config:
    """Declare one parameter per field of the dataclass and return the configuration that they give.

    An integer is accepted where a number with a fraction is expected (YAML writes 1.0 as 1). Raises UserError
    for a value of another type or out of range, naming the parameter.
    """
    values: dict[str, Any] = {}
    hints = get_type_hints(config_type)
    for spec in dataclasses.fields(config_type):  # type: ignore[arg-type]
        default = getattr(defaults, spec.name) if defaults is not None else spec.default
        start = list(default) if isinstance(default, tuple) else default
        try:
            given = node.declare_parameter(ros_name(spec.name), start, _descriptor(spec, hints[spec.name]))
        except InvalidParameterValueException:
            # Out of the descriptor's range. Declared without one, so that `convert` can say it in one line.
            given = node.declare_parameter(
                ros_name(spec.name), start, ParameterDescriptor(dynamic_typing=True)
            )
        values[spec.name] = convert(spec, hints[spec.name], given.value)
    return config_type(**values)


def watch(
    node: Node, config_type: type[Config], current: Callable[[], Config], apply: Callable[[Config], None]
) -> None:
    """Check changes of the run-time parameters against the dataclass and hand the new configuration over.

    A change is refused with the reason; `apply` gets a whole, checked configuration or is not called.
    """
    hints = get_type_hints(config_type)
    specs = {ros_name(spec.name): spec for spec in dataclasses.fields(config_type)}  # type: ignore[arg-type]

    def on_set(parameters: list[Parameter]) -> SetParametersResult:
        changes: dict[str, Any] = {}
        try:
            for parameter in parameters:
                spec = specs.get(parameter.name)
                if spec is None:
                    continue
                if spec.metadata.get("read_only", True):
                    raise UserError(
                        f"{parameter.name} cannot change while the node runs; restart it with the new value"
                    )
                changes[spec.name] = convert(spec, hints[spec.name], parameter.value)
            if changes:
                apply(dataclasses.replace(current(), **changes))  # type: ignore[type-var]
        except UserError as mistake:
            return SetParametersResult(successful=False, reason=str(mistake))
        return SetParametersResult(successful=True)

    node.add_on_set_parameters_callback(on_set)


def ros_name(field_name: str) -> str:
    """`proprio__sources` in Python is `proprio.sources` in ROS."""
    return dotted(field_name)


def convert(spec: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    """Turn a parameter's value into the field's type and check it. Raises UserError."""
    kind = str(hint)
    if value is None and kind.startswith("tuple"):
        value = ()  # ROS has no type for YAML's []
    if hint is float or kind.startswith("tuple[float"):
        many = not isinstance(value, (int, float)) and value is not None
        elements = list(value) if many and not isinstance(value, str) else [value]
        if any(isinstance(e, bool) or not isinstance(e, (int, float)) for e in elements) or many == (
            hint is float
        ):
            raise UserError(f"parameter {ros_name(spec.name)} is {value!r}; expected {_expected(hint)}")
        value = tuple(float(e) for e in elements) if many else float(value)
    elif kind.startswith("tuple[str"):
        if isinstance(value, str) or not all(isinstance(e, str) for e in value or ()):
            raise UserError(f"parameter {ros_name(spec.name)} is {value!r}; expected a list of strings")
        value = tuple(value or ())
    elif hint in (int, bool, str) and type(value) is not hint:
        raise UserError(f"parameter {ros_name(spec.name)} is {value!r}; expected {_expected(hint)}")
    check_value(spec, value)
    return value


def _expected(hint: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string (quote it)"}
    return names.get(hint, "a list of numbers")


def _descriptor(spec: dataclasses.Field[Any], hint: Any) -> ParameterDescriptor:
    low, high = spec.metadata.get("minimum"), spec.metadata.get("maximum")
    descriptor = ParameterDescriptor(
        description=spec.metadata.get("description", ""),
        read_only=spec.metadata.get("read_only", True),
        dynamic_typing=True,  # so that an integer may stand for a number with a fraction; `convert` checks types
    )
    if spec.metadata.get("choices"):
        descriptor.additional_constraints = "one of: " + ", ".join(map(str, spec.metadata["choices"]))
    if low is not None or high is not None:
        if hint is int:
            descriptor.integer_range = [
                IntegerRange(
                    from_value=int(low if low is not None else -UNBOUNDED),
                    to_value=int(high if high is not None else UNBOUNDED),
                )
            ]
        elif hint is float:
            descriptor.floating_point_range = [
                FloatingPointRange(
                    from_value=float(low if low is not None else "-inf"),
                    to_value=float(high if high is not None else "inf"),
                )
            ]
    return descriptor
