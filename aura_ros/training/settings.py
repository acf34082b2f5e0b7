"""How a memory is trained, as data: objective and schedule. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from aura_ros.config import check_fields, option
from aura_ros.errors import UserError

ENGINES = ("chunked", "bptt")
OBJECTIVES = ("paper", "aura")
SMALLEST_LR = 1e-8


@dataclass(frozen=True)
class ObjectiveConfig:
    """Weights and schedules. Checked at construction; raises UserError naming the field.

    The paper's penalty is relu(mean soft gate - rho)^2. `aura` penalises the mean hard gate above rho, linear or
    squared, times how well the task is learned: 0 while the running cross-entropy is above ce_high, 1 below ce_low.
    """

    kind: str = option("aura", "how writes are penalised", choices=OBJECTIVES)
    beta: float = option(1e-3, "weight of the code's KL divergence on query steps", minimum=0.0, maximum=10.0)
    gamma: float = option(1.5, "weight of the write penalty", minimum=0.0, maximum=100.0)
    rho: float = option(0.0, "write rate below which nothing is penalised", minimum=0.0, maximum=1.0)
    squared: bool = option(False, "square the excess (aura)")
    ramp: float = option(0.3, "fraction of the steps over which gamma rises from 0", minimum=0.0, maximum=1.0)
    ce_high: float = option(
        0.06, "running cross-entropy above which no write is penalised (aura)", minimum=0.0, maximum=10.0
    )
    ce_low: float = option(
        0.01, "running cross-entropy below which the whole penalty acts (aura)", minimum=0.0, maximum=10.0
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind == "aura" and not self.ce_low < self.ce_high:
            raise UserError(f"ce_low {self.ce_low} must be below ce_high {self.ce_high}")


PAPER = ObjectiveConfig(kind="paper", gamma=3e-3, rho=0.15, squared=True, ramp=0.6)


@dataclass(frozen=True)
class TrainConfig:
    """How a memory is trained. Checked at construction; raises UserError naming the field.

    open_until: at the start the gate is held open (forward 1, gradient of the soft gate), until the running
    cross-entropy is below it, for 60 % of the steps at most.
    curriculum: in the first half of this share of the steps episodes have a quarter of the task's events, in the second
    half of it half of them, then all.
    """

    steps: int = option(1200, "gradient steps", minimum=1, maximum=10_000_000)
    batch: int = option(32, "episodes a step", minimum=1, maximum=65_536)
    seed: int = option(0, "of data, noise and codes", minimum=0, maximum=2**31 - 1)
    lr: float = option(3e-3, "AdamW's learning rate at its peak", minimum=SMALLEST_LR, maximum=1.0)
    warmup: int = option(100, "steps of linear warm-up", minimum=0, maximum=1_000_000)
    lr_floor: float = option(
        0.02, "learning rate at the end, as a share of the peak", minimum=0.0, maximum=1.0
    )
    clip: float = option(1.0, "largest norm of the gradient", minimum=1e-6, maximum=1e6)
    gate_noise: float = option(
        0.3, "scale of the logistic noise on the gate's logit", minimum=0.0, maximum=10.0
    )
    open_until: float = option(
        0.0,
        "hold the gate open until the running cross-entropy is below; 0: never",
        minimum=0.0,
        maximum=10.0,
    )
    curriculum: float = option(
        0.0, "share of the steps, the first, on easier episodes; 0: none", minimum=0.0, maximum=1.0
    )
    freeze_gate: bool = option(False, "leave the gate as it was initialised: capacity without learning")
    token_rate: float = option(
        0.1, "write rate that learned_token_gate is trained to", minimum=1e-6, maximum=1.0
    )
    engine: str = option("chunked", "chunked: all steps at once; bptt: step by step", choices=ENGINES)

    def __post_init__(self) -> None:
        check_fields(self)
