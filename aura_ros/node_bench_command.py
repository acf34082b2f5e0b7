"""`aura bench node`: what the policy node and the player cost on this machine, beside inference."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from aura_ros.files import write_json
from aura_ros.nodes.bench_config import NodeBenchConfig
from aura_ros.preflight import check_json, prepare_environment, ros_domain_of_its_own
from aura_ros.share import share_directory

# What the figures are to be below, on two cores with nothing else running.
AIMS = {
    "callback_ms_p99": 5.0,
    "overhead_ms_p50": 3.0,
    "overhead_ms_p99": 10.0,
    "jitter_ms_p99": 4.0,
    "idle_cpu_percent": 5.0,
}
MEANINGS = {
    "callback_ms_p99": "a subscription's callback while cameras stream, ms, p99",
    "overhead_ms_p50": "observation complete and due to chunk published, less inference, ms, p50",
    "overhead_ms_p99": "the same, p99",
    "inference_ms_p50": "inference, ms, p50",
    "jitter_ms_p99": "error of the player's period, ms, p99",
    "player_rate_hz": "rate of the player, Hz",
    "idle_cpu_percent": "CPU of an active node without cameras, % of a core",
    "busy_cpu_percent": "CPU of the node with cameras, % of a core",
}


def run_node_bench(config: NodeBenchConfig, json_path: Path | None) -> int:
    """Measure, print, and write `json_path`; returns the exit status. Raises UserError."""
    if json_path is not None:
        check_json(json_path)
    with tempfile.TemporaryDirectory(prefix="aura_bench_log_") as logs:
        prepare_environment(share_directory(), Path(logs))
        with ros_domain_of_its_own():
            from aura_ros.nodes.node_bench import Bench

            with Bench(config, lambda text: _say(f"measuring: {text}\n")) as bench:
                found = bench.run()
    load = os.getloadavg()[0]
    conditions = {
        "cores": os.cpu_count(),
        "torch_threads": 1,
        "load_average": round(load, 2),
        **dataclasses.asdict(config),
    }
    width = max(map(len, MEANINGS.values()))
    for name, meaning in MEANINGS.items():
        aim = f"   (to be at most {AIMS[name]:g})" if name in AIMS else ""
        sys.stdout.write(f"{meaning:<{width}}  {found[name]:8.3f}{aim}\n")
    sys.stdout.write(
        f"{found['queries']} queries; compact backbone, torch threads 1, {os.cpu_count()} cores, load {load:.1f}\n"
    )
    if json_path is not None:
        write_json(json_path, {**found, "conditions": conditions})
    return 0


def _say(text: str) -> Any:
    return sys.stderr.write(text)
