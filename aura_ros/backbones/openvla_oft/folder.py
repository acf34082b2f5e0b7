"""A published OpenVLA-OFT checkpoint folder: sharded safetensors, `.pt` heads, statistics, read strictly.

Tensors are read one at a time when asked for, so that loading needs the model's memory once. `.pt` files are
unpickled restricted to tensors (`weights_only=True`); nothing is written, nothing is fetched.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aura_ros.backbones.openvla_oft.config import OftConfig
from aura_ros.backbones.openvla_oft.film import film_entries
from aura_ros.backbones.openvla_oft.layout import FolderOptions, derive_config, is_hub_name
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

logger = logging.getLogger(__name__)
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
STATISTICS = "dataset_statistics.json"
OTHER_STATISTICS = (
    "norm_stats of config.json are used, which may be those of pre-training; put the file the checkpoint came with "
    "beside its weights"
)
# File name stem -> prefix of its tensors' names in this package.
COMPONENTS = {
    "action_head": "action_head.",
    "proprio_projector": "proprio_projector.",
    "noisy_action_projector": "noisy_action_projector.",
    "vision_backbone": "",
}
# What the tensors' names in each file begin with, to tell one file in another's place.
BEGINNINGS = {
    "action_head": ("model.", "noise_predictor."),
    "proprio_projector": ("fc1.", "fc2."),
    "noisy_action_projector": ("fc1.", "fc2."),
    "vision_backbone": ("vision_backbone.",),
}
SUFFIXES = ("_checkpoint.pt", "_checkpoint.safetensors")
WEIGHTS = (".pt", ".pth", ".bin", ".safetensors")
# Files of every published folder: read elsewhere, or of no use here and not worth a word.
COMPANIONS = (
    *("config.json", STATISTICS, INDEX, "generation_config.json", "preprocessor_config.json"),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "processor_config.json", ".gitattributes"),
)


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
    if not str(path).strip():
        raise UserError("checkpoint '' is empty; give a folder's path or a downloaded snapshot's name")
    try:
        if folder.exists() or not is_hub_name(str(path)):
            return folder
    except OSError as error:  # a name too long, a folder that may not be entered
        raise UserError(f"checkpoint '{path}' cannot be looked at ({error.strerror}); check it") from error
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
        what = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{source} {what}; give a checkpoint folder in the published layout")
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise UserError(f"{source} cannot be listed ({error.strerror}); make it readable") from error
    settings = read_json(path / "config.json")
    statistics = _statistics(path, settings)
    entries = _backbone_entries(path)
    files = {entry.file for entry in entries.values()}
    parts = {stem: _component_file(path, names, stem) for stem in COMPONENTS}
    for stem, prefix in COMPONENTS.items():
        part = parts[stem]
        if part is None:
            continue
        files.add(part.name)
        found = component_entries(part)
        _check_component(stem, found, part)
        if stem == "vision_backbone":
            vision = film_entries(found, part)
            # It holds the towers anew; those of the shards were saved without its adapters.
            entries = {name: e for name, e in entries.items() if not name.startswith("vision_backbone.")}
            entries |= vision
        else:
            entries |= {prefix + name: entry for name, entry in found.items()}
    film = parts["vision_backbone"]
    if (settings.get("use_film") or options.film) and film is None:
        raise UserError(
            f"{source} is to use FiLM but has no 'vision_backbone--*_checkpoint.pt'; put the file beside the others"
        )
    if film is not None and options.film is False:
        raise UserError(f"{source} has '{film.name}' but is to use no FiLM; drop the option or the file")
    _check_head(source, parts, options)
    shapes = {name: entry.shape for name, entry in entries.items()}
    config = derive_config(settings, shapes, statistics, source, options, film=film is not None)
    if config.head == "diffusion" and parts["noisy_action_projector"] is None:
        raise UserError(
            f"{source} has a diffusion head but no 'noisy_action_projector--*_checkpoint.pt'; add it"
        )
    if config.head != "diffusion" and parts["noisy_action_projector"] is not None:
        raise UserError(
            f"{source} has '{parts['noisy_action_projector'].name}' but no diffusion head; "
            "put the diffusion action head beside it, or remove it"
        )
    return Folder(
        path, config, statistics, LazyTensors(entries), tuple(sorted(files)), _ignored(names, files)
    )


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
    own = path / STATISTICS
    # A link to nothing is a file that was lost, not one that never was.
    present = os.path.lexists(own)
    statistics: Any = read_json(own) if present else settings.get("norm_stats")
    if not isinstance(statistics, dict) or not statistics:
        raise UserError(f"'{own}' has no data set's statistics; a checkpoint folder needs them")
    if not present:
        logger.warning("'%s' does not exist: %s", own, OTHER_STATISTICS)
    return statistics


def _backbone_entries(path: Path) -> dict[str, Entry]:
    indexed, single = (os.path.lexists(path / name) for name in (INDEX, SINGLE))
    if indexed and single:
        raise UserError(f"'{path}' has both {INDEX} and {SINGLE}; remove the one that does not belong")
    if indexed:
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        ):
            raise UserError(f"'{path / INDEX}' has no weight_map of file names; get the file again")
        files = sorted(set(weight_map.values()))
    elif single:
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


def _component_file(path: Path, names: list[str], stem: str) -> Path | None:
    found = [name for name in names if name.startswith(f"{stem}--") and name.endswith(SUFFIXES)]
    if len(found) > 1:
        raise UserError(
            f"'{path}' has {len(found)} {stem} files ({', '.join(found)}); keep the one that belongs here"
        )
    misnamed = [
        name for name in names if name.startswith(stem) and name.endswith(WEIGHTS) and name not in found
    ]
    if misnamed and not found:  # without it another, smaller network would load
        raise UserError(
            f"'{path / misnamed[0]}' is not named {stem}--<step>_checkpoint.pt; rename or remove it"
        )
    return path / found[0] if found else None


def _check_component(stem: str, entries: Mapping[str, Entry], path: Path) -> None:
    odd = sorted(name for name in entries if not name.startswith(BEGINNINGS[stem]))
    if odd:
        raise UserError(f"'{path}' holds '{odd[0]}', which no {stem} has; put the right file in its place")
    if stem != "vision_backbone":  # that one has several parts, each with its own
        require_one_dtype(entries, path)


def _check_head(source: str, parts: Mapping[str, Path | None], options: FolderOptions) -> None:
    """A checkpoint that lost its head must not be taken for one that never had any."""
    if parts["action_head"] is not None:
        if options.head == "discrete":
            raise UserError(
                f"{source} has '{parts['action_head'].name}' but is to be discrete; drop the option or the file"
            )
        return
    if options.head != "discrete":
        raise UserError(
            f"{source} has no 'action_head--*_checkpoint.pt'; add it, or ask for head 'discrete' if it was "
            "trained without one, by parallel decoding of action tokens (plain OpenVLA was not)"
        )


def _ignored(names: list[str], used: set[str]) -> dict[str, str]:
    ignored = {}
    for name in names:
        if name == "lora_adapter":
            ignored[name] = "already merged into the weights"
        elif name.endswith(".py"):
            ignored[name] = "code is never run from a checkpoint"
        elif name not in used and name not in COMPANIONS:
            ignored[name] = "not part of the model"
    return ignored
