"""Message definitions for bags: this package's .msg texts on top of the common ROS 2 ones."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from pathlib import Path

from rosbags.typesys import Stores, get_types_from_msg, get_typestore
from rosbags.typesys.store import Typestore

import aura_ros
from aura_ros.errors import UserError

PACKAGE = "aura_ros"


@cache
def typestore() -> Typestore:
    """Definitions of this package's messages and of the common packages (std_msgs, sensor_msgs, ...).

    Type hashes computed from it equal rclpy's. Raises UserError when no .msg text is found.
    """
    store = get_typestore(Stores.ROS2_KILTED)
    types = {}
    for path in sorted(message_directory().glob("*.msg")):
        types.update(get_types_from_msg(path.read_text(), f"{PACKAGE}/msg/{path.stem}"))
    store.register(types)
    return store


def message_directory() -> Path:
    """Directory of the .msg texts that belong to the messages which `import aura_ros.msg` finds.

    Looked for beside the generated Python module, on AMENT_PREFIX_PATH, under sys.prefix (a virtual
    environment is an ament prefix), and last in the source tree.
    """
    prefixes: list[Path] = []
    # An installed module comes first: an older build must be recorded with its own definitions.
    spec = importlib.util.find_spec(f"{PACKAGE}.msg")
    if spec is not None and spec.origin is not None:
        prefixes += Path(spec.origin).parents
    prefixes += [Path(p) for p in os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep) if p]
    prefixes.append(Path(sys.prefix))
    candidates = [prefix / "share" / PACKAGE / "msg" for prefix in prefixes]
    candidates += [Path(folder).parent / "msg" for folder in aura_ros.__path__]
    for folder in candidates:
        if (folder / "GateEvent.msg").is_file():
            return folder
    raise UserError(
        f"the message definitions of {PACKAGE} are not installed (no share/{PACKAGE}/msg/GateEvent.msg); "
        "install the package with `pip install .` or source the workspace's setup file"
    )
