"""What one query of the backbone costs here, and what each saving against the reference's forward pass gives.

All ways of running the network are timed in turn, round after round, so that a change of the machine's load meets
each of them. Every way must give the same actions; the largest difference is reported.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aura_ros.backbones.openvla_oft.api import DTYPES, OpenVlaOft
from aura_ros.backbones.openvla_oft.checkpoint import read_head
from aura_ros.backbones.openvla_oft.config import OPENVLA_OFT_7B
from aura_ros.backbones.openvla_oft.folder import find_folder
from aura_ros.backbones.openvla_oft.inputs import OWN_TOKENIZERS
from aura_ros.backbones.openvla_oft.model import build_on_meta
from aura_ros.backbones.openvla_oft.processing import prepare_images
from aura_ros.backbones.openvla_oft.startup import ROUNDING
from aura_ros.backbones.openvla_oft.tokenizer import LlamaTokenizer, Tokenizer, prompt_ids
from aura_ros.backbones.registry import load_backbone
from aura_ros.backbones.weights import find_device
from aura_ros.bench.backbone_config import BackboneBenchConfig
from aura_ros.bench.machine import check_memory, machine_facts, peak_bytes, start_peak
from aura_ros.bench.random_backbone import random_backbone, tokenizer_for
from aura_ros.bench.reference_forward import Levers, ReferenceForward, UnusedParts
from aura_ros.errors import UserError
from aura_ros.types import Observation

INSTRUCTION = "pick up the alphabet soup and place it in the basket"
CAMERA_SIDE = 256  # LIBERO's images
PERCENTILES = (0, 50, 95, 99)
# Each way does what the one before it does, less one thing.
LADDER = {
    "reference-shaped": Levers(),
    "+ images in one batch": Levers(one_batch=True),
    "+ unused blocks left out": Levers(one_batch=True, used_blocks=True),
    "+ no logits": Levers(one_batch=True, used_blocks=True, no_logits=True),
    "+ no mask": Levers(one_batch=True, used_blocks=True, no_logits=True, no_mask=True),
    "+ kept prompt ids": Levers(True, True, True, True, True),
}
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Latency:
    """Times of one kind of call, milliseconds. best: the fastest, what it costs where nothing else runs."""

    best: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, times_ms: list[float]) -> Latency:
        """Percentiles of the times, between neighbours where a rank falls between them."""
        return cls(*(float(value) for value in np.percentile(times_ms, PERCENTILES)))


@dataclass(frozen=True)
class Rung:
    """One way of running the forward pass.

    step, total: how many times faster, by p50, than the way before it and than the first one. difference: the
    largest of normalised actions to the way that is served.
    """

    name: str
    latency: Latency
    step: float
    total: float
    difference: float


@dataclass(frozen=True)
class BackboneReport:
    """The numbers of one run; `dataclasses.asdict` gives what `--json` writes.

    Bytes are the process's peak on a CPU and torch's allocations on a GPU, before the reference's extra weights exist.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    backbone: dict[str, Any]
    rows: int
    load_s: float
    first_query_s: float
    query: Latency
    preprocess: Latency
    forward: Latency
    peak_bytes: int
    ladder: tuple[Rung, ...]


def run_backbone_bench(
    config: BackboneBenchConfig, progress: Progress = lambda done, total: None
) -> BackboneReport:
    """Measure. progress: told the number of calls done and of all calls.

    Raises `UserError` for weights or a device that cannot be used, and for too little memory.
    """
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(config.threads or before)
        with _memory_errors(config):
            return _measure(config, progress)
    finally:
        torch.set_num_threads(before)


