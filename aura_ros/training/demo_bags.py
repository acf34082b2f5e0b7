"""Demonstrations as bags: written as a robot would record them, and read back as training's arrays. No rclpy.

Topics, relative names: `images/CAMERA/compressed`, `joint_states`, `ee_pose`, `instruction`, `action`. An ActionChunk of
one row is the action executed in the period that begins at its stamp; one with a row for each step of the horizon is
an expert's plan for the observation of that stamp (DAgger), and counts before the former. `keypoints` is optional, and
`keypoint_names`, with commas between, says what they are: where nothing does, target and place. A rollout has `latent`
and `base_chunk`: what a frozen backbone made of an observation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aura_ros.backbones.openvla_oft.config import ImageConfig
from aura_ros.backbones.openvla_oft.processing import decode_jpeg, orient, shrink
from aura_ros.errors import UserError
from aura_ros.geometry import GRIPPER_DOWN_XYZW, quaternion_to_axis_angle
from aura_ros.policy.units import to_controller, to_si
from aura_ros.report.bag import BagTopic, BagWriter, qos
from aura_ros.report.definitions import typestore
from aura_ros.report.reading import read_bag
from aura_ros.training.demonstrations import KEYPOINT_NAMES, Samples
from aura_ros.types import LIBERO_ACTION_SPEC, ActionSpec, FloatArray

FINGERS = ("panda_finger_joint1", "panda_finger_joint2")
TYPES = {
    "joint_states": "sensor_msgs/msg/JointState",
    "ee_pose": "geometry_msgs/msg/PoseStamped",
    "instruction": "std_msgs/msg/String",
    "action": "aura_ros/msg/ActionChunk",
    "keypoints": "geometry_msgs/msg/PoseArray",
    "keypoint_names": "std_msgs/msg/String",
}
LATENT = "aura_ros/msg/Latent"
COMPRESSED = "sensor_msgs/msg/CompressedImage"
LATCHED = ("instruction", "keypoint_names")


@dataclass
class Recording:
    """An episode as it is recorded. Stamps are ns.

    images: camera -> stamp -> JPEG. robot: stamp -> joint positions [9], hand position [3], quaternion x y z w [4].
    actions: (stamp, rows [k, D]), controller units, gripper 1 open. keypoints: stamp -> float [K, 3], m. latents: stamp
    -> hidden state [hidden_dim] and the backbone's own chunk [horizon, D], controller units, which is on `chunk_topic`.
    """

    instruction: str
    joint_names: Sequence[str]
    images: dict[str, dict[int, bytes]] = field(default_factory=dict)
    robot: dict[int, tuple[Any, Any, Any]] = field(default_factory=dict)
    actions: list[tuple[int, FloatArray]] = field(default_factory=list)
    keypoints: dict[int, npt.NDArray[np.float64]] = field(default_factory=dict)
    keypoint_names: Sequence[str] = KEYPOINT_NAMES
    latents: dict[int, tuple[FloatArray, FloatArray]] = field(default_factory=dict)
    chunk_topic: str = "base_chunk"


def write_recording(path: Path, recording: Recording, spec: ActionSpec = LIBERO_ACTION_SPEC) -> None:
    """Write the bag, whole or not at all. Raises UserError as `BagWriter` does."""
    topics = {f"images/{camera}/compressed": COMPRESSED for camera in recording.images} | TYPES
    messages: list[tuple[int, str, Any]] = [
        (0, "instruction", _make(TYPES["instruction"], data=recording.instruction)),
        (0, "keypoint_names", _make(TYPES["keypoint_names"], data=",".join(recording.keypoint_names))),
    ]
    for camera, frames in recording.images.items():
        for stamp, data in frames.items():
            message = _make(
                COMPRESSED,
                header=_header(stamp, camera),
                format="rgb8; jpeg compressed bgr8",
                data=_bytes(data),
            )
            messages.append((stamp, f"images/{camera}/compressed", message))
    for stamp, (joints, position, quaternion) in recording.robot.items():
        message = _make(
            TYPES["joint_states"],
            header=_header(stamp, ""),
            name=list(recording.joint_names),
            position=np.asarray(joints, np.float64),
            velocity=np.zeros(0),
            effort=np.zeros(0),
        )
        messages.append((stamp, "joint_states", message))
        pose = _make(TYPES["ee_pose"], header=_header(stamp, "world"), pose=_pose(position, quaternion))
        messages.append((stamp, "ee_pose", pose))
    for number, (stamp, rows) in enumerate(recording.actions):
        messages.append((stamp, "action", _chunk(stamp, number, rows, spec)))
    for stamp, points in recording.keypoints.items():
        poses = [_pose(point, (0.0, 0.0, 0.0, 1.0)) for point in points]
        array = _make(TYPES["keypoints"], header=_header(stamp, "world"), poses=poses)
        messages.append((stamp, "keypoints", array))
    if recording.latents:
        topics |= {"latent": LATENT, recording.chunk_topic: TYPES["action"]}
    for number, (stamp, (hidden, base)) in enumerate(recording.latents.items()):
        latent = _make(LATENT, header=_header(stamp, ""), epoch=0, step=number + 1, data=hidden)
        messages.append((stamp, "latent", latent))
        messages.append((stamp, recording.chunk_topic, _chunk(stamp, number, base, spec)))
    used = {name for _, name, _ in messages}
    topics = {name: kind for name, kind in topics.items() if name in used}
    store = typestore()
    writer = BagWriter(
        path,
        [BagTopic(f"/{name}", kind, qos(latched=name in LATCHED)) for name, kind in topics.items()],
    )
    for stamp, topic, message in sorted(messages, key=lambda item: item[0]):
        writer.write(f"/{topic}", stamp, bytes(store.serialize_cdr(message, topics[topic])))
    writer.close()


def index_bag(
    path: Path,
    image: ImageConfig,
    cameras: Sequence[str],
    *,
    spec: ActionSpec = LIBERO_ACTION_SPEC,
    fingers: Sequence[str] = FINGERS,
) -> Samples:
    """A bag's observations that have an action for each step of the horizon. Streams are joined within half a period.

    Raises UserError for a bag that lacks a topic or joint, or whose actions are others than `spec` names.
    """
    streams = _read(path, cameras)
    named = streams.pop("keypoint_names")
    names = tuple(n.strip() for n in named[0].data.split(",")) if named else KEYPOINT_NAMES
    period = round(spec.period_s * 1e9)
    times = {name: np.array(sorted(stream), np.int64) for name, stream in streams.items()}
    rows = {stamp: data[0] for stamp, data in chunk_rows(path, streams["action"], spec, 1).items()}
    plans = chunk_rows(path, streams["plan"], spec, spec.horizon)
    row_times = np.array(sorted(rows), np.int64)
    first = min(int(stamps[0]) for stamps in times.values() if len(stamps))
    needed = ["joint_states", "ee_pose", *(f"images/{camera}/compressed" for camera in cameras)]
    found: dict[str, list[Any]] = {"images": [], "proprio": [], "actions": [], "keypoints": [], "step": []}
    for stamp in times[f"images/{cameras[0]}/compressed"]:
        joined = {
            name: streams[name][time]
            for name, stamps in times.items()
            if (time := nearest(stamps, int(stamp), period // 2)) is not None
        }
        label = label_of(int(stamp), plans, rows, row_times, spec.horizon, period)
        if label is None or any(name not in joined for name in needed):
            continue
        frames = [joined[f"images/{camera}/compressed"] for camera in cameras]
        found["images"].append([_image(path, frame, image) for frame in frames])
        found["proprio"].append(_proprio(path, joined["joint_states"], joined["ee_pose"], fingers))
        found["actions"].append(label)
        found["keypoints"].append(_points(joined.get("keypoints"), len(names)))
        found["step"].append(round((int(stamp) - first) / period))
    size, count = image.size, len(found["step"])
    return Samples(
        images=np.array(found["images"], np.uint8).reshape(count, len(cameras), size, size, 3),
        proprio=np.array(found["proprio"], np.float32).reshape(count, 8),
        actions=np.array(found["actions"], np.float32).reshape(count, spec.horizon, spec.dim),
        keypoints=np.array(found["keypoints"], np.float32).reshape(count, len(names), 3),
        step=np.array(found["step"], np.int64),
        keypoint_names=names,
    )


def _read(path: Path, cameras: Sequence[str]) -> dict[str, dict[int, Any]]:
    """Topic (its end, whatever the namespace) -> stamp, ns -> message. Raises UserError for a topic without messages."""
    wanted = ["joint_states", "ee_pose", *(f"images/{camera}/compressed" for camera in cameras)]
    streams: dict[str, dict[int, Any]] = {
        name: {} for name in (*wanted, "action", "plan", "keypoints", "keypoint_names")
    }
    seen: set[str] = set()
    source: dict[str, str] = {}
    for topic, _, message in read_bag(path):
        seen.add(topic)
        name = next(
            (n for n in (*wanted, "action", "keypoints", "keypoint_names") if f"/{topic}".endswith(f"/{n}")),
            None,
        )
        if name is None:
            continue
        kind = TYPES.get(name, COMPRESSED)
        if message.__msgtype__ != kind:
            raise UserError(
                f"bag '{path}' has {message.__msgtype__} on '{topic}'; needed is {kind}: remap it"
            )
        if source.setdefault(name, topic) != topic:
            raise UserError(
                f"bag '{path}' has both '{source[name]}' and '{topic}'; keep one, as with ros2 bag convert"
            )
        if name == "keypoint_names":
            streams[name][0] = message
            continue
        stream = "plan" if name == "action" and message.horizon > 1 else name
        stamp = message.header.stamp
        streams[stream][stamp.sec * 10**9 + stamp.nanosec] = message
    missing = [name for name in wanted if not streams[name]]
    missing += [] if streams["action"] or streams["plan"] else ["action"]
    if missing:
        raise UserError(
            f"bag '{path}' has no messages on '{missing[0]}' (it has {', '.join(sorted(seen)) or 'none at all'}); record or "
            "remap that topic"
        )
    return streams


def chunk_rows(path: Path, chunks: dict[int, Any], spec: ActionSpec, rows: int) -> dict[int, FloatArray]:
    """The first `rows` rows of the chunks that have as many, by stamp, controller units."""
    found = {}
    for stamp, chunk in chunks.items():
        if tuple(chunk.names) != spec.names or chunk.control_mode != spec.control_mode:
            raise UserError(
                f"bag '{path}' has actions {list(chunk.names)} of control mode {chunk.control_mode}; needed are "
                f"{list(spec.names)} of mode {int(spec.control_mode)}"
            )
        data = to_controller(np.asarray(chunk.data, np.float32).reshape(-1, spec.dim), spec)
        if not np.isfinite(data).all():
            raise UserError(
                f"bag '{path}' has an action that is not finite, at {stamp} ns; leave that episode out"
            )
        if len(data) >= rows:
            found[stamp] = data[:rows]
    return found


def label_of(
    stamp: int,
    plans: dict[int, FloatArray],
    rows: dict[int, FloatArray],
    row_times: npt.NDArray[np.int64],
    horizon: int,
    period: int,
) -> FloatArray | None:
    """The actions from an observation on; None where one is missing, as after a push that was not recorded."""
    if stamp in plans:
        return plans[stamp]
    found = [nearest(row_times, stamp + k * period, period // 2) for k in range(horizon)]
    if any(time is None for time in found) or len(set(found)) != horizon:
        return None
    return np.stack([rows[time] for time in found if time is not None])


def nearest(times: npt.NDArray[np.int64], wanted: int, reach: int) -> int | None:
    """The time nearest to `wanted`, if less than `reach` away."""
    if not len(times):
        return None
    at = int(np.searchsorted(times, wanted))
    near = min(times[max(at - 1, 0) : at + 1], key=lambda time: abs(int(time) - wanted))
    return int(near) if abs(int(near) - wanted) < reach else None


def _image(path: Path, message: Any, config: ImageConfig) -> npt.NDArray[np.uint8]:
    try:
        pixels = decode_jpeg(bytes(message.data))
    except ValueError as error:
        raise UserError(f"bag '{path}' has an image that is no whole JPEG; record it again") from error
    return shrink(orient(pixels, config.mirror), config, was_jpeg=True)


def _proprio(path: Path, joints: Any, pose: Any, fingers: Sequence[str]) -> FloatArray:
    """Hand position, axis-angle, fingers: the layout of LIBERO's checkpoints, float32 [8]."""
    names = list(joints.name)
    missing = [name for name in fingers if name not in names]
    if missing:
        raise UserError(
            f"bag '{path}' has joints {names}; '{missing[0]}' is missing: name this robot's fingers"
        )
    p, q = pose.pose.position, pose.pose.orientation
    turn = quaternion_to_axis_angle((q.x, q.y, q.z, q.w), GRIPPER_DOWN_XYZW)
    opening = [joints.position[names.index(name)] for name in fingers]
    return np.array([p.x, p.y, p.z, *turn, *opening], np.float32)


