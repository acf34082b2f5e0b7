"""Parameters that change while the policy runs: all of a call or none, between memory steps, told in the gate events."""

import threading

import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("aura_ros.msg", reason="the messages are not built")

from aura_ros.msg import PolicyStatus
from policy_driver import REALTIME, START_NS, loop, make_policy, stamp_of
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.qos import qos_profile_sensor_data

from aura_ros.policy import loading

OTHER = {"namespace": "/other"}


def atomically(node, **values):
    names = [Parameter(name.replace("__", "."), value=value) for name, value in values.items()]
    return node.set_parameters_atomically(names)


def gates_of(running, count):
    running.ros.spin_until(lambda: len(running.driver.gates) >= count, what=f"{count} gate events")
    return running.driver.gates


def test_the_gate_s_mode_changes_at_run_time_and_every_event_tells_what_was_done(ros):
    running = loop(ros)
    driver, memory = running.driver, running.worker.policy.memory
    for index, mode in enumerate(("learned", "always", "always", "never", "never", "learned")):
        assert atomically(running.node, gate__mode=mode).successful
        driver.query(index)
    gates = gates_of(running, 6)
    assert [gate.fired for gate in gates[1:5]] == [True, True, False, False]
    assert [gate.bytes_written for gate in gates[1:5]] == [4096, 4096, 0, 0]
    assert [gates[i].writes - gates[i - 1].writes for i in range(1, 5)] == [1, 1, 0, 0]
    assert memory.writes == gates[-1].writes
    assert {gate.threshold for gate in gates} == {0.5}, "the gate's own, whatever is forced"
    assert all(0 < gate.probability < 1 for gate in gates)
    for gate in (gates[0], gates[5]):
        assert gate.fired == (gate.probability > gate.threshold)


def test_a_call_of_several_parameters_applies_as_a_whole_or_not_at_all(ros):
    running = loop(ros)
    node, worker = running.node, running.worker
    before = (node.config, worker.config, worker.policy.memory.threshold, worker.policy.config)
    refused = (
        ({"action_limit": -1.0}, "action_limit"),
        ({"gate__mode": "sometimes"}, "'sometimes' is not known; choose one of: learned, always, never"),
        ({"write_rate_window": 1.5}, "an integer"),
        ({"seed": 3}, "seed"),
        ({"use_sim_time": "yes"}, "type"),
    )
    for bad, reason in refused:
        answer = atomically(node, **({"gate__threshold": 0.25, "gate__mode": "always"} | bad))
        assert not answer.successful, bad
        assert reason in answer.reason
        assert (node.config, worker.config, worker.policy.memory.threshold, worker.policy.config) == before
        assert node.get_parameter("gate.threshold").value == -1.0
    assert atomically(
        node, gate__threshold=0.25, action_limit=3, write_rate_window=7, max_skew=0.5, image_max_age=1
    ).successful
    assert (worker.policy.memory.threshold, worker.policy.config.action_limit) == (0.25, 3.0)
    assert (worker.config.write_rate_window, worker.config.max_skew, worker.config.image_max_age) == (
        7,
        0.5,
        1.0,
    )
    assert worker.config is node.config


def test_a_change_during_inference_holds_for_its_memory_step_and_does_not_wait(ros, monkeypatch):
    running = loop(ros)
    infer = running.worker.policy.backbone.infer
    entered, release = threading.Event(), threading.Event()

    def slow(observation):
        entered.set()
        assert release.wait(30)
        return infer(observation)

    monkeypatch.setattr(running.worker.policy.backbone, "infer", slow)
    running.driver.send(stamp_of(0))
    ros.spin_until(entered.is_set, what="inference")
    assert atomically(running.node, gate__mode="always", gate__threshold=0.875).successful
    release.set()
    gate = gates_of(running, 1)[0]
    assert (gate.fired, gate.threshold, gate.writes) == (True, 0.875, 1)


def test_the_action_limit_changes_at_run_time(ros):
    running = loop(ros)
    running.driver.query(0)
    assert atomically(running.node, action_limit=0.01).successful
    running.driver.send(stamp_of(1))
    running.driver.wait_for_state(PolicyStatus.FAULT, "within +-0.01")
    assert len(running.driver.chunks) == 1
    assert atomically(running.node, action_limit=1.5).successful
    assert running.driver.call("clear_fault").success
    running.driver.query(2)


def test_the_write_rate_is_over_the_new_window_at_once(ros):
    running = loop(ros, gate__mode="always")
    for index in range(3):
        running.driver.query(index)
    assert atomically(running.node, gate__mode="never", write_rate_window=2).successful
    for index in (3, 4):
        running.driver.query(index)
    assert [gate.write_rate for gate in gates_of(running, 5)] == [1.0, 1.0, 1.0, 0.5, 0.0]


def test_a_freshness_limit_changes_at_run_time(ros):
    running = loop(
        ros,
        **(REALTIME | {"image_max_age": 20.0, "proprio_max_age": 20.0, "max_future": 0.05}),
        driver_options={"sensor_qos": qos_profile_sensor_data},
    )
    running.driver.clock(START_NS)
    running.driver.send(2 * START_NS)
    running.driver.wait_for_state(PolicyStatus.HOLDING, "in the future")
    assert atomically(running.node, max_future=2.0).successful
    ros.spin_until(lambda: len(running.driver.chunks) == 1, what="the chunk")


def test_a_budget_of_writes_is_held_and_its_threshold_is_told(ros):
    running = loop(ros, gate__threshold=0.0, gate__writes_per_second=0.25, write_rate_window=10)
    for index in range(12):
        running.driver.query(index)
    gates = gates_of(running, 12)
    assert gates[0].fired, "the budget begins whole"
    assert gates[9].writes == 1, "0.25 writes a second of 0.4 s steps are one in ten"
    assert gates[9].writes_per_second == pytest.approx(0.25)
    assert all(gate.fired == (gate.probability > gate.threshold) for gate in gates)
    assert atomically(running.node, gate__writes_per_second=0.0).successful
    for index in (12, 13):
        running.driver.query(index)
    assert [(gate.fired, gate.threshold) for gate in gates_of(running, 14)[12:]] == [(True, 0.0)] * 2


@pytest.mark.parametrize("parameter", [{"gate__mode": "never"}, {"gate__writes_per_second": 1.0}])
def test_a_gate_that_the_memory_has_not_is_refused_at_configure_and_at_run_time(ros, monkeypatch, parameter):
    """A memory without fast weights has no write to force, and no threshold to hold a budget with."""
    load_memory = loading.load_memory
    monkeypatch.setattr(loading, "load_memory", lambda *a, **k: load_memory(*a, **k, variant="no_memory"))
    node = make_policy(ros, start=False, memory__checkpoint="untrained", **parameter)
    assert node.trigger_configure() == TransitionCallbackReturn.FAILURE
    assert "'no_memory'" in node._problem
    running = loop(ros, driver_options=OTHER, memory__checkpoint="untrained", namespace="/other")
    assert running.worker.policy.memory.config.variant.value == "no_memory"
    answer = atomically(running.node, gate__threshold=0.25, **parameter)
    assert not answer.successful
    assert "'no_memory'" in answer.reason
    assert running.node.config.gate__threshold == -1.0
    driver = running.driver
    driver.query(0)
    assert gates_of(running, 1)[0].threshold == 0.5
