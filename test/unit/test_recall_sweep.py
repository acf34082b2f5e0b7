"""Sweeps, their folder and their table: nothing half written, nothing trained twice, no seed left out."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from aura_ros import files
from aura_ros.bench.recall import cells as cells_module
from aura_ros.bench.recall import scores, sweep
from aura_ros.bench.recall import verify as verify_module
from aura_ros.bench.recall.cells import Cell, run_cell
from aura_ros.bench.recall.figures import draw
from aura_ros.bench.recall.presets import PRESETS, preset_cells
from aura_ros.bench.recall.statistics import collapsed, compare, interval
from aura_ros.bench.recall.store import LINES, Store, read_lines, read_record
from aura_ros.bench.recall.sweep import run_sweep
from aura_ros.bench.recall.table import by_seed, markdown, read_cells, rows
from aura_ros.bench.recall.verify import choose, verify
from aura_ros.errors import UserError
from aura_ros.memory import checkpoint
from aura_ros.training.settings import ObjectiveConfig, TrainConfig

ROOT = Path(__file__).resolve().parents[2]


def cells(seeds=(0, 1), variants=("aura", "no_memory"), steps=3) -> list[Cell]:
    return preset_cells("paper-main", seeds=seeds, budgets=[16], variants=variants, steps=steps)


@pytest.fixture(scope="module", autouse=True)
def fewer_episodes():
    """Judged in this process on 256 episodes, not 4,096: what is tested is how cells are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "EVALUATION_EPISODES", 256)
        yield


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    assert run_sweep(cells(), folder, jobs=1) == 4
    return folder


def test_a_line_has_what_tables_and_readers_need(swept):
    records = read_lines(swept)
    assert len(records) == 4
    wanted = {
        *(
            "task",
            "variant",
            "state_dim",
            "seed",
            "steps",
            "objective",
            "accuracy",
            "write_rate",
            "selectivity",
        ),
        *("params", "state_bytes", "cpu_s", "checkpoint", "commit"),
    }
    for record in records:
        assert wanted <= record.keys()
        assert (swept / "checkpoints" / record["checkpoint"]).is_file()
        assert Cell.from_dict(record["config"]).key == record["key"]
        assert "history" not in record
    assert "history" in json.loads(next((swept / "cells").glob("*.json")).read_text())


def test_the_same_cell_gives_the_same_numbers():
    cell = cells(seeds=[3], variants=["aura"], steps=5)[0]
    one, two = run_cell(cell), run_cell(cell)
    for name in ("accuracy", "write_rate", "history"):
        assert one[name] == two[name]


def test_a_second_run_trains_nothing_and_a_wider_one_only_what_is_missing(swept, tmp_path):
    seen = []
    assert run_sweep(cells(), swept, jobs=1, report=lambda done, total, record: seen.append(record)) == 0
    assert seen == []
    assert run_sweep(cells(seeds=[0, 1, 2]), swept, jobs=1, report=lambda d, t, r: seen.append((d, t))) == 2
    assert seen == [(5, 6), (6, 6)]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": 1}', None])
def test_a_broken_cell_file_is_named_and_computed_again(damage, tmp_path):
    wanted = cells(seeds=[0], variants=["no_memory"])
    run_sweep(wanted, tmp_path, jobs=1)
    path = Store(tmp_path).file(wanted[0])
    before = json.loads(path.read_text())
    text = json.dumps({**before, "format": 99}) if damage is None else damage
    path.write_text(text)
    said = []
    assert run_sweep(wanted, tmp_path, jobs=1, warn=said.append) == 1
    assert len(said) == 1
    assert path.name in said[0]
    assert read_record(path)["accuracy"] == before["accuracy"]


