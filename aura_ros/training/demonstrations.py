"""A folder of demonstrations: what it holds, and its index as arrays for training. NumPy only.

DIR/demos.json       what all its episodes share
DIR/episodes.jsonl   a line an episode
DIR/bags/ID/         what a robot would record, as a rosbag2 bag
DIR/index/ID.npz     the same as training reads it; made from the bag alone
"""

from __future__ import annotations

import json
import os
import uuid
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aura_ros.errors import UserError
from aura_ros.files import write_json
from aura_ros.types import FloatArray

FORMAT = 1
HEAD, LINES, BAGS, INDEX = "demos.json", "episodes.jsonl", "bags", "index"
ARRAYS = {"images": 5, "proprio": 2, "actions": 3, "keypoints": 3, "step": 1}
# The keypoints of a bag that does not name its own.
KEYPOINT_NAMES = ("target", "place")
# One more keypoint of a cue task: where the object is that is lit now, unknown where none is.
LIT = "lit"
NAMES = "keypoint_names"
# What episodes of one folder, and of folders that are trained on together, must have in common.
SHARED = ("cameras", "horizon", "image_size", "action_names", "period_s")


@dataclass(frozen=True)
class Samples:
    """One episode as training reads it; F samples.

    images: uint8 [F, cameras, S, S, 3], at the network's size, before its crop. proprio: float32 [F, P], SI.
    actions: float32 [F, horizon, D], controller units, the gripper as the model has it (1 open). keypoints: float32
    [F, K, 3], m, NaN where unknown; keypoint_names: K. step: int64 [F], periods since the first message.
    """

    images: npt.NDArray[np.uint8]
    proprio: FloatArray
    actions: FloatArray
    keypoints: FloatArray
    step: npt.NDArray[np.int64]
    keypoint_names: tuple[str, ...] = KEYPOINT_NAMES

    def __len__(self) -> int:
        return len(self.step)


def save_samples(path: Path, samples: Samples) -> None:
    """Write the file whole or not at all. Raises UserError if it cannot be."""
    arrays = {name: getattr(samples, name) for name in ARRAYS}
    save_arrays(path, {**arrays, NAMES: np.array(samples.keypoint_names, np.str_)})


def save_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Write an .npz whole or not at all. Raises UserError if it cannot be."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with temporary.open("wb") as stream:
            np.savez(stream, **arrays)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"'{path}' cannot be written ({error.strerror}); make room, then go on") from error
    finally:
        temporary.unlink(missing_ok=True)


def load_samples(path: Path) -> Samples:
    """Read one. Raises UserError for a file that is missing, cut off, or not what `save_samples` writes."""
    try:
        with np.load(path, allow_pickle=False) as file:
            names = tuple(str(name) for name in file[NAMES]) if NAMES in file else KEYPOINT_NAMES
            samples = Samples(**{name: file[name] for name in ARRAYS}, keypoint_names=names)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(
            f"'{path}' is no index of demonstrations ({type(error).__name__}: {error}); delete it and index its bag again"
        ) from error
    lengths = {len(getattr(samples, name)) for name in ARRAYS}
    wrong = [name for name, dims in ARRAYS.items() if getattr(samples, name).ndim != dims]
    wrong += [] if wrong or samples.keypoints.shape[1:] == (len(names), 3) else [NAMES]
    if wrong or len(lengths) != 1 or not np.isfinite(samples.actions).all():
        raise UserError(f"'{path}' has arrays that do not fit together; delete it and index its bag again")
    return samples


class DemoFolder:
    """Demonstrations on disk, open for adding or reading.

    head_name, what, made_by: of other kinds of episodes that are kept in the same way.
    """

    head_name, what, made_by = HEAD, "demonstrations", "`aura collect`"

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.bags, self.index = self.folder / BAGS, self.folder / INDEX

    def prepare(self, head: dict[str, Any]) -> None:
        """Make the folder, or check that its episodes have the same `head`. Raises UserError."""
        path = self.folder / self.head_name
        if path.exists():
            differs = [name for name, value in self.head().items() if head.get(name) != value]
            if differs:
                name = differs[0]
                raise UserError(
                    f"'{self.folder}' has {name} {self.head()[name]!r}, not {head.get(name)!r}; give another folder"
                )
            return
        try:
            for part in (self.bags, self.index):
                part.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"'{self.folder}' cannot be made ({error.strerror}); give a folder you may write"
            ) from error
        write_json(path, head)

    def head(self) -> dict[str, Any]:
        """What all episodes share. Raises UserError when it is missing, broken or of another format."""
        path = self.folder / self.head_name
        try:
            head = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"'{self.folder}' is no folder of {self.what} ({self.head_name}: {error}); give one that {self.made_by} made"
            ) from error
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise UserError(f"'{path}' is not of format {FORMAT}; collect again with this version")
        return head

    def episodes(self) -> list[dict[str, Any]]:
        """The lines whose episode is kept. Raises UserError for a folder that has none, or a broken line but the last."""
        path = self.folder / LINES
        try:
            lines = path.read_bytes().splitlines()
        except OSError:
            lines = []
        found = []
        for number, line in enumerate(lines, start=1):
            try:
                found.append(json.loads(line))
            except ValueError as error:
                # Where a collection was killed while it wrote; that episode is collected again.
                if number == len(lines):
                    continue
                raise UserError(f"'{path}' line {number} is broken ({error}); remove that line") from error
        # An episode that was made again has two lines; the later one counts.
        latest = {str(episode.get("id")): episode for episode in found}
        kept = [episode for episode in latest.values() if episode.get("frames")]
        if not kept:
            raise UserError(f"'{self.folder}' holds no {self.what}; collect some with {self.made_by}")
        return kept

    def forget_lost(self, results: dict[str, dict[str, Any]]) -> None:
        """Take episodes whose index was deleted out of what is known, so that they are made again."""
        lost = [
            key for key, line in results.items() if line.get("frames") and not self._index_of(line).exists()
        ]
        for key in lost:
            del results[key]

    def _index_of(self, episode: dict[str, Any]) -> Path:
        return self.index / f"{episode['id']}.npz"

    def samples(self, episode: dict[str, Any]) -> Samples:
        """An episode's arrays. Raises UserError as `load_samples` does."""
        return load_samples(self._index_of(episode))


def check_alike(folders: Sequence[DemoFolder]) -> dict[str, Any]:
    """What folders that are trained on together share. Raises UserError naming the first difference."""
    heads = [folder.head() for folder in folders]
    for folder, head in zip(folders, heads, strict=True):
        for name in SHARED:
            if head.get(name) != heads[0].get(name):
                raise UserError(
                    f"'{folder.folder}' has {name} {head.get(name)!r}, '{folders[0].folder}' {heads[0].get(name)!r}; "
                    "train on folders that are alike"
                )
    return heads[0]
