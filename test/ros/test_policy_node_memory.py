"""Gate, memory and faults of the policy node: what is counted, kept, saved and said."""

import dataclasses
import threading
import time

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed")
pytest.importorskip("aura_ros.msg", reason="the messages are not built")

from aura_ros.msg import PolicyStatus
from aura_ros.srv import LoadMemory, SaveMemory
from policy_driver import Driver, header_of, loop, stamp_of
from rclpy.parameter import Parameter
from safetensors.numpy import load_file

from aura_ros.backbones.registry import shipped_checkpoint
from aura_ros.memory.state_file import write_state
from aura_ros.policy.loading import shipped_memory

# Paths that name no file that could be: each must be answered, and the node stay up.
NO_FILES = ("/", ".", "/etc/hostname/x.safetensors", "/tmp/" + 256 * "a", "/no/where/m.safetensors")


@pytest.fixture
def running(ros):
    return loop(ros)


@pytest.fixture
def writing(ros):
    """A policy whose gate is always open, so that the memory is not empty."""
    return loop(ros, gate__threshold=0.0)


class Held:
    """Inference that waits until it is let go; `entered` says that it has begun."""

    def __init__(self, policy, monkeypatch):
        self.entered, self.release = threading.Event(), threading.Event()
        act = policy.act

        def slow(observation):
            self.entered.set()
            assert self.release.wait(30)
            return act(observation)

        monkeypatch.setattr(policy, "act", slow)


def gates_of(running, count):
    running.ros.spin_until(lambda: len(running.driver.gates) >= count, what=f"{count} gate events")
    assert len(running.driver.gates) == count
    return running.driver.gates


def test_the_heartbeat_and_services_go_on_while_inference_is_running(writing, monkeypatch, tmp_path):
    driver = writing.driver
    driver.query(0)
    held = Held(writing.worker.policy, monkeypatch)
    driver.send(stamp_of(1))
    writing.ros.spin_until(held.entered.is_set, what="inference")
    begin, seen = time.monotonic(), len(driver.statuses)
    assert driver.call("clear_fault").success
    assert driver.call("enable", data=True).success
    assert driver.call("save_memory", path=str(tmp_path / "state.safetensors")).success
    driver.instruct("another task")
    writing.ros.spin_until(lambda: writing.worker.instruction == "another task", what="the instruction")
    writing.ros.spin_until(lambda: len(driver.statuses) >= seen + 3, 3.0, "three heartbeats")
    assert time.monotonic() - begin >= 0.35
    assert len(driver.chunks) == 1
    held.release.set()
    writing.ros.spin_until(lambda: len(driver.chunks) == 2, what="the chunk")
    loaded = driver.call("load_memory", path=str(tmp_path / "state.safetensors"))
    assert loaded.success, loaded.message
    # Saved during the second step, the state is that after the first.
    driver.instruct()
    writing.ros.spin_until(lambda: writing.worker.instruction != "another task", what="the instruction")
    driver.query(1)
    assert gates_of(writing, 3)[2].state_norm == writing.driver.gates[1].state_norm
    stamps = [header_of(status) for status in driver.statuses]
    assert stamps == sorted(stamps)


def test_a_saved_memory_is_loaded_into_a_new_epoch(writing, tmp_path):
    driver, path = writing.driver, str(tmp_path / "state.safetensors")
    for index in range(3):
        driver.query(index)
    norm = gates_of(writing, 3)[-1].state_norm
    assert norm > 0
    saved = driver.call("save_memory", path=path)
    assert (saved.success, saved.message, saved.epoch) == (True, "done", driver.chunks[-1].epoch)
    following = driver.query(3)
    expected = gates_of(writing, 4)[-1]
    assert driver.call("reset").success
    loaded = driver.call("load_memory", path=path)
    assert loaded.success
    assert loaded.epoch == writing.worker.epoch > saved.epoch
    again = driver.query(3)
    gate = gates_of(writing, 5)[-1]
    assert again.data == following.data
    assert (again.epoch, again.sequence) == (loaded.epoch, 0)
    assert (gate.state_norm, gate.surprise) == (expected.state_norm, expected.surprise)
    # The counters are the new epoch's.
    assert (gate.step, gate.steps, gate.writes) == (1, 1, int(gate.bytes_written > 0))


def test_a_memory_saved_right_after_reset_is_empty(writing, tmp_path):
    path = str(tmp_path / "state.safetensors")
    writing.driver.query(0)
    assert writing.worker.policy.memory.state_norm > 0
    assert writing.driver.call("reset").success
    assert writing.driver.call("save_memory", path=path).success
    assert not load_file(path)["fast_weights"].any()
    # One loaded is saved as it is, also before its first step.
    saved = str(tmp_path / "first.safetensors")
    writing.driver.query(0)
    assert writing.driver.call("save_memory", path=saved).success
    assert writing.driver.call("reset").success
    assert writing.driver.call("load_memory", path=saved).success
    assert writing.driver.call("save_memory", path=path).success
    assert load_file(path)["fast_weights"].tolist() == load_file(saved)["fast_weights"].tolist()


