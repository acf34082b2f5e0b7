"""The workers of a Ray cluster for joblib: what a dead node was training is trained again on another."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aura_ros.errors import UserError

ADDRESS = "RAY_ADDRESS"
CONNECT_TIMEOUT_S = DISCONNECT_TIMEOUT_S = 10.0
# Twice as long each time. A cluster with Ray's defaults takes about 10 s to notice that a node is dead; until then it
# takes jobs for it, and each of them fails within a second.
RETRY_AFTER_S = 5.0


@dataclass(frozen=True)
class RayWorkers:
    """A connected cluster.

    backend: for `joblib.parallel_config`. count: CPUs to use. error: base class of what is raised for a job whose
    workers died every time.
    """

    backend: Any
    count: int
    error: type[Exception]


@contextmanager
def ray_workers(jobs: int, retries: int, warn: Callable[[str], None]) -> Iterator[RayWorkers]:
    """Connect to the cluster that RAY_ADDRESS names, or start one on this machine alone; disconnect at the end.

    jobs: workers; 0: one for each CPU of the cluster. retries: how often a job is begun anew when its worker or node
    dies; each time is told to `warn`, from another thread. A job's own exception ends it. Raises UserError if Ray is
    missing, no cluster answers, or it is too small.
    """
    try:
        import ray
        from ray.exceptions import RayError
        from ray.util.multiprocessing.pool import ResultThread
    except ImportError as error:
        raise UserError(
            f"engine 'ray' needs ray ({error}); install it with `pip install aura_ros[ray]`"
        ) from error

    started = not ray.is_initialized()
    # Ray says on standard output that a node died, and standard output is the command's result.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            if started:
                _connect(ray, jobs)
            cpus = int(ray.cluster_resources().get("CPU", 0))
            if cpus < max(jobs, 1):
                raise UserError(
                    f"jobs {jobs} is not allowed: the Ray cluster has {cpus} CPUs; give at most as many, or 0 for all"
                )
            yield RayWorkers(_backend(retries, warn), jobs or cpus, RayError)
        finally:
            # One that still waited for a job would connect anew.
            for thread in threading.enumerate():
                if isinstance(thread, ResultThread):
                    thread.join(DISCONNECT_TIMEOUT_S)
            if started:
                ray.shutdown()


def _backend(retries: int, warn: Callable[[str], None]) -> Any:
    """Joblib's Ray backend, which gives up at the first dead worker, made to begin its job anew."""
    from ray.exceptions import RayError
    from ray.util.joblib.ray_backend import RayBackend

    class Retrying(RayBackend):
        # Its parent refuses for the pools of the standard library; Ray's calls back for each job.
        supports_return_generator = True

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._ended = threading.Event()

        def submit(self, func: Callable[[], Any], callback: Callable[[Any], None] | None = None) -> Any:
            """Give a job to a worker. callback: gets its result, or the exception that it ended with."""
            delays = iter([RETRY_AFTER_S * 2**n for n in range(retries)])

            def done(result: Any) -> None:
                # A job's own exceptions come in a class of the pool's; at the end we kill workers ourselves.
                died = isinstance(result, RayError) and not self._ended.is_set()
                delay = next(delays, None) if died else None
                if delay is not None:
                    reason = " ".join(str(result).split())[:160]
                    warn(f"a worker of the Ray cluster died ({reason}); its cell begins anew in {delay:g} s")
                    if not self._ended.wait(delay):
                        super(Retrying, self).submit(func, done)
                        return
                if callback is not None:
                    callback(result)

            return super().submit(func, done)

        def terminate(self) -> None:
            """End the workers."""
            self._ended.set()
            super().terminate()

    # The worker itself comes back wherever there is room. Half a CPU each: Ray gives every node as many as it has CPUs
    # before it gives one more, and those of a dead node still find room on the others.
    return Retrying(ray_remote_args={"num_cpus": 0.5, "max_restarts": -1})


def _connect(ray: Any, jobs: int) -> None:
    address = os.environ.get(ADDRESS) or "local"
    _check_reachable(address)
    more = {"num_cpus": jobs or None, "include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **more)
    except Exception as error:  # Ray has no common class for these
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"no Ray cluster answers at {ADDRESS} '{address}' ({reason}); give host:port of one that runs, "
            "on one of its machines"
        ) from error


def _check_reachable(address: str) -> None:
    """Raise UserError if nothing listens at host:port; Ray itself tries for minutes and says so at length."""
    if "://" in address:
        raise UserError(
            f"{ADDRESS} '{address}' is not allowed; give host:port of the cluster, on one of its machines"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # "local", "auto": Ray looks on this machine
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"no Ray cluster answers at {ADDRESS} '{address}' ({error}); start one with `ray start --head`, or unset "
            f"{ADDRESS} to use this machine alone"
        ) from error
