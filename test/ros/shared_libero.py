"""One real LIBERO environment for many tests of a node: building it takes seconds, resetting it a quarter of one."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from aura_ros.sim import EpisodeConfig, LiberoEnv, SimObservation, StepResult

# The longest episode that a test may ask for.
MAX_STEPS = 200


class SharedLibero:
    """The shared `LiberoEnv` as one node's own: calls go to the one thread that may render.

    What it adds: leaving its block closes nothing, `executed` holds every action that LIBERO carried out, and
    `before_step` is called with the environment, in its thread, before each step.
    """

    def __init__(self, env: LiberoEnv, thread: ThreadPoolExecutor, config: EpisodeConfig) -> None:
        built = (env.config.suite, env.config.task, env.config.settle_steps)
        assert (config.suite, config.task, config.settle_steps) == built, (
            "another task needs another environment"
        )
        assert config.step_limit <= MAX_STEPS
        self._env, self._thread = env, thread
        self.executed: list[np.ndarray] = []
        self.before_step: Callable[[LiberoEnv], None] = lambda _env: None
        env.config, env.max_steps = config, config.step_limit

    def __enter__(self) -> "SharedLibero":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str):
        return getattr(self._env, name)

    def reset(self) -> None:
        self._thread.submit(self._env.reset).result()

    def observe(self) -> SimObservation:
        return self._thread.submit(self._env.observe).result()

    def step(self, action: np.ndarray) -> StepResult:
        return self._thread.submit(self._step, action).result()

    def _step(self, action: np.ndarray) -> StepResult:
        self.before_step(self._env)
        result = self._env.step(action)
        self.executed.append(np.array(action))
        return result


@contextmanager
def shared_libero() -> Iterator[Callable[[EpisodeConfig], SharedLibero]]:
    """Build libero_10 task 0 once; gives what takes `LiberoEnv`'s place in a node. Closed at the block's end."""
    with ThreadPoolExecutor(1, thread_name_prefix="libero") as thread:
        env = thread.submit(LiberoEnv, EpisodeConfig(max_steps=MAX_STEPS)).result()
        try:
            # The first steps ever take seconds, which is no test's matter.
            thread.submit(env.reset).result()
            yield lambda config: SharedLibero(env, thread, config)
        finally:
            thread.submit(env.close).result()


def put_cans_into_basket(env: LiberoEnv) -> None:
    """Achieve libero_10 task 0: its two cans side by side in the basket's region; to be called between two steps."""
    domain = env._env.env
    region = domain.sim.data.get_site_xpos("basket_1_contain_region")
    for name, aside_m in (("alphabet_soup_1", -0.04), ("tomato_sauce_1", 0.04)):
        joint = domain.objects_dict[name].joints[0]
        pose = domain.sim.data.get_joint_qpos(joint).copy()
        pose[:3] = region + np.array((0.0, aside_m, 0.0))
        domain.sim.data.set_joint_qpos(joint, pose)
