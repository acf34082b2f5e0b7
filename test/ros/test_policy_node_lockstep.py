"""Lockstep: one memory step and one chunk per stamp, the same ones every time."""

import threading

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("aura_ros.msg", reason="the messages are not built")

from aura_ros.msg import ActionChunk, GateEvent, PolicyStatus
from policy_driver import START_NS, STEP_NS, Driver, header_of, loop, make_policy, rejected, stamp_of
from rclpy.lifecycle import TransitionCallbackReturn

from aura_ros.nodes import conversions, qos


@pytest.fixture
def running(ros):
    return loop(ros)


def held(policy, monkeypatch):
    """Make inference wait for `release`; `entered` says that it has begun."""
    act, entered, release = policy.act, threading.Event(), threading.Event()

    def slow(observation):
        entered.set()
        assert release.wait(30)
        return act(observation)

    monkeypatch.setattr(policy, "act", slow)
    return entered, release


def test_every_stamp_gets_one_chunk_and_one_gate_event(running):
    driver = running.driver
    chunks = [driver.query(index) for index in range(4)]
    assert len(driver.chunks) == 4
    running.ros.spin_until(lambda: len(driver.gates) == 4 and len(driver.bytes) == 4)
    assert [header_of(chunk) for chunk in chunks] == [stamp_of(index) for index in range(4)]
    assert [header_of(gate) for gate in driver.gates] == [stamp_of(index) for index in range(4)]
    assert [chunk.sequence for chunk in chunks] == [gate.sequence for gate in driver.gates] == [0, 1, 2, 3]
    assert [gate.step for gate in driver.gates] == [gate.steps for gate in driver.gates] == [1, 2, 3, 4]
    assert {gate.state_bytes for gate in driver.gates} == {byte.data for byte in driver.bytes} == {4224}
    assert {chunk.epoch for chunk in chunks} == {gate.epoch for gate in driver.gates}
    first = chunks[0]
    assert (first.horizon, len(first.names), len(first.data)) == (8, 7, 56)
    assert conversions.to_ns(first.period) == 50_000_000
    assert np.isfinite(first.data).all()


def test_a_repeated_stamp_gets_the_cached_chunk_without_a_second_memory_step(running):
    driver, memory = running.driver, running.worker.policy.memory
    driver.query(0)
    chunk = driver.query(1)
    # Another picture under the same stamp: only a cache can give the same numbers.
    for _ in range(2):
        again = driver.query(1, seed=99)
        assert again.data == chunk.data
        assert (again.sequence, again.epoch, again.published_at) == (1, chunk.epoch, chunk.published_at)
    running.ros.spin_until(lambda: len(driver.gates) == 2)
    assert memory.steps == 2
    status = driver.wait_for_status(lambda s: s.repeats == 2)
    assert status.queries == 2
    assert driver.query(2).sequence == 2
    assert memory.steps == 3
    running.ros.spin_until(lambda: len(driver.gates) == 3)


def test_between_two_observations_a_healthy_policy_is_running_and_only_later_waiting(running):
    driver = running.driver
    driver.query(0)
    assert driver.wait_for_status(lambda s: s.queries == 1).state == PolicyStatus.RUNNING
    driver.wait_for_state(PolicyStatus.WAITING, "waiting for images/agentview")


@pytest.mark.parametrize("lost", ["images/wrist", "ee_pose", "joint_states"])
def test_a_lost_message_is_waited_for_and_never_filled_in(running, lost):
    driver = running.driver
    driver.query(0)
    driver.send(stamp_of(1), leave_out=lost)
    driver.wait_for_status(
        lambda s: s.state == PolicyStatus.WAITING and s.reason == f"waiting for {lost}", "only one is missing"
    )
    assert len(driver.chunks) == running.worker.policy.memory.steps == 1
    assert driver.query(1).sequence == 1
    assert len(driver.chunks) == running.worker.policy.memory.steps == 2


def test_same_inputs_give_the_same_chunks(ros):
    def run(name):
        running = loop(ros, driver_options={"namespace": name}, namespace=name)
        for index in range(4):
            running.driver.query(index)
        return [(c.data.tobytes(), c.sequence, header_of(c)) for c in running.driver.chunks]

    first = run("/first")
    assert len({data for data, _, _ in first}) == 4
    assert run("/second") == first


