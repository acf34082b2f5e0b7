"""Checkpoint folders in the published layout: loading equals the reference, and nothing else is done to them."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import logging
import re
import shutil
import socket
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import numpy as np
import oft_folder
import pytest
import torch
from oft_folder import INDEX, STATISTICS, edit_json, edit_shard, write_folder
from openvla_oft_tiny import DATA, NoTokenizer, golden, tiny_config

from aura_ros.backbones.openvla_oft.api import OpenVlaOft
from aura_ros.backbones.openvla_oft.config import OPENVLA_OFT_7B
from aura_ros.backbones.openvla_oft.folder import read_folder
from aura_ros.backbones.openvla_oft.layout import FolderOptions, derive_config
from aura_ros.backbones.openvla_oft.model import OftModel, build_on_meta, check_keys
from aura_ros.backbones.openvla_oft.tensor_files import LazyTensors
from aura_ros.errors import UserError

ATOL = 1e-4
ONE_CAMERA = FolderOptions(cameras=("agentview",))


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    return golden()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The published layout in bfloat16; read only, by custom."""
    return write_folder(tmp_path_factory.mktemp("oft") / "checkpoint")


@pytest.fixture
def copied(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "checkpoint"))


def query(model: OpenVlaOft, recorded, noise=None):
    """One prediction from the golden inputs, by torch's plain kernels: exact, wherever this runs."""
    pixels = recorded["in.pixel_values"][:, : 6 * len(model.config.cameras)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own flags() sets a deprecated one
        with torch.backends.mkldnn.flags(enabled=False):
            return model.predict(recorded["in.input_ids"], pixels, recorded["in.proprio_normalised"], noise)


def fingerprint(path: Path) -> dict[str, tuple]:
    return {
        str(p.relative_to(path)): (
            p.stat().st_mtime_ns,
            p.stat().st_mode,
            hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "",
        )
        for p in [path, *sorted(path.rglob("*"))]
    }


def test_the_published_layout_in_bfloat16_equals_the_reference(folder, recorded):
    model = OpenVlaOft.from_checkpoint(folder)
    prediction = query(model, recorded)
    np.testing.assert_allclose(prediction.actions, recorded["H.actions"], rtol=0, atol=1e-6)
    hidden = prediction.hidden_states.float().numpy()
    np.testing.assert_allclose(hidden, recorded["H.last_hidden"], rtol=0, atol=1e-2)
    assert model.info.trained
    assert (model.info.cameras, model.info.proprio_dim) == (("agentview", "wrist"), 8)
    assert model.config.image.mirror
    assert model.config.tokenizer == "llama"


@pytest.mark.parametrize(
    "layout", [{}, {"sharded": False}, {"suffix": ".safetensors"}, {"statistics_file": False}]
)
def test_every_layout_of_float32_weights_equals_the_reference(layout, tmp_path, recorded):
    path = write_folder(tmp_path / "checkpoint", dtype=torch.float32, **layout)
    model = OpenVlaOft.from_checkpoint(path, dtype="float32")
    np.testing.assert_allclose(query(model, recorded).actions, recorded["A.actions"], rtol=0, atol=ATOL)


def test_one_camera_without_proprioception_or_head_reads_tokens_only_where_asked_for(tmp_path, recorded):
    path = write_folder(tmp_path / "checkpoint", dtype=torch.float32, head="none", proprio=False)
    with pytest.raises(UserError, match=r"no 'action_head--.*discrete"):
        OpenVlaOft.from_checkpoint(path, dtype="float32", options=ONE_CAMERA)
    options = dataclasses.replace(ONE_CAMERA, head="discrete")
    model = OpenVlaOft.from_checkpoint(path, dtype="float32", options=options)
    np.testing.assert_allclose(query(model, recorded).actions, recorded["C.actions"], rtol=0, atol=ATOL)
    assert "discrete head" in model.info.details


def test_a_diffusion_folder_equals_the_reference(tmp_path, recorded):
    path = write_folder(tmp_path / "checkpoint", dtype=torch.float32, head="diffusion")
    model = OpenVlaOft.from_checkpoint(path, dtype="float32", options=FolderOptions(diffusion_steps=5))
    actions = query(model, recorded, recorded["in.E_noise"]).actions
    np.testing.assert_allclose(actions, recorded["E.actions"], rtol=0, atol=ATOL)


@pytest.mark.parametrize("rank", [8, 32])
def test_a_film_folder_with_unmerged_adapters_equals_the_reference(rank, tmp_path, recorded):
    # Rank 8 has scale 1, rank 32 has 16 / 32: a fixed alpha or scale fails one of the two.
    path = write_folder(tmp_path / "checkpoint", dtype=torch.float32, film_rank=rank)
    # The towers in the shards were saved without the adapters: they must not be used.
    edit_shard(path, lambda t: t["vision_backbone.featurizer.blocks.0.attn.qkv.weight"].zero_())
    model = OpenVlaOft.from_checkpoint(path, dtype="float32", options=FolderOptions(film=True))
    assert model.config.film
    np.testing.assert_allclose(query(model, recorded).actions, recorded["F.actions"], rtol=0, atol=ATOL)


def test_float32_adapters_and_film_layers_on_bfloat16_towers_load(tmp_path, recorded):
    """PEFT makes adapters in float32 and the FiLM layers are never cast: real files are mixed."""
    path = write_folder(tmp_path / "checkpoint", film_rank=32)
    film = torch.load(next(path.glob("vision_backbone--*")), weights_only=True)
    assert {t.dtype for t in film.values()} == {torch.float32, torch.bfloat16}
    actions = query(OpenVlaOft.from_checkpoint(path), recorded).actions
    # bfloat16 moved the run without FiLM by as much.
    rounding = np.abs(recorded["H.actions"] - recorded["A.actions"]).max()
    assert np.abs(actions - recorded["F.actions"]).max() <= 2 * rounding


def test_other_files_are_left_alone_with_one_line_each_and_the_adapter_is_not_merged_again(
    copied, folder, recorded, caplog
):
    adapter = copied / "lora_adapter"
    adapter.mkdir()
    torch.save({"lora": torch.ones(4)}, adapter / "adapter_model.bin")
    (copied / "modeling_prismatic.py").write_text("raise SystemExit('code from a checkpoint was run')")
    (copied / "README.md").write_text("# OpenVLA-OFT")
    torch.save({"step": 1}, copied / "optimizer--150000_checkpoint.pt")
    with caplog.at_level(logging.INFO):
        model = OpenVlaOft.from_checkpoint(copied)
    lines = [r.message for r in caplog.records if "ignored" in r.message]
    for name in ("lora_adapter", "modeling_prismatic.py", "README.md", "optimizer--150000_checkpoint.pt"):
        assert len([line for line in lines if name in line]) == 1, name
    assert len(lines) == 4
    assert model.weights_sha256() == OpenVlaOft.from_checkpoint(folder).weights_sha256()


def test_nothing_in_the_folder_is_written_or_touched(copied):
    for p in copied.rglob("*"):
        p.chmod(0o444)
    copied.chmod(0o555)
    before = fingerprint(copied)
    OpenVlaOft.from_checkpoint(copied, tokenizer=NoTokenizer()).warm_up()
    assert fingerprint(copied) == before
    copied.chmod(0o755)


def test_tensors_are_read_one_at_a_time_and_not_kept(folder, monkeypatch):
    alive: list[weakref.ref] = []
    most = 0
    read = LazyTensors.__getitem__

    def watched(self, name):
        nonlocal most
        most = max(most, sum(ref() is not None for ref in alive))
        tensor = read(self, name)
        if self.entries[name].file.endswith(".safetensors"):  # a .pt is mapped, and shared by all who read it
            alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(LazyTensors, "__getitem__", watched)
    model = OpenVlaOft.from_checkpoint(folder)
    assert len(alive) > 100
    assert most <= 1  # the one before, still named in the loop
    gc.collect()
    assert sum(ref() is not None for ref in alive) == 0
    assert model.info.parameters > 0


@pytest.mark.slow
def test_loading_needs_the_weights_once(tmp_path):
    """In a process of its own: the peak of its memory, against the size of the weights."""
    script = """
import dataclasses, json, sys
from pathlib import Path
import torch
import oft_folder, openvla_oft_tiny
from aura_ros.backbones.openvla_oft.api import OpenVlaOft
from aura_ros.backbones.openvla_oft.config import LanguageConfig
from aura_ros.backbones.openvla_oft.model import build_on_meta

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

path = Path(sys.argv[1])
if sys.argv[2] == "write":
    language = LanguageConfig(hidden=512, intermediate=4096, layers=12, heads=4, vocab=32064)
    config = dataclasses.replace(openvla_oft_tiny.tiny_config(), language=language)
    oft_folder.write_folder(path)
    shapes = {name: p.shape for name, p in build_on_meta(config).named_parameters()}
    tensors = {name: torch.full(tuple(shape), 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()}
    for unused in ("featurizer.blocks.2", "fused_featurizer.blocks.3"):
        tensors[f"vision_backbone.{unused}.norm1.weight"] = torch.ones(1, dtype=torch.bfloat16)
    for stem in ("action_head", "proprio_projector"):
        part = {n.removeprefix(stem + "."): tensors.pop(n) for n in list(tensors) if n.startswith(stem + ".")}
        oft_folder.write_part(path, stem, part, torch.bfloat16, ".pt")
    oft_folder.write_backbone(path, tensors)
    text = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 4}
    oft_folder.edit_json(path / "config.json", text_config={"vocab_size": 32064, **text})
else:
    torch.set_num_threads(1)
    before = peak()
    model = OpenVlaOft.from_checkpoint(path)
    print(peak() - before, 2 * model.info.parameters)
"""
    path = tmp_path / "checkpoint"
    for job in ("write", "load"):
        done = subprocess.run(
            [sys.executable, "-c", script, str(path), job],
            cwd=DATA.parents[1],
            env={"PYTHONPATH": f"{DATA.parents[1]}:{DATA.parents[3]}", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    grown, size = map(int, done.stdout.split())
    assert size > 180e6
    # The largest tensor is 33 MB: read, copied and hashed while the others are there.
    assert grown < size + 90e6


def test_a_refused_load_leaves_no_network_and_no_weights_behind(copied):
    name = "vision_backbone.fused_featurizer.pos_embed"  # read last but one: all others are there by then
    edit_shard(copied, lambda tensors: tensors[name].fill_(float("nan")))

    def left() -> tuple[int, int]:
        gc.collect()
        found = [o for o in gc.get_objects() if type(o) in (OftModel, torch.Tensor, torch.nn.Parameter)]
        bytes_held = sum(o.numel() * o.element_size() for o in found if isinstance(o, torch.Tensor))
        return sum(isinstance(o, OftModel) for o in found), bytes_held

    oft_folder.golden_tensors()
    before = left()
    with pytest.raises(UserError, match="pos_embed"):
        OpenVlaOft.from_checkpoint(copied)
    assert left() == before


@pytest.fixture
def offline_cache(tmp_path, monkeypatch, folder) -> Path:
    """A hub cache with one snapshot, o/n, and no way out of the machine."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--o--n"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    (repository / "snapshots" / revision).mkdir(parents=True)
    for file in folder.iterdir():  # links into blobs, as the hub's client makes them
        (repository / "snapshots" / revision / file.name).symlink_to(file)

    def refuse(*args, **kwargs):
        raise AssertionError("the network was used")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return repository


@pytest.mark.parametrize("name", ["o/n", "o/n@main", "o/n@0123456789abcdef0123456789abcdef01234567"])
def test_a_downloaded_snapshot_loads_by_its_name_without_the_network(name, offline_cache, folder):
    model = OpenVlaOft.from_checkpoint(name)
    assert model.info.checkpoint == name
    assert model.weights_sha256() == OpenVlaOft.from_checkpoint(folder).weights_sha256()


@pytest.mark.parametrize(
    "name", ["o/unknown", "o/n@other", "other/n@0123456789abcdef0123456789abcdef01234567"]
)
def test_an_unknown_snapshot_is_one_line_and_is_not_fetched(name, offline_cache):
    with pytest.raises(UserError, match=rf"'{re.escape(name)}' is neither a folder.*hf download") as error:
        OpenVlaOft.from_checkpoint(name)
    assert "\n" not in str(error.value)


def test_a_snapshot_whose_statistics_were_lost_is_refused_not_given_those_of_pre_training(offline_cache):
    link = next(offline_cache.glob("snapshots/*/dataset_statistics.json"))
    link.unlink()
    link.symlink_to(offline_cache / "blobs" / "gone")
    with pytest.raises(UserError, match=r"dataset_statistics\.json' does not exist"):
        OpenVlaOft.from_checkpoint("o/n")


def test_the_statistics_of_the_folder_come_before_those_of_its_config(copied):
    edit_json(copied / "config.json", norm_stats={"pre_training": STATISTICS["libero_10_no_noops"]})
    assert OpenVlaOft.from_checkpoint(copied).statistics.key == "libero_10_no_noops"
    (copied / "dataset_statistics.json").unlink()
    assert OpenVlaOft.from_checkpoint(copied).statistics.key == "pre_training"


def test_a_folder_of_any_name_loads(folder, tmp_path):
    path = Path(shutil.copytree(folder, tmp_path / "vérifié 机器人 aloha")) / "."
    assert OpenVlaOft.from_checkpoint(str(path)).info.cameras == ("agentview", "wrist")


def seven_b(head: str) -> tuple[dict, dict[str, tuple[int, ...]]]:
    """config.json and every tensor's shape of the real checkpoint with either head."""
    raw = json.loads((DATA / "openvla7b_oft_shapes.json").read_text())
    parts = {
        "": raw["backbone"],
        "action_head.": raw[f"action_head_{head}"],
        "proprio_projector.": raw["proprio_projector_libero"],
    }
    if head == "diffusion":
        parts["noisy_action_projector."] = raw["noisy_action_projector"]
    shapes = {prefix + n: tuple(s) for prefix, tensors in parts.items() for n, s in tensors.items()}
    return raw["config_json_without_norm_stats"], shapes


@pytest.mark.parametrize("head", ["l1", "diffusion"])
def test_the_real_7b_folder_gives_the_7b_preset_and_every_tensor_has_a_place(head):
    settings, shapes = seven_b(head)
    config = derive_config(settings, shapes, STATISTICS, "checkpoint '7b'", FolderOptions())
    assert (config.dino, config.siglip, config.language) == (
        OPENVLA_OFT_7B.dino,
        OPENVLA_OFT_7B.siglip,
        OPENVLA_OFT_7B.language,
    )
    assert (config.name, config.cameras, config.head) == (OPENVLA_OFT_7B.name, OPENVLA_OFT_7B.cameras, head)
    if head == "l1":
        assert config == OPENVLA_OFT_7B
    ours = {name: tuple(p.shape) for name, p in build_on_meta(config).named_parameters()}
    check_keys(config, ours.keys(), shapes.keys(), "checkpoint '7b'")
    assert {name: shape for name, shape in ours.items() if shapes[name] != shape} == {}


LOST = {
    "the last language layer": r"language_model\.model\.layers\.31\.",
    "the last DINOv2 block": r"vision_backbone\.featurizer\.blocks\.23\.",
    "the last SigLIP block": r"vision_backbone\.fused_featurizer\.blocks\.26\.",
    "the registers": r".*reg_token$",
    "the class token": r".*cls_token$",
    "every LayerScale": r".*scale_factor$",
    "one norm": r"language_model\.model\.norm\.weight$",
}


@pytest.mark.parametrize("lost", LOST)
def test_a_kind_of_tensor_that_is_lost_does_not_make_a_smaller_network(lost):
    settings, shapes = seven_b("l1")
    left = {name: shape for name, shape in shapes.items() if not re.match(LOST[lost], name)}
    assert left != shapes
    with pytest.raises(UserError, match="checkpoint '7b'"):
        place_every_tensor(settings, left)


def place_every_tensor(settings: dict, shapes: dict) -> None:
    config = derive_config(settings, shapes, STATISTICS, "checkpoint '7b'", FolderOptions())
    names = dict(build_on_meta(config).named_parameters())
    check_keys(config, names.keys(), shapes.keys(), "checkpoint '7b'")


ALOHA = {"action": {"min": [-1.0] * 14, "max": [1.0] * 14, "q01": [0.0] * 14, "q99": [0.0] * 14}}
ALOHA["proprio"] = ALOHA["action"]


@pytest.mark.parametrize(
    ("action", "proprio", "cameras", "horizon", "bounds", "mirror"),
    [(7, 8, 2, 8, "q99", True), (7, 7, 1, 5, "q99", False), (14, 14, 3, 25, "min_max", False)],
    ids=["LIBERO", "Bridge", "ALOHA"],
)
def test_the_robot_follows_from_the_tensors_not_from_a_path(
    action, proprio, cameras, horizon, bounds, mirror
):
    settings, shapes = seven_b("l1")
    shapes["action_head.model.fc2.weight"] = (action, 4096)
    shapes["proprio_projector.fc1.weight"] = (4096, proprio)
    config = derive_config(
        settings, shapes, {"x": ALOHA}, "checkpoint 'libero aloha bridge'", FolderOptions()
    )
    assert (len(config.cameras), config.action.horizon, config.bounds) == (cameras, horizon, bounds)
    assert (config.proprio_dim, config.image.mirror) == (proprio, mirror)


def test_options_of_the_wrong_kind_are_refused_before_anything_is_read():
    for wrong in (
        *({"cameras": cameras} for cameras in ("wrist", (), ("",), (1,), 2, {"a": 1})),
        *({"head": head} for head in ("l1", 1)),
        *({name: value} for name in ("mirror", "film") for value in ("none", 1, 0.0)),
        *({"horizon": horizon} for horizon in (0, -1, True, 8.0, "8")),
        *({"diffusion_steps": steps} for steps in (0, 51, True, 5.0, "5")),
    ):
        ((name, value),) = wrong.items()
        with pytest.raises(UserError) as refused:
            FolderOptions(**wrong)
        assert f"{name} {value!r} is not allowed" in str(refused.value)
    FolderOptions(cameras=["a"], mirror=False, horizon=1, film=True, diffusion_steps=50, head="discrete")


@pytest.mark.parametrize("steps", [0, 51, -1])
def test_diffusion_steps_outside_the_schedule_are_refused(steps, tmp_path):
    path = write_folder(tmp_path / "checkpoint", head="diffusion")
    with pytest.raises(UserError, match=rf"diffusion_steps {steps} "):
        read_folder(path, FolderOptions(diffusion_steps=steps))


def test_the_example_sizes_are_those_of_the_golden_model(folder):
    config = read_folder(folder).config
    expected = tiny_config()
    assert (config.dino, config.siglip, config.language) == (
        expected.dino,
        expected.siglip,
        expected.language,
    )


def test_an_index_with_its_files_and_a_single_file_are_not_both_taken(copied):
    shutil.copy(copied / oft_folder.SHARDS[0], copied / "model.safetensors")
    with pytest.raises(UserError, match=rf"both {re.escape(INDEX)} and model\.safetensors"):
        OpenVlaOft.from_checkpoint(copied)
