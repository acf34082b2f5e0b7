"""A scripted expert: the next action as a function of the state alone, so that it can relabel any state.

Top-down grasps by proportional control on OSC deltas with privileged poses. There is no counter and no memory: the
phase follows from where hand, fingers and objects are. NumPy only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from aura_ros.sim.scene import Array, Goal, Item, Scene

# Of the hand that points down, x forward (robosuite's Panda at rest).
DOWN = np.diag([1.0, -1.0, -1.0])
UP = np.array([0.0, 0.0, 1.0])
MAX_OPENING_M = 0.08
# Metres of error that ask for the whole of a step's delta; OSC lags, so that less would crawl.
REACH_M, TURN_RAD = 0.05, 0.5
POSITION_GAIN, ROTATION_GAIN = 2.0, 0.6


class Phase(Enum):
    """What the hand is about to do."""

    DONE = "done"
    RISE = "rise"
    APPROACH = "approach"
    DESCEND = "descend"
    GRASP = "grasp"
    LIFT = "lift"
    CARRY = "carry"
    LOWER = "lower"
    RELEASE = "release"


@dataclass(frozen=True)
class Grasp:
    """Where the grip site should be and how it is turned: position [3], m; yaw from `DOWN`, rad; width to hold, m."""

    position: Array
    yaw: float
    width: float


@dataclass(frozen=True)
class Decision:
    """An action, float64 [7] in controller units (gripper -1 opens, +1 closes), and the phase it belongs to."""

    action: npt.NDArray[np.float64]
    phase: Phase


# Heights, m: of the hand over an object's top before it descends, of a carried object over what it must pass, of the
# grip site under an object's top, over the ground at the least.
HOVER, CLEARANCE, DEPTH, GROUND = 0.08, 0.06, 0.03, 0.006
# Of the open fingers and of the hand above them, with room to spare: from which height over the grip site on they are in
# the way, half the breadth, and how far the outside is from the middle, m. What stands there weighs as so much width.
FINGERS, PALM, BLOCKED = (-0.01, 0.02, 0.065), (0.07, 0.04, 0.115), 0.05
NEAR_XY, AT_XY, AT_Z, AT_YAW = 0.015, 0.008, 0.008, 0.12
DROP_XY, DROP_Z = 0.02, 0.03
# Fingers count as open from here on, m; and what is nearer to a place than this is over it.
OPENED, OVER_PLACE, OPENING_SPEED = 0.072, 0.05, 0.01


def plan_grasp(item: Item, rotation: Array, others: Sequence[Item] = ()) -> Grasp:
    """Across an object's narrow side, near its top, where no other object is in the fingers' way.

    Of equal sides the one that needs the smaller turn.
    """
    low, high = item.low, item.high
    # Only what is near the height of the fingers counts: bottles are narrow at the top.
    z = max(high[2] - DEPTH, (low[2] + high[2]) / 2, low[2] + GROUND)
    at_height = item.points[np.abs(item.points[:, 2] - z) < 0.02]
    points = (at_height if len(at_height) >= 8 else item.points)[:, :2]
    middle = (points.min(0) + points.max(0)) / 2
    near = np.concatenate([other.points for other in others]) if others else np.zeros((0, 3))
    near = near[np.linalg.norm(near[:, :2] - middle, axis=1) < 0.15] - [*middle, z]
    current = yaw_of(rotation)
    best: tuple[float, float, float] | None = None
    # Not beyond a quarter turn from the hand at rest: the wrist's joint ends there.
    for turn in np.linspace(-math.pi / 2, math.pi / 2, 37):
        axis = np.array([math.sin(turn), -math.cos(turn)])
        across = points @ axis
        width = float(across.max() - across.min())
        cost = width + 0.002 * abs(turn) + 0.01 * abs(turn - current) + BLOCKED * _blocked(near, axis)
        if best is None or cost < best[0]:
            best = (cost, float(turn), width)
    assert best is not None
    _, yaw, width = best
    along = np.array([math.cos(yaw), math.sin(yaw)])
    across = np.array([math.sin(yaw), -math.cos(yaw)])
    middle = [(points @ axis).max() / 2 + (points @ axis).min() / 2 for axis in (along, across)]
    centre = middle[0] * along + middle[1] * across
    return Grasp(np.array([*centre, z]), yaw, width)


def _blocked(near: Array, axis: Array) -> float:
    """How much of other objects, points from the grasp, stands where open fingers and hand would go: 0 none, 1 a lot."""
    across = np.abs(near[:, :2] @ axis)
    along = np.abs(near[:, :2] @ np.array([axis[1], -axis[0]]))
    worst = 0.0
    for lowest, breadth, outer in (FINGERS, PALM):
        inside = (near[:, 2] > lowest) & (along < breadth) & (across < outer)
        if inside.any():
            worst = max(worst, float((outer - across[inside]).max()) / (outer - MAX_OPENING_M / 2))
    return worst


def yaw_of(rotation: Array) -> float:
    """Turn about the vertical of a hand that points down, rad, 0 at `DOWN`."""
    return math.atan2(rotation[1, 0], rotation[0, 0])


def decide(scene: Scene) -> Decision:
    """The expert's action in a scene."""
    goal = scene.next_goal
    if goal is None:
        return Decision(
            _action(scene, scene.hand + 0.02 * UP, yaw_of(scene.rotation), close=False), Phase.DONE
        )
    item = scene.items[goal.item]
    others = [other for name, other in scene.items.items() if name != goal.item]
    letting_go = (
        scene.closing < -OPENING_SPEED and float(np.linalg.norm(item.centre[:2] - goal.at[:2])) < OVER_PLACE
    )
    if item.held and not letting_go:
        return _bring(scene, item, goal, others)
    return _fetch(scene, item, goal, others)


