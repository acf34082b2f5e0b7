"""Keep a baseline's weights in one safetensors file whose content hash is checked when it is read."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from aura_ros.errors import UserError
from aura_ros.files import LFS_POINTER
from aura_ros.memory.baseline_config import BaselineConfig
from aura_ros.memory.baselines import Baseline, build_baseline
from aura_ros.memory.checkpoint import Arrays, content_hash

FORMAT = "aura_baseline/1"


def save_baseline(module: Baseline, path: str | os.PathLike[str]) -> str:
    """Write the file as a whole or not at all, and return its weights_hash (see `MemoryCheckpoint`).

    Raises UserError when a weight is not finite or the folder cannot be written.
    """
    target = Path(path)
    arrays = {
        name: np.array(tensor.detach().cpu().to(torch.float32).numpy(), order="C")
        for name, tensor in module.state_dict().items()
    }
    _check(module.config, arrays, f"baseline for '{target}'")
    config_json = module.config.to_json()
    weights_hash = content_hash(config_json, arrays)
    # In the target's folder, since os.replace is atomic only within one file system.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(arrays, temporary, {"format": FORMAT, "config": config_json, "sha256": weights_hash})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise UserError(
            f"cannot write baseline to '{target}' ({_line(error)}); give a path in a writable folder"
        ) from error
    return weights_hash


def load_baseline(path: str | os.PathLike[str]) -> Baseline:
    """Read and verify a file that `save_baseline` wrote; in evaluation mode, float32.

    Raises UserError when it is missing, truncated, no baseline of ours, altered, of wrong shapes or not finite.
    """
    source = Path(path)
    where = f"baseline checkpoint '{source}'"
    if not source.is_file():
        raise UserError(f"{where} is not a file; give the path of a trained baseline")
    try:
        with source.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise UserError(f"{where} is a Git LFS pointer; run `git lfs pull`")
        with safe_open(source, framework="numpy") as tensors:
            metadata = dict(tensors.metadata() or {})
            # Before any tensor is read: another kind of file is named as such, whatever it holds.
            if metadata.get("format") != FORMAT or not {"config", "sha256"} <= set(metadata):
                raise UserError(
                    f"{where} has format {metadata.get('format')!r}; expected {FORMAT!r}; "
                    "train the baseline with this package"
                )
            arrays = {}
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                # Asked before reading, since NumPy has no bfloat16 to read into.
                if (dtype := tensors.get_slice(name).get_dtype()) != "F32":
                    raise UserError(f"{where}: {name} is {dtype}; expected F32; train it again")
                arrays[name] = tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{where} cannot be read ({_line(error)}); it is truncated or no safetensors file"
        ) from error
    found = content_hash(metadata["config"], arrays)
    if found != metadata["sha256"]:
        raise UserError(
            f"{where} has content hash {found[:12]}, not {metadata['sha256'][:12]!r}; "
            "it was altered or damaged, copy it again"
        )
    try:
        config = BaselineConfig.from_json(metadata["config"])
    except UserError as problem:
        raise UserError(f"{where}: {problem}") from problem
    _check(config, arrays, where)
    module = build_baseline(config)
    module.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    return module.eval()


def _check(config: BaselineConfig, arrays: Arrays, where: str) -> None:
    """Raise UserError unless the arrays are exactly those of the configuration, and finite."""
    # On no device: a malformed file's sizes must not be allocated before they are compared.
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in build_baseline(config).state_dict().items()}
    if missing := sorted(set(wanted) - set(arrays)):
        raise UserError(f"{where} lacks {missing[0]} ({len(missing)} missing); train it again")
    if extra := sorted(set(arrays) - set(wanted)):
        raise UserError(f"{where} has unknown {extra[0]} ({len(extra)} unknown); train it again")
    for name, shape in wanted.items():
        if arrays[name].shape != shape:
            raise UserError(
                f"{where}: {name} is {list(arrays[name].shape)}; expected {list(shape)}; train it again"
            )
        if not np.isfinite(arrays[name]).all():
            raise UserError(f"{where}: {name} holds NaN or infinity; use one from before it diverged")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
