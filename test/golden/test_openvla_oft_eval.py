"""`aura eval --protocol oft` on a published checkpoint's folder: the 7B's path, at test size."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from llama_like import write_tokenizer
from oft_folder import write_folder
from real_libero import needs_libero

from aura_ros import cli


@pytest.mark.slow
@needs_libero
def test_a_published_folder_is_judged_by_oft_s_protocol(tmp_path, monkeypatch, capsys):
    folder = write_tokenizer(write_folder(tmp_path / "oft", dtype=torch.float32))
    out = tmp_path / "e.jsonl"
    given = ["--backbone", "openvla_oft", "--protocol", "oft", "--tasks", "0", "--states", "1", "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", ["aura", "eval", str(folder), *given, "--out", str(out)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said, _ = capsys.readouterr()
    assert not end.value.code
    assert "published: 98.4 % on all of libero_object" in said
    (line,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert (line["seed"], line["resets"], line["init_state"], line["image_size"]) == (0, 1, 1, 256)
    # Random weights solve nothing; an action beyond the limit may end it early.
    assert line["success"] is False
    assert line["identity"] == str(folder)
