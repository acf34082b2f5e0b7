"""Life of the policy node: configuring, activating, ending, and what a wrong parameter is answered with."""

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("aura_ros.msg", reason="the messages are not built")

from aura_ros.msg import PolicyStatus
from lifecycle_msgs.msg import State, Transition
from policy_driver import LOCKSTEP, Driver, loop, make_policy, stamp_of
from rclpy.lifecycle import TransitionCallbackReturn

from aura_ros.errors import UserError
from aura_ros.nodes.policy_node import PolicyNode

SUCCESS, FAILURE = TransitionCallbackReturn.SUCCESS, TransitionCallbackReturn.FAILURE


def state_of(node) -> int:
    return node._state_machine.current_state[0]


def options(**parameters) -> list[str]:
    given = [f"{name.replace('__', '.')}:={value}" for name, value in parameters.items()]
    return ["--ros-args", *(part for text in given for part in ("-p", text))]


# -- parameters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameter", "value", "parts"),
    [
        ("mode", "turbo", ("mode", "'turbo'", "lockstep, realtime")),
        ("mode", "7", ("mode", "7", "a string")),
        ("device", "tpu", ("device", "'tpu'", "cpu, cuda, cuda:0")),
        ("seed", "0.5", ("seed", "0.5", "an integer")),
        ("seed", "-1", ("seed", "-1", "0 to")),
        ("image_max_age", "abc", ("image_max_age", "'abc'", "a number")),
        ("image_max_age", "true", ("image_max_age", "True", "a number")),
        ("image_max_age", "-1", ("image_max_age", "-1", "0.001 to 3600")),
        ("image_max_age", "-1.0", ("image_max_age", "-1.0", "0.001 to 3600")),
        ("image_max_age", ".nan", ("image_max_age", "nan", "0.001 to 3600")),
        ("gate.threshold", "2.0", ("gate.threshold", "2.0", "-1.0 to 1.0")),
        ("memory.state_dim", "0", ("memory.state_dim", "0", "1 to 1024")),
        ("enabled_at_start", "1", ("enabled_at_start", "1", "true or false")),
        ("instruction", "yes", ("instruction", "True", "quote it")),
        ("proprio.sources", "[nonsense]", ("proprio.sources", "'nonsense'", "pose:<topic>")),
        ("proprio.sources", "ee_pose", ("proprio.sources", "'ee_pose'", "a list of strings")),
        ("proprio.sources", "['joints:joint_states:a,a']", ("proprio.sources", "a,a", "twice")),
        ("proprio.sources", "['pose:ee pose']", ("proprio.sources", "'pose:ee pose'", "pose:<topic>")),
        ("proprio.sources", "['pose:ee-pose']", ("proprio.sources", "'ee-pose'", "ROS name")),
        ("proprio.orientation_reference", "[0, 0]", ("proprio.orientation_reference", "[0.0, 0.0]", "four")),
        (
            "proprio.orientation_reference",
            "[a, b, c, d]",
            ("proprio.orientation_reference", "a list of numbers"),
        ),
        (
            "proprio.orientation_reference",
            "[0.0, 0.0, 0.0, 2.0]",
            ("proprio.orientation_reference", "2.0", "1.0"),
        ),
    ],
)
def test_a_wrong_parameter_is_refused_in_one_line_that_names_it(ros, parameter, value, parts):
    with pytest.raises(UserError) as refused:
        PolicyNode(cli_args=["--ros-args", "-p", f"{parameter}:={value}"])
    text = str(refused.value)
    assert "\n" not in text
    for part in parts:
        assert part in text, text


