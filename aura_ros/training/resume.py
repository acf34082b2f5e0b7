"""The state of a training on the disk, whole or not at all: tensors by name, an optimiser's among them, and a few texts."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from aura_ros.errors import UserError

OPTIMISER = "optimiser."


def optimiser_tensors(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Its state as tensors by name, for `restore_optimiser`."""
    states = optimiser.state_dict()["state"]
    return {f"{OPTIMISER}{number}.{name}": t for number, state in states.items() for name, t in state.items()}


def restore_optimiser(optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimiser_tensors` gave; other names are left alone."""
    states: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(OPTIMISER):
            number, key = name.removeprefix(OPTIMISER).split(".", 1)
            states.setdefault(int(number), {})[key] = tensor
    groups = optimiser.state_dict()["param_groups"]
    optimiser.load_state_dict({"state": states, "param_groups": groups})


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose name begins so, by the rest of it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def write_state(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write the file. metadata: "identity" is what a training must have in common with it. Raises UserError."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        # Copies: tensors that share memory are refused.
        save_file({n: t.detach().cpu().clone().contiguous() for n, t in tensors.items()}, temporary, metadata)
        os.replace(temporary, path)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"'{path}' cannot be written ({error}); make room, then run it again to go on"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def read_state(path: Path, identity: str, what: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read it. what: makes an identity, in words. Raises UserError for a broken file, or one of another training."""
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"'{path}' is no training to go on with ({error}); give --fresh to begin anew"
        ) from error
    if metadata.get("identity") != identity:
        raise UserError(
            f"'{path}' is a training with other {what}; give --fresh to begin anew, or another --out"
        )
    return tensors, metadata
