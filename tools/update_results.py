"""Bring docs/results.md and docs/figures up to date with results/: run after a sweep into results."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- begin: aura recall table results -->\n", "<!-- end -->\n"


def printed(*arguments: str) -> str:
    """What `aura recall ARGUMENTS` prints."""
    from aura_ros import cli

    sys.argv = ["aura", "recall", *arguments]
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        cli.main()
    return text.getvalue()


def with_tables(document: str, tables: str) -> str:
    """The document with what is between the marks replaced."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + tables.strip() + "\n\n" + END + after


def main() -> None:
    """Write the tables into the document, and draw the figures."""
    path = ROOT / "docs" / "results.md"
    path.write_text(with_tables(path.read_text(), printed("table", str(ROOT / "results"))))
    sys.stdout.write(printed("figures", str(ROOT / "results"), "--out", str(ROOT / "docs" / "figures")))


if __name__ == "__main__":
    main()
