"""`aura panel --backbone openvla_oft`: is the base policy what was published? Without that no claim about a gate is made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aura_ros.errors import UserError
from aura_ros.eval_command import Eval, check_lines, plan
from aura_ros.sim.suites import SUITES

if TYPE_CHECKING:
    from aura_ros.panel_command import Panel


def verify_base(command: Panel) -> None:
    """Run the base alone as OpenVLA-OFT evaluates, and compare its success with the published rate.

    Its episodes are kept beside the panel's, and gone on with. Raises UserError where the published rate is outside of the
    measured one's 95 % interval.
    """
    from aura_ros.bench.evaluation import PUBLISHED, evaluate, interval
    from aura_ros.bench.parallel import Lines, run_jobs
    from aura_ros.bench.recall.clock import progress

    suite, states = command.verify_suite, command.verify_states
    if suite not in PUBLISHED:
        raise UserError(f"verify_suite '{suite}' is not allowed; choose one of {', '.join(PUBLISHED)}")
    if not 1 <= states <= 50:
        raise UserError(f"verify_states {states} is not allowed; it must be from 1 to 50")
    jobs = plan(
        Eval(
            checkpoint=command.checkpoint,
            tasks=f"0-{SUITES[suite].tasks - 1}",
            suite=suite,
            states=f"0-{states - 1}" if states > 1 else "0",
            protocol="oft",
            backbone=command.backbone,
            device=command.device,
            image_size=command.image_size,
        )
    )
    kept = Path(command.out).with_suffix(".base.jsonl")
    check_lines(kept, Lines(kept).results, jobs)
    with progress("base", len(jobs)) as shown:

        def report(done: int, line: dict[str, Any]) -> None:
            shown.item(done, f"{line['key']}: {'success' if line['success'] else 'no success'}")

        found = run_jobs(
            evaluate,
            jobs,
            workers=command.jobs,
            lines=Lines(kept, shown.say),
            report=report,
            warn=shown.say,
            engine=command.engine,
        )
    counted = [line for line in found if not line["problem"]]
    if not counted:
        raise UserError(f"no episode of {suite} could be run ({found[0]['problem']}); see `aura doctor`")
    low, high = interval(counted)
    good, wanted = sum(line["success"] for line in counted), PUBLISHED[suite]
    said = f"base on {suite}: {good}/{len(counted)} [{100 * low:.1f}, {100 * high:.1f}] %, published {100 * wanted:.1f} %"
    if not low <= wanted <= high:
        raise UserError(
            f"{said}: this is not the published policy, so the panel would say nothing of a gate; check camera flip, "
            "statistics key and MuJoCo's version (`aura doctor`, docs/openvla_oft.md)"
        )
    sys.stdout.write(said + "\n")