def test_results_of_another_version_are_refused_by_line(swept, tmp_path):
    line = json.loads((swept / LINES).read_text().splitlines()[0])
    (tmp_path / LINES).write_text(json.dumps(line) + "\n" + json.dumps({**line, "format": 2}) + "\n")
    with pytest.raises(UserError, match=r"line 2 is of format 2.*reads 1"):
        read_lines(tmp_path)
    (tmp_path / LINES).write_text("not json\n")
    with pytest.raises(UserError, match="line 1"):
        read_lines(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        read_lines(tmp_path / "none")


@pytest.mark.parametrize("module", [files, checkpoint])
def test_a_full_disk_leaves_no_half_cell(module, tmp_path, monkeypatch):
    wanted = cells(seeds=[0], variants=["no_memory"])

    def full(*_):
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(module, "os", SimpleNamespace(**{**vars(os), "fsync": full}))
        with pytest.raises(UserError, match="No space left") as refused:
            run_sweep(wanted, tmp_path, jobs=1)
    assert "\n" not in str(refused.value)
    assert f"cell {wanted[0].key}" in str(refused.value)
    assert str(tmp_path) in str(refused.value)
    assert list((tmp_path / "cells").iterdir()) == []
    assert [path.suffix for path in (tmp_path / "checkpoints").iterdir()] == [".safetensors"] * (
        module is files
    )
    assert run_sweep(wanted, tmp_path, jobs=1) == 1


def shipped(swept: Path, folder: Path) -> str:
    """The cells of a sweep as they are handed on: lines and checkpoints, no file for each cell. Returns the lines."""
    lines = (swept / LINES).read_text()
    (folder / LINES).write_text(lines)
    shutil.copytree(swept / "checkpoints", folder / "checkpoints")
    return lines


@pytest.mark.parametrize("fails", [False, True])
def test_lines_without_a_file_outlive_a_sweep_of_another_cell(fails, swept, tmp_path, monkeypatch):
    before = shipped(swept, tmp_path).splitlines()
    (further,) = cells(seeds=[5], variants=["no_memory"])

    def failing(*_, **__):
        raise ZeroDivisionError

    if fails:
        monkeypatch.setattr(sweep, "run_cell", failing)
        with pytest.raises(RuntimeError, match="failed"):
            run_sweep([further], tmp_path, jobs=1)
    else:
        assert run_sweep([further], tmp_path, jobs=1) == 1
    after = (tmp_path / LINES).read_text().splitlines()
    assert set(before) <= set(after)
    keys = [json.loads(line)["key"] for line in after]
    assert keys == sorted(keys)
    assert (further.key in keys) is not fails


def test_a_folder_of_lines_is_whole_and_its_cells_are_not_trained_again(swept, tmp_path):
    before = shipped(swept, tmp_path)
    assert run_sweep(cells(), tmp_path, jobs=1, warn=pytest.fail) == 0
    assert (tmp_path / LINES).read_text() == before


def test_a_line_of_no_use_is_named_and_replaced(swept, tmp_path):
    lines = [json.loads(line) for line in shipped(swept, tmp_path).splitlines()]
    (wanted,) = cells(seeds=[0], variants=["no_memory"])
    damaged = [{**r, "accuracy": math.nan} if r["key"] == wanted.key else r for r in lines]
    (tmp_path / LINES).write_text("".join(json.dumps(r) + "\n" for r in damaged))
    said = []
    assert run_sweep([wanted], tmp_path, jobs=1, warn=said.append) == 1
    assert len(said) == 1
    assert wanted.key in said[0]
    assert "no finite 'accuracy'" in said[0]
    assert len(read_lines(tmp_path)) == len(lines)
    assert read_cells(tmp_path)


@pytest.mark.parametrize("damage", ['{"format": 1', '{"format": 1}', '{"format": 2, "key": "a"}'])
def test_lines_that_cannot_be_kept_stop_a_sweep_before_it_trains(damage, swept, tmp_path, monkeypatch):
    text = shipped(swept, tmp_path) + damage + "\n"
    (tmp_path / LINES).write_text(text)
    monkeypatch.setattr(sweep, "run_one", pytest.fail)
    with pytest.raises(UserError, match=f"line {len(text.splitlines())} ") as refused:
        run_sweep(cells(seeds=[5]), tmp_path, jobs=1)
    assert "\n" not in str(refused.value)
    assert (tmp_path / LINES).read_text() == text


@pytest.mark.parametrize("kept", ["file", "line"])
def test_a_checkpoint_that_is_gone_is_made_again(kept, swept, tmp_path):
    (wanted,) = cells(seeds=[0], variants=["no_memory"])
    shipped(swept, tmp_path)
    if kept == "file":
        (tmp_path / "cells").mkdir()
        shutil.copy(Store(swept).file(wanted), tmp_path / "cells")
    Store(tmp_path).checkpoint(wanted).unlink()
    said = []
    assert run_sweep([wanted], tmp_path, jobs=1, warn=said.append) == 1
    assert len(said) == 1
    assert f"{wanted.key}.safetensors" in said[0]
    assert Store(tmp_path).checkpoint(wanted).is_file()


def test_a_cell_whose_memory_was_not_kept_is_not_trained_again(swept, tmp_path):
    lines = [json.loads(line) for line in shipped(swept, tmp_path).splitlines()]
    (tmp_path / LINES).write_text("".join(json.dumps({**r, "checkpoint": None}) + "\n" for r in lines))
    shutil.rmtree(tmp_path / "checkpoints")
    assert Store(tmp_path).missing(cells(), pytest.fail) == []


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"label": None}, "no text 'label'"),
        ({"floor_skip": math.inf}, "no finite 'floor_skip'"),
        ({"event_rate": "often"}, "no number 'event_rate'"),
        ({"accuracy": 1.5}, "no fraction"),
        ({"key": "x"}, "key 'x', its configuration"),
        ({"seed": 4}, "seed '4', its configuration"),
        ({"at_lengths": [3]}, "at_lengths"),
        ({"at_lengths": [{"steps": 64}]}, "no number 'accuracy' in 'at_lengths'"),
    ],
)
def test_sweep_and_table_agree_on_what_a_usable_cell_is(damage, said, swept, tmp_path):
    (wanted,) = cells(seeds=[0], variants=["no_memory"])
    damaged = {**read_record(Store(swept).file(wanted)), **damage}
    (tmp_path / LINES).write_text(json.dumps(damaged) + "\n")
    with pytest.raises(UserError, match=said):
        read_cells(tmp_path)
    store = Store(tmp_path / "b")
    store.prepare()
    store.file(wanted).write_text(json.dumps(damaged))
    warned = []
    assert store.missing([wanted], warned.append) == [wanted]
    assert said in warned[0]
    older = {
        name: value for name, value in read_record(Store(swept).file(wanted)).items() if name != "soft_query"
    }
    (tmp_path / LINES).write_text(json.dumps(older) + "\n")
    assert len(read_cells(tmp_path)) == 1


