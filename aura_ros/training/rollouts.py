"""A folder of rollouts: what a frozen backbone made of episodes, and what was right; what a memory is trained on.

DIR/rollouts.json    what all its episodes share: backbone, period, chunk
DIR/episodes.jsonl   a line an episode
DIR/bags/ID/         a rosbag2 bag with `latent`, `base_chunk` and `action`
DIR/index/ID.npz     the same as training reads it; made from the bag alone
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aura_ros.errors import UserError
from aura_ros.policy.units import to_controller
from aura_ros.report.reading import read_bag
from aura_ros.training.demo_bags import chunk_rows, label_of, nearest
from aura_ros.training.demonstrations import DemoFolder, save_arrays
from aura_ros.types import LIBERO_ACTION_SPEC, ActionSpec, FloatArray

ARRAYS = ("hidden", "base", "target", "step")
SHARED = ("backbone", "hidden_dim", "memory_step_period", "horizon", "action_names", "period_s")
# A bag has the first where it was made for training, else the second, which a memory may have changed.
BASE, CHUNK = "base_chunk", "action_chunk"


@dataclass(frozen=True)
class Rollout:
    """One episode, a row for each query; Q queries.

    hidden: float32 [Q, hidden_dim]. base: float32 [Q, horizon, D], the backbone's own chunk, controller units, gripper 1
    open. target: the same of what was right, NaN where nothing was asked, as in the hold of a cue task. step: int64 [Q],
    control steps since the first.
    """

    hidden: FloatArray
    base: FloatArray
    target: FloatArray
    step: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.step)


class RolloutFolder(DemoFolder):
    """Rollouts on disk, open for adding or reading."""

    head_name, what, made_by = "rollouts.json", "rollouts", "`aura collect --latents`"

    def rollout(self, episode: dict[str, Any]) -> Rollout:
        """An episode's arrays. Raises UserError for a file that is missing, cut off or broken."""
        path = self._index_of(episode)
        try:
            with np.load(path, allow_pickle=False) as file:
                found = Rollout(**{name: file[name] for name in ARRAYS})
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise UserError(
                f"'{path}' is no index of rollouts ({type(error).__name__}: {error}); delete it and collect it again"
            ) from error
        same = (
            len({len(getattr(found, name)) for name in ARRAYS}) == 1
            and found.base.shape == found.target.shape
        )
        if not same or found.hidden.ndim != 2 or not np.isfinite(found.hidden).all():
            raise UserError(f"'{path}' has arrays that do not fit together; delete it and collect it again")
        return found


def save_rollout(path: Path, rollout: Rollout) -> None:
    """Write the file whole or not at all. Raises UserError if it cannot be."""
    save_arrays(path, {name: getattr(rollout, name) for name in ARRAYS})


def policy_of(path: Path) -> dict[str, Any]:
    """Whose hidden states a bag has: backbone, hidden_dim and memory_step_period. Raises UserError if it does not say."""
    for found in read_bag(path):
        if found.message.__msgtype__.endswith("/PolicyInfo"):
            info = found.message
            return {
                "backbone": str(info.checkpoint_hash),
                "hidden_dim": int(info.hidden_dim),
                "memory_step_period": int(info.memory_step_period),
            }
    raise UserError(
        f"bag '{path}' has no PolicyInfo: whose hidden states it holds is unknown; record policy_node/info too"
    )


