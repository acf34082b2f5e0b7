"""A serial chain read from a URDF: where its tip is, and which joint velocities move it along a twist. No rclpy."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from aura_ros.errors import UserError

Array = npt.NDArray[np.float64]
MOVING = ("revolute", "prismatic")
# Damping of the least squares, as a length in metres: a singular direction is given up, not chased.
DAMPING = 0.01


@dataclass(frozen=True)
class Joint:
    """One joint. origin: [4, 4] from the parent's frame. axis: unit vector [3]. lower, upper, velocity: SI."""

    name: str
    kind: str
    parent: str
    child: str
    origin: Array
    axis: Array
    lower: float = -math.inf
    upper: float = math.inf
    velocity: float = math.inf


def read_joints(path: Path) -> dict[str, Joint]:
    """All joints of a URDF, by child link. Raises UserError for a kind that the chain cannot move."""
    joints = {}
    for element in ElementTree.parse(path).getroot().iter("joint"):
        name, kind = element.attrib["name"], element.attrib["type"]
        if kind not in (*MOVING, "fixed"):
            raise UserError(f"joint '{name}' is {kind}; this arm knows: {', '.join(MOVING)}, fixed")
        origin, axis, limit = (element.find(tag) for tag in ("origin", "axis", "limit"))
        numbers = {} if limit is None else {k: float(v) for k, v in limit.attrib.items()}
        direction = _vector(axis, "xyz", "1 0 0")
        joint = Joint(
            name=name,
            kind=kind,
            parent=element.find("parent").attrib["link"],
            child=element.find("child").attrib["link"],
            origin=transform(_vector(origin, "xyz", "0 0 0"), _vector(origin, "rpy", "0 0 0")),
            axis=direction / np.linalg.norm(direction),
            lower=numbers.get("lower", -math.inf),
            upper=numbers.get("upper", math.inf),
            velocity=numbers.get("velocity", math.inf),
        )
        joints[joint.child] = joint
    return joints


def _vector(element: ElementTree.Element | None, name: str, default: str) -> Array:
    text = default if element is None else element.attrib.get(name, default)
    return np.array([float(part) for part in text.split()])


def transform(xyz: Array, rpy: Array) -> Array:
    """[4, 4] of a URDF origin: roll about x, then pitch about the fixed y, then yaw about the fixed z."""
    matrix = np.eye(4)
    roll, pitch, yaw = (rotation(axis, angle) for axis, angle in zip(np.eye(3), rpy, strict=True))
    matrix[:3, :3] = yaw @ pitch @ roll
    matrix[:3, 3] = xyz
    return matrix


def rotation(axis: Array, angle: float) -> Array:
    """[3, 3] of a turn about a unit axis (Rodrigues)."""
    x, y, z = axis
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + math.sin(angle) * cross + (1 - math.cos(angle)) * (cross @ cross)


def quaternion(matrix: Array) -> Array:
    """x, y, z, w of a rotation [3, 3], w >= 0."""
    # Of four formulas the one whose divisor is largest, so that half a turn is as exact as none.
    m = matrix
    squares = np.array([m[0, 0], m[1, 1], m[2, 2], 0.0]) * 2 - np.trace(m)
    squares[3] = np.trace(m)
    largest = int(np.argmax(squares))
    size = math.sqrt(max(0.0, 1 + squares[largest])) / 2
    rest = {
        0: [size, (m[1, 0] + m[0, 1]) / (4 * size), (m[2, 0] + m[0, 2]) / (4 * size), m[2, 1] - m[1, 2]],
        1: [(m[1, 0] + m[0, 1]) / (4 * size), size, (m[2, 1] + m[1, 2]) / (4 * size), m[0, 2] - m[2, 0]],
        2: [(m[2, 0] + m[0, 2]) / (4 * size), (m[2, 1] + m[1, 2]) / (4 * size), size, m[1, 0] - m[0, 1]],
        3: [m[2, 1] - m[1, 2], m[0, 2] - m[2, 0], m[1, 0] - m[0, 1], size],
    }[largest]
    if largest == 3:
        rest[:3] = [value / (4 * size) for value in rest[:3]]
    else:
        rest[3] /= 4 * size
    q = np.array(rest)
    return -q if q[3] < 0 else q


class Chain:
    """The moving joints from a base link to a tip link, in order."""

    def __init__(self, path: Path, base: str, tip: str) -> None:
        """Raises UserError when the tip does not hang on the base."""
        joints = read_joints(path)
        self.base, self.tip = base, tip
        self._all: list[Joint] = []
        link = tip
        while link != base:
            if link not in joints:
                raise UserError(
                    f"link '{tip}' does not hang on '{base}' in '{path}'; known: {', '.join(joints)}"
                )
            self._all.insert(0, joints[link])
            link = joints[link].parent
        self.joints = [joint for joint in self._all if joint.kind in MOVING]
        self.names = tuple(joint.name for joint in self.joints)
        self.lower = np.array([joint.lower for joint in self.joints])
        self.upper = np.array([joint.upper for joint in self.joints])
        self.velocity = np.array([joint.velocity for joint in self.joints])

    def pose(self, positions: Array) -> Array:
        """[4, 4] of the tip in the base's frame; positions: [joints]."""
        return self._walk(positions)[0]

    def jacobian(self, positions: Array) -> Array:
        """[6, joints]: linear (m/s) over angular (rad/s) velocity of the tip in the base's axes, per joint velocity."""
        pose, places, axes = self._walk(positions)
        columns = np.zeros((6, len(self.joints)))
        for index, joint in enumerate(self.joints):
            if joint.kind == "revolute":
                columns[:3, index] = np.cross(axes[index], pose[:3, 3] - places[index])
                columns[3:, index] = axes[index]
            else:
                columns[:3, index] = axes[index]
        return columns

    def joint_velocities(self, positions: Array, twist: Array, damping: float = DAMPING) -> Array:
        """[joints] that move the tip along a twist [6] as well as the arm can: damped least squares."""
        jacobian = self.jacobian(positions)
        square = jacobian @ jacobian.T + damping**2 * np.eye(6)
        return jacobian.T @ np.linalg.solve(square, twist)

    def _walk(self, positions: Array) -> tuple[Array, list[Array], list[Array]]:
        """The tip's pose, and each moving joint's place and axis, in the base's frame."""
        pose, places, axes = np.eye(4), [], []
        values = iter(positions)
        for joint in self._all:
            pose = pose @ joint.origin
            if joint.kind == "fixed":
                continue
            places.append(pose[:3, 3].copy())
            axes.append(pose[:3, :3] @ joint.axis)
            moved, value = np.eye(4), next(values)
            if joint.kind == "revolute":
                moved[:3, :3] = rotation(joint.axis, value)
            else:
                moved[:3, 3] = joint.axis * value
            pose = pose @ moved
        return pose, places, axes
