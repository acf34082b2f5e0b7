"""Start a node: `python -m aura_ros.nodes policy_node --ros-args ...`.

Signal handlers go in before anything heavy is imported, so that Ctrl-C during start-up ends quietly too.
"""

import importlib
import os
import signal
import sys

NODES = ("policy_node", "libero_sim", "gate_recorder", "chunk_player", "synthetic_source")


def main() -> None:
    """Import the named node's module and run its `main`."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in NODES:
        sys.stderr.write(f"aura_ros: node '{name}' is not known; choose one of: {', '.join(NODES)}\n")
        sys.exit(2)
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not sys.exit: a second signal while the interpreter winds up would end it by the signal.
        signal.signal(number, lambda *_: os._exit(0))
    # Read when NumPy is imported. Its products here are small: on a busy machine a second thread makes preparing an
    # image ten times slower. A person's own setting stands.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    importlib.import_module(f"aura_ros.nodes.{name}").main()


if __name__ == "__main__":
    main()
