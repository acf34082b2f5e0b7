"""The gates' scan in NumPy, for training on a CPU: a step costs a dozen small calls, and only what fires is written.

Equal to `scan.scan_gates` with tensors, its naive twin, up to rounding; half a gradient step was spent there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aura_ros.memory.module import STATISTICS_EPSILON, STATISTICS_MOMENTUM, MemoryModule

Array = npt.NDArray[Any]


# A batch that explodes is left out later; sigmoid(-inf) is 0 as it should be.
@np.errstate(over="ignore", invalid="ignore")
def scan_gates_numpy(
    module: MemoryModule, z: Array, q: Array, k: Array, v: Array, noise: Array | None, force: Array | None
) -> tuple[Array, Array, Array]:
    """As `scan.scan_gates`, arrays for tensors: fired bool [B, T], previous reads [B, T, dv], surprise [B, T]."""
    config, (batch, steps, _) = module.config, z.shape
    weight, bias, last, last_bias = (
        module.gate.get_parameter(name).detach().numpy()
        for name in ("0.weight", "0.bias", "2.weight", "2.bias")
    )
    width = config.d_model
    # Steps first: what a step reads then lies together.
    from_z = np.ascontiguousarray((z @ weight[:, :width].T + bias).transpose(1, 0, 2))
    from_read, from_surprise, last = np.ascontiguousarray(weight[:, width:-1].T), weight[:, -1], last[0]
    qk = np.ascontiguousarray(np.stack([q, k], axis=2).transpose(1, 0, 2, 3))
    keys, values = np.ascontiguousarray(k.transpose(1, 0, 2)), np.ascontiguousarray(v.transpose(1, 0, 2))
    eta2 = 2 * module.eta.detach().numpy()
    keep, one = 1 - module.alpha.detach().numpy(), z.dtype.type(1)
    weights, change = (np.zeros((batch, config.dk, config.dv), z.dtype) for _ in range(2))
    read, both = np.zeros((batch, config.dv), z.dtype), np.empty((batch, 2, config.dv), z.dtype)
    fired = np.zeros((steps, batch), bool)
    previous, surprises = np.zeros((steps, batch, config.dv), z.dtype), np.zeros((steps, batch), z.dtype)
    statistics = _Statistics(module)
    for t in range(steps):
        np.matmul(qk[t], weights, out=both)
        error = both[:, 1] - values[t]
        surprise = statistics.normalise(np.einsum("bv,bv->b", error, error))
        hidden = read @ from_read
        hidden += from_z[t]
        hidden += surprise[:, None] * from_surprise
        logit = np.maximum(hidden, 0, out=hidden) @ last + last_bias
        if noise is not None:
            logit += noise[:, t]
        if force is None:
            on = 1 / (1 + np.exp(-logit / config.temperature)) > config.threshold
        else:
            on = force[:, t]
        previous[t], surprises[t], fired[t] = read, surprise, on
        rows = np.flatnonzero(on)
        if rows.size * 2 > batch:
            # Most fire: writing all in place is cheaper than picking, and subtracts zeros from the others.
            np.multiply((eta2 * on[:, None] * keys[t])[:, :, None], error[:, None], out=change)
            weights *= np.where(on, keep, one)[:, None, None]
            weights -= change
        elif rows.size:
            picked = (eta2 * keys[t, rows])[:, :, None] * error[rows, None]
            weights[rows] = keep * weights[rows] - picked
        read = both[:, 0].copy()
    statistics.keep(module)
    return fired.T.copy(), previous.transpose(1, 0, 2).copy(), surprises.T.copy()


class _Statistics:
    """The surprise's running statistics as numbers; back into the module's buffers once, after the scan."""

    def __init__(self, module: MemoryModule) -> None:
        self._training = module.training
        self._mean, self._variance, self._ready = (
            getattr(module, name).numpy()[()]
            for name in ("surprise_mean", "surprise_variance", "surprise_ready")
        )

    def normalise(self, surprise: Array) -> Array:
        if self._training:
            keep = STATISTICS_MOMENTUM if self._ready else 0.0
            mean = surprise.mean()
            off = surprise - (self._mean if keep else mean)
            spread = (off @ off) / len(off)
            # A batch that explodes leaves no trace.
            if np.isfinite(spread):
                self._mean = keep * self._mean + (1 - keep) * mean
                self._variance = keep * self._variance + (1 - keep) * spread
                self._ready = 1.0
        return (surprise - self._mean) / np.sqrt(self._variance + STATISTICS_EPSILON)

    def keep(self, module: MemoryModule) -> None:
        if self._training:
            module.surprise_mean.fill_(float(self._mean))
            module.surprise_variance.fill_(float(self._variance))
            module.surprise_ready.fill_(float(self._ready))