def test_an_observation_before_the_episode_starts_waits(ros):
    running = loop(ros)
    driver = running.driver
    driver.query(0)
    driver.finish_episode()
    ros.spin_until(lambda: running.worker._episode is None, what="the episode's end")
    driver.send(stamp_of(1))
    driver.wait_for_state(PolicyStatus.WAITING, "waiting for the episode's start")
    assert len(driver.chunks) == 1
    driver.start_episode(1, stamp_of(5))
    ros.spin_until(lambda: running.worker._episode is not None, what="the next episode")
    driver.send(stamp_of(1))  # late, of the episode before
    driver.wait_for_state(PolicyStatus.WAITING, "waiting for the episode's start")
    assert driver.query(5).sequence == 0
    assert len(driver.chunks) == 2


def test_a_new_episode_clears_the_memory_and_starts_an_epoch(running):
    driver = running.driver
    first = [driver.query(index, seed=index) for index in range(2)]
    driver.start_episode(1, stamp_of(10))
    running.ros.spin_until(lambda: running.worker.epoch > first[0].epoch, what="the new epoch")
    second = [driver.query(10 + index, seed=index) for index in range(2)]
    assert {chunk.epoch for chunk in second} == {running.worker.epoch}
    assert [chunk.sequence for chunk in second] == [0, 1]
    running.ros.spin_until(lambda: len(driver.gates) == 4)
    assert [gate.step for gate in driver.gates] == [1, 2, 1, 2]
    assert [gate.state_norm for gate in driver.gates[2:]] == [gate.state_norm for gate in driver.gates[:2]]


def test_an_announcement_of_the_running_episode_again_changes_nothing(running):
    driver = running.driver
    first = driver.query(0)
    driver.start_episode()
    driver.start_episode(steps=8)
    assert driver.query(1).epoch == first.epoch
    assert running.worker.policy.memory.steps == 2


@pytest.mark.parametrize(
    "changed",
    [{"number": 9}, {"suite": "libero_object"}, {"task": 1}, {"init_state": 3}, {"seed": 8}],
    ids=lambda changed: next(iter(changed)),
)
def test_a_simulator_started_again_at_the_same_stamp_is_a_new_episode(running, changed):
    driver = running.driver
    first = driver.query(0)
    driver.clock(stamp_of(5))
    driver.query(1)
    # Killed: no end was announced, and time begins again.
    driver.clock(START_NS)
    driver.start_episode(**changed)
    running.ros.spin_until(lambda: running.worker.epoch > first.epoch, what="the new epoch")
    epoch = running.worker.epoch
    again = [driver.query(index) for index in range(2)]
    assert again[0].data == first.data
    assert [(chunk.sequence, chunk.epoch) for chunk in again] == [(0, epoch), (1, epoch)]


def test_reset_never_keeps_the_memory_over_an_episodes_start(ros):
    running = loop(ros, reset="never")
    driver = running.driver
    first = [driver.query(index) for index in range(2)]
    driver.finish_episode()
    # Every run of a simulator begins at the same stamp; a later one, after a pause, is as good.
    second = []
    for number, begin in ((1, 0), (2, 10)):
        driver.start_episode(number, stamp_of(begin))
        ros.spin_until(
            lambda n=number: (running.worker._episode or (0, (0,)))[1][0] == n, what="the next episode"
        )
        second += [driver.query(begin, seed=50 + number), driver.query(begin + 1)]
    chunks = first + second
    assert {chunk.epoch for chunk in chunks} == {running.worker.epoch}
    assert [chunk.sequence for chunk in chunks] == [0, 1, 2, 3, 4, 5]
    assert len({chunk.data.tobytes() for chunk in chunks if header_of(chunk) == START_NS}) == 2, "inferred"
    ros.spin_until(lambda: len(driver.gates) == 6, what="the gate events")
    assert [gate.step for gate in driver.gates] == [1, 2, 3, 4, 5, 6]
    assert running.worker.policy.memory.steps == 6
    assert not rejected(driver.wait_for_status(lambda s: s.queries == 6))


