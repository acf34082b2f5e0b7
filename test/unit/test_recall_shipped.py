"""The results that are shipped: whole, usable, and the same when one is computed again."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from aura_ros import cli
from aura_ros.bench.recall.store import CHECKPOINTS, LINES, Store, fault
from aura_ros.bench.recall.table import markdown, read_cells, rows
from aura_ros.bench.recall.verify import verify

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_shipped_line_is_usable_in_order_and_has_the_checkpoint_it_names():
    records = read_cells(RESULTS)
    assert not any(map(fault, records))
    assert [r["key"] for r in records] == sorted(r["key"] for r in records)
    for record in records:
        name = record["checkpoint"]
        assert name is None or (RESULTS / CHECKPOINTS / name).is_file(), record["key"]
    assert markdown(rows(records))


def test_shipped_lines_stay_as_they_are_when_they_are_brought_up_to_date(tmp_path):
    shutil.copy(RESULTS / LINES, tmp_path)
    store = Store(tmp_path)
    store.prepare()
    store.write_lines()
    assert (tmp_path / LINES).read_bytes() == (RESULTS / LINES).read_bytes()


def test_a_shipped_cell_computed_again_is_equal(tmp_path):
    kept = [r for r in read_cells(RESULTS) if r["checkpoint"] and r["task"] == "noisy_long_recall"]
    smallest = min(kept, key=lambda record: (record["state_dim"], record["key"]))
    file = RESULTS / CHECKPOINTS / smallest["checkpoint"]
    (tmp_path / CHECKPOINTS).mkdir()
    shutil.copy(file, tmp_path / CHECKPOINTS)
    (tmp_path / LINES).write_text(json.dumps(smallest) + "\n")
    (check,) = verify(tmp_path, count=1)
    assert check.equal


def test_the_document_shows_the_tables_of_the_shipped_cells(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["aura", "recall", "table", str(RESULTS)])
    with pytest.raises(SystemExit):
        cli.main()
    document = (ROOT / "docs" / "results.md").read_text()
    assert capsys.readouterr().out.strip() in document, "run `python tools/update_results.py`"
    for picture in re.findall(r"\((figures/[^)]+)\)", document):
        assert (ROOT / "docs" / picture).is_file()
