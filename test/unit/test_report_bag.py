"""Bags: what is on disk, who can read it, and what survives a crash or a full disk."""

import json
import os
import resource
import struct
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import yaml
from rosbags.highlevel import AnyReader

from aura_ros.errors import UserError
from aura_ros.report.bag import BagTopic, BagWriter, qos, repair_bag
from aura_ros.report.definitions import message_directory, typestore
from aura_ros.report.reading import read_bag, summarize_bag

GATE = BagTopic("/policy_node/gate", "aura_ros/msg/GateEvent", qos())
EPISODE = BagTopic("/episode", "aura_ros/msg/EpisodeStatus", qos(depth=1, latched=True))
RATE = BagTopic("/policy_node/write_rate", "std_msgs/msg/Float64", qos())
TOPICS = (GATE, EPISODE, RATE)
START_NS = 1_700_000_000_000_000_000


def header(index: int):
    types = typestore().types
    stamp = types["builtin_interfaces/msg/Time"](sec=index, nanosec=5)
    return types["std_msgs/msg/Header"](stamp=stamp, frame_id="base")


def gate_event(index: int) -> bytes:
    message = typestore().types["aura_ros/msg/GateEvent"](
        header=header(index), epoch=2**63 + 1, step=index + 1, sequence=index, fired=index % 4 == 0,
        probability=0.25, threshold=0.5, surprise=3.0, surprise_normalized=-1.5, writes=index // 4 + 1,
        steps=index + 1, write_rate=0.25, writes_per_second=0.625, bytes_written=4096 * (index % 4 == 0),
        state_bytes=4224, state_norm=1.0,
    )  # fmt: skip
    return bytes(typestore().serialize_cdr(message, "aura_ros/msg/GateEvent"))


def episode_finished() -> bytes:
    message = typestore().types["aura_ros/msg/EpisodeStatus"](
        header=header(9), episode=0, phase=2, suite="libero_10", task=3, task_name="moka_pots",
        instruction="put both moka pots on the stove", init_state=1, seed=7, max_steps=520, steps=520,
        queries=65, success=False, reason="max_steps",
    )  # fmt: skip
    return bytes(typestore().serialize_cdr(message, "aura_ros/msg/EpisodeStatus"))


def record(path: Path, events: int) -> None:
    writer = BagWriter(path, TOPICS)
    for index in range(events):
        writer.write(GATE.name, START_NS + index, gate_event(index))
    writer.write(EPISODE.name, START_NS + events, episode_finished())
    writer.close()


def steps(path: Path) -> list[int]:
    return [int(m.message.step) for m in read_bag(path, [GATE.name])]


def test_bag_reads_back_by_its_own_schemas_in_order(tmp_path: Path):
    record(tmp_path / "bag", 10)
    messages = list(read_bag(tmp_path / "bag"))
    assert [m.topic for m in messages] == [GATE.name] * 10 + [EPISODE.name]
    assert [m.timestamp_ns for m in messages] == [START_NS + i for i in range(11)]
    first = messages[0].message
    assert (first.epoch, first.fired, first.state_bytes) == (2**63 + 1, True, 4224)
    assert (first.header.stamp.nanosec, first.header.frame_id) == (5, "base")
    assert not (tmp_path / "bag.incomplete").exists()


def test_bag_reads_by_the_mcap_library_with_the_header(tmp_path: Path):
    mcap_ros2 = pytest.importorskip("mcap_ros2.reader", reason="needs the [test] extra")
    record(tmp_path / "bag", 10)
    messages = list(mcap_ros2.read_ros2_messages(str(tmp_path / "bag" / "bag_0.mcap"), topics=[GATE.name]))
    assert [m.ros_msg.header.stamp.sec for m in messages] == list(range(10))
    assert messages[4].ros_msg.bytes_written == 4096
    assert messages[4].ros_msg.probability == 0.25
    assert messages[0].channel.topic == GATE.name