def test_the_commit_is_that_of_the_sweeps_beginning(tmp_path, monkeypatch):
    now = ["first"]
    monkeypatch.setattr(sweep, "commit", lambda: now.pop())
    run_sweep(cells(), tmp_path, jobs=1)
    assert {record["commit"] for record in read_lines(tmp_path)} == {"first"}


def test_a_cell_trained_alone_has_the_commit_from_before_its_training(monkeypatch):
    order = []
    monkeypatch.setattr(cells_module, "commit", lambda: order.append("commit") or "now")
    made = run_cell(cells(seeds=[0], variants=["aura"])[0], report=lambda *_: order.append("step"))
    assert made["commit"] == "now"
    assert order[0] == "commit"
    assert order.count("commit") == 1


def dying(record: dict, deaths: Path, key: str, times: int):
    """`run_one` that trains nothing and takes its worker with it, as a kernel out of memory does, for one cell."""

    def run_one(cell, folder, source):
        if cell.key == key and len(deaths.read_text() if deaths.exists() else "") < times:
            with deaths.open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        made = {
            **record,
            "key": cell.key,
            "config": cell.to_dict(),
            "seed": cell.seed,
            "variant": cell.variant,
        }
        Store(folder).save(made)
        return made

    return run_one


def test_a_worker_that_is_killed_has_its_cell_trained_again(swept, tmp_path, monkeypatch):
    wanted = cells()
    some = read_record(Store(swept).file(wanted[0]))
    monkeypatch.setattr(sweep, "run_one", dying(some, tmp_path / "deaths", wanted[1].key, times=1))
    said, seen = [], []
    assert run_sweep(wanted, tmp_path, jobs=2, report=lambda d, t, r: seen.append(d), warn=said.append) == 4
    assert seen == [1, 2, 3, 4]
    assert len(said) == 1
    assert wanted[1].key in said[0]
    assert len(read_lines(tmp_path)) == 4


