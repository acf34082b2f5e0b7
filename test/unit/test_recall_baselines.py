"""Baselines in the recall cells: trained, judged at further lengths, kept and read back as memories are."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from aura_ros.bench.recall import scores
from aura_ros.bench.recall.cells import Cell, run_cell
from aura_ros.bench.recall.presets import preset_cells
from aura_ros.bench.recall.scores import evaluate, evaluate_at, state_bytes
from aura_ros.bench.recall.sweep import run_sweep
from aura_ros.bench.recall.tasks import evaluation_episodes, find_task
from aura_ros.bench.recall.verify import verify
from aura_ros.errors import UserError
from aura_ros.memory import MemoryConfig, MemoryModule, baselines, build_untrained
from aura_ros.memory.baseline_config import GATED_DELTA, GROWING, HEAVY_HITTERS, KINDS, WINDOW, BaselineConfig
from aura_ros.memory.baseline_file import load_baseline, save_baseline
from aura_ros.memory.baselines import build_baseline
from aura_ros.memory.checkpoint import content_hash
from aura_ros.training.scan import run_sequence, run_stepwise
from aura_ros.training.settings import ObjectiveConfig, TrainConfig
from aura_ros.training.train import build, run_memory, train

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _one_thread_few_episodes(monkeypatch):
    monkeypatch.setattr(scores, "EVALUATION_EPISODES", 64)
    monkeypatch.setattr(scores, "STEPS_AT_LENGTH", 64 * 40)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cell(variant: str = GROWING, **changes) -> Cell:
    small = {"task": "sparse_recall", "state_dim": 16, "train": TrainConfig(steps=2, batch=4)}
    return Cell(**{**small, "variant": variant, **changes})


# Cells


@pytest.mark.parametrize(
    ("kind", "carried"),
    [(GROWING, 40 * 128), (WINDOW, 8 * 128), (HEAVY_HITTERS, 8 * 136), (GATED_DELTA, 1024)],
)
def test_a_cell_of_each_kind_is_trained_judged_kept_and_judged_again(kind, carried, tmp_path):
    wanted = cell(kind)
    assert run_sweep([wanted], tmp_path, jobs=1) == 1
    (check,) = verify(tmp_path, count=1)
    assert check.equal
    assert check.key == wanted.key
    record = json.loads((tmp_path / "cells.jsonl").read_text())
    assert (record["variant"], record["state_bytes"]) == (kind, carried)
    assert (
        record["write_rate"]
        == record["event_rate"]
        == record["distractor_rate"]
        == record["selectivity"]
        == 1
    )
    assert "at_lengths" not in record
    # The idle gate of the memory is not there: projections, encoder, head and the core's own.
    assert record["params"] == record["gradient_active"] > 8000


def test_caches_of_a_budget_hold_what_the_memory_holds():
    for n in (16, 32, 64):
        memory = MemoryModule(cell("aura", state_dim=n).memory()).initial_state(1).nbytes
        for kind in (WINDOW, HEAVY_HITTERS):
            config = cell(kind, state_dim=n).memory()
            assert config.budget == memory
            carried = build_baseline(config).state_bytes(10**6)
            assert memory - config.row_bytes < carried <= memory
    assert cell(WINDOW, state_dim=32).memory().sinks == 4


def test_training_changes_a_baseline_and_lowers_its_loss():
    told = []
    setting = cell(GROWING, train=TrainConfig(steps=60, batch=16, warmup=10))
    trained = train(setting.memory(), setting.make_task(), setting.train, setting.objective, told.append)
    assert not trained.training
    assert np.mean([p.cross_entropy for p in told[-10:]]) < told[0].cross_entropy - 0.02
    assert all(p.write_rate == 1.0 for p in told)


def test_both_engines_train_the_same_baseline():
    weights = []
    for engine in ("chunked", "bptt"):
        setting = cell(HEAVY_HITTERS, train=TrainConfig(steps=3, batch=4, engine=engine))
        trained = train(setting.memory(), setting.make_task(), setting.train, setting.objective)
        weights.append(trained.to_q.weight.detach())
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-5)
    assert not torch.equal(weights[0], build(setting.memory()).to_q.weight)


@pytest.mark.parametrize("variant", [GROWING, "no_memory"])
def test_freezing_a_gate_that_is_not_there_is_one_line(variant):
    setting = cell(variant, train=TrainConfig(steps=1, freeze_gate=True))
    with pytest.raises(UserError, match=f"freeze_gate: '{variant}' has no gate"):
        train(setting.memory(), setting.make_task(), setting.train, setting.objective)


def test_cells_can_be_planned_without_torch():
    code = (
        "import sys; from aura_ros.bench.recall.presets import preset_cells; "
        "print(len([c.memory() for c in preset_cells('kv')]) > 0, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


# Further lengths


def test_a_record_has_what_the_memory_scores_at_further_lengths():
    record = run_cell(cell(GROWING, lengths=(80, 200)))
    assert [at["steps"] for at in record["at_lengths"]] == [80, 200]
    assert [at["state_bytes"] for at in record["at_lengths"]] == [80 * 128, 200 * 128]
    assert [at["episodes"] for at in record["at_lengths"]] == [32, 16]
    assert all(0 < at["accuracy"] < 1 and at["write_rate"] == 1 for at in record["at_lengths"])
    assert json.loads(json.dumps(record))["config"]["lengths"] == [80, 200]


def test_further_lengths_have_the_cells_event_probability():
    setting = cell("fixed_size_state", task_event=0.45, lengths=(160,))
    episodes = evaluation_episodes(setting.make_task(160), 32)
    assert episodes.kinds.shape == (32, 160)
    assert float((episodes.kinds == 2).mean()) == pytest.approx(0.45, abs=0.03)
    module = build(setting.memory())
    found = evaluate_at(module, setting.make_task(160), 160)
    assert (found.state_bytes, found.write_rate) == (4 * (16 * 16 + 16), 1.0)
    assert found.accuracy == evaluate(module, setting.make_task(160), found.episodes).accuracy


def test_episodes_in_parts_are_the_same_episodes(monkeypatch):
    module, task = build(cell("aura").memory()).eval(), cell("aura").make_task()
    whole = evaluate(module, task, 10)
    monkeypatch.setattr(scores, "STEPS_AT_ONCE", 100)  # two at a time
    assert evaluate(module, task, 10).accuracy == whole.accuracy
    assert evaluate(module, task, 10).write_rate == whole.write_rate


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (0, 80)}, "lengths 0 is out of range; allowed: 1 to 1000000"),
        ({"lengths": (2_000_000,)}, "lengths 2000000 is out of range"),
        ({"lengths": (80, 40)}, r"lengths \[80, 40\] must be ascending, at most 16"),
        ({"lengths": (80, 80)}, "must be ascending"),
        ({"lengths": tuple(range(1, 18))}, "at most 16"),
        ({"lengths": (80.5,)}, "lengths has 80.5; allowed: whole numbers"),
        ({"lengths": ("80",)}, "lengths has '80'; allowed: whole numbers"),
        ({"lengths": (80,), "task": "hard_recall"}, "only sparse_recall takes other ones"),
        ({"state_dim": 2}, "budget 24 holds 1 rows of window_kv"),
    ],
)
def test_an_impossible_cell_is_one_line(changes, message):
    with pytest.raises(UserError, match=message) as refused:
        cell(WINDOW, **changes)
    assert "\n" not in str(refused.value)


def test_lengths_survive_json_and_tell_cells_apart():
    one, other = cell(lengths=(80, 160)), cell()
    assert Cell.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    assert one.key != other.key
    with pytest.raises(UserError, match="train it again"):
        Cell.from_dict({**one.to_dict(), "lengths": 5})


def test_shipped_cells_keep_their_names():
    lines = (ROOT / "results" / "cells.jsonl").read_text().splitlines()
    assert len(lines) >= 3
    for line in lines:
        record = json.loads(line)
        assert Cell.from_dict(record["config"]).key == record["key"]


# Long sequences


@pytest.mark.parametrize("kind", [GROWING, WINDOW, HEAVY_HITTERS])
def test_rows_of_attention_in_parts_equal_all_rows_at_once(kind, monkeypatch):
    module = build_baseline(BaselineConfig(kind=kind, dk=6, dv=5, budget=400, sinks=2)).double()
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 150, 6)) * 2)
    results = []
    for most in (2**24, 4000, 1):
        monkeypatch.setattr(baselines, "SCORES_AT_ONCE", most)
        module.zero_grad()
        reads = module.run_sequence(x).reads
        reads.square().sum().backward()
        results.append((reads.detach(), module.to_k.weight.grad.clone()))
    for reads, gradient in results[1:]:
        np.testing.assert_allclose(reads, results[0][0], rtol=0, atol=1e-13)
        np.testing.assert_allclose(gradient, results[0][1], rtol=1e-9, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["aura", "write_every_step", GATED_DELTA, GROWING])
def test_4096_steps_at_once_in_float32_are_those_step_by_step_in_float64(variant):
    """Decay over thousands of writes neither underflows nor drifts."""
    setting = cell(variant, task_event=0.2, train=TrainConfig(steps=30, batch=8, warmup=0))
    module = train(setting.memory(), setting.make_task(), setting.train, ObjectiveConfig())
    x = torch.from_numpy(evaluation_episodes(find_task("sparse_recall", 4096, 0.2), 1).observations)
    exact = build(setting.memory()).double().eval()
    exact.load_state_dict(module.state_dict())
    with torch.no_grad():
        done = run_memory(module, x)
        twin = run_memory(exact, x.double(), force=done.fired, engine="bptt")
    assert torch.equal(done.fired, twin.fired)
    assert float(twin.reads.abs().max()) > 0.05
    np.testing.assert_allclose(done.reads, twin.reads, rtol=0, atol=2e-5)


@pytest.mark.parametrize("variant", ["aura", "full_recurrence", GATED_DELTA])
def test_anything_runs_through_one_function(variant):
    module = build(cell(variant).memory()).eval()
    x = torch.from_numpy(evaluation_episodes(find_task("sparse_recall"), 2).observations)
    done = run_memory(module, x)
    assert done.reads.shape == (2, 40, 16)
    assert done.fired.shape == done.gate.shape == done.soft.shape == (2, 40)
    if variant == "aura":
        assert torch.equal(done.fired, run_sequence(module, x).fired)
        stepwise = run_memory(module, x, engine="bptt")
        assert torch.equal(stepwise.reads, run_stepwise(module, x).reads)


def test_carried_bytes_are_counted_from_the_state():
    assert state_bytes(build(cell("aura", state_dim=32).memory()), 5000) == 4224
    assert state_bytes(build(cell(GROWING, state_dim=32).memory()), 5000) == 1_280_000


# The file


@pytest.fixture
def path(tmp_path):
    save_baseline(build_baseline(BaselineConfig(dk=8, dv=8)), tmp_path / "kept.safetensors")
    return tmp_path / "kept.safetensors"


def metadata_of(path) -> dict[str, str]:
    with safe_open(path, framework="numpy") as file:
        return dict(file.metadata())


def rewrite(path, arrays, config=None, form="aura_baseline/1") -> None:
    config = metadata_of(path)["config"] if config is None else config
    save_file(arrays, path, {"format": form, "config": config, "sha256": content_hash(config, arrays)})


def refusal_of(path) -> str:
    with pytest.raises(UserError) as refused:
        load_baseline(path)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_baseline_comes_back_bit_for_bit(kind, tmp_path):
    module = build_baseline(BaselineConfig(kind=kind, dk=8, dv=8, seed=3))
    stated = save_baseline(module, tmp_path / "one")
    again = load_baseline(tmp_path / "one")
    assert again.config == module.config
    assert not again.training
    assert list(again.state_dict()) == list(module.state_dict())
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert all(parameter.requires_grad for parameter in again.parameters())
    assert save_baseline(module.double(), tmp_path / "two") == stated
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]


def test_a_failed_write_leaves_the_old_file(path, monkeypatch):
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("aura_ros.memory.checkpoint.os.fsync", full)
    with pytest.raises(UserError, match="No space left"):
        save_baseline(build_baseline(BaselineConfig()), path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_what_diverged_is_not_written(tmp_path):
    module = build_baseline(BaselineConfig())
    module.to_q.weight.data[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"to_q\.weight holds NaN"):
        save_baseline(module, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_damaged_and_other_files_are_named(path, tmp_path):
    whole = path.read_bytes()
    assert "is not a file" in refusal_of(tmp_path / "none")
    for size in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert "truncated or no safetensors" in refusal_of(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "git lfs pull" in refusal_of(path)
    flipped = bytearray(whole)
    flipped[-3] ^= 1
    path.write_bytes(bytes(flipped))
    assert "altered or damaged" in refusal_of(path)
    build_untrained(MemoryConfig(input_dim=6, out_dim=4), path)
    assert "has format 'aura_memory/1'; expected 'aura_baseline/1'" in refusal_of(path)
    save_file({"a": np.zeros(2, np.float32)}, path)
    assert "has format None" in refusal_of(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("to_v.weight"), r"lacks to_v.weight \(1 missing\)"),
        (lambda a: a.update(other=np.zeros(1, np.float32)), r"has unknown other"),
        (lambda a: a.update({"to_q.weight": np.zeros((8, 63), np.float32)}), r"is float32 \[8, 63\]; expected .* \[8, 64\]"),
        (lambda a: a.update({"to_q.weight": np.full((8, 64), np.inf, np.float32)}), "to_q.weight holds NaN or infinity"),
        (lambda a: a.update({"to_q.weight": np.zeros((8, 64))}), "to_q.weight is F64; expected F32"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(path, change, message):
    arrays = load_file(path)
    change(arrays)
    rewrite(path, arrays)
    with pytest.raises(UserError, match=message):
        load_baseline(path)
    refusal_of(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "lstm"}, "kind 'lstm' is not known; choose one of: growing_kv"),
        ({"kind": 3}, "kind is 3; allowed: str"),
        ({"dk": "8"}, "dk is '8'; allowed: int"),
        ({"dk": True}, "dk is True; allowed: int"),
        ({"dk": 10**9}, "dk 1000000000 is out of range"),
        (
            {"input_dim": 60_000, "hidden": 4096},
            r"encoder.0.weight is float32 \[64, 6\]; expected float32 \[4096, 60000\]",
        ),
        ({"colour": 1}, r"unknown fields \['colour'\]"),
    ],
)
def test_a_configuration_that_cannot_be_is_named(path, changes, message):
    config = {**json.loads(metadata_of(path)["config"]), **changes}
    rewrite(path, load_file(path), json.dumps(config))
    with pytest.raises(UserError, match=message):
        load_baseline(path)
    refusal_of(path)


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_configuration_that_is_no_object_is_named(path, text):
    rewrite(path, load_file(path), text)
    assert "JSON" in refusal_of(path)


# The preset


def test_kv_has_the_papers_table_and_lengths():
    cells = preset_cells("kv")
    assert {c.task_event for c in cells} == {0.2}
    assert {c.state_dim for c in cells} == {32}
    at = Counter((c.variant, c.task_steps) for c in cells)
    for variant in ("aura", GROWING):
        assert at[variant, 128] == 7
        assert [at[variant, steps] for steps in (256, 512, 1024)] == [3, 3, 3]
    others = {WINDOW, HEAVY_HITTERS, GATED_DELTA, "fixed_size_state", "write_every_step"}
    assert {c.variant for c in cells} == others | {"aura", GROWING}
    assert all(at[variant, 128] == 3 for variant in others)
    for c in cells:
        assert c.lengths == ((256, 512, 768, 1024, 4096, 16384) if c.task_steps == 128 else ())