def test_metadata_is_what_rosbag2_of_jazzy_and_later_expects(tmp_path: Path):
    record(tmp_path / "bag", 3)
    info = yaml.safe_load((tmp_path / "bag" / "metadata.yaml").read_text())["rosbag2_bagfile_information"]
    assert info["version"] == 9
    assert info["storage_identifier"] == "mcap"
    assert info["relative_file_paths"] == ["bag_0.mcap"] == [f["path"] for f in info["files"]]
    assert sorted(p.name for p in (tmp_path / "bag").iterdir()) == ["bag_0.mcap", "metadata.yaml"]
    assert info["message_count"] == 4
    assert info["starting_time"] == {"nanoseconds_since_epoch": START_NS}
    assert info["duration"] == {"nanoseconds": 3}
    topics = {t["topic_metadata"]["name"]: t for t in info["topics_with_message_count"]}
    assert {name: t["message_count"] for name, t in topics.items()} == {
        GATE.name: 3,
        EPISODE.name: 1,
        RATE.name: 0,
    }
    latched = topics[EPISODE.name]["topic_metadata"]
    assert latched["type"] == "aura_ros/msg/EpisodeStatus"
    assert latched["serialization_format"] == "cdr"
    assert latched["type_description_hash"].startswith("RIHS01_")
    (offered,) = latched["offered_qos_profiles"]
    assert (offered["durability"], offered["reliability"], offered["history"], offered["depth"]) == (
        "transient_local",
        "reliable",
        "keep_last",
        1,
    )


def test_bag_without_messages_is_valid_for_both_readers(tmp_path: Path):
    BagWriter(tmp_path / "bag", TOPICS).close()
    assert list(read_bag(tmp_path / "bag")) == []
    with AnyReader([tmp_path / "bag"]) as reader:
        assert {c.topic for c in reader.connections} == {t.name for t in TOPICS}
    summary = summarize_bag(tmp_path / "bag")
    assert (summary.total, summary.duration_s, summary.gate.write_rate) == (0, 0.0, 0.0)
    mcap = pytest.importorskip("mcap.reader", reason="needs the [test] extra")
    with (tmp_path / "bag" / "bag_0.mcap").open("rb") as file:
        found = mcap.make_reader(file).get_summary()
    assert found.statistics.message_count == 0
    assert found.statistics.message_start_time == 0
    assert {c.topic for c in found.channels.values()} == {t.name for t in TOPICS}


def test_summary_counts_come_from_messages_not_from_metadata(tmp_path: Path):
    record(tmp_path / "bag", 10)
    metadata = tmp_path / "bag" / "metadata.yaml"
    metadata.write_text(metadata.read_text().replace("message_count: 10", "message_count: 99"))
    summary = summarize_bag(tmp_path / "bag")
    assert summary.messages == {GATE.name: 10, EPISODE.name: 1, RATE.name: 0}
    assert summary.types[GATE.name] == "aura_ros/msg/GateEvent"
    assert (summary.gate.steps, summary.gate.fired, summary.gate.writes) == (10, 3, 3)
    assert summary.gate.write_rate == pytest.approx(0.3)
    assert summary.gate.bytes_written == 3 * 4096
    assert (summary.gate.state_bytes, summary.gate.epochs) == ((4224,), 1)
    (episode,) = summary.episodes
    assert (episode.suite, episode.task, episode.success, episode.steps) == ("libero_10", 3, False, 520)
    assert summary.duration_s == pytest.approx(1e-8)


def test_large_recordings_span_chunks_and_keep_every_message(tmp_path: Path):
    image = BagTopic("/images/wrist", "sensor_msgs/msg/Image", qos(depth=30, reliable=False))
    pixels = np.arange(256 * 256 * 3, dtype=np.uint8)
    message = typestore().types[image.type](
        header=header(0), height=256, width=256, encoding="rgb8", is_bigendian=0, step=768, data=pixels
    )
    data = bytes(typestore().serialize_cdr(message, image.type))
    writer = BagWriter(tmp_path / "bag", [image])
    for index in range(20):
        writer.write(image.name, START_NS + index, data)
    # The chunks are on disk before the end: memory holds at most the one being filled.
    assert (tmp_path / "bag.incomplete" / "bag_0.mcap").stat().st_size > 2 * 2**20
    writer.close()
    frames = [m.message for m in read_bag(tmp_path / "bag")]
    assert len(frames) == 20
    assert np.array_equal(frames[-1].data, pixels)


