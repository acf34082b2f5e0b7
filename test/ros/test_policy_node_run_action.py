"""The action run_policy: how a goal begins, what it reports, and each of its ends."""

import signal
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("aura_ros.msg", reason="the messages are not built")

from action_msgs.msg import GoalStatus
from aura_ros.action import RunPolicy
from aura_ros.msg import ChunkState, PolicyStatus
from builtin_interfaces.msg import Duration
from lifecycle_msgs.msg import Transition
from policy_driver import LOCKSTEP, Driver, loop, make_policy, stamp_of
from rclpy.action import ActionClient
from std_msgs.msg import Bool

from aura_ros.nodes import qos

ABORTED, CANCELED, SUCCEEDED = (
    GoalStatus.STATUS_ABORTED,
    GoalStatus.STATUS_CANCELED,
    GoalStatus.STATUS_SUCCEEDED,
)


class Planner:
    """What a task planner does with the action."""

    def __init__(self, running):
        self._ros, self.feedback = running.ros, []
        self._client = ActionClient(running.driver.node, RunPolicy, "run_policy")
        self._ros.spin_until(self._client.server_is_ready, what="the action")

    def ask(self, instruction="open the drawer", timeout_s=0.0):
        """Send a goal; its handle, accepted or not."""
        timeout = Duration(sec=int(timeout_s // 1), nanosec=int(timeout_s % 1 * 1e9))
        goal = RunPolicy.Goal(instruction=instruction, timeout=timeout)
        future = self._client.send_goal_async(
            goal, feedback_callback=lambda m: self.feedback.append(m.feedback)
        )
        self._ros.spin_until(future.done, what="the answer to the goal")
        return future.result()

    def end(self, handle):
        """Wait for the goal's end: its status and result."""
        future = handle.get_result_async()
        self._ros.spin_until(future.done, what="the goal's result")
        return future.result().status, future.result().result

    def cancel(self, handle):
        future = handle.cancel_goal_async()
        self._ros.spin_until(future.done, what="the answer to the cancellation")
        return len(future.result().goals_canceling)


@pytest.fixture
def running(ros):
    """As on a robot: active, and nothing inferred until someone asks."""
    return loop(ros, enabled_at_start=False)


def test_a_goal_runs_its_instruction_in_a_new_epoch_and_a_timeout_is_its_successful_end(running):
    driver, worker, planner = running.driver, running.worker, Planner(running)
    before, instruction = worker.epoch, worker.instruction
    handle = planner.ask("open the drawer", timeout_s=1.2)
    assert handle.accepted
    assert worker.instruction == "open the drawer"
    chunks = [driver.query(index) for index in range(3)]
    assert {chunk.epoch for chunk in chunks} == {worker.epoch}
    assert worker.epoch > before
    status, result = planner.end(handle)
    assert (status, result.success, result.message) == (SUCCEEDED, True, "timeout")
    assert (result.epoch, result.queries) == (worker.epoch, 3)
    assert result.writes == driver.gates[-1].writes
    assert (worker.enabled, worker.instruction) == (False, instruction)
    driver.send(stamp_of(3))
    driver.wait_for_state(PolicyStatus.DISABLED)
    assert len(driver.chunks) == 3


def test_feedback_tells_queries_writes_and_the_queue_twice_a_second(running):
    driver, planner = running.driver, Planner(running)
    player = driver.node.create_publisher(ChunkState, "chunk_state", qos.RELIABLE)
    assert running.node.set_parameters_atomically([])  # nothing to set is no mistake
    handle = planner.ask()
    begin = time.monotonic()
    driver.query(0)

    def told():
        player.publish(ChunkState(epoch=running.worker.epoch, rows_left=6))
        return len(planner.feedback) >= 3

    running.ros.spin_until(told, what="feedback")
    assert time.monotonic() - begin > 1.0
    last = planner.feedback[-1]
    assert (last.queries, last.writes, last.queue_depth) == (1, driver.gates[-1].writes, 6)
    planner.cancel(handle)


def test_a_cancelled_goal_stops_at_once_and_says_what_was_done(running, monkeypatch):
    driver, worker, planner = running.driver, running.worker, Planner(running)
    handle = planner.ask("open the drawer")
    driver.query(0)
    act, entered, release = worker.policy.act, threading.Event(), threading.Event()

    def slow(observation):
        entered.set()
        assert release.wait(30)
        return act(observation)

    monkeypatch.setattr(worker.policy, "act", slow)
    driver.send(stamp_of(1))
    running.ros.spin_until(entered.is_set, what="inference")
    assert planner.cancel(handle) == 1
    release.set()
    status, result = planner.end(handle)
    assert (status, result.success, result.message) == (CANCELED, False, "cancelled")
    assert result.queries >= 1
    running.ros.spin_for(0.3)
    assert len(driver.chunks) == 1, "the chunk in flight was of the cancelled goal"
    assert not worker.enabled
    assert planner.cancel(handle) == 0
    assert planner.ask().accepted, "the next goal may come"


def test_an_enabled_policy_goes_on_with_its_own_instruction_after_a_goal(ros):
    running = loop(ros)
    driver, worker, planner = running.driver, running.worker, Planner(running)
    handle = planner.ask("open the drawer")
    goal = driver.query(0)
    driver.instruct("wipe the table")  # meanwhile: it is for afterwards
    ros.spin_until(lambda: running.node._instruction == "wipe the table", what="the instruction")
    assert worker.instruction == "open the drawer"
    planner.cancel(handle)
    planner.end(handle)
    assert (worker.enabled, worker.instruction) == (True, "wipe the table")
    after = driver.query(1)
    assert after.epoch > goal.epoch
    assert worker.policy.memory.steps == 1, "a memory of the goal is no memory of this task"


def test_goals_that_cannot_run_are_rejected_with_a_logged_reason(ros, capfd):
    driver = Driver(ros)
    node = make_policy(ros, start=False, **(LOCKSTEP | {"enabled_at_start": False}))
    planner = Planner(SimpleNamespace(ros=ros, driver=driver))
    log = ""

    def rejected(reason, *goal):
        nonlocal log
        assert not planner.ask(*goal).accepted
        log += capfd.readouterr().err
        return f"rejected: {reason}" in log

    assert rejected("the policy is not active")
    node.trigger_configure()
    assert rejected("the policy is not active; configure and activate it")
    node.trigger_activate()
    assert rejected("its instruction is empty", "  ")
    assert rejected("its timeout is -1 s", "go", -1.0)
    first = planner.ask()
    assert first.accepted
    assert rejected("another goal is under way; cancel it first", "another")
    assert node.worker.instruction == "open the drawer"
    planner.cancel(first)
    planner.end(first)
    stop = driver.node.create_publisher(Bool, "estop", qos.RELIABLE)
    ros.spin_until(lambda: stop.get_subscription_count() > 0)
    stop.publish(Bool(data=True))
    ros.spin_until(lambda: node.worker.fault != "", what="the fault")
    assert rejected("there is a fault (emergency stop); call ~/clear_fault")


def fault(running):
    def broken(_):
        raise ZeroDivisionError("division by zero")

    running.worker.policy.act = broken
    running.driver.send(stamp_of(0))


def emergency(running):
    stop = running.driver.node.create_publisher(Bool, "estop", qos.RELIABLE)
    running.ros.spin_until(lambda: stop.get_subscription_count() > 0)
    stop.publish(Bool(data=True))


def deactivation(running):
    # And active again before any timer could have looked.
    running.node.trigger_deactivate()
    running.node.trigger_activate()


def operator(running):
    assert running.driver.call("enable", data=False).success


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (fault, "ZeroDivisionError: division by zero"),
        (emergency, "emergency stop"),
        (deactivation, "deactivated"),
        (operator, "disabled by ~/enable"),
    ],
)
def test_what_ends_inference_aborts_the_goal_with_the_reason(running, event, message):
    planner = Planner(running)
    handle = planner.ask()
    event(running)
    status, result = planner.end(handle)
    assert (status, result.success, result.message) == (ABORTED, False, message)
    assert not running.worker.enabled
    assert running.worker.instruction == "put the cup on the plate"


