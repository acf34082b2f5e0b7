"""Measure the certificate's premises on a stream of a policy's hidden states and actions (paper section 6.5).

The state is the memory's read o, [dv]. There is no oracle: what is predicted is the action that the policy took, and the
reward is how well. Linear heads are fitted on the first half of the stream; every number is measured on the second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aura_ros.bench.certificate import estimates
from aura_ros.bench.certificate.estimates import ErrorSummary, Form
from aura_ros.bench.certificate.formula import check_discount, trivial_span
from aura_ros.bench.certificate.heads import LinearHead, discounted_returns, fit, lipschitz
from aura_ros.errors import UserError
from aura_ros.memory.numpy_step import NumpyMemory

FloatArray = npt.NDArray[np.float64]

FEWEST_TUPLES = 16


@dataclass(frozen=True)
class Stream:
    """What a policy saw and did, in order.

    hidden: float32 [n, input_dim]. actions: [n, columns], NaN rows where none is known. epoch: of the memory, [n]; it
    begins anew where that changes. step: the memory's, [n]; two that do not follow each other make no tuple.
    """

    hidden: npt.NDArray[np.float32]
    actions: FloatArray
    epoch: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]


@dataclass(frozen=True)
class StreamCertificate:
    """What was measured.

    tuples: how many (state, action, next state), and how many of them were judged. write_rate: of the memory on this
    stream. epsilon: mean over columns of |action - predicted action|, each column by its range in the first half, at
    most 1. delta_w1: mean over coordinates of |next read - predicted next read|, the exact 1-D Wasserstein distance of
    two point masses. residual: the value head on both. `_of_mean`: the same for heads that always predict the mean,
    which know nothing. spread: mean standard deviation of a coordinate of the read. lipschitz: of the value head.
    """

    tuples: int
    judged: int
    block: int
    write_rate: float
    span: float
    epsilon: ErrorSummary
    epsilon_of_mean: float
    delta_w1: ErrorSummary
    delta_w1_of_mean: float
    spread: float
    residual: ErrorSummary
    lipschitz: float
    forms: tuple[Form, ...]


def reads(memory: NumpyMemory, stream: Stream) -> tuple[FloatArray, float]:
    """Step the memory over the stream: its reads [n, dv], and the share of steps that wrote.

    Raises UserError for a memory without fast weights or of another width, and for a hidden state that is not finite.
    """
    config = memory.config
    if not config.has_fast_weights:
        raise UserError(f"memory variant '{config.variant.value}' has no fast weights to read; give another")
    if config.input_dim != stream.hidden.shape[1]:
        raise UserError(
            f"memory reads hidden states of {config.input_dim}, the bag's have {stream.hidden.shape[1]}; "
            "give the memory that this policy had"
        )
    out = np.zeros((len(stream.hidden), config.dv))
    wrote = 0
    for t, hidden in enumerate(stream.hidden):
        if t and stream.epoch[t] != stream.epoch[t - 1]:
            memory.reset()
        wrote += memory.step(hidden).written_bytes > 0
        out[t] = memory.state_dict()["previous_read"]
    return out, wrote / len(out)


def certify_stream(
    stream: Stream,
    memory: NumpyMemory,
    discount: float = 0.9,
    resamples: int = estimates.RESAMPLES,
    seed: int = 0,
) -> StreamCertificate:
    """Measure. The bootstrap draws blocks of consecutive tuples, for neighbours are alike.

    Raises UserError for fewer than 16 tuples, and as `reads` does.
    """
    check_discount(discount)
    state, write_rate = reads(memory, stream)
    known = np.asarray(~np.isnan(stream.actions).any(axis=1), bool)
    follows = (stream.epoch[1:] == stream.epoch[:-1]) & (stream.step[1:] == stream.step[:-1] + 1)
    at = np.flatnonzero(known[:-1] & follows)
    if len(at) < FEWEST_TUPLES:
        raise UserError(
            f"the bag has {len(at)} tuples (hidden state, action, next hidden state); {FEWEST_TUPLES} or more are "
            "needed, record a longer run with publish_latent and record_latents"
        )
    half = len(at) // 2
    fitted, judged = at[:half], at[half:]
    low, high = stream.actions[fitted].min(axis=0), stream.actions[fitted].max(axis=0)
    # A column that stood still has no range to measure by; its own unit stays.
    actions = (stream.actions - low) / np.where(high > low, high - low, 1.0)

    action_head = fit(state[fitted], actions[fitted])
    pair = np.concatenate([state, np.nan_to_num(actions)], axis=1)
    next_head = fit(pair[fitted], state[fitted + 1])
    miss = _miss(actions, action_head(state))
    value_head = _value_head(state, np.where(known, 1 - miss, 0.0), stream.epoch, fitted, discount)
    guessed = next_head(pair[judged])
    off = np.abs(state[judged + 1] - guessed).mean(axis=1)
    # No value is outside what rewards in 0..1 allow, whatever a linear head says; clipping keeps its steepness.
    value, value_guessed = (
        np.clip(value_head(s)[:, 0], 0.0, trivial_span(discount)) for s in (state[judged + 1], guessed)
    )
    residual = np.abs(value - value_guessed)

    block = max(round(len(judged) ** (1 / 3)), 1)
    epsilon, delta, residuals = (
        estimates.resample(_blocks(values, block), resamples, seed)
        for values in (miss[judged], off, residual)
    )
    steepness = lipschitz(value_head.weight[:, 0])
    mean_miss = _miss(actions[judged], actions[fitted].mean(axis=0))
    mean_next = state[fitted + 1].mean(axis=0)
    return StreamCertificate(
        tuples=len(at),
        judged=len(judged),
        block=block,
        write_rate=write_rate,
        span=trivial_span(discount),
        epsilon=estimates.summary(epsilon),
        epsilon_of_mean=float(mean_miss.mean()),
        delta_w1=estimates.summary(delta),
        delta_w1_of_mean=float(np.abs(state[judged + 1] - mean_next).mean()),
        spread=float(state[at].std(axis=0).mean()),
        residual=estimates.summary(residuals),
        lipschitz=steepness,
        forms=estimates.forms(
            epsilon, {"W1": delta}, residuals, {"W1": {"L_V of the value head": steepness}}, discount
        ),
    )


def _miss(actions: FloatArray, predicted: FloatArray) -> FloatArray:
    missed: FloatArray = np.minimum(np.abs(actions - predicted).mean(axis=1), 1.0)
    return missed


def _value_head(
    state: FloatArray,
    rewards: FloatArray,
    epoch: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    discount: float,
) -> LinearHead:
    """Ridge regression of the discounted return on the state, fitted at `rows`; past the end the mean reward goes on."""
    returns = np.zeros_like(rewards)
    # Only what was seen up to the end of the fitted part: the judged part must not teach the head.
    last = int(rows[-1]) + 1
    after = float(rewards[rows].mean()) / (1 - discount)
    for one in np.unique(epoch[:last]):
        inside = np.flatnonzero(epoch[:last] == one)
        returns[inside] = discounted_returns(rewards[inside], discount, after)
    return fit(state[rows], returns[rows][:, None])


def _blocks(values: FloatArray, length: int) -> FloatArray:
    """Consecutive values as rows of `length`, [blocks, length], the last filled up with NaN."""
    rows = -(-len(values) // length)
    filled = np.full(rows * length, np.nan)
    filled[: len(values)] = values
    return filled.reshape(rows, length)
