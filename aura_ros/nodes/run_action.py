"""The action `run_policy`: one instruction, run until it is cancelled, its time is over, or something is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.clock import Clock, ClockType
from rclpy.node import Node
from rclpy.task import Future

from aura_ros.action import RunPolicy
from aura_ros.nodes.conversions import NS, to_ns
from aura_ros.nodes.policy_worker import PolicyWorker

CHECK_S = 0.1
FEEDBACK_S = 0.5


@dataclass
class _Run:
    """A goal under way. queries, writes: the worker's counts when it began. ends_at, fed_at: steady clock, seconds."""

    handle: Any
    worker: PolicyWorker
    enabled_before: bool
    queries: int
    writes: int
    ends_at: float | None
    fed_at: float
    # How the goal ends (a method's name of the goal handle) and its result.
    ending: Future[tuple[str, Any]] = field(default_factory=Future)
    stopped: bool = False

    async def execute(self, handle: Any) -> Any:
        """Wait, the executor going on meanwhile, for the end."""
        ended = await self.ending
        assert ended is not None
        how, result = ended
        getattr(handle, how)()
        return result

    def counts(self, kind: Any) -> Any:
        """A feedback or result with the queries and writes since the goal began."""
        return kind(
            queries=self.worker.total_queries - self.queries, writes=self.worker.total_writes - self.writes
        )

    def stop(self, instruction: str) -> None:
        """Give back what the goal changed: nothing of it is inferred or leaves from here on."""
        if self.stopped:
            return
        self.stopped = True
        enabled = self.worker.enabled and self.enabled_before  # who disabled meanwhile meant it
        self.worker.set_enabled(False)
        self.worker.set_instruction(instruction)
        if enabled:
            # What is in flight answers the goal's instruction, and so does the memory.
            self.worker.new_epoch("run_policy ended")
            self.worker.set_enabled(True)


class RunAction:
    """Serves `run_policy` on a single-threaded executor: no callback waits, a timer looks whether the goal is over.

    worker: the one of now, if any. instruction: what to return to when a goal ends.
    """

    def __init__(self, node: Node, worker: Callable[[], PolicyWorker | None], instruction: Callable[[], str]):
        self._log, self._worker, self._instruction = node.get_logger(), worker, instruction
        self._run: _Run | None = None
        # By the steady clock: a goal ends in time also when simulated time stands still.
        self._timer = node.create_timer(CHECK_S, self.check, clock=Clock(clock_type=ClockType.STEADY_TIME))
        self._timer.cancel()
        self._server = ActionServer(
            node,
            RunPolicy,
            "run_policy",
            execute_callback=lambda handle: RunPolicy.Result(),  # never: each goal brings its own
            goal_callback=self._judge,
            handle_accepted_callback=self._begin,
            cancel_callback=self._cancel,
        )

    @property
    def running(self) -> bool:
        """Whether a goal's instruction is the one that counts."""
        return self._run is not None

    def check(self) -> None:
        """End the goal if it is over; else say how it goes, twice a second."""
        run = self._run
        if run is None:
            return
        now, reason = time.monotonic(), self._broken(run)
        if run.handle.is_cancel_requested:
            self._end("canceled", False, "cancelled")
        elif reason:
            self._end("abort", False, reason)
        elif run.ends_at is not None and now >= run.ends_at:
            self._end("succeed", True, "timeout")
        elif now >= run.fed_at + FEEDBACK_S:
            run.fed_at = now
            feedback = run.counts(RunPolicy.Feedback)
            feedback.queue_depth = run.worker.realtime.queue_depth(run.worker.epoch)
            run.handle.publish_feedback(feedback)

    def close(self, reason: str) -> None:
        """Abort the goal, if there is one, for a reason of the node's own."""
        if self._run is not None:
            self._end("abort", False, reason)

    def destroy(self) -> None:
        """Take the action off the graph."""
        self._server.destroy()

    def _judge(self, goal: RunPolicy.Goal) -> GoalResponse:
        worker = self._worker()
        reason = ""
        if worker is None or not worker.active:
            reason = "the policy is not active; configure and activate it"
        elif worker.fault:
            reason = f"there is a fault ({worker.fault}); call ~/clear_fault"
        elif self._run is not None:
            reason = "another goal is under way; cancel it first"
        elif not goal.instruction.strip():
            reason = "its instruction is empty; give one"
        elif to_ns(goal.timeout) < 0:
            reason = f"its timeout is {to_ns(goal.timeout) / NS:g} s; give 0 (until cancelled) or more"
        if reason:
            self._log.warning(f"run_policy: goal '{goal.instruction}' rejected: {reason}")
            return GoalResponse.REJECT
        return GoalResponse.ACCEPT

    def _begin(self, handle: Any) -> None:
        worker, goal, now = self._worker(), handle.request, time.monotonic()
        assert worker is not None
        ends_at = now + to_ns(goal.timeout) / NS if to_ns(goal.timeout) else None
        enabled_before = worker.enabled
        worker.set_instruction(goal.instruction)
        worker.new_epoch(f"run_policy: '{goal.instruction}'")  # what is in flight is not about it
        self._run = _Run(
            handle, worker, enabled_before, worker.total_queries, worker.total_writes, ends_at, now
        )
        worker.set_enabled(True)
        self._timer.reset()
        handle.execute(self._run.execute)

    def _cancel(self, handle: Any) -> CancelResponse:
        if self._run is None or handle != self._run.handle:
            return CancelResponse.REJECT
        # At once; that the goal is cancelled is said at the next check, when rclpy knows it too.
        self._run.stop(self._instruction())
        return CancelResponse.ACCEPT

    def _broken(self, run: _Run) -> str:
        """Why the goal cannot go on; empty: it can."""
        if self._worker() is not run.worker or not run.worker.active:
            return "deactivated"
        return run.worker.fault or ("" if run.worker.enabled else "disabled by ~/enable")

    def _end(self, how: str, success: bool, message: str) -> None:
        run, self._run = self._run, None
        assert run is not None
        self._timer.cancel()
        epoch = run.worker.epoch
        run.stop(self._instruction())
        # One that came after the goal was cancelled is for now.
        run.worker.set_instruction(self._instruction())
        result = run.counts(RunPolicy.Result)
        result.success, result.message, result.epoch = success, message, epoch
        self._log.info(f"run_policy ended: {message}, {result.queries} queries, {result.writes} writes")
        run.ending.set_result((how, result))
