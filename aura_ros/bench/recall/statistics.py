"""Intervals and comparisons over seeds: t-intervals, paired bootstrap, Welch (scipy). No seed is left out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
# Shares of the writes that a task needs, and of the way from guessing to knowing everything, below both of which a gate
# has shut. The paper's own case, accuracy 0.420 at 2.3 % where 7.7 % are needed, is one.
COLLAPSED_WRITES, COLLAPSED_WAY = 0.5, 0.5
COLLAPSED_NOTE = (
    "Collapsed: fewer than half the writes of the floor with a default value, and accuracy less than half the way from "
    "guessing to 1."
)


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
    """One variant against another: mean difference of paired seeds with the bootstrap's 95 % interval, and Welch's test.

    low, high: nan for one pair, which has no interval. welch_low, welch_high, welch_p: of the difference of all seeds of
    one side and all of the other; nan where there is nothing to test with.
    """

    difference: float
    low: float
    high: float
    welch_p: float
    pairs: int
    welch_low: float = math.nan
    welch_high: float = math.nan

    @property
    def parity(self) -> bool:
        """Whether the bootstrap's interval holds 0; one pair has none."""
        return self.low <= 0 <= self.high

    def text(self, seeds: int = 0) -> str:
        """Difference, interval, and Welch's p where there is one; the pairs where they are not as many as `seeds`."""
        if self.pairs < 2:
            return f"{self.difference:+.4f} (1 pair)"
        p = "" if math.isnan(self.welch_p) else f", p={self.welch_p:.2g}"
        pairs = f" ({self.pairs} pairs)" if seeds and seeds != self.pairs else ""
        return f"{self.difference:+.4f} {bounds(self.low, self.high, 4)}{p}{pairs}"


def bounds(low: float, high: float, digits: int = 3) -> str:
    """An interval of a difference; "-" where there is none."""
    return "-" if math.isnan(low) else f"[{low:+.{digits}f}, {high:+.{digits}f}]"


def compare(ours: dict[int, float], other: dict[int, float], seed: int = 0) -> Comparison | None:
    """ours, other: seed -> value. Pairs are the seeds that both have; None if there are none."""
    from scipy import stats

    seeds = sorted(ours.keys() & other.keys())
    if not seeds:
        return None
    differences = np.array([ours[s] - other[s] for s in seeds], float)
    low = high = float(differences.mean()) if len(seeds) > 1 else math.nan
    if len(seeds) > 1 and np.ptp(differences) > 0:
        found = stats.bootstrap(
            (differences,),
            np.mean,
            n_resamples=RESAMPLES,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval
        low, high = float(found.low), float(found.high)
    a, b = (np.array(list(side.values()), float) for side in (ours, other))
    p = welch_low = welch_high = math.nan
    # Seeds that all agree to rounding have no variance to test with.
    if min(len(a), len(b)) > 1 and max(np.ptp(a), np.ptp(b)) > 1e-9:
        with warnings.catch_warnings():
            # One side may well be all 1.000: scipy warns of a variance of zero, and Welch's test still holds.
            warnings.simplefilter("ignore", RuntimeWarning)
            tested = stats.ttest_ind(a, b, equal_var=False)
            bounds = tested.confidence_interval()
        p, welch_low, welch_high = float(tested.pvalue), float(bounds.low), float(bounds.high)
    return Comparison(float(differences.mean()), low, high, p, len(seeds), welch_low, welch_high)


@dataclass(frozen=True)
class Verdict:
    """Where two results stand: "same", "higher", "lower", or "not comparable" and why; difference is ours less theirs."""

    word: str
    difference: float
    why: str = ""

    @property
    def text(self) -> str:
        """One phrase."""
        if self.word == "not comparable":
            return f"not comparable ({self.why})"
        shown = round(self.difference, 3) + 0.0  # no -0.000
        return f"{self.word} ({shown:+.3f}{self.why and ', ' + self.why})"


def judge(ours: Interval, mean: float, half: float | None, seeds: int | None, digits: float) -> Verdict:
    """Ours against a published mean with the half width of its 95 % t-interval, from the two intervals (Welch).

    digits: half a unit of the last printed digit; a difference within it is none. A mean published without interval
    is looked for in ours.
    """
    from scipy import stats

    difference = ours.mean - mean
    if ours.n < 2 or seeds == 1:
        return Verdict("not comparable", difference, "n=1" if ours.n < 2 else "the paper's n=1")
    if abs(difference) <= digits:
        return Verdict("same", difference)
    word = "higher" if difference > 0 else "lower"
    if half is None or seeds is None:
        inside = abs(difference) <= ours.half + digits
        return Verdict("same" if inside else word, difference, "the paper's without interval")
    spreads = [
        (width * math.sqrt(n) / stats.t.ppf(0.975, n - 1))
        for width, n in ((ours.half, ours.n), (half, seeds))
    ]
    if max(spreads) <= 1e-9:
        return Verdict(word, difference)
    p = stats.ttest_ind_from_stats(ours.mean, spreads[0], ours.n, mean, spreads[1], seeds, False).pvalue
    return Verdict("same" if p >= 0.05 else word, difference, f"p={p:.2g}")


def collapsed(accuracy: float, write_rate: float, chance: float, needed: float) -> bool:
    """Whether a gate has shut: far fewer writes than the task needs, and few right answers.

    chance: accuracy of guessing. needed: write rate of the floor with a default value.
    """
    few_right = accuracy < chance + COLLAPSED_WAY * (1 - chance)
    return write_rate < COLLAPSED_WRITES * needed and few_right
