"""What the simulator knows and no camera shows: where hand, fingers, objects and goals are, for the scripted expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aura_ros.errors import UserError

if TYPE_CHECKING:
    from aura_ros.sim.libero import LiberoEnv

Array = npt.NDArray[np.float64]
# The grip site is turned against the hand; the fingers move along the hand's y axis.
HAND = "robot0_right_hand"
FINGERS = ("gripper0_finger1", "gripper0_finger2")
# Grasps and drops are judged on where an object's surface is: a sample of its points is enough.
MOST_POINTS = 400


@dataclass(frozen=True)
class Item:
    """An object as it stands now.

    points: float64 [P, 3], m, world; of its surface. held: both fingers touch it.
    """

    name: str
    points: Array
    held: bool

    @property
    def low(self) -> Array:
        """Corner of the bounding box, float64 [3], m."""
        return self.points.min(0)

    @property
    def high(self) -> Array:
        """The other corner, float64 [3], m."""
        return self.points.max(0)

    @property
    def centre(self) -> Array:
        """Of the bounding box, float64 [3], m."""
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Goal:
    """One predicate of the task: put `item` into or onto `place`.

    at: float64 [3], m, centre of the place. rim: height that an object must pass to get in, m. done: it holds now.
    """

    item: str
    place: str
    at: Array
    rim: float
    done: bool


@dataclass(frozen=True)
class Scene:
    """Everything that the expert's next action depends on.

    hand: float64 [3], m, the grip site. rotation: float64 [3, 3], the hand in the world; its y axis is that along which
    the fingers move. opening: between the fingers, m. closing: how fast that shrinks, m/s.
    """

    hand: Array
    rotation: Array
    opening: float
    closing: float
    items: dict[str, Item]
    goals: tuple[Goal, ...]

    @property
    def next_goal(self) -> Goal | None:
        """The first that does not hold yet; None: all do."""
        return next((goal for goal in self.goals if not goal.done), None)


class SceneReader:
    """Reads scenes from an environment; an object's surface is sampled once."""

    def __init__(self, env: LiberoEnv) -> None:
        """Raises UserError for a task whose goal is more than putting objects into or onto places."""
        self._env = env
        domain = env.domain
        self._goals = [tuple(predicate) for predicate in domain.parsed_problem["goal_state"]]
        other = [goal for goal in self._goals if len(goal) != 3 or goal[0] not in ("in", "on")]
        if other:
            raise UserError(
                f"task {env.config.task} of {env.config.suite} wants {list(other[0])}; the scripted expert only puts "
                "objects into or onto places: choose another task"
            )
        model = domain.sim.model
        self._geoms = {name: _geoms_of(model, body) for name, body in domain.obj_body_id.items()}
        self._points = {
            name: _surface(model, geoms, np.random.default_rng(0)) for name, geoms in self._geoms.items()
        }
        self._fingers = [
            {g for g in range(model.ngeom) if (model.geom_id2name(g) or "").startswith(prefix)}
            for prefix in FINGERS
        ]

    @property
    def targets(self) -> tuple[str, ...]:
        """The objects to be moved, in the order of the goal."""
        return tuple(dict.fromkeys(goal[1] for goal in self._goals))

    def read(self) -> Scene:
        """The scene now."""
        # Here, for scenes are also plain data, without a simulator.
        import mujoco

        domain = self._env.domain
        data, robot = domain.sim.data, domain.robots[0]
        # After a step MuJoCo's places are those of the last substep's beginning; those of the state itself are wanted.
        mujoco.mj_kinematics(domain.sim.model._model, data._data)
        site, hand = robot.eef_site_id, domain.sim.model.body_name2id(HAND)
        joints = [domain.sim.model.get_joint_qpos_addr(name) for name in robot.gripper.joints]
        speeds = [domain.sim.model.get_joint_qvel_addr(name) for name in robot.gripper.joints]
        touching = self._touching()
        items = {
            name: Item(name, self._world(name), {0, 1} <= touching.get(name, set())) for name in self._points
        }
        return Scene(
            hand=np.array(data.site_xpos[site]),
            rotation=np.array(data.body_xmat[hand]).reshape(3, 3),
            opening=float(data.qpos[joints[0]] - data.qpos[joints[1]]),
            closing=float(data.qvel[speeds[1]] - data.qvel[speeds[0]]),
            items=items,
            goals=tuple(self._goal(goal[0], goal[1], goal[2], items) for goal in self._goals),
        )

    def _goal(self, predicate: str, item: str, place: str, items: dict[str, Item]) -> Goal:
        domain = self._env.domain
        # A place is a region of an object, or an object.
        base = max((name for name in items if place.startswith(name)), key=len, default=None)
        if place in domain.object_sites_dict:
            at = np.array(domain.sim.data.get_site_xpos(place))
        else:
            at = items[place].centre
        rim = float(items[base].high[2]) if base else float(at[2])
        done = bool(domain._eval_predicate([predicate, item, place]))
        return Goal(item, place, at, rim, done)

    def _world(self, name: str) -> Array:
        data = self._env.domain.sim.data
        parts = []
        for geom, local in self._points[name]:
            parts.append(local @ np.array(data.geom_xmat[geom]).reshape(3, 3).T + data.geom_xpos[geom])
        return np.concatenate(parts)

    def _touching(self) -> dict[str, set[int]]:
        """Object -> which of the fingers touch it."""
        data = self._env.domain.sim.data
        owner = {geom: name for name, geoms in self._geoms.items() for geom in geoms}
        found: dict[str, set[int]] = {}
        for contact in data.contact[: data.ncon]:
            for one, other in ((contact.geom1, contact.geom2), (contact.geom2, contact.geom1)):
                for side, fingers in enumerate(self._fingers):
                    if one in fingers and other in owner:
                        found.setdefault(owner[other], set()).add(side)
        return found


