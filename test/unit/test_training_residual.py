"""A memory trained as a residual: on rollouts as bags hold them, resumable, and for one backbone alone."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json

import numpy as np
import pytest
import torch

from aura_ros.errors import UserError
from aura_ros.memory import MemoryConfig, NumpyMemory
from aura_ros.memory.baseline_config import BaselineConfig
from aura_ros.memory.baseline_file import load_baseline
from aura_ros.memory.module import load_module
from aura_ros.training.demo_bags import Recording, write_recording
from aura_ros.training.residual import ResidualTrainConfig, ResidualTrainer
from aura_ros.training.residual_files import load_state, save_state
from aura_ros.training.rollouts import RolloutFolder, index_rollout, load_rollouts, save_rollout
from aura_ros.training.train import run_memory

HIDDEN, HORIZON, DIM = 12, 8, 7
PERIOD_NS = 50_000_000
HASH = "b" * 64


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def recording(rng, cue, *, asked=4, held=6):
    """Hidden states of which one shows a cue among distractors; afterwards the first action is +-0.5 of the backbone's."""
    rollout = Recording("go where it lit up", ())
    shown = int(rng.integers(0, held - 1))
    for query in range(held + asked):
        hidden = 0.1 * rng.standard_normal(HIDDEN).astype(np.float32)
        if query == shown:
            hidden[cue] += 2.0
        elif query < held and rng.random() < 0.3:
            hidden[2] += 2.0
        hidden[3] = float(query >= held)
        base = rng.uniform(-0.3, 0.3, (HORIZON, DIM)).astype(np.float32)
        stamp = 8 * query * PERIOD_NS
        rollout.latents[stamp] = (hidden, base)
        if query >= held:
            right = base.copy()
            right[:, 0] += 0.5 if cue else -0.5
            rollout.actions.append((stamp, right))
    return rollout, shown


def head(**changes):
    return {
        "format": 1,
        "backbone": HASH,
        "hidden_dim": HIDDEN,
        "memory_step_period": 8,
        "horizon": HORIZON,
        "period_s": 0.05,
        "action_names": ["x", "y", "z", "roll", "pitch", "yaw", "gripper"],
        **changes,
    }


def fill(path, episodes=40, seed=0, **changes):
    """A folder of rollouts, as `aura collect --latents` makes it."""
    folder = RolloutFolder(path)
    folder.prepare(head(**changes))
    rng = np.random.default_rng(seed)
    with (path / "episodes.jsonl").open("w") as stream:
        for number in range(episodes):
            name = f"e{number:03d}"
            made, shown = recording(rng, number % 2)
            write_recording(folder.bags / name, made)
            rollout = index_rollout(folder.bags / name)
            save_rollout(folder.index / f"{name}.npz", rollout)
            line = {
                "key": name,
                "id": name,
                "suite": "cue_object",
                "task": 0,
                "cue": number % 2,
                "held": 48,
                "fixture_seed": number // 2,
                "cue_steps": [8 * shown, 8 * shown + 8],
                "frames": len(rollout),
            }
            stream.write(json.dumps(line) + "\n")
    return folder


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("rollouts"))


def memory(**changes):
    return MemoryConfig(
        **{
            "input_dim": HIDDEN,
            "out_dim": HORIZON * DIM,
            "input_kind": "projection",
            "d_model": 16,
            "hidden": 16,
            "dk": 8,
            "dv": 8,
            "residual": True,
            "head_input": "read_and_z",
            "head_hidden": 32,
            "memory_step_period": 8,
            "backbone": HASH,
            **changes,
        }
    )


def test_a_bag_gives_back_what_was_seen_and_what_was_right(tmp_path):
    made, _ = recording(np.random.default_rng(3), 1)
    write_recording(tmp_path / "bag", made)
    found = index_rollout(tmp_path / "bag")
    assert found.step.tolist() == [8 * query for query in range(10)]
    hidden, base = (np.stack(parts) for parts in zip(*made.latents.values(), strict=True))
    np.testing.assert_array_equal(found.hidden, hidden)
    np.testing.assert_allclose(found.base, base, atol=1e-6)
    # In the hold nothing was asked.
    assert np.isnan(found.target[:6]).all()
    np.testing.assert_allclose(found.target[6:], np.stack([rows for _, rows in made.actions]), atol=1e-6)


