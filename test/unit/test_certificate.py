"""The certificate: its formula, a process where everything can be counted, and measurements on checkpoints and bags."""

import copy
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aura_ros.bench.certificate import estimates, heads, paper
from aura_ros.bench.certificate.finite import certify, remember
from aura_ros.bench.certificate.formula import (
    bounds,
    half_span,
    total_variation,
    trivial_span,
    value_loss_bound,
)
from aura_ros.bench.certificate.process import ACTIONS, LEFT, LOOK, NOTHING, READINGS, DoorsConfig, histories
from aura_ros.bench.certificate.stream import Stream, certify_stream, reads
from aura_ros.bench.recall.tasks import SPARSE
from aura_ros.certify_command import Certify, read_stream, run_certify
from aura_ros.cli import main, parse
from aura_ros.errors import UserError
from aura_ros.memory import MemoryConfig, NumpyMemory, build_untrained
from aura_ros.report.bag import BagTopic, BagWriter, qos
from aura_ros.report.definitions import typestore

# The formula


@pytest.mark.parametrize("statistic", ["q95", "mean"])
def test_bounds_printed_in_the_paper_come_out_of_its_premises(statistic):
    found = paper.recomputed(statistic)
    loose, tight = paper.PRINTED[statistic]
    # The residuals are printed to three digits; one half of the last one moves the tight form by 0.009.
    assert found.loose == pytest.approx(loose, abs=0.005)
    assert found.tight == pytest.approx(tight, abs=0.009 + 0.005)
    assert found.span == pytest.approx(10)
    assert found.loose_vacuous == (statistic == "q95")
    assert found.tight_vacuous


def test_residual_above_loaded_delta_of_the_paper_is_reported_as_breaking_the_remark():
    found = paper.recomputed("q95")
    assert found.loaded == pytest.approx(2.919)
    assert found.order_broken
    assert not bounds(0.0076, 0.5838, 2.9, 5.0, 0.9).order_broken
    assert "3.854 > L_V delta 2.92" in paper.recall_line()


def test_l_v_and_total_variation_belong_together():
    """With the halved distance, f = +1 / -1 on disjoint laws would break equation A.1."""
    p, q, f = np.array([1.0, 0.0]), np.array([0.0, 1.0]), np.array([1.0, -1.0])
    assert abs(f @ p - f @ q) == half_span(f) * total_variation(p, q) == 2.0


@given(st.integers(0, 2**31))
def test_expectations_differ_by_no_more_than_half_span_times_total_variation(seed):
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(6, 0.3), 2)
    f = rng.normal(size=6) * 10
    assert abs(f @ p - f @ q) <= half_span(f) * total_variation(p, q) + 1e-9


@pytest.mark.parametrize(
    "arguments", [(0.1, 0.1, 1.0), (0.1, 0.1, -0.1), (-0.1, 0.1, 0.9), (0.1, float("nan"), 0.9)]
)
def test_bound_refuses_what_is_no_error_or_discount(arguments):
    with pytest.raises(UserError, match="is not allowed"):
        value_loss_bound(*arguments)


# The process


def brute_force(config: DoorsConfig, steps: list[tuple[int, int]]) -> tuple[float, float]:
    """Probability of the readings under these actions, and of the right door after them, by all hidden paths."""
    total = right = 0.0
    for path in itertools.product((0, 1), repeat=len(steps) + 1):
        probability = 0.5
        for (action, reading), before, after in zip(steps, path, path[1:], strict=False):
            probability *= config.switch if before != after else 1 - config.switch
            wrong = config.look_noise if action == LOOK else config.noise
            seen = 1.0 if action == LOOK else 1 - config.dropout
            says = 1 - seen if reading == NOTHING else seen * (1 - wrong if reading - 1 == after else wrong)
            probability *= says
        total += probability
        right += probability * path[-1]
    return total, right / total if total else 0.5


def steps_of(tree, index: int) -> list[tuple[int, int]]:
    steps = []
    while tree.parent[index] >= 0:
        steps.append((int(tree.action[index]), int(tree.reading[index])))
        index = int(tree.parent[index])
    return steps[::-1]