def index_rollout(path: Path, spec: ActionSpec = LIBERO_ACTION_SPEC) -> Rollout:
    """A bag's hidden states, the backbone's chunks for them, and the actions that were right, by their stamps.

    Actions as in `demo_bags`: a plan of the horizon, or one row a period. Raises UserError for a bag without hidden
    states or actions, and for one whose chunks a trained memory has changed.
    """
    streams: dict[str, dict[int, Any]] = {name: {} for name in ("latent", BASE, CHUNK, "action", "plan")}
    info = None
    for topic, _, message in read_bag(path):
        name = topic.rsplit("/", 1)[-1]
        if name == "policy_info" or message.__msgtype__.endswith("/PolicyInfo"):
            info = message
            continue
        if name not in streams:
            continue
        stamp = message.header.stamp
        stream = "plan" if name == "action" and message.horizon > 1 else name
        streams[stream][stamp.sec * 10**9 + stamp.nanosec] = message
    if not streams["latent"]:
        raise UserError(
            f"bag '{path}' has no hidden states; record it with publish_latent and record_latents"
        )
    if not streams[BASE] and info is not None and not info.memory_checkpoint.startswith("untrained"):
        raise UserError(
            f"bag '{path}' is of a policy with memory '{info.memory_checkpoint}', which changed its chunks; record it with "
            "memory.checkpoint:=untrained, whose residual is zero"
        )
    chunks = streams[BASE] or streams[CHUNK]
    if not streams["action"] and not streams["plan"]:
        raise UserError(
            f"bag '{path}' has no messages on 'action': there is nothing to imitate; record what was right"
        )
    period = round(spec.period_s * 1e9)
    plans = chunk_rows(path, streams["plan"], spec, spec.horizon)
    rows = {stamp: data[0] for stamp, data in chunk_rows(path, streams["action"], spec, 1).items()}
    row_times = np.array(sorted(rows), np.int64)
    chunk_times = np.array(sorted(chunks), np.int64)
    found: dict[str, list[Any]] = {name: [] for name in ARRAYS}
    stamps = sorted(streams["latent"])
    for stamp in stamps:
        at = nearest(chunk_times, stamp, period // 2)
        if at is None:
            raise UserError(
                f"bag '{path}' has no chunk for its hidden state at {stamp} ns; record 'action_chunk' too"
            )
        chunk = np.asarray(chunks[at].data, np.float32).reshape(-1, spec.dim)
        right = label_of(stamp, plans, rows, row_times, spec.horizon, period)
        found["hidden"].append(np.asarray(streams["latent"][stamp].data, np.float32))
        found["base"].append(to_controller(chunk, spec))
        found["target"].append(np.full(chunk.shape, np.nan, np.float32) if right is None else right)
        found["step"].append(round((stamp - stamps[0]) / period))
    return Rollout(
        np.stack(found["hidden"]),
        np.stack(found["base"]).astype(np.float32),
        np.stack(found["target"]).astype(np.float32),
        np.array(found["step"], np.int64),
    )


@dataclass(frozen=True)
class RolloutData:
    """Episodes as batches take them, padded at their end: E episodes of Q queries at most.

    hidden: float32 [E, Q, hidden_dim]. base, target: float32 [E, Q, horizon x D]; the target is NaN where nothing is
    asked, and after the end. lengths: int64 [E]. lines: of the episodes. head: what they share.
    """

    hidden: FloatArray
    base: FloatArray
    target: FloatArray
    lengths: npt.NDArray[np.int64]
    lines: tuple[dict[str, Any], ...]
    head: dict[str, Any]


def load_rollouts(folders: Sequence[RolloutFolder]) -> RolloutData:
    """Read them all. Raises UserError for folders that are empty, broken, or of different backbones or periods."""
    heads = [folder.head() for folder in folders]
    for folder, head in zip(folders, heads, strict=True):
        for name in SHARED:
            if head.get(name) != heads[0].get(name):
                raise UserError(
                    f"'{folder.folder}' has {name} {head.get(name)!r}, '{folders[0].folder}' {heads[0].get(name)!r}; "
                    "a memory is trained on rollouts of one backbone at one period"
                )
    lines, parts = [], []
    for folder in folders:
        # Workers finish in any order; which batches a seed draws must not depend on it.
        for line in sorted(folder.episodes(), key=lambda episode: str(episode["id"])):
            lines.append(line)
            parts.append(folder.rollout(line))
            apart = set(np.diff(parts[-1].step).tolist()) - {folder.head()["memory_step_period"]}
            if apart:
                raise UserError(
                    f"'{folder.folder}' has {line['id']} with queries {sorted(apart)[0]} control steps apart, not "
                    f"{folder.head()['memory_step_period']}; leave that episode out, or train on such ones alone"
                )
    longest = max(len(part) for part in parts)
    width = int(np.prod(parts[0].base.shape[1:]))
    data = RolloutData(
        np.zeros((len(parts), longest, parts[0].hidden.shape[1]), np.float32),
        np.zeros((len(parts), longest, width), np.float32),
        np.full((len(parts), longest, width), np.nan, np.float32),
        np.array([len(part) for part in parts], np.int64),
        tuple(lines),
        heads[0],
    )
    for row, part in enumerate(parts):
        data.hidden[row, : len(part)] = part.hidden
        data.base[row, : len(part)] = part.base.reshape(len(part), -1)
        data.target[row, : len(part)] = part.target.reshape(len(part), -1)
    if not np.isfinite(data.target).any():
        raise UserError("the rollouts say nowhere what was right: there is nothing to imitate")
    return data
