"""Measure the certificate's premises on a memory of the recall tasks (paper sections 4.4 and 6.6).

The process: a right answer on a query gives 1, everything else 0. The state: the code mu of the memory's read, with the
clock, which all see. Heads are fitted on the first half of the episodes, every number is measured on the second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from aura_ros.bench.certificate import estimates
from aura_ros.bench.certificate.estimates import ErrorSummary, Estimate, Form
from aura_ros.bench.certificate.formula import half_span, total_variation, trivial_span
from aura_ros.bench.certificate.heads import discounted_returns, fit, lipschitz
from aura_ros.bench.certificate.teacher import FINAL_LR, ema_teacher
from aura_ros.bench.recall.tasks import evaluation_episodes
from aura_ros.config import check_fields, option
from aura_ros.errors import UserError
from aura_ros.memory.module import MemoryModule
from aura_ros.training.episodes import Episodes, Task
from aura_ros.training.scan import run_sequence, ungated
from aura_ros.training.settings import SMALLEST_LR

FloatArray = npt.NDArray[np.float64]
BATCH = 256


@dataclass(frozen=True)
class RecallConfig:
    """How it is measured. Checked at construction; raises UserError naming the field."""

    episodes: int = option(1024, "evaluation episodes, half of them to fit heads", minimum=16, maximum=65_536)
    teacher_steps: int = option(200, "gradient steps that the teacher follows", minimum=1, maximum=100_000)
    teacher_lr: float = option(
        FINAL_LR, "learning rate of those steps; 3e-3 is training's peak", minimum=SMALLEST_LR, maximum=1.0
    )
    discount: float = option(0.9, "of rewards, by memory step", minimum=0.0, maximum=0.999)
    resamples: int = option(estimates.RESAMPLES, "of the bootstrap", minimum=100, maximum=1_000_000)
    seed: int = option(0, "of the teacher's training and of the bootstrap", minimum=0, maximum=2**31 - 1)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class RecallCertificate:
    """What was measured.

    queries: how many. epsilon: 1 - probability of the right answer, which is the largest error of AP1 over all answers.
    delta_tv: sum |p - q| between the policy's and the teacher's answers. delta_w1: mean absolute difference of their
    codes: the exact 1-D Wasserstein distance by coordinate of two point masses, averaged. residual: |V^(next state) -
    its prediction|, of single next states, whose own noise is in it. lipschitz: L_V by metric and name. loss: the true
    V* - V^pi at queries, for answers do not move this process: discounted wrong answers from there on.
    """

    task: str
    queries: int
    accuracy: float
    span: float
    epsilon: ErrorSummary
    delta_tv: ErrorSummary
    delta_w1: ErrorSummary
    residual: ErrorSummary
    loss: Estimate
    lipschitz: dict[str, dict[str, float]]
    forms: tuple[Form, ...]


@dataclass(frozen=True)
class Answers:
    """What a memory did over episodes: probabilities [n, T, classes], code mu [n, T, dv]."""

    probabilities: FloatArray
    codes: FloatArray


@torch.no_grad()
def answers(module: MemoryModule, episodes: Episodes) -> Answers:
    """Run a memory in evaluation mode, its random schedule (if any) seeded."""
    torch.manual_seed(0)
    probabilities, codes = [], []
    for start in range(0, len(episodes), BATCH):
        inputs = torch.from_numpy(episodes.observations[start : start + BATCH])
        done = run_sequence(module, inputs) if module.config.has_fast_weights else ungated(module, inputs)
        logits, mu, _ = module.head(done.reads)
        probabilities.append(torch.softmax(logits.double(), -1).numpy())
        codes.append(mu.double().numpy())
    return Answers(np.concatenate(probabilities), np.concatenate(codes))


def certify_recall(
    module: MemoryModule,
    task: Task,
    config: RecallConfig,
    report: Callable[[int, int], None] = lambda done, total: None,
    teacher: MemoryModule | None = None,
) -> RecallCertificate:
    """Measure one memory. teacher: the one its training kept; None: one is made.

    report: steps of the teacher's training done, and in all. Raises UserError for another memory's teacher, and for one
    that is the memory itself: delta would be 0 whatever the memory is.
    """
    if teacher is None:
        teacher = ema_teacher(module, task, config.teacher_steps, config.seed, config.teacher_lr, report)
    elif teacher.config != module.config:
        raise UserError(
            "the teacher's configuration is not the checkpoint's; give the one of the same training"
        )
    other = teacher.state_dict()
    if all(torch.equal(tensor, other[name]) for name, tensor in module.state_dict().items()):
        raise UserError(
            "the teacher's weights are the checkpoint's own, and delta would be 0; give the teacher that training kept, "
            "or a larger teacher_lr or more teacher_steps"
        )
    episodes = evaluation_episodes(task, config.episodes)
    ours, theirs = answers(module.eval(), episodes), answers(teacher, episodes)
    asked = episodes.targets >= 0
    right = np.take_along_axis(ours.probabilities, np.maximum(episodes.targets, 0)[..., None], axis=2)[..., 0]
    half = config.episodes // 2
    judged, asked_later = slice(half, None), asked[half:]

    errors = {
        "epsilon": 1 - right,
        "tv": total_variation(ours.probabilities, theirs.probabilities),
        "w1": np.abs(ours.codes - theirs.codes).mean(axis=2),
    }
    measured = {
        name: estimates.resample(_padded(values[judged], asked_later), config.resamples, config.seed)
        for name, values in errors.items()
    }
    returns = discounted_returns(np.where(asked, right, 0.0), config.discount)
    residual, seen, weight = _value(ours.codes, returns, asked, half)
    measured["residual"] = estimates.resample(residual, config.resamples, config.seed)
    span = trivial_span(config.discount)
    constants = {
        "TV": {"L_V = span / 2": span / 2, "L_V of the value head": half_span(seen)},
        "W1": {"L_V of the value head": lipschitz(weight)},
    }
    deltas = {"TV": measured["tv"], "W1": measured["w1"]}
    wrong = asked & (ours.probabilities.argmax(-1) != episodes.targets)
    ahead = _padded(discounted_returns(wrong.astype(float), config.discount)[judged], asked_later)
    loss = estimates.resample_mean(ahead, config.resamples, config.seed).estimate()
    return RecallCertificate(
        task=task.name,
        queries=int(asked_later.sum()),
        accuracy=1 - float(wrong[judged][asked_later].mean()),
        span=span,
        epsilon=estimates.summary(measured["epsilon"]),
        delta_tv=estimates.summary(measured["tv"]),
        delta_w1=estimates.summary(measured["w1"]),
        residual=estimates.summary(measured["residual"]),
        loss=loss,
        lipschitz=constants,
        forms=estimates.forms(measured["epsilon"], deltas, measured["residual"], constants, config.discount),
    )


def _value(
    codes: FloatArray, returns: FloatArray, asked: npt.NDArray[np.bool_], half: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """One-step value residuals, padded by episode; V^ at the judged states; V^'s weights on the code, [dv].

    V^ is a ridge regression of the return on [code, clock]; a second one predicts V^ of the next state from this one.
    """
    count, steps, width = codes.shape
    clock = np.broadcast_to(np.eye(steps), (count, steps, steps))
    state = np.concatenate([codes, clock], axis=2)
    value_head = fit(state[:half][asked[:half]], returns[:half][asked[:half]][:, None])
    value = value_head(state.reshape(count * steps, -1)).reshape(count, steps)
    goes_on = asked[:, :-1]
    step_head = fit(state[:half, :-1][goes_on[:half]], value[:half, 1:][goes_on[:half]][:, None])
    predicted = step_head(state[half:, :-1].reshape(-1, width + steps)).reshape(count - half, steps - 1)
    residual = _padded(np.abs(value[half:, 1:] - predicted), goes_on[half:])
    return residual, value[half:][asked[half:]], value_head.weight[:width, 0]


def _padded(values: FloatArray, chosen: npt.NDArray[np.bool_]) -> FloatArray:
    """The chosen values of each row, [rows, most of a row], NaN where a row has fewer."""
    order = np.argsort(~chosen, axis=1, kind="stable")[:, : max(int(chosen.sum(axis=1).max()), 1)]
    kept = np.where(chosen, values, np.nan)
    padded: FloatArray = np.take_along_axis(kept, order, axis=1)
    return padded