def test_a_fault_that_is_cleared_at_once_still_aborts_the_goal(running):
    planner = Planner(running)
    handle = planner.ask()
    running.worker._latch("the model raised")
    assert running.driver.call("clear_fault").success
    status, result = planner.end(handle)
    assert (status, result.message) == (ABORTED, "the model raised")


def test_who_disables_during_a_goal_is_not_overruled_by_its_end(ros):
    running = loop(ros)  # enabled before the goal
    planner = Planner(running)
    handle = planner.ask()
    assert running.driver.call("enable", data=False).success
    planner.end(handle)
    assert not running.worker.enabled


def test_counts_go_on_over_a_reset_during_the_goal(running):
    driver, planner = running.driver, Planner(running)
    handle = planner.ask()
    driver.query(0)
    assert driver.call("reset").success
    driver.query(0)
    driver.query(1)
    planner.cancel(handle)
    _, result = planner.end(handle)
    assert (result.queries, result.epoch) == (3, running.worker.epoch)


def test_the_executor_serves_others_while_a_goal_runs(running):
    planner = Planner(running)
    planner.ask()
    begin = time.monotonic()
    for _ in range(5):
        assert running.driver.call("clear_fault").success
    assert time.monotonic() - begin < 5.0


def test_an_interrupt_ends_the_goal_and_the_process_quietly(ros, start_process):
    driver = Driver(ros)
    process = start_process("policy_node", "--ros-args", "-p", "mode:=lockstep")
    assert driver.transition(Transition.TRANSITION_CONFIGURE)
    assert driver.transition(Transition.TRANSITION_ACTIVATE)
    planner = Planner(SimpleNamespace(ros=ros, driver=driver))
    handle = planner.ask()
    future = handle.get_result_async()
    ros.spin_until(lambda: len(planner.feedback) > 0, what="feedback: by then it knows who waits")
    process.send_signal(signal.SIGINT)
    ros.spin_until(future.done, what="the goal's result")
    ended = future.result()
    assert (ended.status, ended.result.message) == (ABORTED, "stopping")
    assert process.wait() == 0, process.output
    assert "Traceback" not in process.output
