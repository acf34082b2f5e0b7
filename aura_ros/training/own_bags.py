"""One bag of a robot's own demonstrations -> an episode of a folder of demonstrations."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aura_ros.backbones.openvla_oft.config import EMBEDDED
from aura_ros.errors import UserError
from aura_ros.report.reading import read_bag
from aura_ros.training.demo_bags import index_bag
from aura_ros.training.demonstrations import DemoFolder, save_samples


@dataclass(frozen=True)
class IndexJob:
    """One bag. instruction: "" takes the bag's own. fingers: the two joints' names."""

    folder: str
    bag: str
    instruction: str
    fingers: tuple[str, ...]

    @property
    def key(self) -> str:
        """Unique for a bag's path and what is said about it."""
        told = "\n".join((self.bag, self.instruction, *self.fingers))
        return f"{Path(self.bag).name}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"


def index(job: IndexJob) -> dict[str, Any]:
    """Write the bag's samples; what a worker does. Returns its line. Raises UserError for a bag that cannot be used."""
    path = Path(job.bag)
    samples = index_bag(path, EMBEDDED.image, EMBEDDED.cameras, fingers=job.fingers)
    if not len(samples):
        raise UserError(
            f"bag '{path}' has no observation with an action for each of its next eight periods; record actions at the "
            "control period, or leave it out"
        )
    instruction = job.instruction or said_in(path)
    save_samples(DemoFolder(job.folder).index / f"{job.key}.npz", samples)
    return {
        "key": job.key,
        "id": job.key,
        "bag": job.bag,
        "instruction": instruction,
        "policy": "",
        "frames": len(samples),
    }


def said_in(path: Path) -> str:
    """The last instruction of a bag. Raises UserError if there is none."""
    said = [m.message.data for m in read_bag(path) if m.topic.rsplit("/", 1)[-1] == "instruction"]
    if not said or not said[-1].strip():
        raise UserError(f"bag '{path}' says no instruction; give --instruction TEXT")
    return str(said[-1])
