"""Write rosbag2 bags (MCAP + metadata.yaml) from serialized messages, without rosbag2 and without rclpy."""

from __future__ import annotations

import io
import os
import shutil
import struct
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rosbags.interfaces import (
    Connection,
    ConnectionExtRosbag2,
    Qos,
    QosDurability,
    QosHistory,
    QosLiveliness,
    QosReliability,
    QosTime,
)
from rosbags.rosbag2 import ReaderError, StoragePlugin, Writer
from rosbags.rosbag2.storage_mcap import McapReader, McapWriter, PendingChunk
from rosbags.typesys import Stores, get_types_from_msg, get_typestore
from rosbags.typesys.store import Typestore

from aura_ros.errors import UserError
from aura_ros.report.definitions import typestore as default_typestore

NEVER = 2**63 - 1
INFINITE = QosTime(9223372036, 854775807)
MCAP_MAGIC = b"\x89MCAP0\r\n"
RECORD_HEAD = struct.Struct("<BQ")
DATA_END, FOOTER = 0x0F, 0x02


def qos(*, depth: int = 100, reliable: bool = True, latched: bool = False) -> Qos:
    """Quality of service to note for a topic: keep the last `depth` messages; latched is transient local."""
    return Qos(
        QosHistory.KEEP_LAST,
        depth,
        QosReliability.RELIABLE if reliable else QosReliability.BEST_EFFORT,
        QosDurability.TRANSIENT_LOCAL if latched else QosDurability.VOLATILE,
        INFINITE,
        INFINITE,
        QosLiveliness.AUTOMATIC,
        INFINITE,
        False,
    )


@dataclass(frozen=True)
class BagTopic:
    """A topic to record: full name, type such as "aura_ros/msg/GateEvent", and the publisher's QoS."""

    name: str
    type: str
    qos: Qos


class BagWriter:
    """A bag being recorded.

    Everything goes to `<path>.incomplete`, which `close` renames to `path`: a directory of that name is always
    a whole bag. After `flush` the messages until then are in the file as complete MCAP chunks, so that
    `repair_bag` finds them even when the process is killed. Not thread-safe.
    """

    def __init__(
        self,
        path: str | Path,
        topics: Sequence[BagTopic],
        *,
        typestore: Typestore | None = None,
        work: Path | None = None,
    ) -> None:
        """Check the target, then create the working directory with an empty recording.

        typestore: definitions of the topics' types; by default this package's and the common ones.
        work: working directory; by default `<path>.incomplete`.
        Raises UserError, with nothing written, when `path` exists and is not an empty directory, when an
        interrupted recording lies beside it, or when the directory cannot be made.
        """
        self.path = target(path)
        self.work = work or incomplete(self.path)
        self.closed = False
        _check_free(self.path, self.work)
        store = typestore or default_typestore()
        # Version 9 is the format of Jazzy and later.
        self._writer = Writer(self.work, version=9, storage_plugin=StoragePlugin.MCAP)
        try:
            self._writer.open()
            self._storage = cast(McapWriter, self._writer.storage)
            self._storage.bio.close()
            # rosbag2's name of a bag's first file; the working directory's name must not stay in it.
            file = self.work / f"{self.path.name}_0.mcap"
            self._storage.path.rename(file)
            self._storage.path = file
            self._file = _WholeWrites(file)
            self._storage.bio = self._file  # type: ignore[assignment]
        except OSError as error:
            raise UserError(
                f"bag directory {self.path} cannot be made ({error.strerror}); give a writable one"
            ) from None
        self._connections = {t.name: self._connect(t, store) for t in topics}
        self._note_good()

    def write(self, topic: str, timestamp_ns: int, data: bytes) -> None:
        """Add a serialized message: CDR with its 4-byte header, and its time of reception by the system clock.

        Raises UserError when the disk is full; the recording is then closed and what was flushed is kept.
        """
        chunks = len(self._storage.chunks)
        try:
            self._writer.write(self._connections[topic], timestamp_ns, data)
        except OSError as error:
            self._fail(error)
        if len(self._storage.chunks) != chunks:
            self._note_good()

    def flush(self) -> None:
        """Hand everything to the operating system. Call it about once a second. Raises as `write` does."""
        if self.closed or not self._storage.chunk.msgs:
            return
        try:
            self._storage.close_chunk()
        except OSError as error:
            self._fail(error)
        self._note_good()

    def close(self) -> None:
        """Write the index and metadata.yaml and rename to `path`; again, do nothing. Raises as `write` does."""
        if self.closed:
            return
        self.flush()
        try:
            self._finish()
        except OSError as error:
            self._fail(error)

    @property
    def counts(self) -> dict[str, int]:
        """Messages written so far, by topic."""
        return {name: self._writer.counts[c.id] for name, c in self._connections.items()}

    def _connect(self, topic: BagTopic, store: Typestore) -> Connection:
        return self._writer.add_connection(
            topic.name, topic.type, typestore=store, offered_qos_profiles=[topic.qos]
        )

    def _note_good(self) -> None:
        self._good_size = self._file.tell()
        self._good_times = (self._writer.min_timestamp, self._writer.max_timestamp)

    def _finish(self) -> None:
        self.closed = True
        if not any(self._storage.channel_stats.values()):
            # "No message" is 0 in MCAP; a start after the end confuses readers.
            self._storage.message_start_time = self._storage.chunk.message_start_time = 0
        self._writer.close()
        self.work.rename(self.path)

    def _fail(self, error: OSError) -> None:
        """Drop what is only half on disk, keep the rest readable, and raise the error as the user's."""
        if not self.closed:
            self._drop_pending()
        where = self.path
        try:
            if self.closed:
                raise error
            self._file.truncate(self._good_size)
            self._finish()
        except OSError:
            self.closed = True
            where = self.work
            with suppress(OSError):
                os.truncate(self._storage.path, self._good_size)
            self._file.close()
        kept = sum(self._writer.counts.values())
        hint = "" if where == self.path else " (make it whole with aura_ros.report.bag.repair_bag)"
        raise UserError(
            f"recording to {self.path} stopped: {error.strerror}; "
            f"the {kept} messages until then are in {where}{hint}"
        ) from None

    def _drop_pending(self) -> None:
        for number, messages in self._storage.chunk.msgs.items():
            self._storage.channel_stats[number] -= len(messages)
            self._writer.counts[number] -= len(messages)
        self._storage.chunk = PendingChunk(NEVER, 0, io.BytesIO(), defaultdict(list))
        self._writer.min_timestamp, self._writer.max_timestamp = self._good_times
        self._storage.message_start_time, self._storage.message_end_time = self._good_times


