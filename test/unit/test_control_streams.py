"""Which messages make an observation, by clocks that the test moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aura_ros.control.streams import NS, Hold, Ready, Streams

NAMES = ["camera", "pose", "joints"]
AGES = {"camera": 500, "pose": 200, "joints": 200}
SKEW, FUTURE = 100, 50


class Clock:
    now = 1_000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def steady():
    return Clock()


@pytest.fixture
def streams(steady):
    return Streams(NAMES, steady)


def put_all(streams, stamp_ns, **others):
    for name in NAMES:
        streams.put(name, f"{name}@{stamp_ns}", others.get(name, stamp_ns))


def fresh(streams, now_ns):
    return streams.fresh(now_ns, AGES, SKEW, FUTURE)


def test_streams_of_equal_stamps_are_joined_in_whatever_order_they_come(streams):
    for name in reversed(NAMES):
        assert isinstance(streams.joined(), Hold)
        streams.put(name, name, 7)
    ready = streams.joined()
    assert isinstance(ready, Ready)
    assert ready.stamp_ns == 7
    assert {name: sample.value for name, sample in ready.samples.items()} == {name: name for name in NAMES}


def test_a_stream_of_an_older_stamp_is_waited_for_by_name(streams):
    put_all(streams, 2 * NS, pose=1 * NS)
    hold = streams.joined()
    assert isinstance(hold, Hold)
    assert hold == Hold("waiting for pose of stamp 2.000 s", missing=True)


def test_missing_streams_are_named_and_are_nothing_to_count(streams):
    streams.put("pose", "", 1)
    for hold in (streams.joined(), fresh(streams, 1)):
        assert hold == Hold("waiting for camera, joints", missing=True, cause="")


def test_discard_forgets_only_what_was_used(streams):
    put_all(streams, 1, joints=2)
    streams.discard(1)
    assert list(streams.snapshot()) == ["joints"]
    # What was used still has an age; what was never heard of has none.
    assert streams.ages_ms(2_000_001) == {"camera": 2.0, "pose": 2.0, "joints": pytest.approx(2.0)}
    streams.clear()
    assert streams.ages_ms(2_000_001) == dict.fromkeys(NAMES, -1.0)


def test_the_newest_message_replaces_the_one_before(streams):
    put_all(streams, 1)
    put_all(streams, 2)
    ready = streams.joined()
    assert isinstance(ready, Ready)
    assert ready.samples["camera"].value == "camera@2"


def test_a_fresh_observation_has_the_oldest_stamp(streams):
    put_all(streams, 1_000, pose=950)
    ready = fresh(streams, 1_020)
    assert isinstance(ready, Ready)
    assert ready.stamp_ns == 950


@pytest.mark.parametrize(
    ("now_ns", "stamps", "cause", "text"),
    [
        (1_501, {}, "camera too old", "camera is"),
        (1_201, {"camera": 1_200}, "pose too old", "pose is"),
        (949, {}, "camera in the future", "in the future; synchronise the clocks"),
        (1_000, {"joints": 899}, "streams too far apart", "apart; allowed"),
    ],
)
def test_what_is_not_fresh_holds_with_a_cause_without_numbers(streams, now_ns, stamps, cause, text):
    put_all(streams, 1_000, **stamps)
    hold = fresh(streams, now_ns)
    assert isinstance(hold, Hold)
    assert hold.cause == cause
    assert text in hold.reason
    assert not hold.missing


@pytest.mark.parametrize(("now_ns", "joints"), [(1_200, 1_000), (950, 1_000), (1_000, 900)])
def test_at_the_very_limit_an_observation_is_still_fresh(streams, now_ns, joints):
    put_all(streams, 1_000, joints=joints)
    assert isinstance(fresh(streams, now_ns), Ready)


def test_silence_by_the_steady_clock_holds_though_the_other_clock_stands_still(streams, steady):
    put_all(streams, 1_000)
    steady.now += 200
    assert isinstance(fresh(streams, 1_000), Ready)
    steady.now += 1
    hold = fresh(streams, 1_000)
    assert isinstance(hold, Hold)
    assert hold.cause == "pose silent"


@given(
    now=st.integers(0, 3_000),
    stamps=st.lists(st.integers(0, 3_000), min_size=3, max_size=3),
    given_streams=st.sets(st.sampled_from(NAMES)),
)
def test_ready_always_means_every_stream_fresh_and_together(now, stamps, given_streams):
    streams = Streams(NAMES, Clock())
    for name, stamp in zip(NAMES, stamps, strict=True):
        if name in given_streams:
            streams.put(name, None, stamp)
    usable = (
        given_streams == set(NAMES)
        and all(-FUTURE <= now - stamp <= AGES[name] for name, stamp in zip(NAMES, stamps, strict=True))
        and max(stamps) - min(stamps) <= SKEW
    )
    answer = fresh(streams, now)
    assert isinstance(answer, Ready) == usable
    if isinstance(answer, Hold):
        assert answer.missing == (given_streams != set(NAMES))
        assert bool(answer.cause) != answer.missing
