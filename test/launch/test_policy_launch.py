"""`policy.launch.py` on the real launch packages, with the real nodes."""

import os
import signal

import pytest

pytest.importorskip(
    "launch_testing",
    reason="no launch packages here: run `make test-launch LAUNCH_SRC=DIR` with their sources",
)

from launching import check_refused, end, start, wait_for

FILE = "policy.launch.py"
BAD_ARGUMENTS = {
    "config:=nope": "config 'nope' does not exist; give a YAML file, or one of: franka_servo, so101_position, ur_",
    "checkpoint:=/nope": "checkpoint '/nope' does not exist",
    "shadow:=yes": "shadow 'yes' is not known; choose one of: true, false",
    "gate_threshold:=7": "gate_threshold 7.0 is out of range",
}


@pytest.fixture(scope="module")
def listener():
    import rclpy

    rclpy.init(args=[])
    node = rclpy.create_node("listener")
    yield node
    node.destroy_node()
    rclpy.try_shutdown()


def interrupt(process, log):
    os.killpg(process.pid, signal.SIGINT)
    process.wait(timeout=30)
    text = log.read_text()
    assert text.count("process has finished cleanly") == 2, text
    assert "Traceback" not in text


def heard(node, topic, kind, condition, what):
    """The first message of the topic for which the condition holds."""
    import rclpy
    from rclpy.qos import QoSProfile

    got = []
    subscription = node.create_subscription(kind, topic, got.append, QoSProfile(depth=10))

    def there():
        rclpy.spin_once(node, timeout_sec=0.1)
        return any(condition(message) for message in got)

    wait_for(there, 60, what)
    node.destroy_subscription(subscription)
    return next(message for message in got if condition(message))


def test_the_franka_example_waits_to_be_enabled_in_a_namespace_and_an_interrupt_ends_it_cleanly(
    tmp_path, listener
):
    from aura_ros.msg import ChunkState, PolicyStatus

    process, log = start(tmp_path, FILE, "config:=franka_servo", "namespace:=left", "instruction:=pick it up")
    try:
        heard(
            listener,
            "/left/policy_node/status",
            PolicyStatus,
            lambda status: status.state == PolicyStatus.DISABLED,
            "policy that waits to be enabled",
        )
        state = heard(listener, "/left/chunk_state", ChunkState, lambda state: True, "state of the player")
        assert (state.state, state.reason) == (ChunkState.IDLE, "waiting for a chunk")
        interrupt(process, log)
    finally:
        end(process)


@pytest.mark.parametrize("config", ["ur_trajectory", "so101_position"])
def test_a_stack_that_the_shipped_policy_does_not_fit_is_told_so_in_one_line(tmp_path, config):
    process, log = start(tmp_path, FILE, f"config:={config}", "instruction:=pick it up")
    try:
        assert process.wait(timeout=60) == 1
    finally:
        end(process)
    text = log.read_text()
    assert "proprio.sources make 6 values, but backbone 'compact' was trained on 8" in text
    assert "Traceback" not in text


def parameter_of(node, name):
    """The parameter's text, asked for until somebody answers: the node of the launch before may still be in the graph."""
    import rclpy
    from rcl_interfaces.srv import GetParameters

    client = node.create_client(GetParameters, "/policy_node/get_parameters")
    answers = []

    def answered():
        if client.wait_for_service(timeout_sec=0.5):
            future = client.call_async(GetParameters.Request(names=[name]))
            rclpy.spin_until_future_complete(node, future, timeout_sec=3)
            if future.done():
                answers.append(future.result().values[0].string_value)
        return bool(answers)

    wait_for(answered, 60, f"parameter {name}")
    node.destroy_client(client)
    return answers[0]


@pytest.mark.parametrize("text", ["Put: the cup", "yes", "null", "3.0", "[a]"])
def test_an_instruction_stays_the_text_that_it_is(tmp_path, listener, text):
    process, log = start(tmp_path, FILE, f"instruction:={text}")
    try:
        assert parameter_of(listener, "instruction") == text
        interrupt(process, log)
    finally:
        end(process)


@pytest.mark.parametrize("argument", BAD_ARGUMENTS)
def test_a_bad_argument_is_one_line_and_starts_nothing(tmp_path, argument):
    check_refused(tmp_path, FILE, argument, BAD_ARGUMENTS[argument])
