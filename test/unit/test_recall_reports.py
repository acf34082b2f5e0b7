"""Tables and figures of recall cells: where we differ is said from intervals, every seed counts, pictures go by number."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import pytest

from aura_ros.bench.recall import paper
from aura_ros.bench.recall.cells import Cell
from aura_ros.bench.recall.figures import FIGURES, draw
from aura_ros.bench.recall.presets import preset_cells
from aura_ros.bench.recall.reports import sections
from aura_ros.bench.recall.sections import ib_pairs
from aura_ros.bench.recall.statistics import compare, interval, judge
from aura_ros.bench.recall.store import LINES
from aura_ros.bench.recall.table import differs, plain, read_cells, row_numbers, rows
from aura_ros.errors import UserError
from aura_ros.memory.config import MemoryConfig
from aura_ros.memory.module import build_untrained


def record(cell: Cell, accuracy=1.0, write_rate=0.1, **changes):
    """A cell's line as a sweep writes it, with these scores."""
    scores = dict.fromkeys(("event_rate", "distractor_rate", "filler_rate", "query_rate"), 0.0)
    return {
        **{"format": 1, "key": cell.key, "task": cell.task, "variant": cell.variant, "label": cell.label},
        **{"state_dim": cell.state_dim, "seed": cell.seed, "steps": cell.train.steps},
        **{
            "accuracy": accuracy,
            "write_rate": write_rate,
            "floor_skip": 9.8,
            "floor_default": 12.4,
            **scores,
        },
        **{"soft_event": 0.8, "soft_distractor": 0.1, "state_bytes": 4224, "params": 1},
        **{"checkpoint": None, "config": cell.to_dict(), **changes},
    }


def of_preset(name, *, seeds=(0, 1, 2), budgets=None, variants=None, score=lambda cell: {}):
    found = preset_cells(name, seeds=seeds, budgets=budgets, variants=variants)
    return [record(cell, **score(cell)) for cell in found]


def aura(accuracies, writes=0.1):
    cells = [Cell(seed=seed) for seed in range(len(accuracies))]
    return rows([record(cell, a, writes) for cell, a in zip(cells, accuracies, strict=True)])[0]


def test_no_verdict_is_drawn_from_one_seed():
    assert differs(aura([1.0])) == "not comparable (n=1)"
    (row,) = rows([record(Cell(task="sparse_recall", seed=s)) for s in range(3)])
    assert differs(row) == "not comparable (the paper's n=1)"


def test_where_we_differ_is_said_from_both_intervals():
    # The paper's 0.955 ± 0.125 of five seeds holds 1.000, and 4.98x has no interval of its own.
    said = differs(aura([1.0, 0.9999, 1.0, 1.0], writes=0.1))
    assert said.startswith("accuracy same (+0.045, p=")
    assert "writes/s fewer (-2.016" in said
    assert "worse" in differs(aura([0.5, 0.51, 0.52, 0.5]))
    assert "writes/s more" in differs(aura([1.0] * 4, writes=0.9))


def test_a_difference_below_the_printed_digit_is_none():
    ours = interval([1.0, 1.0, 1.0])
    assert judge(ours, 1.0, 0.0, 7, 0.0005).word == "same"
    assert judge(ours, 0.9996, 0.0, 7, 0.0005).word == "same"
    assert judge(ours, 0.990, 0.0, 7, 0.0005).word == "higher"


def test_verdict_is_welchs_test_of_the_summaries():
    ours = interval([0.90, 0.92, 0.94, 0.96])
    theirs = [0.80, 0.83, 0.86]
    half = interval(theirs).half
    wanted = compare(dict(enumerate([0.90, 0.92, 0.94, 0.96])), dict(enumerate(theirs)))
    found = judge(ours, sum(theirs) / 3, half, 3, 0.0005)
    assert found.word == ("higher" if wanted.welch_p < 0.05 else "same")
    assert f"p={wanted.welch_p:.2g}" in found.text


def test_recipes_that_change_what_the_paper_did_are_not_set_beside_it():
    for cell in (
        Cell(label="probe", probe=0.3),
        Cell(label="frozen-gate"),
        Cell(label="rho0.05", task="sparse_recall"),
        Cell(task="sparse_recall", task_steps=128),
    ):
        (row,) = rows([record(cell)])
        assert row.published is None
        assert differs(row) == "-"


def test_welch_counts_the_seeds_that_have_no_pair():
    found = compare({0: 1.0, 1: 0.9, 2: 0.8}, {0: 0.5, 1: 0.6, 9: 0.1})
    assert found.pairs == 2
    assert found.difference == pytest.approx(0.4)
    assert found.welch_low < 0.5 < found.welch_high


