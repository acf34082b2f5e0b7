"""All samples of some folders of demonstrations in memory, their statistics, and which ones a batch gets."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aura_ros.errors import UserError
from aura_ros.training.demonstrations import ARRAYS, KEYPOINT_NAMES, DemoFolder, Samples, check_alike
from aura_ros.types import FloatArray

# A twentieth of the episodes, by their names, is for validation.
VALIDATION_SHARE = 20
# Rotations hardly move in some data; normalised by their own range, noise would fill it.
ROTATION_FLOOR = 0.15
ROTATIONS = {"action": (3, 4, 5), "proprio": (3, 4, 5)}


@dataclass(frozen=True)
class DemoData:
    """Samples of many episodes, one after the other.

    samples: of all. instructions: the different ones. which: int64 [F], each sample's. weight: float64 [F], how often it
    should be seen, summing to 1 over those trained on. validation: bool [F].
    """

    samples: Samples
    instructions: tuple[str, ...]
    which: npt.NDArray[np.int64]
    weight: npt.NDArray[np.float64]
    validation: npt.NDArray[np.bool_]
    head: dict[str, Any]
    episodes: int


def load_data(folders: Sequence[DemoFolder], policy_weight: float) -> DemoData:
    """Read them all. policy_weight: of a sample where a policy drove, against 1 of the expert's.

    Raises UserError for folders that are empty, broken or not alike.
    """
    head = check_alike(folders)
    parts: list[Samples] = []
    names: list[str] = []
    sources: list[float] = []
    held: list[bool] = []
    for folder in folders:
        # Workers finish in any order; which batches a seed draws must not depend on it.
        for episode in sorted(folder.episodes(), key=lambda episode: str(episode["id"])):
            part = folder.samples(episode)
            if part.actions.shape[1:] != (head["horizon"], len(head["action_names"])):
                raise UserError(
                    f"'{folder.index / episode['id']}.npz' has chunks {list(part.actions.shape[1:])}, its folder says "
                    f"[{head['horizon']}, {len(head['action_names'])}]; delete it and index its bag again"
                )
            parts.append(part)
            names.append(str(episode["instruction"]))
            sources.append(policy_weight if episode.get("policy") else 1.0)
            held.append(zlib.crc32(str(episode["id"]).encode()) % VALIDATION_SHARE == 0)
    if all(held):
        held = [False] * len(held)
    lengths = [len(part) for part in parts]
    samples = _together(parts)
    if not len(samples):
        raise UserError(
            "the demonstrations hold no sample: no frame has all its actions; record longer episodes"
        )
    instructions = tuple(sorted(set(names)))
    which = np.repeat([instructions.index(name) for name in names], lengths)
    validation = np.repeat(held, lengths)
    weight = np.repeat(sources, lengths) * ~validation
    # Every instruction as often as any other.
    totals = Counter(dict(enumerate(np.bincount(which, weight, len(instructions)))))
    weight = weight / np.array([max(totals[w], 1e-12) for w in which])
    return DemoData(samples, instructions, which, weight / weight.sum(), validation, head, len(lengths))


def _together(parts: list[Samples]) -> Samples:
    """One after the other; a keypoint that some have is NaN in the others. Empties the list: memory is needed once."""
    more = {name for part in parts for name in part.keypoint_names} - set(KEYPOINT_NAMES)
    names = (*KEYPOINT_NAMES, *sorted(more))
    total = sum(len(part) for part in parts)
    arrays: dict[str, npt.NDArray[Any]] = {
        name: np.empty((total, *getattr(parts[0], name).shape[1:]), getattr(parts[0], name).dtype)
        for name in ARRAYS
    }
    arrays["keypoints"] = np.full((total, len(names), 3), np.nan, np.float32)
    row = 0
    while parts:
        part = parts.pop(0)
        rows = slice(row, row + len(part))
        for name in ARRAYS:
            if name != "keypoints":
                arrays[name][rows] = getattr(part, name)
        arrays["keypoints"][rows, [names.index(name) for name in part.keypoint_names]] = part.keypoints
        row += len(part)
    return Samples(**arrays, keypoint_names=names)


def statistics(data: DemoData, key: str) -> dict[str, Any]:
    """`dataset_statistics` as the checkpoint carries them: 1 % and 99 % quantiles, the gripper as it is."""
    chosen = ~data.validation
    actions = data.samples.actions[chosen].reshape(-1, data.samples.actions.shape[-1])
    proprio = data.samples.proprio[chosen]
    return {
        key: {
            "action": _quantiles(actions, ROTATIONS["action"], unmasked=actions.shape[1] - 1),
            "proprio": _quantiles(proprio, ROTATIONS["proprio"]),
            "num_trajectories": data.episodes,
            "num_transitions": len(data.samples),
        }
    }


def _quantiles(values: FloatArray, floored: Sequence[int], unmasked: int | None = None) -> dict[str, Any]:
    low, high = (np.quantile(values.astype(np.float64), q, axis=0) for q in (0.01, 0.99))
    middle, half = (low + high) / 2, (high - low) / 2
    for column in floored:
        half[column] = max(half[column], ROTATION_FLOOR)
    low, high = middle - half, middle + half
    mask = [column != unmasked for column in range(values.shape[1])]
    return {
        "q01": low.tolist(),
        "q99": high.tolist(),
        "mask": mask,
        "rotation_half_range_floor": ROTATION_FLOOR,
    }
