"""Write config/policy.yaml and config/chunk_player.yaml: every parameter with its default, meaning and range."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from pathlib import Path
from typing import Any

from aura_ros.config import dotted
from aura_ros.files import write_text
from aura_ros.nodes.player_config import PlayerConfig
from aura_ros.nodes.policy_config import PolicyNodeConfig

CONFIG = Path(__file__).resolve().parents[1] / "config"
WIDTH = 118
# What a robot has and simulation has not, or the other way round: where the file differs from the defaults.
FILES: dict[str, tuple[str, type, dict[str, Any]]] = {
    "policy.yaml": ("policy_node", PolicyNodeConfig, {}),
    "chunk_player.yaml": ("chunk_player", PlayerConfig, {}),
}


def text(name: str) -> str:
    """The file as it should be."""
    node, config, changed = FILES[name]
    lines = [
        f"# Every parameter of {node}: default, what it does, what is allowed. Copy what you change; what is left out",
        "# keeps its default. `ros2 param describe` says the same of a running node. [run time]: may be set while it runs.",
        f"/**/{node}:",
        "  ros__parameters:",
    ]
    for spec in dataclasses.fields(config):
        about = spec.metadata["description"]
        if spec.metadata["choices"]:
            about += f" ({', '.join(map(str, spec.metadata['choices']))})"
        low, high = spec.metadata["minimum"], spec.metadata["maximum"]
        if low is not None or high is not None:
            about += f" ({low if low is not None else ''} to {high if high is not None else ''})"
        if not spec.metadata["read_only"]:
            about += " [run time]"
        lines += [f"    # {line}" for line in textwrap.wrap(about, WIDTH - 6)]
        value = changed.get(spec.name, spec.default)
        lines.append(f"    {dotted(spec.name)}: {written(value)}")
    return "\n".join(lines) + "\n"


def written(value: Any) -> str:
    """A value in YAML, on one line, of the type that ROS takes it for: its parser reads an unquoted y as true."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def main() -> None:
    """Write both files."""
    for name in FILES:
        write_text(CONFIG / name, text(name))


if __name__ == "__main__":
    main()
