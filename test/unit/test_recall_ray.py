"""Sweeps on a Ray cluster of two nodes on this machine: the same numbers, and a dead node costs nothing but time."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from aura_ros.bench.recall import sweep
from aura_ros.bench.recall.presets import preset_cells
from aura_ros.bench.recall.store import Store, read_record
from aura_ros.bench.recall.sweep import run_sweep
from aura_ros.errors import UserError

ray = pytest.importorskip("ray", reason="the [ray] extra is not installed")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def cells(seeds=(0, 1), variants=("aura", "no_memory")):
    return preset_cells("paper-main", seeds=seeds, budgets=[16], variants=variants, steps=3)


def wait_until(true, what: str) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def status(pid: int | str) -> tuple[str, int]:
    """State letter and parent of a process, from /proc; ("X", 0) for none."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return state, int(parent)


def alive(pid: int) -> bool:
    return status(pid)[0] not in "XZ"


def with_descendants(pids: set[int]) -> set[int]:
    parents = {int(path.name): status(path.name)[1] for path in Path("/proc").glob("[0-9]*")}
    found: set[int] = set()
    more = set(pids)
    while more:
        found |= more
        more = {pid for pid, parent in parents.items() if parent in found} - found
    return found


def end(pids) -> None:
    for pid in filter(alive, pids):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(alive, pids)), "processes of Ray are left")


class TwoNodes:
    """A cluster with one CPU a node."""

    def __init__(self, folder: str) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()
        self.nodes, self._pids = [], set()
        for _ in range(2):
            node = self.cluster.add_node(
                num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False, temp_dir=folder
            )
            self.nodes.append(node)
            self._pids |= {info.process.pid for infos in node.all_processes.values() for info in infos}

    def raylet(self, node) -> int:
        return node.all_processes["raylet"][0].process.pid

    def end(self) -> None:
        pids = with_descendants(self._pids)
        ray.shutdown()
        self.cluster.shutdown()
        end(pids)


@pytest.fixture
def two_nodes(monkeypatch):
    folder = tempfile.mkdtemp(prefix="aura-", dir="/tmp")  # a socket's path has to be short
    # What a cluster's administrator does by installing the package on the nodes.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    two = None
    try:
        two = TwoNodes(folder)
        monkeypatch.setenv("RAY_ADDRESS", two.cluster.address)
        yield two
    finally:
        if two is not None:
            two.end()
        shutil.rmtree(folder, ignore_errors=True)


def noting(notes: Path, stuck_on: str = "", broken: str = "", deadly: str = ""):
    """`run_one` that leaves NOTES/<key>.<pid> with the node it ran on.

    stuck_on: a node where a job does not end. broken: a cell that raises. deadly: one that kills its worker.
    """

    def run_one(cell, folder, source):
        from aura_ros.bench.recall import sweep

        node = ray.get_runtime_context().get_node_id()
        (notes / f"{cell.key}.{os.getpid()}").write_text(node)
        if node == stuck_on:
            signal.pause()
        if cell.key == broken:
            raise ZeroDivisionError("of its own")
        if cell.key == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return sweep.run_one(cell, folder, source)

    return run_one


