"""What the robot saw, as a picture for people: the cameras side by side in one PNG."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from aura_ros.types import ImageArray


def write_picture(path: Path, images: Mapping[str, ImageArray]) -> None:
    """Write images of one height, uint8 [H, W, 3] RGB each, whole or not at all. Raises OSError."""
    from PIL import Image

    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as stream:
            Image.fromarray(np.concatenate(list(images.values()), axis=1)).save(stream, format="png")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
