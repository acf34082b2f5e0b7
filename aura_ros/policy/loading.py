"""Put a policy together from names and files: what a node's parameters and the command line say."""

from __future__ import annotations

from pathlib import Path

from aura_ros.backbones.base import BackboneInfo
from aura_ros.backbones.openvla_oft.layout import FolderOptions
from aura_ros.errors import UserError
from aura_ros.memory.checkpoint import load_checkpoint
from aura_ros.memory.config import UNTRAINED
from aura_ros.policy.policy import Policy, PolicyConfig, load_memory
from aura_ros.share import share_directory


def shipped_memory() -> Path:
    """The memory that was trained for the shipped backbone. Raises UserError if it is missing."""
    path = share_directory() / "checkpoints" / "memories" / "aura.safetensors"
    if not path.is_file():
        raise UserError(
            f"the shipped memory '{path}' is missing; install the package again, or give a checkpoint"
        )
    return path


def load_policy(
    *,
    backbone: str = "compact",
    checkpoint: str | Path | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    unnorm_key: str | None = None,
    seed: int = 0,
    options: FolderOptions | None = None,
    accelerate: str = "none",
    torch_threads: int = 1,
    memory_checkpoint: str | Path | None = None,
    memory_state_dim: int = 32,
    memory_step_period: int | None = None,
    action_limit: float = 1.5,
) -> Policy:
    """Load backbone and memory and join them; arguments as in `load_backbone`, `load_memory` and `PolicyConfig`.

    memory_checkpoint: none: the shipped memory where backbone, N and period are those it was trained for, else an
        untrained one; "untrained": always one from the seed, whose residual is exactly zero.
    torch_threads: CPU threads of this process's torch; fixed, because sums depend on it to the last bit.
    Raises UserError for anything that does not fit; what was loaded by then is freed.
    """
    try:
        import torch
    except ImportError as error:
        raise UserError(f"a policy needs torch ({error}); install it with `pip install torch`") from error
    from aura_ros.backbones.registry import load_backbone

    torch.set_num_threads(torch_threads)
    loaded = load_backbone(
        backbone,
        checkpoint,
        device=device,
        dtype=dtype,
        unnorm_key=unnorm_key,
        seed=seed,
        options=options,
        accelerate=accelerate,
    )
    try:
        if memory_checkpoint is None and backbone == "compact":
            memory_checkpoint = _default_memory(loaded.info, memory_state_dim, memory_step_period)
        elif str(memory_checkpoint) == UNTRAINED:
            memory_checkpoint = None
        memory = load_memory(
            loaded.info,
            memory_checkpoint,
            state_size=memory_state_dim,
            memory_step_period=memory_step_period,
            seed=seed,
        )
        config = PolicyConfig(action_limit, memory_step_period)
        return Policy(loaded, memory, config, str(memory_checkpoint or ""))
    except UserError:
        loaded.close()
        raise


def _default_memory(info: BackboneInfo, state_dim: int, period: int | None) -> Path | None:
    """The shipped memory, if it was trained for such a policy; by the backbone's hash, wherever its file is."""
    path = shipped_memory()
    config = load_checkpoint(path).config
    asked = (info.checkpoint_hash, state_dim, period or info.action.horizon)
    return path if asked == (config.backbone, config.dk, config.memory_step_period) else None
