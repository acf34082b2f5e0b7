"""Which LIBERO episodes exist, and the configuration of one. Needs neither LIBERO nor MuJoCo.

Step limits are those of OpenVLA-OFT's evaluation (moojink/openvla-oft, run_libero_eval.py), not
counting the settling steps.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from aura_ros.errors import UserError

INIT_STATES_PER_TASK = 50
MAX_SEED = 2**32 - 1
SHORTEST_DELAY, LONGEST_DELAY = 20, 2000


class EpisodeVoidError(RuntimeError):
    """An episode could not be set up, or its physics diverged: no fault of who acts in it."""


@dataclass(frozen=True)
class Suite:
    """A LIBERO task suite: its name, how many tasks it has, and its step limit."""

    name: str
    tasks: int
    max_steps: int


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite("libero_spatial", 10, 220),
        Suite("libero_object", 10, 280),
        Suite("libero_goal", 10, 300),
        Suite("libero_10", 10, 520),
        Suite("libero_90", 90, 400),
        # Tasks of memory in official scenes, see `aura_ros.sim.cues`; the hold before the decision is not counted.
        Suite("cue_object", 2, 280),
        Suite("cue_place", 1, 280),
        Suite("cue_order", 2, 280),
    )
}
# Fields of `EpisodeConfig` that may change from episode to episode of one environment.
EPISODE = ("init_state", "seed", "displaced", "instruction_of", "resets", "cue", "delay", "named")
CUE_SUITES = tuple(name for name in SUITES if name.startswith("cue_"))


@dataclass(frozen=True)
class EpisodeConfig:
    """One LIBERO episode. The same values give the same frames and states, bit for bit.

    suite: one of `SUITES`.
    task: index in the suite (libero_90: 0..89, the others: 0..9).
    init_state: which of the task's 50 official initial states.
    seed: of the fixture poses, which the initial state does not hold (see `LiberoEnv.reset`).
    displaced: 0 is the official state; k > 0 its k-th arrangement with displaced objects (see `aura_ros.sim.displaced`).
    instruction_of: the task of libero_object whose instruction is given and whose object counts; -1: its own.
    resets: how many came before this one since the generator of the fixture poses was seeded (see `LiberoEnv.reset`).
    cue: of a cue task, which candidate is shown, 0 or 1. delay: control steps from the end of the cue to the first step
        that the policy decides. named: the instruction names the target, as nobody would need to remember it then.
    max_steps: control steps after settling; None takes the suite's limit.
    settle_steps: control steps without motion, gripper open, before the first observation.
    image_size: height and width of both cameras, pixels.
    action_limit: controller units; an action beyond it is refused. robosuite's controller itself
        clips at 1, so what lies between 1 and the limit is executed as 1 and counted.

    Raises:
        UserError: a field is out of range; the message names it, its value and what is allowed.
    """

    suite: str = "libero_10"
    task: int = 0
    init_state: int = 0
    seed: int = 7
    max_steps: int | None = None
    settle_steps: int = 10
    image_size: int = 256
    action_limit: float = 1.5
    displaced: int = 0
    instruction_of: int = -1
    resets: int = 0
    cue: int = 0
    delay: int = 40
    named: bool = False

    def __post_init__(self) -> None:
        if self.suite not in SUITES:
            raise UserError(f"suite '{self.suite}' is unknown; choose one of {', '.join(SUITES)}")
        in_suite = f" in {self.suite}"
        _check_range("task", self.task, 0, SUITES[self.suite].tasks - 1, in_suite)
        _check_range("init_state", self.init_state, 0, INIT_STATES_PER_TASK - 1, in_suite)
        _check_range("seed", self.seed, 0, MAX_SEED)
        if self.max_steps is not None:
            suite_limit = f" (leave it out for the suite's {SUITES[self.suite].max_steps})"
            _check_range("max_steps", self.max_steps, 1, 100_000, suite_limit)
        _check_range("settle_steps", self.settle_steps, 0, 1000)
        _check_range("image_size", self.image_size, 16, 1024, " pixels")
        _check_range("displaced", self.displaced, 0, MAX_SEED)
        _check_range("resets", self.resets, 0, 10_000)
        _check_range("instruction_of", self.instruction_of, -1, SUITES[self.suite].tasks - 1, in_suite)
        if self.instruction_of >= 0 and self.suite != "libero_object":
            raise UserError(f"instruction_of is for libero_object, not for {self.suite}; leave it out")
        _check_range("cue", self.cue, 0, 1 if self.has_cue else 0, in_suite)
        _check_range("delay", self.delay, SHORTEST_DELAY, LONGEST_DELAY)
        if self.named and not self.has_cue:
            raise UserError(f"named is for {', '.join(CUE_SUITES)}, not for {self.suite}; leave it out")
        limit = self.action_limit
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit <= 100:
            raise UserError(
                f"action_limit {limit!r} must be a number above 0 and up to 100 controller units; "
                "1.5 leaves room above the controller's own clip at 1"
            )

    @property
    def has_cue(self) -> bool:
        """Whether its target is shown for a moment and not named."""
        return self.suite in CUE_SUITES

    @property
    def step_limit(self) -> int:
        """Control steps an episode may take after settling."""
        return SUITES[self.suite].max_steps if self.max_steps is None else self.max_steps


def _check_range(name: str, value: object, low: int, high: int, where: str = "") -> None:
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise UserError(
            f"{name} {value!r} is out of range; allowed are the whole numbers {low}..{high}{where}"
        )
