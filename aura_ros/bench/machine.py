"""The machine a measurement ran on: its name, versions, and memory."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

from aura_ros.errors import UserError

STATUS = Path("/proc/self/status")
MEMORY = Path("/proc/meminfo")
CPUS = Path("/proc/cpuinfo")
# Room for activations, Python and libraries beside the weights.
SPARE = 1.5e9


def machine_facts(device: torch.device) -> dict[str, Any]:
    """What a number must be read with: processor, GPU, threads and versions."""
    cpu = _field(CPUS, "model name") or platform.processor() or platform.machine()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "device": gpu or cpu,
        "cpu": cpu,
        "gpu": gpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def start_peak(device: torch.device) -> None:
    """Forget a GPU's peak so far; a process's own cannot be forgotten."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most memory in use since `start_peak`: allocated by torch on a GPU, resident of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * int(_field(STATUS, "VmHWM").split()[0])


def check_memory(device: torch.device, needed: int, what: str) -> None:
    """Raises `UserError` where the weights cannot fit: Linux would end the process instead of refusing."""
    free = (
        torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda"
        else 1024 * int(_field(MEMORY, "MemAvailable").split()[0])
    )
    if needed + SPARE > free:
        raise UserError(
            f"{what} needs {(needed + SPARE) / 1e9:.1f} GB and device '{device}' has {free / 1e9:.1f} GB free; "
            "use dtype bfloat16, a smaller size or another device"
        )


def _field(path: Path, name: str) -> str:
    """The value of the first `name: value` line; empty if there is none."""
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
