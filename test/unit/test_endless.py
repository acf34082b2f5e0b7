"""`aura endless`: the caches compute attention, the numbers are those of the arrays, and an interrupt keeps them."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aura_ros.bench import endless, endless_process
from aura_ros.bench.endless import EndlessConfig, checkpoint_of, measure, random_checkpoint
from aura_ros.bench.endless_caches import AGE_SLOPE, SINKS, GrowingCache, WindowCache
from aura_ros.bench.endless_numbers import Latencies, Latency, Span, crossover, edge_of, part_of, slope_of
from aura_ros.bench.endless_process import measure_apart
from aura_ros.endless_command import Endless, check_figure, draw, run_endless, table
from aura_ros.errors import UserError
from aura_ros.memory import MemoryConfig, NumpyMemory, save_checkpoint

ROOT = Path(__file__).resolve().parents[2]
SMALL = EndlessConfig(steps=1200, kv_limit=65_536)


@pytest.fixture(scope="module")
def numbers():
    return measure(SMALL)


def attention(checkpoint, inputs, kept):
    """Naive float64 outputs of attention over the steps kept(t), with ages given by it: {step: age}."""
    torch = pytest.importorskip("torch")
    from aura_ros.memory.module import MemoryModule

    module = MemoryModule(checkpoint.config)
    module.load_state_dict({name: torch.from_numpy(array) for name, array in checkpoint.arrays.items()})
    module = module.double().eval()
    outputs = []
    with torch.no_grad():
        z = module.encoder(torch.from_numpy(inputs).double())
        q, k, v = module.to_q(z), module.to_k(z), module.to_v(z)
        for t in range(len(inputs)):
            ages = kept(t)
            steps = sorted(ages)
            old = torch.tensor([float(ages[s]) for s in steps], dtype=torch.float64)
            scores = k[steps] @ q[t] / math.sqrt(32) - AGE_SLOPE * torch.log1p(old)
            outputs.append(module.head(torch.softmax(scores, 0) @ v[steps])[0])
    return torch.stack(outputs).numpy()


def stream(count: int) -> np.ndarray:
    return np.random.default_rng(2).standard_normal((count, 6)).astype(np.float32) * 10


def test_growing_cache_is_attention_over_all_steps_however_often_it_grew():
    checkpoint, inputs = random_checkpoint(0), stream(150)
    cache, outputs, grew = GrowingCache(checkpoint, 2**20), [], 0
    for x in inputs:
        grew += cache.grows
        cache.append(x)
        outputs.append(cache.read().copy())
    assert grew == 2
    naive = attention(checkpoint, inputs, lambda t: {s: t - s for s in range(t + 1)})
    np.testing.assert_allclose(np.array(outputs), naive, rtol=0, atol=2e-5)
    # The tolerance tells a wrong age from a right one.
    ageless = attention(checkpoint, inputs, lambda t: dict.fromkeys(range(t + 1), 0))
    assert np.abs(ageless - naive).max() > 2e-3


@pytest.mark.parametrize("rows", [2, 3, 16])
def test_window_cache_is_attention_over_its_rows_with_ages_within_the_cache(rows):
    checkpoint, inputs = random_checkpoint(0), stream(70)
    sinks = min(SINKS, rows // 2)

    def kept(t: int) -> dict[int, int]:
        held = list(range(t + 1)) if t < rows else [*range(sinks), *range(t - rows + sinks + 1, t + 1)]
        return {step: len(held) - 1 - place for place, step in enumerate(held)}

    cache = WindowCache(checkpoint, rows)
    outputs = np.array([cache.step(x).copy() for x in inputs])
    np.testing.assert_allclose(outputs, attention(checkpoint, inputs, kept), rtol=0, atol=2e-5)
    assert cache.state_bytes == rows * 256


def test_bytes_are_counted_from_the_arrays():
    cache = GrowingCache(random_checkpoint(0), 100 * 256)
    for count, x in enumerate(stream(100), start=1):
        assert not cache.full
        cache.append(x)
        assert cache.state_bytes == 256 * count <= cache.allocated_bytes
    assert cache.full
    assert cache.allocated_bytes == 100 * 256


@given(st.integers(1, 10**9))
def test_every_step_is_between_the_edges_of_its_part(step):
    part = part_of(step)
    assert edge_of(part) < step <= edge_of(part + 1)


def test_decades_end_with_their_power_of_ten():
    assert [part_of(step) for step in (10, 11, 100, 101, 100_000)] == [9, 10, 19, 20, 49]


def test_quantiles_are_exact_to_a_bin():
    counted = Latencies(2)
    for nanoseconds in range(1000, 101_000, 10):
        counted.add(1, nanoseconds)
    found = counted.of(0, 2)
    assert found.count == 10_000
    assert found.p50_us == pytest.approx(51.0, rel=0.006)
    assert found.p99_us == pytest.approx(100.0, rel=0.006)
    assert counted.of(0, 1) is None


def test_latency_out_of_range_is_counted_at_the_end():
    counted = Latencies(1)
    for nanoseconds in (0, 10**12):
        counted.add(0, nanoseconds)
    assert counted.of(0, 1).count == 2


def test_slope_of_a_leak_is_found_and_a_jump_among_noise_is_none():
    steps = np.arange(200.0) * 500
    rng = np.random.default_rng(0)
    flat = slope_of(steps, np.full(200, 5e7))
    assert (flat.per_step, flat.is_zero) == (0.0, True)
    noise = slope_of(steps, 5e7 + 4096 * rng.integers(0, 4, 200))
    assert noise.is_zero
    leak = slope_of(steps, 5e7 + 0.5 * steps + 4096 * rng.integers(0, 2, 200))
    assert leak.per_step == pytest.approx(0.5, abs=0.05)
    assert not leak.is_zero
    assert leak.growth > 0
    assert slope_of(steps[:7], steps[:7]) is None


def test_error_of_the_slope_allows_for_samples_that_hang_together():
    rng = np.random.default_rng(1)
    walk = 4096 * np.cumsum(rng.standard_normal(400))
    steps = np.arange(400.0)
    x = steps - steps.mean()
    rest = walk - walk.mean() - slope_of(steps, walk).per_step * x
    independent = math.sqrt(float(rest @ rest) / 398 / float(x @ x))
    assert slope_of(steps, walk).error > 2 * independent


def spans(*pairs: tuple[float, float], count: int = 50) -> list[Span]:
    """Of growing medians and memory medians, a tenth of a decade each from step 10 on."""
    return [
        Span(edge_of(p) + 1, edge_of(p + 1), Latency(memory, 0, count), None, Latency(growing, 0, count), *[0] * 6, None)
        for p, (growing, memory) in enumerate(pairs, start=10)
    ]  # fmt: skip


def test_crossover_is_where_the_cache_stays_slower_and_not_a_glitch_before():
    found = crossover(spans((5, 10), (30, 10), (8, 10), (10, 10), (12, 10), (90, 10)))
    assert edge_of(13) < found < edge_of(15)
    assert crossover(spans((5, 10), (8, 10))) is None
    assert crossover(spans((20, 10), (30, 10))) == pytest.approx(math.sqrt(11 * 13))
    assert crossover(spans((20, 10), count=2)) is None


def test_run_gives_the_papers_bytes_and_stops_the_cache_at_its_limit(numbers):
    assert numbers.steps == 1200
    assert numbers.byte_crossover == 17
    assert (numbers.window_rows, numbers.growing_row_bytes) == (16, 256)
    assert [(s.first, s.last) for s in numbers.decades] == [(11, 100), (101, 1000), (1001, 1200)]
    assert {s.memory_bytes for s in numbers.decades} == {4224}
    assert {s.window_bytes for s in numbers.decades} == {4096}
    assert [s.growing_bytes for s in numbers.decades] == [25_600, 65_536, 65_536]
    assert numbers.growing_stopped == 256
    assert numbers.decades[2].growing is None
    assert not numbers.interrupted


def test_run_times_each_contender_and_asks_for_rss(numbers):
    first, second, last = numbers.decades
    assert (first.memory.count, first.window.count, first.growing.count) == (90, 90, 90)
    assert second.growing.count == 156
    assert last.memory.count == 200
    for span in (first, second, last):
        assert 0 < span.memory.p50_us <= span.memory.p99_us
        assert span.rss_alone > 10**6
        assert span.rss > 10**6
    assert numbers.alone.count == 1200


def test_random_weights_write_at_events_and_answer_nothing(numbers):
    assert all(0.02 < span.write_rate < 0.25 for span in numbers.decades)
    assert all(span.accuracy is None for span in numbers.decades)


def test_counts_are_the_same_in_every_run(numbers):
    again = measure(SMALL)
    assert [s.write_rate for s in again.decades] == [s.write_rate for s in numbers.decades]
    assert again.weights == numbers.weights


def test_large_cache_is_read_now_and_then_and_the_step_after_it_not_timed(monkeypatch):
    monkeypatch.setattr(endless, "EVERY_READ_STEPS", 100)
    span = measure(EndlessConfig(steps=1000)).decades[1]
    reads = sum(step % max(1, step // 100) == 0 for step in range(101, 1001))
    sparse = sum(step % (step // 100) == 0 for step in range(200, 1000))
    assert span.growing.count == reads
    assert span.memory.count == 900 - sparse
    assert span.growing_bytes == 256_000


def test_checkpoint_decides_its_own_writes_and_is_judged(tmp_path):
    path = tmp_path / "memory.safetensors"
    held = random_checkpoint(3)
    save_checkpoint(path, held.config, held.arrays)
    found = measure(EndlessConfig(steps=1000, checkpoint=str(path)))
    # The gate of these weights is open (its first bias is random), or shut: no schedule of events.
    assert found.decades[0].accuracy is not None
    assert 0.0 <= found.decades[0].accuracy <= 1.0
    memory = NumpyMemory.load(path)
    _, inputs, _, _ = next(endless._Run(EndlessConfig(steps=1000, checkpoint=str(path))).blocks())
    writes = [memory.step(x).written_bytes > 0 for x in inputs[:100]]
    assert found.decades[0].write_rate == pytest.approx(np.mean(writes[10:]))


def test_memory_of_another_task_is_refused_in_one_line(tmp_path):
    torch = pytest.importorskip("torch")
    from aura_ros.memory import build_untrained

    path = tmp_path / "main.safetensors"
    with torch.random.fork_rng(devices=[]):
        build_untrained(MemoryConfig(input_dim=14, out_dim=4), path)
    with pytest.raises(UserError, match=r"main.safetensors' is 'aura' with input and output of \(14, 4\)"):
        checkpoint_of(EndlessConfig(checkpoint=str(path)))


@pytest.mark.parametrize(("stop_at", "spans_there"), [(1, 0), (2000, 2)])
def test_stopped_run_gives_what_there_is_and_collection_goes_on(stop_at, spans_there):
    asked = []

    def tick(done: int, total: int) -> bool:
        asked.append((done, total))
        return done >= stop_at

    found = measure(EndlessConfig(steps=1200, kv_limit=65_536), tick)
    assert found.interrupted
    assert len(found.decades) == spans_there
    assert found.steps == (0 if not spans_there else 1000)
    assert asked[-1][1] == 2400
    assert gc.isenabled()
    said = table(found)
    assert "memory alone" in said
    assert ("larger than the memory" in said) == bool(spans_there)


def test_interrupt_of_the_command_shows_and_writes_what_there_is(monkeypatch, tmp_path, capsys):
    found = measure(SMALL, lambda done, total: done >= 2000)
    monkeypatch.setattr("aura_ros.bench.endless_process.measure_apart", lambda config, report: found)
    path = tmp_path / "numbers.json"
    with pytest.raises(KeyboardInterrupt, match="1,000 of 1,200 steps"):
        run_endless(Endless(steps=1200, json=path))
    assert "101..1,000" in capsys.readouterr().out
    assert json.loads(path.read_text())["interrupted"] is True


def test_interrupt_stops_the_process_after_its_block_and_is_handled_as_before_afterwards():
    before, environment = signal.getsignal(signal.SIGINT), dict(os.environ)

    def report(done: int, total: int) -> None:
        if done == 500:
            # Twice at once, as `timeout` does it.
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    assert measure_apart(EndlessConfig(steps=10**8), report).interrupted
    assert signal.getsignal(signal.SIGINT) is before
    assert dict(os.environ) == environment


def test_second_interrupt_ends_at_once(monkeypatch):
    monkeypatch.setattr(endless_process, "PATIENCE_S", -1.0)

    def report(done: int, total: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt):
        measure_apart(EndlessConfig(steps=10**8), report)
    assert set(multiprocessing.active_children()) == before


def test_mistake_in_the_process_is_the_users(tmp_path):
    path = tmp_path / "no.safetensors"
    with pytest.raises(UserError, match="is not a file"):
        measure_apart(EndlessConfig(checkpoint=str(path)), lambda done, total: None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 10}, "steps 10 is out of range"),
        ({"window": 1}, "window 1 is not allowed"),
        ({"kv_limit": 5}, "kv_limit 5 is out of range"),
    ],
)
def test_impossible_run_is_one_line(values, message):
    with pytest.raises(UserError, match=message):
        EndlessConfig(**values)


@pytest.mark.parametrize("name", ["a.jpg", "missing/a.png"])
def test_figure_that_cannot_be_drawn_is_refused_before_the_run(name, tmp_path):
    with pytest.raises(UserError, match="figure "):
        check_figure(tmp_path / name)


def test_figure_without_matplotlib_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"aura_ros\[report\]"):
        check_figure(tmp_path / "a.png")


def test_figure_is_drawn(numbers, tmp_path):
    pytest.importorskip("matplotlib")
    draw(numbers, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_table_says_what_was_sampled_and_where_the_cache_stopped(numbers):
    said = table(numbers)
    assert "stopped at its limit, after step 256" in said
    assert "larger than the memory from step 17," in said
    assert "every (t / 1000)th" in said.replace("\n", " ")
    unknown = table(dataclasses.replace(numbers, time_crossover=None, slope=None))
    assert "- (not in this run)" in unknown
    assert "too few samples" in unknown


def test_command_runs_in_a_process_of_one_thread_without_torch(tmp_path):
    path = tmp_path / "numbers.json"
    run = subprocess.run(
        [sys.executable, "-m", "aura_ros", "endless", "--steps", "6000", "--json", str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(path.read_text())
    assert (found["steps"], found["byte_crossover"], found["config"]["steps"]) == (6000, 17, 6000)
    assert found["slope"]["samples"] >= 8
    # Torch alone would be twice that.
    assert found["decades"][-1]["rss_alone"] < 120e6
