"""Checks of what `aura sim` was given, all of them before anything is started or written."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from aura_ros.backbones.registry import RANDOM, check_checkpoint
from aura_ros.config import check_value
from aura_ros.errors import UserError
from aura_ros.memory.config import UNTRAINED
from aura_ros.nodes.policy_config import PolicyNodeConfig
from aura_ros.report.bag import incomplete

RENDERERS = ("osmesa", "egl", "glfw")
MAX_DOMAIN = 232  # the highest whose ports exist
QUICK_DISCOVERY = "fastdds_fast_discovery.xml"


def node_config(config_type: Any, file: Path, node: str, given: dict[str, Any]) -> Any:
    """The node's configuration: defaults, the YAML's values, then what was given; checked as a whole."""
    fields = {f.name: f for f in dataclasses.fields(config_type)}
    for name, value in given.items():
        check_value(fields[name], value)
    document = yaml.safe_load(file.read_text())
    values = {k.replace(".", "__"): v for k, v in document[f"/**/{node}"]["ros__parameters"].items()}
    known = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in fields}
    return config_type(**{**known, **given})


def check_policy_files(config: PolicyNodeConfig) -> None:
    """Raises UserError for files that the policy would refuse, before the simulator's ten seconds of building."""
    config.check_files()
    check_checkpoint(
        config.backbone,
        config.checkpoint or None,
        unnorm_key=config.unnorm_key or None,
        options=config.folder_options(),
    )
    if config.memory__checkpoint not in ("", UNTRAINED):
        from aura_ros.memory.checkpoint import load_checkpoint

        trained_on = load_checkpoint(config.memory__checkpoint).config.backbone
        # Of a folder the hash is known once its weights are read; the policy compares it then.
        known = config.backbone == "compact" and config.checkpoint != RANDOM
        if known and trained_on not in ("", found := _hash_of(config.checkpoint)):
            raise UserError(
                f"memory '{config.memory__checkpoint}' was trained on backbone {trained_on[:12]}, this one is {found[:12]}; "
                "give that backbone, or train a memory for this one"
            )


def _hash_of(checkpoint: str) -> str:
    from aura_ros.backbones.openvla_oft.checkpoint import read_head
    from aura_ros.backbones.registry import shipped_checkpoint

    return str(read_head(checkpoint or shipped_checkpoint()).recorded_sha256)


def check_json(path: Path) -> None:
    """Raises UserError unless the file can be written."""
    if path.exists() and not path.is_file():
        reason = "is a folder" if path.is_dir() else "is no regular file"
    else:
        reason = _why_not_writable(path.resolve().parent)
    if reason:
        raise UserError(f"json '{path}' cannot be written ({reason}); give a file in a folder you may write")


def check_bag(bag: Path) -> None:
    """Raises UserError unless the bag directory can be made and hides no older recording."""
    try:
        taken = bag.exists() and (not bag.is_dir() or any(bag.iterdir()))
    except OSError as error:
        raise UserError(f"record '{bag}' cannot be made ({error.strerror}); give another directory") from None
    if taken:
        raise UserError(f"record '{bag}' exists and is not empty; give a new directory or remove it")
    if incomplete(bag).exists():
        raise UserError(
            f"record '{bag}' has an interrupted recording beside it; give a new directory, or make {incomplete(bag)} "
            "whole with aura_ros.report.bag.repair_bag"
        )
    parent = bag.parent
    while not parent.exists():
        parent = parent.parent
    if reason := _why_not_writable(parent):
        raise UserError(
            f"record '{bag}' cannot be made in '{parent}' ({reason}); give a directory in a place you may write"
        )


def _why_not_writable(folder: Path) -> str:
    """Try it, as permissions alone do not tell (a read-only disk, /proc); returns the reason, or nothing."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or type(error).__name__


def check_python(python: str | None) -> str | None:
    """The interpreter as it is. Raises UserError unless it runs and finds this package."""
    if python is None:
        return None
    try:
        said = subprocess.run(
            [python, "-c", "import aura_ros; print(aura_ros.__name__)"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        reason = (
            "" if "aura_ros" in said.stdout.split() else (said.stderr.splitlines() or ["it is no Python"])[-1]
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = getattr(error, "strerror", "") or "it does not answer"
    if reason:
        raise UserError(
            f"sim_python '{python}' cannot run the simulator ({reason}); give the Python interpreter of an "
            "environment with aura_ros and LIBERO"
        )
    return python


@contextmanager
def ros_domain_of_its_own() -> Iterator[None]:
    """Hold the ROS domain among this user's `aura sim` runs: two in one would hear each other's topics.

    Raises UserError when another run holds it.
    """
    domain = os.environ.get("ROS_DOMAIN_ID") or "0"
    if not (domain.isdecimal() and int(domain) <= MAX_DOMAIN):
        raise UserError(f"ROS_DOMAIN_ID '{domain}' is out of range; allowed: 0 to {MAX_DOMAIN}")
    path = Path(tempfile.gettempdir()) / f"aura_sim_{os.getuid()}_domain_{int(domain)}.lock"
    try:
        # A name that others can guess, in a folder that others can write: no links are followed.
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UserError(f"lock '{path}' cannot be opened ({error.strerror}); remove it") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another `aura sim` runs in ROS domain {domain}; wait for its end or set ROS_DOMAIN_ID to another number"
            ) from None
        yield
    finally:
        os.close(lock)


def check_renderer() -> None:
    """Raises UserError for a MUJOCO_GL that MuJoCo does not know."""
    renderer = os.environ.get("MUJOCO_GL", "osmesa")
    if renderer not in RENDERERS:
        raise UserError(f"MUJOCO_GL '{renderer}' is not known; choose one of: {', '.join(RENDERERS)}")


def prepare_environment(share: Path, logs: Path) -> None:
    """Defaults that a person's own settings override: this machine only, quick discovery, rendering off screen."""
    os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    profile = share / "config" / QUICK_DISCOVERY
    if profile.is_file():
        # Fast DDS 2 (up to Jazzy) reads the old name, Fast DDS 3 the new one and warns about the old.
        old = os.environ.get("ROS_DISTRO") in ("humble", "iron", "jazzy")
        os.environ.setdefault(f"{'FASTRTPS' if old else 'FASTDDS'}_DEFAULT_PROFILES_FILE", str(profile))
    os.environ.setdefault("MUJOCO_GL", "osmesa")
    # Beside the nodes' output, and also where there is no home folder.
    os.environ.setdefault("ROS_LOG_DIR", str(logs))
