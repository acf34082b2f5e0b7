"""Prove the certificate where everything can be counted: a bounded memory of a finite process, its bound, its true loss.

The memory keeps a belief rounded to a few levels and updates it recursively (AP2a), so it writes only when a reading
moves it by more than half a level. All suprema are exact, over every reachable history and action.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aura_ros.bench.certificate.formula import bounds, half_span
from aura_ros.bench.certificate.process import CONVERGED, DoorsConfig, Histories, histories, update
from aura_ros.errors import UserError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FiniteCertificate:
    """One memory of one process, all exact.

    histories, states: how many histories are reachable, and how many (clock, level) the memory makes of them.
    epsilon, delta, residual: suprema of AP1, of AP2 in total variation (sum |p - q|), and of the one-step value
    residual. lipschitz: L_V, half the span of the surrogate value. loose, tight: the bound's two forms.
    value_error, loss: sup |V* - V^ o sigma| (theorem 4.3 (i), at most half of the bound) and sup V* - V^pi (ii).
    span: of what bounded rewards allow. value_span: of V* itself. write_rate: share of a uniformly random policy's
    steps that change the memory.
    """

    noise: float
    levels: int
    histories: int
    states: int
    epsilon: float
    delta: float
    residual: float
    lipschitz: float
    loose: float
    tight: float
    value_error: float
    loss: float
    span: float
    value_span: float
    write_rate: float

    @property
    def holds(self) -> bool:
        """Whether loss <= tight <= loose, to rounding."""
        return self.loss <= self.tight + 1e-9 and self.tight <= self.loose + 1e-9

    @property
    def verdict(self) -> str:
        """What the loose form says: the narrowest of three spans that it is below, or nothing."""
        if self.loose >= self.span:
            return "VACUOUS"
        if self.loose >= self.span / 2:
            return "below the span"
        return "below half the span" if self.loose >= self.value_span / 2 else "below half of V*'s span"


def remember(tree: Histories, levels: int) -> tuple[IntArray, FloatArray]:
    """The memory's state for each history, [n] integers from 0, and whether its last step wrote, [n] of 0 or 1.

    State = (clock, level): the doors' clock is seen by everyone; the level stands for a belief of level / (levels - 1).
    Raises UserError for fewer than 2 levels.
    """
    if levels < 2:
        raise UserError(f"levels {levels} is not allowed; a belief needs 2 or more")
    config = tree.config
    level = np.full(len(tree), (levels - 1) // 2)
    wrote = np.zeros(len(tree))
    _, after = update(config, np.arange(levels) / (levels - 1))
    table = np.rint(after * (levels - 1)).astype(np.int64)
    for t in range(1, config.rounds):
        at = np.flatnonzero(tree.clock == t)
        before = level[tree.parent[at]]
        level[at] = table[before, tree.action[at], tree.reading[at]]
        wrote[at] = level[at] != before
    _, state = np.unique(tree.clock * levels + level, return_inverse=True)
    return state.reshape(-1), wrote


def certify(config: DoorsConfig, levels: int, tree: Histories | None = None) -> FiniteCertificate:
    """Measure one memory against the process; `tree`: the process's histories, where they are there already.

    The heads r^ and P^ are what they would be when fitted without limit to a uniformly random policy: the mean over
    the histories that share a state, weighted by how likely each is.
    """
    tree = histories(config) if tree is None else tree
    state, wrote = remember(tree, levels)
    count = int(state.max()) + 1
    reach = tree.reach()
    rows = np.arange(len(tree))[:, None, None]
    # Law of the next memory state given the whole history, [n, A, states].
    law = np.zeros((len(tree), tree.reward.shape[1], count))
    np.add.at(law, (rows, np.arange(law.shape[1])[None, :, None], state[tree.child]), tree.chance)
    reward_head, law_head = _mean_by(state, count, reach, tree.reward), _mean_by(state, count, reach, law)
    surrogate = _surrogate(reward_head, law_head, config.discount)
    action_values = reward_head + config.discount * law_head @ surrogate
    policy = action_values.argmax(axis=1)[state]

    epsilon = float(np.abs(tree.reward - reward_head[state]).max())
    delta = float(np.abs(law - law_head[state]).sum(axis=2).max())
    residual = float(np.abs(law @ surrogate - (law_head @ surrogate)[state]).max())
    lipschitz = half_span(surrogate)
    both = bounds(epsilon, delta, residual, lipschitz, config.discount)
    optimal = tree.optimal()
    later = tree.clock > 0
    return FiniteCertificate(
        noise=config.noise,
        levels=levels,
        histories=len(tree),
        states=count,
        epsilon=epsilon,
        delta=delta,
        residual=residual,
        lipschitz=lipschitz,
        loose=both.loose,
        tight=both.tight,
        value_error=float(np.abs(optimal - surrogate[state]).max()),
        loss=float((optimal - tree.evaluate(policy)).max()),
        span=both.span,
        value_span=float(np.ptp(optimal)),
        write_rate=float((wrote * reach)[later].sum() / reach[later].sum()) if later.any() else 0.0,
    )


def _mean_by(state: IntArray, count: int, weight: FloatArray, values: FloatArray) -> FloatArray:
    """Weighted mean of values [n, ...] over the histories of each state, [count, ...]."""
    total = np.zeros((count, *values.shape[1:]))
    shape = (-1,) + (1,) * (values.ndim - 1)
    np.add.at(total, state, values * weight.reshape(shape))
    return total / np.bincount(state, weight, count).reshape(shape)


def _surrogate(reward: FloatArray, law: FloatArray, discount: float) -> FloatArray:
    """V^, [states]: the fixed point of the surrogate Bellman operator (section A)."""
    value = np.zeros(len(reward))
    while True:
        new = (reward + discount * law @ value).max(axis=1)
        moved = np.abs(new - value).max()
        value = new
        if moved * discount <= CONVERGED * (1 - discount):
            return value
