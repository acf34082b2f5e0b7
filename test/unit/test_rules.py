"""docs/rules.md names tests: they are there, and each rule has one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "rules.md").read_text()


def test_every_test_that_the_rules_name_exists():
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    there = {
        name
        for path in (ROOT / "test").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.M)
    }
    assert named
    assert named - there == set()


def test_every_rule_has_a_test():
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and "---" not in line]
    without = [row for row in rows if "`test_" not in row and not row.endswith("| held by |")]
    assert without == []
