"""Bring docs/closed_loop.md and its figures up to date with results/panel.jsonl: run after a panel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aura_ros.bench import panel_figure, panel_table
from aura_ros.bench.recall.table import line
from aura_ros.files import write_text

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT, RESULTS = ROOT / "docs" / "closed_loop.md", ROOT / "results" / "panel.jsonl"
BEGIN, END = "<!-- begin: results/panel.jsonl -->\n", "<!-- end -->\n"


def lines() -> list[dict[str, Any]]:
    """The shipped panel's episodes."""
    return [json.loads(text) for text in RESULTS.read_text().splitlines()]


def document(text: str) -> str:
    """The document with what is between the marks renewed."""
    found = lines()
    header = panel_table.HEADER
    table = "\n".join(line(row) for row in [header, ("---",) * len(header), *panel_table.rows(found)])
    said = "\n".join(f"- {verdict}" for verdict in panel_table.verdicts(found))
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{DOCUMENT} has not '{BEGIN.strip()}' and '{END.strip()}'")
    return f"{before}{BEGIN}\n{table}\n\n{said}\n\n{END}{after}"


if __name__ == "__main__":
    write_text(DOCUMENT, document(DOCUMENT.read_text()))
    panel_figure.success(lines(), ROOT / "docs" / "figures")
    panel_figure.writes(lines(), ROOT / "docs" / "figures")
