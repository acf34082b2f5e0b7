"""Bring docs/closed_loop.md, its figures and the memories' card up to date with the panel and the memories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

from aura_ros.bench import panel_figure, panel_table
from aura_ros.bench.arms import TRAINED
from aura_ros.bench.recall.table import line
from aura_ros.files import write_text
from aura_ros.memory.baseline_file import FORMAT as BASELINE
from aura_ros.memory.baseline_file import load_baseline
from aura_ros.memory.checkpoint import format_of, load_checkpoint

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT, RESULTS = ROOT / "docs" / "closed_loop.md", ROOT / "results" / "panel.jsonl"
MEMORIES = ROOT / "checkpoints" / "memories"
CARD = MEMORIES / "README.md"
BEGIN, FACTS, END = "<!-- begin: results/panel.jsonl -->\n", "<!-- begin: facts -->\n", "<!-- end -->\n"


def lines() -> list[dict[str, Any]]:
    """The shipped panel's episodes."""
    # What was played again has two lines, of which the later counts.
    found = (json.loads(text) for text in RESULTS.read_text().splitlines())
    return list({line["key"]: line for line in found}.values())


def document(text: str) -> str:
    """The document with what is between the marks renewed."""
    found = lines()
    header = panel_table.HEADER
    table = "\n".join(line(row) for row in [header, ("---",) * len(header), *panel_table.rows(found)])
    said = "\n".join(f"- {verdict}" for verdict in panel_table.verdicts(found))
    return replaced(text, BEGIN, f"{table}\n\n{said}")


def replaced(text: str, mark: str, new: str) -> str:
    """The text with what is between the mark and the next end renewed."""
    before, begin, rest = text.partition(mark)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"a document has not '{mark.strip()}' and '{END.strip()}'")
    return f"{before}{mark}\n{new}\n\n{END}{after}"


def card(text: str) -> str:
    """The memories' card with what the files themselves say."""
    rows = [("arm", "parameters", "carried bytes", "hash", "backbone"), ("---",) * 5]
    for arm in TRAINED:
        path = MEMORIES / f"{arm}.safetensors"
        if format_of(path) == BASELINE:
            module = load_baseline(path)
            count = sum(parameter.numel() for parameter in module.parameters())
            size = f"{module.state_bytes(1):,} after a step, {module.state_bytes(1000):,} after 1,000"
            with safe_open(path, "numpy") as file:
                weights_hash = file.metadata()["sha256"]
            rows.append((arm, f"{count:,}", size, weights_hash[:12], module.config.backbone[:12]))
        else:
            found = load_checkpoint(path)
            count = sum(array.size for array in found.arrays.values())
            size = 4 * (found.config.dk + 1) * found.config.dv
            rows.append((arm, f"{count:,}", f"{size:,}", found.weights_hash[:12], found.config.backbone[:12]))
    return replaced(text, FACTS, "\n".join(line(row) for row in rows))


if __name__ == "__main__":
    write_text(DOCUMENT, document(DOCUMENT.read_text()))
    write_text(CARD, card(CARD.read_text()))
    panel_figure.success(lines(), ROOT / "docs" / "figures")
    panel_figure.writes(lines(), ROOT / "docs" / "figures")
