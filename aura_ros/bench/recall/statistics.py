"""Intervals and comparisons over seeds: t-intervals, paired bootstrap, Welch (scipy). No seed is left out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
# A gate that almost never writes, with accuracy near chance: the paper's collapse.
COLLAPSED_RATE, COLLAPSED_MARGIN = 0.01, 0.15


@dataclass(frozen=True)
class Interval:
    """A mean over n seeds with its 95 % t-interval's half width (nan for one seed)."""

    mean: float
    half: float
    n: int

    def text(self, digits: int = 3) -> str:
        """As in the paper: mean ± half width."""
        half = "n=1" if math.isnan(self.half) else f"± {self.half:.{digits}f}"
        return f"{self.mean:.{digits}f} {half}"


def interval(values: Sequence[float]) -> Interval:
    """Mean and 95 % t-interval."""
    from scipy import stats

    data = np.asarray(values, float)
    if len(data) < 2:
        return Interval(float(data.mean()), math.nan, len(data))
    half = stats.t.ppf(0.975, len(data) - 1) * data.std(ddof=1) / math.sqrt(len(data))
    return Interval(float(data.mean()), float(half), len(data))


@dataclass(frozen=True)
class Comparison:
    """One variant against another: mean difference, bootstrap's 95 % interval over paired seeds, Welch's p."""

    difference: float
    low: float
    high: float
    welch_p: float
    pairs: int

    @property
    def parity(self) -> bool:
        """Whether the interval holds 0."""
        return self.low <= 0 <= self.high


def compare(ours: dict[int, float], other: dict[int, float], seed: int = 0) -> Comparison | None:
    """ours, other: seed -> value. Pairs are the seeds that both have; None if there are none."""
    from scipy import stats

    seeds = sorted(ours.keys() & other.keys())
    if not seeds:
        return None
    a, b = (np.array([side[s] for s in seeds], float) for side in (ours, other))
    differences = a - b
    low = high = float(differences.mean())
    if len(seeds) > 1 and np.ptp(differences) > 0:
        found = stats.bootstrap(
            (differences,),
            np.mean,
            n_resamples=RESAMPLES,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval
        low, high = float(found.low), float(found.high)
    p = math.nan
    # Seeds that all agree to rounding have no variance to test with.
    if len(seeds) > 1 and max(np.ptp(a), np.ptp(b)) > 1e-9:
        with warnings.catch_warnings():
            # One side may well be all 1.000: scipy warns of a variance of zero, and Welch's test still holds.
            warnings.simplefilter("ignore", RuntimeWarning)
            p = float(stats.ttest_ind(a, b, equal_var=False).pvalue)
    return Comparison(float(differences.mean()), low, high, p, len(seeds))


def collapsed(accuracy: float, write_rate: float, chance: float) -> bool:
    """Whether a gate has shut: next to no writes, and answers hardly better than guessing."""
    return write_rate < COLLAPSED_RATE and accuracy < chance + COLLAPSED_MARGIN
