"""Between ROS messages and the package's arrays: images, proprioception, chunks, stamps."""

from __future__ import annotations

import array

import cv2
import numpy as np
import simplejpeg
from builtin_interfaces.msg import Duration, Time
from geometry_msgs.msg import PoseStamped
from sensor_msgs.msg import CompressedImage, Image, JointState

from aura_ros.errors import UserError
from aura_ros.geometry import quaternion_to_axis_angle
from aura_ros.msg import ActionChunk as ActionChunkMsg
from aura_ros.types import ActionChunk, ActionSpec, ControlMode, ImageArray

NS = 1_000_000_000

# encoding -> (channels, OpenCV code that makes it RGB; None when it is RGB already)
ENCODINGS = {
    "rgb8": (3, None),
    "bgr8": (3, cv2.COLOR_BGR2RGB),
    "rgba8": (4, cv2.COLOR_RGBA2RGB),
    "bgra8": (4, cv2.COLOR_BGRA2RGB),
    "mono8": (1, cv2.COLOR_GRAY2RGB),
}


FLOAT32_MAX = float(np.finfo(np.float32).max)  # proprioception is float32
JPEG_MAGIC = b"\xff\xd8"


def to_ns(stamp: Time | Duration) -> int:
    """Nanoseconds of a stamp or duration."""
    return int(stamp.sec) * NS + int(stamp.nanosec)