def test_numbers_of_one_seed_are_still_json():
    text = json.dumps([row_numbers(aura([1.0]))], allow_nan=False)
    assert json.loads(text)[0]["accuracy"]["half"] is None
    assert plain({"a": (math.inf, 1)}) == {"a": [None, 1]}


def test_rate_knob_stands_beside_the_papers_points():
    made = sections(of_preset("rate-knob", score=lambda c: {"write_rate": c.objective.rho}))["rate-knob"]
    text = made.markdown()
    assert "| 0.05 | 3 | 0.050 ± 0.000 |" in text
    assert "0.023, 0.420" in text
    assert [n["rho"] for n in made.numbers] == [0.05, 0.1, 0.2, 0.5, 0.85]


def test_selectivity_has_hard_and_soft_rates_and_says_when_no_distractor_fires():
    cells = of_preset("selectivity", score=lambda c: {"event_rate": 0.8})
    made = sections(cells)["selectivity"]
    hard, soft, theirs = made.rows
    assert "no distractor fires" in hard
    assert "8.00x" in soft
    assert "2.61x" in theirs


def test_bottleneck_is_compared_with_collapsed_seeds_counted_in():
    def score(cell):
        closed = cell.label == "no-ib" and cell.seed == 1
        return {"accuracy": 0.12 if closed else 0.87 + 0.01 * cell.seed, "write_rate": 0.0 if closed else 0.2}

    made = sections(of_preset("ib-ablation", budgets=[8], score=score))["ib-ablation"]
    ours, theirs = made.rows
    assert "0 and 1" in ours
    assert made.numbers[0]["comparison"]["difference"] == pytest.approx((0.88 - 0.12) / 3)
    assert "[-0.100, +0.450]" in theirs


def test_capacity_control_sets_learned_frozen_and_no_gate_side_by_side():
    cells = of_preset("capacity-control", budgets=[32], score=lambda c: {"write_rate": 0.9})
    cells += of_preset("paper-main", budgets=[32], variants=["aura"], score=lambda c: {"write_rate": 0.1})
    cells += of_preset(
        "paper-main", budgets=[32], variants=["write_every_step"], score=lambda c: {"write_rate": 1.0}
    )
    made = sections(cells)["capacity-control"]
    assert [row[1] for row in made.rows] == ["learned", "frozen", "none"]
    assert made.numbers[1]["writes_against"]["difference"] == pytest.approx(-0.8)


def test_bottleneck_is_of_the_hard_tasks_smallest_memory_and_of_cells_trained_alike():
    both = of_preset("ib-ablation")
    assert {r["label"] for r in both} == {"aura", "no-ib"}
    hard = of_preset("paper-hard", budgets=[8, 16])
    (size, ours, without) = ib_pairs([*hard, *[r for r in both if r["label"] == "no-ib"]])[0]
    assert (size, len(ours), len(without)) == (8, 3, 3)
    assert {r["variant"] for r in ours} == {"aura"}
    (row, _) = sections(both)["ib-ablation"].rows
    assert row[0] == "8"
    assert "(3 pairs)" in row[4]
    shorter = [
        record(dataclasses.replace(c, train=dataclasses.replace(c.train, steps=2))) for c in no_ib_cells()
    ]
    assert ib_pairs([*hard, *shorter]) == []


def no_ib_cells():
    return [cell for cell in preset_cells("ib-ablation", seeds=[0, 1]) if cell.label == "no-ib"]


def test_one_pair_of_the_bottleneck_has_no_interval():
    found = of_preset("ib-ablation")
    row = sections([r for r in found if r["label"] == "aura" or r["seed"] == 0])["ib-ablation"].rows[0]
    assert row[4] == "- (1 pair)"


@pytest.mark.parametrize(
    ("preset", "choice", "section"),
    [
        ("paper-hard", {"budgets": [16]}, "paper-hard"),
        ("paper-objective", {"budgets": [32]}, "paper-objective"),
        ("rate-knob", {}, "rate-knob"),
        ("selectivity", {}, "selectivity"),
        ("kv", {"seeds": [0], "variants": ["aura"]}, "kv"),
    ],
)
def test_seeds_trained_for_other_steps_are_rows_of_their_own(preset, choice, section):
    def made(steps):
        cells = preset_cells(preset, **{"seeds": (0, 1), **choice}, steps=steps)
        lengths = [{"steps": 0, "accuracy": 1.0, "write_rate": 0.1, "state_bytes": 4224}]
        return [record(cell, at_lengths=[{**lengths[0], "steps": n} for n in cell.lengths]) for cell in cells]

    alone = sections(made(1))[section]
    both = sections([*made(1), *made(2)])[section]
    assert "1 training steps" in alone.markdown().splitlines()[0]
    assert "training steps" not in both.markdown().splitlines()[0]
    assert "| training steps |" in both.markdown()
    ours = [(row, steps) for row, steps in zip(both.rows, both.steps, strict=True) if steps]
    assert [row for row, steps in ours if steps == 1] == [
        row for row, steps in zip(alone.rows, alone.steps, strict=True) if steps
    ]
    assert {steps for _, steps in ours} == {1, 2}


