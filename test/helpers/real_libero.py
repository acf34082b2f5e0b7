"""The marks of tests that run the real simulator."""

import ctypes.util
import importlib.util

import pytest

MISSING = [name for name in ("libero", "robosuite", "mujoco") if importlib.util.find_spec(name) is None]
if ctypes.util.find_library("OSMesa") is None:
    MISSING.append("libosmesa6")
# Of a whole module. `make` installs the simulator; a machine without the [libero] extra has none.
LIBERO_MARKS = [
    pytest.mark.libero,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (the [libero] extra)"),
]


def needs_libero(test):
    """The same for one test."""
    for mark in LIBERO_MARKS:
        test = mark(test)
    return test
