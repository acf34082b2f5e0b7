"""What an episode says and wants where that is not its task file's: another task's object, or what a cue shows."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from aura_ros.errors import UserError
from aura_ros.sim.cues import cue_task
from aura_ros.sim.official import official_bddl_file, official_task
from aura_ros.sim.suites import EpisodeConfig


def tell(config: EpisodeConfig, domain: Any, own: list[list[str]]) -> str:
    """Make an environment want what `config.instruction_of` or `config.cue` says, and return the instruction.

    domain: LIBERO's own environment. own: the goal that its task file gave it. Raises UserError if the scene has no such
    object.
    """
    if config.has_cue:
        task = cue_task(config)
        target = task.candidates[config.cue]
        domain.parsed_problem["goal_state"] = [list(target.goal)]
        return target.told if config.named else task.instruction
    if config.instruction_of < 0:
        domain.parsed_problem["goal_state"] = own
        return str(official_task(config).language)
    other = dataclasses.replace(config, task=config.instruction_of, instruction_of=-1)
    instruction = str(official_task(other).language)
    item = told_item(instruction, domain.obj_body_id)
    domain.parsed_problem["goal_state"] = [[own[0][0], item, *own[0][2:]]]
    return instruction


def tellable(suite: str, task: int, tasks: Sequence[int]) -> list[int]:
    """Those of `tasks`, without `task` itself, whose object is in its scene. Raises SetupError without LIBERO."""
    config = EpisodeConfig(suite=suite, task=task)
    items = set(re.findall(r"[a-z_]+_[0-9]+", official_bddl_file(config).read_text(encoding="utf-8")))
    found = []
    for other in tasks:
        try:
            told_item(str(official_task(dataclasses.replace(config, task=other)).language), items)
        except UserError:
            continue
        found.append(other)
    return [other for other in found if other != task]


def told_item(instruction: str, items: Iterable[str]) -> str:
    """The object of a scene that libero_object's instruction names. Raises UserError if the scene has none such."""
    words = instruction.removeprefix("pick up the ").split(" and place it")[0].replace(" ", "_")
    found = [name for name in items if name.rsplit("_", 1)[0] == words]
    if not found:
        raise UserError(
            f"the scene has no '{words}' to fetch, only {', '.join(sorted(items))}; choose another instruction_of"
        )
    return found[0]
