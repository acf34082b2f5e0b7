"""Linear heads by ridge regression, fitted on one part of the data and judged on another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

# Weights of the penalty on standardised inputs to choose from, as shares of the number of samples.
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)


@dataclass(frozen=True)
class LinearHead:
    """y = (x - centre) @ weight + offset; weight [inputs, outputs]."""

    centre: FloatArray
    weight: FloatArray
    offset: FloatArray

    def __call__(self, x: FloatArray) -> FloatArray:
        """[n, inputs] -> [n, outputs]."""
        predicted: FloatArray = (x - self.centre) @ self.weight + self.offset
        return predicted


def fit(x: FloatArray, y: FloatArray) -> LinearHead:
    """x [n, inputs], y [n, outputs]; n >= 2. Inputs are standardised first; one that never moves gets no weight.

    The penalty is the one of `RIDGES` with the least leave-one-out error, in closed form.
    """
    count = len(x)
    centre, offset = x.mean(axis=0), y.mean(axis=0)
    scale = x.std(axis=0)
    steady = scale < 1e-9
    scaled = np.where(steady, 0.0, (x - centre) / np.where(steady, 1.0, scale))
    left, singular, right = np.linalg.svd(scaled, full_matrices=False)
    target = left.T @ (y - offset)
    best, shrunk = np.inf, np.zeros_like(target)
    for ridge in RIDGES:
        keep = singular**2 / (singular**2 + ridge * count)
        # How much of its own prediction a sample is, the mean's share included.
        own = left**2 @ keep + 1 / count
        missed = (y - offset - left @ (keep[:, None] * target)) / np.maximum(1 - own, 1e-9)[:, None]
        if (error := float(np.square(missed).mean())) < best:
            best = error
            shrunk = (singular / (singular**2 + ridge * count))[:, None] * target
    weight = (right.T @ shrunk) / np.where(steady, 1.0, scale)[:, None]
    return LinearHead(centre, weight, offset)


def discounted_returns(rewards: FloatArray, discount: float, last: float = 0.0) -> FloatArray:
    """Sum of discount^k r_{t+k} from every step to the end of the last axis, where `last` is what comes after it."""
    returns = np.zeros_like(rewards)
    ahead = np.full(rewards.shape[:-1], last)
    for t in reversed(range(rewards.shape[-1])):
        ahead = rewards[..., t] + discount * ahead
        returns[..., t] = ahead
    return returns


def lipschitz(weight: FloatArray) -> float:
    """Of a linear value w [inputs], where the distance of two states is the mean absolute difference of coordinates."""
    return float(np.abs(weight).max() * len(weight))
