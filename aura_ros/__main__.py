"""`aura` and `python -m aura_ros`: Ctrl-C is quiet from the first moment on, then the command line is imported."""

import os
import signal
import sys
from types import FrameType


def _end(_number: int, _frame: FrameType | None) -> None:
    # Nothing has been started or written yet, or everything is done: no clean-up to wait for.
    os._exit(0)


def main() -> None:
    """Entry point of the `aura` command."""
    signal.signal(signal.SIGINT, _end)
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (lives as long as the process)
    # A terminal that cannot show a character must not end the program.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    from aura_ros.cli import main as run

    run()


if __name__ == "__main__":
    main()
