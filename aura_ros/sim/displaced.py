"""The displaced split: an official initial state with its objects moved, for the official ones hardly test vision.

In most tasks of libero_object the target's official position is constant; a blind policy learns it by heart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aura_ros.sim.scene import Item, SceneReader
from aura_ros.sim.suites import EpisodeVoidError

if TYPE_CHECKING:
    from aura_ros.sim.libero import LiberoEnv

Array = npt.NDArray[np.float64]
# How far each object moves along x and y at most, and how far apart footprints stay, m.
REACH_M, GAP_M = 0.06, 0.02
# An arrangement is drawn again if an object then moves by more than this or tilts by more than that, m and rad.
MOVED_M, TILTED_RAD = 0.015, 0.1
# Arrangements drawn before giving up; of each, layouts tried on paper before it is simulated.
ARRANGEMENTS, LAYOUTS = 20, 2000
STREAM = 40_961


def displace(env: LiberoEnv) -> None:
    """Move every movable object of a settled environment, by rejection: `config.displaced` says which arrangement.

    The same suite, task, initial state and number give the same arrangement. Raises EpisodeVoidError if none of many is free
    of overlaps and at rest.
    """
    config, domain = env.config, env.domain
    suite = [ord(letter) for letter in config.suite]
    rng = np.random.default_rng([STREAM, *suite, config.task, config.init_state, config.displaced])
    reader = SceneReader(env)
    start = domain.sim.get_state()
    names, items = _movable(domain), reader.read().items
    for _ in range(ARRANGEMENTS):
        moves = _layout([items[name] for name in names], rng)
        if moves is None:
            break
        domain.sim.set_state(start)
        for name, move in zip(names, moves, strict=True):
            joint = domain.get_object(name).joints[0]
            pose = np.array(domain.sim.data.get_joint_qpos(joint))
            pose[:2] += move
            domain.sim.data.set_joint_qpos(joint, pose)
        domain.sim.forward()
        before = _poses(domain, names)
        env.settle()
        if _at_rest(before, _poses(domain, names)):
            return
    raise EpisodeVoidError(
        f"no arrangement {config.displaced} of {config.suite} task {config.task}, state {config.init_state}, is free of "
        "overlaps and at rest: take another number"
    )


def _movable(domain: Any) -> list[str]:
    """Objects that stand free, in the order of the task file."""
    return [name for name in domain.obj_body_id if name in domain.objects_dict]


def _layout(items: list[Item], rng: np.random.Generator) -> Array | None:
    """Moves [objects, 2], m, uniform within the reach, whose footprints keep the gap; None: none of many does."""
    low, high = np.stack([item.low[:2] for item in items]), np.stack([item.high[:2] for item in items])
    for _ in range(LAYOUTS):
        moves = rng.uniform(-REACH_M, REACH_M, (len(items), 2))
        a, b = low + moves - GAP_M / 2, high + moves + GAP_M / 2
        meet = ((a[:, None] < b[None]) & (a[None] < b[:, None])).all(-1)
        if np.count_nonzero(meet) == len(items):  # each meets itself
            return moves
    return None


def _poses(domain: Any, names: list[str]) -> Array:
    """float64 [objects, 7]: position, m, and quaternion w, x, y, z."""
    data, body = domain.sim.data, domain.obj_body_id
    return np.stack([np.concatenate([data.body_xpos[body[n]], data.body_xquat[body[n]]]) for n in names])


def _at_rest(before: Array, after: Array) -> bool:
    """Whether nothing slid, fell or tilted while it settled."""
    moved = np.linalg.norm(after[:, :3] - before[:, :3], axis=1)
    turned = 2 * np.arccos(np.clip(np.abs((before[:, 3:] * after[:, 3:]).sum(1)), 0.0, 1.0))
    return bool((moved < MOVED_M).all() and (turned < TILTED_RAD).all())