def test_an_integer_stands_for_a_number_with_a_fraction_everywhere(ros, tmp_path):
    file = tmp_path / "policy.yaml"
    numbers = {
        "gate.threshold": 1,
        "action_limit": 2,
        "image_max_age": 1,
        "proprio_max_age": 1,
        "max_skew": 0,
        "max_future": 0,
        "proprio.orientation_reference": [1, 0, 0, 0],
    }
    lines = "".join(f"    {name}: {value}\n" for name, value in numbers.items())
    file.write_text(f"/**:\n  ros__parameters:\n{lines}")
    config = ros.add(PolicyNode(cli_args=["--ros-args", "--params-file", str(file)])).config
    assert config.image_max_age == 1.0
    assert config.gate__threshold == 1.0
    assert config.max_skew == 0.0
    assert config.proprio__orientation_reference == (1.0, 0.0, 0.0, 0.0)
    assert (
        {type(value) for value in config.proprio__orientation_reference} == {type(config.max_skew)} == {float}
    )


@pytest.mark.parametrize("text", ["Put: the cup", "'yes'", "'null'", "'3.0'", "'[a]'"])
def test_an_instruction_stays_the_text_that_it_is(ros, tmp_path, text):
    file = tmp_path / "policy.yaml"
    quoted = text if text.startswith("'") else f"'{text}'"
    file.write_text(f"policy_node:\n  ros__parameters:\n    instruction: {quoted}\n")
    config = ros.add(PolicyNode(cli_args=["--ros-args", "--params-file", str(file)])).config
    assert config.instruction == text.strip("'")


# -- configuring ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"checkpoint": "/nowhere/model.safetensors"}, "/nowhere/model.safetensors"),
        ({"backbone": "openvla_oft"}, "no checkpoint"),
        ({"memory__checkpoint": "/nowhere/memory.safetensors"}, "/nowhere/memory.safetensors"),
        ({"proprio__sources": ["pose:ee_pose"]}, "proprio.sources make 6 values"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"unnorm_key": "nothing"}, "'nothing'"),
    ],
)
def test_a_failed_configure_says_why_in_one_line_and_stays_unconfigured(ros, capfd, parameters, text):
    driver = Driver(ros)
    node = make_policy(ros, start=False, **parameters)
    assert node.trigger_configure() == FAILURE
    assert state_of(node) == State.PRIMARY_STATE_UNCONFIGURED
    assert (node.worker, node._inputs) == (None, None)
    log = capfd.readouterr().err
    assert "Traceback" not in log
    assert log.count("[ERROR]") == 1
    status = driver.wait_for_state(PolicyStatus.UNCONFIGURED, text)
    assert "\n" not in status.reason
    assert not driver.call("reset").success
    # What was taken is free: it can try again and says the same.
    assert node.trigger_configure() == FAILURE
    assert not node.finished.is_set()
    for publisher in driver.publishers.values():
        ros.spin_until(lambda p=publisher: p.get_subscription_count() == 0, what="the subscriptions' end")


def on_wire(node) -> list[str]:
    """The topics that the node subscribes to, as it and the graph know them."""
    names = node.get_subscriber_names_and_types_by_node(node.get_name(), node.get_namespace())
    return sorted(s.topic_name for s in node.subscriptions) + sorted(name for name, _ in names)


@pytest.mark.parametrize(
    ("sources", "text"),
    [
        # A pose on a camera's topic, by its name and by another name for the same topic.
        (["pose:images/agentview"], "carries a camera's images"),
        (["pose:/images/wrist"], "/images/wrist"),
        (["pose:ee_pose", "joints:ee_pose:a,b"], "both as a pose and as joints"),
        (["pose:ee_pose", "joints:/ee_pose:a,b"], "ee_pose"),
    ],
)
def test_a_configure_that_fails_in_its_subscriptions_leaves_none_behind(ros, capfd, sources, text):
    driver = Driver(ros)
    if len(sources) == 1:
        sources = [*sources, "joints:joint_states:panda_finger_joint1,panda_finger_joint2"]
    node = make_policy(ros, start=False, **(LOCKSTEP | {"proprio__sources": sources}))
    before = on_wire(node)
    for _ in range(2):
        assert node.trigger_configure() == FAILURE
        assert state_of(node) == State.PRIMARY_STATE_UNCONFIGURED
        assert (node.worker, node._inputs) == (None, None)
        assert on_wire(node) == before
    driver.wait_for_state(PolicyStatus.UNCONFIGURED, text)
    assert capfd.readouterr().err.count("configure failed") == 2