def test_beliefs_and_chances_equal_a_sum_over_all_hidden_paths():
    config = DoorsConfig(rounds=4, noise=0.2, dropout=0.3, switch=0.1)
    tree = histories(config)
    for index in np.random.default_rng(0).choice(len(tree), 40, replace=False):
        steps = steps_of(tree, index)
        before, belief = brute_force(config, steps)
        assert tree.belief[index] == pytest.approx(belief, abs=1e-12)
        for action, reading in itertools.product(range(ACTIONS), range(READINGS)):
            after, _ = brute_force(config, [*steps, (action, reading)])
            assert tree.chance[index, action, reading] == pytest.approx(after / before, abs=1e-12)


def test_every_history_is_listed_once_and_impossible_ones_are_not():
    tree = histories(DoorsConfig(rounds=3))
    listed = {tuple(steps_of(tree, index)) for index in range(len(tree))}
    # Looking always shows something: 8 of the 9 pairs of action and reading can be.
    assert len(tree) == len(listed) == 1 + 8 + 64
    assert tree.reach()[tree.clock == 2].sum() == pytest.approx(1)


def test_optimal_value_satisfies_bellmans_equation_written_out():
    tree = histories(DoorsConfig(rounds=3))
    value = tree.optimal()
    for h in range(len(tree)):
        best = max(
            tree.reward[h, a]
            + 0.9 * sum(tree.chance[h, a, y] * value[tree.child[h, a, y]] for y in range(READINGS))
            for a in range(ACTIONS)
        )
        assert value[h] == pytest.approx(best, abs=1e-8)


def test_value_of_always_opening_one_door_is_a_half_at_every_step():
    tree = histories(DoorsConfig(rounds=3))
    assert tree.evaluate(np.full(len(tree), LEFT))[0] == pytest.approx(0.5 / (1 - 0.9), abs=1e-8)


# The proof


@pytest.mark.parametrize("noise", [0.1, 0.25, 0.4])
def test_bound_says_something_where_the_value_is_known(noise):
    found = certify(DoorsConfig(noise=noise), 33)
    assert found.histories >= 100
    assert found.states < found.histories / 40
    assert found.epsilon > 0
    assert found.delta > 0
    assert found.loose < trivial_span(0.9) / 2
    assert 0 < found.loss <= found.tight <= found.loose


def test_bound_is_below_half_the_span_of_the_optimal_value_with_more_levels():
    found = certify(DoorsConfig(noise=0.1), 257)
    assert 0 < found.loss <= found.loose < found.value_span / 2
    assert found.verdict == "below half of V*'s span"


def test_coarse_memory_is_called_vacuous():
    assert certify(DoorsConfig(noise=0.25, rounds=4), 3).verdict == "VACUOUS"


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.floats(0, 0.5), st.floats(0, 1), st.floats(0, 0.5), st.floats(0, 1), st.floats(0, 0.5),
    st.floats(0, 0.95), st.integers(2, 40),
)  # fmt: skip
def test_true_loss_is_never_above_the_bound(
    rounds, noise, dropout, look_noise, look_reward, switch, discount, levels
):
    found = certify(DoorsConfig(rounds, noise, dropout, look_noise, look_reward, switch, discount), levels)
    assert found.holds
    assert found.loss >= -1e-9
    assert found.value_error <= found.tight / 2 + 1e-9
    assert found.residual <= found.lipschitz * found.delta + 1e-9


def test_memory_that_forgets_nothing_costs_nothing():
    """Readings that say nothing leave the belief in the middle, which three levels hold exactly."""
    found = certify(DoorsConfig(noise=0.5, look_noise=0.5), 3)
    assert (found.epsilon, found.delta, found.loose, found.write_rate) == pytest.approx(
        (0, 0, 0, 0), abs=1e-9
    )
    assert found.loss == pytest.approx(0, abs=1e-9)


def test_memory_is_updated_from_its_own_state_alone():
    """AP2a: two histories of one state, followed by the same action and reading, are of one state again."""
    tree = histories(DoorsConfig(rounds=4))
    state, _ = remember(tree, 17)
    later = {}
    for h in np.flatnonzero(tree.clock > 0):
        key = (state[tree.parent[h]], tree.action[h], tree.reading[h])
        assert later.setdefault(key, state[h]) == state[h]


