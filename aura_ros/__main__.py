"""`aura` and `python -m aura_ros`: Ctrl-C is one line from the first moment on, then the command line is imported."""

import os
import signal
import sys
from types import FrameType


def _end(_number: int, _frame: FrameType | None) -> None:
    # Nothing has been started or written yet: no clean-up to wait for.
    os.write(2, b"aura: interrupted; nothing was started\n")
    os._exit(128 + signal.SIGINT)


def main() -> None:
    """Entry point of the `aura` command."""
    signal.signal(signal.SIGINT, _end)
    # As in the nodes (see there), before NumPy is imported; torch's threads are another matter.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (lives as long as the process)
    # A terminal that cannot show a character must not end the program.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    from aura_ros.cli import main as run

    try:
        run()
    finally:
        # Everything is done: the exit status stands.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
