"""Broken observations are rejected, counted and named; the node answers the next good one."""

import array

import cv2
import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("aura_ros.msg", reason="the messages are not built")

from aura_ros.msg import PolicyStatus
from policy_driver import REALTIME, SIZE, START_NS, header_of, loop, picture, rejected, stamp_of
from sensor_msgs.msg import CompressedImage

from aura_ros.nodes import conversions


def set_encoding(image):
    image.encoding = "yuv422_yuy2"


def raspicam(image):
    # A sensor that pads to 416 x 320 and says 410 x 308.
    image.width, image.height, image.step, image.encoding = 410, 308, 1230, "bgr8"
    image.data = array.array("B", bytes(399_360))


def step_zero(image):
    image.step = 0


def truncated(image):
    image.data = image.data[: len(image.data) // 2]


def no_pixels(image):
    image.width = image.height = image.step = 0
    image.data = array.array("B")


def size_of_another_image(image):
    image.width *= 2


IMAGES = {
    set_encoding: "image encoding 'yuv422_yuy2' is not supported",
    raspicam: "image has # bytes",
    step_zero: "image step is #",
    truncated: "image has # bytes",
    no_pixels: "image is #",
    size_of_another_image: "image step is #",
}


def nan_position(pose, joints):
    pose.pose.position.y = float("nan")
    return "ee_pose: pose position"


def infinite_quaternion(pose, joints):
    pose.pose.orientation.w = float("inf")
    return "ee_pose: quaternion"


def zero_quaternion(pose, joints):
    pose.pose.orientation.x = pose.pose.orientation.w = 0.0
    return "ee_pose: quaternion"


def nan_joint(pose, joints):
    joints.position[1] = float("nan")
    return "joint_states: joint 'panda_finger_joint2' has position #"


def missing_joint(pose, joints):
    joints.name[0] = "elbow"
    return "joint_states: joint 'panda_finger_joint1' is not in the message"


def joint_without_position(pose, joints):
    joints.position = joints.position[:1]
    return "joint_states: joint 'panda_finger_joint2' has no position"


def position_beyond_float32(pose, joints):
    joints.position[0] = 1e300
    return "joint_states: joint 'panda_finger_joint1' has position #"


PROPRIOCEPTION = (
    nan_position,
    infinite_quaternion,
    zero_quaternion,
    nan_joint,
    missing_joint,
    joint_without_position,
    position_beyond_float32,
)


def test_bad_images_are_rejected_counted_and_named_and_the_next_good_one_is_answered(ros):
    running = loop(ros)
    driver = running.driver
    for spoil, reason in IMAGES.items():
        image = driver.messages(stamp_of(0))["images/wrist"]
        spoil(image)
        before = rejected(driver.statuses[-1]).get(f"images/wrist: {reason}", 0) if driver.statuses else 0
        driver.send(stamp_of(0), images__wrist=image)
        status = driver.wait_for_status(
            lambda s, text=f"images/wrist: {reason}", n=before: (
                s.state == PolicyStatus.HOLDING
                and sum(count for name, count in rejected(s).items() if name.startswith(text)) > n
            ),
            f"a rejection '{reason}'",
        )
        assert status.reason.startswith("images/wrist: image"), spoil.__name__
    # It holds on with the reason while nothing better comes.
    driver.wait_for_state(PolicyStatus.HOLDING, "images/wrist: image step is")
    assert not driver.chunks
    assert running.worker.policy.memory.steps == 0
    assert driver.query(0).sequence == 0
    status = driver.wait_for_status(lambda s: s.queries == 1 and s.state == PolicyStatus.WAITING)
    assert status.reason.startswith("waiting for")
    assert sum(rejected(status).values()) == len(IMAGES)
    running.ros.spin_until(lambda: bool(driver.diagnostics))
    driver.diagnostics.clear()
    running.ros.spin_until(lambda: bool(driver.diagnostics))
    values = {value.key: value.value for value in driver.diagnostics[-1].status[0].values}
    assert values["rejected images/wrist: image encoding 'yuv422_yuy2' is not supported"] == "1"


def test_bad_proprioception_is_rejected_naming_what_is_wrong(ros):
    running = loop(ros)
    driver = running.driver
    for spoil in PROPRIOCEPTION:
        messages = driver.messages(stamp_of(0))
        reason = spoil(messages["ee_pose"], messages["joint_states"])
        before = running.worker.rejections.items()
        driver.send(stamp_of(0), ee_pose=messages["ee_pose"], joint_states=messages["joint_states"])
        running.ros.spin_until(lambda b=before: running.worker.rejections.items() != b, what="a rejection")
        assert dict(running.worker.rejections.items()).keys() - dict(before).keys() <= {
            name for name, _ in running.worker.rejections.items() if name.startswith(reason)
        }
        driver.wait_for_rejection(reason)
    assert not driver.chunks
    assert running.worker.policy.memory.steps == 0
    assert driver.query(0).sequence == 0


def test_a_good_frame_after_a_bad_one_is_answered_in_real_time(ros):
    running = loop(ros, **REALTIME, image_max_age=20.0, proprio_max_age=20.0, memory_step_period=1)
    driver = running.driver
    driver.clock(START_NS)
    bad = driver.messages(START_NS)["images/agentview"]
    truncated(bad)
    driver.send(START_NS, images__agentview=bad)
    driver.wait_for_state(PolicyStatus.HOLDING, "images/agentview: image has")
    seen = len(driver.statuses)
    ros.spin_for(0.7)  # between two attempts it does not pretend to run
    assert {status.state for status in driver.statuses[seen:]} == {PolicyStatus.HOLDING}
    driver.send(START_NS + 1000)
    driver.wait_for_state(PolicyStatus.RUNNING)
    ros.spin_until(lambda: bool(driver.chunks), what="the chunk")
    assert header_of(driver.chunks[0]) == START_NS + 1000


@pytest.mark.parametrize("encoding", ["bgr8", "rgba8", "bgra8", "padded"])
def test_every_encoding_of_one_picture_gives_the_same_chunk(ros, encoding):
    running = loop(ros)
    driver = running.driver
    pixels = {f"images/{camera}": picture(10 + i) for i, camera in enumerate(("agentview", "wrist"))}

    def images(encode):
        return {name.replace("/", "__"): encode(p) for name, p in pixels.items()}

    def encode(image):
        if encoding == "padded":
            wide = conversions.rgb_to_image(
                cv2.copyMakeBorder(image, 0, 0, 0, 9, 0, value=255), stamp_of(0), ""
            )
            wide.width = SIZE
            return wide
        code = (
            getattr(cv2, f"COLOR_RGB2{encoding[:-1].upper()}") if encoding != "rgba8" else cv2.COLOR_RGB2RGBA
        )
        converted = cv2.cvtColor(image, code)
        msg = conversions.rgb_to_image(converted[:, :, :3], stamp_of(0), "")
        msg.encoding, msg.step = encoding, SIZE * converted.shape[2]
        msg.data = array.array("B", converted.tobytes())
        return msg

    plain = driver.query(0, **images(lambda p: conversions.rgb_to_image(p, stamp_of(0), "")))
    assert driver.call("reset").success
    again = driver.query(0, **images(encode))
    assert again.epoch > plain.epoch
    assert again.data == plain.data


def compressed(pixels, format_string, extension, stamp_ns):
    ok, data = cv2.imencode(extension, cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR))
    assert ok
    msg = CompressedImage(format=format_string, data=array.array("B", data.tobytes()))
    msg.header.stamp = conversions.to_time(stamp_ns)
    return msg


