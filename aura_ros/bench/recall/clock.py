"""How far a long command is and how long it still takes: a bar on a terminal, lines now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

SECONDS_BETWEEN_LINES = 10.0


class Clock:
    """Time left from the rate so far."""

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now or time.monotonic
        self._begin = self._now()
        self._first: int | None = None

    def left(self, done: int, total: int) -> float:
        """Seconds until `total` are done. What was done before the first call but one was not done here."""
        if self._first is None:
            self._first = done - 1
        return (self._now() - self._begin) / max(done - self._first, 1) * (total - done)


def duration(seconds: float) -> str:
    """As people say it: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Shown:
    """Progress on standard error; made by `progress`."""

    def __init__(self, bar: Progress, console: Console, what: str, total: int) -> None:
        self._bar, self._console, self._what, self._total = bar, console, what, total
        self._task = bar.add_task(what, total=total)
        self._clock, self._said = Clock(), time.monotonic()

    def item(self, done: int, text: str) -> None:
        """One of few is done, and each has its line."""
        self._bar.update(self._task, completed=done)
        left = self._clock.left(done, self._total)
        more = f", {duration(left)} left" if done < self._total else ""
        self.say(f"{done}/{self._total} {text}{more}")

    def step(self, done: int, text: str) -> None:
        """One of many is done: no line of its own."""
        self._bar.update(self._task, completed=done, description=f"{self._what}: {text}")
        left = self._clock.left(done, self._total)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            self.say(f"{self._what}: {done:,} of {self._total:,}, {text}, {duration(left)} left")

    def say(self, text: str) -> None:
        """A line beside the bar."""
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress(what: str, total: int) -> Iterator[Shown]:
    """Show how far `total` of `what` are."""
    console = Console(stderr=True)
    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield Shown(bar, console, what, total)
