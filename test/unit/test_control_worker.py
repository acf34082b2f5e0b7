"""The policy's worker without ROS: what must hold whatever moment a call comes at."""

import threading
import time
import types

import numpy as np
import pytest

from aura_ros.control.streams import Ready, Streams
from aura_ros.memory import MemoryStep
from aura_ros.nodes.policy_config import PolicyNodeConfig
from aura_ros.nodes.policy_worker import PolicyWorker
from aura_ros.policy import PolicyStep
from aura_ros.types import LIBERO_ACTION_SPEC, ActionChunk, Observation

STEP_NS = 400_000_000
WAIT_S = 10.0


class Memory:
    """Counts; its state is its number of steps."""

    config = types.SimpleNamespace(memory_step_period=8, threshold=0.5)
    weights_hash = "0" * 64
    threshold, state_norm, state_bytes, writes = 0.5, 0.0, 4224, 0

    def __init__(self):
        self.steps = self.resets = 0

    def state_dict(self):
        return {"steps": np.array(self.steps)}

    def load_state_dict(self, state):
        self.steps = int(state["steps"])


class Policy:
    """Answers at once; chunk values are the observation's stamp in periods."""

    def __init__(self):
        self.memory = Memory()
        self.backbone = types.SimpleNamespace(info=types.SimpleNamespace(action=LIBERO_ACTION_SPEC))

    def reset(self):
        self.memory.steps = 0
        self.memory.resets += 1

    def act(self, observation):
        self.memory.steps += 1
        data = np.full((8, 7), observation.stamp_ns / STEP_NS, np.float32)
        chunk = ActionChunk(data, LIBERO_ACTION_SPEC, observation.stamp_ns)
        step = MemoryStep(True, 1.0, 0.0, 0.0, np.zeros(56, np.float32), 4096)
        return PolicyStep(chunk, step, np.zeros(4, np.float32), data, {})


class HookedStreams(Streams):
    """Runs `after_joined` once, between an observation being found and its use."""

    after_joined = None

    def joined(self):
        found = super().joined()
        if self.after_joined is not None and isinstance(found, Ready):
            hook, self.after_joined = self.after_joined, None
            hook()
        return found


class Rig:
    """A worker whose results are kept in order."""

    def __init__(self, **config):
        self.streams = HookedStreams(["camera"], lambda: 0)
        self.published, self.repeated, self.new = [], [], threading.Condition()
        self.on_publish = None
        inputs = types.SimpleNamespace(
            streams=self.streams,
            image_streams=["camera"],
            decode=lambda ready, text: Observation({}, np.zeros(0, np.float32), text, ready.stamp_ns),
        )
        nothing = types.SimpleNamespace(
            info=lambda _: None, warning=lambda _: None, error=lambda _, exc=None: None
        )
        self.worker = PolicyWorker(
            Policy(),
            inputs,
            PolicyNodeConfig(mode="lockstep", enabled_at_start=True, instruction="go", **config),
            publish=self._publish,
            repeat=self.repeated.append,
            listeners=lambda: 0,
            on_epoch=lambda: None,
            now_ns=lambda: 0,
            log=nothing,
        )
        self.worker.start()

    def _publish(self, result, send_chunk):
        if self.on_publish is not None:
            self.on_publish()
        with self.new:
            self.published.append(result)
            self.new.notify_all()
        return result

    def put(self, stamp_ns):
        self.streams.put("camera", None, stamp_ns)

    def wait(self, count):
        with self.new:
            assert self.new.wait_for(lambda: len(self.published) >= count, WAIT_S)


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


@pytest.fixture
def rig():
    made = Rig()
    made.worker.set_active(True)
    made.worker.episode_started(STEP_NS)
    yield made
    made.worker.stop()


def test_an_observation_chosen_before_an_episode_starts_is_not_its_first(rig):
    rig.put(STEP_NS)
    rig.wait(1)
    # A simulator begins again at its first stamp just when an observation of the run before is taken up.
    rig.streams.after_joined = lambda: rig.worker.episode_started(STEP_NS, 1)
    rig.put(2 * STEP_NS)
    wait_until(lambda: rig.worker._episode == (STEP_NS, 1))
    rig.put(STEP_NS)
    rig.wait(2)
    first = rig.published[1]
    assert (first.stamp_ns, first.sequence, first.steps) == (STEP_NS, 0, 1)
    assert first.epoch == rig.worker.epoch > rig.published[0].epoch


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
    assert [result.epoch < rig.worker.epoch for result in rig.published] == [True]


def test_a_new_epoch_does_not_wait_for_inference(rig):
    entered, release = threading.Event(), threading.Event()
    act = rig.worker.policy.act

    def slow(observation):
        entered.set()
        assert release.wait(WAIT_S)
        return act(observation)

    rig.worker.policy.act = slow
    rig.put(STEP_NS)
    assert entered.wait(WAIT_S)
    epoch = rig.worker.new_epoch("reset requested")
    rig.worker.set_instruction("other")
    rig.worker.set_enabled(True)
    assert rig.worker.clear_fault() == ""
    release.set()
    rig.put(2 * STEP_NS)
    rig.wait(1)
    assert [result.epoch for result in rig.published] == [epoch]
    assert rig.published[0].stamp_ns == 2 * STEP_NS


def test_epochs_only_grow_however_fast_they_follow(rig):
    epochs = [rig.worker.new_epoch("start") for _ in range(100)]
    assert epochs == sorted(set(epochs))


def test_each_episode_is_told_from_the_last_by_more_than_its_stamp(rig):
    epochs = {rig.worker.epoch}
    rig.worker.episode_started(STEP_NS)
    assert rig.worker.epoch in epochs
    rig.worker.episode_started(STEP_NS, 1)
    epochs.add(rig.worker.epoch)
    rig.worker.episode_finished()
    rig.worker.episode_started(STEP_NS, 1)
    epochs.add(rig.worker.epoch)
    assert len(epochs) == 3


def test_an_answered_stamp_is_repeated_and_stepped_once(rig):
    rig.put(STEP_NS)
    rig.wait(1)
    for count in (1, 2):
        rig.put(STEP_NS)
        wait_until(lambda count=count: len(rig.repeated) == count)
    assert rig.repeated == [rig.published[0]] * 2
    assert rig.worker.policy.memory.steps == 1


def test_a_worker_that_was_stopped_publishes_nothing_more(rig):
    entered, release = threading.Event(), threading.Event()
    act = rig.worker.policy.act

    def slow(observation):
        entered.set()
        assert release.wait(WAIT_S)
        return act(observation)

    rig.worker.policy.act = slow
    rig.put(STEP_NS)
    assert entered.wait(WAIT_S)
    rig.worker.stop(timeout=0.0)
    release.set()
    rig.worker._thread.join(WAIT_S)
    assert not rig.worker._thread.is_alive()
    assert rig.published == []


def test_an_error_of_a_model_closed_while_stopping_is_no_fault(rig):
    entered, release = threading.Event(), threading.Event()

    def closed(observation):
        entered.set()
        assert release.wait(WAIT_S)
        raise RuntimeError("closed")

    rig.worker.policy.act = closed
    rig.put(STEP_NS)
    assert entered.wait(WAIT_S)
    rig.worker.stop(timeout=0.0)
    release.set()
    rig.worker._thread.join(WAIT_S)
    assert rig.worker.fault == ""