def target(path: str | Path) -> Path:
    """The bag directory that a user's path means. Raises UserError for one that names no directory."""
    absolute = Path(os.path.abspath(Path(path).expanduser()))
    if not str(path) or not absolute.name:
        raise UserError(
            f"bag directory '{path}' has no name; give a directory that does not exist yet, such as runs/bag"
        )
    return absolute


def incomplete(path: Path) -> Path:
    """Where a recording lies until it is closed."""
    return path.with_name(path.name + ".incomplete")


def repair_bag(path: str | Path) -> Path:
    """Make a whole bag of an interrupted recording (`<dir>.incomplete`, or the `<dir>` it was meant for).

    Every message that was flushed is kept; a record cut in the middle is dropped. Returns the bag's directory
    and removes the interrupted one. Raises UserError when there is nothing to repair.
    """
    bag = target(path)
    if bag.name.endswith(".incomplete"):
        bag = bag.with_name(bag.name.removesuffix(".incomplete"))
    broken = incomplete(bag)
    files = sorted(broken.glob("*.mcap"))
    if len(files) != 1:
        raise UserError(f"{broken} holds {len(files)} .mcap files; an interrupted recording has 1")
    work = bag.with_name(bag.name + ".repairing")
    shutil.rmtree(work, ignore_errors=True)
    _check_free(bag, work)
    _end_file(files[0])
    reader = McapReader(files[0])
    try:
        reader.open()
        store = get_typestore(Stores.EMPTY)
        topics = []
        for connection in reader.connections:
            store.register(get_types_from_msg(connection.msgdef.data, connection.msgtype))
            (offered,) = cast(ConnectionExtRosbag2, connection.ext).offered_qos_profiles
            topics.append(BagTopic(connection.topic, connection.msgtype, offered))
        writer = BagWriter(bag, topics, typestore=store, work=work)
        for connection, timestamp, data in reader.messages_scan(reader.connections):
            writer.write(connection.topic, timestamp, data)
        writer.close()
    except ReaderError as error:
        raise UserError(f"{files[0]} cannot be repaired: {error}") from None
    finally:
        if reader.bio is not None:
            reader.close()
    shutil.rmtree(broken)
    return bag


def _check_free(path: Path, work: Path) -> None:
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"bag directory {path} exists and is not empty; give another one or remove it")
    if work.exists():
        raise UserError(
            f"{work} holds an interrupted recording; make it whole with aura_ros.report.bag.repair_bag, "
            "remove it, or give another bag directory"
        )


def _end_file(path: Path) -> None:
    """Cut an MCAP file after its last complete record and end it properly, without an index."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        if file.read(len(MCAP_MAGIC)) != MCAP_MAGIC:
            raise UserError(f"{path} is not an MCAP file, or was cut before its first record")
        end = file.tell()
        while len(head := file.read(RECORD_HEAD.size)) == RECORD_HEAD.size:
            operation, length = RECORD_HEAD.unpack(head)
            if operation == DATA_END or file.tell() + length > size:
                break
            end = file.seek(length, os.SEEK_CUR)
        file.seek(end)
        file.truncate()
        for operation, body in ((DATA_END, bytes(4)), (FOOTER, bytes(20))):
            file.write(RECORD_HEAD.pack(operation, len(body)) + body)
        file.write(MCAP_MAGIC)


class _WholeWrites:
    """The part of a binary file that McapWriter uses, without a buffer.

    A buffered file tries its buffer again at close, behind the point where the file was cut.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        while rest:
            # A nearly full disk takes a part and reports no error until the next write.
            rest = rest[self._file.write(rest) :]
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self._file.tell()

    def truncate(self, size: int) -> None:
        self._file.truncate(size)
        self._file.seek(size)

    def close(self) -> None:
        self._file.close()
