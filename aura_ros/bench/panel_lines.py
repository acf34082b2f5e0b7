"""The panel's results: one line an episode in a JSON Lines file, of which what is missing is played."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from aura_ros.bench.panel import PanelJob
from aura_ros.bench.parallel import EpisodeLines, Result
from aura_ros.errors import UserError


class PanelLines(EpisodeLines):
    """A moment of which some arms are missing is played for those alone."""

    def missing(self, job: PanelJob) -> PanelJob | None:
        """What is left of a job, or None. Raises UserError for results of other checkpoints than the job's."""
        arms = []
        for arm in job.arms:
            known = [self.results.get(job.line_key(cue, arm)) for cue in job.cues]
            for line in known:
                if line is not None and line.get("identity") != job.identity(arm):
                    raise UserError(
                        f"'{self.path}' has {line['key']} of another backbone or memory; give another --out"
                    )
            bags = [
                Path(job.record) / job.line_key(cue, arm) for cue in job.cues if job.record and arm == "aura"
            ]
            if any(line is None for line in known) or not all(bag.is_dir() for bag in bags):
                arms.append(arm)
        if "first-k" in arms and "aura" not in arms:
            arms.append("aura")
        return dataclasses.replace(job, arms=tuple(arms)) if arms else None

    def of(self, jobs: Sequence[PanelJob]) -> list[Result]:
        """The lines of some jobs, in their order."""
        keys = [job.line_key(cue, arm) for job in jobs for cue in job.cues for arm in job.arms]
        return [self.results[key] for key in keys if key in self.results]
