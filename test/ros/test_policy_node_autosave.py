"""The memory's file after each step: a policy that was killed goes on as if it had not been."""

import json
import os
import signal

import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("aura_ros.msg", reason="the messages are not built")

from aura_ros.msg import PolicyStatus
from lifecycle_msgs.msg import State, Transition
from policy_driver import LOCKSTEP, Driver, header_of, loop, make_policy, rejected, stamp_of
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.parameter import Parameter
from safetensors.numpy import load_file

from aura_ros.memory.state_file import read_noted, write_state

SUCCESS, FAILURE = TransitionCallbackReturn.SUCCESS, TransitionCallbackReturn.FAILURE
BUDGET = {"gate__threshold": 0.0, "gate__writes_per_second": 1.0, "write_rate_window": 4}
EPISODE = {"number": 5, "suite": "libero_10", "seed": 9}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "memory.safetensors"


def saved_steps(path):
    return int(load_file(path)["steps"])


def start(ros, start_process, namespace, **parameters):
    """A driver and an active policy in a process of its own, which finds instruction and episode on latched topics."""
    given = {"mode": "lockstep", "enabled_at_start": "true", **parameters}
    options = [
        part for name, value in given.items() for part in ("-p", f"{name.replace('__', '.')}:={value}")
    ]
    process = start_process("policy_node", "--ros-args", "-r", f"__ns:={namespace}", *options)
    driver = Driver(ros, namespace=namespace)
    driver.instruct()
    driver.start_episode(**EPISODE)
    assert driver.transition(Transition.TRANSITION_CONFIGURE), process.output
    assert driver.transition(Transition.TRANSITION_ACTIVATE), process.output
    driver.wait_for_policy()
    driver.wait_for_state(PolicyStatus.WAITING, "waiting for images/agentview")
    return driver, process


@pytest.mark.parametrize("parameters", [{"gate__threshold": 0.0}, BUDGET], ids=["always-open", "budget"])
def test_a_policy_killed_after_any_chunk_goes_on_to_the_byte(ros, start_process, path, parameters):
    beside = loop(ros, driver_options={"namespace": "/beside"}, namespace="/beside", **parameters)
    expected = [beside.driver.query(index).data for index in range(6)]
    ros.spin_until(lambda: len(beside.driver.gates) == 6, what="the gate events")
    given = parameters | {"memory__autosave": path}
    # In a namespace of its own: the graph knows the killed one for some time, and calls would go to it.
    first, killed = start(ros, start_process, "/first", **given)
    before = [first.query(index) for index in range(3)]
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    second, process = start(ros, start_process, "/second", **given)
    assert f"with the memory in {path}" in process.output
    after = [second.query(index) for index in range(3, 6)]
    assert [chunk.data for chunk in before + after] == expected
    assert {chunk.epoch for chunk in after} == {after[0].epoch}
    assert after[0].epoch > before[0].epoch
    ros.spin_until(lambda: len(first.gates) == len(second.gates) == 3, what="the gate events")
    told = [(gate.threshold, gate.fired, gate.state_norm) for gate in first.gates + second.gates]
    assert told == [(gate.threshold, gate.fired, gate.state_norm) for gate in beside.driver.gates]


def test_an_observation_whose_chunk_never_arrived_is_answered_again_and_not_stepped_on_twice(ros, path):
    running = loop(ros, memory__autosave=str(path), gate__threshold=0.0)
    driver, node = running.driver, running.node
    chunks = [driver.query(index) for index in range(3)]
    assert (node.trigger_deactivate(), node.trigger_cleanup()) == (SUCCESS, SUCCESS)
    assert (node.trigger_configure(), node.trigger_activate()) == (SUCCESS, SUCCESS)
    driver.wait_for_policy()
    again = [driver.query(2, seed=77) for _ in range(2)]
    for chunk in again:
        assert (chunk.data, header_of(chunk)) == (chunks[2].data, stamp_of(2))
        assert (chunk.epoch, chunk.sequence) == (node.worker.epoch, 0)
    following = driver.query(3)
    assert following.sequence == 1
    assert node.worker.policy.memory.steps == 4


def test_the_file_holds_the_state_before_the_chunk_leaves(ros, path):
    running = loop(ros, memory__autosave=str(path))
    for index in range(3):
        running.driver.query(index)
        assert saved_steps(path) == index + 1
    assert path.stat().st_size < 10_000
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_an_episode_that_began_while_the_policy_was_away_begins_with_an_empty_memory(ros, path):
    running = loop(ros, memory__autosave=str(path), gate__threshold=0.0)
    driver, node = running.driver, running.node
    first = driver.query(0)
    node.trigger_deactivate()
    driver.start_episode(1)
    ros.spin_until(lambda: node.worker._episode[1][0] == 1, what="the next episode")
    assert saved_steps(path) == 1, "not yet known whether it is another one"
    assert node.trigger_activate() == SUCCESS
    again = driver.query(0)
    assert again.data == first.data
    assert node.worker.policy.memory.steps == saved_steps(path) == 1


