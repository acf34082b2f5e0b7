"""LIBERO's own tasks as its distribution holds them: records, task files and initial states, all checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aura_ros.sim import runtime
from aura_ros.sim.cues import official
from aura_ros.sim.runtime import SetupError
from aura_ros.sim.suites import INIT_STATES_PER_TASK, SUITES, EpisodeConfig


def official_task(config: EpisodeConfig) -> Any:
    """LIBERO's own record of a task: name, language, problem_folder, bddl_file, init_states_file.

    The order is that of the suite's file list, LIBERO's task order 0.

    Raises:
        SetupError: LIBERO is missing, or its task list is not the official one.
    """
    config = official(config)
    tasks = list(runtime.load_benchmark().task_maps[config.suite].values())
    if len(tasks) != SUITES[config.suite].tasks:
        raise SetupError(
            f"the installed LIBERO lists {len(tasks)} tasks in {config.suite}, the official one "
            f"{SUITES[config.suite].tasks}",
            runtime.INSTALL_LIBERO,
        )
    return tasks[config.task]


def official_bddl_file(config: EpisodeConfig) -> Path:
    """The task's BDDL file: its scene, where objects may begin, and its goal.

    Raises:
        SetupError: LIBERO is missing or its files are incomplete.
    """
    task = official_task(config)
    path = _libero_path("bddl_files") / task.problem_folder / task.bddl_file
    if not path.is_file():
        raise SetupError(f"LIBERO's task file {path} is missing", runtime.INSTALL_LIBERO)
    return path


def official_init_states(config: EpisodeConfig) -> npt.NDArray[np.float64]:
    """The task's official pruned initial states, float64 [50, state]: time, qpos, qvel of MuJoCo.

    Loaded by LIBERO's own reader from .npz without pickle.

    Raises:
        SetupError: LIBERO is missing or its files are incomplete.
    """
    task = official_task(config)
    path = _libero_path("init_states") / task.problem_folder / task.init_states_file
    try:
        states = runtime.load_benchmark().load_initial_states(path)
    except (OSError, ValueError, KeyError) as error:
        raise SetupError(f"LIBERO's initial states {path} cannot be read", runtime.INSTALL_LIBERO) from error
    if states.ndim != 2 or len(states) != INIT_STATES_PER_TASK or not np.isfinite(states).all():
        raise SetupError(
            f"LIBERO's initial states {path} are {list(states.shape)}; "
            f"expected {INIT_STATES_PER_TASK} finite rows",
            runtime.INSTALL_LIBERO,
        )
    return np.asarray(states, dtype=np.float64)


def _libero_path(kind: str) -> Path:
    return Path(runtime.load_benchmark().get_libero_path(kind))
