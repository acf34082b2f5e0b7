"""Synthetic recall tasks (paper section 5.1): streams in which few steps matter, and what a perfect memory must write.

NumPy only: the same generator state gives the same episodes. B = episodes, T = steps, D = width.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aura_ros.errors import UserError
from aura_ros.training.episodes import DISTRACTOR, EVENT, FILLER, NO_TARGET, QUERY, Episodes, Task


@dataclass(frozen=True)
class Floors:
    """Steps per write of three ways to keep all answers, counted on episodes.

    events: writes every event. skip: leaves out those that change nothing stored. default: leaves out a first binding to
    class 0 too. Only the last is a bound, and for memories whose empty answer is class 0: they may write less than the
    other two, but not less than that.
    """

    events: float
    skip: float
    default: float


def write_floors(episodes: Episodes) -> Floors:
    """Count them on these very episodes, as ratios to writing at every step."""
    steps = episodes.kinds.size
    events = int((episodes.kinds == EVENT).sum())
    return Floors(
        events=steps / max(events, 1),
        skip=steps / max(int(episodes.changes.sum()), 1),
        default=steps / max(int(episodes.news.sum()), 1),
    )


@dataclass(frozen=True)
class NoisyRecall:
    """Multi-binding associative recall in a stream of distractors; the latest value of a key wins.

    `bindings` of `keys` are bound to a random value at random steps of the first steps - queries, each is bound
    again to a random value with probability `overwrite`; the other steps are distractors (random key and value,
    no flag) with probability `distractor`, else zeros; in the last `queries` steps as many different bound keys
    are asked for. Observation: one-hot key, one-hot value, bind flag, query flag.

    probe: for training alone, probability that a step of zeros asks for a random key instead; the answer for a key that
    was not bound yet is class 0, which gives an empty memory a value to stand for.
    """

    name: str
    keys: int
    values: int
    bindings: int
    queries: int
    overwrite: float
    distractor: float
    steps: int
    probe: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.queries <= self.bindings <= self.keys:
            raise UserError(
                f"task '{self.name}' has {self.queries} queries, {self.bindings} bindings and {self.keys} keys; "
                "they must not fall in this order below 1"
            )
        if self.steps < 2 * self.bindings + self.queries:
            raise UserError(
                f"task '{self.name}' has {self.steps} steps; {2 * self.bindings + self.queries} or more are needed"
            )

    @property
    def input_dim(self) -> int:
        """Width of an observation."""
        return self.keys + self.values + 2

    @property
    def classes(self) -> int:
        """Classes to answer with."""
        return self.values

    @property
    def token_classes(self) -> int:
        """Nothing shown, or a key, bound or not."""
        return 1 + 2 * self.keys

    @property
    def chance(self) -> float:
        """Accuracy of guessing."""
        return 1.0 / self.values

    def easier(self, share: float) -> NoisyRecall:
        """With this share of the bindings, and no more queries than that."""
        bindings = max(round(share * self.bindings), 1)
        return dataclasses.replace(self, bindings=bindings, queries=min(self.queries, bindings))

    def episodes(self, count: int, rng: np.random.Generator) -> Episodes:
        """Make `count` episodes; the same generator state gives the same bytes."""
        stream = self.steps - self.queries
        rows = np.arange(count)[:, None]
        bound = _shuffled(rng, count, self.keys)[:, : self.bindings]
        again = rng.random((count, self.bindings)) < self.overwrite
        # Each bound key once, or twice where it is bound again, at distinct random steps in random order.
        sequence = np.concatenate([bound, np.where(again, bound, -1)], axis=1)
        sequence = np.take_along_axis(sequence, _shuffled(rng, count, 2 * self.bindings), axis=1)
        steps = np.sort(_shuffled(rng, count, stream)[:, : 2 * self.bindings], axis=1)
        # A step whose slot is empty (-1: not bound again) goes back to the filler.
        used = sequence >= 0
        key = np.full((count, stream), -1)
        key[rows, steps] = np.where(used, sequence, -1)
        value = rng.integers(0, self.values, (count, stream))
        event = key >= 0
        noise = ~event & (rng.random((count, stream)) < self.distractor)
        key = np.where(noise, rng.integers(0, self.keys, (count, stream)), key)
        # Drawn only where it is asked for: without, the same generator state gives the same episodes as ever.
        probed = np.zeros_like(event)
        if self.probe:
            probed = ~event & ~noise & (rng.random((count, stream)) < self.probe)
            key = np.where(probed, rng.integers(0, self.keys, (count, stream)), key)
        targets = np.full((count, self.steps), NO_TARGET, np.int64)

        changes, news = np.zeros((count, self.steps), bool), np.zeros((count, self.steps), bool)
        stored = np.full((count, self.keys), -1)
        everyone = rows[:, 0]
        for t in range(stream):
            on = event[:, t]
            at, new = key[:, t], value[:, t]
            old = stored[everyone, at]
            changes[:, t] = on & (old != new)
            news[:, t] = on & (np.where(old < 0, 0, old) != new)
            stored[everyone[on], at[on]] = new[on]
            targets[:, t] = np.where(probed[:, t], np.maximum(old, 0), NO_TARGET)

        asked = np.take_along_axis(bound, _shuffled(rng, count, self.bindings)[:, : self.queries], axis=1)
        observations = np.zeros((count, self.steps, self.input_dim), np.float32)
        shown, when = np.nonzero(event | noise)
        observations[shown, when, key[shown, when]] = 1.0
        observations[shown, when, self.keys + value[shown, when]] = 1.0
        observations[:, :stream, -2] = event
        asking, when = np.nonzero(probed)
        observations[asking, when, key[asking, when]] = 1.0
        observations[:, :stream, -1] = probed
        observations[rows, np.arange(stream, self.steps)[None], asked] = 1.0
        observations[:, stream:, -1] = 1.0
        targets[:, stream:] = stored[rows, asked]
        kinds = np.full((count, self.steps), QUERY, np.uint8)
        kinds[:, :stream] = np.where(
            event, EVENT, np.where(noise, DISTRACTOR, np.where(probed, QUERY, FILLER))
        )
        tokens = np.concatenate([key, asked], axis=1) + 1
        tokens[:, :stream] += self.keys * event
        return Episodes(observations, targets, kinds, tokens, changes, news)


@dataclass(frozen=True)
class SparseRecall:
    """A stream whose rare events carry a symbol; queries ask for the latest event's symbol.

    A step is an event with probability `event`; if the first half has none, step 0 becomes one. Another step, once
    an event was seen, is a query with probability `query`. Every step shows a random symbol: an event's counts.
    Observation: one-hot symbol, event flag, query flag. Raises UserError for fewer than 2 steps or an event probability
    outside 0..1 (1 excluded): nothing would ever be asked.
    """

    name: str
    symbols: int
    event: float
    query: float
    steps: int

    def __post_init__(self) -> None:
        # A query comes after an event and is none itself.
        if self.steps < 2:
            raise UserError(
                f"task '{self.name}' asks nothing in {self.steps} steps; give a length of 2 or more"
            )
        if not 0 <= self.event < 1:
            raise UserError(
                f"event {self.event:g} is not allowed; give a probability below 1, so that task '{self.name}' asks something"
            )

    @property
    def input_dim(self) -> int:
        """Width of an observation."""
        return self.symbols + 2

    @property
    def classes(self) -> int:
        """Classes to answer with."""
        return self.symbols

    @property
    def token_classes(self) -> int:
        """A symbol, of an event or not."""
        return 2 * self.symbols

    @property
    def chance(self) -> float:
        """Accuracy of guessing."""
        return 1.0 / self.symbols

    def easier(self, share: float) -> SparseRecall:
        """Itself: it remembers one event at a time, which is easy enough."""
        return self

    def episodes(self, count: int, rng: np.random.Generator) -> Episodes:
        """Make `count` episodes; the same generator state gives the same bytes."""
        shape = (count, self.steps)
        event = rng.random(shape) < self.event
        event[:, 0] |= ~event[:, : max(self.steps // 2, 1)].any(axis=1)
        symbol = rng.integers(0, self.symbols, shape)
        seen = np.maximum.accumulate(np.where(event, np.arange(self.steps)[None], -1), axis=1)
        query = ~event & (seen >= 0) & (rng.random(shape) < self.query)
        latest = np.take_along_axis(symbol, np.maximum(seen, 0), axis=1)
        before = np.concatenate([np.full((count, 1), -1), np.where(seen >= 0, latest, -1)[:, :-1]], axis=1)
        observations = np.zeros((*shape, self.input_dim), np.float32)
        np.put_along_axis(observations, symbol[..., None], np.float32(1.0), axis=2)
        observations[..., -2], observations[..., -1] = event, query
        kinds = np.where(event, EVENT, np.where(query, QUERY, DISTRACTOR)).astype(np.uint8)
        return Episodes(
            observations,
            np.where(query, latest, NO_TARGET).astype(np.int64),
            kinds,
            symbol + self.symbols * event,
            event & (symbol != before),
            event & (symbol != np.maximum(before, 0)),
        )


def _shuffled(rng: np.random.Generator, count: int, length: int) -> npt.NDArray[np.int64]:
    """`count` independent permutations of 0..length - 1."""
    return np.argsort(rng.random((count, length)), axis=1)


MAIN = NoisyRecall("noisy_long_recall", 8, 4, 8, 8, overwrite=0.3, distractor=0.5, steps=96)
HARD = NoisyRecall("hard_recall", 16, 8, 16, 8, overwrite=0.4, distractor=0.5, steps=128)
SPARSE = SparseRecall("sparse_recall", 4, event=0.10, query=0.4, steps=40)
EVALUATION_EPISODES = 4096
EVALUATION_SEED = 20_260_602
TASKS: dict[str, Task] = {task.name: task for task in (MAIN, HARD, SPARSE)}


def find_task(name: str, steps: int | None = None, event: float | None = None) -> Task:
    """A task by name; sparse_recall also at another length and event probability.

    Raises UserError for an unknown name, changes to another task, or a length or probability that leaves no query.
    """
    if name not in TASKS:
        raise UserError(f"task '{name}' is unknown; choose one of: {', '.join(TASKS)}")
    task = TASKS[name]
    if steps is None and event is None:
        return task
    if not isinstance(task, SparseRecall):
        raise UserError(f"task '{name}' has one length and no events; only sparse_recall takes other ones")
    return dataclasses.replace(
        task, steps=task.steps if steps is None else steps, event=task.event if event is None else event
    )


def fitting_task(input_dim: int, classes: int, name: str = "", what: str = "memory") -> str:
    """The name of the task that a memory's widths fit: `name`, or else the first.

    what: who has these widths, for the message. Raises UserError for an unknown name or if no task fits.
    """
    if name:
        find_task(name)
    for task in (TASKS[name],) if name else TASKS.values():
        if (task.input_dim, task.classes) == (input_dim, classes):
            return task.name
    wanted = ", ".join(f"{t.name} {t.input_dim} -> {t.classes}" for t in TASKS.values())
    raise UserError(
        f"{what} is {input_dim} -> {classes}, which does not fit {name or 'any recall task'}; allowed: {wanted}"
    )


def evaluation_episodes(task: Task, count: int = EVALUATION_EPISODES) -> Episodes:
    """The fixed episodes that every memory is judged on."""
    return task.episodes(count, np.random.default_rng(EVALUATION_SEED))
