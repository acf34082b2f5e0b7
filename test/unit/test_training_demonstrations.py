"""Demonstrations: what is written as a bag is what training reads, and what is no demonstration is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from aura_ros.backbones.openvla_oft.config import COMPACT
from aura_ros.backbones.openvla_oft.processing import (
    encode_jpeg,
    jpeg_round_trip,
    prepare_image,
    resize_lanczos3,
)
from aura_ros.errors import UserError
from aura_ros.report.bag import BagTopic, BagWriter, qos
from aura_ros.report.definitions import typestore
from aura_ros.report.reading import read_bag
from aura_ros.sim.libero import JOINT_NAMES, SimObservation, proprio
from aura_ros.training.demo_bags import FINGERS, Recording, index_bag, write_recording
from aura_ros.training.demo_data import load_data
from aura_ros.training.demonstrations import (
    LINES,
    DemoFolder,
    Samples,
    check_alike,
    load_samples,
    save_samples,
)
from aura_ros.types import LIBERO_ACTION_SPEC

PERIOD = 50_000_000
CAMERAS = ("agentview", "wrist")
RNG = np.random.default_rng(5)
FRAMES = RNG.integers(0, 255, (4, 2, 32, 32, 3), np.uint8)


def recorded(steps=14, frames=(0, 2, 4, 6), gaps=(), plans=(), names=JOINT_NAMES):
    """An episode of made-up numbers, a row of actions at every step but the gaps, a plan at some."""
    episode = Recording("pick up the soup", names, images={camera: {} for camera in CAMERAS})
    for index, step in enumerate(frames):
        for place, camera in enumerate(CAMERAS):
            episode.images[camera][step * PERIOD] = encode_jpeg(FRAMES[index, place])
        joints = np.linspace(-1, 1, 9) + step
        episode.robot[step * PERIOD] = (
            joints,
            np.array([0.1, 0.2, 0.3]) + step,
            np.array([0.99, 0.02, -0.1, 0.05]),
        )
        episode.keypoints[step * PERIOD] = np.full((2, 3), step, float)
    for step in range(steps):
        if step not in gaps:
            episode.actions.append((step * PERIOD, row(step)))
    for step in plans:
        episode.actions.append((step * PERIOD, np.stack([row(100 + step + k) for k in range(8)])))
    return episode


def row(step):
    return (np.array([0.01, 0.02, -0.03, 0.004, 0.005, 0.006, 0.0]) * step % 1.0).astype(np.float32)


@pytest.fixture
def indexed(tmp_path):
    """Write an episode and read it back."""

    def run(**changes):
        write_recording(tmp_path / "bag", recorded(**changes))
        return index_bag(tmp_path / "bag", COMPACT.image, CAMERAS)

    return run


def test_what_is_written_is_what_is_read(indexed):
    samples = indexed()
    assert samples.step.tolist() == [0, 2, 4, 6]
    assert samples.images.shape == (4, 2, COMPACT.image.size, COMPACT.image.size, 3)
    np.testing.assert_allclose(samples.actions[1], np.stack([row(2 + k) for k in range(8)]), atol=1e-6)
    np.testing.assert_array_equal(samples.keypoints[2], np.full((2, 3), 4.0))
    joints, position, quaternion = recorded().robot[4 * PERIOD]
    seen = SimObservation({}, JOINT_NAMES, joints, joints, position, quaternion, joints[-2:], 0.2, 4)
    np.testing.assert_array_equal(samples.proprio[2], proprio(seen))


def test_keypoints_keep_their_names_through_bag_and_index(tmp_path):
    episode = recorded()
    episode.keypoint_names = ("target", "place", "soup_1")
    for step in (0, 2, 4, 6):
        episode.keypoints[step * PERIOD] = np.arange(9.0).reshape(3, 3) + step
    write_recording(tmp_path / "bag", episode)
    found = index_bag(tmp_path / "bag", COMPACT.image, CAMERAS)
    assert found.keypoint_names == ("target", "place", "soup_1")
    np.testing.assert_array_equal(found.keypoints[1], np.arange(9.0).reshape(3, 3) + 2)
    save_samples(tmp_path / "a.npz", found)
    assert load_samples(tmp_path / "a.npz").keypoint_names == found.keypoint_names
    wrong = dataclasses.replace(found, keypoint_names=("target", "place"))
    save_samples(tmp_path / "a.npz", wrong)
    with pytest.raises(UserError, match="do not fit together"):
        load_samples(tmp_path / "a.npz")


def test_episodes_with_different_keypoints_are_trained_on_together(tmp_path):
    folder = DemoFolder(tmp_path)
    folder.prepare({**HEAD, "action_names": list(LIBERO_ACTION_SPEC.names)})
    one = dataclasses.replace(
        samples(), keypoints=np.ones((3, 3, 3), np.float32), keypoint_names=("target", "place", "soup_1")
    )
    other = dataclasses.replace(samples(2), keypoints=np.full((2, 2, 3), 2.0, np.float32))
    lines = []
    for name, part in (("a", one), ("b", other)):
        save_samples(folder.index / f"{name}.npz", part)
        lines.append(json.dumps({"id": name, "instruction": "x", "frames": len(part)}))
    (tmp_path / LINES).write_text("\n".join(lines) + "\n")
    data = load_data([folder], 2.0)
    found = data.samples
    assert data.episodes == 2
    np.testing.assert_array_equal(found.images, np.concatenate([one.images, other.images]))
    assert found.keypoint_names == ("target", "place", "soup_1")
    assert (found.keypoints[:3] == 1.0).all()
    assert (found.keypoints[3:, :2] == 2.0).all()
    assert np.isnan(found.keypoints[3:, 2]).all()


def test_a_topic_of_another_type_or_two_of_one_name_are_refused(tmp_path):
    store = typestore()
    said = {"/left": "up", "/right": "up"}
    writer = BagWriter(
        tmp_path / "bag", [BagTopic(f"{t}/ee_pose", "std_msgs/msg/String", qos()) for t in said]
    )
    for topic, text in said.items():
        message = store.types["std_msgs/msg/String"](data=text)
        writer.write(f"{topic}/ee_pose", 0, bytes(store.serialize_cdr(message, "std_msgs/msg/String")))
    writer.close()
    with pytest.raises(
        UserError, match="has std_msgs/msg/String on '/left/ee_pose'; needed is geometry_msgs/msg/PoseSt"
    ):
        index_bag(tmp_path / "bag", COMPACT.image, CAMERAS)
    kind = "sensor_msgs/msg/JointState"
    writer = BagWriter(tmp_path / "two", [BagTopic(f"{t}/joint_states", kind, qos()) for t in said])
    bag = tmp_path / "one"
    write_recording(bag, recorded())
    states = [m for m in read_bag(bag) if m.topic == "/joint_states"]
    for topic in said:
        writer.write(f"{topic}/joint_states", 0, bytes(store.serialize_cdr(states[0].message, kind)))
    writer.close()
    with pytest.raises(UserError, match="has both '/left/joint_states' and '/right/joint_states'"):
        index_bag(tmp_path / "two", COMPACT.image, CAMERAS)


def test_an_index_has_the_pixels_that_inference_sees_before_its_crop(indexed):
    samples = indexed()
    size = COMPACT.image.size
    np.testing.assert_array_equal(
        samples.images[1, 0], resize_lanczos3(jpeg_round_trip(FRAMES[1, 0]), size, size)
    )
    from aura_ros.backbones.openvla_oft.processing import centre_crop, normalise_pixels

    np.testing.assert_allclose(
        normalise_pixels(centre_crop(samples.images[1, 0], COMPACT.image.crop_area)),
        prepare_image(FRAMES[1, 0], COMPACT.image),
        atol=1e-6,
    )


def test_frames_before_an_action_that_was_not_recorded_are_left_out(indexed):
    assert indexed(gaps=(9,)).step.tolist() == [0]


def test_a_plan_counts_before_single_rows_and_fills_a_gap(indexed):
    samples = indexed(gaps=(9,), plans=(4,))
    assert samples.step.tolist() == [0, 4]
    np.testing.assert_allclose(samples.actions[1], np.stack([row(104 + k) for k in range(8)]), atol=1e-6)


def test_streams_of_another_rate_and_namespace_are_joined_within_half_a_period(tmp_path):
    episode = recorded()
    late = {stamp + 9_000_000: data for stamp, data in episode.images["wrist"].items()}
    episode.images["wrist"] = late
    write_recording(tmp_path / "bag", episode)
    assert index_bag(tmp_path / "bag", COMPACT.image, CAMERAS).step.tolist() == [0, 2, 4, 6]
    episode.images["wrist"] = {stamp + 26_000_000: data for stamp, data in late.items()}
    write_recording(tmp_path / "far", episode)
    assert len(index_bag(tmp_path / "far", COMPACT.image, CAMERAS)) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"names": [f"joint_{i}" for i in range(9)]},
            f"'{FINGERS[0]}' is missing: name this robot's fingers",
        ),
        ({"gaps": range(14)}, "has no messages on 'action'"),
        ({"frames": ()}, "has no messages on 'joint_states'"),
    ],
)
def test_another_robots_or_half_a_bag_is_refused_in_one_line(indexed, change, said):
    with pytest.raises(UserError, match=said):
        indexed(**change)


def test_actions_that_are_not_finite_or_of_another_space_are_refused(tmp_path):
    episode = recorded()
    episode.actions[3] = (episode.actions[3][0], np.full(7, np.nan, np.float32))
    write_recording(tmp_path / "nan", episode)
    with pytest.raises(UserError, match="action that is not finite, at 150000000 ns"):
        index_bag(tmp_path / "nan", COMPACT.image, CAMERAS)


def test_an_image_that_was_cut_off_is_refused(tmp_path):
    episode = recorded()
    episode.images["wrist"][0] = episode.images["wrist"][0][:200]
    write_recording(tmp_path / "cut", episode)
    with pytest.raises(UserError, match="no whole JPEG"):
        index_bag(tmp_path / "cut", COMPACT.image, CAMERAS)


def test_a_bag_of_something_else_says_what_it_has(tmp_path):
    topic = BagTopic("/chatter", "std_msgs/msg/String", qos())
    writer = BagWriter(tmp_path / "bag", [topic])
    store = typestore()
    text = store.types["std_msgs/msg/String"](data="hello")
    writer.write("/chatter", 1, bytes(store.serialize_cdr(text, "std_msgs/msg/String")))
    writer.close()
    with pytest.raises(UserError, match=r"'joint_states' \(it has /chatter\)"):
        index_bag(tmp_path / "bag", COMPACT.image, CAMERAS)


def samples(count=3):
    return Samples(
        RNG.integers(0, 255, (count, 2, 8, 8, 3), np.uint8),
        RNG.random((count, 8), np.float32),
        RNG.random((count, 8, 7), np.float32),
        np.full((count, 2, 3), np.nan, np.float32),
        np.arange(count),
    )


def test_an_index_that_is_cut_off_or_holds_objects_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    save_samples(path, samples())
    assert len(load_samples(path)) == 3
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(UserError, match="delete it and index its bag again"):
        load_samples(path)
    np.savez(path, **{name: np.array([{}]) for name in ("images", "proprio", "actions", "keypoints", "step")})
    with pytest.raises(UserError, match="Object arrays cannot be loaded"):
        load_samples(path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]


HEAD = {
    "format": 1,
    "cameras": ["a"],
    "horizon": 8,
    "image_size": 112,
    "action_names": ["x"],
    "period_s": 0.05,
}


def test_folders_that_are_empty_broken_or_not_alike_are_refused(tmp_path):
    first, other = DemoFolder(tmp_path / "a"), DemoFolder(tmp_path / "b")
    with pytest.raises(UserError, match="is no folder of demonstrations"):
        first.head()
    first.prepare(HEAD)
    first.prepare(HEAD)
    with pytest.raises(UserError, match="holds no demonstration"):
        first.episodes()
    with pytest.raises(UserError, match="has horizon 8, not 4; give another folder"):
        first.prepare({**HEAD, "horizon": 4})
    other.prepare({**HEAD, "cameras": ["a", "b"]})
    with pytest.raises(UserError, match=r"b' has cameras \['a', 'b'\], '.*a' \['a'\]"):
        check_alike([first, other])
    (tmp_path / "a" / "demos.json").write_text('{"format": 99}')
    with pytest.raises(UserError, match="not of format 1"):
        first.head()


def test_a_line_that_a_kill_cut_off_is_passed_over_and_one_in_the_middle_is_named(tmp_path):
    folder = DemoFolder(tmp_path)
    folder.prepare(HEAD)
    good, failed = json.dumps({"id": "a", "frames": 3}), json.dumps({"id": "b", "frames": 0})
    (tmp_path / "episodes.jsonl").write_text(f'{good}\n{failed}\n{{"id": "c", "fra')
    assert [e["id"] for e in folder.episodes()] == ["a"]
    (tmp_path / "episodes.jsonl").write_text(f"{good}\nbroken\n{good}\n")
    with pytest.raises(UserError, match="line 2 is broken"):
        folder.episodes()
