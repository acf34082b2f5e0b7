"""Broken and foreign checkpoint folders: one plain line that names the file, and nothing is loaded."""

from __future__ import annotations

import copy
import json
import os
import pickletools
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from oft_folder import (
    INDEX,
    SHARDS,
    STATISTICS,
    drop_from_index,
    edit_json,
    edit_shard,
    film_state,
    part,
    write_folder,
    write_json,
    write_part,
)
from openvla_oft_tiny import LM_HEAD, NoTokenizer, golden
from safetensors.torch import load_file, save_file

from aura_ros.backbones.openvla_oft import api
from aura_ros.backbones.openvla_oft.api import OpenVlaOft
from aura_ros.backbones.openvla_oft.layout import FolderOptions
from aura_ros.backbones.openvla_oft.normalisation import normalise_proprio, select_statistics
from aura_ros.errors import UserError
from aura_ros.types import Observation

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 14484\n"
HEAD, PROPRIO = "action_head--150000_checkpoint.pt", "proprio_projector--150000_checkpoint.pt"
FILM = "vision_backbone--150000_checkpoint.pt"
QKV = "vision_backbone.featurizer.blocks.0.attn.qkv.weight"
KEY = "libero_10_no_noops"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("oft") / "checkpoint")


@pytest.fixture
def copied(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "checkpoint"))


def refusal(path: Path | str, *expected: str, built: bool = False, **arguments) -> str:
    """The message, checked to be one line with each expected part, and that no network was built."""
    networks = []
    load = api.load_weights
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "load_weights", lambda *a, **k: networks.append(load(*a, **k)) or networks[-1])
        with pytest.raises(UserError) as error:
            OpenVlaOft.from_checkpoint(path, **arguments)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 700, message
    for text in expected:
        assert text in message, message
    assert networks == []
    return message


def cut(path: Path, share: float = 0.5) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def replace_by_link(path: Path, target: Path) -> None:
    path.unlink()
    path.symlink_to(target)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def poke(name: str, value: float):
    def change(tensors):
        tensors[name].view(-1)[-1] = value

    return lambda path: edit_shard(path, change)


def recast(path: Path) -> None:
    edit_shard(path, lambda tensors: tensors.update({QKV: tensors[QKV].float()}))


def forget(name: str):
    def change(path: Path) -> None:
        edit_shard(path, lambda tensors: tensors.pop(name))
        drop_from_index(path, name)

    return change


def reshape(name: str, *shape: int):
    return lambda path: edit_shard(path, lambda t: t.update({name: torch.zeros(shape, dtype=torch.bfloat16)}))


def settings(**changes):
    return lambda path: edit_json(path / "config.json", **changes)


def text_config(**changes):
    def change(path: Path) -> None:
        text = json.loads((path / "config.json").read_text())["text_config"]
        edit_json(path / "config.json", text_config={**text, **changes})

    return change


def statistics(change):
    def write(path: Path) -> None:
        entry = copy.deepcopy(STATISTICS[KEY])
        change(entry)
        write_json(path / "dataset_statistics.json", {KEY: entry})

    return write


def index(change):
    def write(path: Path) -> None:
        value = json.loads((path / INDEX).read_text())
        change(value)
        write_json(path / INDEX, value)

    return write


def narrow(entry, section: str, columns: int) -> None:
    values = entry[section]
    entry[section] = {name: (v * 2)[:columns] for name, v in values.items()}


def other_head(**sizes):
    def write(path: Path) -> None:
        head = part("action_head.")
        for name, shape in sizes.items():
            head[name.replace("__", ".")] = torch.zeros(shape)
        write_part(path, "action_head", head, torch.bfloat16, ".pt")

    return write


