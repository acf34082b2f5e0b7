"""How often a policy solves LIBERO's tasks: episodes with chunks executed open loop, and the table of them."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aura_ros.bench.parallel import Result
from aura_ros.memory.config import UNTRAINED
from aura_ros.sim.suites import EpisodeConfig, EpisodeVoidError

if TYPE_CHECKING:
    from aura_ros.policy import Policy
    from aura_ros.sim.libero import LiberoEnv

# Of arrangements that are judged; those that are trained on count from 1.
JUDGED = 1_000_000
# OpenVLA-OFT's success rates on LIBERO (Kim et al. 2025, arXiv 2502.19645, table I: two cameras and proprioception, a
# policy for each suite), 500 trials a suite.
PUBLISHED = {"libero_spatial": 0.976, "libero_object": 0.984, "libero_goal": 0.979, "libero_10": 0.945}


@dataclass(frozen=True)
class EvalJob:
    """One episode; fields as in `EpisodeConfig`, but `displaced` only says whether.

    checkpoint: "" is the one that is shipped. identity: what its results are kept under, whatever the file is called.
    """

    checkpoint: str
    suite: str
    task: int
    init_state: int
    seed: int
    displaced: bool
    image_size: int = 256
    instruction_of: int = -1
    resets: int = 0
    backbone: str = "compact"
    device: str = "cpu"
    arm: str = "policy"
    identity: str = ""

    @property
    def key(self) -> str:
        """Unique among jobs with one checkpoint an arm."""
        split = "displaced" if self.displaced else "official"
        told = "" if self.instruction_of < 0 else f"-told{self.instruction_of}"
        since = f"-r{self.resets}" if self.resets else ""
        return f"{self.arm}-{self.suite}-t{self.task}{told}-{split}-i{self.init_state}-s{self.seed}{since}"

    @property
    def episode(self) -> EpisodeConfig:
        """Raises UserError for what is out of range."""
        return EpisodeConfig(
            suite=self.suite,
            task=self.task,
            init_state=self.init_state,
            seed=self.seed,
            displaced=JUDGED + self.seed if self.displaced else 0,
            image_size=self.image_size,
            instruction_of=self.instruction_of,
            resets=self.resets,
        )


_loaded: dict[tuple[str, ...], Policy] = {}


def _policy(job: EvalJob) -> Policy:
    """Loaded once a process; the latest two are kept, for a control runs beside the policy."""
    from aura_ros.policy import load_policy

    name = (job.backbone, job.checkpoint, job.device)
    if name not in _loaded:
        while len(_loaded) > 1:
            _loaded.pop(next(iter(_loaded))).close()
        _loaded[name] = load_policy(
            backbone=job.backbone,
            checkpoint=job.checkpoint or None,
            device=job.device,
            # What is judged is the backbone; `aura panel` judges memories.
            memory_checkpoint=UNTRAINED,
        )
    return _loaded[name]


def evaluate(job: EvalJob) -> Result:
    """Run one episode; what a worker does. What is no fault of the policy's is a `problem`, and no failure."""
    line: Result = {
        "key": job.key,
        **{name: value for name, value in dataclasses.asdict(job).items() if name != "checkpoint"},
    }
    try:
        return {**line, **_drive(job), "problem": ""}
    except EpisodeVoidError as error:
        return {**line, "success": False, "problem": str(error)}


def _drive(job: EvalJob) -> Result:
    """How an episode went."""
    from aura_ros.policy.policy import ActionRejected
    from aura_ros.sim.actions import chunk_row_to_env
    from aura_ros.sim.libero import proprio
    from aura_ros.sim.pool import environment
    from aura_ros.types import Observation

    policy = _policy(job)
    config = job.episode
    env = environment(config)
    env.reset(config.init_state, config.seed, config.displaced, config.instruction_of, config.resets)
    cameras = policy.backbone.info.cameras
    policy.reset()
    over = success = False
    taken: list[float] = []
    while not over:
        seen = env.observe()
        images = {camera: seen.images[camera] for camera in cameras}
        begin = time.perf_counter()
        try:
            chunk = policy.act(Observation(images, proprio(seen), env.instruction)).chunk
        except ActionRejected:
            # Nothing of it may be executed: that is a failure of the policy, not of the evaluation.
            break
        taken.append(1e3 * (time.perf_counter() - begin))
        for row in chunk.data:
            outcome = env.step(chunk_row_to_env(row))
            over, success = outcome.done, outcome.success
            if over:
                break
    return {
        "instruction": env.instruction,
        "success": success,
        "wrong": "" if success else _wrong_object(env),
        "steps": env.step_count,
        "queries": len(taken),
        # The first query of a process warms up.
        "ms_per_query": float(np.median(taken)) if taken else 0.0,
    }


def _wrong_object(env: LiberoEnv) -> str:
    """An object that lies where the wanted one should be, if there is one; only for tasks that want one put somewhere."""
    domain = env.domain
    goals = domain.parsed_problem["goal_state"]
    if len(goals) != 1 or len(goals[0]) != 3 or goals[0][0] not in ("in", "on"):
        return ""
    predicate, item, place = goals[0]
    others = [name for name in domain.objects_dict if name != item and not place.startswith(name)]
    return next((name for name in others if domain._eval_predicate([predicate, name, place])), "")


HEADER = (
    "arm",
    "task",
    "split",
    "success",
    "rate",
    "95 % interval",
    "wrong object",
    "steps, median",
    "ms a query",
)


def table(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """A row for each arm, split and task, and one of all tasks.

    Of episodes without a `problem`: success k/n, Wilson's 95 % interval, failures that put another object into the place,
    steps of successes.
    """
    groups: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for result in results:
        if result["problem"]:
            continue
        split = "displaced" if result["displaced"] else "official"
        told = f", told {result['instruction_of']}" if result["instruction_of"] >= 0 else ""
        groups[result["arm"], f"{result['suite']} {result['task']}{told}", split].append(result)
        groups[result["arm"], f"~ all{', others told' if told else ''}", split].append(result)
    rows: list[tuple[str, ...]] = []
    for (arm, task, split), found in sorted(groups.items()):
        low, high = interval(found)
        good = [r["steps"] for r in found if r["success"]]
        rows.append(
            (
                *(arm, task.removeprefix("~ "), split, f"{len(good)}/{len(found)}"),
                f"{100 * len(good) / len(found):.0f} %",
                f"{100 * low:.0f}-{100 * high:.0f} %",
                f"{sum(bool(r['wrong']) for r in found)}",
                f"{np.median(good):.0f}" if good else "-",
                f"{np.median([r['ms_per_query'] for r in found]):.1f}",
            )
        )
    return rows


def interval(results: Sequence[Result]) -> tuple[float, float]:
    """Wilson's 95 % interval of the success rate."""
    from scipy.stats import binomtest

    low, high = binomtest(sum(r["success"] for r in results), len(results)).proportion_ci(method="wilson")
    return float(low), float(high)