def to_time(ns: int) -> Time:
    """A stamp of so many nanoseconds."""
    return Time(sec=ns // NS, nanosec=ns % NS)


def to_duration(seconds: float) -> Duration:
    """A duration of so many seconds, to the nanosecond."""
    ns = round(seconds * NS)
    return Duration(sec=ns // NS, nanosec=ns % NS)


def image_to_rgb(msg: Image) -> ImageArray:
    """Decode sensor_msgs/Image to uint8 [height, width, 3] RGB, honouring `step` and `encoding`.

    Raises UserError for an unknown encoding or for data that do not fit width, height and step; nothing is
    reshaped to fit and nothing is read past the end.
    """
    known = ENCODINGS.get(msg.encoding)
    if known is None:
        raise UserError(
            f"image encoding '{msg.encoding}' is not supported; use one of: {', '.join(ENCODINGS)}"
        )
    channels, code = known
    height, width, step = msg.height, msg.width, msg.step
    if height == 0 or width == 0:
        raise UserError(f"image is {width}x{height}; an image needs pixels")
    if step < width * channels:
        raise UserError(
            f"image step is {step}; {width} {msg.encoding} pixels need {width * channels} or more"
        )
    data = np.frombuffer(msg.data, np.uint8)
    if data.size != height * step:
        raise UserError(f"image has {data.size} bytes; height {height} x step {step} makes {height * step}")
    rows = data.reshape(height, step)[:, : width * channels]
    pixels = rows.reshape(height, width, channels) if channels > 1 else rows
    if code is None:
        return np.ascontiguousarray(pixels)
    return np.asarray(cv2.cvtColor(np.ascontiguousarray(pixels), code), np.uint8)


def compressed_to_rgb(msg: CompressedImage) -> ImageArray:
    """Decode sensor_msgs/CompressedImage (JPEG, PNG, ...) to uint8 [height, width, 3] RGB.

    The format is decided by the data's magic bytes: publishers disagree about the `format` string. Pixels stay
    as the camera put them; an orientation tag is not applied. Raises UserError for data that are cut short, not
    an image or not decodable.
    """
    data = np.frombuffer(msg.data, np.uint8)
    try:
        if data[:2].tobytes() == JPEG_MAGIC:
            # Strict: OpenCV's decoder may fill the rows that a truncated JPEG lacks.
            pixels = simplejpeg.decode_jpeg(data, "RGB")
        else:
            flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
            decoded = cv2.imdecode(data, flags) if data.size else None
            if decoded is None:
                raise ValueError("no image")
            pixels = cv2.cvtColor(decoded, cv2.COLOR_BGR2RGB)
    except (ValueError, cv2.error) as error:
        raise UserError(
            f"compressed image of {data.size} bytes (format '{msg.format}') cannot be decoded; "
            "send whole JPEG or PNG files"
        ) from error
    return np.asarray(pixels, np.uint8)


def rgb_to_image(pixels: ImageArray, stamp_ns: int, frame_id: str) -> Image:
    """Wrap uint8 [height, width, 3] RGB as sensor_msgs/Image."""
    msg = Image()
    msg.header.stamp, msg.header.frame_id = to_time(stamp_ns), frame_id
    msg.height, msg.width, msg.encoding, msg.step = *pixels.shape[:2], "rgb8", pixels.shape[1] * 3
    # array.array is stored as it is; bytes and NumPy arrays are converted element by element.
    data = array.array("B")
    data.frombytes(np.ascontiguousarray(pixels).tobytes())
    msg.data = data
    return msg


def joint_positions(msg: JointState, names: tuple[str, ...]) -> list[float]:
    """Positions of the named joints, by name: publishers order joints as they like.

    Velocities and efforts are not looked at (drivers fill them with NaN). Raises UserError naming the joint that
    is missing, has no position, or whose position is not finite.
    """
    index = {name: i for i, name in enumerate(msg.name)}
    values = []
    for name in names:
        if name not in index:
            raise UserError(f"joint '{name}' is not in the message; it has: {', '.join(msg.name) or 'none'}")
        if index[name] >= len(msg.position):
            raise UserError(
                f"joint '{name}' has no position; {len(msg.position)} positions for {len(msg.name)} names"
            )
        value = float(msg.position[index[name]])
        if not abs(value) <= FLOAT32_MAX:
            raise UserError(f"joint '{name}' has position {value}; a finite number is needed")
        values.append(value)
    return values


def pose_values(msg: PoseStamped, reference_xyzw: tuple[float, ...]) -> list[float]:
    """Position (3, metres) and axis-angle (3, radians) of a pose. Raises UserError if one is not finite."""
    p, q = msg.pose.position, msg.pose.orientation
    position = [p.x, p.y, p.z]
    if not all(abs(value) <= FLOAT32_MAX for value in position):
        raise UserError(f"pose position {position} must be finite")
    return position + quaternion_to_axis_angle([q.x, q.y, q.z, q.w], reference_xyzw).tolist()


def chunk_to_msg(chunk: ActionChunk, epoch: int, sequence: int, published_ns: int) -> ActionChunkMsg:
    """An action chunk as a message."""
    spec = chunk.spec
    msg = ActionChunkMsg()
    msg.header.stamp, msg.header.frame_id = to_time(chunk.stamp_ns), spec.frame_id
    msg.published_at = to_time(published_ns)
    msg.epoch, msg.sequence = epoch, sequence
    msg.control_mode = int(spec.control_mode)
    msg.names, msg.units = list(spec.names), list(spec.units)
    msg.period, msg.horizon = to_duration(spec.period_s), spec.horizon
    msg.data = array.array("f", np.ascontiguousarray(chunk.data, np.float32).tobytes())
    return msg


def msg_to_chunk(msg: ActionChunkMsg, scale: tuple[float, ...]) -> ActionChunk:
    """Read an action chunk back. Raises UserError for a shape, mode or number that cannot be executed."""
    try:
        mode = ControlMode(msg.control_mode)
    except ValueError:
        known = ", ".join(f"{m.value} {m.name}" for m in ControlMode)
        raise UserError(f"control_mode {msg.control_mode} is unknown; it is one of: {known}") from None
    spec = ActionSpec(
        names=tuple(msg.names),
        units=tuple(msg.units),
        scale=scale,
        control_mode=mode,
        period_s=to_ns(msg.period) / NS,
        horizon=msg.horizon,
        frame_id=msg.header.frame_id,
    )
    data = np.asarray(msg.data, np.float32)
    if data.size != spec.horizon * spec.dim:
        raise UserError(
            f"chunk has {data.size} values; horizon {spec.horizon} x {spec.dim} names need {spec.horizon * spec.dim}"
        )
    return ActionChunk(data.reshape(spec.horizon, spec.dim), spec, to_ns(msg.header.stamp))
