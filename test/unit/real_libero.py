"""The mark of tests that run the real simulator."""

import ctypes.util
import importlib.util

import pytest

MISSING = [name for name in ("libero", "robosuite", "mujoco") if importlib.util.find_spec(name) is None]
if ctypes.util.find_library("OSMesa") is None:
    MISSING.append("libosmesa6")


def needs_libero(test):
    """Skips where the simulator cannot run: `make` installs it, a machine without the [libero] extra has none."""
    reason = f"not installed: {', '.join(MISSING)} (the [libero] extra)"
    return pytest.mark.libero(pytest.mark.skipif(bool(MISSING), reason=reason)(test))
