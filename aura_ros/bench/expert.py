"""How often the scripted expert solves a task: episodes on real LIBERO, and the table of them."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from aura_ros.bench.parallel import Result
from aura_ros.sim.suites import EpisodeConfig, EpisodeVoidError

if TYPE_CHECKING:
    from aura_ros.sim.libero import LiberoEnv

# Small, for nothing is rendered.
IMAGE_SIZE = 16


@dataclass(frozen=True)
class ExpertJob:
    """One episode of the expert."""

    suite: str
    task: int
    init_state: int
    displaced: int = 0
    seed: int = 7

    @property
    def key(self) -> str:
        """Unique among jobs."""
        return f"{self.suite}/{self.task}/{self.init_state}/{self.displaced}/{self.seed}"

    @property
    def episode(self) -> EpisodeConfig:
        """Raises UserError for what is out of range."""
        return EpisodeConfig(**dataclasses.asdict(self), image_size=IMAGE_SIZE)


def run_expert(job: ExpertJob) -> Result:
    """Drive one episode; what a worker does."""
    from aura_ros.sim.pool import environment

    env = environment(job.episode)
    result: Result = {"key": job.key, **dataclasses.asdict(job)}
    try:
        return {**result, **_drive(job, env)}
    except EpisodeVoidError as error:
        return {**result, "success": False, "steps": 0, "failure": str(error)}


def _drive(job: ExpertJob, env: LiberoEnv) -> Result:
    """How an episode went."""
    from aura_ros.sim.expert import decide
    from aura_ros.sim.scene import SceneReader

    env.reset(job.init_state, job.seed, job.displaced)
    reader = SceneReader(env)
    phases: list[str] = []
    heights: list[float] = []
    over, success = False, False
    while not over:
        scene = reader.read()
        goal = scene.next_goal
        if goal is not None:
            heights.append(float(scene.items[goal.item].low[2]))
        decision = decide(scene)
        phases.append(decision.phase.value)
        outcome = env.step(decision.action)
        over, success = outcome.done, outcome.success
    failure = "" if success else explain(phases, heights)
    return {"success": success, "steps": env.step_count, "failure": failure}


def explain(phases: list[str], heights: list[float]) -> str:
    """Why an episode failed, in words: from the phases gone through and how high the object was, m."""
    changes = [phase for phase, _ in groupby(phases)]
    counts = Counter(changes)
    lifted = float(np.max(heights) - heights[0]) > 0.04 if heights else False
    if counts["grasp"] == 0:
        return f"out of reach (last: {changes[-1]})"
    if not lifted:
        return f"missed grasp, {counts['grasp']} tries"
    if counts["release"] == 0:
        return "dropped on the way"
    return f"timed out in {changes[-1]}"


def table(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """A row for each task: task, success k/n, 95 % Wilson interval, median and most steps of successes, failures."""
    from scipy.stats import binomtest

    groups: dict[tuple[str, int, bool], list[Result]] = defaultdict(list)
    for result in results:
        groups[result["suite"], result["task"], result["displaced"] > 0].append(result)
    rows: list[tuple[str, ...]] = []
    for (suite, task, displaced), found in sorted(groups.items()):
        good = [r["steps"] for r in found if r["success"]]
        low, high = binomtest(len(good), len(found)).proportion_ci(method="wilson")
        failures: dict[str, list[int]] = defaultdict(list)
        for r in found:
            if not r["success"]:
                failures[r["failure"]].append(r["init_state"])
        rows.append(
            (
                f"{suite} {task}{' displaced' if displaced else ''}",
                f"{len(good)}/{len(found)}",
                f"{100 * low:.0f}-{100 * high:.0f} %",
                f"{np.median(good):.0f}, {max(good)}" if good else "-",
                "; ".join(f"{why}: {', '.join(map(str, states))}" for why, states in sorted(failures.items()))
                or "-",
            )
        )
    return rows