# What was done to the folder -> the change, and what the line must say.
WEIGHTS = {
    "a shard is missing": (lambda p: (p / SHARDS[1]).unlink(), ("1 of 2 shards", SHARDS[1])),
    "a shard is cut at half": (lambda p: cut(p / SHARDS[0]), (SHARDS[0], "truncated")),
    "a shard lost its last byte": (lambda p: cut(p / SHARDS[1], 0.9999999), (SHARDS[1], "truncated")),
    "a shard is empty": (lambda p: (p / SHARDS[0]).write_bytes(b""), (SHARDS[0], "truncated")),
    "a shard is a pointer": (lambda p: (p / SHARDS[0]).write_text(POINTER), (SHARDS[0], "Git LFS pointer")),
    "a shard is a folder": (lambda p: replace_by_folder(p / SHARDS[0]), (SHARDS[0], "lacks 1 of 2")),
    "a head is a pointer": (lambda p: (p / HEAD).write_text(POINTER), (HEAD, "Git LFS pointer")),
    "a head is cut at half": (lambda p: cut(p / HEAD), (HEAD, "truncated")),
    "a head is empty": (lambda p: (p / HEAD).write_bytes(b""), (HEAD, "truncated")),
    "a head is a folder": (lambda p: replace_by_folder(p / HEAD), (HEAD, "no file")),
    "a head is a list": (lambda p: torch.save([torch.ones(2)], p / HEAD), (HEAD, "no state dict")),
    "a head is a tensor": (lambda p: torch.save(torch.ones(2), p / HEAD), (HEAD, "no state dict")),
    "a head is empty of tensors": (lambda p: torch.save({}, p / HEAD), (HEAD, "no state dict")),
    "a head holds numbers": (lambda p: torch.save({"model.fc1.weight": 1.0}, p / HEAD), (HEAD, "no state")),
    "a head holds sparse tensors": (
        lambda p: torch.save({"model.fc2.weight": torch.ones(7, 64).to_sparse()}, p / HEAD),
        (HEAD, "no state dict"),
    ),
    "a tensor is lost everywhere": (forget(QKV), ("lacks 1 of", QKV)),
    "the registers are lost everywhere": (
        forget("vision_backbone.featurizer.reg_token"),
        ("registers 0", "oft_tiny_dino has 4"),
    ),
    "the embedding is lost everywhere": (
        forget("language_model.model.embed_tokens.weight"),
        ("lacks the tensor 'language_model.model.embed_tokens.weight'",),
    ),
    "a tensor is lost from its shard": (
        lambda p: edit_shard(p, lambda t: t.pop(QKV)),
        (INDEX, QKV, SHARDS[0]),
    ),
    "a tensor is only in the shard": (lambda p: drop_from_index(p, QKV), (INDEX, QKV, SHARDS[0])),
    "a tensor is in two shards": (
        lambda p: edit_shard(p, lambda t: t.update({LM_HEAD: torch.ones(1, dtype=torch.bfloat16)})),
        (INDEX, LM_HEAD),
    ),
    "a tensor has another dtype": (recast, (QKV, "float32 among 150 of bfloat16")),
    "all tensors are whole numbers": (
        lambda p: edit_shard(p, lambda t: t.update({n: v.to(torch.int8) for n, v in t.items()})),
        ("I8",),
    ),
    "a weight is NaN": (poke(QKV, float("nan")), (QKV, "not finite")),
    "a weight is infinite": (poke(QKV, float("inf")), (QKV, "not finite")),
    "a weight has another shape": (reshape(QKV, 144, 47), (QKV, "[144, 47]", "[144, 48]")),
    "the embedding has one axis": (
        reshape("language_model.model.embed_tokens.weight", 32064),
        ("embed_tokens.weight", "[32064]"),
    ),
    "the patch embedding has no axis": (
        reshape("vision_backbone.featurizer.patch_embed.proj.weight"),
        ("patch_embed.proj.weight", "[]"),
    ),
    "a tensor is unknown": (
        lambda p: save_file({"extra": torch.ones(1)}, p / SHARDS[1]) or index(unknown_only)(p),
        ("extra",),
    ),
    "the index leads outside": (
        index(lambda v: v["weight_map"].update({QKV: "../x.safetensors"})),
        (INDEX, "weight_map of file names"),
    ),
    "the index names the folder above": (
        index(lambda v: v["weight_map"].update({QKV: ".."})),
        ("lacks 1 of",),
    ),
    "the index is absolute": (index(lambda v: v["weight_map"].update({QKV: "/etc/passwd"})), (INDEX,)),
    "the index maps to numbers": (index(lambda v: v["weight_map"].update({QKV: 1})), (INDEX,)),
    "the index has no map": (index(lambda v: v.pop("weight_map")), (INDEX, "weight_map")),
    "the index is empty": (index(lambda v: v["weight_map"].clear()), ("lacks the tensor",)),
    "the index is no JSON": (lambda p: (p / INDEX).write_text("{"), (INDEX, "cannot be read")),
    "the index is a pointer": (lambda p: (p / INDEX).write_text(POINTER), (INDEX, "Git LFS pointer")),
    "the index is a loop of links": (lambda p: replace_by_link(p / INDEX, p / INDEX), (INDEX,)),
    "a shard is a loop of links": (lambda p: replace_by_link(p / SHARDS[0], p / SHARDS[0]), (SHARDS[0],)),
    "a head is a link to nothing": (lambda p: replace_by_link(p / HEAD, p / "gone"), (HEAD,)),
    "there are no weights": (lambda p: [(p / n).unlink() for n in (INDEX, *SHARDS)], ("neither", INDEX)),
    "the single file is a folder": (
        lambda p: (p / INDEX).unlink() or (p / "model.safetensors").mkdir(),
        ("lacks 1 of 1", "model.safetensors"),
    ),
    "the single file is a pointer": (
        lambda p: (p / INDEX).unlink() or (p / "model.safetensors").write_text(POINTER),
        ("model.safetensors", "Git LFS pointer"),
    ),
}