def test_existing_empty_directory_is_used(tmp_path: Path):
    (tmp_path / "bag").mkdir()
    record(tmp_path / "bag", 2)
    assert steps(tmp_path / "bag") == [1, 2]


def test_nonempty_directory_is_refused_before_anything_is_written(tmp_path: Path):
    (tmp_path / "bag").mkdir()
    (tmp_path / "bag" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match=r"bag exists and is not empty; give another"):
        BagWriter(tmp_path / "bag", TOPICS)
    assert [p.name for p in tmp_path.rglob("*")] == ["bag", "mine.txt"]


@pytest.mark.parametrize("parent", ["file", "/proc/nowhere"])
def test_directory_that_cannot_be_made_is_one_line(tmp_path: Path, parent: str):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be made \(.+\); give a writable one") as caught:
        BagWriter(tmp_path / parent / "bag", TOPICS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["", "/"])
def test_path_without_a_name_is_refused(path: str):
    with pytest.raises(UserError, match="give a directory that does not exist yet"):
        BagWriter(path, TOPICS)


def test_interrupted_recording_beside_the_target_is_not_overwritten(tmp_path: Path):
    killed_recording(tmp_path / "bag", flushed=3, cut=0)
    with pytest.raises(UserError, match="holds an interrupted recording"):
        BagWriter(tmp_path / "bag", TOPICS)
    with pytest.raises(UserError, match="interrupted; make it whole"):
        list(read_bag(tmp_path / "bag"))