# Estimates and heads


def test_intervals_hold_the_truth_and_widen_when_groups_are_alike():
    rng = np.random.default_rng(0)
    independent = rng.exponential(size=(100, 8))
    alike = np.repeat(rng.exponential(size=(100, 1)), 8, axis=1)
    loose, tight = (estimates.resample(data, 1000).mean.estimate() for data in (alike, independent))
    assert tight.low < 1 < tight.high
    assert loose.high - loose.low > 2 * (tight.high - tight.low)


def test_missing_values_of_short_groups_are_left_out():
    data = np.array([[1.0, 2.0, np.nan], [3.0, np.nan, np.nan], [4.0, 5.0, 6.0]])
    found = estimates.resample(data, 200)
    assert found.mean.value == pytest.approx(3.5)
    assert found.largest == 6
    assert not np.isnan(found.q95.draws).any()


def test_error_that_never_varies_has_an_interval_of_one_point():
    found = estimates.resample(np.zeros((10, 2)), 200).mean.estimate()
    assert (found.value, found.low, found.high) == (0, 0, 0)


def test_forms_are_the_formula_of_the_measured_numbers():
    rng = np.random.default_rng(1)
    epsilon, delta, residual = (estimates.resample(rng.random((30, 4)), 200) for _ in range(3))
    found = estimates.forms(epsilon, {"TV": delta}, residual, {"TV": {"a": 5.0}}, 0.9)
    assert [form.statistic for form in found] == ["mean", "q95", "largest"]
    for form, (e, d, r) in zip(
        found,
        [(x.mean.value, y.mean.value, z.mean.value) for x, y, z in [(epsilon, delta, residual)]]
        + [(epsilon.q95.value, delta.q95.value, residual.q95.value)]
        + [(epsilon.largest, delta.largest, residual.largest)],
        strict=True,
    ):
        assert form.loose.value == pytest.approx(2 * (e + 0.9 * 5 * d) / (1 - 0.9))
        assert form.tight.value == pytest.approx(2 * (e + 0.9 * r) / (1 - 0.9))
        assert form.loose.low - 1e-9 <= form.loose.value <= form.loose.high + 1e-9
        assert form.vacuous_loose == (form.loose.value >= trivial_span(0.9))


def test_head_finds_a_linear_map_and_ignores_what_never_moves():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(200, 4)) * [1, 10, 0.1, 1]
    x[:, 3] = 7.0
    weight = np.array([[1.0], [2.0], [-3.0], [0.0]])
    head = heads.fit(x, x @ weight + 5)
    assert head.weight == pytest.approx(weight, abs=0.01)
    assert head(x) == pytest.approx(x @ weight + 5, abs=0.01)


def test_head_with_few_samples_does_no_worse_than_the_mean_on_noise():
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(24, 32)), rng.normal(size=(24, 2))
    other_x, other_y = rng.normal(size=(2000, 32)), rng.normal(size=(2000, 2))
    missed = np.square(heads.fit(x, y)(other_x) - other_y).mean()
    assert missed < 1.2 * np.square(y.mean(axis=0) - other_y).mean()


def test_returns_equal_the_sum_written_out():
    rewards = np.random.default_rng(4).random((3, 7))
    for row, t in itertools.product(range(3), range(7)):
        written = sum(0.8**k * rewards[row, t + k] for k in range(7 - t)) + 0.8 ** (7 - t) * 2.0
        assert heads.discounted_returns(rewards, 0.8, 2.0)[row, t] == pytest.approx(written)


def test_value_moves_by_no_more_than_its_lipschitz_constant_times_the_distance():
    rng = np.random.default_rng(5)
    weight = rng.normal(size=9)
    a, b = rng.normal(size=(2, 500, 9))
    assert (np.abs((a - b) @ weight) <= heads.lipschitz(weight) * np.abs(a - b).mean(axis=1) + 1e-9).all()


# A checkpoint


def sparse_memory(path: Path) -> Path:
    build_untrained(MemoryConfig(input_dim=6, out_dim=4, dk=8, dv=8), path)
    return path