@pytest.fixture
def notes(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


def test_both_nodes_train_and_give_the_numbers_of_one_process(two_nodes, notes, tmp_path, monkeypatch, capfd):
    wanted = cells()
    run_sweep(wanted, tmp_path / "one", jobs=1)
    monkeypatch.setattr(sweep, "run_one", noting(notes))
    seen = []
    trained = run_sweep(
        wanted, tmp_path / "ray", engine="ray", report=lambda done, total, record: seen.append((done, total))
    )
    assert trained == 4
    assert seen == [(n, 4) for n in (1, 2, 3, 4)]
    assert {note.read_text() for note in notes.iterdir()} == {node.node_id for node in two_nodes.nodes}
    for cell in wanted:
        one, other = (read_record(Store(tmp_path / name).file(cell)) for name in ("one", "ray"))
        for name in ("accuracy", "write_rate", "history"):
            assert one[name] == other[name]
        assert Store(tmp_path / "ray").checkpoint(cell).is_file()
    assert not ray.is_initialized()
    assert capfd.readouterr().out == ""


def test_what_a_dead_node_was_training_is_trained_by_the_other(two_nodes, notes, tmp_path, monkeypatch):
    second = two_nodes.nodes[1]
    monkeypatch.setattr(sweep, "run_one", noting(notes, stuck_on=second.node_id))

    def on_second() -> list[Path]:
        return [note for note in notes.iterdir() if note.read_text() == second.node_id]

    def kill() -> None:
        wait_until(on_second, "no job began on the second node")
        end(with_descendants({two_nodes.raylet(second)}))

    killer = threading.Thread(target=kill)
    killer.start()
    said = []
    try:
        assert run_sweep(cells(), tmp_path / "out", engine="ray", warn=said.append) == 4
    finally:
        killer.join()
    for cell in cells():
        assert read_record(Store(tmp_path / "out").file(cell))["key"] == cell.key
    assert [path.name for path in (tmp_path / "out").rglob(".*")] == []
    lost = {note.name.rpartition(".")[0] for note in on_second()}
    assert lost
    for key in lost:
        assert len(list(notes.glob(f"{key}.*"))) == 2
    assert [line for line in said if "died" in line] == said != []


def test_a_cell_that_fails_is_named_and_not_tried_again(two_nodes, notes, tmp_path, monkeypatch):
    wrong = cells()[0].key
    monkeypatch.setattr(sweep, "run_one", noting(notes, broken=wrong))
    said = []
    with pytest.raises(ZeroDivisionError, match="of its own"):
        run_sweep(cells(), tmp_path / "out", engine="ray", warn=said.append)
    assert len(list(notes.glob(f"{wrong}.*"))) == 1
    assert said == []  # the worker of the other cell was ended, it did not die
    assert not (tmp_path / "out" / "cells" / f"{wrong}.json").exists()
    assert not ray.is_initialized()


def test_a_cell_that_kills_its_workers_is_given_up_and_named(two_nodes, notes, tmp_path, monkeypatch):
    from aura_ros.bench.recall import ray_engine

    monkeypatch.setattr(ray_engine, "RETRY_AFTER_S", 0.5)
    wrong = cells()[0].key
    monkeypatch.setattr(sweep, "run_one", noting(notes, deadly=wrong))
    said = []
    with pytest.raises(UserError, match=f"workers died 4 times.*{wrong}") as refused:
        run_sweep(cells(), tmp_path / "out", engine="ray", warn=said.append)
    assert "\n" not in str(refused.value)
    assert len(said) >= 3
    assert 2 <= len(list(notes.glob(f"{wrong}.*"))) <= 4
    assert not (tmp_path / "out" / "cells" / f"{wrong}.json").exists()


def test_more_jobs_than_the_cluster_has_cpus_is_one_line(two_nodes, tmp_path):
    with pytest.raises(UserError, match="jobs 3 is not allowed: the Ray cluster has 2 CPUs") as refused:
        run_sweep(cells(), tmp_path, engine="ray", jobs=3)
    assert "\n" not in str(refused.value)


def test_without_an_address_a_cluster_lives_as_long_as_the_sweep(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    wanted = cells(variants=["no_memory"])
    before, seen = with_descendants({os.getpid()}), set()

    def look(*_) -> None:
        seen.update(with_descendants({os.getpid()}) - before)

    try:
        assert run_sweep(wanted, tmp_path, engine="ray", jobs=2, report=look) == 2
        assert all(Store(tmp_path).file(cell).is_file() for cell in wanted)
        assert not ray.is_initialized()
        assert seen
        wait_until(lambda: not any(map(alive, seen)), "processes of Ray are left")
    finally:
        end(seen)


@pytest.mark.parametrize("address", ["PORT", "nonsense", "auto", "ray://127.0.0.1:PORT", "127.0.0.1:99999"])
def test_an_address_without_a_cluster_is_one_line(address, tmp_path):
    with socket.socket() as free:  # bound and not listening: nobody else takes the port
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        address = f"127.0.0.1:{port}" if address == "PORT" else address.replace("PORT", str(port))
        found = subprocess.run(
            [
                *(sys.executable, "-m", "aura_ros", "recall", "sweep", "--preset", "paper-main", "--seeds"),
                *("0,1", "--steps", "3", "--engine", "ray", "--out", str(tmp_path / "out")),
            ],
            cwd=ROOT,
            env={**os.environ, "RAY_ADDRESS": address, "RAY_TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert found.returncode == 2
    assert found.stdout == ""
    assert address in found.stderr
    assert len(found.stderr.splitlines()) == 1
