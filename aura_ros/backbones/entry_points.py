"""Backbones of other packages: entry points of the group `aura_ros.backbones`, found and loaded by name.

    [project.entry-points."aura_ros.backbones"]
    my_policy = "my_package.backbone:make"

`make(checkpoint, *, device, dtype, unnorm_key, seed)` returns a `Backbone`; see `load_entry_point`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from aura_ros.backbones.base import Backbone
from aura_ros.errors import UserError
from aura_ros.types import BackboneInfo

GROUP = "aura_ros.backbones"
CALL = "make(checkpoint, *, device, dtype, unnorm_key, seed)"


class KnownBackbones(Collection[str]):
    """Names of backbones: the built-in ones, then those of installed packages, read anew each time.

    A package's backbone with a built-in's name is never reached.
    """

    def __init__(self, built_in: tuple[str, ...]) -> None:
        self._built_in = built_in

    def __contains__(self, name: object) -> bool:
        return name in self._built_in or any(entry.name == name for entry in entry_points(group=GROUP))

    def __iter__(self) -> Iterator[str]:
        others = {entry.name for entry in entry_points(group=GROUP)}
        return iter((*self._built_in, *sorted(others - set(self._built_in))))

    def __len__(self) -> int:
        return len(list(iter(self)))


def load_entry_point(
    name: str, checkpoint: str | None, *, device: str, dtype: str, unnorm_key: str | None, seed: int
) -> Backbone:
    """Call what the entry point `name` names, with these arguments as they are, and check what it gives.

    checkpoint: as the user gave it; None: the user gave none. device: "cpu", "cuda" or "cuda:<n>". dtype: "auto",
    "float32" or "bfloat16". unnorm_key: of statistics; None: not given.
    Raises UserError where two packages have the name, an import fails, or what comes back is no `Backbone`; what
    else the package raises is passed on.
    """
    found: list[EntryPoint] = [entry for entry in entry_points(group=GROUP) if entry.name == name]
    if len(found) != 1:
        packages = ", ".join(sorted(_package(entry) for entry in found)) or "none"
        raise UserError(
            f"backbone '{name}' is given by {len(found)} packages ({packages}); exactly one must: remove the others"
        )
    entry = found[0]
    where = f"backbone '{name}' of {_package(entry)} ({entry.value})"
    try:
        make = entry.load()
    except (ImportError, AttributeError) as error:
        raise UserError(f"{where} cannot be imported ({error}); install or mend the package") from error
    if not callable(make):
        raise UserError(f"{where} is {type(make).__name__}; it must be {CALL}")
    options = {"device": device, "dtype": dtype, "unnorm_key": unnorm_key, "seed": seed}
    if wrong := _misfit(make, checkpoint, options):
        raise UserError(f"{where} cannot be called as {CALL} ({wrong}); mend the package")
    backbone = make(checkpoint, **options)
    lacking = [
        method for method in ("infer", "warm_up", "close") if not callable(getattr(backbone, method, None))
    ]
    if not isinstance(getattr(backbone, "info", None), BackboneInfo):
        lacking.insert(0, "info (a BackboneInfo)")
    if lacking:
        raise UserError(
            f"{where} made {type(backbone).__name__} without {', '.join(lacking)}; it must be a Backbone, see "
            "aura_ros.backbones.base"
        )
    return backbone


def _misfit(make: Callable[..., Any], checkpoint: str | None, options: dict[str, Any]) -> str:
    """Why a callable does not take the arguments; empty when it does, or does not say what it takes."""
    try:
        inspect.signature(make).bind(checkpoint, **options)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass
    return ""


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown package"
