"""One endless stream through the memory, a growing cache and a window cache: bytes, latency by decade, RSS.

Two passes. The memory alone, for the slope of the process's RSS, which a cache's growth would hide. Then all three in
one loop, a step of each after the other, so that whatever else the machine does slows all alike.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aura_ros.bench.endless_caches import GrowingCache, WindowCache
from aura_ros.bench.endless_numbers import (
    PARTS,
    Endless,
    Latencies,
    Span,
    crossover,
    edge_of,
    part_of,
    slope_of,
)
from aura_ros.bench.recall.tasks import SPARSE, SparseRecall
from aura_ros.config import check_fields, option
from aura_ros.errors import UserError
from aura_ros.memory import MemoryCheckpoint, MemoryConfig, NumpyMemory, load_checkpoint
from aura_ros.memory.checkpoint import content_hash
from aura_ros.memory.config import buffer_shapes, parameter_shapes
from aura_ros.training.episodes import EVENT

BLOCK = 500
WARM_UP_STEPS = 300
# Up to this step the growing cache is read at every step, at step t then at about every (t / 1000)th.
EVERY_READ_STEPS = 1000
RSS_SAMPLES = 2000
STATM = "/proc/self/statm"


@dataclass(frozen=True)
class EndlessConfig:
    """What is run. Checked at construction; raises UserError naming the field."""

    steps: int = option(100_000, "steps of the stream", minimum=1000, maximum=10**9)
    checkpoint: str = option(
        "", "memory trained on sparse_recall; none: random weights, N = 32, written at events"
    )
    kv_limit: int = option(
        64_000_000, "bytes at which the growing cache stops", minimum=65_536, maximum=2**38
    )
    window: int = option(
        0, "rows of the window cache; 0: as many as the memory's bytes hold", minimum=0, maximum=100_000
    )
    seed: int = option(0, "of the stream and of random weights", minimum=0, maximum=2**31 - 1)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.window == 1:
            raise UserError("window 1 is not allowed; give 0, or 2 rows or more")


def random_checkpoint(seed: int) -> MemoryCheckpoint:
    """A memory for sparse_recall of seeded random weights, N = 32, made without torch: it costs what a trained one does."""
    config = MemoryConfig(input_dim=SPARSE.input_dim, out_dim=SPARSE.classes, seed=seed)
    rng = np.random.default_rng(seed)
    arrays = {name: np.zeros(shape, np.float32) for name, shape in buffer_shapes(config).items()}
    for name, shape in parameter_shapes(config).items():
        bound = 1.0 / math.sqrt(shape[-1]) if shape else 0.0
        arrays[name] = rng.uniform(-bound, bound, shape).astype(np.float32)
    arrays["eta_raw"] = np.array(math.log(config.eta_init), np.float32)
    arrays["alpha_raw"] = np.array(math.log(config.alpha_init / (1 - config.alpha_init)), np.float32)
    arrays["surprise_variance"] = np.ones((), np.float32)
    return MemoryCheckpoint(config, arrays, content_hash(config.to_json(), arrays))


def checkpoint_of(config: EndlessConfig) -> MemoryCheckpoint:
    """The memory to run. Raises UserError for a bad file, or a memory that is none of sparse_recall's."""
    if not config.checkpoint:
        return random_checkpoint(config.seed)
    checkpoint = load_checkpoint(config.checkpoint)
    memory = checkpoint.config
    widths, wanted = (memory.input_dim, memory.out_dim), (SPARSE.input_dim, SPARSE.classes)
    if widths != wanted or not memory.has_fast_weights:
        raise UserError(
            f"checkpoint '{config.checkpoint}' is '{memory.variant.value}' with input and output of {widths}; give a "
            f"fast-weight memory of sparse_recall, {wanted}"
        )
    return checkpoint


