"""Tensors in files, listed before any is read: safetensors, and `.pt` state dicts without unpickling objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aura_ros.errors import UserError
from aura_ros.files import LFS_POINTER

DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Entry:
    """One tensor on disk: its file, shape, dtype by torch's name, and how to read it."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each read when asked for and not kept."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = entries

    def __getitem__(self, name: str) -> Tensor:
        return self.entries[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def component_entries(path: Path) -> dict[str, Entry]:
    """Tensors of one head or projector file, by the file's own names without `module.`."""
    entries = safetensors_entries(path) if path.suffix == ".safetensors" else _pickle_entries(path)
    return {name.removeprefix("module."): entry for name, entry in entries.items()}


def safetensors_entries(path: Path) -> dict[str, Entry]:
    """Tensors of a safetensors file. Raises `UserError` for a file that is cut short or is none."""
    refuse_pointer(path)

    def reader(name: str) -> Callable[[], Tensor]:
        def read() -> Tensor:
            with safe_open(str(path), framework="pt") as stored:
                return stored.get_tensor(name)

        return read

    try:
        with safe_open(str(path), framework="pt") as stored:
            entries = {}
            for name in stored.keys():  # noqa: SIM118
                part = stored.get_slice(name)
                dtype = DTYPE_NAMES.get(part.get_dtype(), part.get_dtype())
                entries[name] = Entry(path.name, tuple(part.get_shape()), dtype, reader(name))
            return entries
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"'{path}' is truncated or not safetensors ({one_line(error)}); get it again"
        ) from error


def _pickle_entries(path: Path) -> dict[str, Entry]:
    """A `.pt` file, unpickled as tensors only; they stay on disk until read."""
    refuse_pointer(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises bare RuntimeError, pickle's and zip's errors, EOFError, ...
        raise UserError(
            f"'{path}' is truncated or holds more than tensors ({one_line(error)[:120]}); get it again"
        ) from error
    if not isinstance(state, dict) or not state or not all(map(_is_plain, state.values())):
        raise UserError(f"'{path}' is no state dict of tensors; get the file again")
    return {str(name): _held(path.name, tensor) for name, tensor in state.items()}


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"


def _held(file: str, tensor: Tensor) -> Entry:
    return Entry(file, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), lambda: tensor)


def require_one_dtype(entries: Mapping[str, Entry], path: Path) -> None:
    """A mixture is a file put together by mistake: the odd tensors have lost digits, or others would."""
    counts: dict[str, list[str]] = {}
    for name, entry in entries.items():
        counts.setdefault(entry.dtype, []).append(name)
    if len(counts) > 1:
        usual, *others = sorted(counts, key=lambda dtype: -len(counts[dtype]))
        raise UserError(
            f"'{path}': tensor '{counts[others[0]][0]}' is {others[0]} among {len(counts[usual])} of {usual}; "
            "get the file again or convert all to one dtype"
        )


def refuse_pointer(path: Path) -> None:
    """Raises `UserError` for a Git LFS pointer in a file's place, and for what is no file or cannot be read."""
    try:
        if path.exists() and not path.is_file():  # a pipe or a device would be read for ever
            raise UserError(f"'{path}' is no file; put the checkpoint's file there")
        with path.open("rb") as stream:
            pointer = stream.read(len(LFS_POINTER)) == LFS_POINTER
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"'{path}' cannot be read ({error.strerror}); make it readable") from error
    if pointer:
        raise UserError(f"'{path}' is a Git LFS pointer, not weights; run `git lfs pull` in its folder")


def one_line(error: Exception) -> str:
    """An error's text on one line."""
    return " ".join(str(error).split())
