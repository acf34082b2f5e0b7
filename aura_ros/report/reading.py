"""Read bags with the definitions they carry, and sum up what a policy's memory did in one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rosbags.highlevel import AnyReader, AnyReaderError

from aura_ros.errors import UserError
from aura_ros.report.bag import incomplete, target

GATE_EVENT = "aura_ros/msg/GateEvent"
EPISODE_STATUS = "aura_ros/msg/EpisodeStatus"
EPISODE_FINISHED = 2  # EpisodeStatus.FINISHED


class BagMessage(NamedTuple):
    """One message: topic, receive time (ns of the system clock), and the message decoded by the bag's schema.

    Fields have the names of the .msg; arrays of numbers are NumPy arrays; the type is `message.__msgtype__`.
    """

    topic: str
    timestamp_ns: int
    message: Any


def read_bag(path: str | Path, topics: Collection[str] = ()) -> Iterator[BagMessage]:
    """Decode a bag's messages in the order of their receive times; `topics` (full names) limits them.

    Raises UserError when there is no bag, or it cannot be read or decoded.
    """
    with _open(path) as reader:
        wanted = [c for c in reader.connections if not topics or c.topic in topics]
        if not wanted:
            return
        try:
            for connection, timestamp, data in reader.messages(wanted):
                yield BagMessage(connection.topic, timestamp, reader.deserialize(data, connection.msgtype))
        except AnyReaderError as error:
            raise UserError(f"bag {path} cannot be read: {error}") from None


@dataclass(frozen=True)
class GateSummary:
    """What the memory did: one GateEvent is one memory step.

    writes: steps that changed W (bytes_written > 0). state_bytes: every size seen, ascending; a memory of
    constant size has one. epochs: how often the memory began anew.
    """

    steps: int
    fired: int
    writes: int
    bytes_written: int
    state_bytes: tuple[int, ...]
    epochs: int

    @property
    def write_rate(self) -> float:
        """Fraction of the steps that wrote."""
        return self.writes / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class EpisodeSummary:
    """How a finished episode ended; steps are control steps, queries are chunks consumed."""

    suite: str
    task: int
    task_name: str
    success: bool
    steps: int
    queries: int
    reason: str


@dataclass(frozen=True)
class BagSummary:
    """A bag at a glance. Every number is counted from the messages themselves.

    messages: topic -> count; types: topic -> message type; start_ns, end_ns: receive times of the first and
    the last message, 0 when there is none.
    """

    path: Path
    start_ns: int
    end_ns: int
    messages: dict[str, int]
    types: dict[str, str]
    gate: GateSummary
    episodes: tuple[EpisodeSummary, ...]

    @property
    def total(self) -> int:
        """Messages on all topics."""
        return sum(self.messages.values())

    @property
    def duration_s(self) -> float:
        """Seconds from the first message to the last."""
        return (self.end_ns - self.start_ns) / 1e9


def summarize_bag(path: str | Path) -> BagSummary:
    """Read a whole bag once and count. Raises UserError as `read_bag` does."""
    counts: Counter[str] = Counter()
    sizes: set[int] = set()
    epochs: set[int] = set()
    gate: Counter[str] = Counter()
    episodes: list[EpisodeSummary] = []
    start, end = 2**63 - 1, 0
    with _open(path) as reader:
        types = {c.topic: c.msgtype for c in reader.connections}
        try:
            for connection, timestamp, data in reader.messages() if types else ():
                counts[connection.topic] += 1
                start, end = min(start, timestamp), max(end, timestamp)
                if connection.msgtype == GATE_EVENT:
                    event: Any = reader.deserialize(data, GATE_EVENT)
                    gate.update(
                        steps=1,
                        fired=int(event.fired),
                        writes=int(event.bytes_written > 0),
                        bytes_written=int(event.bytes_written),
                    )
                    sizes.add(int(event.state_bytes))
                    epochs.add(int(event.epoch))
                elif connection.msgtype == EPISODE_STATUS:
                    status: Any = reader.deserialize(data, EPISODE_STATUS)
                    if status.phase == EPISODE_FINISHED:
                        episodes.append(_episode(status))
        except AnyReaderError as error:
            raise UserError(f"bag {path} cannot be read: {error}") from None
    return BagSummary(
        path=target(path),
        start_ns=start if counts else 0,
        end_ns=end,
        messages={topic: counts[topic] for topic in types},
        types=types,
        gate=GateSummary(
            steps=gate["steps"],
            fired=gate["fired"],
            writes=gate["writes"],
            bytes_written=gate["bytes_written"],
            state_bytes=tuple(sorted(sizes)),
            epochs=len(epochs),
        ),
        episodes=tuple(episodes),
    )


def _episode(status: Any) -> EpisodeSummary:
    return EpisodeSummary(
        suite=status.suite,
        task=int(status.task),
        task_name=status.task_name,
        success=bool(status.success),
        steps=int(status.steps),
        queries=int(status.queries),
        reason=status.reason,
    )


@contextmanager
def _open(path: str | Path) -> Iterator[AnyReader]:
    bag = target(path)
    if not (bag / "metadata.yaml").is_file():
        hint = "give the directory that holds metadata.yaml"
        if incomplete(bag).is_dir() or bag.name.endswith(".incomplete"):
            hint = "its recording was interrupted; make it whole with aura_ros.report.bag.repair_bag"
        raise UserError(f"{bag} is not a bag: {hint}")
    try:
        reader = AnyReader([bag])
        reader.open()
    except AnyReaderError as error:
        raise UserError(f"bag {bag} cannot be read: {error}") from None
    try:
        yield reader
    finally:
        reader.close()
