"""The closed-loop panel: what it plans and refuses, how it counts, and one real moment played by several arms."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
from real_libero import needs_libero

from aura_ros.bench.arms import ARMS, CachedBaseline, ForcedMemory, follow
from aura_ros.bench.panel import PanelJob
from aura_ros.bench.panel_lines import PanelLines
from aura_ros.bench.panel_table import cue_fired, paired, rows, verdicts
from aura_ros.errors import UserError
from aura_ros.eval_command import FIRST_SEED
from aura_ros.memory import MemoryConfig, NumpyMemory, build_untrained
from aura_ros.memory.baseline_config import BaselineConfig
from aura_ros.memory.baselines import build_baseline
from aura_ros.panel_command import DEFAULT_ARMS, Panel, plan


@pytest.fixture
def panel(aura):
    """Run `aura panel ...` in an empty folder; returns (exit status, stdout, stderr)."""
    return functools.partial(aura, "panel")


def line(arm, success, state=0, cue=0, wrong=False, **changes):
    return {
        "key": f"{arm}-{state}-{cue}",
        "task": "cue_place_0",
        "delay": 80,
        "arm": arm,
        "init_state": 40 + state,
        "seed": 0,
        "displaced": True,
        "cue": cue,
        "success": success,
        "wrong": wrong,
        "steps": 200,
        "held": 120,
        "cue_steps": [16, 36],
        "queries": 25,
        "queries_active": 15,
        "writes": {"kv": 25, "aura": 2}.get(arm, 0),
        "writes_active": {"kv": 15, "aura": 2}.get(arm, 0),
        "state_bytes_first": 4224,
        "state_bytes_last": 4224,
        "fired_steps": [24, 80] if arm == "aura" else [],
        "ms_per_query": 30.0,
        "problem": "",
        "identity": "x",
        **changes,
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--arms", "aura,lstm"], "arms: 'lstm' is unknown; choose from base, oracle, aura"),
        (["--arms", "aura,aura"], "arms 'aura,aura' is not allowed; name each once"),
        (["--arms", "first-k"], "arm 'first-k' writes as often as aura does"),
        (["--suites", "cue_colour"], "suites: 'cue_colour' is unknown"),
        (["--delays", "10"], "delays '10' is not allowed; give whole numbers from 20 to 2000"),
        (["--delays", "long"], "delays 'long' is not allowed"),
        (["--delays", "80,80"], "delays '80,80' is not allowed; name each once"),
        (
            ["--backbone", "openvla_oft"],
            "backbone 'openvla_oft' has no checkpoint of its own; give --checkpoint DIR",
        ),
        (
            ["--arms", "base", "--suites", "libero_object", "--split", "official"],
            "libero_object has 40 different held-out episodes of these tasks",
        ),
        (["--episodes", "0"], "episodes 0 is not allowed"),
        (["--engine", "slurm"], "engine 'slurm' is unknown; choose one of processes, ray"),
        (["--split", "both"], "split 'both' is unknown; choose one of auto, official, displaced"),
        (["--arms", "base", "--tasks", "7"], "tasks '7' is not allowed"),
        (["--memories", "nowhere"], "arm 'kv' needs '"),
        (["--checkpoint", "none.safetensors"], "none.safetensors"),
    ],
)
def test_mistakes_are_one_line_and_make_nothing(panel, given, said, tmp_path):
    status, _, error = panel(*given)
    assert (status, error.count("\n")) == (2, 1)
    assert said in error
    assert list(tmp_path.iterdir()) == []


def test_the_shipped_memories_are_of_no_other_backbone(panel, tmp_path):
    status, _, error = panel("--backbone", "openvla_oft", "--checkpoint", tmp_path)
    assert (status, error.count("\n")) == (2, 1)
    assert "memories is not given: the shipped ones are not of backbone 'openvla_oft'" in error


def test_the_arms_without_a_file_need_none_and_states_are_those_held_out():
    jobs = plan(Panel(arms="base,oracle", episodes=60, delays="20,800"))
    keys = {job.line_key(cue, arm) for job in jobs for cue in job.cues for arm in job.arms}
    # Three suites, two delays, two arms.
    assert len(keys) == 3 * 2 * 2 * 60
    assert {job.init_state for job in jobs} <= set(range(40, 50))
    assert min(job.seed for job in jobs) >= FIRST_SEED
    moments = {(j.suite, j.task, j.init_state, j.seed, j.delay) for j in jobs}
    assert len(moments) == len(jobs)
    standard = plan(Panel(arms="base", episodes=60, suites="libero_object"))
    assert {(job.delay, len(job.cues)) for job in standard} == {(0, 1)}
    assert len(standard) == 60


def test_differences_are_of_the_same_moments_and_states_are_drawn_whole():
    ours = [line("aura", True, state, cue) for state in range(10) for cue in (0, 1)]
    base = [line("base", cue == 0, state, cue) for state in range(10) for cue in (0, 1)]
    found = paired(ours, base)
    # Every state has one of each: with whole states drawn there is nothing to vary.
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)
    assert (found.pairs, found.clusters) == (20, 10)
    mixed = paired(ours, [line("base", state < 5, state, cue) for state in range(10) for cue in (0, 1)])
    assert mixed.low < 0.25 < 0.75 < mixed.high
    assert paired(ours, []) is None


def test_the_bootstrap_equals_its_definition():
    rng = np.random.default_rng(5)
    ours = [line("aura", bool(rng.random() < 0.8), s, c) for s in range(15) for c in (0, 1)]
    base = [line("base", bool(rng.random() < 0.5), s, c) for s in range(15) for c in (0, 1)]
    gaps = np.array(
        [int(a["success"]) - int(b["success"]) for a, b in zip(ours, base, strict=True)], float
    ).reshape(15, 2)
    draws = np.random.default_rng(0).integers(0, 15, (10_000, 15))
    means = [gaps[draw].mean() for draw in draws]
    low, high = np.quantile(means, (0.025, 0.975))
    found = paired(ours, base)
    np.testing.assert_allclose([found.mean, found.low, found.high], [gaps.mean(), low, high])


def test_failures_are_split_and_writes_compared_by_rate():
    lines = [line(arm, True, s, c) for arm in ("aura", "kv") for s in range(3) for c in (0, 1)]
    lines += [line("base", c == 0, s, c, wrong=c == 1 and s < 2) for s in range(3) for c in (0, 1)]
    lines += [line("base", False, 3, 0, problem="action chunk rejected"), line("base", True, 3, 1)]
    table = {(row[0], row[2]): row for row in rows(lines)}
    aura, base = table["cue_place", "aura"], table["cue_place", "base"]
    assert aura[3] == "6/6 = 100 %"
    assert aura[9] == "2.0 of 25.0"
    assert (aura[11], aura[12]) == ("12.5x", "7.5x")
    assert aura[13] == "100 %"
    assert base[5:8] == ("2", "1", "1")
    assert ("all cue tasks", "aura") in table
    assert any(said.startswith("cue tasks, delay 80, aura less base: +50") for said in verdicts(lines))


def test_a_write_counts_for_the_cue_only_while_it_is_lit():
    assert cue_fired(line("aura", True))
    assert not cue_fired(line("aura", True, fired_steps=[8, 36, 80]))


def test_swapped_memories_are_judged_by_the_other_target():
    lines = [line("swap", False, s, c, wrong=s < 4) for s in range(5) for c in (0, 1)]
    (said,) = [text for text in verdicts(lines) if "W of the other cue" in text]
    assert "in 8 of 10 = 80 % (8 of the 8 that reached one)" in said


def job(**changes):
    return PanelJob(
        **{
            "suite": "cue_place",
            "task": 0,
            "init_state": 40,
            "seed": FIRST_SEED,
            "delay": 20,
            "displaced": True,
            "arms": ("base", "aura", "first-k"),
            "memories": "m",
            "checkpoint": "",
            "identities": tuple((arm, "one") for arm in ("base", "aura", "first-k")),
            **changes,
        }
    )


def test_what_is_missing_is_played_and_nothing_else(tmp_path):
    lines = PanelLines(tmp_path / "panel.jsonl")
    whole = job()

    def result(arms, cues=(0, 1)):
        found = [{"key": whole.line_key(cue, arm), "identity": "one"} for arm in arms for cue in cues]
        return {"key": whole.key, "episodes": found, "problem": ""}

    lines.append(result(("base", "aura")))
    # first-k needs aura's count again.
    assert PanelLines(tmp_path / "panel.jsonl").missing(whole).arms == ("first-k", "aura")
    lines.append(result(("first-k",)))
    again = PanelLines(tmp_path / "panel.jsonl")
    assert again.missing(whole) is None
    assert len(again.of([whole])) == 6
    with pytest.raises(UserError, match=r"panel.jsonl' has .* of another backbone or memory"):
        again.missing(job(identities=(("base", "one"), ("aura", "two"))))


def test_a_cache_stepped_query_by_query_equals_its_definition():
    import torch

    for kind in ("growing_kv", "window_kv"):
        config = BaselineConfig(
            input_dim=12, out_dim=5, kind=kind, dk=4, dv=4, budget=160, sinks=0, input_kind="projection"
        )
        module = build_baseline(config).eval()
        memory = CachedBaseline(module)
        hidden = np.random.default_rng(0).standard_normal((9, 12)).astype(np.float32)
        outputs, sizes = [], []
        for row in hidden:
            outputs.append(memory.step(row).output)
            sizes.append(memory.state_bytes)
        with torch.no_grad():
            done = module.run_sequence(torch.from_numpy(hidden)[None])
            wanted, _, _ = module.head(done.reads, done.encoded)
        np.testing.assert_allclose(np.stack(outputs), wanted[0].numpy(), atol=1e-5)
        assert sizes == [module.state_bytes(step) for step in range(1, 10)]
        memory.reset()
        np.testing.assert_allclose(memory.step(hidden[0]).output, outputs[0], atol=1e-6)


def test_first_k_writes_at_the_first_k_steps_and_never_after():
    config = MemoryConfig(input_dim=12, out_dim=5, input_kind="projection")
    memory = NumpyMemory.from_checkpoint(build_untrained(config))
    hidden = np.random.default_rng(0).standard_normal((9, 12)).astype(np.float32)
    done = follow(ForcedMemory(memory, lambda step: step < 3), hidden)
    assert done.fired == [True] * 3 + [False] * 6
    assert (done.writes, done.bytes_first, done.bytes_last) == (3, 4224, 4224)
    assert follow(ForcedMemory(memory, lambda step: step < 3), hidden).fired == done.fired


def test_every_arm_that_is_run_by_default_is_known():
    assert set(DEFAULT_ARMS.split(",")) <= set(ARMS)


@pytest.mark.slow
@needs_libero
def test_a_base_that_is_not_what_was_published_ends_the_panel_before_any_claim(panel, tmp_path):
    from aura_ros.backbones.registry import shipped_checkpoint

    # The compact policy knows four of the suite's ten tasks.
    call = [
        "--backbone",
        "openvla_oft",
        "--checkpoint",
        shipped_checkpoint(),
        "--arms",
        "base",
        "--episodes",
        2,
    ]
    call += ["--verify-suite", "libero_object", "--verify-states", 2]
    status, out, error = panel(*call, "--out", "p.jsonl")
    assert status == 2
    assert "published 98.4 %: this is not the published policy" in error.splitlines()[-1]
    assert not out
    assert not (tmp_path / "p.jsonl").exists()
    # Its episodes are kept for the next try.
    assert len((tmp_path / "p.base.jsonl").read_text().splitlines()) == 20


@pytest.mark.slow
@needs_libero
def test_a_moment_is_played_by_every_arm_and_again_to_the_same_end(panel, tmp_path):
    call = [
        "--arms",
        "base,aura,first-k",
        "--suites",
        "cue_place",
        "--episodes",
        2,
        "--delays",
        20,
        "--jobs",
        1,
    ]
    status, out, error = panel(*call, "--out", "one.jsonl")
    assert status == 0, error
    lines = [json.loads(text) for text in (tmp_path / "one.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    by = {(found["arm"], found["cue"]): found for found in lines}
    for cue in (0, 1):
        aura, first = by["aura", cue], by["first-k", cue]
        assert aura["state_bytes_first"] == aura["state_bytes_last"] == 4224
        assert aura["writes"] == len(aura["fired_steps"]) == first["writes"] > 0
        assert aura["problem"] == ""
        assert first["fired_steps"] == [8 * query for query in range(first["writes"])]
        assert by["base", cue]["writes"] == 0
        assert aura["cue_steps"][1] + 20 == aura["held"] == by["base", cue]["held"]
    assert "cue_place" in out
    assert panel(*call, "--out", "two.jsonl")[0] == 0
    again = [json.loads(text) for text in (tmp_path / "two.jsonl").read_text().splitlines()]
    for one, other in zip(lines, again, strict=True):
        one.pop("ms_per_query"), other.pop("ms_per_query")
        assert one == other
    # Nothing is left to do.
    before = (tmp_path / "one.jsonl").read_bytes()
    assert panel(*call, "--out", "one.jsonl")[0] == 0
    assert (tmp_path / "one.jsonl").read_bytes() == before