def test_a_cell_that_kills_every_worker_is_named_and_the_others_are_trained(swept, tmp_path, monkeypatch):
    wanted = cells(seeds=range(3))
    some = read_record(Store(swept).file(wanted[0]))
    monkeypatch.setattr(sweep, "run_one", dying(some, tmp_path / "deaths", wanted[0].key, times=99))
    said = []
    with pytest.raises(UserError, match=f"died 4 times.*{wanted[0].key}.*fewer --jobs") as refused:
        run_sweep(wanted, tmp_path, jobs=2, warn=said.append)
    assert "\n" not in str(refused.value)
    assert (tmp_path / "deaths").read_text() == 4 * "x"
    assert len(said) == 3
    assert not Store(tmp_path).file(wanted[0]).exists()
    # After its first death it is the last in line: it may take one other with it, again and again.
    assert len(read_lines(tmp_path)) >= 4


def test_a_cell_that_fails_is_named_and_ends_the_sweep(tmp_path, monkeypatch):
    wanted = cells(seeds=[0, 1], variants=["no_memory"])

    def failing(*_, **__):
        raise ZeroDivisionError("of its own")

    monkeypatch.setattr(sweep, "run_cell", failing)
    with pytest.raises(RuntimeError, match=rf"cell {wanted[0].key} failed \(ZeroDivisionError: of its own\)"):
        run_sweep(wanted, tmp_path, jobs=1, warn=pytest.fail)
    monkeypatch.setattr(sweep, "run_one", failing)
    with pytest.raises(ZeroDivisionError, match="of its own"):
        run_sweep(wanted, tmp_path, jobs=2, warn=pytest.fail)
    assert read_lines(tmp_path) == []


def test_ctrl_c_is_one_line_leaves_no_half_cell_and_the_sweep_goes_on(tmp_path):
    out = tmp_path / "out"
    with sweeping(out, jobs=2) as process:
        wait_for_cells(out, 1, process)
        os.killpg(process.pid, signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == ""
    lines = [line for line in errors.splitlines() if "accuracy" not in line]
    assert lines == ["aura: interrupted; run it again to have it whole"]
    goes_on(out)


def test_a_killed_sweep_goes_on_with_what_is_missing(tmp_path):
    out = tmp_path / "out"
    with sweeping(out, jobs=1) as process:
        wait_for_cells(out, 2, process)
        process.kill()
    goes_on(out)


@contextmanager
def sweeping(out: Path, jobs: int):
    """A sweep of four cells in a process group of its own."""
    program = "import aura_ros.__main__ as m; from aura_ros.bench.recall import scores as s; "
    program += "s.EVALUATION_EPISODES = 256; m.main()"
    command = [
        *(sys.executable, "-c", program, "recall", "sweep", "--preset", "paper-main", "--seeds", "0,1"),
        *("--steps", "25", "--budget", "16", "--variants", "aura,no_memory"),
        *("--jobs", str(jobs), "--out", str(out)),
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for_cells(out: Path, count: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while len(list(out.glob("cells/*.json"))) < count:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)


def goes_on(out: Path) -> None:
    """What was kept is whole and stays as it is, and only the rest is trained."""
    wanted = preset_cells("paper-main", seeds=[0, 1], budgets=[16], variants=["aura", "no_memory"], steps=25)
    kept = {path: path.read_bytes() for path in (out / "cells").iterdir() if path.suffix == ".json"}
    assert 0 < len(kept) < len(wanted)
    for path in kept:
        assert (out / "checkpoints" / read_record(path)["checkpoint"]).is_file()
    assert run_sweep(wanted, out, jobs=1) == len(wanted) - len(kept)
    assert all(path.read_bytes() == data for path, data in kept.items())
    assert len(read_lines(out)) == len(wanted)


@pytest.mark.parametrize("change", ["default", "unknown field"])
def test_a_cell_of_other_settings_is_named_and_trained_again(change, tmp_path):
    wanted = cells(seeds=[0], variants=["no_memory"])
    run_sweep(wanted, tmp_path, jobs=1)
    path = Store(tmp_path).file(wanted[0])
    record = json.loads(path.read_text())
    if change == "default":
        record["config"]["train"]["lr"] *= 2
    else:
        record["config"]["colour"] = 1
    path.write_text(json.dumps(record))
    said = []
    assert run_sweep(wanted, tmp_path, jobs=1, warn=said.append) == 1
    assert len(said) == 1
    assert str(path) in said[0]
    assert "computed again" in said[0]
    assert Store(tmp_path).missing(wanted, pytest.fail) == []


def test_two_processes_give_the_same_numbers_as_one(swept, tmp_path, monkeypatch):
    wanted = cells(variants=["aura"])

    def run_one(cell, folder, source):
        from aura_ros.bench.recall import scores, sweep

        scores.EVALUATION_EPISODES = 256
        return sweep.run_one(cell, folder, source)

    monkeypatch.setattr(sweep, "run_one", run_one)
    run_sweep(wanted, tmp_path, jobs=2)
    for cell in wanted:
        one, two = (load_file(Store(folder).checkpoint(cell)) for folder in (swept, tmp_path))
        assert {name: array.tobytes() for name, array in one.items()} == {
            n: a.tobytes() for n, a in two.items()
        }


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        run_sweep(cells(), tmp_path / "file", jobs=1)


def test_a_missing_ray_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"engine 'ray' needs ray.*pip install aura_ros\[ray\]") as refused:
        run_sweep(cells(), tmp_path, engine="ray")
    assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="engine 'slurm' is unknown; choose one of: processes, ray"):
        run_sweep(cells(), tmp_path, engine="slurm")