def test_a_bag_without_hidden_states_or_actions_is_refused_by_name(tmp_path):
    made, _ = recording(np.random.default_rng(3), 1)
    silent = dataclasses.replace(made, actions=[])
    write_recording(tmp_path / "silent", silent)
    with pytest.raises(UserError, match="silent' has no messages on 'action': there is nothing to imitate"):
        index_rollout(tmp_path / "silent")
    blind = dataclasses.replace(made, latents={})
    write_recording(tmp_path / "blind", blind)
    with pytest.raises(UserError, match="blind' has no hidden states; record it with publish_latent"):
        index_rollout(tmp_path / "blind")


def test_the_gate_writes_what_it_needs_and_little_else(rollouts):
    data = load_rollouts([rollouts])
    trainer = ResidualTrainer(data, memory(), ResidualTrainConfig(steps=600, batch=16, gamma=0.1))
    trainer.train()
    error, rate, (wrote, cued) = trainer.judge()
    assert (error, rate) == trainer.validate()
    assert error < 0.35
    assert wrote == cued > 0
    # One of ten queries shows the cue.
    assert 0.05 < rate < 0.35


def test_a_batch_mixes_holds_of_the_same_cue_alone_and_leaves_some_untold(rollouts):
    data = load_rollouts([rollouts])
    config = ResidualTrainConfig(recombine=1.0, untold=0.5)
    trainer, rng = ResidualTrainer(data, memory(), config), np.random.default_rng(0)
    trained = np.flatnonzero(~trainer.held)
    told = 0
    for episode in rng.choice(trained, 400):
        ((other, first, last), (own, begin, end)), untold = trainer._pieces(int(episode), rng)
        assert (own, begin, end) == (episode, 6, data.lengths[episode])
        assert data.lines[other]["cue"] == data.lines[own]["cue"]
        assert not trainer.held[other]
        shown = data.lines[other]["cue_steps"][0] // 8
        # It begins before the cue, and ends before it or with the hold.
        assert first <= shown
        assert last == (shown if untold else 6)
        told += last == 6
    assert 150 < told < 260
    assert trainer._pieces(3, None) == ([(3, 0, data.lengths[3])], False)
    plain = ResidualTrainer(data, memory(), dataclasses.replace(config, recombine=0.0, untold=0.0))
    assert all(plain._pieces(e, rng)[0][0][::2] == (e, 6) for e in range(40))


def test_where_nothing_was_told_nothing_is_to_be_changed(rollouts):
    data = load_rollouts([rollouts])
    rng = np.random.default_rng(0)
    for untold in (0.0, 1.0):
        trainer = ResidualTrainer(data, memory(), ResidualTrainConfig(untold=untold))
        batch = trainer._batch(np.flatnonzero(~trainer.held), rng)
        gap = (batch.target - batch.base)[batch.asked].abs()
        assert batch.asked.any()
        assert (float(gap.max()) == 0) == (untold == 1)
        assert bool(batch.told.all()) == (untold == 0)


def test_silence_is_taken_for_neither_target(rollouts):
    data = load_rollouts([rollouts])
    trainer = ResidualTrainer(data, memory(), ResidualTrainConfig(steps=600, batch=16))
    trainer.train()
    rng, said = np.random.default_rng(0), {}
    for untold in (0.0, 1.0):
        trainer.config = dataclasses.replace(trainer.config, untold=untold, state_noise=0.0)
        batch = trainer._batch(np.flatnonzero(~trainer.held), rng)
        with torch.no_grad():
            done = run_memory(trainer.module.eval(), batch.inputs)
            output, _, _ = trainer.module.head(done.reads, done.encoded)
        said[untold] = float(output[batch.asked].abs().mean())
    assert said[1.0] < said[0.0] / 3


