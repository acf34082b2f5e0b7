"""Fold a checkpoint's weights for the NumPy step: fewer, larger matrices that compute the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from aura_ros.errors import UserError
from aura_ros.memory.checkpoint import Arrays
from aura_ros.memory.config import MemoryConfig

FloatArray = npt.NDArray[np.float32]
Layer = tuple[FloatArray, FloatArray]

# That of the torch module.
STATISTICS_EPSILON = 1e-5
FLOAT32_MAX = float(np.finfo(np.float32).max)
# Above it eta itself leaves float32.
MAX_ETA_RAW = 80.0


def _empty() -> FloatArray:
    return np.zeros(0, dtype=np.float32)


@dataclass
class FoldedWeights:
    """What a step multiplies with; layers are (weight [out, in], bias [out]), float32.

    first: before the ReLU of an encoder, or a wide input's projection; None when `tail` takes the input.
    tail: rows q, k, v and the gate's hidden layer as far as z decides it (without fast weights: the read); then, where the
        head sees z, its first layer as far as z decides it.
    gate_seen: [hidden, dv + 1], of the previous read and the surprise. gate_out: [hidden], then its bias.
    error_scale: 2 eta. keep: 1 - alpha. surprise_mean, surprise_scale: of the frozen running statistics.
    head: three layers from read to output.
    """

    first: Layer | None = None
    tail: Layer = field(default_factory=lambda: (_empty(), _empty()))
    head: tuple[Layer, ...] = ()
    gate_seen: FloatArray = field(default_factory=_empty)
    gate_out: FloatArray = field(default_factory=_empty)
    gate_out_bias: float = 0.0
    error_scale: np.float32 = field(default_factory=lambda: np.float32(0.0))
    keep: np.float32 = field(default_factory=lambda: np.float32(1.0))
    surprise_mean: float = 0.0
    surprise_scale: float = 1.0


def fold(config: MemoryConfig, arrays: Arrays) -> FoldedWeights:
    """Multiply out neighbouring Linears, in float64, wherever that leaves fewer multiplications.

    Raises UserError when a product or eta leaves float32, or a variance is negative.
    """
    folded = FoldedWeights()
    exact = {name: array.astype(np.float64) for name, array in arrays.items()}

    def linear(name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        return exact[f"{name}.weight"], exact[f"{name}.bias"]

    if config.has_fast_weights:
        gate_weight, gate_bias = linear("gate.0")
        # Rows q, k, v, and the gate's hidden layer as far as z decides it.
        tail = [exact["to_q.weight"], exact["to_k.weight"], exact["to_v.weight"]]
        tail_weight = np.concatenate([*tail, gate_weight[:, : config.d_model]])
        tail_bias = np.concatenate([np.zeros(2 * config.dk + config.dv), gate_bias])
        folded.gate_seen = _single(gate_weight[:, config.d_model :])
        folded.gate_out = _single(exact["gate.2.weight"][0])
        folded.gate_out_bias = float(exact["gate.2.bias"][0])
        eta_raw = float(exact["eta_raw"])
        if eta_raw > MAX_ETA_RAW:
            raise UserError(f"memory: eta_raw is {eta_raw:g}, allowed up to {MAX_ETA_RAW:g}; train again")
        folded.error_scale = np.float32(2.0 * math.exp(eta_raw))
        # 1 - sigmoid(alpha_raw) = sigmoid(-alpha_raw)
        folded.keep = np.float32(sigmoid(-float(exact["alpha_raw"])))
        folded.surprise_mean = float(exact["surprise_mean"])
        variance = float(exact["surprise_variance"])
        if variance < 0:
            raise UserError(f"memory: surprise_variance is {variance:g}, allowed from 0; train again")
        folded.surprise_scale = 1.0 / math.sqrt(variance + STATISTICS_EPSILON)
    else:
        tail_weight, tail_bias = linear("to_read")

    # The head's part of z is one more row block of the tail; its bias stays with the read's part.
    weight, head_bias = linear("head.action.0")
    head_read, head_z = weight[:, : config.dv], weight[:, config.dv :]
    if config.head_sees_z:
        tail_weight = np.concatenate([tail_weight, head_z])
        tail_bias = np.concatenate([tail_bias, np.zeros(len(head_z))])

    if config.input_kind == "encoder":
        first_weight, first_bias = linear("encoder.0")
        folded.first = (_single(first_weight), _single(first_bias))
        weight, bias = linear("encoder.2")
    else:
        weight, bias = linear("encoder")
        # A wide hidden state is cheaper through its narrow projection than straight into all rows.
        rows, width = tail_weight.shape
        if rows * config.input_dim > width * config.input_dim + rows * width:
            folded.first = (_single(weight), _single(bias))
            weight, bias = np.eye(width), np.zeros(width)
    folded.tail = (_single(tail_weight @ weight), _single(tail_weight @ bias + tail_bias))

    # In evaluation the head's code is mu, so its Linear runs straight into the next one.
    mu_weight, mu_bias = linear("head.to_mu")
    second_weight, second_bias = linear("head.action.2")
    last_weight, last_bias = linear("head.action.4")
    folded.head = (
        (_single(head_read @ mu_weight), _single(head_read @ mu_bias + head_bias)),
        (_single(second_weight), _single(second_bias)),
        (_single(last_weight), _single(last_bias)),
    )
    return folded


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)), without overflow at either end."""
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    return math.exp(x) / (1.0 + math.exp(x))


def _single(array: npt.NDArray[np.float64]) -> FloatArray:
    if not np.abs(array).max() < FLOAT32_MAX:
        raise UserError("memory: its weights overflow float32 when multiplied out; train again")
    return np.ascontiguousarray(array, dtype=np.float32)