def unknown_only(value) -> None:
    del value["weight_map"][LM_HEAD]
    value["weight_map"]["extra"] = SHARDS[1]


HEADS = {
    "the proprio file as the head": (
        lambda p: shutil.copy(p / PROPRIO, p / HEAD),
        (HEAD, "fc1.", "no action_head has"),
    ),
    "the head as the proprio file": (lambda p: shutil.copy(p / HEAD, p / PROPRIO), (PROPRIO, "model.fc1")),
    "two heads": (
        lambda p: shutil.copy(p / HEAD, p / "action_head--50000_checkpoint.pt"),
        ("2 action_head files", HEAD, "action_head--50000_checkpoint.pt"),
    ),
    "the same head in two formats": (
        lambda p: write_part(p, "action_head", part("action_head."), torch.bfloat16, ".safetensors"),
        ("2 action_head files",),
    ),
    "the head is lost": (lambda p: (p / HEAD).unlink(), ("no 'action_head--", "discrete")),
    "the head has another name": (
        lambda p: (p / HEAD).rename(p / "action_head.pt"),
        ("action_head.pt", "is not named action_head--"),
    ),
    "the proprio file has another name": (
        lambda p: (p / PROPRIO).rename(p / "proprio_projector-latest.bin"),
        ("proprio_projector-latest.bin", "is not named"),
    ),
    "a diffusion head without its projector": (
        lambda p: write_part(p, "action_head", part("diffusion_head."), torch.bfloat16, ".pt"),
        ("diffusion head", "noisy_action_projector--"),
    ),
    "a noise projector without a diffusion head": (
        lambda p: write_part(
            p, "noisy_action_projector", part("noisy_action_projector."), torch.bfloat16, ".pt"
        ),
        ("noisy_action_projector--150000_checkpoint.pt", "no diffusion head"),
    ),
    "the noise projector as the proprio file": (
        lambda p: write_part(p, "proprio_projector", part("noisy_action_projector."), torch.bfloat16, ".pt"),
        ("7 action and 1 state values",),
    ),
    "a head of another width": (
        other_head(model__fc1__weight=(128, 448)),
        ("action_head.model.fc1", "[128, 448]"),
    ),
    "a head for another robot": (
        other_head(model__fc2__weight=(6, 64), model__fc2__bias=(6,)),
        ("6 action and 8 state values", "LIBERO 7 and 8"),
    ),
    "a head whose last layer has one axis": (other_head(model__fc2__weight=(7,)), ("fc2.weight", "[7]")),
    "one head tensor of another dtype": (
        lambda p: torch.save(
            {**torch.load(p / HEAD, weights_only=True), "module.model.fc2.bias": torch.zeros(7)}, p / HEAD
        ),
        (HEAD, "fc2.bias", "float32"),
    ),
    "FiLM layers without their towers": (
        lambda p: torch.save(part("film."), p / FILM),
        ("patch_embed.proj.weight",),
    ),
    "a vision file without FiLM layers": (
        lambda p: torch.save(plain_vision(), p / FILM),
        (FILM, "no FiLM layers"),
    ),
    "an adapter with one factor": (
        lambda p: torch.save(without("attn.qkv.lora_B"), p / FILM),
        (FILM, "without both LoRA factors"),
    ),
    "an adapter without a base": (
        lambda p: torch.save(without("attn.qkv.base_layer.weight"), p / FILM),
        (FILM, "without a base layer"),
    ),
    "an adapter of another shape": (
        lambda p: torch.save(with_factor(torch.ones(8, 7)), p / FILM),
        (FILM, "[8, 7]", "do not fit"),
    ),
    "an adapter without axes": (
        lambda p: torch.save(with_factor(torch.tensor(1.0)), p / FILM),
        (FILM, "do not fit"),
    ),
    "an adapter of rank 0": (
        lambda p: torch.save(with_factor(torch.ones(0, 48), torch.ones(144, 0)), p / FILM),
        (FILM, "do not fit"),
    ),
    "half of the adapters in another dtype": (
        lambda p: torch.save(with_factor(torch.ones(8, 48).half()), p / FILM),
        (FILM, "float16"),
    ),
}


