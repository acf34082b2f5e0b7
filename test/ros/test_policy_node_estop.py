"""Emergency stop and shadow mode: what must not leave, whatever the policy infers."""

import threading

import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("aura_ros.msg", reason="the messages are not built")

from aura_ros.msg import PolicyStatus
from policy_driver import LOCKSTEP, Driver, loop, make_policy, stamp_of
from std_msgs.msg import Bool

from aura_ros.nodes import qos

PRESSED = "the e-stop is pressed"


class Button:
    """An e-stop; latched or not, as its publisher's QoS says."""

    def __init__(self, ros, driver, profile=qos.RELIABLE):
        self._publisher = driver.node.create_publisher(Bool, "estop", profile)
        ros.spin_until(lambda: self._publisher.get_subscription_count() > 0, what="the e-stop's subscription")

    def say(self, pressed):
        self._publisher.publish(Bool(data=pressed))


@pytest.mark.parametrize("profile", [qos.RELIABLE, qos.LATCHED], ids=["volatile", "latched"])
def test_an_emergency_stop_is_a_fault_until_it_is_released_and_cleared(ros, profile):
    running = loop(ros)
    driver, button = running.driver, Button(ros, running.driver, profile)
    driver.query(0)
    button.say(True)
    assert driver.wait_for_state(PolicyStatus.FAULT).reason == "emergency stop"
    driver.send(stamp_of(1))
    answer = driver.call("clear_fault")
    assert (answer.success, PRESSED in answer.message) == (False, True)
    button.say(False)
    driver.wait_for_state(PolicyStatus.FAULT, "emergency stop")  # released is not cleared
    assert len(driver.chunks) == running.worker.policy.memory.steps == 1
    cleared = driver.call("clear_fault")
    assert (cleared.success, cleared.message) == (True, "cleared: emergency stop")
    assert driver.query(1).sequence == 1


def test_the_chunk_in_flight_is_withheld_and_its_memory_step_told(ros, monkeypatch):
    running = loop(ros)
    driver, policy = running.driver, running.worker.policy
    button = Button(ros, driver)
    act, entered, release = policy.act, threading.Event(), threading.Event()

    def slow(observation):
        entered.set()
        assert release.wait(30)
        return act(observation)

    monkeypatch.setattr(policy, "act", slow)
    driver.send(stamp_of(0))
    ros.spin_until(entered.is_set, what="inference")
    button.say(True)
    driver.wait_for_state(PolicyStatus.FAULT, "emergency stop")
    release.set()
    ros.spin_until(lambda: len(driver.gates) == 1, what="the gate event")
    driver.wait_for_state(PolicyStatus.FAULT, "emergency stop")
    assert not driver.chunks


def test_a_model_that_raises_does_not_hide_the_emergency_stop(ros, monkeypatch):
    running = loop(ros)
    driver, policy = running.driver, running.worker.policy
    button = Button(ros, driver)
    entered, release = threading.Event(), threading.Event()

    def broken(_):
        entered.set()
        assert release.wait(30)
        raise ZeroDivisionError

    monkeypatch.setattr(policy, "act", broken)
    driver.send(stamp_of(0))
    ros.spin_until(entered.is_set, what="inference")
    button.say(True)
    driver.wait_for_state(PolicyStatus.FAULT, "emergency stop")
    release.set()
    driver.wait_for_state(PolicyStatus.FAULT, "emergency stop")
    assert driver.wait_for_state(PolicyStatus.FAULT).reason == "emergency stop"


@pytest.mark.parametrize("state", ["unconfigured", "inactive"])
@pytest.mark.parametrize("released", [False, True])
def test_an_emergency_stop_before_activation_counts(ros, state, released):
    driver = Driver(ros)
    node = make_policy(ros, start=False, **LOCKSTEP)
    if state == "inactive":
        node.trigger_configure()
    button = Button(ros, driver)
    button.say(True)
    ros.spin_until(lambda: node._pressed, what="the e-stop")
    if released:
        button.say(False)
        ros.spin_until(lambda: not node._pressed, what="its release")
    if state == "unconfigured":
        node.trigger_configure()
    driver.wait_for_state(PolicyStatus.INACTIVE, "emergency stop")
    node.trigger_activate()
    driver.wait_for_policy()
    driver.instruct()
    driver.start_episode()
    driver.send(stamp_of(0))
    driver.wait_for_state(PolicyStatus.FAULT, "emergency stop")
    assert not driver.chunks
    assert driver.call("clear_fault").success == released


def test_an_emergency_stop_outlives_a_cleanup(ros):
    running = loop(ros)
    button = Button(ros, running.driver)
    button.say(True)
    running.driver.wait_for_state(PolicyStatus.FAULT)
    node = running.node
    for step in (
        node.trigger_deactivate,
        node.trigger_cleanup,
        node.trigger_configure,
        node.trigger_activate,
    ):
        step()
    running.driver.wait_for_state(PolicyStatus.FAULT, "emergency stop")


def test_shadow_mode_publishes_everything_but_chunks(ros):
    running = loop(ros, shadow=True, publish_latent=True)
    driver = running.driver
    for index in range(3):
        driver.send(stamp_of(index))
        ros.spin_until(lambda n=index: len(driver.latents) == n + 1, what="the latent")
    ros.spin_until(lambda: len(driver.gates) == len(driver.rates) == len(driver.bytes) == 3, what="the rest")
    driver.send(stamp_of(2))  # a repeat is not answered either
    status = driver.wait_for_status(lambda s: s.queries == 3)
    assert (status.state, status.repeats) == (PolicyStatus.RUNNING, 0)
    assert status.inference_p50_ms > 0
    assert driver.wait_for_status(lambda s: s.queries == 3).repeats == 0
    assert not driver.chunks
