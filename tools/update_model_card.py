"""Bring checkpoints/README.md up to date with the shipped policy and with results/policy: eval.jsonl (`aura eval --out`) and
expert.jsonl (`aura expert --out`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aura_ros import expert_command
from aura_ros.backbones.openvla_oft.checkpoint import load_checkpoint
from aura_ros.bench import evaluation, expert
from aura_ros.bench.recall.table import line
from aura_ros.files import write_text

ROOT = Path(__file__).resolve().parents[1]
CARD, POLICY = ROOT / "checkpoints" / "README.md", ROOT / "checkpoints" / "compact.safetensors"
RESULTS = ROOT / "results" / "policy"


def replaced(document: str, name: str, text: str) -> str:
    """The document with what is between the marks of that name replaced."""
    begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
    if document.count(begin) != 1 or document.count(end) != 1:
        raise SystemExit(f"{CARD} has not one '{begin.strip()}' and '{end}'")
    before, _, rest = document.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{text.strip()}\n\n{end}{after}"


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Results of a JSON Lines file."""
    return [json.loads(text) for text in path.read_text().splitlines()]


def markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table."""
    return "\n".join(line(row) for row in (header, ("---",) * len(header), *rows))


def facts() -> str:
    """What the file itself says."""
    checkpoint = load_checkpoint(POLICY)
    (statistics,) = checkpoint.statistics.values()
    rows = [
        ("file", f"`{POLICY.name}`, {POLICY.stat().st_size / 1e6:.1f} MB"),
        ("sha256 of config, statistics and weights", f"`{checkpoint.sha256()}`"),
        ("parameters", f"{sum(tensor.numel() for tensor in checkpoint.tensors.values()):,}"),
        (
            "trained on",
            f"{statistics['num_trajectories']} demonstrations, {statistics['num_transitions']:,} samples",
        ),
    ]
    return markdown(("what", "value"), rows)


def card(document: str) -> str:
    """The model card with its facts and tables renewed."""
    judged = lines_of(RESULTS / "eval.jsonl")
    other = {line["identity"] for line in judged if line["arm"] == "policy"} - {
        load_checkpoint(POLICY).sha256()
    }
    if other:
        raise SystemExit(f"eval.jsonl has results of {other.pop()}, which is not the shipped policy")
    document = replaced(document, "facts", facts())
    experts = expert.table(lines_of(RESULTS / "expert.jsonl"))
    document = replaced(document, "expert", markdown(expert_command.HEADER, experts))
    return replaced(document, "evaluation", markdown(evaluation.HEADER, evaluation.table(judged)))


if __name__ == "__main__":
    write_text(CARD, card(CARD.read_text()))
