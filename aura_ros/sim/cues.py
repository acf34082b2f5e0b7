"""Tasks whose target is shown for a moment and then hidden, in official LIBERO scenes: which, and when what lights up.

The arm is held first: a sweep that depends on nothing but the episode moves it, whatever the policy answers. Meanwhile the
cue lights up once, at any time, and objects that mean nothing light up just alike. Then the policy acts. Nothing that it
sees from the end of the cue on differs between an episode and its twin with the other cue. NumPy only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aura_ros.errors import UserError
from aura_ros.sim.suites import EpisodeConfig

# Control steps: a flash lasts a second; the cue begins at any step up to LEAD; of time between two flashes at the least;
# between two distractors on average; of a policy's chunk, for the hold ends where a query is due.
FLASH, LEAD, GAP, DISTRACTOR_EVERY, CHUNK = 20, 120, 4, 60, 8
# In cue_order from the first flash's end to the second's begin.
BETWEEN = (4, 40)
TRIES = 100
STREAM = 52_583


@dataclass(frozen=True)
class Candidate:
    """One of two targets. shown_by: what lights up for it. goal: LIBERO's predicate. told: an instruction that names it."""

    shown_by: str
    goal: tuple[str, str, str]
    told: str


@dataclass(frozen=True)
class CueTask:
    """suite, task: whose scene and initial states it has. distractors: what lights up and means nothing.

    both: both candidates light up, and the last counts; else one does.
    """

    suite: str
    task: int
    instruction: str
    candidates: tuple[Candidate, Candidate]
    distractors: tuple[str, ...]
    both: bool = False


@dataclass(frozen=True)
class Flash:
    """An object is lit from step `start` up to, and without, `stop`."""

    item: str
    start: int
    stop: int


@dataclass(frozen=True)
class Schedule:
    """held: control steps before the policy's actions count. flashes: in order. cue: start and stop of what tells."""

    held: int = 0
    flashes: tuple[Flash, ...] = ()
    cue: tuple[int, int] = (0, 0)

    def lit(self, step: int) -> tuple[str, ...]:
        """The objects that are lit in a frame of that step."""
        return tuple(flash.item for flash in self.flashes if flash.start <= step < flash.stop)


def _fetch(task: int, first: str, second: str, distractors: tuple[str, ...], both: bool) -> CueTask:
    """Which of two objects of a libero_object scene to put into the basket."""

    def candidate(words: str) -> Candidate:
        item = words.replace(" ", "_") + "_1"
        return Candidate(
            item,
            ("in", item, "basket_1_contain_region"),
            f"pick up the {words} and place it in the basket",
        )

    when = "lit up last" if both else "lit up"
    return CueTask(
        "libero_object",
        task,
        f"pick up the one that {when}, the {first} or the {second}, and place it in the basket",
        (candidate(first), candidate(second)),
        distractors,
        both,
    )


_SOUP = (0, "alphabet soup", "salad dressing", ("butter_1", "cream_cheese_1", "milk_1", "tomato_sauce_1"))
_KETCHUP = (4, "ketchup", "salad dressing", ("bbq_sauce_1", "cream_cheese_1", "milk_1"))
_PUDDING = "chocolate_pudding_1"
_REGION = "living_room_table_plate_{}_region"
_BESIDE = "put the chocolate pudding to the {} of the plate"

CUE_TASKS: dict[str, tuple[CueTask, ...]] = {
    "cue_object": (_fetch(*_SOUP, both=False), _fetch(*_KETCHUP, both=False)),
    "cue_place": (
        CueTask(
            "libero_90",
            69,
            "put the chocolate pudding to the left of the plate if the white mug lit up, to the right if the red mug did",
            (
                Candidate(
                    "porcelain_mug_1", ("on", _PUDDING, _REGION.format("left")), _BESIDE.format("left")
                ),
                Candidate(
                    "red_coffee_mug_1", ("on", _PUDDING, _REGION.format("right")), _BESIDE.format("right")
                ),
            ),
            ("plate_1", _PUDDING),
        ),
    ),
    "cue_order": (_fetch(*_SOUP, both=True), _fetch(*_KETCHUP, both=True)),
}


