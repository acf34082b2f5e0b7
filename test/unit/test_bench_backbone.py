"""`aura bench backbone`: its naive twin equals what is served, and its numbers are what they say."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import shutil
import sys
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from rich.console import Console

from aura_ros import cli
from aura_ros.backbones.openvla_oft import accelerate
from aura_ros.backbones.openvla_oft.accelerate import Graphed, Stand, accelerated
from aura_ros.backbones.openvla_oft.api import OpenVlaOft
from aura_ros.backbones.openvla_oft.config import COMPACT, OPENVLA_OFT_7B, OftConfig
from aura_ros.backbones.openvla_oft.layout import FolderOptions
from aura_ros.backbones.openvla_oft.model import build_on_meta
from aura_ros.backbones.openvla_oft.tokenizer import prompt_ids
from aura_ros.bench import backbone as bench
from aura_ros.bench import command, machine
from aura_ros.bench.backbone import INSTRUCTION, LADDER, Latency, climb, run_backbone_bench, table
from aura_ros.bench.backbone_config import SMALL, BackboneBenchConfig
from aura_ros.bench.random_backbone import TABLE, RandomTensors, WordTokenizer, random_backbone, tokenizer_for
from aura_ros.bench.reference_forward import Levers, ReferenceForward, UnusedParts
from aura_ros.errors import UserError

CPU = torch.device("cpu")
QUICK = {"repeats": 2, "warmup": 1, "threads": 1}
# bfloat16 keeps 8 bits; sums in another order move compact's actions, of size 0.5, by a rounding or two.
ATOL = {"float32": 1e-5, "bfloat16": 8e-3}


def config(**changes) -> BackboneBenchConfig:
    return BackboneBenchConfig(**{"random_weights": True, **QUICK, **changes})


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def compact(request) -> OpenVlaOft:
    dtype = getattr(torch, request.param)
    return random_backbone(COMPACT, seed=1, device=CPU, dtype=dtype)


def inputs(backbone: OpenVlaOft, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    weight = next(backbone.model.parameters())
    size = backbone.config.image.size
    pixels = torch.randn(1, 6 * len(backbone.config.cameras), size, size, generator=random)
    return pixels.to(weight), torch.rand(1, backbone.config.proprio_dim, generator=random).to(weight)


def twin(backbone: OpenVlaOft, levers: Levers) -> ReferenceForward:
    weight = next(backbone.model.parameters())
    unused = UnusedParts(backbone.config, seed=5, device=CPU, dtype=weight.dtype)
    encode = partial(prompt_ids, tokenizer_for(backbone.config), INSTRUCTION)
    return ReferenceForward(backbone.model, unused, encode, levers)


@pytest.mark.parametrize("name", LADDER)
def test_every_way_of_the_ladder_equals_the_model(compact, name):
    pixels, proprio = inputs(compact)
    ids = torch.tensor([prompt_ids(tokenizer_for(COMPACT), INSTRUCTION)])
    with torch.inference_mode():
        expected = compact.model(ids, pixels, proprio)
    found = twin(compact, LADDER[name])(pixels, proprio)
    atol = ATOL[str(pixels.dtype).removeprefix("torch.")]
    for part in ("actions_normalised", "pooled"):
        torch.testing.assert_close(getattr(found, part), getattr(expected, part), rtol=0, atol=atol)
    assert found.hidden_states.shape == expected.hidden_states.shape


def test_the_twin_takes_the_block_before_the_last_and_still_runs_the_last(compact):
    pixels, proprio = inputs(compact)
    reference, saved = twin(compact, Levers()), twin(compact, Levers(used_blocks=True, no_logits=True))
    calls: list[str] = []
    for forward in (reference, saved):
        for name, part in forward._unused.named_children():
            part.register_forward_hook(lambda *_, name=name: calls.append(name))
    saved(pixels, proprio)
    assert calls == []
    reference(pixels, proprio)
    cameras = len(COMPACT.cameras)
    assert sorted(calls) == ["dino_block"] * cameras + ["lm_head"] + ["siglip_block"] * cameras


def test_a_twin_without_the_mask_does_not_become_causal(compact):
    pixels, proprio = inputs(compact)
    masked, plain = (twin(compact, levers)(pixels, proprio) for levers in (Levers(), Levers(no_mask=True)))
    atol = ATOL[str(pixels.dtype).removeprefix("torch.")]
    torch.testing.assert_close(plain.pooled, masked.pooled, rtol=0, atol=atol)


def test_the_run_reports_every_way_its_ratios_and_the_machine():
    backbone, calls = run_backbone_bench(config()), []
    assert [rung.name for rung in backbone.ladder] == list(LADDER)
    assert backbone.ladder[0].step == backbone.ladder[0].total == 1.0
    for before, rung in zip(backbone.ladder, backbone.ladder[1:], strict=False):
        assert rung.step == pytest.approx(before.latency.p50 / rung.latency.p50)
        assert rung.total == pytest.approx(backbone.ladder[0].latency.p50 / rung.latency.p50)
        assert rung.difference <= ATOL["float32"]
    assert backbone.rows == len(prompt_ids(tokenizer_for(COMPACT), INSTRUCTION)) + 98 + 1 + 56 + 1
    assert backbone.peak_bytes > 4 * backbone.backbone["parameters"]
    assert backbone.machine["torch"] == torch.__version__
    assert backbone.machine["threads"] == 1
    assert backbone.query.p50 > backbone.forward.p50
    run_backbone_bench(config(), lambda done, total: calls.append((done, total)))
    total = (1 + len(LADDER)) * 3
    assert calls == [(done, total) for done in range(1, total + 1)]


def test_the_run_gives_back_the_number_of_threads():
    before = torch.get_num_threads()
    run_backbone_bench(config(threads=before + 1, repeats=1))
    assert torch.get_num_threads() == before


def test_all_ways_are_timed_in_turn_and_back(monkeypatch):
    backbone = random_backbone(COMPACT, seed=0, device=CPU, dtype=torch.float32)
    order: list[object] = []

    def timed(call, device):
        order.append(call)
        return 1.0, call()

    monkeypatch.setattr(bench, "_timed", timed)
    observation = bench.synthetic_observation(backbone, 0)
    climb(backbone, tokenizer_for(COMPACT), observation, config(repeats=1))
    count = len(LADDER)
    assert order[:count] == order[count:][::-1]
    assert len(set(order)) == count


def test_percentiles_lie_between_neighbours():
    times = [float(n) for n in range(101)]
    assert Latency.of(times[::-1]) == Latency(best=0.0, p50=50.0, p95=95.0, p99=99.0)


def test_other_heads_are_timed_without_a_ladder(monkeypatch):
    diffusion = dataclasses.replace(COMPACT, head="diffusion", diffusion_steps=2)
    monkeypatch.setattr(BackboneBenchConfig, "network", property(lambda _: diffusion))
    report = run_backbone_bench(config())
    assert report.ladder == ()
    assert "only the L1 head" in table(report)


def test_a_saved_backbone_can_be_measured(tmp_path):
    path = tmp_path / "a.safetensors"
    random_backbone(COMPACT, seed=2, device=CPU, dtype=torch.float32).save(path)
    report = run_backbone_bench(config(random_weights=False, checkpoint=str(path)))
    assert (report.backbone["weights"], report.backbone["dtype"]) == (str(path), "float32")
    assert len(report.ladder) == len(LADDER)


def test_random_weights_follow_the_seed_and_are_spread_like_trained_ones():
    one, same, other = (
        RandomTensors(COMPACT, seed=seed, device=CPU, dtype=torch.float32) for seed in (0, 0, 1)
    )
    name = "projector.fc2.weight"
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])
    assert not torch.equal(one[name][0], one[name][1])
    inner = one[name].shape[1]
    assert one[name].std().item() == pytest.approx(inner**-0.5, rel=0.05)
    assert set(one) == dict(build_on_meta(COMPACT).named_parameters()).keys()


def test_a_tensor_longer_than_the_table_is_filled_to_the_end(monkeypatch):
    monkeypatch.setattr("aura_ros.bench.random_backbone.TABLE", 1009)
    tensor = RandomTensors(COMPACT, seed=0, device=CPU, dtype=torch.float32)["projector.fc2.weight"].flatten()
    assert TABLE > len(tensor) > 3 * 1009
    assert torch.equal(tensor[: len(tensor) - 1009], tensor[1009:])
    assert tensor.unique().numel() == 1009


@pytest.mark.parametrize("network", [COMPACT, SMALL, OPENVLA_OFT_7B], ids=lambda n: n.name)
def test_the_stand_in_tokenizer_stays_inside_the_vocabulary(network):
    tokenizer = tokenizer_for(network)
    ids = prompt_ids(tokenizer, INSTRUCTION)
    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.empty_space_id) == 1
    assert ids[-1] == tokenizer.empty_space_id
    assert max(ids) < network.language.vocab


def test_the_stand_in_tokenizer_makes_about_as_many_ids_as_llama():
    # Llama-2 makes 23 of this prompt.
    ids = prompt_ids(WordTokenizer(OPENVLA_OFT_7B), "put the black bowl in the basket")
    assert 20 <= len(ids) <= 26


def shares(network: OftConfig) -> list[float]:
    """lm_head, both towers' last blocks and both towers, against the parameters of the trunk's layers."""
    sizes = {name: p.numel() for name, p in build_on_meta(network).named_parameters()}

    def of(prefix: str) -> int:
        return sum(size for name, size in sizes.items() if name.startswith(prefix))

    towers = ("vision_backbone.featurizer.blocks.", "vision_backbone.fused_featurizer.blocks.")
    counted = [network.language.vocab * network.language.hidden]
    counted += [sum(of(f"{tower}0.") for tower in towers), sum(map(of, towers))]
    return [count / of("language_model.model.layers.") for count in counted]


def test_small_has_the_proportions_of_the_7b():
    for tower in ("dino", "siglip"):
        assert getattr(SMALL, tower).depth == getattr(OPENVLA_OFT_7B, tower).depth
    assert SMALL.prefix_rows == OPENVLA_OFT_7B.prefix_rows
    ratios = np.array(shares(SMALL)) / shares(OPENVLA_OFT_7B)
    assert ((ratios > 0.5) & (ratios < 2.0)).all(), ratios


MISTAKES = {
    "no weights": ([], "give --checkpoint PATH or --random-weights"),
    "both weights": (["--random-weights", "--checkpoint", "a"], "exclude each other"),
    "size": (["--random-weights", "--size", "9b"], "size '9b'"),
    "size of a checkpoint": (["--checkpoint", "a", "--size", "7b"], "size '7b'"),
    "checkpoint": (["--checkpoint", "/no/where"], "'/no/where'"),
    "device": (["--random-weights", "--device", "tpu"], "device 'tpu'"),
    "dtype": (["--random-weights", "--dtype", "int8"], "dtype 'int8'"),
    "repeats": (["--random-weights", "--repeats", "0"], "repeats 0"),
    "warmup": (["--random-weights", "--warmup", "0"], "warmup 0"),
    "threads": (["--random-weights", "--threads", "-1"], "threads -1"),
    "seed": (["--random-weights", "--seed", "-1"], "seed -1"),
    "accelerate": (["--random-weights", "--accelerate", "jit"], "accelerate 'jit'"),
    "graph on a CPU": (["--random-weights", "--accelerate", "cuda-graph"], "needs a CUDA device"),
    "processor by number": (["--random-weights", "--device", "cpu:3"], "device 'cpu:3'"),
    "cameras of random weights": (
        ["--random-weights", "--cameras", "a,b"],
        "cameras can be said of a checkpoint",
    ),
    "horizon": (["--checkpoint", "a", "--horizon", "-1"], "horizon -1"),
    "json a folder": (["--random-weights", "--json", "/"], "json '/'"),
    "json": (["--random-weights", "--json", "/no/where/a.json"], "/no/where/a.json"),
    "option": (["--random-weights", "--tusk"], "aura bench backbone --help"),
}


@pytest.fixture
def aura(monkeypatch, capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["aura", "bench", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return (end.value.code or 0, *capsys.readouterr())

    return run


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_exit_2(aura, case):
    arguments, said = MISTAKES[case]
    status, out, error = aura("backbone", *arguments)
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert said in error


def test_the_group_without_a_command_says_which_there_are(aura):
    status, _, error = aura()
    assert (status, error.count("\n")) == (2, 1)
    assert "backbone" in error
    assert "aura bench --help" in error


def test_the_command_prints_the_table_and_writes_the_same_numbers(aura, tmp_path):
    path = tmp_path / "numbers.json"
    status, out, _ = aura(
        *("backbone", "--random-weights", "--repeats", "1", "--warmup", "1", "--threads", "1"),
        *("--json", str(path)),
    )
    assert status == 0
    numbers = json.loads(path.read_text())
    assert [rung["name"] for rung in numbers["ladder"]] == list(LADDER)
    for rung in numbers["ladder"]:
        assert f"{rung['latency']['p50']:.2f}" in out
        assert f"{rung['total']:.3f}x" in out
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 0.01], ids=str)
@pytest.mark.parametrize("turn", ["always", "first"])
def test_a_way_that_gives_other_actions_is_no_success(aura, monkeypatch, tmp_path, wrong, turn):
    calls = []

    class Wrong(ReferenceForward):
        def __call__(self, *inputs):
            output = super().__call__(*inputs)
            if self._levers == Levers(one_batch=True) and (turn == "always" or not calls):
                calls.append(self)
                output.actions_normalised[0, 0, 0] += wrong
            return output

    monkeypatch.setattr(bench, "ReferenceForward", Wrong)
    path = tmp_path / "numbers.json"
    status, out, error = aura(
        *("backbone", "--random-weights", "--repeats", "1", "--threads", "1", "--json", str(path))
    )
    assert calls
    assert (status, error.count("\n")) == (1, 1)
    assert "'+ images in one batch' gives other actions than the served network" in error
    assert f"they differ by {wrong:.1e}" in error
    row = next(line for line in out.splitlines() if line.startswith("+ images in one batch"))
    assert row.endswith(f"{wrong:.1e}")
    difference = json.loads(path.read_text())["ladder"][1]["difference"]
    assert difference == pytest.approx(wrong, rel=0.01, nan_ok=True)


def test_rounding_is_no_disagreement_in_the_dtype_that_makes_it():
    report = run_backbone_bench(config(repeats=1))
    for dtype, most in (("float32", 1e-3), ("bfloat16", 0.1)):
        for difference, said in ((0.9 * most, ""), (1.1 * most, f"at most {most:g} is rounding in {dtype}")):
            ladder = (dataclasses.replace(report.ladder[0], difference=difference),)
            backbone = {**report.backbone, "dtype": dtype}
            fault = bench.disagreement(dataclasses.replace(report, ladder=ladder, backbone=backbone))
            assert said in fault
            assert bool(said) == bool(fault)


@pytest.mark.parametrize(("name", "dtype"), [("compact", "float32"), ("openvla-oft", "bfloat16")])
def test_a_saved_file_runs_in_the_dtype_that_the_policy_gives_its_model(tmp_path, name, dtype):
    network = dataclasses.replace(COMPACT, name=name)
    path = tmp_path / "a.safetensors"
    random_backbone(network, seed=2, device=CPU, dtype=torch.float32).save(path)
    backbone, _ = bench._load(config(random_weights=False, checkpoint=str(path)))
    assert {str(p.dtype) for p in backbone.model.parameters()} == {f"torch.{dtype}"}
    asked, _ = bench._load(config(random_weights=False, checkpoint=str(path), dtype="float32"))
    assert {p.dtype for p in asked.model.parameters()} == {torch.float32}


def test_what_is_said_about_a_folder_reaches_its_loading(aura, monkeypatch, tmp_path):
    given = {}

    def load(name, checkpoint, **options):
        given.update(options, name=name, checkpoint=checkpoint)
        raise UserError("enough")

    monkeypatch.setattr(bench, "load_backbone", load)
    status, _, _ = aura(
        *("backbone", "--checkpoint", str(tmp_path), "--cameras", "front,hand", "--image-flip", "none"),
        *("--horizon", "5", "--head", "discrete", "--film", "required"),
    )
    assert (status, given["name"], given["dtype"]) == (2, "openvla_oft", "bfloat16")
    options = FolderOptions(cameras=("front", "hand"), mirror=False, horizon=5, head="discrete", film=True)
    assert given["options"] == options


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nSee documentation"),
     RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: not enough memory: you tried")],
    ids=["cuda", "cpu"],
)  # fmt: skip
def test_running_out_of_memory_is_one_line(aura, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(OpenVlaOft, "infer", fail)
    status, out, said = aura("backbone", "--random-weights", "--repeats", "1")
    assert (status, out, said.count("\n")) == (2, "", 1)
    assert "ran out of memory; use dtype bfloat16" in said


def test_weights_that_cannot_fit_are_refused_before_any_is_made(aura, monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable:    8000000 kB\n")
    monkeypatch.setattr(machine, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(bench, "random_backbone", None)
    status, _, said = aura("backbone", "--random-weights", "--size", "7b")
    assert (status, said.count("\n")) == (2, 1)
    assert "size '7b' in bfloat16 needs 16.6 GB and device 'cpu' has 8.2 GB free" in said


def test_an_acceleration_leaves_the_model_itself_alone():
    backbone = random_backbone(COMPACT, seed=0, device=CPU, dtype=torch.float32)
    names = [name for name, _ in backbone.model.named_parameters()]
    faster = accelerated(backbone.model, "compile")
    assert [name for name, _ in backbone.model.named_parameters()] == names
    assert not any(isinstance(module, Stand) for module in backbone.model.modules())
    assert all(isinstance(getattr(faster, part), Stand) for part in accelerate.PARTS)
    assert faster.language_model.lm_head is None
    assert backbone.served_model is backbone.model


def test_an_accelerated_backbone_is_refused_by_name_and_by_device():
    for wrong, said in (("jit", "'jit'.*none, compile, cuda-graph"), ("cuda-graph", "needs a CUDA device")):
        with pytest.raises(UserError, match=said):
            random_backbone(COMPACT, seed=0, device=CPU, dtype=torch.float32, accelerate=wrong)


def test_close_frees_the_accelerated_weights_too():
    backbone = OpenVlaOft.random_compact(accelerate="compile")
    weight = weakref.ref(next(backbone.served_model.language_model.parameters()))
    backbone.close()
    with pytest.raises(UserError, match="closed"):
        _ = backbone.served_model
    gc.collect()
    assert weight() is None


def test_recorded_graphs_are_kept_by_shape_replayed_and_let_go_at_the_limit(monkeypatch):
    """The bookkeeping, with a stand-in for the recording, which needs CUDA."""
    recorded: list[int] = []

    class Replay:
        def __init__(self, module, fixed, output):
            self.module, self.fixed, self.output = module, fixed, output

        def replay(self):
            self.output.copy_(self.module(*self.fixed))

    def record(self, tensors):
        fixed = [tensor.clone() for tensor in tensors]
        recorded.append(fixed[0].shape[0])
        return Replay(self.inner, fixed, output := self.inner(*fixed)), fixed, output

    monkeypatch.setattr(Graphed, "_record", record)
    double = torch.nn.Linear(2, 2, bias=False).requires_grad_(False)
    graphed = Graphed(double)
    first = graphed(torch.ones(1, 2))
    kept = first.clone()
    torch.testing.assert_close(graphed(2 * torch.ones(1, 2)), 2 * kept)
    torch.testing.assert_close(first, kept)
    for rows in range(2, accelerate.GRAPHS + 1):
        graphed(torch.ones(rows, 2))
    graphed(torch.ones(1, 2))  # used last, so that 2 is the oldest
    graphed(torch.ones(accelerate.GRAPHS + 1, 2))
    graphed(torch.ones(1, 2))
    assert recorded == list(range(1, accelerate.GRAPHS + 2))
    graphed(torch.ones(2, 2))
    assert recorded[-1] == 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_the_compiled_network_equals_the_eager_one_for_prompts_of_any_length():
    backbone = OpenVlaOft.random_compact(seed=4, accelerate="compile")
    for instruction in ("pick", "pick up the milk", "a third length of prompt"):
        observation = dataclasses.replace(bench.synthetic_observation(backbone, 0), instruction=instruction)
        compiled = backbone.act(observation)
        eager = OpenVlaOft.random_compact(seed=4).act(observation)
        np.testing.assert_allclose(
            compiled.actions_normalised, eager.actions_normalised, rtol=0, atol=ATOL["float32"]
        )
        np.testing.assert_allclose(compiled.pooled, eager.pooled, rtol=0, atol=ATOL["float32"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
def test_the_recorded_network_equals_the_eager_one_for_prompts_of_any_length():
    backbone = OpenVlaOft.random_compact(seed=4, device="cuda", accelerate="cuda-graph")
    eager = OpenVlaOft.random_compact(seed=4, device="cuda")
    for instruction in ("pick", "pick up the milk", "pick"):
        for seed in range(2):
            observation = dataclasses.replace(
                bench.synthetic_observation(backbone, seed), instruction=instruction
            )
            np.testing.assert_allclose(
                backbone.act(observation).actions_normalised,
                eager.act(observation).actions_normalised,
                rtol=0,
                atol=ATOL["float32"],
            )


def test_the_time_left_does_not_count_the_loading(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=200)
    lines = command._Lines(console)
    for done, seconds in ((1, 500.0), (2, 520.0), (3, 525.0), (4, 540.0)):
        now[0] = seconds
        lines.show(done, 10)
    said = console.file.getvalue().splitlines()
    assert said == [
        "measuring: 2 of 10 calls, about 160 s left",
        "measuring: 4 of 10 calls, about 80 s left",
    ]
