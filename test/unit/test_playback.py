"""Playing chunks: the splice by consumed rows, and what must hold for any order and timing of chunks and ticks."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aura_ros.control.playback import Playback, Rows

PERIOD = 50_000_000
HORIZON = 8


def chunk(sequence, stamp, epoch=1, horizon=HORIZON, value=None):
    """A chunk whose every element says where it is from: 1000 sequence + row."""
    rows = np.arange(horizon, dtype=np.float32)[:, None] + 1000 * sequence if value is None else value
    return Rows(epoch, sequence, stamp, np.asarray(rows, np.float32))


def play(playback, ticks, start=0):
    """Rows at so many ticks, a period apart; None where it holds."""
    return [playback.next_row(start + tick * PERIOD) for tick in range(ticks)]


def test_the_first_chunk_starts_at_row_0_however_late_it_comes():
    playback = Playback()
    assert playback.offer(chunk(0, 0), 7 * PERIOD).start == 0
    assert [row.row for row in play(playback, 3, 7 * PERIOD)] == [0, 1, 2]


def test_a_later_chunk_is_spliced_by_the_rows_consumed_since_its_observation():
    playback = Playback()
    playback.offer(chunk(0, 0), 0)
    play(playback, 4)  # at 0, 1, 2, 3 periods
    # Seen at 1.5 periods: the rows of ticks 2 and 3 came after it.
    taken = playback.offer(chunk(1, int(1.5 * PERIOD)), 4 * PERIOD)
    assert (taken.start, taken.accepted) == (2, True)
    row = playback.next_row(4 * PERIOD)
    assert (row.values[0], row.row, row.rows_left, row.first) == (1002.0, 2, 5, True)
    assert not playback.next_row(5 * PERIOD).first


def test_rows_that_were_not_played_are_not_skipped_whatever_the_clock_says():
    playback = Playback()
    playback.offer(chunk(0, 0), 0)
    assert play(playback, 10)[8:] == [None, None]
    # It held since tick 8; the next observation is of tick 9, and the chunk comes 6 periods later.
    assert playback.offer(chunk(1, 9 * PERIOD), 15 * PERIOD).start == 0


def test_older_repeated_and_outlived_chunks_change_nothing():
    playback = Playback()
    playback.offer(chunk(1, 0, epoch=5), 0)
    play(playback, 2)
    assert playback.offer(chunk(9, PERIOD, epoch=4), 0).dropped == "of an older epoch"
    assert playback.offer(chunk(1, PERIOD, epoch=5), 0).dropped == "repeated"
    assert playback.offer(chunk(0, PERIOD, epoch=5), 0).dropped == "older than one that came before it"
    assert playback.rows_left == 6
    short = chunk(2, 0, epoch=5, horizon=2)
    assert playback.offer(short, 0).dropped == "all of its rows are past"
    assert playback.next_row(2 * PERIOD).row == 2


def test_a_new_epoch_ends_what_is_left_and_starts_at_row_0():
    playback = Playback()
    playback.offer(chunk(3, 0), 0)
    play(playback, 5)
    assert playback.offer(chunk(0, 0, epoch=2), 5 * PERIOD).start == 0
    assert playback.next_row(5 * PERIOD).values[0] == 0.0


def test_what_is_refused_is_not_played_and_what_was_played_goes_on():
    playback = Playback()
    playback.offer(chunk(0, 0), 0)
    seen = []

    def judge(rows):
        seen.append(rows)
        return "too far"

    play(playback, 2)
    assert playback.offer(chunk(1, PERIOD), 0, judge).refused == "too far"
    assert seen[0][:, 0].tolist() == [1001.0 + k for k in range(7)]  # those that would have been played
    assert playback.next_row(2 * PERIOD).values[0] == 2.0


def test_cross_fade_goes_from_the_old_rows_to_the_new_ones_and_never_outside_both():
    playback = Playback(cross_fade=3)
    playback.offer(chunk(0, 0, value=np.zeros((8, 1))), 0)
    play(playback, 2)
    playback.offer(chunk(1, 2 * PERIOD, value=np.ones((8, 1))), 2 * PERIOD)
    values = [row.values[0] for row in play(playback, 8, 2 * PERIOD)]
    assert np.allclose(values, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1])


def test_a_gripper_does_not_fade():
    playback = Playback(cross_fade=4, unfaded=(1,))
    playback.offer(chunk(0, 0, value=np.zeros((8, 2))), 0)
    playback.offer(chunk(1, 0, value=np.ones((8, 2))), 0)
    rows = play(playback, 4)
    assert [row.values[1] for row in rows] == [1.0] * 4
    assert rows[0].values[0] < 0.5


def test_a_refused_chunk_of_a_newer_epoch_makes_no_epoch_old():
    playback = Playback()
    playback.offer(chunk(0, 0, epoch=5), 0)
    assert playback.offer(chunk(0, 0, epoch=9), 0, lambda rows: "too far").refused
    assert playback.next_row(0).values[0] == 0.0
    assert playback.offer(chunk(1, PERIOD, epoch=5), PERIOD).accepted


events = st.lists(
    st.one_of(
        st.tuples(st.just("tick"), st.integers(1, 3 * PERIOD)),
        # How long ago it was seen, how much of epoch and sequence is new, how long it is.
        st.tuples(
            st.just("chunk"),
            st.integers(0, 20 * PERIOD),
            st.integers(-1, 1),
            st.integers(-1, 2),
            st.integers(1, 12),
        ),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(events, st.integers(0, 4))
def test_no_row_is_played_twice_or_skipped_against_the_consumed_count(happening, cross_fade):
    """A model of a few lines beside it: a list of what was played, and of what each chunk still has."""
    playback = Playback(cross_fade=cross_fade)
    now, epoch, sequence, identity = 0, 0, 0, 0
    played: list[int] = []  # times, of this epoch
    newest, left = (-1, -1), []  # left: (epoch, sequence, row) still to come
    last = None
    for event in happening:
        if event[0] == "tick":
            now += event[1]
            row = playback.next_row(now)
            if not left:
                assert row is None  # holds: no zero, no repetition
                continue
            assert (row.epoch, row.sequence, row.row) == left.pop(0)
            assert row.rows_left == len(left) == playback.rows_left
            played.append(now)
            if last is not None and last[:2] == (row.epoch, row.sequence):
                assert row.row == last[2] + 1
            last = (row.epoch, row.sequence, row.row)
            continue
        _, age, epochs, sequences, horizon = event
        epoch, sequence, identity = max(0, epoch + epochs), max(0, sequence + sequences), identity + 1
        stamp = now - age
        data = np.full((horizon, 1), identity, np.float32)
        taken = playback.offer(Rows(epoch, sequence, stamp, data), now)
        if (epoch, sequence) <= newest:
            assert taken.dropped
            continue
        if epoch > newest[0]:
            played, left = [], []
        newest = (epoch, sequence)
        start = sum(time >= stamp for time in played)
        assert taken.start == start
        if start < horizon:
            assert taken.accepted
            left = [(epoch, sequence, row) for row in range(start, horizon)]
        else:
            assert taken.dropped == "all of its rows are past"


@settings(max_examples=200, deadline=None)
@given(events, st.integers(0, 4))
def test_what_is_played_lies_between_what_the_chunks_say_never_a_zero_pad(happening, cross_fade):
    playback, now, sequence = Playback(cross_fade=cross_fade), 0, 0
    rng = np.random.default_rng(0)
    low, high = np.inf, -np.inf
    for event in happening:
        if event[0] == "tick":
            now += event[1]
            row = playback.next_row(now)
            assert row is None or low - 1e-5 <= row.values[0] <= high + 1e-5
        else:
            sequence += 1
            data = rng.uniform(5, 6, (event[4], 1)).astype(np.float32)
            low, high = min(low, data.min()), max(high, data.max())
            playback.offer(Rows(1, sequence, now - event[1], data), now)