@pytest.mark.parametrize("how", ["reset", "episode", "clock"])
def test_what_clears_the_memory_clears_its_file(ros, path, how):
    running = loop(ros, memory__autosave=str(path), gate__threshold=0.0)
    driver, worker = running.driver, running.worker
    driver.query(0)
    old = driver.query(1).epoch
    assert load_file(path)["fast_weights"].any()
    if how == "reset":
        assert driver.call("reset").success
        assert saved_steps(path) == 0, "before the answer"
    elif how == "episode":
        driver.start_episode(1)
        ros.spin_until(lambda: worker.epoch > old and saved_steps(path) == 0, what="the empty file")
    else:
        worker.new_epoch("the clock went back by 1.000 s")
    assert not load_file(path)["fast_weights"].any()
    assert saved_steps(path) == 0
    state, note = read_noted(worker.policy.memory.weights_hash, path)
    assert state["episode"] == worker.policy.memory.episode + 1
    assert json.loads(note)["stamp_ns"] is None


def test_reset_never_carries_the_memory_over_restarts_and_episodes(ros, path):
    running = loop(ros, memory__autosave=str(path), gate__threshold=0.0, reset="never")
    driver, node = running.driver, running.node
    driver.query(0)
    node.trigger_deactivate()
    driver.start_episode(1)
    ros.spin_until(lambda: node.worker._episode[1][0] == 1, what="the next episode")
    node.trigger_activate()
    driver.query(0)  # the same stamp, of another run: no repeat
    assert node.worker.policy.memory.steps == saved_steps(path) == 2


def damage(path, how, memory):
    write_state(memory.state_dict(), memory.weights_hash, path, 1)
    if how == "cut":
        path.write_bytes(path.read_bytes()[:200])
    elif how == "foreign":
        path.write_bytes(b"a diary")
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "note":
        write_state(memory.state_dict(), memory.weights_hash, path, 1, "{}")
    elif how == "chunk":
        note = json.dumps({"episode": None, "stamp_ns": 1, "chunk": [[0.0]], "budget": None})
        write_state(memory.state_dict(), memory.weights_hash, path, 1, note)
    else:
        write_state(memory.state_dict(), "0" * 64, path, 1)


@pytest.mark.parametrize("how", ["cut", "foreign", "folder", "note", "chunk", "weights"])
def test_a_file_that_cannot_be_right_refuses_the_activation_and_stays_as_it_is(ros, path, how, capfd):
    driver = Driver(ros)
    node = make_policy(ros, start=False, **(LOCKSTEP | {"memory__autosave": str(path)}))
    assert node.trigger_configure() == SUCCESS
    damage(path, how, node.worker.policy.memory)
    before = path.read_bytes() if path.is_file() else None
    assert node.trigger_activate() == FAILURE
    assert node._state_machine.current_state[0] == State.PRIMARY_STATE_INACTIVE
    status = driver.wait_for_state(PolicyStatus.INACTIVE, str(path))
    assert "set memory.restore to false" in status.reason
    assert "\n" not in status.reason
    assert "Traceback" not in capfd.readouterr().err
    assert not node.worker.active
    if before is not None:
        assert path.read_bytes() == before
        path.unlink()
    else:
        path.rmdir()
    assert node.trigger_activate() == SUCCESS


def test_without_restore_the_memory_begins_empty_whatever_the_file_holds(ros, path):
    running = loop(ros, memory__autosave=str(path), gate__threshold=0.0)
    first = running.driver.query(0)
    running.driver.query(1)
    running.node.trigger_deactivate()
    other = loop(
        ros,
        driver_options={"namespace": "/other"},
        namespace="/other",
        memory__autosave=str(path),
        memory__restore=False,
        gate__threshold=0.0,
    )
    assert other.driver.query(0).data == first.data
    assert saved_steps(path) == 1


def test_a_full_disk_does_not_stop_the_policy_and_is_told(ros, path, capfd):
    running = loop(ros, memory__autosave=str(path), gate__threshold=0.0)
    driver = running.driver
    driver.query(0)
    away = path.parent.with_name("away")
    os.rename(path.parent, away)  # nothing can be written there
    for index in (1, 2, 3):
        driver.query(index)
    assert rejected(driver.wait_for_rejection("autosave failed"))["autosave failed"] == 3
    assert capfd.readouterr().err.count("autosave failed") == 1
    assert not running.worker.fault
    os.rename(away, path.parent)
    driver.query(4)
    assert saved_steps(path) == 5


def test_a_memory_that_is_loaded_is_also_that_of_the_file(ros, path, tmp_path):
    running = loop(ros, memory__autosave=str(path), gate__threshold=0.0)
    driver, other = running.driver, str(tmp_path / "other.safetensors")
    for index in (0, 1):
        driver.query(index)
    assert driver.call("save_memory", path=other).success
    assert driver.call("reset").success
    assert driver.call("load_memory", path=other).success
    assert load_file(path)["fast_weights"].tobytes() == load_file(other)["fast_weights"].tobytes()
    assert running.node.set_parameters([Parameter("memory.autosave", value="")])[0].successful is False


def test_after_a_restart_observations_wait_until_the_episode_is_known_to_be_the_same(ros, path):
    running = loop(ros, memory__autosave=str(path))
    driver, node = running.driver, running.node
    driver.query(0)
    driver.finish_episode()  # the latched topic says nothing of the next one yet
    ros.spin_until(lambda: node.worker._episode is None, what="the episode's end")
    assert (node.trigger_deactivate(), node.trigger_activate()) == (SUCCESS, SUCCESS)
    driver.send(stamp_of(1))
    driver.wait_for_state(PolicyStatus.WAITING, "waiting for the episode's start")
    assert len(driver.chunks) == 1
    driver.start_episode(1)
    ros.spin_until(lambda: node.worker._episode is not None, what="the next episode")
    driver.query(0)
    assert node.worker.policy.memory.steps == 1