def test_a_stamp_that_goes_back_starts_an_epoch_with_an_empty_memory(running):
    driver = running.driver
    first = [driver.query(index) for index in range(3)]
    again = driver.query(0)
    assert again.epoch > first[0].epoch
    assert again.sequence == 0
    assert again.data == first[0].data
    assert running.worker.policy.memory.steps == 1
    assert rejected(driver.wait_for_rejection("clock went back")) == {"clock went back": 1}


def test_observations_at_another_period_are_a_fault_until_cleared(running):
    driver = running.driver
    first = driver.query(0)
    driver.send(START_NS + STEP_NS // 2)
    fault = driver.wait_for_state(PolicyStatus.FAULT)
    assert "0.200 s apart" in fault.reason
    assert "every 0.400 s" in fault.reason
    assert not fault.rejected_reasons
    driver.send(stamp_of(1))
    driver.wait_for_state(PolicyStatus.FAULT, "0.200 s apart")
    assert len(driver.chunks) == running.worker.policy.memory.steps == 1
    answer = driver.call("clear_fault")
    assert answer.success
    assert "0.200 s apart" in answer.message
    assert driver.query(2).epoch == first.epoch
    assert driver.call("clear_fault").message == "there was no fault"


def test_nothing_of_an_older_epoch_leaves_after_reset(running, monkeypatch):
    driver, worker = running.driver, running.worker
    old = driver.query(0)
    entered, release = held(worker.policy, monkeypatch)
    driver.send(stamp_of(1))
    running.ros.spin_until(entered.is_set, what="inference")
    answer = driver.call("reset")
    assert answer.success
    assert answer.message == f"epoch {worker.epoch}"
    assert worker.epoch > old.epoch
    release.set()
    driver.wait_for_rejection("chunk of an older epoch discarded")
    assert len(driver.chunks) == 1
    chunk = driver.query(1)
    assert (chunk.epoch, chunk.sequence) == (worker.epoch, 0)
    assert worker.policy.memory.steps == 1
    running.ros.spin_until(lambda: len(driver.gates) == 2)
    assert [gate.epoch for gate in driver.gates] == [old.epoch, worker.epoch]


def test_a_chunk_in_flight_is_withheld_when_disabled_and_sent_when_asked_again(running, monkeypatch):
    driver, worker = running.driver, running.worker
    driver.query(0)
    entered, release = held(worker.policy, monkeypatch)
    driver.send(stamp_of(1))
    running.ros.spin_until(entered.is_set, what="inference")
    assert driver.call("enable", data=False).message == "disabled"
    release.set()
    running.ros.spin_until(lambda: len(driver.gates) == 2, what="the gate event")
    driver.send(stamp_of(1))
    driver.wait_for_state(PolicyStatus.DISABLED, "~/enable")
    assert len(driver.chunks) == 1
    assert driver.call("enable", data=True).success
    chunk = driver.query(1)
    assert chunk.sequence == 1
    assert worker.policy.memory.steps == 2


def test_without_enabled_at_start_nothing_leaves_until_enabled(ros):
    running = loop(ros, enabled_at_start=False)
    driver = running.driver
    driver.send(stamp_of(0))
    driver.wait_for_state(PolicyStatus.DISABLED)
    assert not driver.chunks
    assert driver.call("enable", data=True).success
    assert driver.query(0).sequence == 0


def test_the_first_query_waits_for_an_instruction(ros):
    driver = Driver(ros)
    node = make_policy(ros, mode="lockstep", enabled_at_start=True, use_sim_time=True)
    driver.wait_for_policy()
    driver.start_episode()
    driver.instruct("  ")
    ros.spin_until(lambda: node.worker.instruction == "  " and node.worker._episode is not None)
    driver.send(stamp_of(0))
    driver.wait_for_state(PolicyStatus.WAITING, "waiting for an instruction")
    driver.instruct()
    ros.spin_until(lambda: len(driver.chunks) == 1, what="the chunk")


def test_stream_ages_are_told_between_observations(running):
    driver = running.driver
    driver.clock(stamp_of(0))
    driver.query(0)
    driver.clock(stamp_of(0) + 300_000_000)
    status = driver.wait_for_status(lambda s: len(s.stream_age_ms) == 4 and min(s.stream_age_ms) > 0)
    assert list(status.stream_age_ms) == [300.0] * 4


def test_policies_in_two_namespaces_do_not_mix(ros):
    left, right = (loop(ros, driver_options={"namespace": n}, namespace=n) for n in ("/left", "/right"))
    left.driver.query(0)
    assert left.driver.call("reset").success
    right.driver.query(0)
    right.driver.query(1)
    left.driver.query(0)
    for side, count in ((left, 2), (right, 2)):
        epochs = {chunk.epoch for chunk in side.driver.chunks}
        ros.spin_until(lambda d=side.driver, n=count: len(d.gates) >= n, what="the gate events")
        assert len(side.driver.chunks) == len(side.driver.gates) == count
        assert {gate.epoch for gate in side.driver.gates} == epochs
        assert side.worker.epoch in epochs
    assert right.worker.policy.memory.steps == 2
    assert left.worker.policy.memory.steps == 1
    names = {name for name, _ in left.node.get_topic_names_and_types()}
    assert {"/left/policy_node/gate", "/right/policy_node/gate"} <= names
    assert "/policy_node/gate" not in names


def test_the_first_query_waits_for_the_recorder_and_for_nobody_else(ros):
    """The driver listens to gate and chunks all the time, as `ros2 topic echo` would."""
    running = loop(ros, wait_for_recorder="gate_recorder")
    driver = running.driver
    driver.send(stamp_of(0))
    waiting = "waiting for gate_recorder to listen"
    driver.wait_for_state(PolicyStatus.WAITING, waiting)
    recorder = ros.node("gate_recorder")
    gates, chunks = [], []
    gate = recorder.create_subscription(GateEvent, "policy_node/gate", gates.append, qos.RELIABLE)
    driver.wait_for_state(PolicyStatus.WAITING, waiting)  # one of its topics is not enough
    driver.wait_for_state(PolicyStatus.WAITING, waiting)
    assert not driver.chunks
    recorder.create_subscription(ActionChunk, "action_chunk", chunks.append, qos.RELIABLE)
    ros.spin_until(lambda: len(driver.chunks) == 1, what="the chunk")
    ros.spin_until(lambda: len(gates) == len(chunks) == 1, what="the first messages at the recorder")
    # A recorder that dies is no reason to stop a robot.
    recorder.destroy_subscription(gate)
    assert driver.query(1).sequence == 1


def test_a_policy_that_waits_for_a_recorder_runs_beside_one_of_another_namespace(ros):
    running = loop(ros, wait_for_recorder="gate_recorder")
    other = ros.node("gate_recorder", namespace="/other")
    other.create_subscription(GateEvent, "policy_node/gate", lambda _: None, qos.RELIABLE)
    other.create_subscription(ActionChunk, "action_chunk", lambda _: None, qos.RELIABLE)
    running.driver.send(stamp_of(0))
    running.driver.wait_for_state(PolicyStatus.WAITING, "waiting for gate_recorder")
    ros.spin_for(0.5)
    assert not running.driver.chunks


def test_a_second_activation_during_a_slow_query_waits_for_it(running, monkeypatch):
    driver, node, policy = running.driver, running.node, running.worker.policy
    driver.query(0)
    entered, release = held(policy, monkeypatch)
    warm_up, warmed = policy.warm_up, []
    monkeypatch.setattr(policy, "warm_up", lambda text: (warmed.append(release.is_set()), warm_up(text)))
    driver.send(stamp_of(1))
    running.ros.spin_until(entered.is_set, what="inference")
    assert node.trigger_deactivate() == TransitionCallbackReturn.SUCCESS
    threading.Timer(0.3, release.set).start()
    assert node.trigger_activate() == TransitionCallbackReturn.SUCCESS
    assert warmed == [True]
    driver.start_episode(1)
    running.ros.spin_until(lambda: running.worker._episode[1][0] == 1, what="the episode")
    assert driver.query(0).sequence == 0
    assert policy.memory.steps == 1
    assert len(driver.chunks) == 2