def killed_recording(path: Path, *, flushed: int, cut: int) -> Path:
    """What a killed process leaves: `flushed` events in two chunks, one never flushed, `cut` bytes missing."""
    writer = BagWriter(path, TOPICS)
    for index in range(flushed):
        writer.write(GATE.name, START_NS + index, gate_event(index))
        if index in (flushed // 2, flushed - 1):
            writer.flush()
    writer.write(GATE.name, START_NS + flushed, gate_event(flushed))
    file = path.with_name(path.name + ".incomplete") / f"{path.name}_0.mcap"
    os.truncate(file, file.stat().st_size - cut)
    return file


def test_flushed_messages_survive_a_kill(tmp_path: Path):
    killed_recording(tmp_path / "bag", flushed=8, cut=0)
    assert repair_bag(tmp_path / "bag.incomplete") == tmp_path / "bag"
    assert steps(tmp_path / "bag") == list(range(1, 9))
    assert [p.name for p in tmp_path.iterdir()] == ["bag"]
    info = yaml.safe_load((tmp_path / "bag" / "metadata.yaml").read_text())["rosbag2_bagfile_information"]
    offered = info["topics_with_message_count"][1]["topic_metadata"]["offered_qos_profiles"]
    assert offered[0]["durability"] == "transient_local"


def test_repair_drops_a_chunk_cut_in_the_middle_and_keeps_those_before(tmp_path: Path):
    # The last chunk's message index is 15 + 3 * 16 bytes; 100 more bytes are its messages.
    killed_recording(tmp_path / "bag", flushed=8, cut=100)
    repair_bag(tmp_path / "bag")
    assert steps(tmp_path / "bag") == [1, 2, 3, 4, 5]


def test_repair_keeps_messages_recorded_across_a_clock_step_backwards(tmp_path: Path):
    writer = BagWriter(tmp_path / "bag", TOPICS)
    for index, offset in enumerate((10, 5, 20)):
        writer.write(GATE.name, START_NS + offset, gate_event(index))
    writer.flush()
    repair_bag(tmp_path / "bag")
    assert steps(tmp_path / "bag") == [2, 1, 3]


def test_repair_of_a_recording_without_a_flush_gives_an_empty_bag(tmp_path: Path):
    BagWriter(tmp_path / "bag", TOPICS)
    repair_bag(tmp_path / "bag")
    assert list(read_bag(tmp_path / "bag")) == []


def test_repair_refuses_what_is_no_interrupted_recording(tmp_path: Path):
    with pytest.raises(UserError, match=r"holds 0 \.mcap files"):
        repair_bag(tmp_path / "bag")
    (tmp_path / "bag.incomplete").mkdir()
    (tmp_path / "bag.incomplete" / "bag_0.mcap").write_bytes(b"")
    with pytest.raises(UserError, match="not an MCAP file"):
        repair_bag(tmp_path / "bag")


@contextmanager
def file_size_limit(size: int):
    """Let files grow to a given size only: the kernel's answer is an OSError, as on a full disk.

    Ends before the test does: pytest's own output may go to a file too.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill(writer: BagWriter) -> str:
    with pytest.raises(UserError, match=r"recording to .* stopped") as caught:  # noqa: PT012
        for index in range(100_000):
            writer.write(GATE.name, START_NS + index, gate_event(index))
            if index % 100 == 99:
                writer.flush()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_full_disk_is_one_error_and_the_bag_until_then_is_whole(tmp_path: Path):
    writer = BagWriter(tmp_path / "bag", TOPICS)
    with file_size_limit(200_000):
        message = fill(writer)
    kept = steps(tmp_path / "bag")
    assert f"the {len(kept)} messages until then are in {tmp_path / 'bag'}" in message
    assert len(kept) >= 900
    assert len(kept) % 100 == 0
    assert kept == list(range(1, len(kept) + 1))
    assert list(summarize_bag(tmp_path / "bag").messages.values()) == [len(kept), 0, 0]
    writer.close()


def test_full_disk_without_room_for_the_index_leaves_a_repairable_recording(tmp_path: Path):
    writer = BagWriter(tmp_path / "bag", TOPICS)
    for index in range(100):
        writer.write(GATE.name, START_NS + index, gate_event(index))
    writer.flush()
    with file_size_limit((tmp_path / "bag.incomplete" / "bag_0.mcap").stat().st_size + 50):
        assert "repair_bag" in fill(writer)
    assert not (tmp_path / "bag").exists()
    repair_bag(tmp_path / "bag")
    assert steps(tmp_path / "bag") == list(range(1, 101))


def test_full_disk_at_close_is_the_same_error(tmp_path: Path):
    writer = BagWriter(tmp_path / "bag", TOPICS)
    writer.write(GATE.name, START_NS, gate_event(0))
    writer.flush()
    limit = (tmp_path / "bag.incomplete" / "bag_0.mcap").stat().st_size + 50
    with (
        file_size_limit(limit),
        pytest.raises(UserError, match=r"the 1 messages until then are in .*incomplete"),
    ):
        writer.close()
    writer.close()


def test_definitions_fit_the_message_texts_of_the_package():
    names = {p.stem for p in message_directory().glob("*.msg")}
    assert {"GateEvent", "ActionChunk", "PolicyStatus", "PolicyInfo", "EpisodeStatus", "Latent"} <= names
    fields = [name for name, _ in typestore().fielddefs["aura_ros/msg/GateEvent"][1]]
    assert fields[:3] == ["header", "epoch", "step"]
    assert "state_bytes" in fields


@pytest.mark.parametrize(
    "type_name",
    ["GateEvent", "ActionChunk", "ChunkState", "EpisodeStatus", "Latent", "PolicyInfo", "PolicyStatus"],
)
def test_type_hash_equals_the_generated_one(type_name: str):
    generated = message_directory() / f"{type_name}.json"
    if not generated.is_file():
        pytest.skip("the messages are not built")
    hashes = {h["type_name"]: h["hash_string"] for h in json.loads(generated.read_text())["type_hashes"]}
    full_name = f"aura_ros/msg/{type_name}"
    assert typestore().hash_rihs01(full_name) == hashes[full_name]


def test_unknown_cdr_is_not_silently_decoded(tmp_path: Path):
    writer = BagWriter(tmp_path / "bag", TOPICS)
    writer.write(RATE.name, START_NS, b"\x00\x01\x00\x00" + struct.pack("<f", 1.0))
    writer.close()
    with pytest.raises(UserError, match="cannot be read"):
        list(read_bag(tmp_path / "bag"))