def test_a_memory_path_that_cannot_be_used_is_answered_in_one_line(running, tmp_path):
    driver = running.driver
    epoch = driver.query(0).epoch
    wrong, half = tmp_path / "wrong.safetensors", tmp_path / "half.safetensors"
    wrong.write_bytes(b"not a tensor file")
    # Half floats, for which NumPy has no type: length of the header, header, data.
    header = b'{"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'
    half.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    before = {path: path.read_bytes() for path in (wrong, half)}
    calls = [
        *((service, path) for service in ("load_memory", "save_memory") for path in NO_FILES),
        ("load_memory", str(half)),
        ("save_memory", str(half)),
        ("save_memory", str(wrong)),
        ("load_memory", str(tmp_path / "none.safetensors")),
        ("load_memory", str(wrong)),
        ("load_memory", str(tmp_path)),
        ("load_memory", ""),
        ("save_memory", str(tmp_path / "no" / "folder.safetensors")),
        ("save_memory", ""),
        ("save_memory", str(tmp_path)),
    ]
    for service, path in calls:
        answer = driver.call(service, path=path)
        assert not answer.success, (service, path)
        assert answer.message, (service, path)
        assert "\n" not in answer.message
        assert path in answer.message
        assert answer.epoch == epoch
    assert driver.query(1).epoch == epoch
    assert running.worker.policy.memory.steps == 2
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_memory_path_with_a_nul_is_answered_whatever_the_middleware_makes_of_it(running):
    """A client in C cannot send one; what our own code does with it must not end the node."""
    node = running.node
    for callback, kind in ((node._on_save_memory, SaveMemory), (node._on_load_memory, LoadMemory)):
        answer = callback(kind.Request(path="a\0b"), kind.Response())
        assert (answer.success, answer.message.count("\n"), "\0" in answer.message) == (False, 0, False)
        assert "a\\x00b" in answer.message
    assert running.driver.query(0).sequence == 0


def spoiled(state):
    state["fast_weights"][1, 2] = np.nan


def reshaped(state):
    state["fast_weights"] = state["fast_weights"][:2, :2].copy()


@pytest.mark.parametrize("spoil", [spoiled, reshaped])
def test_a_saved_memory_that_cannot_be_right_is_refused_at_once_and_changes_nothing(writing, tmp_path, spoil):
    driver, memory, path = writing.driver, writing.worker.policy.memory, tmp_path / "state.safetensors"
    first = driver.query(0)
    before = {name: array.tobytes() for name, array in memory.state_dict().items()}
    state = memory.state_dict()
    spoil(state)
    write_state(state, memory.weights_hash, path, first.epoch)
    answer = driver.call("load_memory", path=str(path))
    assert (answer.success, answer.epoch) == (False, first.epoch)
    assert "fast_weights" in answer.message
    assert "\n" not in answer.message
    assert {name: array.tobytes() for name, array in memory.state_dict().items()} == before
    second = driver.query(1)
    assert (second.epoch, second.sequence, memory.steps) == (first.epoch, 1, 2)
    assert driver.wait_for_status(lambda s: s.queries == 2).state != PolicyStatus.FAULT


def test_a_state_of_other_weights_is_refused(ros, running, tmp_path):
    path = str(tmp_path / "state.safetensors")
    running.driver.query(0)
    assert running.driver.call("save_memory", path=path).success
    other = loop(
        ros,
        driver_options={"namespace": "/other"},
        namespace="/other",
        memory__checkpoint="untrained",
    )
    answer = other.driver.call("load_memory", path=path)
    assert not answer.success
    assert "belongs to weights" in answer.message


def test_a_gate_that_never_opens_writes_nothing(ros):
    running = loop(ros, gate__threshold=1.0)
    for index in range(3):
        running.driver.query(index)
    for gate in gates_of(running, 3):
        assert (gate.fired, gate.writes, gate.bytes_written, gate.state_norm) == (False, 0, 0, 0.0)
        assert (gate.write_rate, gate.writes_per_second, gate.threshold) == (0.0, 0.0, 1.0)
        assert gate.state_bytes == 4224


def test_a_gate_that_is_always_open_writes_at_every_step(ros):
    running = loop(ros, gate__threshold=0.0)
    for index in range(3):
        running.driver.query(index)
    gates = gates_of(running, 3)
    assert [gate.writes for gate in gates] == [1, 2, 3]
    assert all(gate.fired and gate.bytes_written == 4096 and gate.write_rate == 1.0 for gate in gates)
    assert gates[0].writes_per_second == pytest.approx(1 / 0.4)
    assert gates[0].state_norm > 0


