"""Start-up checks of the simulator: MuJoCo's version, off-screen rendering, settling physics."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Literal

from aura_ros.sim import runtime
from aura_ros.sim.libero import REFERENCE_EPISODE, REFERENCE_LIMIT_M, LiberoEnv
from aura_ros.sim.runtime import SetupError
from aura_ros.sim.suites import EpisodeConfig

_BLACK_EXIT = 3
_RENDER_PROGRAM = f"""
import sys
import mujoco
model = mujoco.MjModel.from_xml_string(
    '<mujoco><worldbody><light pos="0 0 3"/><geom type="sphere" size="1"/></worldbody></mujoco>'
)
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 64, 64) as renderer:
    renderer.update_scene(data)
    sys.exit(0 if renderer.render().any() else {_BLACK_EXIT})
"""


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one check: its name, "ok" or "problem", what was found, and what to type if a problem."""

    name: str
    status: Literal["ok", "problem"]
    detail: str
    what_to_do: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing needs doing."""
        return self.status == "ok"


def mujoco_version() -> CheckResult:
    """Is the installed MuJoCo the one whose LIBERO physics is right? Instant."""
    try:
        found = runtime.require_mujoco_version()
    except SetupError as error:
        return CheckResult("MuJoCo version", "problem", error.detail, error.what_to_do)
    return CheckResult("MuJoCo version", "ok", f"{found}, the version LIBERO needs")


def gl_renders(timeout_s: float = 60.0) -> CheckResult:
    """Does off-screen rendering give a frame that isn't black? About a second.

    Runs in a process of its own, since a broken GL driver can take its process down, and so that no
    GL context of this one is disturbed.
    """
    name = "off-screen rendering"
    try:
        choice = runtime.require_gl()
    except SetupError as error:
        return CheckResult(name, "problem", error.detail, error.what_to_do)
    advice = f"export MUJOCO_GL=osmesa && {runtime.INSTALL_OSMESA}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = subprocess.run(
                [sys.executable, "-c", _RENDER_PROGRAM],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return CheckResult(
                name, "problem", f"MUJOCO_GL={choice} gave no frame in {timeout_s:g} s", advice
            )
    if run.returncode == 0:
        return CheckResult(name, "ok", f"MUJOCO_GL={choice} renders")
    if run.returncode == _BLACK_EXIT:
        return CheckResult(name, "problem", f"MUJOCO_GL={choice} renders black frames", advice)
    lines = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
    return CheckResult(name, "problem", f"MUJOCO_GL={choice} cannot render ({lines[-1]})", advice)


def settling(env: LiberoEnv | None = None) -> CheckResult:
    """Do libero_10 task 0's objects stay put while they settle? About 15 s, or none with a built `env`.

    Args:
        env: an environment to reset instead of building one; it must be of libero_10 task 0, and is
            left at the start of an episode.
    """
    name = "settling"
    suite, task, init_state = REFERENCE_EPISODE
    if env is not None and (env.config.suite, env.config.task) != (suite, task):
        raise ValueError(
            f"the settling check needs {suite} task {task}, not {env.config.suite} {env.config.task}"
        )
    try:
        if env is not None:
            env.reset(init_state=init_state)
            moved = env.settled_displacement_m
        else:
            with LiberoEnv(EpisodeConfig(suite=suite, task=task, init_state=init_state)) as own:
                own.reset()
                moved = own.settled_displacement_m
    except SetupError as error:
        return CheckResult(name, "problem", error.detail, error.what_to_do)
    return CheckResult(name, "ok", f"objects moved at most {moved:.3f} m (limit {REFERENCE_LIMIT_M} m)")