def test_compressed_images_are_read_by_their_bytes_and_broken_ones_rejected(ros):
    running = loop(ros, image_transport="compressed")
    driver = running.driver

    def images(format_string, extension, index):
        return {
            f"images__{camera}": compressed(picture(i), format_string, extension, stamp_of(index))
            for i, camera in enumerate(("agentview", "wrist"))
        }

    chunks = {}
    for format_string, extension in (
        ("jpeg", ".png"),
        ("rgb8; png compressed bgr8", ".png"),
        ("jpg", ".jpg"),
        ("", ".jpg"),
    ):
        assert driver.call("reset").success
        chunks[format_string] = driver.query(0, **images(format_string, extension, 0))
    assert chunks["jpeg"].data == chunks["rgb8; png compressed bgr8"].data
    assert chunks["jpg"].data == chunks[""].data
    broken = images("jpeg", ".jpg", 1)
    data = broken["images__wrist"].data
    for cut in (data[: len(data) // 2], data[:-2], data[:0], array.array("B", b"not an image")):
        broken["images__wrist"].data = cut
        driver.send(stamp_of(1), **broken)
        status = driver.wait_for_state(PolicyStatus.HOLDING, f"image of {len(cut)} bytes")
        assert "images/wrist: compressed image of" in status.reason
    name = "images/wrist: compressed image of # bytes (format 'jpeg') cannot be decoded"
    assert rejected(driver.wait_for_rejection("wrist"))[name] == 4
    assert driver.query(1, **images("jpeg", ".jpg", 1)).sequence == 1


def test_velocity_and_effort_that_are_not_numbers_do_no_harm(ros):
    running = loop(ros)
    driver = running.driver
    plain = driver.query(0)
    assert driver.call("reset").success
    joints = driver.messages(stamp_of(0))["joint_states"]
    joints.velocity = joints.effort = [float("nan")] * 2
    assert driver.query(0, joint_states=joints).data == plain.data


def test_joints_are_mapped_by_name_whatever_their_order(ros):
    running = loop(ros, proprio__sources=["pose:ee_pose", "joints:joint_states:j3,j6"])
    driver = running.driver
    answers = []
    for order in ("j1 j2 j3 j4 j5 j6", "j1 j2 j4 j5 j3 j6"):
        joints = driver.messages(stamp_of(0))["joint_states"]
        joints.name = order.split()
        joints.position = [0.1 * int(name[1]) for name in joints.name]
        assert driver.call("reset").success
        answers.append(driver.query(0, joint_states=joints).data)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("quaternion", [(0.0, 0.0, 0.0, 1.0), (0.9, 0.1, 0.2, 0.3)])
def test_both_signs_of_a_quaternion_give_the_same_chunk(ros, quaternion):
    running = loop(ros, proprio__orientation_reference=[1.0, 0.0, 0.0, 0.0])
    driver = running.driver
    answers = []
    for sign in (1, -1):
        pose = driver.messages(stamp_of(0))["ee_pose"]
        q = pose.pose.orientation
        q.x, q.y, q.z, q.w = (sign * value for value in quaternion)
        assert driver.call("reset").success
        answers.append(driver.query(0, ee_pose=pose).data)
    assert answers[0] == answers[1]