def _geoms_of(model: Any, body: int) -> list[int]:
    """The geoms of a body and all below it that collide."""
    inside = {body}
    for child in range(model.nbody):
        if model.body_parentid[child] in inside and child:
            inside.add(child)
    return [g for g in range(model.ngeom) if model.geom_bodyid[g] in inside and model.geom_contype[g] > 0]


def _surface(model: Any, geoms: list[int], rng: np.random.Generator) -> list[tuple[int, Array]]:
    """For each geom, points of its surface in its own frame."""
    found = []
    for geom in geoms:
        kind, size = int(model.geom_type[geom]), np.array(model.geom_size[geom])
        if kind == 7:  # mesh
            mesh = int(model.geom_dataid[geom])
            start, count = int(model.mesh_vertadr[mesh]), int(model.mesh_vertnum[mesh])
            points = np.array(model.mesh_vert[start : start + count], dtype=np.float64)
        else:
            points = _primitive(kind, size)
        most = max(MOST_POINTS // len(geoms), 16)
        if len(points) > most:
            points = points[rng.choice(len(points), most, replace=False)]
        found.append((geom, points))
    return found


def _primitive(kind: int, size: Array) -> Array:
    """Corners of a box, or rings of what is round (MuJoCo's mjtGeom: 2 sphere, 3 capsule, 5 cylinder, 6 box)."""
    if kind == 6:
        signs = np.array(np.meshgrid([-1, 1], [-1, 1], [-1, 1])).reshape(3, -1).T
        return signs * size
    angles = np.linspace(0, 2 * np.pi, 16, endpoint=False)
    ring = np.stack([np.cos(angles), np.sin(angles)], 1) * size[0]
    half = {2: size[0], 3: size[0] + size[1], 5: size[1]}.get(kind, size[0])
    return np.concatenate([np.column_stack([ring, np.full(len(ring), z)]) for z in (-half, 0.0, half)])
