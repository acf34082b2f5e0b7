"""Where the installed data files are: config/, launch/, message definitions."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import aura_ros
from aura_ros.errors import UserError

PACKAGE = "aura_ros"


def share_directory() -> Path:
    """The source tree when the package runs from one, else share/aura_ros of an ament prefix or this venv.

    Raises UserError when the package is not installed as a whole.
    """
    candidates = [Path(folder).parent for folder in aura_ros.__path__]
    prefixes = [Path(p) for p in os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep) if p]
    candidates += [prefix / "share" / PACKAGE for prefix in [*prefixes, Path(sys.prefix)]]
    for folder in candidates:
        if (folder / "config" / "libero_sim.yaml").is_file():
            return folder
    raise UserError(
        f"share/{PACKAGE}/config/libero_sim.yaml is not installed; install the package with `pip install .` or source "
        "the workspace's setup file"
    )