def test_validation_holds_whole_states_out(rollouts):
    trainer = ResidualTrainer(load_rollouts([rollouts]), memory(), ResidualTrainConfig())
    states = {held: set() for held in (True, False)}
    for line, held in zip(trainer.data.lines, trainer.held, strict=True):
        states[bool(held)].add(line["fixture_seed"])
    assert states[True]
    assert not states[True] & states[False]


def test_no_memory_can_do_no_better_than_guess(rollouts):
    data = load_rollouts([rollouts])
    config = ResidualTrainConfig(steps=200, batch=16, validate_every=200)
    trainer = ResidualTrainer(data, memory(variant="no_memory"), config)
    trainer.train()
    assert trainer.validate()[0] > 0.9


@pytest.mark.parametrize(
    "config",
    [
        memory(),
        BaselineConfig(
            input_dim=HIDDEN,
            out_dim=HORIZON * DIM,
            input_kind="projection",
            residual=True,
            head_input="read_and_z",
            head_hidden=32,
        ),
    ],
)
def test_the_finished_memory_takes_hidden_states_as_they_are(rollouts, config):
    data = load_rollouts([rollouts])
    trainer = ResidualTrainer(data, config, ResidualTrainConfig(steps=5, batch=8))
    trainer.train()
    finished, steps = trainer.finished(), torch.from_numpy(data.hidden[:3])
    standard = torch.from_numpy(((data.hidden[:3] - trainer.mean) / trainer.spread).astype(np.float32))
    with torch.no_grad():
        for module, inputs in ((finished, steps), (trainer.module, standard)):
            z = module.encoder(inputs)
            outputs = module.to_q(z), module.to_k(z)
            if module is finished:
                wanted = outputs
        for one, other in zip(wanted, outputs, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_training_that_was_stopped_goes_on_as_if_it_had_not(rollouts, tmp_path):
    data = load_rollouts([rollouts])
    config = ResidualTrainConfig(steps=12, batch=8, validate_every=4)
    whole = ResidualTrainer(data, memory(), config)
    whole.train()
    stopped = ResidualTrainer(data, memory(), config)
    for _ in range(5):
        stopped.one_step()
    save_state(stopped, tmp_path / "m.training")
    resumed = ResidualTrainer(data, memory(), config)
    load_state(resumed, tmp_path / "m.training")
    resumed.train()
    for name, tensor in whole.module.state_dict().items():
        assert torch.equal(tensor, resumed.module.state_dict()[name]), name
    assert whole.course == resumed.course
    other = ResidualTrainer(data, memory(), dataclasses.replace(config, seed=1))
    with pytest.raises(UserError, match="is a training with other options or rollouts; give --fresh"):
        load_state(other, tmp_path / "m.training")


def test_an_explosion_is_told_and_ends_it(rollouts):
    data = load_rollouts([rollouts])
    data = dataclasses.replace(data, base=np.full_like(data.base, np.nan))
    trainer = ResidualTrainer(data, memory(), ResidualTrainConfig(steps=12, batch=8))
    with pytest.raises(UserError, match="training exploded: no gradient was finite .* lower lr"):
        trainer.train()


def test_a_bag_that_does_not_say_whose_hidden_states_it_has_is_refused(aura, tmp_path):
    made, _ = recording(np.random.default_rng(3), 1)
    write_recording(tmp_path / "bag", made)
    status, _, error = aura("index", "--latents", "bag", "--out", "r")
    assert (status, error.count("\n")) == (2, 1)
    assert "bag 'bag' has no PolicyInfo" in error


def test_queries_at_another_period_than_the_folder_s_are_refused(tmp_path):
    folder = fill(tmp_path / "a", 2, memory_step_period=4)
    with pytest.raises(UserError, match=r"a' has e000 with queries 8 control steps apart, not 4; leave that"):
        load_rollouts([folder])


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"backbone": "c" * 64}, "backbone"), ({"memory_step_period": 4}, "memory_step_period")],
)
def test_rollouts_of_two_backbones_or_periods_are_refused_and_both_named(tmp_path, changed, said):
    folders = [fill(tmp_path / "a", 2), fill(tmp_path / "b", 2, **changed)]
    with pytest.raises(UserError, match=rf"b' has {said} .*{next(iter(changed.values()))}.*, '.*a' "):
        load_rollouts(folders)