def test_a_configure_that_breaks_is_logged_with_its_traceback_and_can_be_repeated(ros, capfd, monkeypatch):
    node = make_policy(ros, start=False, **LOCKSTEP)
    with monkeypatch.context() as patch:
        patch.setattr("aura_ros.policy.load_policy", lambda **_: 1 / 0)
        assert node.trigger_configure() == FAILURE
    assert "ZeroDivisionError: division by zero\n" in capfd.readouterr().err
    assert state_of(node) == State.PRIMARY_STATE_UNCONFIGURED
    assert node.trigger_configure() == SUCCESS


@pytest.mark.parametrize("error", [UserError("the trunk is causal"), RuntimeError("out of\nmemory")])
def test_a_failed_warm_up_leaves_the_node_inactive_with_the_reason(ros, monkeypatch, error):
    driver = Driver(ros)
    node = make_policy(ros, start=False, **LOCKSTEP)
    assert node.trigger_configure() == SUCCESS

    def fail(instruction):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(node.worker.policy, "warm_up", fail)
        assert node.trigger_activate() == FAILURE
    assert state_of(node) == State.PRIMARY_STATE_INACTIVE
    driver.wait_for_state(PolicyStatus.INACTIVE, " ".join(str(error).split()))
    assert node.trigger_activate() == SUCCESS
    assert node.trigger_deactivate() == SUCCESS
    assert driver.wait_for_status(lambda s: s.state == PolicyStatus.INACTIVE and not s.reason)


def test_through_every_state_and_back_a_new_life_answers_as_the_first(ros):
    running = loop(ros)
    driver, node = running.driver, running.node
    first = driver.query(0)
    assert node.trigger_deactivate() == SUCCESS
    driver.send(stamp_of(1))
    driver.wait_for_state(PolicyStatus.INACTIVE)
    assert len(driver.chunks) == 1
    assert node.trigger_activate() == SUCCESS
    second = driver.query(0)
    assert node.trigger_deactivate() == SUCCESS
    assert node.trigger_cleanup() == SUCCESS
    assert node.worker is None
    driver.wait_for_state(PolicyStatus.UNCONFIGURED)
    assert not driver.call("save_memory", path="x").success
    assert node.trigger_configure() == SUCCESS
    assert node.trigger_activate() == SUCCESS
    driver.wait_for_policy()
    third = driver.query(0)
    for earlier, later in ((first, second), (second, third)):
        assert later.epoch > earlier.epoch
        assert (later.data, later.sequence) == (earlier.data, 0)
    assert node.worker.policy.memory.steps == 1


def test_a_shutdown_transition_ends_the_process_and_frees_the_model(ros):
    running = loop(ros)
    running.driver.query(0)
    assert running.node.trigger_shutdown() == SUCCESS
    assert running.node.finished.is_set()
    assert running.node.worker is None


# -- the process ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (options(gate__threshold="2.0"), ("gate.threshold", "-1.0 to 1.0")),
        (options(proprio__sources="[nonsense]"), ("proprio.sources", "nonsense")),
        (["--ros-args", "-p", "seed=3"], ("seed=3",)),
        (["--ros-args", "--params-file", "/nowhere/policy.yaml"], ("/nowhere/policy.yaml",)),
    ],
)
def test_a_users_mistake_ends_the_process_with_status_2_and_one_line(start_process, arguments, parts):
    process = start_process("policy_node", *arguments)
    assert process.wait() == 2, process.output
    lines = [line for line in process.output.splitlines() if not line.startswith("[ERROR]")]
    assert len(lines) == 1, process.output
    assert lines[0].startswith("policy_node: ")
    for part in parts:
        assert part in lines[0]


