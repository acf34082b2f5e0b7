"""`aura recall ...`: each command's numbers, files and JSON, and one line for each mistake; all in this process."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest

from aura_ros import cli, recall_command
from aura_ros.bench.recall import clock, scores, tasks
from aura_ros.bench.recall import single as single_module
from aura_ros.bench.recall.cells import Cell
from aura_ros.bench.recall.clock import Clock, duration
from aura_ros.bench.recall.single import make_cell
from aura_ros.bench.recall.store import LINES
from aura_ros.bench.recall.sweep import run_sweep
from aura_ros.errors import UserError
from aura_ros.memory.config import MemoryConfig
from aura_ros.memory.module import build_untrained
from aura_ros.training.settings import PAPER, TrainConfig


@pytest.fixture(scope="module", autouse=True)
def fewer_episodes():
    """What is tested is what is said, not how well a memory does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "EVALUATION_EPISODES", 64)
        patch.setattr(tasks.evaluation_episodes, "__defaults__", (64,))
        yield


@pytest.fixture
def aura(monkeypatch, capsys, tmp_path):
    """Run `aura recall ...` in an empty folder; returns (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["aura", "recall", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return (end.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swept")
    train = TrainConfig(steps=2, batch=2)
    run_sweep([Cell(seed=s, state_dim=8, train=train) for s in (0, 1)], folder, jobs=1)
    return folder


TINY = ("--steps", 2, "--batch", 2, "--budget", 8)


def test_train_writes_a_checkpoint_and_a_record_that_eval_agrees_with(aura, tmp_path):
    status, said, _ = aura("train", *TINY, "--out", "m.safetensors")
    assert status == 0
    assert said.startswith("m.safetensors: accuracy 0.")
    assert "writes" in said
    record = json.loads((tmp_path / "m.json").read_text())
    status, said, _ = aura("eval", "m.safetensors", "--json", "e.json")
    assert status == 0
    found = json.loads((tmp_path / "e.json").read_text())
    for name in ("accuracy", "write_rate", "event_rate", "floor_skip", "state_bytes"):
        assert found[name] == record[name]
    assert f"accuracy    {record['accuracy']:.4f}" in said
    assert "floors" in said
    assert "288 bytes" in said


def test_train_keeps_the_teacher_and_certify_takes_it(aura, tmp_path, monkeypatch):
    assert aura("train", *TINY, "--teacher", "--out", "m.safetensors")[0] == 0
    assert (tmp_path / "m.teacher.safetensors").read_bytes() != (tmp_path / "m.safetensors").read_bytes()
    few = ("--episodes", 32, "--resamples", 100)

    def certify(*arguments):
        monkeypatch.setattr("sys.argv", ["aura", "certify", *map(str, arguments), *map(str, few)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code or 0

    assert certify("m.safetensors", "--teacher", "m.teacher.safetensors", "--json", "c.json") == 0
    numbers = json.loads((tmp_path / "c.json").read_text())
    assert 0 < numbers["delta_tv"]["mean"]["value"] < 0.5
    assert numbers["teacher"]["source"] == "kept in training"
    assert numbers["teacher"]["checkpoint"] == "m.teacher.safetensors"
    # The memory itself as its teacher: delta would be 0.
    assert certify("m.safetensors", "--teacher", "m.safetensors") == 2
    # A teacher of another memory, or none.
    assert aura("train", "--steps", 2, "--batch", 2, "--budget", 4, "--out", "other.safetensors")[0] == 0
    assert certify("m.safetensors", "--teacher", "other.safetensors") == 2
    assert certify("m.safetensors", "--teacher", "none.safetensors") == 2


def test_train_never_overwrites_and_names_the_file(aura, tmp_path):
    for name in ("m.safetensors", "m.json"):
        (tmp_path / name).write_text("mine")
        status, said, mistake = aura("train", *TINY, "--out", "m.safetensors")
        assert (status, said, mistake.count("\n")) == (2, "", 1)
        assert f"out '{name}' exists" in mistake
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()


def test_train_without_out_makes_its_own_place(aura, tmp_path):
    status, said, _ = aura("train", *TINY, "--objective", "paper", "--engine", "bptt")
    assert status == 0
    (file,) = (tmp_path / "runs" / "recall").glob("*.safetensors")
    record = json.loads(file.with_suffix(".json").read_text())
    assert record["objective"] == "paper"
    assert record["config"]["train"]["engine"] == "bptt"
    assert file.name in said


def test_a_trained_cache_is_judged_by_the_same_command(aura):
    assert (
        aura("train", *TINY, "--variant", "growing_kv", "--task", "sparse_recall", "--out", "kv.safetensors")[
            0
        ]
        == 0
    )
    status, said, _ = aura("eval", "kv.safetensors", "--steps", 30)
    assert status == 0
    assert "growing_kv, N = 8, on sparse_recall, 30 steps" in said
    assert "1,920 bytes after 30 steps" in said


def test_a_memory_can_be_judged_at_another_length(aura, tmp_path):
    build_untrained(MemoryConfig(input_dim=6, out_dim=4, dk=8, dv=8), tmp_path / "m.safetensors")
    status, said, _ = aura("eval", "m.safetensors", "--steps", 100, "--event", 0.3, "--episodes", 5)
    assert status == 0
    assert "sparse_recall, 100 steps, events with probability 0.3, 5 episodes" in said


def test_long_episodes_are_fewer(aura, tmp_path, monkeypatch):
    monkeypatch.setattr(scores, "STEPS_AT_LENGTH", 2000)
    build_untrained(MemoryConfig(input_dim=6, out_dim=4, dk=8, dv=8), tmp_path / "m.safetensors")
    assert "16 episodes" in aura("eval", "m.safetensors", "--steps", 500)[1]


SPARSE, EVAL = ("train", "--task", "sparse_recall"), ("eval", "six.safetensors")
MISTAKES = {
    "train task": (["train", "--task", "chess"], "task 'chess' is unknown; choose one of: noisy_long_recall"),
    "train variant": (["train", "--variant", "auro"], "variant 'auro' is not known"),
    "train budget": (["train", "--budget", "0"], "state_dim 0"),
    "train seed": (["train", "--seed", "-1"], "seed -1"),
    "train recipe": (["train", "--recipe", "best"], "recipe 'best' is unknown; choose one of: aura, open"),
    "train objective": (["train", "--objective", "mine"], "objective 'mine' is unknown; choose one of: paper, aura"),
    "train steps": (["train", "--steps", "-1"], "steps -1"),
    "train batch": (["train", "--batch", "-1"], "batch -1"),
    "train engine": (["train", "--engine", "fast"], "engine 'fast' is not known; choose one of: chunked, bptt"),
    "train length of the main task": (["train", "--length", "50"], "only sparse_recall"),
    "train event": (["train", "--task", "sparse_recall", "--event", "2"], "event 2 is not allowed"),
    "train that asks nothing": ([*SPARSE, "--length", "1", "--steps", "2"], "asks nothing in 1 steps"),
    "train on events alone": ([*SPARSE, "--event", "1", "--steps", "2"], "event 1 is not allowed"),
    "train too much at once": ([*SPARSE, "--length", "1000000", "--batch", "65536"], "batch 65536 x length 1000000 is"),
    "train probe": (["train", "--probe", "2"], "probe 2.0 is out of range"),
    "train probe of the sparse task": ([*SPARSE, "--probe", "0.1"], "probe 0.1 is for noisy_long_recall and hard_recall"),
    "train probe recipe of the sparse task": ([*SPARSE, "--recipe", "probe"], "is for noisy_long_recall and hard_recall"),
    "train window too small": (["train", "--variant", "window_kv", "--budget", "2"], "budget 2 is not allowed: the bytes"),
    "train heavy hitters too small": (["train", "--variant", "heavy_hitter_kv", "--budget", "3"], "give N = 4 or more"),
    "train out without suffix": (["train", "--out", "m.pt"], "ends in .safetensors"),
    "train out in no folder": (["train", "--out", "/no/m.safetensors"], "out '/no/m.safetensors' cannot be written"),
    "train out where nothing can be": (["train", "--out", "/proc/m.safetensors"], "cannot be written"),
    "eval nothing": (["eval", "none.safetensors"], "'none.safetensors' is not a file"),
    "eval no memory": (["eval", "text.safetensors"], "'text.safetensors' cannot be read"),
    "eval another task": (["eval", "six.safetensors", "--task", "hard_recall"], "is 6 -> 4, which does not fit hard_recall"),
    "eval unknown task": (["eval", "six.safetensors", "--task", "chess"], "task 'chess' is unknown"),
    "eval steps": (["eval", "six.safetensors", "--steps", "-3"], "steps -3"),
    "eval event": (["eval", "six.safetensors", "--event", "1.5"], "event 1.5"),
    "eval event nan": (["eval", "six.safetensors", "--event", "nan"], "event nan"),
    "eval episodes": (["eval", "six.safetensors", "--episodes", "-1"], "episodes -1"),
    "eval that asks nothing": (["eval", "six.safetensors", "--steps", "1"], "asks nothing in 1 steps"),
    "eval that asks nothing by chance": ([*EVAL, "--steps", "2", "--episodes", "1", "--event", "0.9"], "ask nothing"),
    "eval too much at once": ([*EVAL, "--steps", "1000000", "--episodes", "1000000"], "episodes 1000000 x steps 1000000"),
    "eval length of another task": (["eval", "six.safetensors", "--task", "noisy_long_recall", "--steps", "5"], "only"),
    "eval of no task": (["eval", "odd.safetensors"], "is 5 -> 3, which does not fit any recall task"),
    "table without folder": (["table", "none"], "does not exist"),
    "table of nothing": (["table", "empty"], "'empty' has no cells"),
    "table corrupt": (["table", "corrupt"], "line 1"),
    "table section": (["table", "swept", "--only", "x"], "section 'x' is unknown"),
    "table section without cells": (["table", "swept", "--only", "kv"], "section 'kv' has no cells"),
    "table json": (["table", "swept", "--json", "/no/a.json"], "json '/no/a.json' cannot be written"),
    "figures without folder": (["figures", "none"], "does not exist"),
    "figures of nothing": (["figures", "empty"], "'empty' has no cells"),
    "figures number": (["figures", "swept", "--only", "9"], "figure 9 is unknown"),
    "figures words": (["figures", "swept", "--only", "four"], "only 'four'"),
    "figures out": (["figures", "swept", "--out", "text.safetensors/x"], "cannot be written"),
    "verify count": (["verify", "swept", "--count", "0"], "count 0"),
    "verify corrupt": (["verify", "corrupt"], "line 1"),
    "verify json": (["verify", "swept", "--json", "/no/a.json"], "json '/no/a.json'"),
    "floors json": (["floors", "--json", "/no/a.json"], "json '/no/a.json'"),
    "counts device": (["counts", "--device", "tpu"], "device 'tpu'"),
    "counts budget": (["counts", "--budget", "a"], "budget 'a'"),
    "counts batch": (["counts", "--batch", "0"], "batch 0"),
    "speed rounds": (["speed", "--rounds", "0"], "rounds 0"),
    "sweep preset": (["sweep", "--preset", "best"], "preset 'best' is unknown"),
    "sweep floors with seeds": (["sweep", "--preset", "floors", "--seeds", "1"], "seeds has no meaning"),
    "sweep floors out": (["sweep", "--preset", "floors", "--out", "text.safetensors"], "cannot be written"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_that_names_it_and_nothing_is_left(aura, case, tmp_path, swept):
    arguments, said = MISTAKES[case]
    (tmp_path / "text.safetensors").write_text("no memory")
    for name, widths in (("six", (6, 4)), ("odd", (5, 3))):
        config = MemoryConfig(input_dim=widths[0], out_dim=widths[1], dk=8, dv=8)
        build_untrained(config, tmp_path / f"{name}.safetensors")
    for name, text in (("empty", ""), ("corrupt", '{"format": 1}\n')):
        (tmp_path / name).mkdir()
        (tmp_path / name / LINES).write_text(text)
    (tmp_path / "swept").symlink_to(swept)
    before = sorted(tmp_path.rglob("*"))
    status, out, mistake = aura(*arguments)
    assert (status, out) == (2, "")
    (line,) = [line for line in mistake.splitlines() if not line.startswith("judging")]
    assert line.startswith("aura: ")
    assert said in line
    assert sorted(tmp_path.rglob("*")) == before


def test_table_prints_and_writes_the_same_rows(aura, swept, tmp_path):
    status, said, _ = aura("table", swept, "--json", "t.json")
    assert status == 0
    (row,) = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert f"{row['accuracy']['mean']:.4f}" in said
    assert (row["variant"], row["accuracy"]["n"]) == ("aura", 2)


def test_figures_prints_its_files(aura, swept, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    status, said, _ = aura("figures", swept, "--out", "f", "--only", "4")
    assert (status, said) == (0, "f/figure4_writes.png\n")


def test_verify_says_what_it_found_in_json_too(aura, swept, tmp_path):
    status, said, _ = aura("verify", swept, "--count", 1, "--json", "v.json")
    assert status == 0
    (check,) = json.loads((tmp_path / "v.json").read_text())
    assert check["equal"] is True
    assert check["key"] in said


def test_floors_and_the_preset_of_that_name_count_the_same(aura, tmp_path):
    assert aura("floors", "--json", "f.json")[0] == 0
    status, said, _ = aura("sweep", "--preset", "floors", "--out", "new/out")
    assert status == 0
    assert "hard_recall" in said
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("f.json", "new/out/floors.json"))
    assert one == two
    assert set(one) == {"noisy_long_recall", "hard_recall", "sparse_recall"}


def test_presets_names_the_cells_and_the_counting_one(aura, tmp_path):
    status, said, _ = aura("presets", "--json", "p.json")
    assert status == 0
    assert "floors" in said
    found = {preset["name"]: preset for preset in json.loads((tmp_path / "p.json").read_text())}
    assert found["paper-main"]["cells"] == 168 == len(found["paper-main"]["keys"])


def test_counts_and_speed_write_their_numbers(aura, tmp_path):
    assert aura("counts", "--budget", 8, "--batch", 1, "--json", "c.json")[0] == 0
    found = json.loads((tmp_path / "c.json").read_text())
    assert len(found["counts"]) == 8
    assert "torch.profiler" in found["peaks"]
    status, said, _ = aura("speed", "--rounds", 1, "--batch", 1, "--json", "s.json")
    assert status == 0
    assert [line["state_dim"] for line in json.loads((tmp_path / "s.json").read_text())] == [16, 32, 64]
    assert "chunked ms" in said


def test_a_sweep_says_how_long_it_still_takes_where_there_is_no_terminal(aura, monkeypatch):
    from aura_ros.bench.recall import sweep

    record = {"key": "k", "accuracy": 1.0, "write_rate": 0.1, "cpu_s": 60.0}

    def fake(cells, out, *, report, **_):
        for done in (1, 2):
            report(done, len(cells), record)
        return 2

    monkeypatch.setattr(sweep, "run_sweep", fake)
    _, _, progress = aura("sweep", "--seeds", "0", "--budget", "16", "--variants", "aura,no_memory")
    first, last = progress.splitlines()
    assert first.startswith("1/2 k: accuracy 1.0000, writes 10.00 %, 1.0 CPU-min, ")
    assert first.endswith(" left")
    assert not last.endswith(" left")


def test_time_left_is_of_what_was_done_here():
    now = [0.0]
    watch = Clock(lambda: now[0])
    now[0] = 10.0
    # Four were there before; the fifth took ten seconds, and so will the other five.
    assert watch.left(5, 10) == pytest.approx(50.0)
    now[0] = 30.0
    assert watch.left(6, 10) == pytest.approx(60.0)


@pytest.mark.parametrize(("seconds", "said"), [(40, "40 s"), (720, "12 min"), (12_600, "3.5 h")])
def test_durations_are_said_as_people_do(seconds, said):
    assert duration(seconds) == said


def test_long_training_says_a_line_now_and_then_and_not_at_every_step(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(clock.time, "monotonic", lambda: now[0])
    with clock.progress("training", 100) as shown:
        for step in range(1, 31):
            now[0] = step
            shown.step(step, "x")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"training: {n} of 100, x, {duration(100 - n)} left" for n in (10, 20, 30)]


def test_a_cell_by_options_is_the_presets_own():
    from aura_ros.bench.recall.presets import preset_cells

    compared = set()
    for name in ("paper-main", "paper-hard", "selectivity", "kv"):
        for wanted in preset_cells(name, seeds=[1]):
            what = (wanted.task, wanted.task_steps, wanted.variant, wanted.state_dim)
            if what in compared:  # a preset's first cell is its default; others go by their recipe's name
                continue
            compared.add(what)
            made = make_cell(
                task=wanted.task,
                variant=wanted.variant,
                state_dim=wanted.state_dim,
                seed=1,
                length=wanted.task_steps,
                event=wanted.task_event,
            )
            assert made == dataclasses.replace(wanted, lengths=())
    assert len(compared) == 3 * 8 + 8 + 3 * 2 + 1 + 7 + 3 * 2


@pytest.mark.parametrize(
    ("preset", "recipe"), [("default-value", "probe"), ("paper-hard", "probe"), ("paper-objective", "paper"), ("kv", "kv")]
)  # fmt: skip
def test_a_recipe_by_name_is_that_of_the_preset_with_this_label(preset, recipe):
    from aura_ros.bench.recall.presets import preset_cells

    for wanted in preset_cells(preset, seeds=[0]):
        if wanted.label != recipe:
            continue
        made = make_cell(
            task=wanted.task,
            variant=wanted.variant,
            state_dim=wanted.state_dim,
            seed=0,
            recipe=recipe,
            length=wanted.task_steps,
            event=wanted.task_event,
        )
        assert made == dataclasses.replace(wanted, lengths=())


def test_a_cell_that_no_preset_has_is_trained_as_its_neighbours():
    def label(**changes):
        return make_cell(
            **{"task": "noisy_long_recall", "variant": "aura", "state_dim": 48, "seed": 0, **changes}
        ).label

    assert label() == "aura"
    assert label(state_dim=12) == "open"
    assert label(task="hard_recall") == "hard"
    assert label(task="sparse_recall", variant="window_kv", length=512) == "kv"


def test_probes_can_be_asked_for_and_show_in_label_and_record(aura, tmp_path):
    made = make_cell(task="hard_recall", variant="aura", state_dim=32, seed=0, probe=0.25)
    assert (made.probe, made.label) == (0.25, "aura-probe0.25")
    # What the recipe does anyway renames nothing.
    assert (
        make_cell(
            task="noisy_long_recall", variant="aura", state_dim=32, seed=0, recipe="probe", probe=0.3
        ).label
        == "probe"
    )
    assert aura("train", *TINY, "--probe", 0.3, "--out", "m.safetensors")[0] == 0
    assert json.loads((tmp_path / "m.json").read_text())["config"]["probe"] == 0.3


@pytest.mark.parametrize(
    "error",
    [MemoryError("Unable to allocate 1. TiB"), MemoryError(), RuntimeError("[enforce]\nDefaultCPU: can't allocate memory")],
)  # fmt: skip
def test_too_little_memory_is_one_line(aura, monkeypatch, error):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(single_module, "judge_checkpoint", refuse)
    status, _, said = aura("eval", "m.safetensors")
    assert (status, said.count("\n")) == (1, 1)
    assert said.startswith("aura: too little memory (")


def test_another_runtime_error_is_not_taken_for_too_little_memory(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr(single_module, "judge_checkpoint", fail)
    monkeypatch.setattr(sys, "argv", ["aura", "recall", "eval", "m.safetensors"])
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main()


def test_a_rule_that_a_memory_can_beat_is_not_called_a_bound(aura):
    for said in (aura("presets")[1], tasks.Floors.__doc__, recall_command.COMMANDS["floors"].__doc__):
        assert "no memory" not in said


def test_an_objective_can_be_changed_and_shows_in_the_label():
    made = make_cell(task="noisy_long_recall", variant="aura", state_dim=32, seed=0, objective="paper")
    assert made.objective == PAPER
    assert made.label == "aura-paper"
    assert (
        make_cell(task="noisy_long_recall", variant="aura", state_dim=32, seed=0, recipe="paper").label
        == "paper"
    )


def test_every_command_that_prints_numbers_takes_json():
    without = {name for name, kind in recall_command.COMMANDS.items() if "json" not in kind.__annotations__}
    assert without == {"sweep", "train", "figures"}


def test_a_bad_file_is_read_by_who_can_say_why(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"\x00" * 4)
    with pytest.raises(UserError, match="memory checkpoint"):
        single_module.load_any(tmp_path / "x.safetensors")
