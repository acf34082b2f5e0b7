"""Each known mistake, made on purpose: what it costs in the actions, and which check refuses it.

`pytest -s` prints the table. Costs are the largest difference of an un-normalised action from the reference.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from oft_folder import STATISTICS, film_state, golden_tensors, part, write_folder, write_json, write_part
from openvla_oft_tiny import DATA, NoTokenizer, golden, prompt_tensor, tiny_model

from aura_ros.backbones.openvla_oft import api, inputs
from aura_ros.backbones.openvla_oft.api import OpenVlaOft
from aura_ros.backbones.openvla_oft.config import OPENVLA_OFT_7B
from aura_ros.backbones.openvla_oft.layout import LLAMA_DEFAULTS, FolderOptions
from aura_ros.backbones.openvla_oft.model import OftModel
from aura_ros.backbones.openvla_oft.processing import orient, prepare_image
from aura_ros.errors import UserError
from aura_ros.types import Observation

PLACEHOLDER_ID = 1  # what the reference fills the rows with before it zeroes them
KEY = "libero_10_no_noops"
START, LOAD = "warm_up", "loading"


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    return golden()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("oft") / "checkpoint", dtype=torch.float32)


@pytest.fixture
def copied(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "checkpoint"))


@pytest.fixture(scope="module")
def table():
    rows: dict[str, tuple[float | None, str]] = {}
    yield rows
    print("\n| mistake | cost | caught by |\n| --- | --- | --- |")
    for mistake, (cost, caught) in rows.items():
        print(f"| {mistake} | {'cannot run' if cost is None else f'{cost:.2g}'} | {caught} |")


def swapped(pixels: np.ndarray, size: int) -> np.ndarray:
    """Neighbouring groups of `size` channels exchanged."""
    groups = pixels.reshape(*pixels.shape[:-3], -1, 2, size, *pixels.shape[-2:])
    return np.ascontiguousarray(groups[..., ::-1, :, :, :].reshape(pixels.shape))


def actions_of(model: OpenVlaOft, recorded, **changes) -> np.ndarray:
    given = {name: recorded[f"in.{name}"] for name in ("input_ids", "pixel_values", "proprio_normalised")}
    return model.predict(**{**given, **changes}).actions


def cost_of(actions: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actions - expected).max())


# Each takes a fresh model and breaks its network as a mistake in the code would.
def causal(net: OftModel) -> None:
    def mask(self, rows, valid, device):
        return torch.ones(1, 1, rows, rows, dtype=torch.bool).tril()

    net.language_model.attention_mask = types.MethodType(mask, net.language_model)


def head_slice_by_one(net: OftModel) -> None:
    rows = net.action_rows
    net.action_rows = lambda hidden, ids, lengths=None: rows(hidden[:, 1:], ids, lengths)


def no_end_of_sequence(net: OftModel) -> None:
    assemble = net.assemble
    net.assemble = lambda *args: (assemble(*args)[0][:, :-1], None)


def zeroed_end_of_sequence(net: OftModel) -> None:
    def zeroed(*args):
        embeds = assemble(*args)[0].clone()
        embeds[:, -1] = 0
        return embeds, None

    assemble = net.assemble
    net.assemble = zeroed


def placeholders_not_zeroed(net: OftModel) -> None:
    def filled(ids, prefix, lengths=None, placeholders=None):
        words = net.language_model.embed(ids.new_full((1, net.config.placeholders), PLACEHOLDER_ID))
        return assemble(ids, prefix, lengths, words)

    assemble = net.assemble
    net.assemble = filled


def prompt_before_images(net: OftModel) -> None:
    def moved(ids, prefix, *args):
        embeds = assemble(ids, prefix, *args)[0]
        images, words = prefix.shape[1], ids.shape[1] - 1
        parts = embeds.split([1, images, words, embeds.shape[1] - 1 - images - words], dim=1)
        return torch.cat([parts[0], parts[2], parts[1], parts[3]], dim=1), None

    assemble = net.assemble
    net.assemble = moved


def rotary_of_another_base(net: OftModel) -> None:
    net.language_model.model.rotary_emb.inv_freq = 1.0 / 500_000 ** (torch.arange(0, 16, 2) / 16)


NETWORK = {
    "causal attention": (causal, 0.415, "attention is causal with transformers"),
    "head reads one row further": (head_slice_by_one, 0.188, "the head reads rows"),
    "no </s>": (no_end_of_sequence, 0.178, "the sequence has"),
    "</s> zeroed with the placeholders": (zeroed_end_of_sequence, 0.05, "the last row is not </s>"),
    "placeholders not zeroed": (placeholders_not_zeroed, 1.085, "the placeholders are not zero"),
    "prompt before the images": (prompt_before_images, 0.05, "the prompt is not where it belongs"),
    "rotary frequencies of Llama-3": (rotary_of_another_base, 0.01, "rotary frequencies"),
}


@pytest.mark.parametrize("mistake", NETWORK)
def test_a_mistake_in_the_network_is_refused_at_start_up(mistake, recorded, table):
    break_it, least, message = NETWORK[mistake]
    model = tiny_model()
    model.warm_up()
    break_it(model.model)
    cost = cost_of(actions_of(model, recorded), recorded["A.actions"])
    # The known costs were measured on the reference: the mistake made here is the same one.
    assert cost >= least - 0.005
    with pytest.raises(UserError, match=message) as error:
        model.warm_up()
    assert "\n" not in str(error.value)
    table[mistake] = (cost, f"{START}: {message}")


def test_casting_the_rotary_frequencies_with_the_weights_is_refused_at_start_up(recorded, table):
    model = tiny_model(dtype="bfloat16")
    model.warm_up()
    model.model.to(torch.bfloat16)
    assert model.model.language_model.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own flags() sets a deprecated one
        with torch.backends.mkldnn.flags(enabled=False):
            cost = cost_of(actions_of(model, recorded), recorded["H.actions"])
    assert cost == pytest.approx(0.015, abs=0.001)
    with pytest.raises(UserError, match=r"rotary frequencies are torch\.bfloat16"):
        model.warm_up()
    table["inv_freq cast to bfloat16 (in bfloat16)"] = (cost, f"{START}: rotary frequencies")


PROMPTS = {
    "no 29871 at the end": (slice(0, -1), 0.11),
    "no BOS": (slice(1, None), 0.01),
}


@pytest.mark.parametrize("mistake", PROMPTS)
def test_a_prompt_without_its_first_or_last_token_is_refused_at_start_up(
    mistake, recorded, table, monkeypatch
):
    kept, least = PROMPTS[mistake]
    model = tiny_model()
    ids = prompt_tensor(recorded["in.input_ids"])[:, kept]
    pixels, proprio = (torch.from_numpy(recorded[f"in.{n}"]) for n in ("pixel_values", "proprio_normalised"))
    with torch.inference_mode():
        normalised = model.model(ids, pixels, proprio[None]).actions_normalised[0].numpy()
    actions = api.unnormalise_actions(normalised.astype(np.float64), model.statistics.action)
    cost = cost_of(actions, recorded["A.actions"])
    assert cost >= least
    made = inputs.prompt_ids
    monkeypatch.setattr(inputs, "prompt_ids", lambda *args: made(*args)[kept])
    with pytest.raises(UserError, match=r"the prompt begins and ends in the tokens"):
        model.warm_up()
    table[mistake] = (cost, f"{START}: first and last token of the prompt")


def test_pixel_channels_of_the_towers_swapped_are_refused_at_start_up(recorded, table, monkeypatch):
    model = tiny_model()
    cost = cost_of(
        actions_of(model, recorded, pixel_values=swapped(recorded["in.pixel_values"], 3)),
        recorded["A.actions"],
    )
    assert cost == pytest.approx(0.727, abs=0.005)
    made = OpenVlaOft._pixels
    monkeypatch.setattr(OpenVlaOft, "_pixels", lambda *args: swapped(made(*args), 3))
    with pytest.raises(UserError, match=r"images are prepared wrongly.*DINOv2's three channels before"):
        model.warm_up()
    table["DINO and SigLIP channels swapped"] = (cost, f"{START}: known grey images")


def test_cameras_swapped_in_the_code_are_refused_and_in_the_topics_recorded(recorded, table, monkeypatch):
    model = tiny_model()
    other = swapped(recorded["in.pixel_values"], 6)
    cost = cost_of(actions_of(model, recorded, pixel_values=other), recorded["A.actions"])
    assert cost == pytest.approx(0.107, abs=0.005)
    made = OpenVlaOft._pixels
    with monkeypatch.context() as patch:
        patch.setattr(OpenVlaOft, "_pixels", lambda *args: swapped(made(*args), 6))
        with pytest.raises(UserError, match=r"expected \['agentview', 'wrist'\] in this order"):
            model.warm_up()
    table["cameras swapped (in the code)"] = (cost, f"{START}: a grey of its own for each camera")
    # From two topics that were exchanged nothing can be told; the order is on record.
    model.warm_up()
    assert model.info.cameras == ("agentview", "wrist")
    table["cameras swapped (two topics exchanged)"] = (
        cost,
        "nothing; `PolicyInfo.cameras` records the order",
    )


def frames() -> dict[str, np.ndarray]:
    """The true view of two frames: the reference's input is LIBERO's buffer turned by 180 degrees."""
    with np.load(DATA / "golden_preprocess.npz") as stored:
        return {
            "agentview": stored["sim256.in"][:, ::-1],
            "wrist": stored["cam480x640.in"][:, ::-1],
        }


def seen(model: OpenVlaOft, turn=lambda image: image) -> np.ndarray:
    images = {camera: np.ascontiguousarray(turn(image)) for camera, image in frames().items()}
    return model.act(Observation(images, np.zeros(8, np.float32), "put the bowl in the basket")).actions


@pytest.mark.parametrize("mirrored", [0, 2])
def test_a_frame_not_mirrored_once_in_the_code_is_refused_at_start_up(mirrored, table, monkeypatch):
    model = tiny_model()
    right = seen(model)

    def mistaken(image, config):
        again = orient(image, True) if mirrored == 2 else image
        return prepare_image(again, dataclasses.replace(config, mirror=mirrored == 2))

    # However the images are handed over, `_pixels` is where an observation becomes the network's input.
    def pixels(self, observation):
        views = (observation.images[camera] for camera in self.config.cameras)
        return np.concatenate([mistaken(view, self.config.image) for view in views])

    monkeypatch.setattr(OpenVlaOft, "_pixels", pixels)
    cost = cost_of(seen(model), right)
    assert cost > 0.01
    with pytest.raises(UserError, match=r"images are prepared wrongly.*mirrored"):
        model.warm_up()
    table[f"frame mirrored {mirrored} times (in the code)"] = (cost, f"{START}: brighter right half")


TURNS = {
    "frame already mirrored by the camera driver": lambda image: image[:, ::-1],
    "frame turned by 180 degrees": lambda image: image[::-1, ::-1],
    "frame upside down (MuJoCo's raw buffer)": lambda image: image[::-1],
}


@pytest.mark.parametrize("mistake", TURNS)
def test_a_frame_turned_before_it_arrives_costs_and_is_on_record(mistake, table):
    model = tiny_model()
    cost = cost_of(seen(model, TURNS[mistake]), seen(model))
    assert cost > 0.01
    model.warm_up()
    assert model.info.image_rotation.startswith("mirror left-right -> ")
    table[mistake] = (cost, "nothing; `PolicyInfo.image_rotation` records the one mirror")


def test_another_number_of_cameras_is_refused_with_the_first_images(folder, recorded, table):
    two = OpenVlaOft.from_checkpoint(folder, dtype="float32", tokenizer=NoTokenizer())
    one = OpenVlaOft.from_checkpoint(
        folder, dtype="float32", tokenizer=NoTokenizer(), options=FolderOptions(cameras=("agentview",))
    )
    views = frames()
    missing = Observation({"agentview": views["agentview"]}, np.zeros(8, np.float32), "lift")
    with pytest.raises(UserError, match=r"camera 'wrist' is missing"):
        two.infer(missing)
    with pytest.raises(UserError, match=r"1 cameras \['agentview'\] need \[1, 6, 56, 56\]"):
        actions_of(one, recorded)
    cost = cost_of(
        actions_of(one, recorded, pixel_values=recorded["in.pixel_values"][:, :6]), recorded["A.actions"]
    )
    assert cost > 0.05
    assert one.info.cameras == ("agentview",)
    table["a camera's image missing"] = (None, "the first query: camera 'wrist' is missing")
    table["option `cameras` names one of two"] = (cost, "nothing; `PolicyInfo.cameras` records it")


def test_an_unknown_unnormalisation_key_is_refused_and_a_wrong_one_kept(copied, recorded, table):
    other = json.loads(json.dumps(STATISTICS[KEY]))
    for name in ("q01", "q99"):
        other["action"][name] = [2 * value for value in other["action"][name]]
    write_json(copied / "dataset_statistics.json", {KEY: STATISTICS[KEY], "libero_goal_no_noops": other})
    with pytest.raises(UserError, match=rf"'libero' is unknown; choose one of: {KEY}, libero_goal"):
        OpenVlaOft.from_checkpoint(copied, unnorm_key="libero")
    with pytest.raises(UserError, match="choose one as un-normalisation key"):
        OpenVlaOft.from_checkpoint(copied)
    model = OpenVlaOft.from_checkpoint(copied, dtype="float32", unnorm_key="libero_goal_no_noops")
    cost = cost_of(actions_of(model, recorded), recorded["A.actions"])
    assert cost > 0.1
    assert model.statistics.key == "libero_goal_no_noops"
    table["un-normalisation key unknown or not chosen"] = (None, f"{LOAD}: lists the valid keys")
    table["un-normalisation key of another suite"] = (cost, "nothing; the key in use is `statistics.key`")


def test_an_adapter_beside_the_weights_is_not_merged_a_second_time(folder, copied, recorded, table):
    adapter = film_state(32, torch.float32)
    twice = golden_twice(adapter)
    (copied / "lora_adapter").mkdir()
    torch.save(adapter, copied / "lora_adapter" / "adapter_model.bin")
    model = OpenVlaOft.from_checkpoint(copied, dtype="float32")
    assert model.weights_sha256() == OpenVlaOft.from_checkpoint(folder, dtype="float32").weights_sha256()
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if name in twice:
                parameter.copy_(twice[name])
    cost = cost_of(actions_of(model, recorded), recorded["A.actions"])
    assert cost > 0.05
    table["LoRA merged twice"] = (cost, f"{LOAD}: `lora_adapter` is never read")


def golden_twice(adapter: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    merged = {}
    for name, up in adapter.items():
        if name.endswith(".lora_B.default.weight"):
            down = adapter[name.replace("lora_B", "lora_A")]
            plain = name.replace(".block.", ".").replace(".lora_B.default", "")
            merged[plain] = golden_tensors()[plain] + 0.5 * (up @ down)
    return merged


def test_film_demanded_without_its_file_is_refused(folder, recorded, table):
    with pytest.raises(UserError, match="is to use FiLM but has no 'vision_backbone--"):
        OpenVlaOft.from_checkpoint(folder, options=FolderOptions(film=True))
    model = OpenVlaOft.from_checkpoint(folder, dtype="float32")
    cost = cost_of(actions_of(model, recorded), recorded["F.actions"])
    assert cost > 0.05
    table["FiLM file missing"] = (cost, f"{LOAD}, with option `film` true; the folder does not say so itself")


def test_the_tokenizer_of_another_model_is_refused_at_start_up(copied, recorded, table):
    tokens = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", "In", "Out"])}
    model = {"type": "BPE", "vocab": tokens, "merges": [], "unk_token": "<unk>", "fuse_unk": True}
    write_json(copied / "tokenizer.json", {"version": "1.0", "added_tokens": [], "model": model})
    foreign = OpenVlaOft.from_checkpoint(copied, dtype="float32")
    shifted = np.where(recorded["in.input_ids"] > 2, recorded["in.input_ids"] + 1, recorded["in.input_ids"])
    cost = cost_of(actions_of(foreign, recorded, input_ids=shifted), recorded["A.actions"])
    assert cost > 0.05
    with pytest.raises(UserError, match=r"is not Llama-2's tokenizer: it has 5 tokens"):
        foreign.warm_up()
    table["tokenizer of another model (ids by one)"] = (cost, f"{START}: ids of a known prompt")


def test_a_head_of_another_width_is_refused_on_loading(copied, table):
    head = {**part("action_head."), "model.fc2.weight": torch.zeros(6, 64), "model.fc2.bias": torch.zeros(6)}
    write_part(copied, "action_head", head, torch.float32, ".pt")
    with pytest.raises(UserError, match="6 action and 8 state values, of no robot known here"):
        OpenVlaOft.from_checkpoint(copied)
    table["head of another width"] = (None, f"{LOAD}: sizes of the tensors")


def test_a_head_that_is_lost_is_refused_on_loading(copied, recorded, table):
    next(copied.glob("action_head--*")).unlink()
    with pytest.raises(UserError, match=r"no 'action_head--\*_checkpoint\.pt'"):
        OpenVlaOft.from_checkpoint(copied)
    model = OpenVlaOft.from_checkpoint(copied, dtype="float32", options=FolderOptions(head="discrete"))
    cost = cost_of(actions_of(model, recorded), recorded["A.actions"])
    assert cost > 0.5
    table["head file lost (tokens read instead)"] = (cost, f"{LOAD}: other parts are there, the head is not")


def test_a_proprio_file_that_is_lost_is_on_record(copied, recorded, table):
    next(copied.glob("proprio_projector--*")).unlink()
    model = OpenVlaOft.from_checkpoint(copied, dtype="float32")
    cost = cost_of(actions_of(model, recorded), recorded["A.actions"])
    assert cost > 0.01
    assert model.info.proprio_dim == 0
    table["proprioception's file lost"] = (
        cost,
        "nothing; `info.proprio_dim` is 0, a checkpoint may have none",
    )


def test_the_statistics_of_another_robot_are_refused_on_loading(copied, table):
    for section, columns in (("action", 14), ("proprio", 7)):
        entry = json.loads(json.dumps(STATISTICS[KEY]))
        entry[section] = {name: (values * 2)[:columns] for name, values in entry[section].items()}
        write_json(copied / "dataset_statistics.json", {"aloha": entry})
        with pytest.raises(UserError, match=rf"'aloha' have {columns} {section} columns; the model has"):
            OpenVlaOft.from_checkpoint(copied)
    table["statistics of another robot"] = (None, f"{LOAD}: columns against the tensors")


def test_a_default_of_plain_llama_is_told_from_the_7b(recorded, table):
    model = tiny_model()
    for module in model.model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5
    cost = cost_of(actions_of(model, recorded), recorded["A.actions"])
    assert cost > 0
    assert LLAMA_DEFAULTS["rms_norm_eps"] == OPENVLA_OFT_7B.language.rms_norm_eps == 1e-6
    table["rms_norm_eps 1e-5, Llama-2's own"] = (
        cost,
        "tests only: stated in the code, compared with the 7B's",
    )