def plain_vision() -> dict:
    return {f"vision_backbone.{n}": t.bfloat16() for n, t in part("vision_backbone.").items()}


def without(piece: str) -> dict:
    return {
        n: t
        for n, t in film_state(8, torch.bfloat16).items()
        if f"featurizer.blocks.0.block.{piece}" not in n
    }


def with_factor(down: torch.Tensor, up: torch.Tensor | None = None) -> dict:
    state = film_state(8, torch.bfloat16)
    stem = "vision_backbone.featurizer.blocks.0.block.attn.qkv.lora_"
    state[f"{stem}A.default.weight"] = down
    if up is not None:
        state[f"{stem}B.default.weight"] = up
    return state


CONFIGS = {
    "config.json is missing": (lambda p: (p / "config.json").unlink(), ("config.json", "does not exist")),
    "config.json is a pointer": (lambda p: (p / "config.json").write_text(POINTER), ("Git LFS pointer",)),
    "config.json is a list": (lambda p: write_json(p / "config.json", []), ("config.json", "list")),
    "config.json is no JSON": (lambda p: (p / "config.json").write_text("yes: 1"), ("config.json", "read")),
    "config.json is empty": (lambda p: (p / "config.json").write_text(""), ("config.json", "cannot be read")),
    "config.json is binary": (lambda p: (p / "config.json").write_bytes(b"\xff\xfe\0"), ("config.json",)),
    "config.json is nested without end": (
        lambda p: (p / "config.json").write_text("[" * 100_000),
        ("config.json", "cannot be read"),
    ),
    "config.json is a loop": (
        lambda p: replace_by_link(p / "config.json", p / "config.json"),
        ("config.json", "cannot be read"),
    ),
    "config.json is a folder": (lambda p: replace_by_folder(p / "config.json"), ("config.json", "no file")),
    "config.json is a pipe": (
        lambda p: (p / "config.json").unlink() or os.mkfifo(p / "config.json"),
        ("config.json", "no file"),
    ),
    "another model": (settings(model_type="llama"), ("model_type is 'llama'", "openvla")),
    "no model type": (settings(model_type=None), ("model_type is None",)),
    "another projector": (settings(arch_specifier="linear"), ("arch_specifier is 'linear'",)),
    "another resize": (settings(image_resize_strategy="letterbox"), ("image_resize_strategy",)),
    "one tower": (settings(use_fused_vision_backbone=False), ("use_fused_vision_backbone",)),
    "an unknown tower": (settings(timm_model_ids=["resnet\n50", "oft_tiny_siglip"]), ("resnet", "known are")),
    "towers swapped": (
        settings(timm_model_ids=["oft_tiny_siglip", "oft_tiny_dino"]),
        ("featurizer", "blocks 3", "oft_tiny_siglip has 4"),
    ),
    "towers of the wrong kind": (settings(timm_model_ids=[["a"], {"b": 1}]), ("['a']",)),
    "one tower named": (settings(timm_model_ids=["oft_tiny_dino"]), ("timm_model_ids",)),
    "towers as text": (settings(timm_model_ids="ab\n"), ("timm_model_ids",)),
    "a size of image that is not square": (settings(image_sizes=[56, 57]), ("image_sizes [56, 57]",)),
    "a size of image as text": (settings(image_sizes="56\n"), ("image_sizes",)),
    "another size of image": (settings(image_sizes=[112, 112]), ("pos_embed", "[1, 16, 48]", "[1, 64, 48]")),
    "a size of image that no patch divides": (settings(image_sizes=[57, 57]), ("57", "patch 14")),
    "a size of image of 0": (settings(image_sizes=[0, 0]), ("checkpoint", "0")),
    "a size of image true": (settings(image_sizes=[True, True]), ("checkpoint",)),
    "another vocabulary": (text_config(vocab_size=32000), ("says vocab_size 32000", "have 32064")),
    "another depth": (text_config(num_hidden_layers=4), ("num_hidden_layers 4", "have 3")),
    "no depth": (text_config(num_hidden_layers=None), ("leaves to Llama-2-7B", "num_hidden_layers 32")),
    "another width": (text_config(hidden_size=128), ("hidden_size 128", "have 64")),
    "another MLP": (text_config(intermediate_size=1), ("intermediate_size 1",)),
    "heads that do not divide": (
        text_config(num_attention_heads=5, num_key_value_heads=5),
        ("checkpoint", "64"),
    ),
    "heads as text": (text_config(num_attention_heads="4", num_key_value_heads="4"), ("checkpoint", "heads")),
    "grouped heads": (text_config(num_key_value_heads=2), ("num_key_value_heads",)),
    "rope scaling": (text_config(rope_scaling={"type": "linear"}), ("rope_scaling",)),
    "an epsilon as text": (text_config(rms_norm_eps="1e-6"), ("rms_norm_eps '1e-6'", "number")),
    "an epsilon of 0": (text_config(rms_norm_eps=0), ("rms_norm_eps 0",)),
    "a rope that is NaN": (text_config(rope_theta=float("nan")), ("rope_theta nan",)),
    "no text config": (settings(text_config=None), ("text_config",)),
    "a text config as list": (settings(text_config=[]), ("text_config is a list",)),
}

