"""An endless run in a process of its own: one BLAS thread, and an RSS that is NumPy's and the contenders' alone."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from aura_ros.bench.endless import EndlessConfig, measure
from aura_ros.bench.endless_numbers import Endless
from aura_ros.errors import UserError

# A control loop computes on one thread; more would also make small products slower.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
STOP = "stop"
POLL_S = 0.2
PATIENCE_S = 1.0


def measure_apart(config: EndlessConfig, report: Callable[[int, int], None]) -> Endless:
    """`measure` in a child process; report(done, total) on the way. Call it from the main thread.

    INT ends the run after the block at hand and gives what there is; another, a second later, raises KeyboardInterrupt.
    Raises UserError as `measure` does, and when the child is ended from outside.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, config), daemon=True)
    with _environment():
        # The child inherits this: a terminal's Ctrl-C goes to both, and only the parent answers it.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, before)
    theirs.close()
    first = math.inf

    def interrupted(number: int, frame: Any) -> None:
        nonlocal first
        now = time.monotonic()
        # `timeout` and launchers signal both a process and its group: that is one wish, not two.
        if now > first + PATIENCE_S:
            raise KeyboardInterrupt
        first = min(first, now)

    # No exception may strike while a message is read, or its rest would be taken for the next one.
    before = signal.signal(signal.SIGINT, interrupted)
    told = False
    try:
        while True:
            if first < math.inf and not told:
                told = True
                ours.send(STOP)
            if not ours.poll(POLL_S):
                continue
            kind, value = ours.recv()
            if kind == "done":
                return value
            if kind == "mistake":
                raise UserError(value)
            report(*value)
    except (EOFError, ConnectionError):
        process.join()
        raise UserError(
            f"the measuring process ended with status {process.exitcode}; free memory or give a smaller kv-limit"
        ) from None
    finally:
        signal.signal(signal.SIGINT, before)
        process.terminate()
        process.join()
        ours.close()


def _serve(parent: Connection, config: EndlessConfig) -> None:
    def tick(done: int, total: int) -> bool:
        parent.send(("progress", (done, total)))
        return parent.poll()

    try:
        parent.send(("done", measure(config, tick)))
    except UserError as mistake:
        parent.send(("mistake", str(mistake)))
    except MemoryError:
        parent.send(
            ("mistake", f"kv_limit {config.kv_limit} is more than there is memory for; give fewer bytes")
        )


@contextmanager
def _environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
