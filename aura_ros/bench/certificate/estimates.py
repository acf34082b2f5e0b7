"""Numbers with intervals: the mean and the 95 % quantile of an error, resampled by groups that belong together (scipy)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aura_ros.bench.certificate.formula import trivial_span, value_loss_bound

FloatArray = npt.NDArray[np.float64]

RESAMPLES = 10_000
QUANTILE = 0.95
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Resampled:
    """A statistic on the data, and on each resample [n]. The same resamples for the same groups and seed."""

    value: float
    draws: FloatArray

    def estimate(self) -> Estimate:
        """With the percentile interval."""
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(self.draws, (tail, 1 - tail))
        return Estimate(self.value, float(low), float(high))


@dataclass(frozen=True)
class Error:
    """One kind of error, its statistics resampled together. largest: of all that were seen."""

    mean: Resampled
    q95: Resampled
    largest: float


@dataclass(frozen=True)
class ErrorSummary:
    """What is kept of an `Error`."""

    mean: Estimate
    q95: Estimate
    largest: float


def resample(errors: FloatArray, resamples: int = RESAMPLES, seed: int = 0) -> Error:
    """errors: [groups, most in a group], NaN where a group has fewer. Whole groups are drawn, with replacement."""
    return Error(
        resample_mean(errors, resamples, seed),
        _draw(errors, lambda values: float(np.quantile(values, QUANTILE)), resamples, seed),
        float(np.nanmax(errors)),
    )


def resample_mean(values: FloatArray, resamples: int = RESAMPLES, seed: int = 0) -> Resampled:
    """The mean alone, on the same resamples."""
    return _draw(values, lambda chosen: float(chosen.mean()), resamples, seed)


def _draw(data: FloatArray, statistic: Callable[[FloatArray], float], resamples: int, seed: int) -> Resampled:
    from scipy import stats

    groups = np.arange(len(data))

    def of(chosen: npt.NDArray[np.int64]) -> float:
        values = data[chosen].ravel()
        return statistic(values[~np.isnan(values)])

    with warnings.catch_warnings():
        # scipy warns where every resample gives the same; the interval is then that one point.
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        found = stats.bootstrap(
            (groups,),
            of,
            n_resamples=resamples,
            vectorized=False,
            method="percentile",
            rng=np.random.default_rng(seed),
        )
    return Resampled(of(groups), np.asarray(found.bootstrap_distribution, float))


def summary(error: Error) -> ErrorSummary:
    """Without the draws."""
    return ErrorSummary(error.mean.estimate(), error.q95.estimate(), error.largest)


@dataclass(frozen=True)
class Form:
    """The bound in both forms for one choice of statistic, metric and L_V.

    loose: 2 (epsilon + discount L_V delta) / (1 - discount). tight: with the one-step value residual. transition and
    residual: L_V * delta and the residual that went in; order_broken: residual above it, against remark 4.4.
    """

    statistic: str
    metric: str
    lipschitz: float
    loose: Estimate
    tight: Estimate
    transition: float
    residual: float
    vacuous_loose: bool
    vacuous_tight: bool
    order_broken: bool


def forms(
    epsilon: Error,
    deltas: dict[str, Error],
    residual: Error,
    lipschitz: dict[str, dict[str, float]],
    discount: float,
) -> tuple[Form, ...]:
    """Every combination that was measured.

    deltas: metric -> delta. lipschitz: metric -> name of an L_V -> its value. The sup that theorem 4.3 asks for is
    nearest to `largest`, of what was visited; `q95` and `mean` are what the paper prints.
    """
    span = trivial_span(discount)
    found = []
    for metric, delta in deltas.items():
        for constant, factor in lipschitz[metric].items():
            for statistic in ("mean", "q95", "largest"):
                e, d, r = (_pick(error, statistic) for error in (epsilon, delta, residual))
                loose = _bound(e, Resampled(factor * d.value, factor * d.draws), discount)
                tight = _bound(e, r, discount)
                found.append(
                    Form(
                        statistic=statistic,
                        metric=f"{metric}, {constant}",
                        lipschitz=factor,
                        loose=loose,
                        tight=tight,
                        transition=factor * d.value,
                        residual=r.value,
                        vacuous_loose=loose.value >= span,
                        vacuous_tight=tight.value >= span,
                        order_broken=r.value > factor * d.value * (1 + 1e-9),
                    )
                )
    return tuple(found)


def _pick(error: Error, statistic: str) -> Resampled:
    if statistic == "largest":
        # No interval: a resample cannot show a larger one than was seen.
        return Resampled(error.largest, np.full_like(error.mean.draws, error.largest))
    chosen: Resampled = getattr(error, statistic)
    return chosen


def _bound(epsilon: Resampled, transition: Resampled, discount: float) -> Estimate:
    scale = 2 / (1 - discount)
    draws = scale * (epsilon.draws + discount * transition.draws)
    return Resampled(value_loss_bound(epsilon.value, transition.value, discount), draws).estimate()