def test_capacity_control_pairs_gates_of_equal_steps():
    cells = of_preset("capacity-control", budgets=[32])
    main = preset_cells("paper-main", seeds=(0, 1, 2), budgets=[32], variants=["aura"], steps=1)
    made = sections([*cells, *map(record, main)])["capacity-control"]
    assert [row[1] for row in made.rows] == ["frozen"]


def test_the_collapse_of_sections_alone_is_said_once_and_the_knobs_penalty_is_named():
    found = [*of_preset("rate-knob"), *of_preset("paper-objective")]
    said = "".join(s.markdown() for s in sections(found, ["rate-knob", "paper-objective"]).values())
    assert said.count("Collapsed: ") == 1
    assert "the paper's own penalty, relu(mean soft gate - rho)^2, at gamma 10" in said
    assert "Collapsed: " not in "".join(s.markdown() for s in sections(found).values())


def kv_records():
    cells = []
    for variant, a_step in (("aura", 0), ("write_every_step", 0)):
        for seed in range(2):
            cell = Cell(
                task="sparse_recall",
                task_steps=128,
                task_event=0.2,
                variant=variant,
                seed=seed,
                lengths=(1024,),
            )
            lengths = [{"steps": 1024, "accuracy": 0.99, "write_rate": 0.1, "state_bytes": 4224}]
            cells.append(record(cell, state_bytes=4224 + a_step, at_lengths=lengths))
    return cells


def test_caches_are_judged_by_length_and_cells_without_further_lengths_are_shown_too():
    made = sections([*kv_records(), record(Cell(task="sparse_recall", task_steps=256))])["kv"]
    assert made.header[3:6] == ("T = 128", "T = 256", "T = 1,024")
    assert made.rows[0][:3] == ("aura", "128", "2")
    assert made.rows[0][5] == "0.9900 ± 0.0000"
    assert made.rows[1][3:6] == ("-", "1.0000 n=1", "-")
    assert any("62.1x" in cell for row in made.rows for cell in row)


def test_hard_tasks_gaps_are_of_equal_training_and_say_which_had_probes():
    made = sections(of_preset("paper-hard", variants=["aura", "fixed_size_state"]))["paper-hard"]
    assert [row[0] for row in made.rows] == [
        "8",
        "16",
        "24",
        "24, trained with probes",
        "32",
        "32, trained with probes",
    ]
    assert [n["comparison"] and n["comparison"]["pairs"] for n in made.numbers] == [3, 3, 3, None, 3, None]
    beside = {
        row.probed: row.published for row in rows(of_preset("paper-hard", budgets=[32], variants=["aura"]))
    }
    assert beside == {False: paper.PUBLISHED["hard_recall", "aura", 32], True: None}


def test_gap_on_the_hard_task_is_that_to_fixed_size_state():
    cells = of_preset("paper-hard", budgets=[8], variants=["aura"], score=lambda c: {"accuracy": 0.9})
    cells += of_preset(
        "paper-hard", budgets=[8], variants=["fixed_size_state"], score=lambda c: {"accuracy": 0.95}
    )
    (row,) = sections(cells)["paper-hard"].rows
    assert row[3].startswith("-0.0500")
    assert "-0.016, 6.13x" in row


def test_the_papers_objective_counts_its_collapses_and_names_them():
    def score(cell):
        return {"accuracy": 0.25, "write_rate": 0.0} if cell.seed == 1 else {}

    made = sections(of_preset("paper-objective", budgets=[32], score=score))["paper-objective"]
    (row,) = made.rows
    assert row[2].startswith("0.750")
    assert row[3].startswith("1.000")
    assert row[4] == "1"


def test_a_section_without_cells_says_which_preset_makes_them():
    with pytest.raises(UserError, match="'kv' has no cells here.*--preset kv"):
        sections([record(Cell())], ["kv"])
    with pytest.raises(UserError, match=r"section 'x' is unknown; choose one of: paper-hard"):
        sections([record(Cell())], ["x"])
    assert sections([record(Cell())]) == {}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("{", "line 1 is no cell"),
        ("[]", "line 1 is no cell"),
        ('{"format": 1}', "line 1 .*has no text 'key'"),
        ({"accuracy": "high"}, "has no number 'accuracy'"),
        ({"accuracy": float("nan")}, "has no finite 'accuracy'"),
        ({"config": 3}, "has no usable configuration"),
        ({"config": {}}, "has no usable configuration"),
        ({"task": "chess"}, "has task 'chess', its configuration says"),
        ({"config": {**Cell().to_dict(), "task": "chess"}}, "task 'chess' is unknown"),
        ({"checkpoint": 3}, "'checkpoint'"),
    ],
)
def test_a_corrupt_line_is_named_in_one_line(tmp_path, damage, said):
    if isinstance(damage, dict):
        damage = json.dumps({**record(Cell()), **damage})
    (tmp_path / LINES).write_text(damage + "\n")
    with pytest.raises(UserError, match=said) as refused:
        read_cells(tmp_path)
    assert "\n" not in str(refused.value)


