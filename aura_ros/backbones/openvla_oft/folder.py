"""A published OpenVLA-OFT checkpoint folder: sharded safetensors, `.pt` heads, statistics, read strictly.

Tensors are read one at a time when asked for, so that loading needs the model's memory once. Nothing is
unpickled (`weights_only=True`), nothing is written, nothing is fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aura_ros.backbones.openvla_oft.config import OftConfig
from aura_ros.backbones.openvla_oft.film import film_entries
from aura_ros.backbones.openvla_oft.layout import FolderOptions, derive_config
from aura_ros.backbones.openvla_oft.tensor_files import (
    Entry,
    LazyTensors,
    component_entries,
    one_line,
    refuse_pointer,
    require_one_dtype,
    safetensors_entries,
)
from aura_ros.errors import UserError

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# File name stem -> prefix of its tensors' names in this package.
COMPONENTS = {
    "action_head": "action_head.",
    "proprio_projector": "proprio_projector.",
    "noisy_action_projector": "noisy_action_projector.",
    "vision_backbone": "",
}
SUFFIXES = ("_checkpoint.pt", "_checkpoint.safetensors")


@dataclass(frozen=True)
class Folder:
    """What a checkpoint folder holds, before any weight is read.

    settings: `config.json`. statistics: data set -> action, proprio. tensors: by this package's names.
    files: names of the files used. ignored: files left alone, with the reason.
    """

    path: Path
    config: OftConfig
    statistics: Mapping[str, Any]
    tensors: LazyTensors
    files: tuple[str, ...]
    ignored: Mapping[str, str] = field(default_factory=dict)


def find_folder(path: str | Path) -> Path:
    """The folder itself, or that of an already downloaded hub snapshot, "owner/name" or "owner/name@revision".

    Nothing is fetched. Raises `UserError` if neither is there.
    """
    folder = Path(path)
    if folder.exists() or not HUB_NAME.fullmatch(str(path)):
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    repository, _, revision = str(path).partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        pinned = f" --revision {revision}" if revision else ""
        raise UserError(
            f"checkpoint '{path}' is neither a folder nor a downloaded snapshot; give a folder's path or run "
            f"`hf download {repository}{pinned}` first"
        ) from error


def read_folder(path: str | Path, options: FolderOptions | None = None) -> Folder:
    """Take stock of a checkpoint folder: JSON files and the tensors' names and shapes.

    Raises `UserError` naming the file for anything missing, broken or more than once.
    """
    path, options = Path(path), options or FolderOptions()
    source = f"checkpoint '{path}'"
    if not path.is_dir():
        raise UserError(f"{source} is no folder; give a checkpoint folder in the published layout")
    settings = read_json(path / "config.json")
    statistics = _statistics(path, settings)
    entries = _backbone_entries(path)
    files = {entry.file for entry in entries.values()}
    parts = {stem: _component_file(path, stem) for stem in COMPONENTS}
    for stem, prefix in COMPONENTS.items():
        part = parts[stem]
        if part is None:
            continue
        files.add(part.name)
        found = component_entries(part)
        if stem == "vision_backbone":
            vision = film_entries(found, part)
            # It holds the towers anew; those of the shards were saved without its adapters.
            entries = {name: e for name, e in entries.items() if not name.startswith("vision_backbone.")}
            entries |= vision
        else:
            entries |= {prefix + name: entry for name, entry in found.items()}
    has_film = parts["vision_backbone"] is not None
    if (settings.get("use_film") or options.film) and not has_film:
        raise UserError(
            f"{source} is to use FiLM but has no 'vision_backbone--*_checkpoint.pt'; put the file beside the others"
        )
    shapes = {name: entry.shape for name, entry in entries.items()}
    config = derive_config(settings, shapes, statistics, source, options, film=has_film)
    if config.head == "diffusion" and parts["noisy_action_projector"] is None:
        raise UserError(
            f"{source} has a diffusion head but no 'noisy_action_projector--*_checkpoint.pt'; add it"
        )
    if config.head != "diffusion" and parts["noisy_action_projector"] is not None:
        raise UserError(
            f"{source} has '{parts['noisy_action_projector'].name}' but no diffusion head; "
            "put the diffusion action head beside it, or remove it"
        )
    return Folder(path, config, statistics, LazyTensors(entries), tuple(sorted(files)), _ignored(path, files))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `UserError` where there is none."""
    refuse_pointer(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"'{path}' does not exist; a checkpoint folder needs it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"'{path}' cannot be read ({one_line(error)}); get the file again") from error
    if not isinstance(value, dict):
        raise UserError(f"'{path}' holds a {type(value).__name__}, not an object; get the file again")
    return value


def _statistics(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fine-tuned model's own statistics; `config.json` holds those of pre-training where there are none."""
    own = path / "dataset_statistics.json"
    statistics = read_json(own) if own.exists() else settings.get("norm_stats")
    if not isinstance(statistics, dict) or not statistics:
        raise UserError(f"'{own}' has no data set's statistics; a checkpoint folder needs them")
    return statistics


def _backbone_entries(path: Path) -> dict[str, Entry]:
    if (path / INDEX).exists():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        ):
            raise UserError(f"'{path / INDEX}' has no weight_map of file names; get the file again")
        files = sorted(set(weight_map.values()))
    elif (path / SINGLE).exists():
        weight_map, files = None, [SINGLE]
    else:
        raise UserError(f"'{path}' has neither {INDEX} nor {SINGLE}; give a checkpoint folder with weights")
    missing = [file for file in files if not (path / file).is_file()]
    if missing:
        raise UserError(
            f"'{path}' lacks {len(missing)} of {len(files)} shards, first '{missing[0]}'; get them"
        )
    entries: dict[str, Entry] = {}
    for file in files:
        for name, entry in safetensors_entries(path / file).items():
            if weight_map is None or weight_map.get(name) == file:
                entries[name] = entry
            else:
                raise UserError(
                    f"'{path / file}' holds '{name}', which {INDEX} has elsewhere; get both again"
                )
    if weight_map is not None and (lost := sorted(weight_map.keys() - entries.keys())):
        raise UserError(
            f"'{path}': {INDEX} lists '{lost[0]}' in '{weight_map[lost[0]]}', which does not hold it; "
            "get the file again"
        )
    require_one_dtype(entries, path)
    return entries


def _component_file(path: Path, stem: str) -> Path | None:
    found = sorted(
        file for file in path.iterdir() if file.name.startswith(f"{stem}--") and file.name.endswith(SUFFIXES)
    )
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise UserError(f"'{path}' has {len(found)} {stem} files ({names}); keep the one that belongs here")
    return found[0] if found else None


def _ignored(path: Path, used: set[str]) -> dict[str, str]:
    ignored = {}
    for file in sorted(path.iterdir()):
        if file.name == "lora_adapter":
            ignored[file.name] = "already merged into the weights"
        elif file.suffix in (".pt", ".bin", ".safetensors") and file.name not in used:
            ignored[file.name] = "not part of the model"
        elif file.suffix == ".py":
            ignored[file.name] = "code is never run from a checkpoint"
    return ignored