def test_shipped_cells_can_be_computed_again(swept):
    checks = list(verify(swept, count=2, seed=1))
    assert len(checks) == 2
    assert all(check.equal for check in checks)
    wrong = dataclasses.replace(checks[0], recorded_accuracy=checks[0].accuracy + 0.01)
    assert not wrong.equal
    with pytest.raises(UserError, match="count 0"):
        verify(swept, count=0)
    for seed in (-1, 2**31):
        with pytest.raises(UserError, match=f"seed {seed} is not allowed.*from 0 to 2147483647"):
            verify(swept, seed=seed)


def test_verify_chooses_afresh_unless_told_the_seed(swept, monkeypatch):
    seeds = iter([1, 2, 3, 4, 5, 6])
    monkeypatch.setattr(verify_module, "fresh_seed", lambda: next(seeds))
    chosen = [choose(swept, 1) for _ in range(6)]
    assert [choice.seed for choice in chosen] == [1, 2, 3, 4, 5, 6]
    assert len({choice.records[0]["key"] for choice in chosen}) > 1
    assert choose(swept, 1, 4) == chosen[3]
    assert choose(swept / LINES, 1, 4) == chosen[3]
    monkeypatch.undo()
    assert choose(swept).seed != choose(swept).seed


def test_verify_refuses_the_memory_of_another_cell(swept, tmp_path):
    shipped(swept, tmp_path)
    (one, other) = (Store(tmp_path).checkpoint(c) for c in cells(variants=["aura"]))
    one.write_bytes(other.read_bytes())
    with pytest.raises(UserError, match="is of another memory than its cell") as refused:
        list(verify(tmp_path, count=9))
    assert "\n" not in str(refused.value)


def test_verify_judges_the_shortest_further_length_too(tmp_path):
    train = TrainConfig(steps=2, batch=2)
    run_sweep([Cell(task="sparse_recall", state_dim=8, train=train, lengths=(6, 8))], tmp_path, jobs=1)
    assert [check.steps for check in verify(tmp_path)] == [0, 6]
    (line,) = read_lines(tmp_path)
    line["at_lengths"][0]["accuracy"] += 0.01
    (tmp_path / LINES).write_text(json.dumps(line) + "\n")
    assert [check.equal for check in verify(tmp_path)] == [True, False]


def record(variant="aura", seed=0, accuracy=1.0, write_rate=0.1, **changes):
    cell = Cell(variant=variant, seed=seed, **changes)
    return {
        **{
            "task": cell.task,
            "label": cell.label,
            "state_dim": cell.state_dim,
            "variant": variant,
            "seed": seed,
        },
        **{"key": cell.key, "steps": cell.train.steps, "accuracy": accuracy, "write_rate": write_rate},
        **{
            "floor_skip": 9.8,
            "floor_default": 12.4,
            "state_bytes": 4224,
            "params": 1,
            "config": cell.to_dict(),
        },
    }