def resident_bytes(file: int) -> int:
    """RSS of this process, from its open `STATM`. Linux counts it in pages."""
    return int(os.pread(file, 128, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection in a timed loop, which makes no cycles; what is there now is not looked at again."""
    was = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was:
            gc.enable()


class _Run:
    """The passes of one run, and what they have counted so far."""

    def __init__(self, config: EndlessConfig) -> None:
        self.config = config
        self.checkpoint = checkpoint = checkpoint_of(config)
        self.memory = NumpyMemory.from_checkpoint(checkpoint)
        row = (checkpoint.config.dk + checkpoint.config.dv) * 4
        self.window_rows = config.window or max(self.memory.state_bytes // row, 2)
        self.growing = GrowingCache(checkpoint, config.kv_limit)
        self.window = WindowCache(checkpoint, self.window_rows)
        self.parts = part_of(config.steps) + 1
        # Counted by tenths of decades, in arrays whose pages exist before the loops begin.
        self.alone, self.timed_memory, self.timed_window, self.timed_growing = (
            Latencies(self.parts) for _ in range(4)
        )
        self.asked, self.right, self.written, self.taken = (np.zeros(self.parts, np.int64) for _ in range(4))
        self.bytes = np.zeros((self.parts, 3), np.int64)
        self.rss_alone, self.rss = np.zeros(self.parts, np.int64), np.zeros(self.parts, np.int64)
        self.samples, self.sampled = np.zeros((RSS_SAMPLES + 2, 2)), 0
        self.stopped: int | None = None
        self.byte_crossover: int | None = None
        self.pause_ns = 0
        self.done = 0

    def blocks(self) -> Iterator[tuple[int, npt.NDArray[np.float32], list[int], list[bool]]]:
        """The stream, without end in principle: first step, inputs, right answers (-1: none), events."""
        task = SparseRecall(SPARSE.name, SPARSE.symbols, SPARSE.event, SPARSE.query, BLOCK)
        rng = np.random.default_rng(self.config.seed)
        for start in range(1, self.config.steps + 1, BLOCK):
            part = task.episodes(1, rng)
            count = min(BLOCK, self.config.steps + 1 - start)
            events = (part.kinds[0] == EVENT).tolist()
            yield start, part.observations[0, :count], part.targets[0].tolist(), events

    def force(self, event: bool) -> bool | None:
        """Random weights have a gate that knows nothing: they write at events, as a trained memory would."""
        return None if self.config.checkpoint else event

    def warm_up(self) -> None:
        """Once through all code, then everything is as before."""
        window, growing = WindowCache(self.checkpoint, self.window_rows), GrowingCache(self.checkpoint, 2**20)
        _, inputs, _, events = next(self.blocks())
        for x, event in zip(inputs[:WARM_UP_STEPS], events, strict=False):
            self.memory.step(x, self.force(event))
            window.step(x)
            growing.append(x)
            growing.read()
        self.memory.reset()

    def run_alone(self, statm: int, tick: Callable[[int], bool]) -> bool:
        """First pass; returns whether it came to its end."""
        step, clock, memory = self.memory.step, time.perf_counter_ns, self.memory
        every = -(-self.config.steps // (RSS_SAMPLES * BLOCK))
        for number, (start, inputs, _, events) in enumerate(self.blocks()):
            for offset in range(len(inputs)):
                x, force = inputs[offset], self.force(events[offset])
                begin = clock()
                step(x, force)
                self.alone.add(part_of(start + offset), clock() - begin)
            resident = resident_bytes(statm)
            self.rss_alone[part_of(start + len(inputs) - 1)] = resident
            if number % every == 0:
                self.samples[self.sampled] = start, resident
                self.sampled += 1
            if tick(start + len(inputs) - 1):
                return False
        memory.reset()
        return True

    def run_together(self, statm: int, tick: Callable[[int], bool]) -> bool:
        """Second pass; returns whether it came to its end."""
        memory, growing, clock = self.memory, self.growing, time.perf_counter_ns
        step, see = memory.step, self.window.step
        budget = memory.state_bytes
        cold = False
        for start, inputs, targets, events in self.blocks():
            for offset in range(len(inputs)):
                x, number = inputs[offset], start + offset
                part, force = part_of(number), self.force(events[offset])
                begin = clock()
                told = step(x, force)
                middle = clock()
                see(x)
                end = clock()
                self.taken[part] += 1
                self.written[part] += told.written_bytes > 0
                if not cold:
                    self.timed_memory.add(part, middle - begin)
                    self.timed_window.add(part, end - middle)
                if targets[offset] >= 0:
                    self.asked[part] += 1
                    self.right[part] += int(told.output.argmax()) == targets[offset]
                cold = self._grow(x, number, part, clock)
                if self.byte_crossover is None and growing.state_bytes > budget:
                    self.byte_crossover = number
                self.bytes[part] = memory.state_bytes, self.window.state_bytes, growing.state_bytes
            self.done = number
            self.rss[part] = resident_bytes(statm)
            if tick(number):
                return number == self.config.steps
        return True

    def _grow(self, x: npt.NDArray[np.float32], number: int, part: int, clock: Callable[[], int]) -> bool:
        """The growing cache's step; returns whether it has pushed the others out of the processor's caches.

        On a robot nobody runs it beside the memory, so the step after such a read is not timed. While every step is
        read the rows are few, and all are timed.
        """
        growing = self.growing
        if growing.full:
            self.stopped = self.stopped or growing.rows
            return False
        copies, every = growing.grows, max(1, number // EVERY_READ_STEPS)
        read = number % every == 0
        begin = clock()
        growing.append(x)
        if copies:
            self.pause_ns = max(self.pause_ns, clock() - begin)
        if read:
            growing.read()
            self.timed_growing.add(part, clock() - begin)
        return read and every > 1

    def span(self, first: int, last: int) -> Span:
        """What parts first..last - 1 hold."""
        held = [part for part in range(first, min(last, self.parts)) if self.taken[part]]
        at_end, asked, taken = held[-1], int(self.asked[held].sum()), int(self.taken[held].sum())
        memory_bytes, window_bytes, growing_bytes = map(int, self.bytes[at_end])
        known = [int(r[p]) for r in (self.rss_alone, self.rss) for p in [self._last_known(r, at_end)]]
        return Span(
            first=edge_of(first) + 1,
            last=min(edge_of(last), self.done),
            memory=self.timed_memory.of(first, last),
            window=self.timed_window.of(first, last),
            growing=self.timed_growing.of(first, last),
            memory_bytes=memory_bytes,
            window_bytes=window_bytes,
            growing_bytes=growing_bytes,
            rss_alone=known[0],
            rss=known[1],
            write_rate=int(self.written[held].sum()) / taken,
            accuracy=int(self.right[held].sum()) / asked if self.config.checkpoint and asked else None,
        )

    @staticmethod
    def _last_known(values: npt.NDArray[np.int64], part: int) -> int:
        # RSS is asked for once a block, which the first decades do not fill: the next sample stands for them.
        known = np.flatnonzero(values)
        later = known[known >= part]
        return int(later[0] if len(later) else known[-1]) if len(known) else 0

    def result(self, finished: bool) -> Endless:
        """Sum up what there is."""
        parts = [p for p in range(self.parts) if self.taken[p]]
        curve = [self.span(p, p + 1) for p in parts]
        decades = [self.span(p, p + PARTS) for p in range(PARTS, self.parts, PARTS) if self.taken[p]]
        kept = self.samples[: self.sampled]
        kept = kept[kept[:, 0] > self.config.steps / 10]
        config, growing = self.checkpoint.config, self.growing
        return Endless(
            steps=self.done,
            state_dim=(config.dk, config.dv),
            weights=f"{self.config.checkpoint or 'random'} ({self.checkpoint.weights_hash[:12]})",
            decades=decades,
            parts=curve,
            slope=slope_of(kept[:, 0], kept[:, 1]),
            alone=self.alone.of(0, self.parts),
            window_rows=self.window_rows,
            growing_row_bytes=growing.row_bytes,
            growing_allocated=growing.allocated_bytes,
            growing_stopped=self.stopped,
            pause_ms=self.pause_ns / 1e6,
            byte_crossover=self.byte_crossover,
            time_crossover=crossover(curve),
            interrupted=not finished,
            machine={
                "machine": platform.machine(),
                "cores": os.cpu_count() or 0,
                "load_average": os.getloadavg()[0],
                "python": platform.python_version(),
                "numpy": np.__version__,
            },
        )


def measure(config: EndlessConfig, tick: Callable[[int, int], bool] = lambda done, total: False) -> Endless:
    """Run both passes; tick(steps done, steps of both passes) is asked after every block whether to stop.

    NumPy should run on one thread (OPENBLAS_NUM_THREADS=1), as a control loop's does. Raises UserError for a bad
    checkpoint.
    """
    run = _Run(config)
    run.warm_up()
    statm = os.open(STATM, os.O_RDONLY)
    try:
        with _no_collection():
            total = 2 * config.steps
            finished = run.run_alone(statm, lambda done: tick(done, total))
            if finished:
                finished = run.run_together(statm, lambda done: tick(config.steps + done, total))
    finally:
        os.close(statm)
    return run.result(finished)