@pytest.fixture
def train(aura):
    """Run `aura train memory ...` in an empty folder; returns (exit status, stdout, stderr)."""
    return functools.partial(aura, "train", "memory")


def test_training_leaves_the_backbone_and_its_rollouts_as_they_are(train, rollouts, tmp_path):
    from aura_ros.backbones.registry import shipped_checkpoint

    def state():
        paths = [shipped_checkpoint(), *sorted(path for path in rollouts.folder.rglob("*") if path.is_file())]
        return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]

    before = state()
    call = ["--rollouts", rollouts.folder, "--steps", 3, "--batch", 4]
    assert train(*call, "--out", "m.safetensors")[0] == 0
    assert state() == before
    found = NumpyMemory.load(tmp_path / "m.safetensors")
    assert (found.config.backbone, found.config.memory_step_period, found.state_bytes) == (HASH, 8, 4224)


def test_the_same_seed_gives_the_same_weights_and_every_arm_has_its_file(train, rollouts, tmp_path):
    call = ["--rollouts", rollouts.folder, "--steps", 2, "--batch", 4]
    for name in ("a", "b"):
        assert train(*call, "--out", f"{name}.safetensors", "--seed", 5)[0] == 0
    # Safetensors writes its metadata in any order: the content is what must not differ.
    hashes = {NumpyMemory.load(tmp_path / f"{name}.safetensors").weights_hash for name in ("a", "b")}
    assert len(hashes) == 1
    for arm in ("kv", "window"):
        assert train(*call, "--out", f"{arm}.safetensors", "--arm", arm)[0] == 0
        assert load_baseline(tmp_path / f"{arm}.safetensors").config.backbone == HASH
    window = load_baseline(tmp_path / "window.safetensors")
    assert window.state_bytes(10_000) == 4224
    for arm in ("aura-always", "random", "periodic"):
        assert train(*call, "--out", f"{arm}.safetensors", "--arm", arm)[0] == 0
        load_module(tmp_path / f"{arm}.safetensors")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--arm", "lstm"], "arm 'lstm' is unknown; choose one of aura, aura-always"),
        (["--out", "m.pt"], "out 'm.pt' is not allowed; give a .safetensors file"),
        (["--steps", "0"], "steps 0 is out of range"),
        (["--gamma", "-1"], "gamma -1.0 is out of range"),
        (["--state-dim", "1"], "state_dim 1 is not allowed"),
        ([], "'none' is no folder of rollouts (rollouts.json"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(train, given, said):
    given = given if "--out" in given else [*given, "--out", "m.safetensors"]
    status, _, error = train("--rollouts", "none", *given)
    assert (status, error.count("\n")) == (2, 1)
    assert said in error


def test_a_memory_of_another_backbone_is_refused_and_both_are_named():
    from aura_ros.memory import build_untrained
    from aura_ros.policy import load_policy

    with pytest.raises(UserError, match=r"no-such.* does not|is not a file"):
        load_policy(backbone="compact", memory_checkpoint="no-such.safetensors")
    policy = load_policy(backbone="compact", memory_checkpoint="untrained")
    info = policy.backbone.info
    config = memory(input_dim=info.hidden_dim, out_dim=info.action.horizon * info.action.dim)
    from aura_ros.policy import Policy

    with pytest.raises(
        UserError, match=rf"trained on backbone {HASH[:12]}, this one is {info.checkpoint_hash[:12]}"
    ):
        Policy(policy.backbone, NumpyMemory.from_checkpoint(build_untrained(config)))


def test_an_episode_with_a_memory_of_another_backbone_is_refused_before_anything_starts(aura, tmp_path):
    from aura_ros.memory import build_untrained

    build_untrained(memory(), tmp_path / "m.safetensors")
    status, _, error = aura("sim", "--memory-checkpoint", "m.safetensors")
    assert (status, error.count("\n")) == (2, 1)
    assert f"memory 'm.safetensors' was trained on backbone {HASH[:12]}, this one is " in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.safetensors"]
