"""What an endless run gives: latencies in bins, spans of steps, the slope of RSS, where two curves cross."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Latencies are counted in bins of half a per cent from 100 ns to about 50 s: constant memory for any number of steps.
BIN, FIRST_NS, BINS = 0.005, 100, 4000
PARTS = 10  # of a decade
FEWEST = 5  # latencies that make a median


@dataclass(frozen=True)
class Latency:
    """Of one contender's steps: median and 99th percentile in microseconds, of how many timed steps."""

    p50_us: float
    p99_us: float
    count: int


@dataclass(frozen=True)
class Span:
    """Steps first..last. Latencies are None where nothing was timed; bytes and RSS are those at its end.

    rss_alone: of the process with the memory alone; rss: with the caches beside it. accuracy: of a trained memory's
    answers. write_rate: of the memory.
    """

    first: int
    last: int
    memory: Latency | None
    window: Latency | None
    growing: Latency | None
    memory_bytes: int
    window_bytes: int
    growing_bytes: int
    rss_alone: int
    rss: int
    write_rate: float
    accuracy: float | None


@dataclass(frozen=True)
class Slope:
    """Of RSS over steps, memory alone, after the first tenth: bytes a step, with a standard error that allows for
    correlated samples (Newey and West 1987); growth: last sample less the first, in bytes.
    resolution: one page over the steps sampled, since Linux counts in pages.
    """

    per_step: float
    error: float
    growth: int
    samples: int

    resolution: float

    @property
    def is_zero(self) -> bool:
        """Whether nothing but noise is left: within two standard errors, or below the resolution."""
        return abs(self.per_step) <= max(2 * self.error, self.resolution)


@dataclass(frozen=True)
class Endless:
    """A run's numbers. parts: tenths of decades, for curves.

    growing_stopped: the step after which the growing cache was at its limit. pause_ms: the longest copy into larger
    arrays. byte_crossover: first step at which the growing cache is larger than the memory. time_crossover: where its
    median step gets slower than the memory's and stays so, interpolated; None: not in this run.
    """

    steps: int
    state_dim: tuple[int, int]
    weights: str
    decades: list[Span]
    parts: list[Span]
    slope: Slope | None
    alone: Latency | None
    window_rows: int
    growing_row_bytes: int
    growing_allocated: int
    growing_stopped: int | None
    pause_ms: float
    byte_crossover: int | None
    time_crossover: float | None
    interrupted: bool
    machine: dict[str, str | int | float]


class Latencies:
    """Counts of latencies by part of a decade."""

    def __init__(self, parts: int) -> None:
        self._counts = np.empty((parts, BINS), np.int32)
        self._counts.fill(0)  # touches every page now, so that RSS does not grow as bins are first used

    def add(self, part: int, nanoseconds: int) -> None:
        """Count one."""
        place = int(math.log(max(nanoseconds, FIRST_NS) / FIRST_NS) / BIN)
        self._counts[part, min(place, BINS - 1)] += 1

    def of(self, first: int, last: int) -> Latency | None:
        """Over parts first..last - 1; None if nothing was timed in them."""
        sums = np.cumsum(self._counts[first:last].sum(axis=0))
        count = int(sums[-1])
        if not count:
            return None
        places = [int(np.searchsorted(sums, q * count)) for q in (0.50, 0.99)]
        p50, p99 = (FIRST_NS * math.exp((place + 0.5) * BIN) / 1e3 for place in places)
        return Latency(p50, p99, count)


def part_of(step: int) -> int:
    """Which tenth of a decade a step from 1 on is in; a decade ends with its power of ten: 9 for step 10, 10 for 11."""
    return max(math.ceil(PARTS * math.log10(step) - 1e-9) - 1, 0)


def edge_of(part: int) -> int:
    """The last step before a part: 0 for part 0, 10 for part 10, 100 for part 20."""
    return math.floor(10 ** (part / PARTS) + 1e-6) if part else 0


def slope_of(steps: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> Slope | None:
    """Least squares over the samples, 8 or more, else None."""
    n = len(steps)
    if n < 8:
        return None
    resolution = os.sysconf("SC_PAGE_SIZE") / float(steps[-1] - steps[0])
    x = steps - steps.mean()
    spread = float(x @ x)
    slope = float(x @ values) / spread
    score = x * (values - values.mean() - slope * x)
    variance = float(score @ score)
    lags = n // 10
    for lag in range(1, lags + 1):
        variance += 2 * (1 - lag / (lags + 1)) * float(score[lag:] @ score[:-lag])
    return Slope(slope, math.sqrt(max(variance, 0.0)) / spread, int(values[-1] - values[0]), n, resolution)


def crossover(slower: list[Span]) -> float | None:
    """The step from which the growing cache's median stays above the memory's, between the centres of two spans."""
    points = [
        (math.sqrt(span.first * (span.last + 1.0)), math.log(span.growing.p50_us / span.memory.p50_us))
        for span in slower
        if span.growing and span.memory and min(span.growing.count, span.memory.count) >= FEWEST
    ]
    below = [index for index, (_, ratio) in enumerate(points) if ratio <= 0]
    if not points or (below and below[-1] == len(points) - 1):
        return None
    if not below:
        return points[0][0]
    (left, low), (right, high) = points[below[-1]], points[below[-1] + 1]
    return left * (right / left) ** (-low / (high - low))
