"""How often a policy solves LIBERO's tasks: episodes with chunks executed open loop, and the table of them."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aura_ros.bench.parallel import Result
from aura_ros.errors import UserError
from aura_ros.sim.suites import EpisodeConfig

if TYPE_CHECKING:
    from aura_ros.policy import Policy

# Of arrangements that are judged; those that are trained on count from 1.
JUDGED = 1_000_000


@dataclass(frozen=True)
class EvalJob:
    """One episode. instruction_of: the task whose instruction is given, and whose object counts; -1: its own."""

    checkpoint: str
    suite: str
    task: int
    init_state: int
    seed: int
    displaced: bool
    image_size: int = 256
    instruction_of: int = -1
    backbone: str = "compact"
    arm: str = "policy"

    @property
    def key(self) -> str:
        """Unique among jobs with one checkpoint an arm."""
        split = "displaced" if self.displaced else "official"
        told = "" if self.instruction_of < 0 else f"-told{self.instruction_of}"
        return f"{self.arm}-{self.suite}-t{self.task}{told}-{split}-i{self.init_state}-s{self.seed}"

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
        )


_loaded: dict[tuple[str, str], Policy] = {}


def _policy(job: EvalJob) -> Policy:
    """Loaded once a process; the latest two are kept, for a control runs beside the policy."""
    from aura_ros.policy import load_policy

    name = (job.backbone, job.checkpoint)
    if name not in _loaded:
        while len(_loaded) > 1:
            _loaded.pop(next(iter(_loaded))).close()
        _loaded[name] = load_policy(backbone=job.backbone, checkpoint=job.checkpoint or None)
    return _loaded[name]


def evaluate(job: EvalJob) -> Result:
    """Run one episode; what a worker does."""
    from aura_ros.policy.policy import ActionRejected
    from aura_ros.sim.actions import chunk_row_to_env
    from aura_ros.sim.libero import proprio
    from aura_ros.sim.pool import environment
    from aura_ros.types import Observation

    policy = _policy(job)
    config = job.episode
    env = environment(config)
    env.reset(config.init_state, config.seed, config.displaced)
    instruction, item = env.instruction, ""
    if job.instruction_of >= 0:
        from aura_ros.sim.official import official_task

        instruction = official_task(
            dataclasses.replace(config, task=job.instruction_of, init_state=0)
        ).language
        item = told_item(instruction, env.domain.obj_body_id)
    cameras = policy.backbone.info.cameras
    policy.reset()
    over = success = False
    taken: list[float] = []
    while not over:
        seen = env.observe()
        images = {camera: seen.images[camera] for camera in cameras}
        begin = time.perf_counter()
        try:
            chunk = policy.act(Observation(images, proprio(seen), instruction)).chunk
        except ActionRejected:
            # Nothing of it may be executed: that is a failure of the policy, not of the evaluation.
            break
        taken.append(1e3 * (time.perf_counter() - begin))
        for row in chunk.data:
            outcome = env.step(chunk_row_to_env(row))
            fetched = bool(item) and _fetched(env, item)
            over, success = outcome.done or fetched, fetched if item else outcome.success
            if over:
                break
    return {
        "key": job.key,
        **dataclasses.asdict(job),
        "instruction": instruction,
        "success": bool(success),
        "steps": env.step_count,
        "queries": len(taken),
        # The first query of a process warms up.
        "ms_per_query": float(np.median(taken)) if taken else 0.0,
    }


def told_item(instruction: str, items: Iterable[str]) -> str:
    """The object of a scene that libero_object's instruction names. Raises UserError if the scene has none such."""
    words = instruction.removeprefix("pick up the ").split(" and place it")[0].replace(" ", "_")
    found = [name for name in items if name.rsplit("_", 1)[0] == words]
    if not found:
        raise UserError(
            f"the scene has no '{words}' to fetch, only {', '.join(sorted(items))}; choose another --instruction-of"
        )
    return found[0]


def _fetched(env: Any, item: str) -> bool:
    region = next(name for name in env.domain.object_sites_dict if name.endswith("contain_region"))
    return bool(env.domain._eval_predicate(["in", item, region]))


HEADER = ("arm", "task", "split", "success", "rate", "95 % interval", "steps, median", "ms a query")


def table(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """A row for each arm, split and task, and one of all tasks: success k/n, Wilson's 95 % interval, steps of successes."""
    groups: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for result in results:
        split = "displaced" if result["displaced"] else "official"
        told = f", told {result['instruction_of']}" if result["instruction_of"] >= 0 else ""
        groups[result["arm"], f"{result['suite']} {result['task']}{told}", split].append(result)
        groups[result["arm"], f"~ all{', other told' if told else ''}", split].append(result)
    rows: list[tuple[str, ...]] = []
    for (arm, task, split), found in sorted(groups.items()):
        low, high = interval(found)
        good = [r["steps"] for r in found if r["success"]]
        rows.append(
            (
                *(arm, task.removeprefix("~ "), split, f"{len(good)}/{len(found)}"),
                f"{100 * len(good) / len(found):.0f} %",
                f"{100 * low:.0f}-{100 * high:.0f} %",
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
