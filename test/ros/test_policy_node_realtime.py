"""Real time: the newest fresh observation at the memory's own period, and never anything else."""

import time

import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("aura_ros.msg", reason="the messages are not built")

from aura_ros.msg import PolicyStatus
from policy_driver import NS, REALTIME, START_NS, STREAMS, header_of, loop, rejected
from rclpy.qos import qos_profile_sensor_data

# Simulated time moves only when a test says so, thus what is stale does not depend on the machine. These ages
# are long, so that the steady clock beside it stays out of the way where it isn't the matter.
LONG = {"image_max_age": 20.0, "proprio_max_age": 20.0, "max_skew": 1.0}
T0 = START_NS
SENSOR = {"sensor_qos": qos_profile_sensor_data}


def running_at(ros, stamp_ns, **parameters):
    running = loop(ros, **(REALTIME | LONG | parameters), driver_options=SENSOR)
    set_clock(running, stamp_ns)
    return running


def set_clock(running, stamp_ns):
    def told():
        running.driver.clock(stamp_ns)
        return running.node.get_clock().now().nanoseconds == stamp_ns

    running.ros.spin_until(told, what="the simulated time")


def test_best_effort_publishers_are_heard_and_the_chunk_has_the_oldest_stamp(ros):
    running = running_at(ros, T0 + NS // 10)
    messages = running.driver.messages(T0 + NS // 20)
    chunk = running.driver.ask(T0, images__agentview=messages["images/agentview"])
    assert header_of(chunk) == T0
    running.driver.wait_for_state(PolicyStatus.RUNNING)


def test_a_stale_image_holds_naming_the_stream_until_it_is_fresh_again(ros):
    running = running_at(ros, T0)
    driver = running.driver
    driver.ask(T0)
    later = T0 + 21 * NS
    set_clock(running, later)
    driver.send(later, leave_out="images/wrist")
    status = driver.wait_for_state(PolicyStatus.HOLDING, "images/wrist is 21.000 s old; allowed: 20.000 s")
    assert rejected(status)["images/wrist too old"] == 1
    ros.spin_for(0.5)  # the hold goes on, and is one
    steps = running.worker.policy.memory.steps
    assert rejected(driver.wait_for_state(PolicyStatus.HOLDING))["images/wrist too old"] == 1
    driver.send(later)
    driver.wait_for_state(PolicyStatus.RUNNING)
    ros.spin_until(lambda: header_of(driver.chunks[-1]) == later, what="a chunk for the fresh observation")
    assert running.worker.policy.memory.steps > steps
    assert all(header_of(chunk) in (T0, later) for chunk in driver.chunks)


def test_stale_proprioception_holds_by_its_own_limit(ros):
    running = running_at(ros, T0, proprio_max_age=10.0)
    running.driver.ask(T0)
    set_clock(running, T0 + 11 * NS)
    running.driver.wait_for_state(PolicyStatus.HOLDING, "ee_pose is 11.000 s old; allowed: 10.000 s")


def test_a_stamp_from_the_future_holds(ros):
    running = running_at(ros, T0)
    future = running.driver.messages(T0 + NS // 5)["joint_states"]
    running.driver.send(T0, joint_states=future)
    status = running.driver.wait_for_state(
        PolicyStatus.HOLDING, "joint_states is stamped 0.200 s in the future"
    )
    assert rejected(status) == {"joint_states in the future": 1}
    assert not running.driver.chunks
    running.driver.ask(T0)


def test_streams_too_far_apart_hold_and_count_as_one_reason(ros):
    running = running_at(ros, T0 + 5 * NS)
    driver = running.driver
    for apart in (2, 3):
        old = driver.messages(T0 + (5 - apart) * NS)["ee_pose"]
        driver.send(T0 + 5 * NS, ee_pose=old)
        status = driver.wait_for_state(
            PolicyStatus.HOLDING, f"streams are {apart}.000 s apart; allowed: 1.000 s"
        )
    assert rejected(status) == {"streams too far apart": 1}
    assert not driver.chunks


@pytest.mark.parametrize("missing", STREAMS)
def test_a_missing_stream_is_never_zero_filled(ros, missing):
    running = running_at(ros, T0)
    running.driver.send(T0, leave_out=missing)
    status = running.driver.wait_for_status(
        lambda s: s.state == PolicyStatus.WAITING and s.reason == f"waiting for {missing}"
    )
    age = dict(zip(status.streams, status.stream_age_ms, strict=True))
    assert age[missing] == -1.0
    assert not running.driver.chunks
    assert running.worker.policy.memory.steps == 0


def test_silence_is_noticed_though_the_simulated_clock_stands_still(ros):
    running = running_at(ros, T0, image_max_age=1.0, proprio_max_age=1.0)
    running.driver.ask(T0)
    status = running.driver.wait_for_state(PolicyStatus.HOLDING, "has been silent for")
    assert status.reason.startswith("images/agentview has been silent")
    assert rejected(status)["images/agentview silent"] == 1
    chunks = len(running.driver.chunks)
    ros.spin_for(0.5)
    assert len(running.driver.chunks) == chunks


def test_a_clock_that_goes_back_clears_memory_and_observations(ros):
    running = running_at(ros, T0 + 10 * NS)
    driver = running.driver
    old = driver.ask(T0 + 10 * NS)
    set_clock(running, T0)
    ros.spin_until(lambda: running.worker.epoch > old.epoch, what="the new epoch")
    driver.wait_for_rejection("clock went back")
    driver.wait_for_state(PolicyStatus.WAITING, "waiting for images/agentview, ")
    chunk = driver.ask(T0)
    assert (chunk.sequence, header_of(chunk)) == (0, T0)
    ros.spin_until(lambda: driver.gates[-1].epoch > old.epoch, what="the gate event")
    assert running.worker.policy.memory.steps == driver.gates[-1].step == 1


def test_the_memory_is_stepped_at_its_period_however_fast_frames_come(ros):
    running = running_at(ros, T0)
    driver = running.driver
    begin, frames = time.monotonic(), 0
    while len(driver.gates) < 4:
        assert time.monotonic() < begin + 30
        frames += 1
        set_clock(running, T0 + frames * NS // 1000)
        driver.send(T0 + frames * NS // 1000)
        ros.spin_for(0.01)
    assert frames > 2 * len(driver.gates)
    assert (len(driver.gates) - 1) * 0.4 <= time.monotonic() - begin
    stamps = [header_of(gate) for gate in driver.gates]
    assert stamps == sorted(set(stamps))
    assert driver.gates[-1].writes_per_second == pytest.approx(driver.gates[-1].write_rate / 0.4)


def test_an_incompatible_offer_is_logged_naming_the_topic(ros, capfd):
    running = loop(ros)
    running.driver.node.create_publisher(
        type(running.driver.messages(0)["ee_pose"]), "ee_pose", qos_profile_sensor_data
    )
    err = ""

    def logged():
        nonlocal err
        err += capfd.readouterr().err
        return "incompatible QoS" in err

    ros.spin_until(logged, what="the warning")
    assert "ee_pose" in err
    assert "RELIABILITY" in err


def test_a_robot_without_simulated_time_runs_by_the_system_clock(ros):
    running = loop(ros, **(REALTIME | LONG | {"use_sim_time": False}), driver_options=SENSOR)
    now = time.time_ns()
    assert header_of(running.driver.ask(now)) == now


def test_the_same_messages_are_never_used_twice_however_short_the_period_and_newer_ones_are(ros):
    running = running_at(ros, T0, memory_step_period=1)  # 0.05 s, less than a spin of the node's executor
    driver, memory = running.driver, running.worker.policy.memory
    driver.ask(T0)
    ros.spin_for(0.5)
    assert len(driver.chunks) == memory.steps == 1
    # One stream that is newer makes a new observation.
    newer = driver.messages(T0 + 1000, seed=9)["images/wrist"]
    driver.publishers["images/wrist"].publish(newer)
    ros.spin_until(lambda: len(driver.chunks) == 2, what="a chunk about the new image")
    ros.spin_for(0.5)
    assert len(driver.chunks) == memory.steps == 2
    assert driver.chunks[1].data != driver.chunks[0].data
    assert set(running.worker.inputs.streams.names) == set(STREAMS)


@pytest.mark.parametrize("why", ["disabled", "fault"])
def test_a_clock_that_goes_back_while_nothing_is_inferred_clears_the_memory_too(ros, monkeypatch, why):
    running = running_at(ros, T0 + 10 * NS)
    driver, worker = running.driver, running.worker
    old = driver.ask(T0 + 10 * NS)
    if why == "disabled":
        assert driver.call("enable", data=False).success
        driver.wait_for_state(PolicyStatus.DISABLED)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(worker.policy, "act", lambda _: 1 / 0)
            driver.send(T0 + 10 * NS + 1000)
            driver.wait_for_state(PolicyStatus.FAULT)
    set_clock(running, T0)
    ros.spin_until(lambda: worker.epoch > old.epoch, what="the new epoch")
    assert driver.statuses[-1].state == (PolicyStatus.DISABLED if why == "disabled" else PolicyStatus.FAULT)
    # By the time that it goes on, the clock is past the last observation again.
    set_clock(running, T0 + 20 * NS)
    assert driver.call("clear_fault").success
    assert driver.call("enable", data=True).success
    chunk = driver.ask(T0 + 20 * NS)
    assert (chunk.sequence, chunk.epoch, worker.policy.memory.steps) == (0, worker.epoch, 1)
