"""Keep a baseline's weights in the same kind of file as a memory's."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from aura_ros.errors import UserError
from aura_ros.memory.baseline_config import BaselineConfig
from aura_ros.memory.baselines import Baseline, build_baseline
from aura_ros.memory.checkpoint import Arrays, check_shapes, read_weights, write_weights

FORMAT = "aura_baseline/1"
AGAIN = "train the baseline again"


def save_baseline(module: Baseline, path: str | os.PathLike[str]) -> str:
    """Write the file as a whole or not at all, and return its weights_hash (see `MemoryCheckpoint`).

    Raises UserError when a weight is not finite or the folder cannot be written.
    """
    arrays = {
        name: np.array(tensor.detach().cpu().to(torch.float32).numpy(), order="C")
        for name, tensor in module.state_dict().items()
    }
    _check(module.config, arrays, f"baseline for '{Path(path)}'")
    return write_weights(path, FORMAT, module.config.to_json(), arrays, "baseline")


def load_baseline(path: str | os.PathLike[str]) -> Baseline:
    """Read and verify a file that `save_baseline` wrote; in evaluation mode, float32.

    Raises UserError when it is missing, truncated, no baseline of ours, altered, of wrong shapes or not finite.
    """
    where = f"baseline checkpoint '{Path(path)}'"
    config_json, arrays, _ = read_weights(path, FORMAT, where, AGAIN)
    try:
        config = BaselineConfig.from_json(config_json)
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
    check_shapes(wanted, arrays, where, AGAIN)
