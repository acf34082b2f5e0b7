"""What a memory may cost in value: the bound of an approximate information state (paper theorem 4.3, section A).

Source: Subramanian, Sinha, Seraj and Mahajan, "Approximate information state for approximate planning and
reinforcement learning in partially observed systems", JMLR 23(12), 2022, definition 7 and theorems 9 and 27. Nothing
here estimates anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aura_ros.errors import UserError

FloatArray = npt.NDArray[np.float64]


def value_loss_bound(epsilon: float, transition: float, discount: float) -> float:
    """2 (epsilon + discount * transition) / (1 - discount), as theorem 4.3 (ii) and remark 4.4 have it.

    epsilon: error of the predicted reward (AP1). transition: how far the predicted value of the next state is off:
    L_V * delta for the loaded form (`loaded`), the measured one-step value residual for the tight form.
    Raises UserError for a discount outside 0..1 (1 excluded) or a negative or NaN error.
    """
    check_discount(discount)
    for name, value in (("epsilon", epsilon), ("transition", transition)):
        if not value >= 0:
            raise UserError(f"{name} {value} is not allowed; an error is 0 or more")
    return 2 * (epsilon + discount * transition) / (1 - discount)


def loaded(lipschitz: float, delta: float) -> float:
    """L_V * delta, the guaranteed limit of the one-step value residual (equation A.1)."""
    return lipschitz * delta


def trivial_span(discount: float, reward_span: float = 1.0) -> float:
    """What bounded rewards alone promise: no two policies differ by more. 10 at discount 0.9 and rewards in 0..1."""
    check_discount(discount)
    return reward_span / (1 - discount)


def half_span(values: npt.ArrayLike) -> float:
    """L_V for total variation: half of max - min of the surrogate value (section A.2).

    It belongs to the distance sum |p - q|, in 0..2 (`total_variation`): with the halved one the product would be half
    of what equation A.1 needs.
    """
    return float(np.ptp(np.asarray(values, float))) / 2


def total_variation(p: npt.ArrayLike, q: npt.ArrayLike) -> FloatArray:
    """Sum |p - q| over the last axis, in 0..2: the integral probability metric of all f with half span <= 1."""
    distance: FloatArray = np.abs(np.asarray(p, float) - np.asarray(q, float)).sum(axis=-1)
    return distance


def check_discount(discount: float) -> None:
    """Raises UserError unless 0 <= discount < 1."""
    if not (math.isfinite(discount) and 0 <= discount < 1):
        raise UserError(f"discount {discount} is not allowed; give a number from 0 to below 1")


@dataclass(frozen=True)
class Bounds:
    """Both forms of the bound from one set of numbers.

    loose: with L_V * delta. tight: with the one-step value residual. span: `trivial_span`.
    """

    loose: float
    tight: float
    span: float
    residual: float
    loaded: float

    @property
    def loose_vacuous(self) -> bool:
        """Whether the loose form says no more than that rewards are bounded."""
        return self.loose >= self.span

    @property
    def tight_vacuous(self) -> bool:
        """Whether the tight form says no more than that rewards are bounded."""
        return self.tight >= self.span

    @property
    def order_broken(self) -> bool:
        """Whether residual > L_V * delta, against remark 4.4.

        That cannot be where all three are what the theorem asks for; it happens where the residual is measured on
        single next states (their noise is in it), or where delta is not of the next state at all.
        """
        return self.residual > self.loaded * (1 + 1e-9) + 1e-12


def bounds(
    epsilon: float, delta: float, residual: float, lipschitz: float, discount: float, reward_span: float = 1.0
) -> Bounds:
    """Both forms. lipschitz: L_V for the distance that delta is of."""
    product = loaded(lipschitz, delta)
    return Bounds(
        loose=value_loss_bound(epsilon, product, discount),
        tight=value_loss_bound(epsilon, residual, discount),
        span=trivial_span(discount, reward_span),
        residual=residual,
        loaded=product,
    )
