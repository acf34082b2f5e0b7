"""What every torch backbone does with its weights: where they go, and what their identity is made of."""

from __future__ import annotations

import re
from typing import Protocol

import torch
from torch import Tensor

from aura_ros.errors import UserError


class Digest(Protocol):
    """What hashlib makes."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Add bytes."""


def add_tensor(digest: Digest, name: str, tensor: Tensor) -> None:
    """Add a tensor to a digest: its name, dtype, shape and bytes, wherever it lies."""
    tensor = tensor.detach().cpu().contiguous()
    digest.update(f"{name}|{tensor.dtype}|{list(tensor.shape)}".encode())
    digest.update(tensor.flatten().view(torch.uint8).numpy().data)


def find_device(name: str) -> torch.device:
    """ "cpu", "cuda" or "cuda:<n>" as a device that is here. Raises `UserError` for another name or an absent one."""
    known = re.fullmatch(r"cpu|cuda(:(0|[1-9]\d{0,2}))?", name, re.ASCII)  # torch takes "cpu:3" too
    if known is None:
        raise UserError(f"device '{name}' is not supported; choose 'cpu', 'cuda' or 'cuda:<n>'")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise UserError(f"device '{name}' is not available ({count} CUDA devices found); use 'cpu'")
    return device
