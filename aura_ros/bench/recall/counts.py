"""What a variant costs before it is trained: parameters, those a gradient reaches, state bytes, and allocator peaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from aura_ros.bench.recall import paper
from aura_ros.bench.recall.scores import state_bytes
from aura_ros.bench.recall.tasks import MAIN, SPARSE
from aura_ros.errors import UserError
from aura_ros.memory.config import FAST_WEIGHT_VARIANTS, MemoryConfig, Variant
from aura_ros.memory.module import MemoryModule
from aura_ros.training.episodes import Task
from aura_ros.training.objective import Objective
from aura_ros.training.settings import ObjectiveConfig, TrainConfig
from aura_ros.training.train import rollout, token_gate_loss

SIZES = (16, 32, 64)
DEVICES = ("cpu", "cuda")
SOURCES = {
    "cpu": "the running sum of the allocations that torch.profiler saw (CPU; NumPy's own are not seen)",
    "cuda": "torch.cuda.max_memory_allocated (CUDA)",
}


@dataclass(frozen=True)
class Count:
    """One variant at one size.

    parameters: on the main task with the paper's unused predictor, as its table 6 counts them; trained: without it.
    gradient_active: on the sparse task, as its section B.2 counts them. state_bytes: carried, batch 1, float32.
    training_peak, inference_peak: bytes, the most that was allocated at once in one gradient step of `batch` episodes of
    the main task and in one step of batch 1.
    """

    variant: str
    state_dim: int
    parameters: int
    published: int | None
    trained: int
    gradient_active: int
    state_bytes: int
    training_peak: int
    inference_peak: int


def counts(batch: int = 64, sizes: Sequence[int] = SIZES, device: str = "cpu") -> Iterator[Count]:
    """One `Count` for each variant and size. Raises UserError for a device or batch that cannot be."""
    if device not in DEVICES:
        raise UserError(f"device '{device}' is unknown; choose one of: {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device 'cuda' is not here; give --device cpu")
    if not 1 <= batch <= 4096:
        raise UserError(f"batch {batch} is not allowed; give 1 to 4096")
    if not sizes:
        raise UserError("budget has no size; give state sizes N such as 16,32,64")
    torch.set_num_threads(1)
    for size in sizes:
        for variant in Variant:
            config = _config(variant, size, MAIN)
            module = MemoryModule(config)
            table = dict(zip(SIZES, paper.PARAMETERS[variant.value], strict=True))
            predictor = dataclasses.replace(config, predictor=variant in FAST_WEIGHT_VARIANTS)
            yield Count(
                variant=variant.value,
                state_dim=size,
                parameters=parameters(MemoryModule(predictor)),
                published=table.get(size),
                trained=parameters(module),
                gradient_active=gradient_active(_config(variant, size, SPARSE), SPARSE),
                state_bytes=state_bytes(module, 1),
                training_peak=peak(partial(_train_once, config, MAIN, batch, device), device),
                inference_peak=peak(partial(_infer_once, config, device), device),
            )


def _config(variant: Variant, size: int, task: Task) -> MemoryConfig:
    # 17 tokens whatever the task: the paper's extra head of 1,165 parameters.
    return MemoryConfig(input_dim=task.input_dim, out_dim=task.classes, variant=variant, dk=size, dv=size)


def parameters(module: torch.nn.Module) -> int:
    """How many numbers are learned."""
    return sum(p.numel() for p in module.parameters())


def gradient_active(config: MemoryConfig, task: Task) -> int:
    """How many of them one backward pass over a few episodes reaches."""
    module = _backward(config, task, batch=4, device="cpu")
    return sum(p.numel() for p in module.parameters() if p.grad is not None)


def _backward(config: MemoryConfig, task: Task, batch: int, device: str) -> MemoryModule:
    module = MemoryModule(config).to(device).train()
    episodes = task.episodes(batch, np.random.default_rng(0))
    inputs, targets, tokens = (
        torch.from_numpy(part).to(device)
        for part in (episodes.observations, episodes.targets, episodes.tokens)
    )
    asked = targets >= 0
    done = rollout(module, inputs, TrainConfig(gate_noise=0.0), opened=False)
    logits, mu, logvar = module.head(done.reads[asked])
    total = Objective(ObjectiveConfig(), 1)(0, logits, targets[asked], mu, logvar, done.soft, done.gate).total
    if config.variant is Variant.LEARNED_TOKEN_GATE:
        total = total + token_gate_loss(module, done, tokens % config.token_classes, 0.1)
    total.backward()
    return module


def _train_once(config: MemoryConfig, task: Task, batch: int, device: str) -> None:
    module = _backward(config, task, batch, device)
    torch.optim.AdamW(module.parameters()).step()


@torch.no_grad()
def _infer_once(config: MemoryConfig, device: str) -> None:
    module = MemoryModule(config).to(device).eval()
    module.step(torch.zeros(1, config.input_dim, device=device))


def peak(work: Callable[[], None], device: str) -> int:
    """The most bytes that were allocated at once while `work` ran, from nothing."""
    if device == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        # What a memory makes on its way is made on the device too.
        with torch.device("cuda"):
            work()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    now = most = 0
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def table(found: Sequence[Count], batch: int, device: str) -> str:
    """Counts as text, beside the paper's."""
    lines = [
        f"{'variant':<19}{'N':>3} {'parameters':>11} {'paper':>8} {'trained':>8} {'gradient-active':>16} "
        f"{'state bytes':>12} {'peak, training':>15} {'peak, inference':>16}"
    ]
    for c in found:
        published = "-" if c.published is None else f"{c.published:,}"
        lines.append(
            f"{c.variant:<19}{c.state_dim:>3} {c.parameters:>11,} {published:>8} {c.trained:>8,} {c.gradient_active:>16,} "
            f"{c.state_bytes:>12,} {c.training_peak:>15,} {c.inference_peak:>16,}"
        )
    active = paper.GRADIENT_ACTIVE
    lines += [
        "Parameters: main task, with the paper's unused predictor, as its table 6 counts; trained: without it. "
        "Gradient-active: sparse task;",
        f"the paper's at N = 32: {active['aura']:,} (aura), {active['write_every_step']:,} (scheduled writes).",
        f"Peaks in bytes: {SOURCES[device]}, weights, gradients and optimiser included;",
        f"training: one step of {batch} episodes of the main task; inference: one step, batch 1.",
        f"The paper's CUDA peak of its 100,000-step run, {paper.CUDA_PEAK:,} bytes, is another quantity than the "
        "state's bytes.",
    ]
    return "\n".join(lines) + "\n"