def _points(message: Any, count: int) -> FloatArray:
    """float32 [count, 3], NaN where there is none."""
    poses = [] if message is None else message.poses[:count]
    points = [(pose.position.x, pose.position.y, pose.position.z) for pose in poses]
    points += [(np.nan,) * 3] * (count - len(points))
    return np.array(points, np.float32)


def _make(kind: str, **fields: Any) -> Any:
    return typestore().types[kind](**fields)


def _bytes(data: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def _time(stamp: int) -> Any:
    return _make("builtin_interfaces/msg/Time", sec=stamp // 10**9, nanosec=stamp % 10**9)


def _header(stamp: int, frame: str) -> Any:
    return _make("std_msgs/msg/Header", stamp=_time(stamp), frame_id=frame)


def _pose(position: Any, quaternion: Any) -> Any:
    x, y, z = (float(value) for value in position)
    point = _make("geometry_msgs/msg/Point", x=x, y=y, z=z)
    a, b, c, w = (float(value) for value in quaternion)
    turn = _make("geometry_msgs/msg/Quaternion", x=a, y=b, z=c, w=w)
    return _make("geometry_msgs/msg/Pose", position=point, orientation=turn)


def _chunk(stamp: int, number: int, rows: FloatArray, spec: ActionSpec) -> Any:
    data = to_si(np.asarray(rows, np.float32).reshape(-1, spec.dim), spec)
    period = round(spec.period_s * 1e9)
    return _make(
        TYPES["action"],
        header=_header(stamp, spec.frame_id),
        published_at=_time(stamp),
        epoch=0,
        sequence=number,
        control_mode=int(spec.control_mode),
        names=list(spec.names),
        units=list(spec.units),
        period=_make("builtin_interfaces/msg/Duration", sec=period // 10**9, nanosec=period % 10**9),
        horizon=len(data),
        data=data.ravel(),
    )