def test_a_step_that_fires_without_changing_the_memory_is_no_write(ros, monkeypatch):
    running = loop(ros, gate__threshold=0.0)
    act = running.worker.policy.act

    def unchanged(observation):
        step = act(observation)
        return dataclasses.replace(
            step, memory_step=dataclasses.replace(step.memory_step, fired=True, written_bytes=0)
        )

    running.driver.query(0)
    monkeypatch.setattr(running.worker.policy, "act", unchanged)
    running.driver.query(1)
    gate = gates_of(running, 2)[-1]
    assert gate.fired
    assert gate.write_rate == 0.5


def test_the_write_rate_is_that_of_the_window(ros):
    running = loop(ros, write_rate_window=2, gate__threshold=0.0)
    driver = running.driver
    driver.query(0)
    running.node.set_parameters([Parameter("gate.threshold", value=1.0)])
    for index in (1, 2):
        driver.query(index)
    gates = gates_of(running, 3)
    assert [gate.write_rate for gate in gates] == [1.0, 0.5, 0.0]
    running.ros.spin_until(lambda: len(driver.rates) == 3)
    assert [rate.data for rate in driver.rates] == [1.0, 0.5, 0.0]
    assert [gate.writes for gate in gates] == [1, 1, 1]


def test_the_threshold_changes_at_run_time_and_a_bad_one_is_refused_with_the_reason(running):
    driver, node = running.driver, running.node
    driver.query(0)
    assert node.set_parameters([Parameter("gate.threshold", value=1)])[0].successful
    driver.query(1)
    gates = gates_of(running, 2)
    assert [gate.threshold for gate in gates] == [0.5, 1.0]
    assert not gates[1].fired
    running.ros.spin_until(
        lambda: driver.infos[-1].gate_threshold == 1.0, what="the new threshold in the info"
    )
    for name, value, reason in (
        ("gate.threshold", 1.5, "gate.threshold"),
        ("gate.threshold", "high", "expected a number"),
        ("mode", "realtime", "mode"),
        ("seed", 3, "seed"),
    ):
        answer = node.set_parameters([Parameter(name, value=value)])[0]
        assert not answer.successful
        assert reason in answer.reason
        assert "\n" not in answer.reason
    assert running.worker.policy.memory.threshold == 1.0
    assert node.get_parameter("mode").value == "lockstep"
    assert node.set_parameters([Parameter("gate.threshold", value=-1.0)])[0].successful
    assert running.worker.policy.memory.threshold == 0.5


def test_a_gate_event_tells_the_threshold_that_was_compared_with(running, monkeypatch):
    policy, act = running.worker.policy, running.worker.policy.act

    def changed_meanwhile(observation):
        step = act(observation)
        running.worker.apply(dataclasses.replace(running.worker.config, gate__threshold=1.0))
        return step

    monkeypatch.setattr(policy, "act", changed_meanwhile)
    for index in range(2):
        running.driver.query(index)
    gates = gates_of(running, 2)
    assert [gate.threshold for gate in gates] == [0.5, 1.0]
    assert [gate.fired for gate in gates] == [gate.probability > gate.threshold for gate in gates]


def test_a_late_subscriber_gets_the_info_and_every_epoch_renews_it(ros, running):
    late = Driver(ros, namespace="/", policy="policy_node")
    ros.spin_until(lambda: bool(late.infos), what="the info")
    info, policy = late.infos[-1], running.worker.policy
    assert info.epoch == running.worker.epoch
    assert (info.backbone, info.trained, info.hidden_dim) == ("compact", True, 160)
    assert (info.dk, info.dv, info.state_bytes, info.memory_variant) == (32, 32, 4224, "aura")
    assert (info.horizon, info.memory_step_period) == (8, 8)
    assert (info.checkpoint, info.memory_checkpoint) == (str(shipped_checkpoint()), str(shipped_memory()))
    assert info.memory_hash == policy.memory.weights_hash
    assert list(info.names) == list(policy.backbone.info.action.names)
    assert info.gate_threshold == 0.5
    assert info.image_rotation.startswith("no mirror -> JPEG")
    running.driver.call("reset")
    ros.spin_until(lambda: late.infos[-1].epoch == running.worker.epoch, what="the info of the new epoch")


def test_latents_are_published_only_where_asked_for(ros):
    running = loop(ros, publish_latent=True)
    hidden = []
    act = running.worker.policy.act
    running.worker.policy.act = lambda observation: hidden.append(act(observation)) or hidden[-1]
    running.driver.query(0)
    ros.spin_until(lambda: bool(running.driver.latents), what="the latent")
    latent = running.driver.latents[0]
    assert (header_of(latent), latent.step, latent.epoch) == (stamp_of(0), 1, running.worker.epoch)
    np.testing.assert_array_equal(np.asarray(latent.data, np.float32), hidden[0].hidden_state)
    other = loop(ros, driver_options={"namespace": "/other"}, namespace="/other")
    other.driver.query(0)
    assert other.node.count_publishers("/other/policy_node/latent") == 0
    assert len(running.driver.latents) == 1


