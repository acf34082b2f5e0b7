"""What the paper measured (sections 6.5 and 6.6), to stand beside ours."""

from __future__ import annotations

from aura_ros.bench.certificate.formula import Bounds, bounds

DISCOUNT = 0.9
DELTA_TV = 0.5838
# Statistic -> epsilon, one-step value residual, L_V.
PREMISES = {"q95": (0.0076, 3.854, 5.0), "mean": (0.0021, 0.661, 0.158)}
# Statistic -> the bound with L_V delta, and with the residual, as printed.
PRINTED = {"q95": (52.69, 69.53), "mean": (1.70, 11.93)}
STREAM_LINE = "paper (6.5, OpenVLA-OFT 7B, 890 tuples): epsilon mean 0.0132, q90 0.0259; delta W1 0.0074"


def recomputed(statistic: str) -> Bounds:
    """The paper's bounds from its own premises; the residual is above L_V delta in both."""
    epsilon, residual, lipschitz = PREMISES[statistic]
    return bounds(epsilon, DELTA_TV, residual, lipschitz, DISCOUNT)


def recall_line() -> str:
    """One line for the terminal."""
    q95 = recomputed("q95")
    return (
        f"paper (6.6, N = 64): epsilon mean {PREMISES['mean'][0]}, q95 {PREMISES['q95'][0]}; delta TV {DELTA_TV}; bounds "
        f"{PRINTED['q95'][0]} and {PRINTED['q95'][1]} of span 10: vacuous; its residual {q95.residual} > L_V delta "
        f"{q95.loaded:.2f}, against remark 4.4"
    )
