"""A stand-in for LIBERO's environment: no physics, no MuJoCo, built at once.

As a program it is a Python interpreter whose `libero_sim` uses the stand-in, for `aura sim --sim-python`.
"""

import sys

import numpy as np

from aura_ros.sim.libero import CAMERAS, JOINT_NAMES, SimObservation, StepResult


class FakeLibero:
    """What `libero_sim` needs of `LiberoEnv`. `executed` holds every action that was stepped.

    Pixels, joints and pose are functions of the seed and the step.
    """

    instruction = "put both moka pots on the stove"
    task_name = "FAKE_put_both_moka_pots_on_the_stove"
    control_period_s = 0.05
    saturated = 0
    succeed_at = 10**9

    def __init__(self, config):
        self.config = config
        self.max_steps = config.step_limit
        self.step_count = 0
        self.executed = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def reset(self):
        self.step_count = 0

    def observe(self):
        numbers = np.random.default_rng((self.config.seed, self.step_count))
        size = self.config.image_size
        return SimObservation(
            images={c: numbers.integers(0, 256, (size, size, 3), np.uint8) for c in CAMERAS},
            joint_names=JOINT_NAMES,
            joint_positions=numbers.uniform(-1, 1, 9),
            joint_velocities=np.zeros(9),
            ee_position=numbers.uniform(-0.5, 0.5, 3),
            ee_quaternion=np.array([1.0, 0.0, 0.0, 0.0]),
            gripper_qpos=np.array([0.04, -0.04]),
            sim_time_s=self.step_count * self.control_period_s,
            step=self.step_count,
        )

    def step(self, action):
        self.executed.append(np.asarray(action))
        self.step_count += 1
        success = self.step_count >= self.succeed_at
        return StepResult(success, success or self.step_count >= self.max_steps, float(success))


def main():
    if sys.argv[1] == "-c":
        exec(sys.argv[2])
        return
    # -m aura_ros.nodes libero_sim --ros-args ...
    del sys.argv[:2]
    from aura_ros.nodes import __main__, libero_sim

    libero_sim.LiberoEnv = FakeLibero
    __main__.main()


if __name__ == "__main__":
    main()