def _measure(config: BackboneBenchConfig, progress: Progress) -> BackboneReport:
    begin = time.perf_counter()
    backbone, tokenizer = _load(config)
    device = next(backbone.model.parameters()).device
    load_s = time.perf_counter() - begin
    observation = synthetic_observation(backbone, config.seed)
    begin = time.perf_counter()
    backbone.warm_up(INSTRUCTION)
    first_query_s = time.perf_counter() - begin
    ways = _ways(backbone, config)
    calls = (1 + ways) * (config.warmup + config.repeats)
    counter = iter(range(1, calls + 1))

    def done() -> None:
        progress(next(counter), calls)

    served: dict[str, list[float]] = {"backbone": [], "preprocess": [], "forward": []}
    for turn in range(config.warmup + config.repeats):
        timing = backbone.infer(observation).timing_ms
        if turn >= config.warmup:
            for name, times in served.items():
                times.append(timing[name])
        done()
    peak = peak_bytes(device)
    ladder = climb(backbone, tokenizer, observation, config, done) if ways else ()
    info = backbone.info
    report = BackboneReport(
        machine=machine_facts(device),
        settings=dataclasses.asdict(config),
        backbone={
            "name": info.name,
            "parameters": info.parameters,
            "trained": info.trained,
            "weights": info.checkpoint,
            "dtype": str(next(backbone.model.parameters()).dtype).removeprefix("torch."),
        },
        rows=backbone.config.prefix_rows
        + len(prompt_ids(tokenizer, INSTRUCTION))
        + backbone.config.placeholders
        + 1,
        load_s=load_s,
        first_query_s=first_query_s,
        query=Latency.of(served["backbone"]),
        preprocess=Latency.of(served["preprocess"]),
        forward=Latency.of(served["forward"]),
        peak_bytes=peak,
        ladder=ladder,
    )
    backbone.close()
    return report


def _ways(backbone: OpenVlaOft, config: BackboneBenchConfig) -> int:
    """How many ways `climb` times; none for heads without a twin."""
    if backbone.config.head != "l1" or backbone.config.film:
        return 0
    return len(LADDER) + (config.accelerate != "none")


def climb(
    backbone: OpenVlaOft,
    tokenizer: Tokenizer,
    observation: Observation,
    config: BackboneBenchConfig,
    done: Callable[[], object] = lambda: None,
) -> tuple[Rung, ...]:
    """Time every way of the ladder in turn, `config.repeats` rounds; done: called after each call."""
    model = backbone.model
    weight = next(model.parameters())
    unused = UnusedParts(model.config, seed=config.seed, device=weight.device, dtype=weight.dtype)
    encode = partial(prompt_ids, tokenizer, INSTRUCTION)
    images = [observation.images[camera] for camera in model.config.cameras]
    pixels = torch.from_numpy(prepare_images(images, model.config.image))[None].to(weight)
    proprio = weight.new_zeros(1, model.config.proprio_dim) if model.config.proprio_dim else None
    ids = torch.tensor([encode()], device=weight.device)

    def served() -> Tensor:
        return model(ids, pixels, proprio).actions_normalised

    def shaped(levers: Levers) -> Callable[[], Tensor]:
        forward = ReferenceForward(model, unused, encode, levers)
        return lambda: forward(pixels, proprio).actions_normalised

    ways = {name: shaped(levers) for name, levers in LADDER.items()}
    # What is served, rather than its twin with everything left out.
    ways[list(LADDER)[-1]] = served
    if config.accelerate != "none":
        ways[f"+ {config.accelerate}"] = lambda: (
            backbone.served_model(ids, pixels, proprio).actions_normalised
        )
    times: dict[str, list[float]] = {name: [] for name in ways}
    differences = dict.fromkeys(ways, 0.0)
    with torch.inference_mode():
        expected = served().float()
        for turn in range(config.warmup + config.repeats):
            for name in list(ways) if turn % 2 else reversed(list(ways)):
                elapsed, actions = _timed(ways[name], weight.device)
                # NumPy's maximum keeps NaN; Python's max(0.0, nan) is 0.0, as if nothing differed.
                difference = (actions.float() - expected).abs().max().item()
                differences[name] = float(np.maximum(differences[name], difference))
                if turn >= config.warmup:
                    times[name].append(elapsed)
                done()
    rungs: list[Rung] = []
    for name, taken in times.items():
        latency = Latency.of(taken)
        first, last = (rungs[0].latency.p50, rungs[-1].latency.p50) if rungs else (latency.p50,) * 2
        rungs.append(Rung(name, latency, last / latency.p50, first / latency.p50, differences[name]))
    return tuple(rungs)


