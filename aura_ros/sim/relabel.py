"""Ask the expert what it would do from here, and leave the simulation as it was (DAgger's labels).

Ross et al. 2011, "A Reduction of Imitation Learning and Structured Prediction to No-Regret Online Learning".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
import numpy.typing as npt

from aura_ros.sim.expert import decide
from aura_ros.sim.libero import LiberoEnv
from aura_ros.sim.scene import SceneReader
from aura_ros.types import FloatArray

STATE = mujoco.mjtState.mjSTATE_INTEGRATION


@dataclass(frozen=True)
class Snapshot:
    """Everything that stepping changes: MuJoCo's integration state, warm start, grippers, controllers, step counts."""

    state: npt.NDArray[np.float64]
    warm_start: npt.NDArray[np.float64]
    grippers: list[npt.NDArray[np.float64]]
    controllers: list[dict[str, Any]]
    domain: dict[str, Any]
    env: dict[str, Any]


CONTROLLER = ("goal_pos", "goal_ori", "relative_ori", "ori_ref", "new_update")
DOMAIN = ("timestep", "cur_time", "done")


def save(env: LiberoEnv) -> Snapshot:
    """What `restore` needs."""
    domain = env.domain
    model, data = domain.sim.model._model, domain.sim.data._data
    state = np.zeros(mujoco.mj_stateSize(model, STATE))
    mujoco.mj_getState(model, data, state, STATE)
    return Snapshot(
        state,
        data.qacc_warmstart.copy(),
        [np.array(robot.gripper.current_action) for robot in domain.robots],
        [_fields(robot.controller, CONTROLLER) for robot in domain.robots],
        _fields(domain, DOMAIN),
        env.bookkeeping(),
    )


def restore(env: LiberoEnv, snapshot: Snapshot) -> None:
    """Put a simulation back to where `save` found it."""
    domain = env.domain
    model, data = domain.sim.model._model, domain.sim.data._data
    mujoco.mj_setState(model, data, snapshot.state, STATE)
    mujoco.mj_forward(model, data)
    # mj_forward has used and replaced it.
    data.qacc_warmstart[:] = snapshot.warm_start
    for robot, gripper, controller in zip(
        domain.robots, snapshot.grippers, snapshot.controllers, strict=True
    ):
        robot.gripper.current_action = gripper.copy()
        _put(robot.controller, controller)
    _put(domain, snapshot.domain)
    env.bookkeeping(snapshot.env)


def relabel(env: LiberoEnv, reader: SceneReader, steps: int = 8) -> FloatArray:
    """The expert's next actions from this state, float32 [steps, 7], controller units (gripper -1 opens, +1 closes).

    Rolled out in the simulation itself, which is put back. After the task's end the last action is repeated.
    """
    snapshot = save(env)
    actions: list[npt.NDArray[np.float64]] = []
    try:
        for _ in range(steps):
            actions.append(decide(reader.read()).action)
            if env.execute(actions[-1]).done:
                break
    finally:
        restore(env, snapshot)
    actions += [actions[-1]] * (steps - len(actions))
    return np.stack(actions).astype(np.float32)


def _fields(thing: Any, names: tuple[str, ...]) -> dict[str, Any]:
    found = {name: getattr(thing, name) for name in names if hasattr(thing, name)}
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in found.items()}


def _put(thing: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(thing, name, value.copy() if isinstance(value, np.ndarray) else value)
