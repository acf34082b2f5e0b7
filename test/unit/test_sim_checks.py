"""A machine that cannot run LIBERO is told what to type. None of these needs LIBERO."""

import ctypes.util
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from aura_ros.sim import EpisodeConfig, LiberoEnv, checks, runtime
from aura_ros.sim.runtime import SetupError


@pytest.fixture
def right_mujoco(monkeypatch):
    monkeypatch.setattr(runtime, "installed_mujoco_version", lambda: runtime.REQUIRED_MUJOCO)


@pytest.fixture
def osmesa(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    monkeypatch.delenv("PYOPENGL_PLATFORM", raising=False)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so.8")


def test_importing_the_simulator_imports_no_engine_and_leaves_logging_alone():
    program = (
        "import logging, sys, aura_ros, aura_ros.sim, aura_ros.sim.checks\n"
        "heavy = {'torch', 'mujoco', 'robosuite', 'libero', 'rclpy', 'OpenGL'} & set(sys.modules)\n"
        "sys.exit(f'{heavy} {logging.getLogger().handlers}' if heavy or logging.getLogger().handlers else 0)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("version", ["3.3.6", "3.8.0", "3.14.0", "2.3.7"])
def test_other_mujoco_is_refused_before_anything_is_built(monkeypatch, version):
    monkeypatch.setattr(runtime, "installed_mujoco_version", lambda: version)
    with pytest.raises(SetupError) as caught:
        LiberoEnv(EpisodeConfig())
    for part in (version, "3.3.7", 'pip install "mujoco==3.3.7"'):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    result = checks.mujoco_version()
    assert (result.status, result.ok) == ("problem", False)
    assert result.what_to_do == 'pip install "mujoco==3.3.7"'


def test_missing_mujoco_says_what_to_install(monkeypatch):
    monkeypatch.setattr(runtime, "installed_mujoco_version", lambda: None)
    result = checks.mujoco_version()
    assert result.status == "problem"
    assert "not installed" in result.detail
    assert result.what_to_do == 'pip install "aura_ros[libero]"'


@pytest.mark.usefixtures("right_mujoco")
def test_right_mujoco_is_ok():
    assert checks.mujoco_version().ok


@pytest.mark.usefixtures("right_mujoco")
def test_missing_libero_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "libero", None)
    for name in [name for name in sys.modules if name.startswith("libero.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SetupError, match=r"LIBERO is not installed.*pip install \"aura_ros\[libero\]\""):
        LiberoEnv(EpisodeConfig())


def test_missing_osmesa_says_what_to_install(monkeypatch, osmesa):
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    with pytest.raises(SetupError, match=r"OSMesa.*apt-get install .*libosmesa6"):
        runtime.require_gl()
    assert checks.gl_renders().status == "problem"


def test_osmesa_is_the_default_and_a_choice_of_the_user_stays(monkeypatch, osmesa):
    monkeypatch.delenv("MUJOCO_GL")
    assert runtime.require_gl() == "osmesa"
    monkeypatch.setenv("MUJOCO_GL", "egl")
    assert runtime.require_gl() == "egl"


def test_other_pyopengl_platform_is_named(monkeypatch, osmesa):
    monkeypatch.setenv("PYOPENGL_PLATFORM", "egl")
    with pytest.raises(SetupError, match=r"PYOPENGL_PLATFORM is 'egl'.*unset"):
        runtime.require_gl()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; sys.exit(3)", "black frames"),
        ("raise RuntimeError('no context')", "no context"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "-11"),
    ],
)
def test_rendering_that_fails_or_kills_its_process_is_a_problem_not_a_crash(
    monkeypatch, osmesa, program, said
):
    monkeypatch.setattr(checks, "_RENDER_PROGRAM", program)
    result = checks.gl_renders()
    assert result.status == "problem"
    assert said in result.detail
    assert "libosmesa6" in result.what_to_do


def test_rendering_that_hangs_is_a_problem(monkeypatch, osmesa):
    monkeypatch.setattr(checks, "_RENDER_PROGRAM", "import threading; threading.Event().wait()")
    assert "no frame in 0.2 s" in checks.gl_renders(timeout_s=0.2).detail


def test_mujoco_warnings_go_to_the_log(caplog):
    with caplog.at_level(logging.WARNING, logger="aura_ros"):
        runtime._log_mujoco_warning("Nan, Inf or huge value in QACC at DOF 0.")
    assert "huge value in QACC" in caplog.text


@pytest.mark.usefixtures("right_mujoco")
def test_incomplete_task_list_is_refused(monkeypatch):
    benchmark = SimpleNamespace(task_maps={"libero_10": {"only": object()}})
    monkeypatch.setattr(runtime, "load_benchmark", lambda: benchmark)
    with pytest.raises(SetupError, match="lists 1 tasks in libero_10, the official one 10"):
        LiberoEnv(EpisodeConfig())