STATS = {
    "statistics are missing": (
        lambda p: (p / "dataset_statistics.json").unlink() or edit_json(p / "config.json", norm_stats=None),
        ("dataset_statistics.json", "no data set"),
    ),
    "statistics are empty": (
        lambda p: write_json(p / "dataset_statistics.json", {}),
        ("dataset_statistics.json", "no data set"),
    ),
    "statistics are no JSON": (
        lambda p: (p / "dataset_statistics.json").write_text(""),
        ("dataset_statistics.json", "cannot be read"),
    ),
    "14 columns for a robot of 7": (
        statistics(lambda e: narrow(e, "action", 14)),
        (KEY, "14 action columns", "7"),
    ),
    "7 values for a state of 8": (
        statistics(lambda e: narrow(e, "proprio", 7)),
        (KEY, "7 proprio columns", "8"),
    ),
    "q01 above q99": (
        statistics(lambda e: e["action"]["q01"].__setitem__(2, 9.0)),
        (KEY, "action", "column 2", "9.0", "low must not exceed"),
    ),
    "a quantile is NaN": (
        statistics(lambda e: e["proprio"]["q99"].__setitem__(3, float("nan"))),
        (KEY, "proprio", "column 3", "nan"),
    ),
    "a quantile is infinite": (
        statistics(lambda e: e["action"]["q99"].__setitem__(0, float("inf"))),
        (KEY, "inf"),
    ),
    "a quantile is null": (statistics(lambda e: e["action"]["q99"].__setitem__(0, None)), (KEY, "q99")),
    "a quantile is text": (statistics(lambda e: e["action"]["q99"].__setitem__(0, "0.5")), (KEY, "'0.5'")),
    "a quantile is true": (statistics(lambda e: e["action"]["q99"].__setitem__(0, True)), (KEY, "True")),
    "a quantile is too large to be a float": (
        statistics(lambda e: e["action"]["q99"].__setitem__(0, 10**400)),
        (KEY, "q99"),
    ),
    "quantiles are text": (statistics(lambda e: e["action"].update(q01="1234567")), (KEY, "action")),
    "no quantiles": (statistics(lambda e: e["action"].pop("q01")), (KEY, "q01")),
    "a mask of words": (statistics(lambda e: e["action"].update(mask=["false"] * 7)), (KEY, "mask")),
    "a short mask": (statistics(lambda e: e["action"].update(mask=[True] * 6)), (KEY, "6 mask")),
    "no proprioception": (statistics(lambda e: e.pop("proprio")), (KEY, "proprio")),
    "an entry is a list": (lambda p: write_json(p / "dataset_statistics.json", {KEY: [1]}), (KEY,)),
}
CASES = {**WEIGHTS, **HEADS, **CONFIGS, **STATS}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_folder_is_one_plain_line(case, copied):
    change, expected = CASES[case]
    change(copied)
    refusal(copied, *expected)


