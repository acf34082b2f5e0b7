"""`aura checkpoint`, as typed, on folders in the published layout."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from oft_folder import drop_from_index, edit_shard, write_folder
from openvla_oft_tiny import golden

from aura_ros import checkpoint_command
from aura_ros.backbones import registry
from aura_ros.backbones.openvla_oft import inspection
from aura_ros.backbones.openvla_oft.api import OpenVlaOft
from aura_ros.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def aura(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aura_ros", "checkpoint", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("checkpoint") / "oft")


def test_inspect_prints_what_is_there_and_what_is_missing(folder, tmp_path):
    said = aura("inspect", folder, "--json", tmp_path / "report.json")
    assert (said.returncode, said.stderr.strip()) == (0, "")
    for text in (
        "l1 head",
        "hidden 64, 3 layers, 4 heads, vocabulary 32064",
        "dino, width 48, 3 blocks",
        "2 (agentview, wrist), 56 px",
        "8 rows of 7",
        "proprio       8 values",
        "libero_10_no_noops: fits",
        "bfloat16",
        "missing       tokenizer.json",
    ):
        assert text in said.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    model = OpenVlaOft.from_checkpoint(folder)
    assert report["sha256"] == model.info.checkpoint_hash
    assert report["sha256"] in said.stdout
    assert report["parameters"] == model.info.parameters
    assert report["bytes"] == sum((folder / name).stat().st_size for name in report["files"])
    assert not report["problems"]


def test_inspect_ends_with_2_and_one_line_for_a_checkpoint_that_cannot_be_loaded(tmp_path):
    folder = write_folder(tmp_path / "oft")
    name = "projector.fc2.weight"
    edit_shard(folder, lambda tensors: tensors.pop(name))
    drop_from_index(folder, name)
    said = aura("inspect", folder)
    problems = [line for line in said.stdout.splitlines() if line.startswith("problem")]
    assert said.returncode == 2
    assert len(problems) == 1
    assert name in problems[0]
    assert "sha256" not in said.stdout
    assert "Traceback" not in said.stdout + said.stderr


def test_inspect_names_every_tensor_of_another_shape(folder, tmp_path):
    other = write_folder(tmp_path / "oft")

    def cut(tensors):
        for name in ("projector.fc2.bias", "projector.fc3.bias"):
            tensors[name] = tensors[name][:-1].clone()

    edit_shard(other, cut)
    problems = inspection.inspect(other).problems
    assert ["projector.fc2.bias" in problems[0], "projector.fc3.bias" in problems[1], len(problems)] == [
        True,
        True,
        2,
    ]


def test_inspect_finds_nan_only_when_it_reads_the_weights(tmp_path):
    folder = write_folder(tmp_path / "oft")
    edit_shard(folder, lambda tensors: tensors["projector.fc1.bias"].fill_(float("nan")))
    assert inspection.inspect(folder, digest=False).problems == []
    (problem,) = inspection.inspect(folder).problems
    assert "projector.fc1.bias" in problem


def test_a_converted_folder_holds_no_pickle_and_gives_the_same_actions_and_hash(folder, tmp_path):
    (source := write_folder(tmp_path / "source")).joinpath("modeling_prismatic.py").write_text("boom")
    (source / "lora_adapter").mkdir()
    before = {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in source.rglob("*")}
    out = tmp_path / "out"
    said = aura("convert", source, out)
    assert (said.returncode, said.stderr.strip()) == (0, "")
    assert {file.suffix for file in out.iterdir()} == {".json", ".safetensors"}
    assert before == {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in source.rglob("*")}
    assert [file.name for file in tmp_path.iterdir() if "partial" in file.name] == []
    recorded = golden()
    inputs = [recorded[f"in.{name}"] for name in ("input_ids", "pixel_values", "proprio_normalised")]
    one, two = (OpenVlaOft.from_checkpoint(path) for path in (source, out))
    assert one.info.checkpoint_hash == two.info.checkpoint_hash
    np.testing.assert_array_equal(one.predict(*inputs).actions, two.predict(*inputs).actions)


def test_an_interrupted_conversion_leaves_no_folder_and_goes_on(folder, tmp_path, monkeypatch):
    out, calls = tmp_path / "out", []
    save = inspection.save_file

    def full_disk(*arguments, **named):
        calls.append(arguments)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(inspection, "save_file", full_disk)
    with pytest.raises(UserError, match=r"disk is full.*GB free") as refused:
        inspection.convert(folder, out)
    assert "\n" not in str(refused.value)
    assert not out.exists()
    monkeypatch.setattr(inspection, "save_file", save)
    inspection.convert(folder, out)
    assert OpenVlaOft.from_checkpoint(out).info.checkpoint_hash
    assert not list(tmp_path.glob(".*"))


def test_a_file_cut_short_by_a_kill_is_written_again(folder, tmp_path):
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "model-00001-of-00002.safetensors.unfinished").write_bytes(b"half")
    (partial / "stale.safetensors").write_bytes(b"of another checkpoint")
    inspection.convert(folder, tmp_path / "out")
    assert inspection.inspect(tmp_path / "out").problems == []
    assert not (tmp_path / "out" / "stale.safetensors").exists()


@pytest.mark.parametrize("where", ["exists", "inside", "no parent"])
def test_convert_refuses_a_place_it_must_not_write(folder, tmp_path, where):
    out = {"exists": tmp_path, "inside": folder / "out", "no parent": tmp_path / "a" / "b"}[where]
    said = aura("convert", folder, out)
    assert (said.returncode, len(said.stderr.splitlines()), said.stdout) == (2, 1, "")
    assert str(out) in said.stderr or str(out.parent) in said.stderr
    assert not (folder / "out").exists()


def test_progress_counts_up_to_the_whole(folder, tmp_path):
    seen: list[tuple[int, int]] = []
    inspection.convert(folder, tmp_path / "out", lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0


def test_mistyped_commands_are_one_line(tmp_path):
    for arguments in (["frob"], ["inspect"], ["convert", tmp_path], []):
        said = aura(*arguments)
        assert (said.returncode, len(said.stderr.splitlines())) == (2, 1), said.stderr
        assert said.stderr.startswith("aura: ")


def test_the_report_of_a_folder_that_is_none_still_prints(tmp_path):
    report = inspection.inspect(tmp_path / "none")
    assert [label for label, _ in checkpoint_command.lines(report)] == ["checkpoint", "problem"]


def test_the_registry_takes_a_folder_and_refuses_its_mistakes_before_reading_weights(folder):
    backbone = registry.load_backbone("openvla_oft", folder)
    assert (backbone.info.name, backbone.info.trained) == ("openvla-oft", True)
    assert {p.dtype for p in backbone.model.parameters()} == {torch.bfloat16}
    assert "mirror left-right" in backbone.info.image_rotation
    registry.check_checkpoint("openvla_oft", folder)
    with pytest.raises(UserError, match="libero_10_no_noops"):
        registry.check_checkpoint("openvla_oft", folder, unnorm_key="bridge_orig")
    with pytest.raises(UserError, match="layout"):
        registry.check_checkpoint("openvla_oft", folder / "none")
    with pytest.raises(UserError, match="openvla_oft' has no checkpoint"):
        registry.check_checkpoint("openvla_oft")
