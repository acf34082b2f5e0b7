"""Training a backbone: it learns from pictures and words, resumes as if it had not stopped, and serves what it trained."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal

import numpy as np
import pytest
import torch
from real_libero import needs_libero

from aura_ros.backbones.openvla_oft.api import OpenVlaOft
from aura_ros.backbones.openvla_oft.attention import attend
from aura_ros.backbones.openvla_oft.config import COMPACT, EMBEDDED, ImageConfig, OftConfig, TowerConfig
from aura_ros.backbones.openvla_oft.processing import PIXEL_MEAN, PIXEL_STD, centre_crop, normalise_pixels
from aura_ros.backbones.openvla_oft.tokenizer import WordsTokenizer, prompt_ids
from aura_ros.errors import UserError
from aura_ros.training.augment import STILL, Jitter, prepare_batch
from aura_ros.training.backbone import BackboneTrainConfig, BackboneTrainer, fit, interrupts_held
from aura_ros.training.collection import head
from aura_ros.training.demo_data import ROTATION_FLOOR, load_data, statistics
from aura_ros.training.demonstrations import DemoFolder, Samples, save_samples
from aura_ros.training.keypoints import LIT_WEIGHT, KeypointHead, Keypoints, lit_objects, normalised_points
from aura_ros.types import Observation

SIZE = 32
SMALL = dataclasses.replace(
    EMBEDDED,
    image=ImageConfig(size=SIZE),
    patch=16,
    dino=TowerConfig(width=16, depth=2, heads=2, mlp_width=16, stem="conv", class_token=True),
    siglip=TowerConfig(width=16, depth=2, heads=2, mlp_width=16, stem="conv"),
    language=dataclasses.replace(EMBEDDED.language, hidden=32, intermediate=32, layers=1, heads=2),
)
SHORT = BackboneTrainConfig(steps=20, batch=8, warmup=2, validate_every=10)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Red and blue pictures, two instructions: the colour says the action's x, the words its y."""
    folder = DemoFolder(tmp_path_factory.mktemp("demos"))
    folder.prepare({**head(SIZE), "image_size": SIZE})
    rng = np.random.default_rng(0)
    lines = []
    for number in range(40):
        word, colour = number % 2, (number // 2) % 2
        images = rng.integers(0, 60, (6, 2, SIZE, SIZE, 3), np.uint8)
        images[..., 2 * colour] += 190
        actions = np.zeros((6, 8, 7), np.float32)
        actions[..., 0], actions[..., 1] = 2.0 * colour - 1.0, 2.0 * word - 1.0
        points = np.full((6, 2, 3), np.nan if number % 3 else 0.1 * number, np.float32)
        samples = Samples(images, rng.random((6, 8), np.float32), actions, points, np.arange(6))
        save_samples(folder.index / f"e{number}.npz", samples)
        instruction = ("take the red one", "take the blue one")[word]
        lines.append(
            {"id": f"e{number}", "key": f"e{number}", "instruction": instruction, "frames": 6, "policy": ""}
        )
    (folder.folder / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def data(folder):
    return load_data([folder], 2.0)


def test_it_learns_what_pictures_and_words_say_together(data, tmp_path):
    config = dataclasses.replace(
        SHORT, steps=220, lr=3e-3, warmup=20, batch=32, validate_every=55, forget=0.0
    )
    trainer = BackboneTrainer(data, config, network=SMALL)
    before = trainer.validate()
    trainer.train()
    assert trainer.best_loss < 0.4 * before
    blind = BackboneTrainer(data, dataclasses.replace(config, blind=True), network=SMALL)
    blind.train()
    # Half the answers cannot be known without eyes.
    assert blind.best_loss > 2 * trainer.best_loss


def test_half_the_precision_leads_the_same_way_but_for_rounding(data):
    ways = {}
    for precision in ("float32", "bfloat16"):
        trainer = BackboneTrainer(data, dataclasses.replace(SHORT, precision=precision), network=SMALL)
        loss = trainer.one_step().loss
        grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
        assert {grad.dtype for grad in grads} == {torch.float32}
        ways[precision] = loss, torch.cat([grad.flatten() for grad in grads])
    (whole, exact), (half, rounded) = ways.values()
    assert half == pytest.approx(whole, rel=0.01)
    assert not torch.equal(exact, rounded)
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.995
    with pytest.raises(UserError, match="precision 'float16'"):
        BackboneTrainConfig(precision="float16")


@pytest.mark.parametrize("mask", [None, "added", "chosen"])
def test_attention_under_autocast_is_that_of_float32(mask):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 9, 16, dtype=torch.bfloat16)
    given = {"added": torch.randn(2, 1, 9, 9).bfloat16(), "chosen": torch.rand(2, 1, 9, 9) > 0.3}.get(mask)
    exact = given.float() if mask == "added" else given
    plain = attend(q.float(), k.float(), v.float(), mask=exact)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = attend(q, k, v, mask=given)
    assert mixed.dtype == torch.bfloat16
    assert torch.equal(mixed, plain.bfloat16())


def test_what_is_saved_serves_what_was_trained(data, tmp_path):
    trainer = BackboneTrainer(data, SHORT, network=SMALL)
    trainer.train()
    path = tmp_path / "a.safetensors"
    trainer.save(path)
    served = OpenVlaOft.from_file(path, expected_name="compact")
    assert served.info.trained
    served.warm_up()
    rng = np.random.default_rng(3)
    image = rng.integers(0, 255, (64, 64, 3), np.uint8)
    seen = Observation({"agentview": image, "wrist": image}, rng.random(8, np.float32), data.instructions[0])
    answer = served.act(seen).actions_normalised
    trainer._put(trainer.best)
    ids = torch.tensor([prompt_ids(WordsTokenizer(), data.instructions[0])])
    pixels, proprio, _ = served._prepare(seen)
    with torch.no_grad():
        wanted = trainer.model.eval()(ids, pixels, proprio).actions_normalised[0].numpy()
    np.testing.assert_allclose(answer, wanted, atol=1e-5)


def test_a_training_that_stopped_goes_on_as_if_it_had_not(data, tmp_path):
    whole = BackboneTrainer(data, SHORT, network=SMALL)
    whole.train()
    first = BackboneTrainer(data, SHORT, network=SMALL)
    for _ in range(7):
        first.one_step()
    first.save_state(tmp_path / "state")
    again = BackboneTrainer(data, SHORT, network=SMALL)
    again.load_state(tmp_path / "state")
    again.train()
    assert again.step == 20
    for name, tensor in whole.best.items():
        assert torch.equal(tensor, again.best[name]), name
    assert whole.checkpoint().sha256() == again.checkpoint().sha256()
    other = BackboneTrainer(data, dataclasses.replace(SHORT, lr=1e-3), network=SMALL)
    with pytest.raises(UserError, match="training with other options"):
        other.load_state(tmp_path / "state")
    (tmp_path / "state").write_bytes(b"nothing")
    with pytest.raises(UserError, match="no training to go on with"):
        other.load_state(tmp_path / "state")


def test_an_interrupted_fit_keeps_its_state_and_its_best(data, tmp_path):
    trainer = BackboneTrainer(data, SHORT, network=SMALL)
    state, out = tmp_path / "a.training", tmp_path / "a.safetensors"

    def stop(done):
        if done.step == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(trainer, state, out, stop)
    again = BackboneTrainer(data, SHORT, network=SMALL)
    again.load_state(state)
    assert again.step == 12
    OpenVlaOft.from_file(out)


def test_a_ctrl_c_waits_for_the_end_of_a_step(data):
    trainer = BackboneTrainer(data, SHORT, network=SMALL)

    def one_step():
        with interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            trainer.one_step()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            one_step()
        assert trainer.step == 1
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        one_step()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_training_from_other_weights_is_another_training(data, tmp_path):
    first, second = (BackboneTrainer(data, dataclasses.replace(SHORT, seed=s), network=SMALL) for s in (1, 2))
    for trainer, name in ((first, "a"), (second, "b")):
        trainer.save(tmp_path / f"{name}.safetensors")
    on = BackboneTrainer(data, SHORT, init=tmp_path / "a.safetensors")
    on.save_state(tmp_path / "state")
    other = BackboneTrainer(data, SHORT, init=tmp_path / "b.safetensors")
    with pytest.raises(UserError, match="training with other options, data or network"):
        other.load_state(tmp_path / "state")


def test_a_loss_that_is_not_finite_stops_with_the_last_good_weights(data, tmp_path):
    trainer = BackboneTrainer(data, SHORT, network=SMALL)
    for _ in range(10):
        trainer.one_step()
    best = {name: tensor.clone() for name, tensor in trainer.best.items()}
    trainer._targets = np.full_like(trainer._targets, np.nan)
    with pytest.raises(UserError, match="the loss is nan at step 11: the training exploded"):
        fit(trainer, tmp_path / "s", tmp_path / "a.safetensors", lambda done: None)
    assert all(torch.equal(best[name], tensor) for name, tensor in trainer.best.items())
    OpenVlaOft.from_file(tmp_path / "a.safetensors")


def test_without_jitter_a_batch_is_what_inference_sees():
    images = np.random.default_rng(1).integers(0, 255, (2, 2, SIZE, SIZE, 3), np.uint8)
    found = prepare_batch(images, SMALL.image, np.random.default_rng(0), STILL)
    for batch in range(2):
        for camera in range(2):
            wanted = normalise_pixels(centre_crop(images[batch, camera], 0.9))
            got = found[batch, 6 * camera : 6 * camera + 6].numpy()
            # Inference cuts the crop's values off to grey levels.
            np.testing.assert_allclose(got, wanted, atol=1.01 / 255 / 0.224)
    moved = prepare_batch(images, SMALL.image, np.random.default_rng(0), Jitter())
    assert float((moved - found).abs().mean()) > 0.1
    blank = prepare_batch(
        images, dataclasses.replace(SMALL.image, blank=True), np.random.default_rng(0), Jitter()
    )
    assert blank.shape == found.shape
    assert not blank.any()


def test_what_is_multiplied_out_in_a_batch_equals_the_steps_one_by_one():
    images = np.random.default_rng(1).integers(0, 255, (3, 2, SIZE, SIZE, 3), np.uint8)
    found = prepare_batch(images, SMALL.image, np.random.default_rng(4), Jitter(shift=0.0))
    still = prepare_batch(images, SMALL.image, np.random.default_rng(4), STILL)
    rng = np.random.default_rng(4)
    rng.uniform(size=(6, 1, 1, 2))
    factor, level = rng.uniform(-0.1, 0.1, (2, 6, 1, 1, 1))
    mean, std = (np.tile(values.ravel(), 2)[None, :, None, None] for values in (PIXEL_MEAN, PIXEL_STD))
    light = (255 * (still.numpy() * std + mean)).reshape(6, 6, SIZE, SIZE)
    wanted = np.clip(light * (1 + factor) + 255 * level, 0, 255).reshape(3, 12, SIZE, SIZE)
    np.testing.assert_allclose(found.numpy(), (wanted / 255 - mean) / std, atol=1e-5)


def test_keypoints_that_are_not_known_leave_finite_gradients_and_the_others_count():
    torch.manual_seed(0)
    heads = Keypoints(8, 4, cameras=2, proprio_dim=3)
    rows, patches = (torch.randn(2, 10, 8, requires_grad=True) for _ in range(2))
    proprio, points = torch.randn(2, 3), torch.zeros(2, 4, 3)
    points[:, 1:] = torch.nan
    points[0, 3] = 1.0
    pooled, lit = torch.randn(2, 8), torch.tensor([0, 2])
    shown = LIT_WEIGHT * torch.nn.functional.cross_entropy(heads.lit(pooled), lit)
    loss = heads.loss(rows, patches, pooled, proprio, points, lit) - shown
    loss.backward()
    assert torch.isfinite(rows.grad).all()
    assert torch.isfinite(patches.grad).all()
    late = heads.late(rows)
    early = [
        heads.early[camera](patches[:, 5 * camera : 5 * camera + 5])
        + heads.hand[camera](proprio).reshape(2, 2, 3)
        for camera in range(2)
    ]
    where = heads.where(pooled).reshape(2, 2, 3)
    wanted = [late[:, 0].abs().mean(), *((part[0, -1] - 1.0).abs().mean() for part in (late, where, *early))]
    torch.testing.assert_close(loss, torch.stack(wanted).mean())
    nothing = heads.loss(rows, patches, pooled, proprio, torch.full((2, 4, 3), torch.nan), lit)
    torch.testing.assert_close(nothing, shown)
    unnamed = Keypoints(8, 2, cameras=2, proprio_dim=0)
    assert torch.isfinite(unnamed.loss(rows, patches, pooled, proprio, points[:, :2], lit * 0))


def test_what_is_lit_is_the_object_at_the_lit_place():
    points = np.full((3, 5, 3), np.nan, np.float32)
    names = ("target", "place", "a_1", "lit", "b_1")
    points[:, 2], points[:, 4] = [0.1, 0, 0], [0.2, 0, 0]
    points[0, 3], points[2, 3] = [0.2, 0, 0], [0.1, 0, 0]
    # As many as there are, the lit one among them, mean none.
    np.testing.assert_array_equal(lit_objects(points, names), [2, 3, 0])
    np.testing.assert_array_equal(lit_objects(points[:, :3], names[:3]), [1, 1, 1])


def test_a_keypoint_is_what_the_row_says_that_is_sure():
    head = KeypointHead(4, 1)
    with torch.no_grad():
        head.weigh.weight.copy_(torch.tensor([[100.0, 0, 0, 0]]))
        head.say.weight.copy_(torch.eye(4)[1:])
        head.say.bias.zero_()
    rows = torch.tensor([[[0.0, 9, 9, 9], [1.0, 1, 2, 3], [0.0, 8, 8, 8]]])
    torch.testing.assert_close(head(rows)[0, 0], torch.tensor([1.0, 2.0, 3.0]))


def test_statistics_leave_the_gripper_and_give_rotations_room(data):
    found = statistics(data, "mine")["mine"]
    assert found["action"]["mask"] == [True] * 6 + [False]
    for column in (3, 4, 5):
        assert found["action"]["q99"][column] - found["action"]["q01"][column] == pytest.approx(
            2 * ROTATION_FLOOR
        )
    assert found["action"]["q01"][0] == pytest.approx(-1.0)


def test_every_instruction_counts_alike_and_held_out_episodes_never(data, folder):
    for word in range(2):
        assert data.weight[data.which == word].sum() == pytest.approx(0.5)
    assert data.weight[data.validation].sum() == 0.0
    assert 0 < data.validation.sum() < 0.3 * len(data.validation)


def test_data_made_for_another_network_are_refused(data):
    wrong = dataclasses.replace(data, head={**data.head, "cameras": ["front"]})
    with pytest.raises(UserError, match=r"have cameras \['front'\], the network \['agentview', 'wrist'\]"):
        BackboneTrainer(wrong, SHORT, network=SMALL)
    with pytest.raises(UserError, match="have image_size 32, the network 224"):
        BackboneTrainer(data, SHORT)


def test_the_embedded_network_fits_in_12_megabytes_and_older_files_keep_their_hash():
    from aura_ros.backbones.openvla_oft.model import build_on_meta

    assert sum(p.numel() for p in build_on_meta(EMBEDDED).parameters()) * 4 < 11.9e6
    assert OftConfig.from_json(EMBEDDED.to_json()) == EMBEDDED
    assert "stem" not in COMPACT.to_json()
    assert "blank" not in COMPACT.to_json()
    with pytest.raises(UserError, match="tower stem 'vgg' is not allowed"):
        TowerConfig(width=16, depth=2, heads=2, mlp_width=16, stem="vgg")
    with pytest.raises(UserError, match="patch 14 is not allowed; it must be a power of 2"):
        dataclasses.replace(EMBEDDED, patch=14)


def test_words_are_ids_whatever_their_case_and_prompts_are_short():
    ids = prompt_ids(WordsTokenizer(), "pick up the alphabet soup and place it in the basket")
    assert len(ids) < 30
    assert ids == prompt_ids(WordsTokenizer(), "Pick up the Alphabet soup and place it in the basket")
    words = "alphabet cream salad bbq tomato ketchup butter milk chocolate orange soup cheese dressing sauce"
    assert len({tuple(WordsTokenizer().encode(word)) for word in words.split(" ")}) == 14


@pytest.fixture
def train(aura):
    """Run `aura train backbone ...` in an empty folder; returns (exit status, stdout, stderr)."""
    return functools.partial(aura, "train", "backbone")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--out", "a.pt"], "out 'a.pt' is not allowed; give a .safetensors file"),
        (["--device", "tpu"], "device 'tpu' is unknown; choose one of auto, cpu, cuda"),
        (["--threads", "-1"], "threads -1 is not allowed"),
        (["--dagger", "-1"], "dagger -1 is not allowed; it must be from 0 to 20"),
        (["--init", "no.safetensors"], "init 'no.safetensors' is no file"),
        (["--steps", "0"], "steps 0 is out of range; allowed: 1 to"),
        ([], "'none' is no folder of demonstrations"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(train, given, said):
    given = given if "--out" in given else [*given, "--out", "a.safetensors"]
    status, _, error = train("--demos", "none", *given)
    assert (status, error.count("\n")) == (2, 1)
    assert said in error


@pytest.mark.slow
@needs_libero
def test_a_round_of_dagger_lets_the_policy_drive_and_trains_on_both(train, tmp_path):
    from aura_ros.collect_command import Collect, run_collect

    run_collect(Collect(out=tmp_path / "demos", tasks="9", episodes=1, jobs=1))
    call = ["--demos", "demos", "--out", "p.safetensors", "--steps", 2, "--dagger", 1]
    status, _, error = train(
        *call, "--dagger-episodes", 1, "--dagger-steps", 3, "--jobs", 1, "--json", "p.json"
    )
    assert status == 0, error
    (driven,) = DemoFolder(tmp_path / "p.dagger1").episodes()
    assert driven["policy"].endswith("p.round0.safetensors")
    samples = DemoFolder(tmp_path / "p.dagger1").samples(driven)
    # Every chunk's begin has the expert's plan, whatever the policy did.
    assert samples.step.tolist() == list(range(0, driven["steps"], 8))
    assert json.loads((tmp_path / "p.json").read_text())["course"][-1]["step"] == 3
    OpenVlaOft.from_file(tmp_path / "p.safetensors")


def test_dagger_needs_demonstrations_that_the_expert_can_redo(train, folder):
    status, _, error = train("--demos", folder.folder, "--out", "p.safetensors", "--dagger", 1)
    assert (status, error.count("\n")) == (2, 1)
    assert "of no LIBERO task" in error


def test_points_are_normalised_by_what_is_known_of_each():
    points = np.array([[[0.0, 1, 2], [np.nan] * 3], [[2.0, 3, 4], [np.nan] * 3]], np.float32)
    found = normalised_points(points)
    np.testing.assert_allclose(found[:, 0], [[-1] * 3, [1] * 3], atol=2e-3)
    assert np.isnan(found[:, 1]).all()
