"""Between messages and arrays: nothing is reshaped to fit, filled in or read past its end."""

import array

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("aura_ros.msg", reason="the messages are not built")

from geometry_msgs.msg import PoseStamped
from sensor_msgs.msg import CompressedImage, Image, JointState

from aura_ros.errors import UserError
from aura_ros.nodes import conversions
from aura_ros.types import LIBERO_ACTION_SPEC, ActionChunk

CHANNELS = {"rgb8": 3, "bgr8": 3, "rgba8": 4, "bgra8": 4, "mono8": 1}
UP = (1.0, 0.0, 0.0, 0.0)


def picture(height=6, width=5):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def image(pixels, encoding, padding=0):
    rows = {
        "rgb8": lambda: pixels,
        "bgr8": lambda: pixels[:, :, ::-1],
        "rgba8": lambda: np.dstack([pixels, np.full(pixels.shape[:2], 7, np.uint8)]),
        "bgra8": lambda: np.dstack([pixels[:, :, ::-1], np.full(pixels.shape[:2], 7, np.uint8)]),
        "mono8": lambda: pixels[:, :, :1],
    }[encoding]()
    flat = rows.reshape(len(rows), -1)
    flat = np.pad(flat, ((0, 0), (0, padding)), constant_values=255)
    msg = Image(height=rows.shape[0], width=rows.shape[1], encoding=encoding, step=flat.shape[1])
    msg.data = array.array("B", flat.tobytes())
    return msg


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("encoding", CHANNELS)
def test_every_encoding_becomes_the_same_rgb_picture(encoding, padding):
    pixels = picture()
    expected = pixels if encoding != "mono8" else pixels[:, :, :1].repeat(3, 2)
    read = conversions.image_to_rgb(image(pixels, encoding, padding))
    assert read.dtype == np.uint8
    assert read.flags.c_contiguous
    np.testing.assert_array_equal(read, expected)


def test_an_image_goes_out_and_comes_back():
    msg = conversions.rgb_to_image(picture(), 1_500_000_000, "wrist")
    assert (msg.header.stamp.sec, msg.header.stamp.nanosec, msg.header.frame_id) == (1, 500_000_000, "wrist")
    assert msg.step == 15
    np.testing.assert_array_equal(conversions.image_to_rgb(msg), picture())


@pytest.mark.parametrize(
    ("fields", "size", "text"),
    [
        ({"encoding": "yuv422"}, 90, "encoding 'yuv422' is not supported; use one of: rgb8, bgr8"),
        ({"encoding": ""}, 90, "encoding '' is not supported"),
        (
            {"width": 410, "height": 308, "step": 1230, "encoding": "bgr8"},
            399_360,
            "399360 bytes; height 308",
        ),
        ({"step": 0}, 90, "step is 0; 5 rgb8 pixels need 15 or more"),
        ({"step": 14}, 84, "step is 14"),
        ({}, 89, "has 89 bytes; height 6 x step 15 makes 90"),
        ({}, 91, "has 91 bytes"),
        ({}, 0, "has 0 bytes"),
        ({"height": 0}, 0, "is 5x0"),
        ({"width": 0}, 90, "is 0x6"),
        ({"height": 2**32 - 1, "width": 2**30, "step": 2**32 - 1}, 90, "has 90 bytes"),
    ],
)
def test_an_image_that_does_not_fit_is_refused_in_one_line(fields, size, text):
    msg = image(picture(), "rgb8")
    for name, value in fields.items():
        setattr(msg, name, value)
    msg.data = array.array("B", bytes(size))
    with pytest.raises(UserError, match="image") as refused:
        conversions.image_to_rgb(msg)
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)


