"""The policy's worker without ROS: what must hold whatever moment a call comes at."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_backbone import WAIT_S, TinyBackbone, tiny_memory

from aura_ros.control.streams import Ready, Streams
from aura_ros.errors import UserError
from aura_ros.memory.state_file import write_state
from aura_ros.nodes.policy_config import PolicyNodeConfig
from aura_ros.nodes.policy_worker import PolicyWorker
from aura_ros.policy import Policy, PolicyConfig
from aura_ros.types import Observation

NS = 1_000_000_000
STEP_NS = 400_000_000


class HookedStreams(Streams):
    """Runs `after_joined` once, between an observation being found and its use."""

    after_joined = None

    def joined(self):
        found = super().joined()
        if self.after_joined is not None and isinstance(found, Ready):
            hook, self.after_joined = self.after_joined, None
            hook()
        return found


class Inputs:
    """One camera without pixels; what happens is decided by stamps alone."""

    image_streams = ("camera",)

    def __init__(self):
        self.streams = HookedStreams(["camera"], time.monotonic_ns)

    def decode(self, ready, instruction):
        return Observation({}, np.zeros(8, np.float32), instruction, ready.stamp_ns)


class Log:
    """Keeps what was said."""

    def __init__(self):
        self.said = []

    def info(self, text):
        self.said.append(text)

    def warning(self, text):
        self.said.append(text)

    def error(self, text, exc=None):
        self.said.append(text)


class Rig:
    """A worker over a real policy and memory, whose results are kept in order.

    now_ns: the node's clock, moved by the test alone.
    """

    def __init__(self, start=True, period=8, **config):
        self.inputs, self.log, self.now_ns = Inputs(), Log(), 100 * NS
        self.streams = self.inputs.streams
        self.published, self.repeated, self.new = [], [], threading.Condition()
        self.on_publish = None
        self.backbone = TinyBackbone()
        self.memory = tiny_memory(memory_step_period=period)
        settings = {"mode": "lockstep", "enabled_at_start": True, "instruction": "go", **config}
        self.worker = PolicyWorker(
            Policy(self.backbone, self.memory, PolicyConfig(memory_step_period=period)),
            self.inputs,
            PolicyNodeConfig(**settings),
            publish=self._publish,
            repeat=self.repeated.append,
            listening=lambda: True,
            on_epoch=lambda: None,
            now_ns=lambda: self.now_ns,
            log=self.log,
        )
        if start:
            self.worker.start()
            self.worker.set_active(True)

    def _publish(self, result, send_chunk):
        if self.on_publish is not None:
            self.on_publish()
        with self.new:
            self.published.append((result, send_chunk))
            self.new.notify_all()
        return result.sequence

    @property
    def results(self):
        return [result for result, _ in self.published]

    def put(self, stamp_ns):
        self.streams.put("camera", None, stamp_ns)

    def wait(self, count):
        with self.new:
            assert self.new.wait_for(lambda: len(self.published) >= count, WAIT_S), self.log.said

    def query(self, stamp_ns):
        """Put an observation and wait for what it gives."""
        count = len(self.published) + 1
        self.put(stamp_ns)
        self.wait(count)
        return self.results[-1]

    def query_in_flight(self, stamp_ns):
        """Put an observation whose inference goes on until `backbone.release` is set."""
        self.backbone.entered.clear()
        self.backbone.release.clear()
        self.put(stamp_ns)
        assert self.backbone.entered.wait(WAIT_S)

    def looks(self):
        """Wait until the thread has looked once more."""
        seen = threading.Event()
        before, self.worker._look = self.worker._look, lambda: (before(), seen.set())
        self.worker.wake()
        assert seen.wait(WAIT_S)
        self.worker._look = before

    def fault(self):
        wait_until(lambda: self.worker.fault != "")
        return self.worker.fault


def let_pass(seconds):
    """Only to show that something does NOT happen."""
    threading.Event().wait(seconds)


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


@pytest.fixture
def make():
    made = []

    def rig(**options):
        made.append(Rig(**options))
        return made[-1]

    yield rig
    for one in made:
        one.backbone.release.set()
        one.worker.stop()


@pytest.fixture
def rig(make):
    made = make()
    made.worker.episode_started(STEP_NS)
    return made


# -- epochs and episodes ----------------------------------------------------------------------------------------


def test_an_observation_chosen_before_an_episode_starts_is_not_its_first(rig):
    rig.query(STEP_NS)
    # A simulator begins again at its first stamp just when an observation of the run before is taken up.
    rig.streams.after_joined = lambda: rig.worker.episode_started(STEP_NS, 1)
    rig.put(2 * STEP_NS)
    wait_until(lambda: rig.worker._episode == (STEP_NS, (1,)))
    first = rig.query(STEP_NS)
    assert (first.stamp_ns, first.sequence, first.steps) == (STEP_NS, 0, 1)
    assert first.epoch == rig.worker.epoch > rig.results[0].epoch


def test_a_new_epoch_returns_only_after_what_is_being_published_has_left(rig):
    entered, release, ended = threading.Event(), threading.Event(), threading.Event()

    def hold():
        entered.set()
        assert release.wait(WAIT_S)

    rig.on_publish = hold
    rig.put(STEP_NS)
    assert entered.wait(WAIT_S)

    def reset():
        rig.worker.new_epoch("reset requested")
        ended.set()

    caller = threading.Thread(target=reset)
    caller.start()
    assert not ended.wait(0.2)  # else the older chunk would leave after the answer
    rig.on_publish = None
    release.set()
    caller.join(WAIT_S)
    assert ended.is_set()
    assert [result.epoch < rig.worker.epoch for result in rig.results] == [True]


def test_a_new_epoch_does_not_wait_for_inference(rig):
    rig.query_in_flight(STEP_NS)
    epoch = rig.worker.new_epoch("reset requested")
    rig.worker.set_instruction("other")
    rig.worker.set_enabled(True)
    assert rig.worker.clear_fault() == ""
    rig.backbone.release.set()
    result = rig.query(2 * STEP_NS)
    assert [result.epoch for result in rig.results] == [epoch]
    assert (result.stamp_ns, result.steps) == (2 * STEP_NS, 1)


def test_epochs_only_grow_however_fast_they_follow(rig):
    epochs = [rig.worker.new_epoch("start") for _ in range(100)]
    assert epochs == sorted(set(epochs))


FIRST = {"episode": 1, "suite": "libero_10", "task": 0, "init_state": 0, "seed": 7}


@pytest.mark.parametrize(
    "changed",
    [{"episode": 2}, {"suite": "libero_object"}, {"task": 1}, {"init_state": 1}, {"seed": 8}],
    ids=str,
)
def test_an_episode_is_told_from_the_one_before_by_any_part_of_its_identity(rig, changed):
    rig.worker.episode_started(STEP_NS, *FIRST.values())
    first = rig.query(STEP_NS)
    rig.worker.episode_started(STEP_NS, *FIRST.values())
    assert rig.worker.epoch == first.epoch, "the same one again"
    rig.worker.episode_started(STEP_NS, *(FIRST | changed).values())
    again = rig.query(STEP_NS)
    assert again.epoch > first.epoch
    assert (again.sequence, again.steps) == (0, 1)
    assert rig.repeated == []


def test_an_episode_that_ended_and_starts_again_is_another(rig):
    first = rig.query(STEP_NS)
    rig.worker.episode_finished()
    rig.worker.episode_started(STEP_NS)
    assert rig.query(STEP_NS).epoch > first.epoch


def test_reset_never_keeps_memory_and_epoch_when_a_second_run_begins_at_the_same_stamp(make):
    rig = make(reset="never")
    rig.worker.episode_started(STEP_NS, 1)
    first = [rig.query(index * STEP_NS) for index in (1, 2, 3)]
    rig.worker.episode_finished()
    rig.worker.episode_started(STEP_NS, 2)
    second = [rig.query(index * STEP_NS) for index in (1, 2)]
    assert {result.epoch for result in first + second} == {rig.worker.epoch}
    assert [result.steps for result in first + second] == [1, 2, 3, 4, 5]
    assert [result.sequence for result in second] == [3, 4]
    assert rig.repeated == []
    assert rig.worker.rejections.items() == []


def test_reset_never_infers_the_second_of_two_episodes_of_one_chunk(make):
    rig = make(reset="never")
    for episode in (1, 2):
        rig.worker.episode_started(STEP_NS, episode)
        assert rig.query(STEP_NS).steps == episode
    # Only now it is a repeat.
    rig.put(STEP_NS)
    wait_until(lambda: rig.repeated == [1])
    assert rig.memory.steps == 2


def test_reset_never_withholds_a_chunk_in_flight_over_an_episodes_start_and_keeps_the_memory(make):
    rig = make(reset="never")
    rig.worker.episode_started(STEP_NS, 1)
    rig.query(STEP_NS)
    rig.query_in_flight(2 * STEP_NS)
    rig.worker.episode_started(STEP_NS, 2)
    rig.backbone.release.set()
    rig.wait(2)
    first = rig.query(STEP_NS)
    assert [sent for _, sent in rig.published] == [True, False, True]
    assert first.epoch == rig.results[0].epoch
    assert [result.steps for result in rig.results] == [1, 2, 3]
    assert rig.worker.rejections.items() == []


def test_reset_never_does_not_step_on_an_observation_chosen_before_the_next_episode(make):
    rig = make(reset="never")
    rig.worker.episode_started(STEP_NS, 1)
    rig.query(STEP_NS)
    rig.streams.after_joined = lambda: rig.worker.episode_started(STEP_NS, 2)
    rig.put(2 * STEP_NS)
    wait_until(lambda: rig.worker._episode == (STEP_NS, (2,)))
    rig.query(STEP_NS)
    assert [(result.stamp_ns, result.steps) for result in rig.results] == [(STEP_NS, 1), (STEP_NS, 2)]


# -- stamps -----------------------------------------------------------------------------------------------------


def test_an_answered_stamp_is_repeated_and_stepped_once(rig):
    rig.query(STEP_NS)
    for count in (1, 2):
        rig.put(STEP_NS)
        wait_until(lambda count=count: len(rig.repeated) == count)
    assert rig.repeated == [0, 0]
    assert rig.memory.steps == 1


def test_a_publish_that_fails_is_a_fault_and_its_stamp_is_not_stepped_again(rig):
    rig.query(STEP_NS)

    def fail():
        rig.on_publish = None
        raise RuntimeError("publisher is invalid")

    rig.on_publish = fail
    rig.put(2 * STEP_NS)
    assert rig.fault() == "RuntimeError: publisher is invalid"
    assert rig.worker.clear_fault() == "RuntimeError: publisher is invalid"
    rig.put(2 * STEP_NS)
    assert "was rejected; ~/reset" in rig.fault()
    assert (rig.memory.steps, len(rig.published), rig.repeated) == (2, 1, [])
    rig.worker.clear_fault()
    assert rig.query(3 * STEP_NS).steps == 3


def realtime(make, **options):
    """A rig whose messages stay fresh, queried every 0.05 s."""
    ages = {"image_max_age": 3600.0, "proprio_max_age": 3600.0, "max_future": 3600.0}
    return make(mode="realtime", period=1, **(ages | options))


def test_realtime_never_uses_the_same_messages_twice_however_short_the_period(make):
    rig = realtime(make)
    assert rig.worker.step_ns == 50_000_000
    for count in (1, 2):
        stamp_ns = rig.now_ns + count
        rig.query(stamp_ns)
        let_pass(0.2)  # four periods
        assert len(rig.published) == count
        assert rig.results[-1].stamp_ns == stamp_ns
    assert rig.memory.steps == 2


def test_realtime_a_slow_query_is_not_made_up_for_by_a_burst(make):
    rig = realtime(make)

    def frames(seconds):
        begin = time.monotonic()
        while time.monotonic() < begin + seconds:
            rig.now_ns += 1
            rig.put(rig.now_ns)
            let_pass(0.002)
        return time.monotonic() - begin

    rig.query_in_flight(rig.now_ns)
    frames(0.5)  # ten periods
    rig.backbone.release.set()
    passed = frames(0.2)
    assert 2 <= rig.memory.steps <= passed / 0.05 + 3


def test_realtime_a_broken_message_is_rejected_once_and_not_once_a_period(make, monkeypatch):
    rig = realtime(make)

    def broken(ready, instruction):
        raise UserError("camera: image is 0x0; an image needs pixels")

    with monkeypatch.context() as patch:
        patch.setattr(rig.inputs, "decode", broken)
        rig.put(rig.now_ns)
        wait_until(lambda: rig.worker.rejections.items() != [])
        let_pass(0.2)  # four periods
        assert rig.worker.rejections.items() == [("camera: image is #", 1)]
    assert rig.query(rig.now_ns + 1).steps == 1


@pytest.mark.parametrize("why", ["enabled", "disabled", "fault"])
def test_realtime_a_clock_that_goes_back_starts_an_epoch_also_while_nothing_is_inferred(make, why):
    rig = realtime(make)
    first = rig.query(rig.now_ns)
    if why == "disabled":
        rig.worker.set_enabled(False)
    elif why == "fault":
        rig.backbone.error = RuntimeError("broken")
        rig.put(rig.now_ns + 1)
        rig.fault()
    rig.looks()
    rig.now_ns = NS
    wait_until(lambda: rig.worker.epoch > first.epoch)
    assert rig.streams.snapshot() == {}
    rig.looks()
    # Time may have passed the last stamp again by the time that inference goes on.
    rig.now_ns, rig.backbone.error = 200 * NS, None
    assert bool(rig.worker.clear_fault()) == (why == "fault")
    rig.worker.set_enabled(True)
    again = rig.query(rig.now_ns)
    assert (again.steps, again.sequence) == (1, 0)
    assert dict(rig.worker.rejections.items())["clock went back"] == 1


# -- the model --------------------------------------------------------------------------------------------------


def test_a_warm_up_waits_for_a_query_that_is_still_under_way(rig):
    rig.query_in_flight(STEP_NS)
    warm = threading.Event()

    def activate_again():
        rig.worker.set_active(False)
        rig.worker.warm_up()
        warm.set()
        rig.worker.set_active(True)

    caller = threading.Thread(target=activate_again)
    caller.start()
    assert not warm.wait(0.2)
    rig.backbone.release.set()
    caller.join(WAIT_S)
    assert (rig.backbone.warm_ups, rig.backbone.at_once) == (1, 1)
    rig.worker.episode_started(STEP_NS, 1)
    assert rig.query(STEP_NS).steps == 1, "the query before entered neither memory nor results"
    assert len(rig.published) == 1


@pytest.mark.parametrize("stop", ["emergency stop", "disable"])
def test_a_chunk_in_flight_does_not_leave_though_what_withheld_it_is_over_before_it_is_there(rig, stop):
    rig.worker.episode_started(STEP_NS, 1)
    rig.query_in_flight(STEP_NS)
    if stop == "disable":
        rig.worker.set_enabled(False)
        rig.worker.set_enabled(True)
    else:
        rig.worker.emergency_stop()
        rig.worker.clear_fault()
    rig.backbone.release.set()
    rig.wait(1)
    assert rig.published[-1][1] is False
    rig.put(2 * STEP_NS)
    rig.wait(2)
    assert rig.published[-1][1] is True


def test_a_query_waits_for_a_warm_up_that_is_still_under_way(rig):
    rig.backbone.release.clear()
    caller = threading.Thread(target=rig.worker.warm_up)
    caller.start()
    assert rig.backbone.entered.wait(WAIT_S)
    rig.put(STEP_NS)
    wait_until(lambda: rig.streams.snapshot() == {})  # taken up
    rig.backbone.release.set()
    rig.wait(1)
    caller.join(WAIT_S)
    assert rig.backbone.at_once == 1


def test_the_threshold_told_is_the_one_compared_with_though_it_changes_before_publishing(rig):
    rig.worker.apply(replace(rig.worker.config, gate__threshold=0.0))
    rig.query_in_flight(STEP_NS)
    rig.worker.apply(replace(rig.worker.config, gate__threshold=0.25))  # during inference: in time
    rig.backbone.release.set()
    rig.on_publish = lambda: rig.worker.apply(
        replace(rig.worker.config, gate__threshold=1.0)
    )  # after the gate: too late
    rig.wait(1)
    told = rig.results[0].memory_step
    assert told.threshold == 0.25
    assert told.fired == (told.probability > 0.25)
    assert rig.query(2 * STEP_NS).memory_step.threshold == 1.0
    assert not rig.results[1].memory_step.fired


def test_a_worker_that_was_stopped_publishes_nothing_more(rig):
    rig.query_in_flight(STEP_NS)
    rig.worker.stop(timeout=0.0)
    rig.backbone.release.set()
    rig.worker._thread.join(WAIT_S)
    assert not rig.worker._thread.is_alive()
    assert rig.published == []


def test_an_error_of_a_model_closed_while_stopping_is_no_fault(rig):
    rig.backbone.error = RuntimeError("closed")
    rig.query_in_flight(STEP_NS)
    rig.worker.stop(timeout=0.0)
    rig.backbone.release.set()
    rig.worker._thread.join(WAIT_S)
    assert rig.worker.fault == ""


# -- saved states -----------------------------------------------------------------------------------------------


def nan(state):
    state["fast_weights"][3, 4] = np.nan


def other_shape(state):
    state["fast_weights"] = np.zeros((2, 2), np.float32)


def other_type(state):
    state["previous_read"] = state["previous_read"].astype(np.float64)


def negative_count(state):
    state["steps"] = np.array(-1)


def a_part_missing(state):
    del state["writes"]


@pytest.mark.parametrize("spoil", [nan, other_shape, other_type, negative_count, a_part_missing])
def test_a_state_that_does_not_fit_is_refused_before_an_epoch_begins(rig, tmp_path, spoil):
    rig.worker.apply(replace(rig.worker.config, gate__threshold=0.0))
    rig.query(STEP_NS)
    state, epoch = rig.memory.state_dict(), rig.worker.epoch
    spoiled = dict(state)
    spoiled["fast_weights"] = state["fast_weights"].copy()
    spoil(spoiled)
    write_state(spoiled, rig.memory.weights_hash, tmp_path / "m.safetensors", 1)
    with pytest.raises(UserError, match="memory state") as refused:
        rig.worker.load_state(str(tmp_path / "m.safetensors"))
    assert "\n" not in str(refused.value)
    following = rig.query(2 * STEP_NS)
    assert (following.epoch, following.steps, following.sequence, rig.worker.fault) == (epoch, 2, 1, "")


def test_the_state_saved_while_a_query_is_under_way_is_the_one_before_it(rig, tmp_path):
    path = tmp_path / "m.safetensors"
    rig.worker.apply(replace(rig.worker.config, gate__threshold=0.0))
    rig.query(STEP_NS)
    before = rig.memory.state_dict()["fast_weights"]
    rig.query_in_flight(2 * STEP_NS)
    rig.worker.save_state(str(path))
    rig.backbone.release.set()
    rig.wait(2)
    assert load_file(path)["fast_weights"].tobytes() == before.tobytes()
    assert rig.memory.state_dict()["fast_weights"].tobytes() != before.tobytes()


def test_a_foreign_file_is_not_replaced_by_a_saved_state(rig, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"w": np.ones(3, np.float32)}, path)
    before = path.read_bytes()
    with pytest.raises(UserError, match="exists and is no memory state"):
        rig.worker.save_state(str(path))
    assert path.read_bytes() == before
