"""What a cue task does to an environment: objects light up in its frames, and a sweep moves the arm until the decision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aura_ros.sim.cues import schedule, waypoint_at, waypoints
from aura_ros.sim.expert import towards
from aura_ros.sim.scene import HAND

if TYPE_CHECKING:
    from aura_ros.sim.libero import LiberoEnv

# An RGBA that no LIBERO object has.
LIT = (1.0, 0.0, 1.0, 1.0)
# MuJoCo's geom group of what is seen but does not collide, as robosuite builds its models.
VISUAL = 1
# Controller units: the sweep is slower than a policy.
SLOW = 0.5


class Hold:
    """The schedule of one episode, and the sweep, which starts and ends where the hand was at the start.

    schedule: may be replaced before the first step; the sweep stays that of the episode, and may be cut off by it.
    """

    def __init__(self, env: LiberoEnv) -> None:
        self.schedule = schedule(env.config)
        self._home, _ = _hand(env.domain)
        self._length = self.schedule.held
        self._points = waypoints(env.config, self._length)

    def sweep(self, env: LiberoEnv) -> npt.NDArray[np.float64]:
        """The action of this step of the hold, float64 [7], controller units."""
        hand, rotation = _hand(env.domain)
        target = self._home + waypoint_at(self._points, env.step_count, self._length)
        action = towards(hand, rotation, target, 0.0, close=False)
        action[:3] = np.clip(action[:3], -SLOW, SLOW)
        return action


def _hand(domain: Any) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Where the grip site is, [3], m, and how the hand is turned, [3, 3]."""
    data, robot = domain.sim.data, domain.robots[0]
    body = domain.sim.model.body_name2id(HAND)
    return np.array(data.site_xpos[robot.eef_site_id]), np.array(data.body_xmat[body]).reshape(3, 3)


@contextmanager
def tinted(domain: Any, names: Sequence[str]) -> Iterator[None]:
    """Paint some objects in a block. Raises KeyError for an object that the scene does not have.

    Only what renders in the block sees it: nothing of it is left in the simulation, nor in its state.
    """
    if not names:
        yield
        return
    model = domain.sim.model._model
    bodies = {domain.obj_body_id[name] for name in names}
    for body in range(model.nbody):
        if int(model.body_parentid[body]) in bodies:
            bodies.add(body)
    painted = [
        g for g in range(model.ngeom) if model.geom_bodyid[g] in bodies and model.geom_group[g] == VISUAL
    ]
    material, colour = model.geom_matid[painted].copy(), model.geom_rgba[painted].copy()
    model.geom_matid[painted] = -1
    model.geom_rgba[painted] = LIT
    try:
        yield
    finally:
        model.geom_matid[painted] = material
        model.geom_rgba[painted] = colour
