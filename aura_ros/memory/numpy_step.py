"""Step a memory in the control loop: batch 1, NumPy only, no array allocated per step.

Computes what `MemoryModule` computes in evaluation mode, which is its reference in the tests.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aura_ros.errors import UserError
from aura_ros.memory.checkpoint import (
    Arrays,
    MemoryCheckpoint,
    check_arrays,
    content_hash,
    load_checkpoint,
)
from aura_ros.memory.config import ALWAYS_WRITE_VARIANTS, GATED_VARIANTS, MemoryConfig, Variant
from aura_ros.memory.folding import fold, sigmoid

FloatArray = npt.NDArray[np.float32]

# That of the torch module.
NORM_EPSILON = 1e-12

FLOAT32_MAX = float(np.finfo(np.float32).max)
# What ReLU compares with: a Python 0.0 would be converted anew each time, for half a microsecond.
ZERO = np.zeros((), dtype=np.float32)


@dataclass(slots=True)
class MemoryStep:
    """What one step did.

    fired: whether the gate or schedule (or `force`) decided to write. probability: p, in 0..1.
    surprise: ||k^T W - v||^2 before the write; surprise_normalised: by the training's running statistics.
    output: float32 [out_dim], valid until the next step. written_bytes: size of W if W changed, else 0.
    threshold: the one that p was compared with.
    """

    fired: bool
    probability: float
    surprise: float
    surprise_normalised: float
    output: FloatArray
    written_bytes: int
    threshold: float


class NumpyMemory:
    """A memory with its state, stepped once per policy query.

    The state is W, float32 [dk, dv], changed in place, and the previous read, float32 [dv]. An error leaves
    it as it was. One thread may step, reset and load; `threshold` may be set from any other at any time.
    """

    def __init__(self, checkpoint: MemoryCheckpoint) -> None:
        config = checkpoint.config
        if config.variant is Variant.FULL_RECURRENCE:
            raise UserError(
                f"variant '{config.variant.value}' has no NumPy step; use one of "
                + ", ".join(v.value for v in Variant if v is not Variant.FULL_RECURRENCE)
            )
        self._config = config
        self._hash = checkpoint.weights_hash
        self._threshold = config.threshold
        # Looked up once: a set of enumerations costs a microsecond to ask.
        self._has_fast_weights = config.has_fast_weights
        self._normalise_keys = config.normalise_keys
        self._head_sees_z = config.head_sees_z
        self._gated = config.variant in GATED_VARIANTS
        self._relu_first = config.input_kind == "encoder"
        self._steps = self._writes = self._episode = 0
        folded = fold(config, checkpoint.arrays)
        self._first, self._tail, self._head = folded.first, folded.tail, folded.head
        self._gate_seen, self._gate_out, self._gate_out_bias = (
            folded.gate_seen,
            folded.gate_out,
            folded.gate_out_bias,
        )
        self._error_scale, self._keep = folded.error_scale, folded.keep
        self._surprise_mean, self._surprise_scale = folded.surprise_mean, folded.surprise_scale
        self._allocate()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> NumpyMemory:
        """Read an exported memory, without torch. Raises UserError on a bad file."""
        return cls(load_checkpoint(path))

    @classmethod
    def from_arrays(cls, config: MemoryConfig, arrays: Arrays) -> NumpyMemory:
        """Make one of the module's parameters and buffers, by name. Raises UserError if they do not fit."""
        check_arrays(config, arrays, "memory")
        return cls(MemoryCheckpoint(config, arrays, content_hash(config.to_json(), arrays)))

    @classmethod
    def from_checkpoint(cls, checkpoint: MemoryCheckpoint) -> NumpyMemory:
        """Make one of a checkpoint in memory, as `build_untrained` gives it."""
        return cls.from_arrays(checkpoint.config, checkpoint.arrays)

    def _allocate(self) -> None:
        """Make the state and every buffer a step needs; names of parts are views into them."""
        config = self._config
        dk, dv = (config.dk, config.dv) if config.has_fast_weights else (0, 0)

        def zeros(*shape: int) -> FloatArray:
            return np.zeros(shape, dtype=np.float32)

        self._weights = zeros(dk, dv)
        # What the gate's second matrix sees: the previous read, then the normalised surprise.
        self._seen = zeros(dv + 1)
        self._previous_read = self._seen[:dv]

        self._first_out = zeros(len(self._first[1]) if self._first else 0)
        self._tail_out = zeros(len(self._tail[1]))
        self._queries = self._tail_out[: 2 * dk].reshape(2, dk)
        self._query, self._key = self._queries
        self._value = self._tail_out[2 * dk : 2 * dk + dv]
        rows = len(self._tail_out) - (config.head_width if config.head_sees_z else 0)
        self._gate_hidden = self._tail_out[2 * dk + dv : rows]
        # Empty where the head does not see z.
        self._head_part = self._tail_out[rows:]
        self._gate_part = zeros(len(self._gate_hidden))
        reads = zeros(2, dv)
        self._recalled = reads
        self._error = reads[1]
        self._read = reads[0] if config.has_fast_weights else self._tail_out[:rows]
        self._key_column, self._error_row = self._key[:, None], self._error[None, :]
        self._outer, self._candidate = zeros(dk, dv), zeros(dk, dv)
        self._candidate_flat = self._candidate.reshape(-1)
        self._candidate_bytes = self._candidate.view(np.uint8).reshape(-1).data
        self._weights_bytes = self._weights.view(np.uint8).reshape(-1).data
        self._head_out = tuple(zeros(len(bias)) for _, bias in self._head)

    def step(self, hidden: FloatArray, force: bool | None = None) -> MemoryStep:
        """Read, then gate, then maybe write.

        hidden: float32 [input_dim], finite. force: write (True) or skip (False) whatever the gate says.
        Raises UserError, the state untouched, on a wrong or non-finite input, when a result would overflow,
        or when `force` is given to a variant without gated writes.
        """
        # Overflow is looked for and refused below; NumPy need not warn of it as well.
        with np.errstate(over="ignore", invalid="ignore"):
            self._check_input(hidden, force)
            self._encode(hidden)
            if not self._has_fast_weights:
                output = self._run_head()
                self._steps += 1
                return MemoryStep(False, 0.0, 0.0, 0.0, output, 0, self._threshold)
            surprise, normalised = self._recall()
            threshold = self._threshold  # once: another thread may set it
            probability, fired = self._decide(normalised, threshold)
            if force is not None:
                fired = bool(force)
            output = self._run_head()
            changes = fired and self._propose()
        # Nothing below can fail: the state changes as a whole or not at all.
        written = 0
        if changes:
            np.copyto(self._weights, self._candidate)
            self._writes += 1
            written = self._weights.nbytes
        self._previous_read[:] = self._read
        self._steps += 1
        return MemoryStep(fired, probability, surprise, normalised, output, written, threshold)

    def _check_input(self, hidden: FloatArray, force: bool | None) -> None:
        if hidden.dtype != np.float32 or hidden.shape != (self._config.input_dim,):
            raise UserError(
                f"memory input is {hidden.dtype} {list(hidden.shape)}; "
                f"expected float32 [{self._config.input_dim}]"
            )
        if not math.isfinite(hidden.dot(hidden)):
            bad = int(np.count_nonzero(~np.isfinite(hidden)))
            what = f"holds {bad} NaN or infinite values" if bad else "is too large for float32"
            raise UserError(f"memory input {what}; expected a finite vector, check the backbone's output")
        if force is not None and not self._has_fast_weights:
            raise UserError(
                f"force: variant '{self._config.variant.value}' has no gated write; leave force unset"
            )

    def _encode(self, x: FloatArray) -> None:
        """Fill q, k, v and the gate's part of z, or the read of a variant without fast weights."""
        if self._first is not None:
            x = _linear(self._first, x, self._first_out)
            if self._relu_first:
                np.maximum(x, ZERO, out=x)
        _check_finite(_linear(self._tail, x, self._tail_out), "the encoded input")

    def _recall(self) -> tuple[float, float]:
        """Fill read and error from q, k, v and W; return the surprise, raw and normalised."""
        if self._normalise_keys:
            query, key = self._query, self._key
            query *= 1.0 / max(math.sqrt(query.dot(query)), NORM_EPSILON)
            key *= 1.0 / max(math.sqrt(key.dot(key)), NORM_EPSILON)
        self._queries.dot(self._weights, self._recalled)
        error = self._error
        error -= self._value
        surprise = float(error.dot(error))
        normalised = (surprise - self._surprise_mean) * self._surprise_scale
        if not abs(normalised) < FLOAT32_MAX:
            raise _overflow("the surprise")
        return surprise, normalised

    def _decide(self, normalised: float, threshold: float) -> tuple[float, bool]:
        """Probability of a write, and whether to write."""
        config = self._config
        if self._gated:
            # The slot of the surprise is scratch: the state is the rest of the buffer.
            self._seen[-1] = normalised
            hidden = self._gate_hidden
            hidden += self._gate_seen.dot(self._seen, self._gate_part)
            np.maximum(hidden, ZERO, out=hidden)
            logit = float(self._gate_out.dot(hidden)) + self._gate_out_bias
            if not math.isfinite(logit):
                raise _overflow("the gate")
            probability = sigmoid(logit / config.temperature)
            return probability, probability > threshold
        if config.variant in ALWAYS_WRITE_VARIANTS:
            return 1.0, True
        if config.variant is Variant.RANDOM_WRITE:
            draw = scheduled_draw(config.seed, self._episode, self._steps)
            return config.write_rate, draw < config.write_rate
        due = self._steps % config.write_interval == 0
        return float(due), due

    def _run_head(self) -> FloatArray:
        (first, second, last), (a, b, output) = self._head, self._head_out
        _linear(first, self._read, a)
        if self._head_sees_z:
            a += self._head_part
        np.maximum(a, ZERO, out=a)
        np.maximum(_linear(second, a, b), ZERO, out=b)
        _check_finite(_linear(last, b, output), "the output")
        return output

    def _propose(self) -> bool:
        """Put the W of a write into the candidate; return whether it differs from W in any bit."""
        candidate, error = self._candidate, self._error
        np.multiply(self._weights, self._keep, out=candidate)
        error *= self._error_scale
        # As a matrix product, since a broadcast np.multiply allocates its own buffer of this size.
        self._key_column.dot(self._error_row, self._outer)
        candidate -= self._outer
        _check_finite(self._candidate_flat, "a write")
        # Compared as bytes, which stops at the first difference and so costs next to nothing.
        return self._candidate_bytes != self._weights_bytes

    def reset(self) -> None:
        """Zero the state and the counters. `random_write` goes on to its next episode's schedule."""
        self._weights.fill(0.0)
        self._previous_read.fill(0.0)
        self._steps = self._writes = 0
        self._episode += 1

    def state_dict(self) -> dict[str, npt.NDArray[np.generic]]:
        """Copies of W, previous read (float32) and the counters (int64), for `load_state_dict`."""
        return {
            "fast_weights": self._weights.copy(),
            "previous_read": self._previous_read.copy(),
            "steps": np.array(self._steps, dtype=np.int64),
            "writes": np.array(self._writes, dtype=np.int64),
            "episode": np.array(self._episode, dtype=np.int64),
        }

    def check_state(self, state: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Raise UserError on a wrong name, shape, dtype or value; reads nothing that a step changes."""
        current = self.state_dict()
        if set(state) != set(current):
            raise UserError(f"memory state has {sorted(state)}; expected {sorted(current)}")
        for name, like in current.items():
            array = state[name]
            if array.shape != like.shape or array.dtype != like.dtype:
                raise UserError(
                    f"memory state: {name} is {array.dtype} {list(array.shape)}; expected {like.dtype} "
                    f"{list(like.shape)}; load a state that this memory saved"
                )
            if not _sound(array):
                raise UserError(
                    f"memory state: {name} holds NaN, infinity or a negative count; reset instead"
                )

    def load_state_dict(self, state: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Go on from a saved state. Raises UserError, the state untouched, as `check_state` does."""
        self.check_state(state)
        np.copyto(self._weights, state["fast_weights"])
        np.copyto(self._previous_read, state["previous_read"])
        self._steps, self._writes = int(state["steps"]), int(state["writes"])
        self._episode = int(state["episode"])

    @property
    def config(self) -> MemoryConfig:
        """The configuration it was built and trained with."""
        return self._config

    @property
    def weights_hash(self) -> str:
        """Return the sha256 (hex) of configuration and weights."""
        return self._hash

    @property
    def threshold(self) -> float:
        """The gate fires when p > threshold. Setting it is atomic; outside 0..1 raises UserError."""
        return self._threshold

    @threshold.setter
    def threshold(self, value: float) -> None:
        if not (isinstance(value, (int, float)) and 0.0 <= value <= 1.0):
            raise UserError(f"threshold {value!r} is not allowed; give a number from 0 to 1")
        self._threshold = float(value)

    @property
    def episode(self) -> int:
        """Resets so far, which `random_write` draws its schedule from; may be set."""
        return self._episode

    @episode.setter
    def episode(self, value: int) -> None:
        self._episode = value

    @property
    def steps(self) -> int:
        """Memory steps since the start or the last reset."""
        return self._steps

    @property
    def writes(self) -> int:
        """Changes of W since the start or the last reset."""
        return self._writes

    @property
    def state_bytes(self) -> int:
        """Bytes of the live state arrays, W and previous read: 4,224 at N = 32."""
        return self._weights.nbytes + self._previous_read.nbytes

    @property
    def state_norm(self) -> float:
        """Frobenius norm of W."""
        return float(np.linalg.norm(self._weights))


def scheduled_draw(seed: int, episode: int, step: int) -> float:
    """Uniform number in [0, 1) that depends on nothing but its arguments (splitmix64's finaliser).

    So a restored memory goes on with the schedule it had, without a generator's state to save.
    """
    mask = 2**64 - 1
    mixed = seed
    for counter in (episode, step):
        mixed = (mixed + (counter + 1) * 0x9E3779B97F4A7C15) & mask
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
        mixed ^= mixed >> 31
    return mixed / 2.0**64


def _linear(layer: tuple[FloatArray, FloatArray], x: FloatArray, out: FloatArray) -> FloatArray:
    layer[0].dot(x, out)
    out += layer[1]
    return out


def _check_finite(vector: FloatArray, what: str) -> None:
    # One dot product instead of a mask: infinite or NaN if any element is, or if the norm overflows.
    if not math.isfinite(vector.dot(vector)):
        raise _overflow(what)


def _sound(array: npt.NDArray[np.generic]) -> bool:
    """Whether a part of a saved state may become the state: a count, or an array whose norm is finite.

    As W and q are both that, so is every element of the read (Cauchy and Schwarz), and no step checks it.
    """
    if array.dtype == np.int64:
        return int(array) >= 0
    flat = array.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(flat.dot(flat))


def _overflow(what: str) -> UserError:
    return UserError(
        f"memory: {what} overflows float32; scale the input down, reset the memory, or use normalised keys"
    )