def test_cells_that_are_no_text_and_an_empty_folder_are_one_line(tmp_path):
    (tmp_path / LINES).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="no text"):
        read_cells(tmp_path)
    (tmp_path / LINES).write_text("")
    with pytest.raises(UserError, match="has no cells"):
        read_cells(tmp_path)


def everything(folder):
    """Cells of every figure, and a memory in `folder` for the twelfth."""
    sparse = of_preset("selectivity", seeds=[0])
    build_untrained(MemoryConfig(input_dim=6, out_dim=4), folder / "m.safetensors")
    sparse[0]["checkpoint"] = "m.safetensors"
    main = of_preset("paper-main", budgets=[32], score=lambda c: {"write_rate": 0.1 * (c.variant == "aura")})
    hard = of_preset("paper-hard", seeds=[0, 1], budgets=[8, 16])
    hard += of_preset("paper-hard", seeds=[0, 1], budgets=[32], variants=["aura", "no_memory"])
    ib = of_preset("ib-ablation", seeds=[0, 1])
    return [*main, *hard, *sparse, *ib, *of_preset("rate-knob", seeds=[0, 1]), *kv_records()]


def test_figures_are_pictures_by_the_papers_numbers(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    records = everything(tmp_path)
    drawn = draw(records, tmp_path / "new", tmp_path)
    assert [file.stem for file in drawn] == [figure.name for figure in FIGURES.values()]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in drawn)
    only = draw(records, tmp_path / "one", tmp_path, [13])
    assert [file.name for file in only] == ["figure13_rate_knob.png"]
    shutil.rmtree(tmp_path / "new")


def texts(figure):
    """Titles, legends and tick labels of a figure."""
    axes = figure.get_axes()
    said = [a.get_title() for a in axes]
    said += [text.get_text() for a in axes if a.get_legend() for text in a.get_legend().get_texts()]
    return said + [tick.get_text() for a in axes for tick in a.get_xticklabels()]


def test_figure_5_says_which_sizes_were_trained_with_probes(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    said = texts(FIGURES[5].make(of_preset("paper-hard"), None))
    assert "aura, trained with probes (n=3)" in said
    assert "aura (n=3)" in said


def test_figure_6_has_the_size_that_has_a_recipe_of_its_own(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    said = texts(FIGURES[6].make(of_preset("paper-main", variants=["aura"]), None))
    assert "aura (N = 16, 32, 64)" in said


def test_figure_11_has_both_arms_at_the_papers_size():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    said = texts(FIGURES[11].make(of_preset("ib-ablation"), None))
    assert {"with (beta 1e-3)", "without (beta 0)"} <= set(said)
    assert any("N = 8" in text for text in said)


def test_figure_12_names_the_seed_that_it_draws(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    cells = of_preset("selectivity", seeds=[0, 1])
    cells[1]["checkpoint"] = "m.safetensors"
    build_untrained(MemoryConfig(input_dim=6, out_dim=4), tmp_path / "m.safetensors")
    assert "seed 1, one episode" in texts(FIGURES[12].make(cells, tmp_path))


def test_figures_without_cells_numbers_or_folder_are_one_line(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    main = [record(Cell())]
    with pytest.raises(UserError, match="no cells"):
        draw([], tmp_path)
    with pytest.raises(UserError, match="figure 5 has no cells here.*--preset paper-hard"):
        draw(main, tmp_path, None, [5])
    with pytest.raises(UserError, match="figure 9 is unknown; choose from: 4, 5"):
        draw(main, tmp_path, None, [9])
    with pytest.raises(UserError, match="figure 12 has no cells"):
        draw(of_preset("selectivity"), tmp_path, tmp_path, [12])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        draw(main, tmp_path / "file" / "x")


def test_the_papers_numbers_agree_with_each_other():
    # 2.175 writes/s at N = 64 is 9.19x; section 6.7's gaps; table 3's bytes.
    assert pytest.approx(2.175, abs=0.005) == paper.CONTROL_HZ / 9.19
    assert paper.PUBLISHED["hard_recall", "fixed_size_state", 16].accuracy == pytest.approx(0.939)
    assert pytest.approx(62.1, abs=0.05) == paper.KV_BYTES_A_STEP * 1024 / paper.STATE_BYTES
    ib = paper.IB_ABLATION
    assert ib.with_ib.accuracy - ib.without.accuracy == pytest.approx(ib.difference)