def test_teacher_follows_without_touching_the_memory_and_is_seeded(tmp_path):
    import torch

    from aura_ros.bench.certificate.teacher import ema_teacher
    from aura_ros.memory import load_module

    torch.set_num_threads(1)
    module = load_module(sparse_memory(tmp_path / "m.safetensors"))
    before = copy.deepcopy(module.state_dict())
    teachers = [ema_teacher(module, SPARSE, 3, seed=5).state_dict() for _ in range(2)]
    assert all(torch.equal(before[name], module.state_dict()[name]) for name in before)
    assert all(torch.equal(teachers[0][name], teachers[1][name]) for name in before)
    assert not torch.equal(before["head.to_mu.weight"], teachers[0]["head.to_mu.weight"])
    assert not module.training


def test_untrained_memory_gets_a_vacuous_certificate_above_its_true_loss(tmp_path):
    from aura_ros.bench.certificate.recall import RecallConfig, certify_recall
    from aura_ros.memory import load_module

    module = load_module(sparse_memory(tmp_path / "m.safetensors"))
    found = certify_recall(module, SPARSE, RecallConfig(episodes=64, teacher_steps=2, resamples=200))
    assert found.epsilon.mean.value == pytest.approx(0.75, abs=0.02)
    assert 0.1 < found.accuracy < 0.45
    assert found.loss.value > 0.5
    for form in found.forms:
        assert form.vacuous_tight
        assert form.tight.value >= found.loss.value
    assert found.delta_tv.largest < 0.1


def test_measured_part_does_not_teach_the_heads():
    """The residual is judged on episodes that the value heads have not seen."""
    from aura_ros.bench.certificate.recall import _value

    rng = np.random.default_rng(6)
    codes, returns, asked = rng.normal(size=(20, 5, 3)), rng.random((20, 5)), np.ones((20, 5), bool)
    _, _, weight = _value(codes, returns, asked, 10)
    changed = returns.copy()
    changed[10:] += 100
    assert np.array_equal(_value(codes, changed, asked, 10)[2], weight)


# A bag

LATENT = BagTopic("/policy_node/latent", "aura_ros/msg/Latent", qos())
CHUNK = BagTopic("/action_chunk", "aura_ros/msg/ActionChunk", qos())


def record(path: Path, hidden, actions, epochs=None, without_chunk=(), topics=(LATENT, CHUNK)) -> Path:
    """A bag of these hidden states and chunks, each chunk written before its hidden state."""
    store, types = typestore(), typestore().types
    writer = BagWriter(path, topics)
    step = 0
    for index, (state, action) in enumerate(zip(hidden, actions, strict=True)):
        epoch = 2**63 + int(epochs[index] if epochs is not None else 0)
        step = 1 if index and epochs is not None and epochs[index] != epochs[index - 1] else step + 1
        stamp = types["builtin_interfaces/msg/Time"](sec=index, nanosec=7)
        header = types["std_msgs/msg/Header"](stamp=stamp, frame_id="base")
        period = types["builtin_interfaces/msg/Duration"](sec=0, nanosec=50_000_000)
        if index not in without_chunk:
            chunk = types[CHUNK.type](
                header=header, published_at=stamp, epoch=epoch, sequence=index, control_mode=1,
                names=["x"], units=["m"], period=period, horizon=len(action), data=action.astype(np.float32),
                CARTESIAN_DELTA=1, JOINT_DELTA=2, JOINT_POSITION=3, JOINT_VELOCITY=4,
            )  # fmt: skip
            writer.write(CHUNK.name, 2 * index + 1, bytes(store.serialize_cdr(chunk, CHUNK.type)))
        latent = types[LATENT.type](header=header, epoch=epoch, step=step, data=state.astype(np.float32))
        if LATENT in topics:
            writer.write(LATENT.name, 2 * index + 2, bytes(store.serialize_cdr(latent, LATENT.type)))
    writer.close()
    return path


def memory_for(width: int, columns: int) -> NumpyMemory:
    config = MemoryConfig(input_dim=width, out_dim=columns, input_kind="projection", residual=True)
    return NumpyMemory.from_checkpoint(build_untrained(config))