def cue_task(config: EpisodeConfig) -> CueTask:
    """The task of an episode. Raises UserError for a suite without cues."""
    if not config.has_cue:
        raise UserError(f"suite '{config.suite}' has no cue; choose one of {', '.join(CUE_TASKS)}")
    return CUE_TASKS[config.suite][config.task]


def official(config: EpisodeConfig) -> EpisodeConfig:
    """The official episode whose scene and initial state this one has; itself, if it is official."""
    if not config.has_cue:
        return config
    task = cue_task(config)
    return dataclasses.replace(
        config, suite=task.suite, task=task.task, cue=0, named=False, max_steps=config.step_limit
    )


def generator(config: EpisodeConfig, stream: int) -> np.random.Generator:
    """Random numbers of an episode whatever its cue."""
    suite = [ord(letter) for letter in config.suite]
    numbers = (config.task, config.init_state, config.displaced, config.seed, config.delay)
    return np.random.default_rng([stream, *suite, *numbers])


def schedule(config: EpisodeConfig) -> Schedule:
    """When what lights up. The same for both cues but for what the cue says; empty for a suite without cues."""
    if not config.has_cue:
        return Schedule()
    task, rng = cue_task(config), generator(config, STREAM)
    start = int(rng.integers(0, LEAD + 1))
    before = FLASH + int(rng.integers(BETWEEN[0], BETWEEN[1] + 1)) if task.both else 0
    start += before
    # The first step that counts is one of a query.
    start += -(start + FLASH + config.delay) % CHUNK
    held = start + FLASH + config.delay
    shown, other = task.candidates[config.cue], task.candidates[1 - config.cue]
    flashes = [Flash(shown.shown_by, start, start + FLASH)]
    if task.both:
        flashes.append(Flash(other.shown_by, start - before, start - before + FLASH))
    flashes += _distractors(task.distractors, flashes, held, rng)
    return Schedule(held, tuple(sorted(flashes, key=lambda flash: flash.start)), (start, start + FLASH))


def _distractors(
    items: tuple[str, ...], taken: list[Flash], held: int, rng: np.random.Generator
) -> list[Flash]:
    """At least one, where there is room, all over the hold."""
    busy = [(flash.start, flash.stop) for flash in taken]
    wanted = max(1, int(rng.poisson(held / DISTRACTOR_EVERY)))
    found: list[Flash] = []
    for _ in range(TRIES):
        if len(found) == wanted or held < FLASH:
            break
        start = int(rng.integers(0, held - FLASH + 1))
        item = items[int(rng.integers(len(items)))]
        if all(start + FLASH + GAP <= begin or end + GAP <= start for begin, end in busy):
            busy.append((start, start + FLASH))
            found.append(Flash(item, start, start + FLASH))
    return found


# The sweep of the arm during the hold


SWEEP_STREAM = 52_584
# m, around where the hand is at rest: the reach of the waypoints along x, y and up. Steps for each; the last is home.
SWEEP, UP_M, WAYPOINT_STEPS = (0.08, 0.14), 0.10, 30


def waypoints(config: EpisodeConfig, held: int) -> npt.NDArray[np.float64]:
    """Where the hand goes during the hold, float64 [n, 3], m, from where it is at rest; the last one is zero."""
    rng = generator(config, SWEEP_STREAM)
    count = max(1, -(-held // WAYPOINT_STEPS))
    points = rng.uniform((-SWEEP[0], -SWEEP[1], 0.0), (*SWEEP, UP_M), (count, 3))
    points[-1] = 0.0
    return points


def waypoint_at(points: npt.NDArray[np.float64], step: int, held: int) -> npt.NDArray[np.float64]:
    """The waypoint of a step, [3]: each has its time, the last one the last of it."""
    from_end = (held - 1 - step) // WAYPOINT_STEPS
    return points[max(len(points) - 1 - from_end, 0)]