def test_every_seed_is_counted_the_collapsed_ones_too():
    table = rows([record(seed=0), record(seed=1, accuracy=0.25, write_rate=0.0)])
    (row,) = table
    assert (row.accuracy.n, row.accuracy.mean, row.collapsed) == (2, 0.625, 1)
    assert row.worst_accuracy == 0.25
    assert row.ratio == pytest.approx(20.0)
    assert "1 of 2" in markdown(table)


def test_the_paper_stands_beside_ours_and_dense_is_compared_by_pairs():
    table = rows(
        [record(seed=s, accuracy=1.0 - 0.001 * s) for s in range(4)]
        + [record("write_every_step", s, 1.0, 1.0) for s in range(4)]
    )
    text = markdown(table)
    assert "0.955, 4.98x (5)" in text
    ours = next(row for row in table if row.variant == "aura")
    assert ours.against_dense.difference == pytest.approx(-0.0015)
    assert ours.against_dense.low < -0.0005 < ours.against_dense.high + 0.0005
    assert ours.against_dense.pairs == 4


def trained(steps, **changes):
    train = TrainConfig(steps=steps)
    return [
        record(seed=s, train=train, **{"accuracy": 1.0 - 0.01 * s - 0.1 * (steps == 1), **changes})
        for s in (0, 1)
    ]


def test_one_seed_trained_twice_is_two_rows_and_no_two_seeds():
    table = rows([record(train=TrainConfig(steps=n), accuracy=0.1 * n) for n in (1, 2)])
    assert [(row.steps, row.accuracy.n) for row in table] == [(1, 1), (2, 1)]
    assert [row.accuracy_verdict.word for row in table] == ["not comparable"] * 2
    text = markdown(table)
    assert "| aura | 32 | 1 | 0.1000 n=1" in text
    assert "| aura | 32 | 2 | 0.2000 n=1" in text
    assert "train." not in text


def test_rows_that_only_a_setting_without_a_column_tells_apart_name_it():
    two = rows([record(train=TrainConfig(lr=lr)) for lr in (1e-3, 3e-3)])
    assert [row.accuracy.n for row in two] == [1, 1]
    text = markdown(two)
    assert "aura N = 32, 1,200 steps: the one of train.lr 0.001." in text
    assert "aura N = 32, 1,200 steps: the one of train.lr 0.003." in text


def test_a_row_is_compared_with_the_dense_cells_trained_alike():
    dense = [r for n in (1, 2) for r in trained(n, variant="write_every_step", write_rate=1.0)]
    table = rows([*trained(1), *trained(2), *dense])
    ours = [row for row in table if row.variant == "aura"]
    assert [row.dense_steps for row in ours] == [1, 2]
    assert all(row.against_dense.difference == pytest.approx(0.0) for row in ours)
    (longer,) = (row for row in rows([*trained(3), *dense[:2]]) if row.variant == "aura")
    assert longer.dense_steps == 1
    assert ", its 1 steps" in markdown([longer])


def test_two_cells_of_one_seed_are_never_one():
    with pytest.raises(UserError, match="seed 0 of aura has two cells"):
        by_seed([record(), record(accuracy=0.5)])


def test_a_cell_that_is_there_twice_is_one_line(swept, tmp_path):
    text = (swept / LINES).read_text()
    (tmp_path / LINES).write_text(text + text.splitlines()[0] + "\n")
    with pytest.raises(UserError, match=rf"lines 1 and {len(text.splitlines()) + 1} are the same cell"):
        read_cells(tmp_path)


def test_records_older_than_a_field_are_of_the_row_of_its_default():
    new, old = record(seed=0), record(seed=1)
    del old["config"]["probe"]
    del old["config"]["lengths"]
    (row,) = rows([new, old])
    assert row.accuracy.n == 2


def test_what_collapsed_means_is_said_once():
    table = rows([record(), record(task="sparse_recall")])
    assert markdown(table).count("Collapsed: ") == 1


