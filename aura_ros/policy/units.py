"""Between controller units, which a backbone speaks, and SI, which the rest of the robot does (REP-103)."""

from __future__ import annotations

import numpy as np

from aura_ros.errors import UserError
from aura_ros.types import ActionSpec, FloatArray


def to_si(controller: FloatArray, spec: ActionSpec) -> FloatArray:
    """Controller units [..., dim] -> SI, float32 [..., dim]: each column times `spec.scale`."""
    return (_columns(controller, spec) * np.asarray(spec.scale)).astype(np.float32)


def to_controller(si: FloatArray, spec: ActionSpec) -> FloatArray:
    """SI [..., dim] -> controller units, float32 [..., dim]; undoes `to_si` to 1e-6."""
    return (_columns(si, spec) / np.asarray(spec.scale)).astype(np.float32)


def _columns(values: FloatArray, spec: ActionSpec) -> FloatArray:
    if values.ndim < 1 or values.shape[-1] != spec.dim:
        raise UserError(
            f"actions have shape {list(values.shape)}; expected {spec.dim} columns {list(spec.names)}"
        )
    return values