def stream_that_follows_its_reads(count: int = 240, width: int = 24) -> Stream:
    """Hidden states of a slow random walk, and actions that are a linear function of the memory's reads."""
    rng = np.random.default_rng(7)
    hidden = np.zeros((count, width), np.float32)
    for t in range(1, count):
        hidden[t] = 0.95 * hidden[t - 1] + 0.3 * rng.normal(size=width)
    stream = Stream(hidden, np.zeros((count, 3)), np.zeros(count, np.int64), np.arange(count))
    state, _ = reads(memory_for(width, 3), stream)
    return Stream(hidden, state @ rng.normal(size=(32, 3)), stream.epoch, stream.step)


def test_action_that_the_read_decides_has_a_small_epsilon_and_a_shuffled_one_has_not():
    stream = stream_that_follows_its_reads()
    found = certify_stream(stream, memory_for(24, 3), resamples=200)
    assert found.epsilon.mean.value < 0.1 * found.epsilon_of_mean
    order = np.random.default_rng(8).permutation(len(stream.actions))
    shuffled = Stream(stream.hidden, stream.actions[order], stream.epoch, stream.step)
    worse = certify_stream(shuffled, memory_for(24, 3), resamples=200)
    assert worse.epsilon.mean.value > 0.8 * worse.epsilon_of_mean


def test_residual_of_a_stream_is_within_the_loaded_delta_for_every_statistic():
    found = certify_stream(stream_that_follows_its_reads(), memory_for(24, 3), resamples=200)
    assert not any(form.order_broken for form in found.forms)


def test_memory_begins_anew_with_each_epoch():
    stream = stream_that_follows_its_reads(20)
    twice = Stream(
        np.concatenate([stream.hidden, stream.hidden]),
        np.concatenate([stream.actions, stream.actions]),
        np.repeat([0, 1], 20),
        np.tile(stream.step, 2),
    )
    state, _ = reads(memory_for(24, 3), twice)
    assert np.array_equal(state[:20], state[20:])


def test_gaps_and_new_epochs_make_no_tuples():
    stream = stream_that_follows_its_reads(60)
    step = stream.step.copy()
    step[30:] += 1
    epoch = np.repeat([0, 1], [45, 15])
    actions = stream.actions.copy()
    actions[10] = np.nan
    found = certify_stream(Stream(stream.hidden, actions, epoch, step), memory_for(24, 3), resamples=200)
    assert found.tuples == 59 - 3


def test_bag_of_wide_hidden_states_is_read_by_stamp_and_epoch_and_measured(tmp_path, capsys):
    rng = np.random.default_rng(9)
    hidden, actions = rng.normal(size=(40, 4096)), rng.normal(size=(40, 56))
    epochs = np.repeat([0, 1], 20)
    bag = record(tmp_path / "bag", hidden, actions, epochs, without_chunk=(3,))
    stream = read_stream(bag)
    assert np.array_equal(stream.hidden, hidden.astype(np.float32))
    assert np.isnan(stream.actions[3]).all()
    assert stream.actions[[2, 39]] == pytest.approx(actions[[2, 39]], abs=1e-6)
    assert stream.epoch.tolist() == epochs.tolist()
    file = tmp_path / "numbers.json"
    assert run_certify(Certify(bag=bag, resamples=200, json=file)) == 0
    numbers = json.loads(file.read_text())
    assert (numbers["kind"], numbers["tuples"]) == ("stream", 40 - 1 - 1 - 1)
    assert numbers["epsilon"]["mean"]["low"] <= numbers["epsilon"]["mean"]["value"]
    out = capsys.readouterr().out
    assert "VACUOUS" in out
    assert "0.0132" in out


def test_short_bag_and_bag_without_hidden_states_are_one_line(tmp_path):
    rng = np.random.default_rng(10)
    hidden, actions = rng.normal(size=(10, 8)), rng.normal(size=(10, 2))
    with pytest.raises(UserError, match="has 9 tuples"):
        run_certify(Certify(bag=record(tmp_path / "short", hidden, actions)))
    with pytest.raises(UserError, match="0 topics of aura_ros/msg/Latent.*publish_latent"):
        run_certify(Certify(bag=record(tmp_path / "none", hidden, actions, topics=(CHUNK,))))
    empty = BagWriter(tmp_path / "empty", (LATENT, CHUNK))
    empty.close()
    with pytest.raises(UserError, match="hidden states of sizes"):
        run_certify(Certify(bag=tmp_path / "empty"))