def test_figures_are_pictures_of_every_task_and_need_cells(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    cells_ = [record(seed=s) for s in range(3)] + [record("no_memory", s, 0.25, 0.0) for s in range(3)]
    drawn = draw([*cells_, record(task="hard_recall")], tmp_path / "new")
    assert [file.name for file in drawn] == [
        *("figure4_writes.png", "figure5_hard.png", "figure6_bytes.png", "figure10_variants.png")
    ]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in drawn)
    with pytest.raises(UserError, match="no cells"):
        draw([], tmp_path)


def test_intervals_are_students_and_one_seed_has_none():
    values = [1.0, 2.0, 3.0, 4.0]
    half = 3.182446 * np.std(values, ddof=1) / 2
    assert interval(values).half == pytest.approx(half, rel=1e-6)
    assert math.isnan(interval([1.0]).half)


def test_comparisons_of_equal_sides_are_parity_without_a_warning(recwarn):
    found = compare({0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0})
    assert (found.difference, found.low, found.high, found.parity) == (0.0, 0.0, 0.0, True)
    assert compare({0: 1.0}, {1: 1.0}) is None
    compare({0: 1.0, 1: 1.0, 2: 1.0}, {0: 0.4, 1: 0.5, 2: 0.45})
    assert not recwarn.list


@pytest.mark.parametrize(
    ("accuracy", "writes", "shut"),
    [(0.26, 0.0, True), (0.26, 0.1, False), (1.0, 0.0, False), (0.420, 0.023, True), (0.7, 0.023, False)],
)
def test_collapse_is_far_fewer_writes_than_needed_and_few_right_answers(accuracy, writes, shut):
    # The fourth is the paper's own case on the sparse task, whose floor is 7.7 %.
    assert collapsed(accuracy, writes, 0.25, 0.077) == shut


def test_one_pair_has_no_interval_and_says_so():
    found = compare({0: 1.0, 1: 0.9}, {0: 0.5})
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert not found.parity
    assert found.text() == "+0.5000 (1 pair)"
    two = compare({0: 1.0, 1: 0.9, 2: 0.8}, {0: 0.5, 1: 0.6})
    assert two.text(3).endswith("(2 pairs)")
    assert "pairs" not in two.text(2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"name": "paper"}, "preset 'paper' is unknown"),
        ({"seeds": [9]}, "seed 9"),
        ({"budgets": [33]}, "budget 33"),
        ({"variants": ["auro"]}, "variant auro"),
        ({"steps": 0}, "steps"),
        (
            {"name": "kv", "seeds": [6], "variants": ["window_kv"]},
            r"'kv' has no cell of variant window_kv with seed 6; with these it has \['aura', 'growing_kv'\]",
        ),
    ],
)
def test_a_wrong_choice_is_one_line_that_says_what_there_is(changes, named):
    with pytest.raises(UserError, match=named) as refused:
        preset_cells(**{"name": "paper-main", **changes})
    assert "\n" not in str(refused.value)


def test_every_preset_has_all_seeds_and_keys_that_differ():
    for name in PRESETS:
        found = preset_cells(name)
        assert len({cell.key for cell in found}) == len(found)
        assert {cell.seed for cell in found} == set(range(7))


def test_settings_are_checked_by_name():
    for make, named in (
        (lambda: TrainConfig(steps=0), "steps"),
        (lambda: TrainConfig(engine="fast"), "engine"),
        (lambda: ObjectiveConfig(kind="none"), "kind"),
        (lambda: ObjectiveConfig(ce_low=0.5), "ce_low"),
        (lambda: Cell(task="recall"), "recall"),
        (lambda: Cell(variant="auro"), "variant"),
    ):
        with pytest.raises(UserError, match=named):
            make()


def test_a_cell_survives_json():
    cell = preset_cells("paper-hard", seeds=[2], budgets=[8], variants=["aura"])[0]
    assert Cell.from_dict(json.loads(json.dumps(cell.to_dict()))) == cell
    assert cell.train.seed == 2
    with pytest.raises(UserError, match="train it again"):
        Cell.from_dict({**cell.to_dict(), "colour": 1})
