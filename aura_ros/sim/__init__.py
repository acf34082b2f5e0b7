"""LIBERO as a simulated robot: episodes, observations, actions and start-up checks.

Importing this imports neither MuJoCo nor robosuite; `LiberoEnv` does, when it is built.
"""

from aura_ros.sim.actions import ActionError, chunk_row_to_env
from aura_ros.sim.libero import LiberoEnv, SimObservation, StepResult, proprio
from aura_ros.sim.runtime import SetupError
from aura_ros.sim.suites import SUITES, EpisodeConfig, Suite

__all__ = [
    "SUITES",
    "ActionError",
    "EpisodeConfig",
    "LiberoEnv",
    "SetupError",
    "SimObservation",
    "StepResult",
    "Suite",
    "chunk_row_to_env",
    "proprio",
]
