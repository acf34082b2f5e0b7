"""A small process that is only partly seen, with every history it can reach and the exact value of each.

Two doors, one with a reward behind it, are watched through a noisy sensor that sometimes says nothing; the rewarded one
changes now and then. After `rounds` steps the doors are drawn anew, so the histories are finitely many while the process
goes on for ever with one discount, as theorem 4.3 (A4) asks. NumPy only. n = histories, A = actions, Y = readings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aura_ros.bench.certificate.formula import check_discount
from aura_ros.config import check_fields, option

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

LEFT, RIGHT, LOOK = range(3)
NOTHING, SAYS_LEFT, SAYS_RIGHT = range(3)
ACTIONS = READINGS = 3
# Value iteration ends where the rest of it can move nothing by more.
CONVERGED = 1e-10


@dataclass(frozen=True)
class DoorsConfig:
    """The process. Checked at construction; raises UserError naming the field.

    Opening the rewarded door gives 1, the other 0, looking `look_reward`; rewards lie in 0..1. A reading after an
    action other than looking is missing with probability `dropout` and wrong with probability `noise`; after looking it
    is never missing and wrong with probability `look_noise`.
    """

    rounds: int = option(5, "steps until the doors are drawn anew", minimum=1, maximum=5)
    noise: float = option(0.25, "probability that a reading is wrong", minimum=0.0, maximum=0.5)
    dropout: float = option(0.5, "probability that a reading is missing", minimum=0.0, maximum=1.0)
    look_noise: float = option(
        0.05, "probability that a reading is wrong after looking", minimum=0.0, maximum=0.5
    )
    look_reward: float = option(0.4, "reward of looking", minimum=0.0, maximum=1.0)
    switch: float = option(0.05, "probability that the doors change in a step", minimum=0.0, maximum=0.5)
    discount: float = option(0.9, "of rewards, by step", minimum=0.0, maximum=0.999)

    def __post_init__(self) -> None:
        check_fields(self)
        check_discount(self.discount)


def rewards(config: DoorsConfig, belief: FloatArray) -> FloatArray:
    """Expected reward of each action, [n, A]; belief: probability that the right door has the reward, [n]."""
    return np.stack([1 - belief, belief, np.full_like(belief, config.look_reward)], axis=1)


def update(config: DoorsConfig, belief: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Bayes' rule for every action and reading: probability of the reading [n, A, Y], belief after it [n, A, Y].

    Where a reading is impossible its belief is that before it.
    """
    moved = belief * (1 - config.switch) + (1 - belief) * config.switch
    chance = np.zeros((len(belief), ACTIONS, READINGS))
    after = np.repeat(moved, ACTIONS * READINGS).reshape(chance.shape)
    for action in range(ACTIONS):
        looks = action == LOOK
        wrong = config.look_noise if looks else config.noise
        seen = 1.0 if looks else 1 - config.dropout
        chance[:, action, NOTHING] = 1 - seen
        for reading, if_right in ((SAYS_LEFT, wrong), (SAYS_RIGHT, 1 - wrong)):
            right = moved * if_right
            either = right + (1 - moved) * (1 - if_right)
            chance[:, action, reading] = seen * either
            after[:, action, reading] = np.divide(right, either, out=moved.copy(), where=either > 0)
    return chance, after


@dataclass(frozen=True)
class Histories:
    """Every history of one round that has a positive probability under some policy, the empty one first.

    clock: steps since the doors were drawn, [n]. belief: of the right door, exact, [n]. parent, action, reading: how a
    history came from one a step shorter, [n] (-1 for the empty one). reward: [n, A]. chance: probability of each
    reading, [n, A, Y]. child: the history after it, [n, A, Y]; the empty one after the last step, and where the chance
    is zero.
    """

    config: DoorsConfig
    clock: IntArray
    belief: FloatArray
    parent: IntArray
    action: IntArray
    reading: IntArray
    reward: FloatArray
    chance: FloatArray
    child: IntArray

    def __len__(self) -> int:
        return len(self.clock)

    def action_values(self, value: FloatArray) -> FloatArray:
        """Reward plus discounted expected `value` ([n]) of the next history, [n, A]: the operator B of section A."""
        ahead: FloatArray = (self.chance * value[self.child]).sum(axis=2)
        return self.reward + self.config.discount * ahead

    def optimal(self) -> FloatArray:
        """V*, [n], by value iteration, to `CONVERGED`."""
        return self._iterate(None)

    def evaluate(self, policy: IntArray) -> FloatArray:
        """The exact value of a policy, action [n] for each history -> [n]."""
        return self._iterate(policy)

    def _iterate(self, policy: IntArray | None) -> FloatArray:
        rows = np.arange(len(self))
        value = np.zeros(len(self))
        while True:
            each = self.action_values(value)
            new = each.max(axis=1) if policy is None else each[rows, policy]
            moved = np.abs(new - value).max()
            value = new
            # What is left is at most a geometric series of such steps.
            if moved * self.config.discount <= CONVERGED * (1 - self.config.discount):
                return value

    def reach(self) -> FloatArray:
        """Probability of each history within its round when every action is equally likely, [n]."""
        probability = np.ones(len(self))
        for t in range(1, self.config.rounds):
            at = np.flatnonzero(self.clock == t)
            parent = self.parent[at]
            step = self.chance[parent, self.action[at], self.reading[at]] / ACTIONS
            probability[at] = probability[parent] * step
        return probability


def histories(config: DoorsConfig) -> Histories:
    """List them by length, with the exact belief of each."""
    belief = np.array([0.5])
    parent, action, reading = (np.array([-1]) for _ in range(3))
    parts = []
    start = 0
    for t in range(config.rounds):
        chance, after = update(config, belief)
        child = np.zeros(chance.shape, np.int64)
        here = (
            np.full(len(belief), t),
            belief,
            parent,
            action,
            reading,
            rewards(config, belief),
            chance,
            child,
        )
        parts.append(here)
        if t + 1 < config.rounds:
            row, action, reading = np.nonzero(chance > 0)
            child[row, action, reading] = start + len(belief) + np.arange(len(row))
            parent, belief, start = row + start, after[row, action, reading], start + len(belief)
    columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Histories(config, *columns)