def _timed(call: Callable[[], Tensor], device: torch.device) -> tuple[float, Tensor]:
    """Milliseconds until the result is there, and the result."""
    _wait(device)
    begin = time.perf_counter()
    result = call()
    _wait(device)
    return 1e3 * (time.perf_counter() - begin), result


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _load(config: BackboneBenchConfig) -> tuple[OpenVlaOft, Tokenizer]:
    """The backbone to measure and its tokenizer."""
    if config.random_weights:
        network = config.network
        dtype = config.dtype_for(network.name)
        device = find_device(config.device)
        needed = sum(p.numel() for p in build_on_meta(network).parameters()) * DTYPES[dtype].itemsize
        check_memory(device, needed, f"size '{config.size}' in {dtype}")
        start_peak(device)
        made = random_backbone(
            network, seed=config.seed, device=device, dtype=DTYPES[dtype], accelerate=config.accelerate
        )
        return made, tokenizer_for(network)
    start_peak(find_device(config.device))
    path = Path(config.checkpoint)
    file = path.is_file()
    # A published folder is OpenVLA-OFT's own, whatever its size.
    name = read_head(path).config.name if file else OPENVLA_OFT_7B.name
    backbone = load_backbone(
        "openvla_oft",
        config.checkpoint,
        device=config.device,
        dtype=config.dtype_for(name),
        unnorm_key=config.unnorm_key or None,
        options=config.folder,
        accelerate=config.accelerate,
    )
    assert isinstance(backbone, OpenVlaOft)
    folder = path.parent if file else find_folder(config.checkpoint)
    own = OWN_TOKENIZERS.get(backbone.config.tokenizer)
    return backbone, own() if own else LlamaTokenizer(folder)


def synthetic_observation(backbone: OpenVlaOft, seed: int) -> Observation:
    """Images of coloured squares with a little noise, as costly to encode as a rendered scene; a robot at rest."""
    random = np.random.default_rng(seed)
    images = {}
    for camera in backbone.config.cameras:
        squares = (
            random.integers(0, 240, (16, 16, 3)).repeat(CAMERA_SIDE // 16, 0).repeat(CAMERA_SIDE // 16, 1)
        )
        images[camera] = (squares + random.integers(0, 16, squares.shape)).astype(np.uint8)
    return Observation(images, np.zeros(backbone.config.proprio_dim, np.float32), INSTRUCTION)


@contextmanager
def _memory_errors(config: BackboneBenchConfig) -> Iterator[None]:
    """Torch's failed allocations as one line."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not isinstance(error, torch.OutOfMemoryError) and "not enough memory" not in str(error):
            raise
        raise UserError(
            f"device '{config.device}' ran out of memory; use dtype bfloat16, a smaller size or another device"
        ) from error


def disagreement(report: BackboneReport) -> str:
    """What is wrong, in one line, if a way's actions differ by more than rounding or are no numbers; else nothing."""
    dtype = report.backbone["dtype"]
    limit = ROUNDING[DTYPES[dtype]]
    for rung in report.ladder:
        if not rung.difference <= limit:  # also NaN
            return (
                f"'{rung.name}' gives other actions than the served network: they differ by {rung.difference:.1e}, at "
                f"most {limit:g} is rounding in {dtype}; its time means nothing"
            )
    return ""


def table(report: BackboneReport) -> str:
    """The report for people."""
    machine, backbone = report.machine, report.backbone
    weights = "trained" if backbone["trained"] else "random"
    lines = [
        f"{backbone['name']}: {backbone['parameters'] / 1e6:.1f} M parameters, {weights} weights, "
        f"{backbone['dtype']}, {report.rows} rows",
        f"{machine['device']}, {machine['threads']} CPU threads; torch {machine['torch']}, "
        f"transformers {machine['transformers']}",
        f"{report.settings['repeats']} calls of each kind; loading {report.load_s:.1f} s, checks and first query "
        f"{report.first_query_s:.1f} s; peak memory {report.peak_bytes / 1e9:.2f} GB",
        "",
        f"{'one chunk, as served (ms)':<28}{'best':>10}{'p50':>10}{'p95':>10}{'p99':>10}",
    ]
    for name, latency in (
        ("from observation to chunk", report.query),
        ("  of it images and prompt", report.preprocess),
        ("  of it forward pass", report.forward),
    ):
        lines.append(f"{name:<28}{_numbers(latency)}")
    lines.append("")
    if not report.ladder:
        lines.append("no comparison: only the L1 head without FiLM has a reference-shaped twin")
        return "\n".join(lines) + "\n"
    lines.append(
        f"{'forward pass (ms)':<28}{'best':>10}{'p50':>10}{'p95':>10}{'p99':>10}{'step':>8}{'total':>8}{'difference':>12}"
    )
    lines += [
        f"{rung.name:<28}{_numbers(rung.latency)}{rung.step:>7.3f}x{rung.total:>7.3f}x{rung.difference:>12.1e}"
        for rung in report.ladder
    ]
    return "\n".join(lines) + "\n"


def _numbers(latency: Latency) -> str:
    return "".join(f"{value:>10.2f}" for value in (latency.best, latency.p50, latency.p95, latency.p99))