@settings(max_examples=200, deadline=None)
@given(
    height=st.integers(0, 9),
    width=st.integers(0, 9),
    step=st.integers(0, 40),
    size=st.integers(0, 400),
    encoding=st.sampled_from([*CHANNELS, "16UC1"]),
)
def test_whatever_an_image_says_it_is_read_right_or_refused(height, width, step, size, encoding):
    msg = Image(height=height, width=width, step=step, encoding=encoding)
    msg.data = array.array("B", bytes(size))
    fits = (
        encoding in CHANNELS
        and height > 0
        and width > 0
        and step >= width * CHANNELS[encoding]
        and size == height * step
    )
    try:
        read = conversions.image_to_rgb(msg)
    except UserError:
        assert not fits
    else:
        assert fits
        assert read.shape == (height, width, 3)


def compressed(extension, pixels=None, format_string="jpeg"):
    red = np.zeros((32, 48, 3), np.uint8)
    red[:, :, 0] = 200
    ok, data = cv2.imencode(extension, (red if pixels is None else pixels)[:, :, ::-1])
    assert ok
    return CompressedImage(format=format_string, data=array.array("B", data.tobytes()))


@pytest.mark.parametrize("format_string", ["jpg", "jpeg", "rgb8; jpeg compressed bgr8", "png", ""])
@pytest.mark.parametrize("extension", [".jpg", ".png"])
def test_a_compressed_image_is_read_by_its_bytes_with_red_first(extension, format_string):
    read = conversions.compressed_to_rgb(compressed(extension, format_string=format_string))
    assert (read.shape, read.dtype) == ((32, 48, 3), np.uint8)
    assert np.abs(read.reshape(-1, 3).mean(0) - [200, 0, 0]).max() < 4


def test_a_grey_jpeg_has_three_channels():
    ok, data = cv2.imencode(".jpg", np.full((8, 8), 99, np.uint8))
    assert ok
    read = conversions.compressed_to_rgb(CompressedImage(data=array.array("B", data.tobytes())))
    assert read.shape == (8, 8, 3)
    assert np.abs(read.astype(int) - 99).max() <= 2


def test_a_png_is_read_without_loss():
    pixels = picture(32, 48)
    np.testing.assert_array_equal(conversions.compressed_to_rgb(compressed(".png", pixels)), pixels)


@pytest.mark.parametrize("extension", [".jpg", ".png"])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
def test_a_truncated_compressed_image_is_refused(extension, keep):
    msg = compressed(extension, picture(64, 64))
    msg.data = msg.data[: int(len(msg.data) * keep)]
    with pytest.raises(
        UserError, match=rf"image of {len(msg.data)} bytes \(format 'jpeg'\) cannot be decoded"
    ):
        conversions.compressed_to_rgb(msg)


@settings(deadline=None)
@given(
    st.binary(max_size=64), st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM"])
)
def test_bytes_that_are_no_image_are_refused(data, magic):
    with pytest.raises(UserError, match="cannot be decoded"):
        conversions.compressed_to_rgb(CompressedImage(data=array.array("B", magic + data)))


def joints(**position):
    return JointState(name=list(position), position=[float(p) for p in position.values()])


