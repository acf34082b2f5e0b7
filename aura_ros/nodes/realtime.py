"""Which observation a real-time policy infers on, and when: fresh ones, at the memory's period, before a player runs dry."""

from __future__ import annotations

import time
from collections.abc import Callable

from aura_ros.control.schedule import PlayerReport, QuerySchedule
from aura_ros.control.streams import NS, Hold, Ready
from aura_ros.nodes.policy_config import PolicyNodeConfig
from aura_ros.nodes.stepped import Inputs

# A simulated clock that goes back by less than this is jitter of its publisher.
BACKWARD_JUMP_NS = NS // 10
LONGEST_WAIT_S = 0.02


class Realtime:
    """Chooses observations for the worker's thread; `player_reports` and `queue_depth` may be called from any other.

    step_ns: between memory steps. row_ns: between rows of a chunk. now_ns: the node's clock.
    """

    def __init__(self, inputs: Inputs, step_ns: int, row_ns: int, now_ns: Callable[[], int]):
        self._inputs, self._row_ns, self._now_ns = inputs, row_ns, now_ns
        self._schedule = QuerySchedule(step_ns)
        self._last_now_ns: int | None = None
        self._answered_ns = 0
        self._latency_ns = 0
        self._report: PlayerReport | None = None

    def clear(self) -> None:
        """Begin anew: the first query is due at once."""
        self._schedule.clear()

    def player_reports(self, epoch: int, rows_left: int) -> None:
        """What the chunk player says that it has left to play."""
        self._report = PlayerReport(epoch, rows_left, time.monotonic_ns())

    def queue_depth(self, epoch: int) -> int:
        """Rows of the epoch that the player has left; 0 where it has not said so within a second."""
        return 0 if self._report is None else self._report.depth(epoch, time.monotonic_ns())

    def clock_went_back_by(self) -> int:
        """Nanoseconds that the node's clock jumped back by since the last call; 0: it did not."""
        now, last = self._now_ns(), self._last_now_ns
        self._last_now_ns = now
        return last - now if last is not None and now < last - BACKWARD_JUMP_NS else 0

    def wait_s(self) -> float:
        """How long the worker may wait for a message: time alone makes an observation due, and stale."""
        left_s = (self._schedule.next_ns - time.monotonic_ns()) / NS
        return left_s if 0.0 < left_s < LONGEST_WAIT_S else LONGEST_WAIT_S

    def waited_ms(self, ready: Ready) -> float:
        """Milliseconds since an observation could be inferred on: all of it had come, and its time had."""
        came_ns = max(sample.arrival_ns for sample in ready.samples.values())
        return (time.monotonic_ns() - max(came_ns, self._schedule.due_ns)) / 1e6

    def answered(self, latency_ms: float) -> None:
        """A chunk leaves; latency_ms: what one takes to come, of the slower ones."""
        self._answered_ns, self._latency_ns = time.monotonic_ns(), round(latency_ms * 1e6)

    def choose(self, config: PolicyNodeConfig, epoch: int) -> Ready | Hold:
        """The observation to infer on now, or why there is none; a hold without a reason: it is not time yet."""
        streams, images = self._inputs.streams, self._inputs.image_streams
        image_ns, proprio_ns = round(config.image_max_age * NS), round(config.proprio_max_age * NS)
        ages = {name: image_ns if name in images else proprio_ns for name in streams.names}
        skew_ns, future_ns = round(config.max_skew * NS), round(config.max_future * NS)
        ready = streams.fresh(self._now_ns(), ages, skew_ns, future_ns)
        if isinstance(ready, Hold):
            return ready
        stamps = {name: sample.stamp_ns for name, sample in ready.samples.items()}
        early = config.prefetch and self._runs_dry(epoch)
        return ready if self._schedule.due(stamps, time.monotonic_ns(), early) else Hold("")

    def _runs_dry(self, epoch: int) -> bool:
        report = self._report
        # One from before the last chunk left does not count that chunk's rows.
        if report is None or report.arrival_ns <= self._answered_ns:
            return False
        return report.runs_dry(epoch, time.monotonic_ns(), self._row_ns, self._latency_ns)
