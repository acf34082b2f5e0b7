"""The paper's memory: a torch module to train, a NumPy step to control with, one checkpoint for both.

Importing this package does not import torch; the names that need it are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aura_ros.memory.checkpoint import MemoryCheckpoint, load_checkpoint, save_checkpoint
from aura_ros.memory.config import MemoryConfig, Variant
from aura_ros.memory.numpy_step import MemoryStep, NumpyMemory

if TYPE_CHECKING:
    from aura_ros.memory.module import (
        MemoryModule,
        MemoryState,
        StepInfo,
        build_untrained,
        export_numpy,
        load_module,
    )

__all__ = [
    "MemoryCheckpoint",
    "MemoryConfig",
    "MemoryModule",
    "MemoryState",
    "MemoryStep",
    "NumpyMemory",
    "StepInfo",
    "Variant",
    "build_untrained",
    "export_numpy",
    "load_checkpoint",
    "load_module",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from aura_ros.memory import module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
