"""Between physical or controller units and the network's [-1, 1], by a data set's quantiles or extremes.

Source: `_normalize_proprio` and `_unnormalize_actions` of moojink/openvla-oft @213c5ff. NumPy only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aura_ros.errors import UserError
from aura_ros.types import FloatArray

# Keeps a column that never moved in the data from dividing by zero.
RANGE_EPS = 1e-8


@dataclass(frozen=True)
class Bounds:
    """What -1 and 1 stand for, one value per column. mask: False leaves a column as it is."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    mask: tuple[bool, ...]

    def __post_init__(self) -> None:
        if not len(self.low) == len(self.high) == len(self.mask) >= 1:
            raise UserError(
                f"statistics have {len(self.low)} low, {len(self.high)} high and {len(self.mask)} mask "
                "values; they must be as many"
            )
        for column, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                raise UserError(
                    f"statistics column {column} goes from {low} to {high}; low must not exceed high"
                )

    @property
    def dim(self) -> int:
        """Columns."""
        return len(self.low)


@dataclass(frozen=True)
class Statistics:
    """One entry of `dataset_statistics.json`; proprio is None for a model without proprioception."""

    key: str
    action: Bounds
    proprio: Bounds | None


def normalise_proprio(proprio: FloatArray, bounds: Bounds) -> FloatArray:
    """Physical units [dim] -> float32 [dim], clipped to +-1.

    2 (x - low) / (high - low + 1e-8) - 1 where the mask is true, else x. A column without a range gives -1,
    what the formula gave for the data's only value; divided by 1e-8, sensor noise would jump between -1 and 1.
    """
    low, high = np.asarray(bounds.low), np.asarray(bounds.high)
    scaled = 2.0 * np.where(high > low, proprio - low, 0.0) / (high - low + RANGE_EPS) - 1.0
    return np.clip(np.where(bounds.mask, scaled, proprio), -1.0, 1.0).astype(np.float32)


def unnormalise_actions(actions: npt.NDArray[Any], bounds: Bounds) -> npt.NDArray[np.float64]:
    """Network output [..., dim] -> controller units: 0.5 (a + 1) (high - low + 1e-8) + low where masked."""
    low, high = np.asarray(bounds.low), np.asarray(bounds.high)
    return np.where(bounds.mask, 0.5 * (actions + 1.0) * (high - low + RANGE_EPS) + low, actions)


def binarise(actions: npt.NDArray[Any], columns: tuple[int, ...]) -> npt.NDArray[Any]:
    """A copy whose `columns` are 1 (open) where above 0.5, else 0 (closed)."""
    result = actions.copy()
    for column in columns:
        result[..., column] = result[..., column] > 0.5
    return result


def select_statistics(
    statistics: Mapping[str, Any], key: str | None, *, action_dim: int, proprio_dim: int, bounds: str = "q99"
) -> Statistics:
    """Take one entry of the statistics by its un-normalisation key (None: the only one) and check its sizes.

    bounds: "q99", the columns q01 and q99, or "min_max".
    Raises `UserError` for an unknown key (the message lists the valid ones), several entries and no key, or
    an entry that is malformed or of other dimensions.
    """
    keys = sorted(statistics)
    if key is None and len(keys) != 1:
        raise UserError(f"the checkpoint has statistics for {keys}; choose one as un-normalisation key")
    key = keys[0] if key is None else key
    if key not in statistics:
        raise UserError(f"un-normalisation key '{key}' is unknown; choose one of: {', '.join(keys)}")
    entry = statistics[key]
    names = ("q01", "q99") if bounds == "q99" else ("min", "max")
    action = _bounds(entry, key, "action", action_dim, names)
    return Statistics(
        key, action, _bounds(entry, key, "proprio", proprio_dim, names) if proprio_dim else None
    )


def _bounds(entry: Any, key: str, part: str, dim: int, names: tuple[str, str]) -> Bounds:
    try:
        raw = entry[part]
        low, high = ([_number(value) for value in raw[name]] for name in names)
        mask = list(raw.get("mask", [True] * len(low)))
        if not all(isinstance(value, bool) for value in mask):
            raise TypeError("the mask must hold true and false only")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(
            f"statistics '{key}' have no usable {part} {names[0]} and {names[1]} ({error!r})"
        ) from error
    if len(low) != dim:
        raise UserError(f"statistics '{key}' have {len(low)} {part} columns; the model has {dim}")
    try:
        return Bounds(tuple(low), tuple(high), tuple(mask))
    except UserError as error:
        raise UserError(f"statistics '{key}', {part}: {error}; get dataset_statistics.json again") from error


def _number(value: Any) -> float:
    # Text or truth values in a column mean that the file holds something else than was written there.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return float(value)


# Round, LIBERO-like ranges for weights that were never trained. Actions: controller units, gripper untouched.
# Proprioception: eef position (m; scenes stand on the floor or on a 0.9 m table), axis-angle (rad; the tool
# points down, hence the first near pi), gripper finger positions (m).
COMPACT_STATISTICS: dict[str, Any] = {
    "libero_like": {
        "action": {
            "q01": [-0.9375, -0.9375, -0.9375, -0.3, -0.3, -0.3, 0.0],
            "q99": [0.9375, 0.9375, 0.9375, 0.3, 0.3, 0.3, 1.0],
            "mask": [True, True, True, True, True, True, False],
        },
        "proprio": {
            "q01": [-0.4, -0.4, 0.0, 1.8, -1.4, -0.8, 0.0, -0.04],
            "q99": [0.25, 0.4, 1.4, 3.8, 1.4, 0.8, 0.04, 0.0],
            "mask": [True] * 8,
        },
    }
}