def _fetch(scene: Scene, item: Item, goal: Goal, others: list[Item]) -> Decision:
    grasp = plan_grasp(item, scene.rotation, others)
    over = float(np.linalg.norm(scene.hand[:2] - goal.at[:2])) < OVER_PLACE
    if over and scene.opening < OPENED and np.linalg.norm(item.centre[:2] - goal.at[:2]) < OVER_PLACE:
        # Just let go of: closing again would catch it as it falls.
        return Decision(_action(scene, scene.hand, yaw_of(scene.rotation), close=False), Phase.RELEASE)
    off = float(np.linalg.norm(scene.hand[:2] - grasp.position[:2]))
    turn = abs(_wrapped(grasp.yaw - yaw_of(scene.rotation)))
    above = scene.hand[2] - grasp.position[2]
    if off < AT_XY * 1.5 and above < AT_Z and turn < 2 * AT_YAW:
        return Decision(_action(scene, grasp.position, grasp.yaw, close=True), Phase.GRASP)
    opened = scene.opening > min(grasp.width + 0.015, MAX_OPENING_M - 0.008)
    hover = item.high[2] + HOVER
    if off < NEAR_XY and turn < 2 * AT_YAW and opened:
        # A funnel: straight down only from straight above, else the fingers land on something and stay there.
        height = float(np.clip((off - AT_XY) / (NEAR_XY - AT_XY), 0.0, 1.0)) * HOVER
        target = grasp.position + height * UP
        return Decision(_action(scene, target, grasp.yaw, close=False), Phase.DESCEND)
    # On the way nothing may be swept along: first up to where everything near the path is below the fingers.
    way = max(
        [hover, *(other.high[2] + 0.03 for other in others if _on_path(scene.hand, grasp.position, other))]
    )
    if off >= 2 * NEAR_XY and scene.hand[2] < way - 0.02 and not _free(scene, others, item):
        return Decision(_action(scene, np.array([*scene.hand[:2], way]), grasp.yaw, close=False), Phase.RISE)
    target = np.array([*grasp.position[:2], way if off > 0.05 else hover])
    return Decision(_action(scene, target, grasp.yaw, close=False), Phase.APPROACH)


