"""Parameters of the simulator node, with their meaning and range. Imports no rclpy."""

from __future__ import annotations

from dataclasses import dataclass

from aura_ros.config import check_fields, option
from aura_ros.errors import UserError
from aura_ros.sim.suites import LONGEST_DELAY, SHORTEST_DELAY, SUITES, EpisodeConfig

# EpisodeStatus.reason of an episode that a signal to the simulator ended.
INTERRUPTED = "interrupted"


MIN_RATE = 0.1  # below, an episode would take hours without a sign of life


@dataclass(frozen=True)
class SimNodeConfig:
    """Parameters of `libero_sim`; checked at construction, errors name the field, the value and what is allowed."""

    suite: str = option("libero_object", "LIBERO task suite", choices=tuple(SUITES))
    task: int = option(4, "task of the suite, from 0")
    init_state: int = option(0, "official initial state of the task, from 0")
    seed: int = option(
        7, "of the fixtures' poses; the same seed repeats the episode", minimum=0, maximum=2**32 - 1
    )
    displaced: int = option(
        0,
        "0: the official state; k > 0: the k-th arrangement of its objects, moved by up to 6 cm",
        minimum=0,
        maximum=2**32 - 1,
    )
    instruction_of: int = option(
        -1, "task of libero_object whose instruction is given and whose object counts; -1: its own"
    )
    cue: int = option(0, "of a cue task, which candidate is shown", minimum=0, maximum=1)
    delay: int = option(
        40,
        "of a cue task, control steps from the end of the cue to the decision",
        minimum=SHORTEST_DELAY,
        maximum=LONGEST_DELAY,
    )
    named: bool = option(False, "of a cue task, the instruction names the target: no memory is needed")
    max_steps: int = option(0, "control steps (20 Hz); 0: the suite's limit", minimum=0, maximum=100_000)
    image_size: int = option(256, "pixels, both sides of both cameras", minimum=16, maximum=1024)
    action_limit: float = option(
        1.5, "largest action in controller units; beyond it the chunk is refused", minimum=0.01, maximum=100.0
    )
    rate: float = option(
        0.0,
        "control steps per second of wall time, at most; 0: as fast as it goes",
        minimum=0.0,
        maximum=1000.0,
    )
    frames: str = option(
        "",
        "folder for first.png and last.png, what the cameras saw at the ends, and gate-STEP.png; empty: none",
    )
    policy: str = option("policy_node", "name of the policy node, whose ~/status is watched")
    repeat_after: float = option(
        1.0, "seconds without a chunk after which the observation is sent again", minimum=0.05, maximum=600.0
    )
    start_timeout: float = option(120.0, "seconds to wait for the first chunk", minimum=1.0, maximum=86400.0)
    chunk_timeout: float = option(30.0, "seconds to wait for every later chunk", minimum=0.5, maximum=86400.0)
    policy_lost_after: float = option(
        3.0, "seconds without the policy's heartbeat after which the episode ends", minimum=0.5, maximum=600.0
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if 0 < self.rate < MIN_RATE:
            raise UserError(
                f"rate {self.rate} is out of range; allowed: 0 (as fast as it goes) or {MIN_RATE} to 1000"
            )
        self.episode()

    def episode(self) -> EpisodeConfig:
        """The episode that these parameters describe."""
        return EpisodeConfig(
            suite=self.suite,
            task=self.task,
            init_state=self.init_state,
            seed=self.seed,
            displaced=self.displaced,
            instruction_of=self.instruction_of,
            cue=self.cue,
            delay=self.delay,
            named=self.named,
            max_steps=self.max_steps or None,
            image_size=self.image_size,
            action_limit=self.action_limit,
        )
