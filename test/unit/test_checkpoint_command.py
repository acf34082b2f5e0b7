"""`aura checkpoint`, as typed, on folders in the published layout."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from llama_like import write_tokenizer
from oft_folder import SHARDS, drop_from_index, edit_shard, write_folder
from openvla_oft_tiny import golden
from safetensors import SafetensorError

from aura_ros import checkpoint_command, cli
from aura_ros.backbones import registry
from aura_ros.backbones.openvla_oft import conversion, inspection
from aura_ros.backbones.openvla_oft.api import OpenVlaOft
from aura_ros.backbones.openvla_oft.folder import read_folder
from aura_ros.backbones.openvla_oft.tensor_files import LazyTensors
from aura_ros.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def aura(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`aura checkpoint ...` in this process: importing torch anew takes seconds."""
    command = ["aura", "checkpoint", *map(str, arguments)]
    said, mistake = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(mistake):
        patch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as end:
            cli.main()
    return subprocess.CompletedProcess(command, int(end.value.code or 0), said.getvalue(), mistake.getvalue())


def program(text: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`aura checkpoint ...` by a Python program, which may prepare the ground."""
    return subprocess.run(
        [sys.executable, "-c", text, "checkpoint", *map(str, arguments)],
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


class Stopped(BaseException):
    """The end of a copy at a chosen place, as a kill or Ctrl-C would end it."""


def stop_after(name: str, partial: Path):
    """A progress callback that ends the copy once the file is whole."""

    def progress(done, total):
        if (partial / name).exists():
            raise Stopped

    return progress


def interrupted(folder: Path, out: Path) -> Path:
    """The partial of a copy that ended after the first shard."""
    partial = conversion.partial_of(out)
    with pytest.raises(Stopped):
        conversion.convert(folder, out, stop_after(SHARDS[0], partial))
    assert (partial / SHARDS[0]).exists()
    assert not (partial / SHARDS[1]).exists()
    return partial


def test_an_interrupted_conversion_leaves_no_folder_and_goes_on(folder, tmp_path, caplog):
    partial = interrupted(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    written = {file.name: file.stat().st_ino for file in partial.iterdir() if file.name != conversion.MARKER}
    conversion.convert(folder, tmp_path / "out")
    assert written.items() <= {f.name: f.stat().st_ino for f in (tmp_path / "out").iterdir()}.items()
    assert OpenVlaOft.from_checkpoint(tmp_path / "out").info.checkpoint_hash
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert not list((tmp_path / "out").glob(".*"))
    assert caplog.messages == []


def test_a_conversion_does_not_go_on_with_the_files_of_another_checkpoint(folder, tmp_path, caplog):
    other = write_folder(tmp_path / "other")
    edit_shard(other, lambda tensors: tensors["projector.fc1.bias"].add_(1.0))
    for file in other.iterdir():
        os.utime(file, (1, 1))  # older than anything copied
    partial = interrupted(folder, tmp_path / "out")
    conversion.convert(other, tmp_path / "out")
    expected = inspection.inspect(other).sha256
    assert inspection.inspect(tmp_path / "out").sha256 == expected != inspection.inspect(folder).sha256
    (said,) = caplog.messages
    assert str(partial) in said


def test_a_conversion_does_not_go_on_with_files_that_were_changed_since(tmp_path, caplog):
    source = write_folder(tmp_path / "source")
    shard = source / SHARDS[0]
    before = shard.stat()
    interrupted(source, tmp_path / "out")
    edit_shard(source, lambda tensors: tensors["projector.fc1.bias"].add_(1.0))
    # As a download or `cp --preserve` leaves it: older than the copy, and as long as before.
    assert shard.stat().st_size == before.st_size
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns - 1))
    conversion.convert(source, tmp_path / "out")
    assert inspection.inspect(tmp_path / "out").sha256 == inspection.inspect(source).sha256
    assert len(caplog.messages) == 1


def test_a_checkpoint_that_changes_while_it_is_copied_gives_no_folder(tmp_path):
    source = write_folder(tmp_path / "source")

    def touch(done, total):
        os.utime(source / SHARDS[0], (1, 1))

    with pytest.raises(UserError, match="changed while it was copied; run it again"):
        conversion.convert(source, tmp_path / "out", touch)
    assert not (tmp_path / "out").exists()


# What a write without room raises: no file may grow past the limit.
NO_ROOM = """
import resource, sys
from aura_ros.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
main()
"""


def test_a_head_that_cannot_be_written_is_one_line_with_the_reason(folder, tmp_path):
    said = program(NO_ROOM, "convert", folder, tmp_path / "out")
    assert (said.returncode, said.stdout, len(said.stderr.splitlines())) == (2, "", 1), said.stderr
    assert "cannot be written (File too large); give a place with" in said.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["Python's", "safetensors'"],
)
def test_a_full_disk_is_called_that_whoever_notices_it(error):
    assert conversion._reason(error) == "the disk is full"


# Ctrl-C, as the terminal sends it, once `aura_ros.backbones.openvla_oft.<module>.<function>` was called.
INTERRUPTED = """
import os, signal
from aura_ros.__main__ import main
from aura_ros.backbones.openvla_oft import {module} as module

inner = module.{function}

def interrupted(*given, **named):
    inner(*given, **named)
    os.kill(os.getpid(), signal.SIGINT)

module.{function} = interrupted
main()
"""


def test_interrupting_a_conversion_says_what_is_kept_and_does_not_look_like_success(folder, tmp_path):
    out = tmp_path / "out"
    text = INTERRUPTED.format(module="conversion", function="_write_once")
    said = program(text, "convert", folder, out)
    assert (said.returncode, said.stdout) == (130, "")
    partial = conversion.partial_of(out)
    assert said.stderr == (
        f"aura: interrupted; '{partial}' keeps what was copied; run it again and it goes on\n"
    )
    assert len(list(partial.iterdir())) == 2  # one file and the marker
    assert aura("convert", folder, out).returncode == 0


def test_interrupting_an_inspection_does_not_look_like_success(folder):
    said = program(INTERRUPTED.format(module="inspection", function="_wrong_shapes"), "inspect", folder)
    assert (said.returncode, said.stdout) == (130, "")
    assert said.stderr == "aura: interrupted; run it again to have it whole\n"


@pytest.mark.parametrize("path", ["/", ".", "/no/where/a.json"])
def test_a_report_that_cannot_be_written_is_refused_before_a_weight_is_read(
    folder, path, monkeypatch, capsys
):
    monkeypatch.setattr(inspection, "read_folder", None)
    monkeypatch.setattr(sys, "argv", ["aura", "checkpoint", "inspect", str(folder), "--json", path])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out, error = capsys.readouterr()
    assert (end.value.code, out, error.count("\n")) == (2, "", 1)
    assert f"json '{path}' cannot be written" in error


def test_inspect_and_convert_are_told_what_a_folder_does_not_say(tmp_path):
    path = write_folder(tmp_path / "oft", head="none")
    assert aura("inspect", path).returncode == 2
    options = (
        *("--head", "discrete", "--cameras", "front,hand", "--image-flip", "none"),
        *("--horizon", "5", "--period", "0.1", "--action-scale", "1,1,1,1,1,1,1"),
    )
    said = aura("inspect", path, *options)
    assert (said.returncode, said.stderr) == (0, "")
    for text in ("discrete head", "2 (front, hand), 56 px", "as seen", "5 rows of 7", "every 0.1 s"):
        assert text in said.stdout
    refused = aura("convert", path, tmp_path / "out")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert aura("convert", path, tmp_path / "out", *options).returncode == 0
    assert aura("inspect", tmp_path / "out", *options).returncode == 0
    assert "no 'vision_backbone" in aura("inspect", path, "--film", "required").stdout


def test_a_mistyped_option_of_a_folder_is_one_line(folder):
    for option, value in (("--horizon", "-1"), ("--image-flip", "up"), ("--cameras", "a,,b")):
        said = aura("inspect", folder, option, value)
        assert (said.returncode, said.stdout, said.stderr.count("\n")) == (2, "", 1)
        assert option.strip("-").replace("-", "_") in said.stderr


def test_statistics_taken_from_elsewhere_are_reported_and_logged(folder, tmp_path, caplog):
    lost = write_folder(tmp_path / "oft", statistics_file=False)
    report = inspection.inspect(lost, digest=False)
    assert report.problems == []
    (line,) = [line for line in report.missing if line.startswith("dataset_statistics.json")]
    assert "norm_stats of config.json" in line
    (record,) = caplog.records
    assert (record.levelname, str(lost) in record.message) == ("WARNING", True)
    caplog.clear()
    whole = inspection.inspect(folder, digest=False)
    assert not [line for line in whole.missing if "statistics" in line]
    assert caplog.records == []


def test_headers_alone_tell_a_checkpoint_that_cannot_be_served(tmp_path, monkeypatch):
    path = write_tokenizer(write_folder(tmp_path / "oft"))
    monkeypatch.setattr(LazyTensors, "__getitem__", None)
    inspection.check_headers(read_folder(path))
    shard = (path / SHARDS[0]).read_bytes()

    def refused(text: str) -> None:
        with pytest.raises(UserError, match=text) as error:
            inspection.check_headers(read_folder(path))
        assert "\n" not in str(error.value)

    edit_shard(path, lambda t: t.update({"projector.fc2.bias": t["projector.fc2.bias"][1:].clone()}))
    refused(r"'projector.fc2.bias' in '.*' has shape")
    (path / SHARDS[0]).write_bytes(shard)
    edit_shard(path, lambda tensors: tensors.pop("projector.fc2.bias"))
    drop_from_index(path, "projector.fc2.bias")
    refused(r"lacks 1 of .*projector.fc2.bias")
    fresh = write_folder(tmp_path / "fresh")
    with pytest.raises(UserError, match=r"lacks tokenizer\.json"):
        inspection.check_headers(read_folder(fresh))
    (fresh / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer"):
        inspection.check_headers(read_folder(fresh))


def test_a_file_cut_short_by_a_kill_is_written_again(folder, tmp_path):
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "model-00001-of-00002.safetensors.unfinished").write_bytes(b"half")
    (partial / "stale.safetensors").write_bytes(b"of another checkpoint")
    conversion.convert(folder, tmp_path / "out")
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
    conversion.convert(folder, tmp_path / "out", lambda done, total: seen.append((done, total)))
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


def test_the_registry_takes_a_folder_and_refuses_its_mistakes_before_reading_weights(folder, tmp_path):
    with pytest.raises(UserError, match="tokenizer"):
        registry.check_checkpoint("openvla_oft", folder)
    folder = write_tokenizer(write_folder(tmp_path / "oft"))
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