def test_a_model_that_raises_is_a_latched_fault_and_the_node_stays_up(running, monkeypatch, capfd):
    driver = running.driver
    driver.query(0)
    with monkeypatch.context() as patch:
        patch.setattr(running.worker.policy, "act", lambda _: 1 / 0)
        driver.send(stamp_of(1))
        fault = driver.wait_for_state(PolicyStatus.FAULT)
        assert fault.reason == "ZeroDivisionError: division by zero"
        log = capfd.readouterr().err
        assert "Traceback" in log
        assert "ZeroDivisionError" in log
    driver.send(stamp_of(1))
    driver.wait_for_state(PolicyStatus.FAULT)
    assert len(driver.chunks) == 1
    assert "ZeroDivisionError" in driver.call("clear_fault").message
    assert driver.query(1).sequence == 1


def test_a_publish_that_fails_is_a_fault_and_its_stamp_does_not_step_the_memory_again(running, monkeypatch):
    driver, node, memory = running.driver, running.node, running.worker.policy.memory
    driver.query(0)

    class Broken:
        def publish(self, _):
            monkeypatch.undo()
            raise RuntimeError("the publisher is invalid")

    monkeypatch.setattr(node, "_rate_pub", Broken())
    driver.send(stamp_of(1))
    driver.wait_for_state(PolicyStatus.FAULT, "RuntimeError: the publisher is invalid")
    assert driver.call("clear_fault").success
    driver.send(stamp_of(1))
    driver.wait_for_state(PolicyStatus.FAULT, "~/reset starts a new epoch")
    assert (memory.steps, len(driver.chunks)) == (2, 1)
    assert driver.call("clear_fault").success
    assert driver.query(2).epoch == driver.chunks[0].epoch
    assert memory.steps == 3


def test_a_chunk_that_is_not_finite_is_withheld_and_faults_while_the_step_is_told(running, monkeypatch):
    driver, policy = running.driver, running.worker.policy
    driver.query(0)
    infer = policy.backbone.infer

    def broken(observation):
        output = infer(observation)
        chunk = output.base_chunk.copy()
        chunk[2, 3] = np.nan
        return dataclasses.replace(output, base_chunk=chunk)

    with monkeypatch.context() as patch:
        patch.setattr(policy.backbone, "infer", broken)
        driver.send(stamp_of(1))
        fault = driver.wait_for_state(PolicyStatus.FAULT, "row 2, 'roll' is nan")
    assert "\n" not in fault.reason
    gate = gates_of(running, 2)[-1]
    assert (header_of(gate), gate.step) == (stamp_of(1), 2)
    assert len(driver.chunks) == 1
    # The memory has seen this stamp, so it is not inferred again.
    driver.call("clear_fault")
    driver.send(stamp_of(1))
    driver.wait_for_state(PolicyStatus.FAULT, "was rejected")
    assert policy.memory.steps == 2
    driver.call("clear_fault")
    driver.query(2)
    assert policy.memory.steps == 3


def test_a_chunk_beyond_the_limit_is_withheld_never_clamped(ros):
    running = loop(ros, action_limit=0.01)
    running.driver.send(stamp_of(0))
    running.driver.wait_for_state(PolicyStatus.FAULT, "within +-0.01")
    assert not running.driver.chunks


def test_statistics_count_queries_and_not_the_warm_up(running):
    driver = running.driver
    assert running.worker.policy.memory.steps == 0
    first = driver.wait_for_status(lambda s: s.state == PolicyStatus.WAITING)
    assert (first.queries, first.inference_p50_ms, first.inference_p99_ms) == (0, 0.0, 0.0)
    driver.query(0)
    status = driver.wait_for_status(lambda s: s.queries == 1)
    assert status.inference_p50_ms == status.inference_p99_ms > 0
    assert len(running.worker.latency_ms) == 1


def test_diagnostics_come_once_a_second_with_the_state(running):
    running.driver.query(0)
    running.driver.diagnostics.clear()
    begin = time.monotonic()
    running.ros.spin_until(lambda: len(running.driver.diagnostics) == 2, what="diagnostics")
    assert 0.8 < time.monotonic() - begin < 10.0
    entry = running.driver.diagnostics[-1].status[0]
    assert entry.name == "policy_node: policy"
    assert entry.message.startswith(("running", "waiting: waiting for images/agentview"))
    values = {value.key: value.value for value in entry.values}
    assert values["queries"] == "1"
    assert float(values["inference_p50_ms"]) > 0