def test_every_refusal_of_the_weights_says_something_else(folder, tmp_path):
    """A pointer, a cut file, a lost key and an odd dtype are four mistakes with four remedies."""
    told = set()
    for number, case in enumerate(
        (
            "a shard is a pointer",
            "a shard is cut at half",
            "a tensor is lost everywhere",
            "a tensor has another dtype",
        )
    ):
        path = Path(shutil.copytree(folder, tmp_path / str(number)))
        WEIGHTS[case][0](path)
        told.add(refusal(path).replace(str(path), "").rpartition(";")[2])
    assert len(told) == 4


class Code:
    """Unpickling this runs a command."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("where", ["value", "whole"])
def test_code_in_a_head_file_is_not_run(where, copied, tmp_path):
    ran = tmp_path / "ran"
    state = {"module.model.fc2.weight": torch.ones(7, 64), "module.x": Code(ran)}
    torch.save(state if where == "value" else Code(ran), copied / HEAD)
    refusal(copied, HEAD, "more than tensors")
    assert not ran.exists()
    # Its pickle does call mkdir with that very path, so the line above tells something.
    with zipfile.ZipFile(copied / HEAD) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        steps = [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(archive.read(name))]
    assert {argument for _, argument in steps} & {f"{os.name} mkdir"}
    assert str(ran) in [argument for _, argument in steps]
    assert "REDUCE" in [opcode for opcode, _ in steps]


def test_film_that_is_demanded_or_forbidden_against_the_files_is_refused(copied):
    refusal(copied, "no 'vision_backbone--*_checkpoint.pt'", options=FolderOptions(film=True))
    torch.save(film_state(8, torch.bfloat16), copied / FILM)
    refusal(copied, FILM, "no FiLM", options=FolderOptions(film=False))


def test_a_head_that_is_there_is_not_passed_over_for_tokens(copied):
    refusal(copied, HEAD, "discrete", options=FolderOptions(head="discrete"))
    (copied / HEAD).unlink()
    model = OpenVlaOft.from_checkpoint(copied, options=FolderOptions(head="discrete"))
    assert (model.config.head, model.config.proprio_dim) == ("discrete", 8)


def test_an_unknown_key_and_a_choice_of_four_list_the_valid_ones(copied):
    suites = [f"libero_{suite}_no_noops" for suite in ("10", "goal", "object", "spatial")]
    write_json(copied / "dataset_statistics.json", dict.fromkeys(suites, STATISTICS[KEY]))
    refusal(copied, "choose one", *suites)
    refusal(copied, "'bridge_orig' is unknown", *suites, unnorm_key="bridge_orig")
    assert OpenVlaOft.from_checkpoint(copied, unnorm_key=suites[2]).statistics.key == suites[2]


def test_a_column_that_never_moved_is_not_divided_by_zero(copied):
    def still(entry):
        for section, column in (("action", 1), ("proprio", 7)):
            entry[section]["q99"][column] = entry[section]["q01"][column]

    statistics(still)(copied)
    model = OpenVlaOft.from_checkpoint(copied)
    recorded = golden()
    prediction = model.predict(
        recorded["in.input_ids"], recorded["in.pixel_values"], recorded["in.proprio_normalised"]
    )
    assert np.isfinite(prediction.actions).all()
    value = STATISTICS[KEY]["action"]["q01"][1]
    np.testing.assert_allclose(prediction.actions[:, 1], value, rtol=0, atol=1e-7)
    only = STATISTICS[KEY]["proprio"]["q01"]
    for noise in (0.0, 1e-12, -1e-9, 1e-6, 1e-3):  # a sensor is never exactly still
        normal = normalise_proprio(np.array(only) + noise, model.statistics.proprio)
        assert np.isfinite(normal).all()
        assert normal[7] == -1.0


def test_statistics_choose_their_columns_by_robot():
    entry = {"action": {"min": [-2.0], "max": [2.0], "q01": [-1.0], "q99": [1.0]}}
    chosen = [
        select_statistics({"x": entry}, None, action_dim=1, proprio_dim=0, bounds=b).action.high
        for b in ("q99", "min_max")
    ]
    assert chosen == [(1.0,), (2.0,)]


PATHS = {
    "empty": ("", ("'' is empty",)),
    "blank": ("  ", ("is empty",)),
    "a file": ("config.json", ("is a file", "folder")),
    "nothing": ("nothing/there/at all", ("does not exist", "folder")),
    "an empty folder": (".", ("config.json", "does not exist")),
    "too long": ("x" * 300, ("cannot be looked at",)),
    "a loop": ("loop", ("does not exist",)),
    "NUL": ("a\0b", ("does not exist",)),
}


@pytest.mark.parametrize("case", PATHS)
def test_a_path_that_is_no_checkpoint_folder_is_one_line(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    if case == "a file":
        (tmp_path / "config.json").write_text("{}")
    path, expected = PATHS[case]
    refusal(path, *expected)


@pytest.mark.parametrize("name", ["config.json", SHARDS[0], HEAD, INDEX, "dataset_statistics.json"])
def test_an_unreadable_file_is_named(name, copied, monkeypatch):
    # By a patch, because whoever runs the tests as root may read everything.
    opened = Path.open

    def refuse(self, *args, **kwargs):
        if self.name == name:
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    refusal(copied, name, "Permission denied", "readable")


def test_a_folder_that_may_not_be_listed_is_named(copied, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    refusal(copied, str(copied), "cannot be listed (Permission denied)")


def test_a_line_stays_one_line_whatever_the_folder_is_called(folder, tmp_path):
    path = Path(shutil.copytree(folder, tmp_path / "机器人 é"))
    (path / HEAD).write_bytes(b"")
    refusal(path, "机器人 é", HEAD)


def test_a_checkpoint_without_tokenizer_serves_ids_but_no_instruction(copied):
    model = OpenVlaOft.from_checkpoint(copied)
    views = {camera: np.zeros((64, 64, 3), np.uint8) for camera in model.config.cameras}
    for call in (
        model.warm_up,
        lambda: model.infer(Observation(views, np.zeros(8, np.float32), "put the cup down")),
    ):
        with pytest.raises(UserError, match=r"has no tokenizer\.json"):
            call()


def test_a_foreign_or_broken_tokenizer_beside_the_weights_is_refused(copied):
    (copied / "tokenizer.json").write_text("{}")
    refusal(copied, "tokenizer.json", "not a tokenizer")
    (copied / "tokenizer.json").write_text(POINTER)
    refusal(copied, "tokenizer.json", "Git LFS pointer")
    # One that is given stands in for it.
    assert OpenVlaOft.from_checkpoint(copied, tokenizer=NoTokenizer()).info.trained


def test_the_single_file_and_the_shards_are_held_to_the_same_rules(copied):
    (copied / INDEX).unlink()
    tensors = {name: t for shard in SHARDS for name, t in load_file(copied / shard).items()}
    tensors.pop(QKV)
    save_file(tensors, copied / "model.safetensors")
    refusal(copied, "lacks 1 of", QKV)