def test_exit_on_configure_failure_ends_the_process_with_status_2(ros, start_process):
    driver = Driver(ros)
    process = start_process(
        "policy_node", *options(exit_on_configure_failure="true", checkpoint="/nowhere/model.safetensors")
    )
    assert not driver.transition(Transition.TRANSITION_CONFIGURE)
    assert process.wait() == 2, process.output
    assert "Traceback" not in process.output
    assert len(process.output.splitlines()) == 1, process.output
    assert "/nowhere/model.safetensors" in process.output
    ros.spin_until(
        lambda: any("/nowhere/model.safetensors" in status.reason for status in driver.statuses),
        what="the reason in the last status",
    )


def test_a_shutdown_transition_is_answered_before_the_process_ends(ros, start_process):
    driver = Driver(ros)
    process = start_process("policy_node")
    assert driver.transition(Transition.TRANSITION_UNCONFIGURED_SHUTDOWN)
    assert process.wait() == 0, process.output


@pytest.mark.parametrize(
    "signals",
    [(signal.SIGINT,), (signal.SIGTERM,), (signal.SIGTERM, signal.SIGINT)],
    ids=["int", "term", "term-int"],
)
def test_a_signal_to_an_unconfigured_node_ends_it_quietly(ros, start_process, signals):
    driver = Driver(ros)
    process = start_process("policy_node")
    driver.wait_for_state(PolicyStatus.UNCONFIGURED)
    for number in signals:
        process.send_signal(number)
    assert process.wait() == 0, process.output
    assert process.output == ""
    ros.spin_until(lambda: driver.statuses[-1].reason == "stopping", what="the last status")


def test_a_signal_while_starting_ends_it_quietly(start_process):
    process = start_process("policy_node", env=dict(os.environ, PYTHONVERBOSE="1"))
    process.wait_for_output("aura_ros.nodes.policy_node")
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0
    assert "Traceback" not in process.output


def loads_torch(process) -> bool:
    return "libtorch" in Path(f"/proc/{process.popen.pid}/maps").read_text()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what a process has loaded")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["int", "term"])
def test_a_signal_while_configuring_ends_it_at_once(ros, start_process, number):
    driver = Driver(ros)
    process = start_process("policy_node")
    driver.call_later("change_state", transition=Transition(id=Transition.TRANSITION_CONFIGURE))
    ros.spin_until(lambda: loads_torch(process), what="loading")
    begin = time.monotonic()
    process.send_signal(number)
    assert process.wait() == 0, process.output
    assert process.output == "", "it did not load to the end"
    assert time.monotonic() - begin < 2.0


def test_an_active_node_in_its_own_process_answers_and_ends_cleanly_on_a_double_interrupt(ros, start_process):
    driver = Driver(ros)
    process = start_process("policy_node", *options(mode="lockstep", enabled_at_start="true", seed=3))
    assert driver.transition(Transition.TRANSITION_CONFIGURE)
    assert driver.transition(Transition.TRANSITION_ACTIVATE)
    driver.wait_for_policy()
    driver.instruct()
    driver.start_episode()
    driver.wait_for_state(PolicyStatus.WAITING, "waiting for images/agentview")
    chunks = [driver.query(index) for index in range(2)]
    assert [chunk.sequence for chunk in chunks] == [0, 1]
    # A process and a node beside it, of the same seed, say the same.
    beside = loop(ros, driver_options={"namespace": "/beside"}, namespace="/beside", seed=3)
    assert [beside.driver.query(index).data for index in range(2)] == [chunk.data for chunk in chunks]
    before = len(driver.statuses)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0, process.output
    assert "Traceback" not in process.output
    ros.spin_until(lambda: driver.statuses[-1].reason == "stopping", what="the last status")
    assert driver.statuses[-1].state == PolicyStatus.INACTIVE
    assert len(driver.statuses) > before
    assert len(driver.chunks) == 2
