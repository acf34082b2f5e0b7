"""The one thread that owns the model: chooses an observation, infers, steps the memory, hands out the result.

No rclpy here: the node injects clocks, inputs and what to do with a result.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from aura_ros.control.lockstep import Lockstep, Verdict
from aura_ros.control.statistics import Rejections, SlidingWindow
from aura_ros.control.streams import NS, Hold, Ready, Streams
from aura_ros.errors import UserError
from aura_ros.memory import MemoryStep
from aura_ros.memory.state_file import load_state
from aura_ros.nodes.policy_config import PolicyNodeConfig
from aura_ros.policy import ActionRejected, Policy, PolicyStep
from aura_ros.types import ActionChunk, FloatArray, Observation

# A simulated clock that goes back by less than this is jitter of its publisher.
BACKWARD_JUMP_NS = NS // 10


class Inputs(Protocol):
    """Where observations come from."""

    streams: Streams
    image_streams: list[str]

    def decode(self, ready: Ready, instruction: str) -> Observation:
        """Turn messages into an observation; raises UserError for a broken one."""


@dataclass(frozen=True)
class Stepped:
    """One memory step and its chunk (None: withheld), ready to be published. hidden_state: float32 [hidden_dim]."""

    memory_step: MemoryStep
    hidden_state: FloatArray
    chunk: ActionChunk | None
    frame_id: str
    epoch: int
    sequence: int
    stamp_ns: int
    writes: int
    steps: int
    write_rate: float
    state_norm: float
    state_bytes: int
    threshold: float


class PolicyWorker:
    """Runs a policy over the newest observations. Public methods may be called from any thread and never wait
    for inference.

    publish: called with each `Stepped`, returns what to send again for a repeated stamp (None: nothing).
    repeat: called with that when the stamp comes again.
    now_ns: the node's clock. log: an object with info, warning and error.
    """

    def __init__(
        self,
        policy: Policy,
        inputs: Inputs,
        config: PolicyNodeConfig,
        *,
        publish: Callable[[Stepped], Any],
        repeat: Callable[[Any], None],
        listeners: Callable[[], int],
        on_epoch: Callable[[], None],
        now_ns: Callable[[], int],
        log: Any,
    ):
        self.policy, self.inputs, self.config = policy, inputs, config
        self._publish, self._repeat, self._listeners, self._on_epoch = publish, repeat, listeners, on_epoch
        self._now_ns, self._log = now_ns, log
        spec = policy.backbone.info.action
        self.step_ns = round(policy.memory.config.memory_step_period * spec.period_s * NS)
        self.latency_ms = SlidingWindow(config.latency_window)
        self._wrote = SlidingWindow(config.write_rate_window)
        self.rejections = Rejections()
        self._lockstep = Lockstep(self.step_ns)
        self._lock = threading.Lock()  # guards what follows; never held during inference
        self.epoch = 0
        self.sequence = 0
        self.queries = 0
        self.repeats = 0
        self.instruction = config.instruction
        self.enabled = config.enabled_at_start
        self.active = False
        self.fault = ""
        self.hold = Hold("not active")
        self._episode_start_ns: int | None = None
        self._clear_memory = False
        self._tasks: list[Callable[[], None]] = []
        self._last_now_ns: int | None = None
        self._next_query_ns = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="policy-worker", daemon=True)
        self.new_epoch("start")

    # -- from any thread ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """Ask the thread to end and wait for it; a chunk still being inferred is discarded."""
        self._stopping = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def wake(self) -> None:
        """Let the thread look again."""
        with self.inputs.streams.changed:
            self.inputs.streams.changed.notify_all()

    def new_epoch(self, why: str, clear_memory: bool = True) -> int:
        """Clear the memory before its next step, discard the chunk in flight and start a new epoch."""
        with self._lock:
            # Unique over restarts: nanoseconds of the system clock, and never the same twice.
            self.epoch = max(time.time_ns(), self.epoch + 1)
            self.sequence = self.queries = self.repeats = 0
            self._clear_memory = clear_memory
            self._lockstep.clear()
            self._next_query_ns = 0
            epoch = self.epoch
        if why != "start":
            self._log.info(f"new epoch {epoch}: {why}")
            self._on_epoch()
        self.wake()
        return epoch

    def set_active(self, active: bool) -> None:
        """Begin or end inference; a chunk in flight is discarded."""
        self.active = active
        self.inputs.streams.clear()
        self.new_epoch("activated" if active else "deactivated")

    def set_enabled(self, enabled: bool) -> None:
        """The operator's switch."""
        self.enabled = enabled
        self.wake()

    def set_instruction(self, instruction: str) -> None:
        """From the next query on."""
        self.instruction = instruction
        self.wake()

    def set_threshold(self, threshold: float) -> None:
        """Of the gate, from the next memory step on."""
        self.policy.memory.threshold = threshold

    def episode_started(self, stamp_ns: int) -> None:
        """An episode whose first observation has this stamp; the same one again changes nothing."""
        if self._episode_start_ns == stamp_ns:
            return
        if self.config.reset == "episode":
            self.new_epoch("episode started")
        self._episode_start_ns = stamp_ns
        self.wake()

    def clear_fault(self) -> str:
        """Unlatch; returns the fault that was."""
        with self._lock:
            fault, self.fault = self.fault, ""
        self.wake()
        return fault

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task in the worker's thread between two steps."""
        with self._lock:
            self._tasks.append(task)
        self.wake()

    def load_state(self, path: str) -> None:
        """Load a saved memory state and start a new epoch with it; call it through `submit`. Raises UserError."""
        load_state(self.policy.memory, path)
        self.new_epoch(f"memory state loaded from {path}", clear_memory=False)

    # -- the worker's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        streams, seen = self.inputs.streams, -1
        while not self._stopping:
            with streams.changed:
                if streams.version == seen and not self._tasks:
                    # The time-out is for real time, where time alone makes an observation due or stale.
                    streams.changed.wait(0.02 if self.config.mode == "realtime" else 0.1)
                seen = streams.version
            try:
                self._run_tasks()
                self._look()
            except Exception as error:
                # A model that raises is a fault to be shown and mended, not a dead thread.
                self._log.error(f"inference failed: {type(error).__name__}: {error}", exc=error)
                self._latch(f"{type(error).__name__}: {error}")

    def _run_tasks(self) -> None:
        with self._lock:
            tasks, self._tasks = self._tasks, []
        for task in tasks:
            task()

    def _latch(self, fault: str) -> None:
        with self._lock:
            self.fault = " ".join(fault.split())

    def _look(self) -> None:
        if not self.active or not self.enabled or self.fault:
            return
        self._watch_clock()
        chosen = self._choose()
        if isinstance(chosen, Hold):
            if not chosen.missing and chosen.reason != self.hold.reason:
                self.rejections.add(chosen.reason.split(" is ")[0].split(" has ")[0] + " not fresh")
            self.hold = chosen
            return
        self.hold = Hold("")
        self._step(chosen)

    def _watch_clock(self) -> None:
        now = self._now_ns()
        if self._last_now_ns is not None and now < self._last_now_ns - BACKWARD_JUMP_NS:
            self.inputs.streams.clear()
            self._episode_start_ns = None
            self.rejections.add("clock went back")
            self.new_epoch(f"the clock went back by {(self._last_now_ns - now) / NS:.3f} s")
        self._last_now_ns = now

    def _choose(self) -> Ready | Hold:
        """The observation to infer on now, or why there is none. Sends repeats on the way."""
        if self._listeners() < self.config.wait_for_gate_subscribers:
            return Hold(
                f"waiting for {self.config.wait_for_gate_subscribers} subscriber(s) of the gate topic", True
            )
        if not self.instruction.strip():
            return Hold("waiting for an instruction", missing=True)
        if self.config.mode == "realtime":
            return self._choose_realtime()
        ready = self.inputs.streams.joined()
        if isinstance(ready, Hold):
            return ready
        if self.config.reset == "episode" and (
            self._episode_start_ns is None or ready.stamp_ns < self._episode_start_ns
        ):
            return Hold("waiting for the episode's start", missing=True)
        try:
            with self._lock:
                verdict, answer = self._lockstep.verdict(ready.stamp_ns), self._lockstep.answer
        except UserError as error:
            self._latch(str(error))
            return Hold(str(error))
        if verdict is Verdict.REPEAT:
            # Looked at once per arrival: the set is dropped, and only a set sent again is answered again.
            self.inputs.streams.discard(ready.stamp_ns)
            with self._lock:
                self.repeats += 1
            self._repeat(answer)
            return Hold("")
        if verdict is Verdict.JUMP_BACK:
            self.rejections.add("clock went back")
            self.new_epoch(f"an observation of stamp {ready.stamp_ns / NS:.3f} s came after a later one")
        return ready

    def _choose_realtime(self) -> Ready | Hold:
        now, config = self._now_ns(), self.config
        ages = {
            name: round(
                (config.image_max_age if name in self.inputs.image_streams else config.proprio_max_age) * NS
            )
            for name in self.inputs.streams.names
        }
        ready = self.inputs.streams.fresh(
            now, ages, round(config.max_skew * NS), round(config.max_future * NS)
        )
        if isinstance(ready, Hold):
            return ready
        steady = time.monotonic_ns()
        if steady < self._next_query_ns:
            return Hold("")
        # One memory step per period, on a grid; a late one shifts the grid instead of causing a burst.
        due = self._next_query_ns + self.step_ns
        self._next_query_ns = due if due > steady else steady + self.step_ns
        return ready

    def _step(self, ready: Ready) -> None:
        with self._lock:
            epoch, instruction = self.epoch, self.instruction
            clear, self._clear_memory = self._clear_memory, False
        if clear:
            self.policy.reset()
            self._wrote.clear()
        if self.config.mode == "lockstep":
            # The set is used up: should it come again, the simulator did not get the answer.
            self.inputs.streams.discard(ready.stamp_ns)
        try:
            observation = self.inputs.decode(ready, instruction)
        except UserError as error:
            self._reject(str(error))
            return
        started = time.perf_counter()
        step: PolicyStep | ActionRejected
        try:
            step = self.policy.act(observation)
        except ActionRejected as rejected:
            step = rejected
            self._latch(str(rejected))
            self._log.error(str(rejected))
        except UserError as error:
            self._latch(str(error))
            self._log.error(f"no chunk: {error}")
            return
        elapsed_ms = (time.perf_counter() - started) * 1e3
        with self._lock:
            if epoch != self.epoch or not self.active or self._stopping:
                self.rejections.add("chunk of an older epoch discarded")
                return
            self.latency_ms.add(elapsed_ms)
            self._wrote.add(step.memory_step.written_bytes > 0)
            memory = self.policy.memory
            result = Stepped(
                memory_step=step.memory_step,
                hidden_state=step.hidden_state,
                chunk=step.chunk if isinstance(step, PolicyStep) else None,
                frame_id=self.policy.backbone.info.action.frame_id,
                epoch=epoch,
                sequence=self.sequence,
                stamp_ns=ready.stamp_ns,
                writes=memory.writes,
                steps=memory.steps,
                write_rate=self._wrote.mean(),
                state_norm=memory.state_norm,
                state_bytes=memory.state_bytes,
                threshold=memory.threshold,
            )
            self.sequence += 1
            self.queries += 1
        answer = self._publish(result)
        with self._lock:
            if epoch == self.epoch and answer is not None:
                self._lockstep.answered(ready.stamp_ns, answer)

    def _reject(self, reason: str) -> None:
        # Numbers out, so that the reasons stay few however long the node runs.
        count = self.rejections.add(re.sub(r"-?\d[\d.e+-]*|nan|inf", "#", reason.split(";")[0]))
        self.hold = Hold(reason)
        if count == 1:
            self._log.warning(f"observation rejected: {reason}")