def _bring(scene: Scene, item: Item, goal: Goal, others: list[Item]) -> Decision:
    yaw = yaw_of(scene.rotation)
    # The object's middle, not the hand's, must come over the place.
    shift = goal.at[:2] - item.centre[:2]
    off = float(np.linalg.norm(shift))
    below = float(scene.hand[2] - item.low[2])
    over = [goal.rim, *(other.high[2] for other in others if _on_path(scene.hand, goal.at, other))]
    carry = max(over) + CLEARANCE + below
    over_place = np.array([*(scene.hand[:2] + shift), 0.0])
    if off < DROP_XY:
        drop = goal.rim - 0.02 + below
        if scene.hand[2] < drop + DROP_Z:
            return Decision(_action(scene, scene.hand, yaw, close=False), Phase.RELEASE)
        over_place[2] = drop
        return Decision(_action(scene, over_place, yaw, close=True), Phase.LOWER)
    if scene.hand[2] < carry - 0.03:
        return Decision(_action(scene, np.array([*scene.hand[:2], carry]), yaw, close=True), Phase.LIFT)
    over_place[2] = carry
    return Decision(_action(scene, over_place, yaw, close=True), Phase.CARRY)


def _free(scene: Scene, others: list[Item], item: Item) -> bool:
    """Whether the fingers are above everything within reach of a sideways move."""
    tops = [o.high[2] for o in (*others, item) if np.linalg.norm(o.centre[:2] - scene.hand[:2]) < 0.15]
    return not tops or scene.hand[2] > max(tops) + 0.02


def _on_path(start: Array, end: Array, item: Item) -> bool:
    """Whether an object is within a hand's width of the straight line between two points, seen from above."""
    a, b = start[:2], end[:2]
    way = b - a
    length = float(way @ way)
    share = 0.0 if length < 1e-9 else float(np.clip((item.centre[:2] - a) @ way / length, 0, 1))
    radius = 0.5 * float(np.linalg.norm((item.high - item.low)[:2]))
    return float(np.linalg.norm(a + share * way - item.centre[:2])) < radius + 0.06


def _action(scene: Scene, target: Array, yaw: float, *, close: bool) -> npt.NDArray[np.float64]:
    return towards(scene.hand, scene.rotation, target, yaw, close=close)


def towards(
    hand: Array, rotation: Array, target: Array, yaw: float, *, close: bool
) -> npt.NDArray[np.float64]:
    """The action, float64 [7], towards a place of the grip site, [3], m, and a yaw, rad, pointing down.

    hand: where the grip site is, [3], m. rotation: of the hand, [3, 3].
    """
    move = POSITION_GAIN * (target - hand) / REACH_M
    # The direction is kept where the step is too long.
    move = move / max(1.0, float(np.abs(move).max()))
    c, s = math.cos(yaw), math.sin(yaw)
    wanted = np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]]) @ DOWN
    turn = ROTATION_GAIN * rotation_vector(wanted @ rotation.T) / TURN_RAD
    turn = turn / max(1.0, float(np.abs(turn).max()))
    return np.array([*move, *turn, 1.0 if close else -1.0])


def rotation_vector(rotation: Array) -> Array:
    """Axis times angle of a rotation matrix, float64 [3], rad; below a half turn."""
    cosine = float(np.clip((np.trace(rotation) - 1) / 2, -1.0, 1.0))
    skew = np.array(
        [
            rotation[2, 1] - rotation[1, 2],
            rotation[0, 2] - rotation[2, 0],
            rotation[1, 0] - rotation[0, 1],
        ]
    )
    sine = float(np.linalg.norm(skew)) / 2
    return skew / 2 if sine < 1e-9 else skew / (2 * sine) * math.atan2(sine, cosine)


def _wrapped(angle: float) -> float:
    return (angle + math.pi) % (2 * math.pi) - math.pi