def test_joints_come_by_name_in_the_order_asked_for():
    msg = joints(j1=1, j2=2, j4=4, j5=5, j3=3, j6=6)
    msg.velocity = msg.effort = [float("nan")] * 6
    assert conversions.joint_positions(msg, ("j1", "j2", "j3", "j4", "j5", "j6")) == [1, 2, 3, 4, 5, 6]
    assert conversions.joint_positions(msg, ("j6", "j3")) == [6, 3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_a_position_that_is_no_number_is_refused_naming_the_joint_unless_unused(bad):
    msg = joints(j1=0, j2=bad)
    with pytest.raises(UserError, match="joint 'j2' has position"):
        conversions.joint_positions(msg, ("j1", "j2"))
    assert conversions.joint_positions(msg, ("j1",)) == [0]


def test_a_missing_joint_and_one_without_a_position_are_named():
    msg = joints(j1=0, j2=0)
    with pytest.raises(UserError, match="joint 'j3' is not in the message; it has: j1, j2"):
        conversions.joint_positions(msg, ("j3",))
    msg.position = msg.position[:1]
    with pytest.raises(UserError, match="joint 'j2' has no position; 1 positions for 2 names"):
        conversions.joint_positions(msg, ("j2",))
    with pytest.raises(UserError, match="it has: none"):
        conversions.joint_positions(JointState(), ("j2",))


def pose(position=(0.1, 0.2, 0.3), quaternion=(0.0, 0.0, 0.0, 1.0)):
    msg = PoseStamped()
    msg.pose.position.x, msg.pose.position.y, msg.pose.position.z = map(float, position)
    q = msg.pose.orientation
    q.x, q.y, q.z, q.w = map(float, quaternion)
    return msg


def test_a_pose_is_position_then_axis_angle():
    assert conversions.pose_values(pose(), UP) == [0.1, 0.2, 0.3, 0, 0, 0]
    values = conversions.pose_values(pose(quaternion=(1, 0, 0, 0)), UP)
    assert values[3:] == pytest.approx([np.pi, 0, 0])


@given(st.lists(st.floats(-1, 1), min_size=4, max_size=4).filter(lambda q: max(map(abs, q)) > 1e-3))
def test_both_signs_of_a_quaternion_are_one_orientation(quaternion):
    opposite = [-value for value in quaternion]
    a, b = (conversions.pose_values(pose(quaternion=q), UP) for q in (quaternion, opposite))
    assert a == b


@pytest.mark.parametrize(
    "bad",
    [
        pose(position=(0, float("nan"), 0)),
        pose(position=(0, 0, 1e300)),
        pose(quaternion=(0, 0, 0, float("nan"))),
        pose(quaternion=(0, 0, 0, 0)),
    ],
)
def test_a_pose_that_is_none_is_refused(bad):
    with pytest.raises(UserError, match="pose position|quaternion"):
        conversions.pose_values(bad, UP)


def chunk():
    data = np.random.default_rng(1).normal(size=(8, 7)).astype(np.float32)
    return ActionChunk(data, LIBERO_ACTION_SPEC, 1_400_000_000)


def test_a_chunk_goes_out_and_comes_back_the_same():
    msg = conversions.chunk_to_msg(chunk(), epoch=5, sequence=2, published_ns=1_450_000_000)
    assert (msg.epoch, msg.sequence, msg.horizon, msg.control_mode) == (5, 2, 8, msg.CARTESIAN_DELTA)
    assert conversions.to_ns(msg.published_at) == 1_450_000_000
    assert list(msg.units) == ["m", "m", "m", "rad", "rad", "rad", "1"]
    back = conversions.msg_to_chunk(msg, LIBERO_ACTION_SPEC.scale)
    assert (back.spec, back.stamp_ns) == (LIBERO_ACTION_SPEC, 1_400_000_000)
    np.testing.assert_array_equal(back.data, chunk().data)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("control_mode", 9, "control_mode 9 is unknown; it is one of: 1 CARTESIAN_DELTA"),
        ("horizon", 7, "chunk has 56 values; horizon 7 x 7 names need 49"),
        ("horizon", 0, "horizon 0 must be at least 1"),
        ("names", ["x"], "1 names"),
        ("data", array.array("f", [float("nan")] * 56), "NaN or infinite"),
        ("data", array.array("f"), "chunk has 0 values"),
    ],
)
def test_a_chunk_that_cannot_be_executed_is_refused(field, value, text):
    msg = conversions.chunk_to_msg(chunk(), 1, 0, 0)
    setattr(msg, field, value)
    with pytest.raises(UserError) as refused:
        conversions.msg_to_chunk(msg, LIBERO_ACTION_SPEC.scale)
    assert text in str(refused.value)


@given(st.integers(0, 2**31 * 10**9 - 1))
def test_a_stamp_keeps_its_nanoseconds(ns):
    assert conversions.to_ns(conversions.to_time(ns)) == ns
