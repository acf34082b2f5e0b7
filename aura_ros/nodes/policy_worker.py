"""The one thread that owns the model: chooses an observation, infers, steps the memory, hands out the result.

No rclpy here: the node injects clocks, inputs and what to do with a result.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from aura_ros.control.lockstep import Lockstep, Verdict
from aura_ros.control.statistics import Rejections, SlidingWindow, without_numbers
from aura_ros.control.streams import NS, Hold, Ready
from aura_ros.errors import UserError
from aura_ros.memory.state_file import State
from aura_ros.nodes.autosave import Episode, Saved
from aura_ros.nodes.memory_life import MemoryLife
from aura_ros.nodes.policy_config import PolicyNodeConfig
from aura_ros.nodes.realtime import Realtime
from aura_ros.nodes.stepped import Inputs, Restored, Stepped
from aura_ros.policy import ActionRejected, Policy, PolicyStep
from aura_ros.types import ActionChunk

EMERGENCY_STOP = "emergency stop"


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
        self.overhead_ms = SlidingWindow(config.latency_window)  # from usable to published, less inference
        self.rejections = Rejections()
        self._lockstep = Lockstep(self.step_ns)
        self.realtime = Realtime(inputs, self.step_ns, round(spec.period_s * NS), now_ns)
        # The memory is changed by the thread alone: a new epoch leaves here what it begins with.
        self._life = MemoryLife(policy, config, self.step_ns / NS, self.rejections, log)
        # Guards what follows. Held while a result is published, so that nothing of an older epoch leaves after
        # `new_epoch` returned; never held during inference.
        self._lock = threading.RLock()
        self._model = threading.Lock()  # held during inference and warm-up
        self.epoch = 0
        self.sequence = 0
        self.queries = 0
        self.repeats = 0
        self.total_queries = self.total_writes = 0  # over all epochs
        self.instruction = config.instruction
        self.enabled = config.enabled_at_start
        self.active = False
        self.fault, self._stops = "", 0  # stops: how often what is in flight was to be withheld
        self.hold = Hold("waiting for observations", missing=True)
        self._rejected: Hold | None = None
        self._episode: Episode | None = None
        self._resumed: Episode | None = None  # of a restored memory, until it is announced again
        self.answered_at = -math.inf  # steady clock, seconds
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="policy-worker", daemon=True)
        self._begin_epoch()

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
            saved = self._begin_epoch(None if state is None else Saved(state, self._episode))
            epoch = self.epoch
        self._epoch_began(why)
        self._life.keep(saved, epoch, 0)  # the lock is free: nobody waits for the disk
        return epoch

    def _begin_epoch(self, saved: Saved | None = None) -> Saved:
        """Start an epoch with a state; None: an empty one. The lock is held."""
        # Unique over restarts: nanoseconds of the system clock, and never the same twice.
        self.epoch = max(time.time_ns(), self.epoch + 1)
        self.sequence = self.queries = self.repeats = 0
        self._lockstep.clear()
        self.realtime.clear()
        self._rejected = None
        return self._life.begin(saved, self._episode)

    def _epoch_began(self, why: str) -> None:
        self._log.info(f"new epoch {self.epoch}: {why}")
        self._on_epoch()
        self.wake()

    def warm_up(self) -> None:
        """Check and warm the model, after a query that is still under way."""
        with self._model:
            self.policy.warm_up(self.instruction.strip() or None)

    def read_saved(self) -> Saved | None:
        """What to activate with; None: an empty memory. Raises UserError for a file that cannot be right."""
        saved = self._life.read_saved()
        if saved is not None and self.config.reset == "episode" and saved.is_before(self._episode):
            self._log.info(
                f"{self.config.memory__autosave} is of an episode that ended: the memory begins empty"
            )
            return None
        return saved

    def set_active(self, active: bool, saved: Saved | None = None) -> None:
        """Begin, with an empty memory or what `read_saved` gave, or end inference; a chunk in flight is discarded.

        The file of the memory stays as it is: it is for the next activation.
        """
        with self._lock:
            self.active = active
            self.hold = Hold("waiting for observations", missing=True)
            self.inputs.streams.clear()
            self._begin_epoch(saved)
            why = "activated" if active else "deactivated"
            if saved is not None:
                why += f" with the memory in {self.config.memory__autosave}"
                if not saved.is_before(self._episode):
                    self._go_on_from(saved)
            self._epoch_began(why)

    def _go_on_from(self, saved: Saved) -> None:
        """Answer the last observation again instead of stepping on it: its chunk may not have arrived."""
        self._resumed = saved.episode
        if saved.stamp_ns is None:
            return
        answer = None
        if saved.chunk is not None:
            chunk = ActionChunk(saved.chunk, self.policy.backbone.info.action, saved.stamp_ns)
            answer = Restored(chunk, self.epoch, self.sequence)
            self.sequence += 1
        self._lockstep.answered(saved.stamp_ns, answer)
        self._lockstep.allow_gap()  # whoever sends observations may not have waited

    def set_enabled(self, enabled: bool) -> None:
        """The operator's switch. Off: also the chunk in flight is withheld."""
        with self._lock:
            self.enabled, self._stops = enabled, self._stops + (not enabled)
        self.wake()

    def set_instruction(self, instruction: str) -> None:
        """From the next query on."""
        self.instruction = instruction
        self.wake()

    def apply(self, config: PolicyNodeConfig) -> None:
        """Use the run-time parameters of a configuration from the next memory step on, all of them.

        Raises UserError, nothing changed, for what this policy cannot do.
        """
        with self._lock:
            self._life.apply(config)
            self.config = config

    def emergency_stop(self) -> None:
        """Latch the fault that withholds everything, also the chunk in flight."""
        with self._lock:
            self.fault, self._stops = EMERGENCY_STOP, self._stops + 1

    def episode_started(self, stamp_ns: int, *identity: object) -> None:
        """An episode whose first observation has this stamp; the same one again changes nothing.

        identity: what else tells it from others, since every run of a simulator may begin at the same stamp.
        """
        with self._lock:
            known = (stamp_ns, identity) in (self._episode, self._resumed)
            self._episode, self._resumed = (stamp_ns, identity), None
            if known:
                self.wake()
                return
            # What is left of the episode before must not be the first observation of this one.
            self.inputs.streams.clear()
            if self.config.reset == "never":
                # Every run of a simulator begins at the same stamp: the memory stays, what was answered goes.
                self._lockstep = Lockstep(self.step_ns)
                self.wake()
                return
            saved, epoch = self._begin_epoch(), self.epoch
        self._epoch_began("episode started")
        if self.active:  # else it may be the episode that the file's state belongs to
            self._life.keep(saved, epoch, 0)

    def episode_finished(self) -> None:
        """No observation belongs to an episode until the next one starts."""
        with self._lock:
            self._episode = self._resumed = None

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
            state, epoch = self._life.saved.state, self.epoch
        self._life.write_to(path, state, epoch)
        return epoch

    def load_state(self, path: str) -> int:
        """Start a new epoch with a saved memory state; returns the epoch. Raises UserError."""
        return self.new_epoch(f"memory state loaded from {path}", self._life.read_from(path))

    # -- the worker's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        streams, seen = self.inputs.streams, -1
        while not self._stopping:
            with streams.changed:
                if streams.version == seen:
                    # The time-out is for real time, where time alone makes an observation due or stale.
                    streams.changed.wait(self.realtime.wait_s() if self.config.mode == "realtime" else 0.1)
                seen = streams.version
            try:
                self._look()
            except Exception as error:
                # A model that raises is a fault to be shown and mended, not a dead thread.
                self._latch(f"{type(error).__name__}: {error}", error)

    def _latch(self, fault: str, error: BaseException | None = None) -> None:
        fault = " ".join(fault.split())
        if self._stopping:
            return  # the model may be closed under a query that nobody waits for
        with self._lock:
            if self.fault != EMERGENCY_STOP:
                self.fault = fault
        self._log.error(f"fault: {fault}", exc=error)

    def _look(self) -> None:
        # In lockstep the observations' stamps say whether time went back, whatever order topics come in.
        watched = self.active and self.config.mode == "realtime"
        if watched and (back := self.realtime.clock_went_back_by()):
            self.inputs.streams.clear()
            self.rejections.add("clock went back")
            self.new_epoch(f"the clock went back by {back / NS:.3f} s")
        if not self.active or not self.enabled or self.fault:
            return
        epoch, lockstep = self.epoch, self._lockstep
        chosen = self._choose(epoch)
        if isinstance(chosen, Ready):
            self._step(chosen, epoch, lockstep)
            return
        if chosen.cause and chosen.cause != self.hold.cause:
            self.rejections.add(chosen.cause)
        if self._rejected is not None and (chosen.missing or not chosen.reason):
            # A rejected message stays the reason until a good one comes.
            chosen = self._rejected
        self.hold = chosen

    def _choose(self, epoch: int) -> Ready | Hold:
        """The observation to infer on now, or why there is none. Sends repeats on the way."""
        if not self._listening():
            return Hold(f"waiting for {self.config.wait_for_recorder} to listen", missing=True)
        if not self.instruction.strip():
            return Hold("waiting for an instruction", missing=True)
        if self.config.mode == "realtime":
            return self.realtime.choose(self.config, epoch)
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
                elif self._may_leave():
                    self.repeats += 1
                    self._repeat(self._lockstep.answer)
                return Hold("")
        if verdict is Verdict.JUMP_BACK:
            self.rejections.add("clock went back")
            self.new_epoch(f"an observation of stamp {ready.stamp_ns / NS:.3f} s came after a later one")
            return Hold("")  # taken at the next look, as the first of its epoch
        return ready

    def _step(self, ready: Ready, epoch: int, lockstep: Lockstep) -> None:
        with self._lock:
            if epoch != self.epoch or lockstep is not self._lockstep:
                return  # chosen for an epoch or an episode that has ended since
            instruction, stops = self.instruction, self._stops
            self._life.take()
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
            if self._outdated(epoch):
                return
            self.latency_ms.add(elapsed_ms)
            result = self._life.stepped(step, ready.stamp_ns, epoch, self.sequence, self._episode)
            self.sequence += 1
            self.queries += 1
            self.total_queries += 1
            self.total_writes += result.memory_step.written_bytes > 0
            # Also without a chunk the stamp is used up: the memory has seen it.
            lockstep.answered(ready.stamp_ns, None)
            saved = self._life.saved
        # Before the chunk leaves: whoever has it may rely on the memory that goes with it. The lock is free meanwhile.
        self._life.keep(saved, epoch, result.steps)
        with self._lock:
            if self._outdated(epoch):
                return
            self.answered_at = time.monotonic()
            self.realtime.answered(self.latency_ms.percentiles(95)[0])
            # With `reset: never` an episode may have begun meanwhile: it gets the memory step, not the chunk.
            leaves = self._may_leave() and lockstep is self._lockstep and stops == self._stops
            lockstep.answer = self._publish(result, leaves)
            self.overhead_ms.add(self.realtime.waited_ms(ready) - elapsed_ms)
            if isinstance(step, ActionRejected):
                self._latch(str(step))

    def _outdated(self, epoch: int) -> bool:
        """Whether what was inferred for an epoch must not leave any more; then it is counted. The lock is held."""
        if epoch == self.epoch and self.active and not self._stopping:
            return False
        self.rejections.add("chunk of an older epoch discarded")
        return True

    def _may_leave(self) -> bool:
        """Whether chunks may be published; the lock is held."""
        return self.active and self.enabled and not self.fault and not self.config.shadow

    def _reject(self, reason: str) -> None:
        reason = " ".join(reason.split())
        count = self.rejections.add(without_numbers(reason.split(";")[0]))
        self.hold = self._rejected = Hold(reason)
        if count == 1:
            self._log.warning(f"observation rejected: {reason}")
