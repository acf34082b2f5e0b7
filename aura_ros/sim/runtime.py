"""Bring MuJoCo, robosuite and LIBERO up: the right versions, off-screen, quietly, once per process."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from aura_ros.errors import UserError

# 3.8-3.9 raise in robosuite 1.4 and 3.10 up throw objects about half a metre into the air while they
# settle, so that results are wrong without an error. 3.3.7 agrees with the versions LIBERO came with.
REQUIRED_MUJOCO = "3.3.7"
INSTALL_MUJOCO = f'pip install "mujoco=={REQUIRED_MUJOCO}"'
INSTALL_LIBERO = 'pip install "aura_ros[libero]"'
INSTALL_OSMESA = "apt-get install -y --no-install-recommends libosmesa6"

_logger = logging.getLogger(__name__)
_bring_up_lock = threading.Lock()


class SetupError(UserError):
    """A machine that cannot run LIBERO as it is: `detail` says what is wrong, `what_to_do` what to type."""

    def __init__(self, detail: str, what_to_do: str) -> None:
        super().__init__(f"{detail}: {what_to_do}")
        self.detail = detail
        self.what_to_do = what_to_do


def installed_mujoco_version() -> str | None:
    """Version of the installed MuJoCo, or None; does not import it."""
    try:
        return importlib.metadata.version("mujoco")
    except importlib.metadata.PackageNotFoundError:
        return None


def require_mujoco_version() -> str:
    """The installed MuJoCo version, if it is the one whose physics is known to be right.

    Raises:
        SetupError: MuJoCo is missing or of another version.
    """
    found = installed_mujoco_version()
    if found is None:
        raise SetupError(f"MuJoCo is not installed; version {REQUIRED_MUJOCO} is needed", INSTALL_LIBERO)
    if found != REQUIRED_MUJOCO:
        raise SetupError(
            f"MuJoCo {found} is installed but {REQUIRED_MUJOCO} is needed "
            "(others move LIBERO's objects wrongly)",
            INSTALL_MUJOCO,
        )
    return found


def require_gl() -> str:
    """Choose off-screen rendering and return MUJOCO_GL's value; must run before MuJoCo is imported.

    MUJOCO_GL is set to osmesa (CPU, needs no display) unless the user chose something.

    Raises:
        SetupError: OSMesa is wanted and its library is missing, or PyOpenGL was told to use another.
    """
    choice = os.environ.setdefault("MUJOCO_GL", "osmesa")
    if choice.lower().strip() == "osmesa":
        platform = os.environ.get("PYOPENGL_PLATFORM", "")
        if platform.lower() not in ("", "osmesa"):
            raise SetupError(
                f"PYOPENGL_PLATFORM is '{platform}' but MUJOCO_GL is 'osmesa'; they must agree",
                "unset PYOPENGL_PLATFORM",
            )
        if ctypes.util.find_library("OSMesa") is None:
            raise SetupError("the OSMesa library, which renders LIBERO's cameras, is missing", INSTALL_OSMESA)
    return choice


def load_benchmark() -> Any:
    """LIBERO's benchmark module (task lists and paths); imports neither MuJoCo nor robosuite.

    Raises:
        SetupError: LIBERO is missing or shadowed by another distribution of the same name.
    """
    with _import_faults():
        return importlib.import_module("libero.libero.benchmark")


def load_environment_class() -> Any:
    """LIBERO's `OffScreenRenderEnv`, after the version and GL checks.

    Raises:
        SetupError: something is missing or of the wrong version; the message says what to type.
    """
    require_mujoco_version()
    require_gl()
    with _bring_up_lock, _import_faults():
        _import_robosuite_quietly()
        environments = importlib.import_module("libero.libero.envs")
        mujoco = importlib.import_module("mujoco")
        # By default MuJoCo appends its warnings to MUJOCO_LOG.TXT in the working directory.
        mujoco.set_mju_user_warning(_log_mujoco_warning)
        return environments.OffScreenRenderEnv


def randomization_error() -> type[Exception]:
    """What robosuite raises where drawn placements collide too often."""
    return importlib.import_module("robosuite.utils.errors").RandomizationError


@contextlib.contextmanager
def current_gl(context: Any) -> Iterator[None]:
    """Make a GL context current for a block, and none afterwards.

    robosuite never makes its context current again after building it, so the newest one of a thread
    takes the calls of all. And MuJoCo's renderers free their GL objects by number in whichever context is
    current: a context left current loses its own, and its frames turn to garbage without an error.
    """
    context.make_current()
    try:
        yield
    finally:
        release_gl()


def release_gl() -> None:
    """Leave this thread without a current OSMesa context. Does nothing under another MUJOCO_GL."""
    if os.environ.get("MUJOCO_GL", "").lower().strip() == "osmesa":
        gl = importlib.import_module("OpenGL.GL")
        importlib.import_module("OpenGL.osmesa").OSMesaMakeCurrent(None, None, gl.GL_FLOAT, 0, 0)


def _log_mujoco_warning(message: str) -> None:
    _logger.warning("MuJoCo: %s", message)


def _import_robosuite_quietly() -> None:
    """Import robosuite without its log file, console handler and advice about an optional settings file.

    On import robosuite 1.4 opens /tmp/robosuite.log, which fails where another user owns that file. That is
    decided by `robosuite.macros`, which it reads while it is being imported, so that module is loaded
    first, on its own, and changed. The advice is given where `robosuite.macros_private` is missing.
    """
    if "robosuite" in sys.modules:
        return
    package = importlib.util.find_spec("robosuite")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'robosuite'", name="robosuite")
    folder = Path(package.submodule_search_locations[0])
    name = "robosuite.macros"
    spec = importlib.util.spec_from_file_location(name, folder / "macros.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"robosuite has no {folder / 'macros.py'}", name=name)
    macros = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(macros)
    vars(macros).update(FILE_LOGGING_LEVEL=None, CONSOLE_LOGGING_LEVEL=None)
    prepared = {name: macros}
    if not (folder / "macros_private.py").exists():
        prepared["robosuite.macros_private"] = ModuleType("robosuite.macros_private")
    sys.modules.update(prepared)
    try:
        # A module found in sys.modules is not bound to its package as an imported one would be.
        vars(importlib.import_module("robosuite"))["macros"] = macros
    except BaseException:
        for module in prepared:
            sys.modules.pop(module, None)
        raise


@contextlib.contextmanager
def _import_faults() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise SetupError(f"LIBERO is not installed (no module '{error.name}')", INSTALL_LIBERO) from error
    except (ImportError, AttributeError, OSError) as error:
        # PyOpenGL raises AttributeError where a GL library is found but unusable.
        reason = " ".join(str(error).split())
        gl = os.environ.get("MUJOCO_GL", "")
        raise SetupError(
            f"LIBERO cannot be imported with MUJOCO_GL={gl} ({reason})",
            "run `aura doctor` to see what is missing",
        ) from error
