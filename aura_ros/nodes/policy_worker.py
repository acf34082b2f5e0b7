"""The one thread that owns the model: chooses an observation, infers, steps the memory, hands out the result.

No rclpy here: the node injects clocks, inputs and what to do with a result.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from aura_ros.control.lockstep import Lockstep, Verdict
from aura_ros.control.schedule import QuerySchedule
from aura_ros.control.statistics import Rejections, SlidingWindow, without_numbers
from aura_ros.control.streams import NS, Hold, Ready, Streams
from aura_ros.errors import UserError
from aura_ros.memory import MemoryStep
from aura_ros.memory.state_file import State, read_state, write_state
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


class PolicyWorker:
    """Runs a policy over the newest observations. Public methods may be called from any thread, and none but
    `warm_up` waits for inference.

    publish: called with each `Stepped` and whether its chunk may leave now; returns what to send for a repeated
    stamp (None: there is no chunk).
    repeat: called with that when the stamp comes again.
    now_ns: the node's clock. log: an object with info, warning and error.
    """

    def __init__(
        self,
        policy: Policy,
        inputs: Inputs,
        config: PolicyNodeConfig,
        *,
        publish: Callable[[Stepped, bool], Any],
        repeat: Callable[[Any], None],
        listening: Callable[[], bool],
        on_epoch: Callable[[], None],
        now_ns: Callable[[], int],
        log: Any,
    ):
        self.policy, self.inputs, self.config = policy, inputs, config
        self._publish, self._repeat, self._listening, self._on_epoch = publish, repeat, listening, on_epoch
        self._now_ns, self._log = now_ns, log
        spec = policy.backbone.info.action
        self.step_ns = round(policy.memory.config.memory_step_period * spec.period_s * NS)
        self.latency_ms = SlidingWindow(config.latency_window)
        self._wrote = SlidingWindow(config.write_rate_window)
        self.rejections = Rejections()
        self._lockstep = Lockstep(self.step_ns)
        self._schedule = QuerySchedule(self.step_ns)
        # Guards what follows. Held while a result is published, so that nothing of an older epoch leaves after
        # `new_epoch` returned; never held during inference.
        self._lock = threading.RLock()
        self._model = threading.Lock()  # held during inference and warm-up
        self.epoch = 0
        self.sequence = 0
        self.queries = 0
        self.repeats = 0
        self.instruction = config.instruction
        self.enabled = config.enabled_at_start
        self.active = False
        self.fault = ""
        self.hold = Hold("waiting for observations", missing=True)
        self._rejected: Hold | None = None
        self._episode: tuple[int, tuple[object, ...]] | None = None
        # The memory is changed by the thread alone: a new epoch leaves the state that it begins with here.
        self._empty = self._state = policy.memory.state_dict()
        self._state_is_new = False
        self._steps_before = self._writes_before = 0  # this epoch
        self._last_now_ns: int | None = None
        self.answered_at = -math.inf  # steady clock, seconds
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

    def new_epoch(self, why: str, state: State | None = None) -> int:
        """Discard the chunk in flight and start a new epoch, its memory empty or the given state."""
        with self._lock:
            # Unique over restarts: nanoseconds of the system clock, and never the same twice.
            self.epoch = max(time.time_ns(), self.epoch + 1)
            self.sequence = self.queries = self.repeats = 0
            self._state, self._state_is_new = self._empty if state is None else state, True
            self._lockstep.clear()
            self._schedule.clear()
            self._rejected = None
            epoch = self.epoch
        if why != "start":
            self._log.info(f"new epoch {epoch}: {why}")
            self._on_epoch()
        self.wake()
        return epoch

    def warm_up(self) -> None:
        """Check and warm the model, after a query that is still under way."""
        with self._model:
            self.policy.warm_up(self.instruction.strip() or None)

    def set_active(self, active: bool) -> None:
        """Begin or end inference; a chunk in flight is discarded."""
        with self._lock:
            self.active = active
            self.hold = Hold("waiting for observations", missing=True)
            self.inputs.streams.clear()
            self.new_epoch("activated" if active else "deactivated")

    def set_enabled(self, enabled: bool) -> None:
        """The operator's switch. Off: also the chunk in flight is withheld."""
        with self._lock:
            self.enabled = enabled
        self.wake()

    def set_instruction(self, instruction: str) -> None:
        """From the next query on."""
        self.instruction = instruction
        self.wake()

    def set_threshold(self, threshold: float) -> None:
        """Of the gate, from the next memory step on."""
        self.policy.memory.threshold = threshold

    def episode_started(self, stamp_ns: int, *identity: object) -> None:
        """An episode whose first observation has this stamp; the same one again changes nothing.

        identity: what else tells it from others, since every run of a simulator may begin at the same stamp.
        """
        with self._lock:
            if self._episode == (stamp_ns, identity):
                return
            self._episode = (stamp_ns, identity)
            # What is left of the episode before must not be the first observation of this one.
            self.inputs.streams.clear()
            if self.config.reset == "episode":
                self.new_epoch("episode started")
            else:
                # Every run of a simulator begins at the same stamp: the memory stays, what was answered goes.
                self._lockstep = Lockstep(self.step_ns)
        self.wake()

    def episode_finished(self) -> None:
        """No observation belongs to an episode until the next one starts."""
        with self._lock:
            self._episode = None

    def clear_fault(self) -> str:
        """Unlatch; returns the fault that was. The next observation may come at any distance from the last."""
        with self._lock:
            fault, self.fault = self.fault, ""
            if fault:
                self._lockstep.allow_gap()
        self.wake()
        return fault

    def save_state(self, path: str) -> int:
        """Save the memory as it is after its latest step; returns the epoch. Raises UserError."""
        with self._lock:
            state, epoch = self._state, self.epoch
        write_state(state, self.policy.memory.weights_hash, path, epoch)
        return epoch

    def load_state(self, path: str) -> int:
        """Start a new epoch with a saved memory state; returns the epoch. Raises UserError."""
        state = read_state(self.policy.memory.weights_hash, path)
        self.policy.memory.check_state(state)
        return self.new_epoch(f"memory state loaded from {path}", state)

    # -- the worker's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        streams, seen = self.inputs.streams, -1
        while not self._stopping:
            with streams.changed:
                if streams.version == seen:
                    # The time-out is for real time, where time alone makes an observation due or stale.
                    streams.changed.wait(0.02 if self.config.mode == "realtime" else 0.1)
                seen = streams.version
            try:
                self._look()
            except Exception as error:
                # A model that raises is a fault to be shown and mended, not a dead thread.
                self._latch(f"{type(error).__name__}: {error}", error)

    def _take_state(self) -> None:
        """Let the memory begin with the epoch's state; the lock is held."""
        if not self._state_is_new:
            return
        memory = self.policy.memory
        self.policy.reset()
        if self._state is not self._empty:
            memory.load_state_dict(self._state)
        self._state_is_new = False
        # A saved state brings its counters; those of an epoch begin with it.
        self._steps_before, self._writes_before = memory.steps, memory.writes
        self._wrote.clear()

    def _latch(self, fault: str, error: BaseException | None = None) -> None:
        fault = " ".join(fault.split())
        if self._stopping:
            return  # the model may be closed under a query that nobody waits for
        with self._lock:
            self.fault = fault
        self._log.error(f"fault: {fault}", exc=error)

    def _look(self) -> None:
        if self.active and self.config.mode == "realtime":
            # In lockstep the observations' stamps say whether time went back, whatever order topics come in.
            self._watch_clock()
        if not self.active or not self.enabled or self.fault:
            return
        epoch, lockstep = self.epoch, self._lockstep
        chosen = self._choose()
        if isinstance(chosen, Ready):
            self._step(chosen, epoch, lockstep)
            return
        if chosen.cause and chosen.cause != self.hold.cause:
            self.rejections.add(chosen.cause)
        if self._rejected is not None and (chosen.missing or not chosen.reason):
            # A rejected message stays the reason until a good one comes.
            chosen = self._rejected
        self.hold = chosen

    def _watch_clock(self) -> None:
        now = self._now_ns()
        if self._last_now_ns is not None and now < self._last_now_ns - BACKWARD_JUMP_NS:
            self.inputs.streams.clear()
            self.rejections.add("clock went back")
            self.new_epoch(f"the clock went back by {(self._last_now_ns - now) / NS:.3f} s")
        self._last_now_ns = now

    def _choose(self) -> Ready | Hold:
        """The observation to infer on now, or why there is none. Sends repeats on the way."""
        if not self._listening():
            return Hold(f"waiting for {self.config.wait_for_recorder} to listen", missing=True)
        if not self.instruction.strip():
            return Hold("waiting for an instruction", missing=True)
        if self.config.mode == "realtime":
            return self._choose_realtime()
        ready = self.inputs.streams.joined()
        if isinstance(ready, Hold):
            return ready
        with self._lock:
            episode = self._episode
            if self.config.reset == "episode" and (episode is None or ready.stamp_ns < episode[0]):
                return Hold("waiting for the episode's start", missing=True)
            try:
                verdict = self._lockstep.verdict(ready.stamp_ns)
            except UserError as error:
                self._latch(str(error))
                return Hold(str(error))
            if verdict is Verdict.REPEAT:
                # Looked at once per arrival: the set is dropped, and only a set sent again is answered again.
                self.inputs.streams.discard(ready.stamp_ns)
                if self._lockstep.answer is None:
                    self._latch(
                        f"the chunk for stamp {ready.stamp_ns / NS:.3f} s was rejected; ~/reset starts a new epoch"
                    )
                elif self.active and self.enabled:
                    self.repeats += 1
                    self._repeat(self._lockstep.answer)
                return Hold("")
        if verdict is Verdict.JUMP_BACK:
            self.rejections.add("clock went back")
            self.new_epoch(f"an observation of stamp {ready.stamp_ns / NS:.3f} s came after a later one")
            return Hold("")  # taken at the next look, as the first of its epoch
        return ready

    def _choose_realtime(self) -> Ready | Hold:
        config, streams = self.config, self.inputs.streams
        image_ns, proprio_ns = round(config.image_max_age * NS), round(config.proprio_max_age * NS)
        ages = {n: image_ns if n in self.inputs.image_streams else proprio_ns for n in streams.names}
        skew_ns, future_ns = round(config.max_skew * NS), round(config.max_future * NS)
        ready = streams.fresh(self._now_ns(), ages, skew_ns, future_ns)
        if isinstance(ready, Hold):
            return ready
        stamps = {name: sample.stamp_ns for name, sample in ready.samples.items()}
        return ready if self._schedule.due(stamps, time.monotonic_ns()) else Hold("")

    def _step(self, ready: Ready, epoch: int, lockstep: Lockstep) -> None:
        with self._lock:
            if epoch != self.epoch or lockstep is not self._lockstep:
                return  # chosen for an epoch or an episode that has ended since
            instruction = self.instruction
            self._take_state()
        if self.config.mode == "lockstep":
            # The set is used up: should it come again, the simulator did not get the answer.
            self.inputs.streams.discard(ready.stamp_ns)
        try:
            observation = self.inputs.decode(ready, instruction)
        except UserError as error:
            self._reject(str(error))
            return
        self.hold, self._rejected = Hold(""), None
        started = time.perf_counter()
        step: PolicyStep | ActionRejected
        try:
            with self._model:
                step = self.policy.act(observation)
        except ActionRejected as rejected:
            step = rejected
        except UserError as error:
            self._latch(str(error))
            return
        elapsed_ms = (time.perf_counter() - started) * 1e3
        with self._lock:
            if epoch != self.epoch or not self.active or self._stopping:
                self.rejections.add("chunk of an older epoch discarded")
                return
            self.latency_ms.add(elapsed_ms)
            self._wrote.add(step.memory_step.written_bytes > 0)
            memory = self.policy.memory
            self._state = memory.state_dict()
            result = Stepped(
                memory_step=step.memory_step,
                hidden_state=step.hidden_state,
                chunk=step.chunk if isinstance(step, PolicyStep) else None,
                frame_id=self.policy.backbone.info.action.frame_id,
                epoch=epoch,
                sequence=self.sequence,
                stamp_ns=ready.stamp_ns,
                writes=memory.writes - self._writes_before,
                steps=memory.steps - self._steps_before,
                write_rate=self._wrote.mean(),
                state_norm=memory.state_norm,
                state_bytes=memory.state_bytes,
            )
            self.sequence += 1
            self.queries += 1
            self.answered_at = time.monotonic()
            # Also without a chunk the stamp is used up: the memory has seen it.
            lockstep.answered(ready.stamp_ns, None)
            # With `reset: never` an episode may have begun meanwhile: it gets the memory step, not the chunk.
            lockstep.answer = self._publish(result, self.enabled and lockstep is self._lockstep)
            if isinstance(step, ActionRejected):
                self._latch(str(step))

    def _reject(self, reason: str) -> None:
        reason = " ".join(reason.split())
        count = self.rejections.add(without_numbers(reason.split(";")[0]))
        self.hold = self._rejected = Hold(reason)
        if count == 1:
            self._log.warning(f"observation rejected: {reason}")