def test_memory_of_another_width_is_refused(tmp_path):
    memory = sparse_memory(tmp_path / "m.safetensors")
    rng = np.random.default_rng(11)
    bag = record(tmp_path / "bag", rng.normal(size=(40, 8)), rng.normal(size=(40, 2)))
    with pytest.raises(UserError, match="hidden states of 6, the bag's have 8"):
        run_certify(Certify(bag=bag, memory=memory))


# The command


def test_pomdp_prints_a_row_for_each_memory_and_writes_them(tmp_path, capsys):
    file = tmp_path / "numbers.json"
    command = [
        "certify",
        "--pomdp",
        "--noise",
        "0.2,0.3",
        "--levels",
        "3,33",
        "--rounds",
        "3",
        "--json",
        str(file),
    ]
    assert run_certify(parse(command)) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["noise"], row["levels"]) for row in rows] == [(0.2, 3), (0.2, 33), (0.3, 3), (0.3, 33)]
    assert all(row["holds"] for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4 + 1


def test_checkpoint_prints_verdicts_and_the_teachers_making(tmp_path, capsys):
    path = sparse_memory(tmp_path / "m.safetensors")
    file = tmp_path / "numbers.json"
    command = f"certify {path} --episodes 32 --teacher-steps 2 --resamples 100 --json {file}".split()
    assert run_certify(parse(command)) == 0
    out = capsys.readouterr().out
    assert "VACUOUS" in out
    assert "teacher: made, EMA 0.95 over 2 gradient steps" in out
    assert "scales with the teacher's learning rate: here 6e-05" in out
    assert "is to be preferred" in out
    numbers = json.loads(file.read_text())
    assert numbers["task"] == "sparse_recall"
    assert len(numbers["weights_hash"]) == 64
    assert numbers["teacher"] == {"source": "made", "steps": 2, "lr": 6e-5, "seed": 0}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "0 of CKPT, --bag DIR and --pomdp"),
        ("--pomdp --bag x", "2 of CKPT"),
        ("nofile", "'nofile' is not a file"),
        ("--bag nobag", "is not a bag"),
        ("--pomdp --noise a", "noise 'a'"),
        ("--pomdp --noise 0.7", "noise 0.7 is out of range"),
        ("--pomdp --levels 3,1", "levels 1 is not allowed"),
        ("--pomdp --rounds 9", "rounds 9 is out of range"),
        ("--pomdp --discount 1", "discount 1.0 is out of range"),
        ("--pomdp --resamples 1", "resamples 1 is not allowed"),
        ("--pomdp --seed -1", "seed -1 is not allowed"),
        ("--pomdp --json /nowhere/x", "json '/nowhere/x' cannot be written"),
        ("CKPT --task foo", "task 'foo' is unknown"),
        ("CKPT --task hard_recall", "is 6 -> 4, which does not fit hard_recall"),
        ("CKPT --episodes 2", "episodes 2 is out of range"),
        ("CKPT --discount 2", "discount 2.0 is out of range"),
        ("CKPT --teacher-lr 0", "teacher_lr 0.0 is out of range"),
        ("CKPT --teacher CKPT --episodes 32", "the teacher's weights are the checkpoint's own"),
    ],
)
def test_mistakes_are_one_line_and_exit_status_2(tmp_path, monkeypatch, capsys, arguments, says):
    path = sparse_memory(tmp_path / "m.safetensors")
    words = [str(path) if word == "CKPT" else word for word in arguments.split()]
    monkeypatch.setattr("sys.argv", ["aura", "certify", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("aura: ")
    assert error.count("\n") == 1


def test_memory_of_no_recall_task_is_refused_with_what_is_allowed(tmp_path):
    build_untrained(MemoryConfig(input_dim=5, out_dim=3), tmp_path / "m.safetensors")
    with pytest.raises(
        UserError, match="5 -> 3, which does not fit any recall task; allowed: noisy_long_recall 14 -> 4"
    ):
        run_certify(Certify(checkpoint=tmp_path / "m.safetensors"))
