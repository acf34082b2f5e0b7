"""Train an OpenVLA-OFT network on demonstrations: L1 on chunks, through the code that serves it."""

from __future__ import annotations

import dataclasses
import json
import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aura_ros.backbones.openvla_oft.checkpoint import (
    Checkpoint,
    load_checkpoint,
    random_tensors,
    save_checkpoint,
)
from aura_ros.backbones.openvla_oft.config import EMBEDDED, OftConfig
from aura_ros.backbones.openvla_oft.inputs import OWN_TOKENIZERS
from aura_ros.backbones.openvla_oft.model import OftModel
from aura_ros.backbones.openvla_oft.normalisation import Bounds, select_statistics
from aura_ros.backbones.openvla_oft.tokenizer import prompt_ids
from aura_ros.config import check_fields, option
from aura_ros.errors import UserError
from aura_ros.training.augment import STILL, Jitter, prepare_batch
from aura_ros.training.demo_data import DemoData, statistics
from aura_ros.training.interrupts import interrupts_held
from aura_ros.training.keypoints import Keypoints, lit_objects, normalised_points
from aura_ros.training.objective import learning_rate
from aura_ros.training.resume import optimiser_tensors, read_state, restore_optimiser, under, write_state

UNKNOWN = "unknown"
# Of the data that a training saw; bounds stay those of the checkpoint that it began from.
COUNTS = ("num_trajectories", "num_transitions")
VALIDATION_BATCH = 64


@dataclass(frozen=True)
class BackboneTrainConfig:
    """How a backbone is trained. Checked at construction; raises UserError naming the field."""

    steps: int = option(6000, "gradient steps", minimum=1, maximum=10_000_000)
    batch: int = option(32, "samples a step", minimum=1, maximum=65_536)
    seed: int = option(0, "of weights, batches and jitter", minimum=0, maximum=2**31 - 1)
    lr: float = option(8e-4, "AdamW's learning rate at its peak", minimum=1e-8, maximum=1.0)
    warmup: int = option(200, "steps of linear warm-up", minimum=0, maximum=1_000_000)
    weight_decay: float = option(0.01, "AdamW's", minimum=0.0, maximum=10.0)
    clip: float = option(1.0, "largest norm of the gradient", minimum=1e-6, maximum=1e6)
    ema: float = option(
        0.998, "decay of the averaged weights, which are what is kept", minimum=0.0, maximum=0.99999
    )
    proprio_noise: float = option(0.02, "added to normalised proprioception", minimum=0.0, maximum=1.0)
    forget: float = option(0.1, "share of samples whose instruction is 'unknown'", minimum=0.0, maximum=1.0)
    policy_weight: float = option(2.0, "of samples where a policy drove", minimum=0.0, maximum=1000.0)
    keypoint_weight: float = option(1.0, "of the auxiliary loss on keypoints", minimum=0.0, maximum=100.0)
    precision: str = option(
        "float32",
        "of the products in training; bfloat16 is faster where the processor computes with it (avx512_bf16, amx, GPUs)",
        choices=("float32", "bfloat16"),
    )
    blind: bool = option(False, "show grey instead of images: a control")
    validate_every: int = option(500, "steps between validations", minimum=1, maximum=10_000_000)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class TrainStep:
    """After a step: its number, its L1 in normalised units, and the validation's, where there was one."""

    step: int
    loss: float
    validation: float | None = None


class BackboneTrainer:
    """Trains step by step; `save_state` and `load_state` make it go on as if it had not stopped."""

    def __init__(
        self,
        data: DemoData,
        config: BackboneTrainConfig,
        *,
        network: OftConfig = EMBEDDED,
        init: Path | None = None,
        device: str = "cpu",
    ) -> None:
        """init: a checkpoint to go on from, with its statistics. Raises UserError where data and network do not fit."""
        self.config, self.data, self.device = config, data, torch.device(device)
        begin = load_checkpoint(init) if init else None
        network = begin.config if begin else network
        network = dataclasses.replace(network, image=dataclasses.replace(network.image, blank=config.blind))
        self.network = network
        _check_fit(network, data)
        self.begin_sha256 = begin.recorded_sha256 if begin else None
        own = statistics(data, "aura_demonstrations")
        self.statistics = dict(begin.statistics) if begin else own
        counts = {name: own["aura_demonstrations"][name] for name in COUNTS}
        self.statistics = {key: {**entry, **counts} for key, entry in self.statistics.items()}
        chosen = select_statistics(
            self.statistics, None, action_dim=network.action.dim, proprio_dim=network.proprio_dim
        )
        assert chosen.proprio is not None
        tensors = begin.tensors if begin else random_tensors(network, config.seed)
        self.model = OftModel(network)
        self.model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=False)
        self.model.to(self.device)
        torch.manual_seed(config.seed)
        self.keypoints = Keypoints(
            network.language.hidden,
            data.samples.keypoints.shape[1],
            len(network.cameras),
            network.proprio_dim,
        ).to(self.device)
        self._patches = torch.empty(0)
        self.model.projector.register_forward_hook(self._keep_patches)
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.best = {name: p.clone() for name, p in self.average.items()}
        self.best_loss, self.step = math.inf, 0
        self.course: list[dict[str, Any]] = []
        trained = [*self.model.parameters(), *self.keypoints.parameters()]
        self.optimiser = torch.optim.AdamW(trained, lr=config.lr, weight_decay=config.weight_decay)
        self._prompts = _prompts(network, data)
        self._targets = _normalised(data.samples.actions, chosen.action)
        self._proprio = np.clip(_normalised(data.samples.proprio, chosen.proprio), -1.0, 1.0)
        self._points = normalised_points(data.samples.keypoints)
        self._lit = lit_objects(data.samples.keypoints, data.samples.keypoint_names)

    def train(self, report: Callable[[TrainStep], None] = lambda step: None) -> None:
        """Go on to the last step. Raises UserError when a loss is not finite; the best weights stay as they were."""
        while self.step < self.config.steps:
            report(self.one_step())

    def one_step(self) -> TrainStep:
        """One gradient step, and a validation where one is due."""
        config = self.config
        # Of the step's number alone: a training that was stopped goes on with the same batches.
        rng = np.random.default_rng([config.seed, self.step])
        rows = rng.choice(len(self.data.samples), config.batch, p=self.data.weight)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.step, config.steps, config.lr, config.warmup, 0.01)
        self.model.train()
        loss, plain = self._loss(rows, rng, Jitter())
        if not math.isfinite(plain):
            raise UserError(
                f"the loss is {plain} at step {self.step + 1}: the training exploded; the weights of the best validation so "
                "far are kept: lower lr, or look for wrong actions in the demonstrations"
            )
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimiser.step()
        self.step += 1
        decay = min(config.ema, self.step / (self.step + 10))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.average[name].lerp_(parameter, 1 - decay)
        validation = None
        if self.step % config.validate_every == 0 or self.step == config.steps:
            validation = self.validate()
            if validation <= self.best_loss:
                self.best_loss = validation
                self.best = {name: tensor.clone() for name, tensor in self.average.items()}
            self.course.append({"step": self.step, "loss": plain, "validation": validation})
        return TrainStep(self.step, plain, validation)

    @torch.no_grad()
    def validate(self) -> float:
        """Mean L1 of the averaged weights on the episodes held out, or on some trained ones where there are none."""
        held = np.flatnonzero(self.data.validation)
        rows = held if len(held) else np.arange(min(len(self.data.samples), 4 * VALIDATION_BATCH))
        current = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._put(self.average)
        self.model.eval()
        rng, losses = np.random.default_rng(0), []
        for start in range(0, len(rows), VALIDATION_BATCH):
            part = rows[start : start + VALIDATION_BATCH]
            losses.append(self._loss(part, rng, STILL)[1] * len(part))
        self._put(current)
        return sum(losses) / len(rows)

    def checkpoint(self) -> Checkpoint:
        """The averaged weights of the best validation."""
        return Checkpoint(self.network, self.statistics, self.best, trained=True)

    def save(self, path: Path) -> None:
        """Write the checkpoint that serves. Raises UserError."""
        save_checkpoint(self.checkpoint(), path)

    def save_state(self, path: Path) -> None:
        """Everything that going on needs, whole or not at all. Raises UserError."""
        tensors = {f"model.{n}": p.detach() for n, p in self.model.named_parameters()}
        tensors |= {f"keypoints.{n}": p.detach() for n, p in self.keypoints.named_parameters()}
        tensors |= {f"average.{n}": t for n, t in self.average.items()}
        tensors |= {f"best.{n}": t for n, t in self.best.items()}
        tensors |= optimiser_tensors(self.optimiser)
        metadata = {
            "step": str(self.step),
            "best_loss": repr(self.best_loss),
            "course": json.dumps(self.course),
            "identity": self.identity(),
        }
        write_state(path, tensors, metadata)

    def load_state(self, path: Path) -> None:
        """Go on from there. Raises UserError for a file of another training, or one that is broken."""
        tensors, metadata = read_state(path, self.identity(), "options, data or network")
        self._put(under(tensors, "model."))
        self.keypoints.load_state_dict(under(tensors, "keypoints."))
        self.average = {n: t.to(self.device) for n, t in under(tensors, "average.").items()}
        self.best = {n: t.to(self.device) for n, t in under(tensors, "best.").items()}
        restore_optimiser(self.optimiser, tensors)
        self.step, self.best_loss = int(metadata["step"]), float(metadata["best_loss"])
        self.course = json.loads(metadata["course"])

    def identity(self) -> str:
        """What a training must have in common with one that it goes on with."""
        known = {
            "config": dataclasses.asdict(self.config),
            "network": self.network.to_json(),
            "heads": sorted(name for name, _ in self.keypoints.named_parameters()),
            "samples": len(self.data.samples),
            "actions": zlib.crc32(self.data.samples.actions.tobytes()),
            "begin": self.begin_sha256,
            "statistics": self.statistics,
        }
        return json.dumps(known, sort_keys=True)

    def _loss(self, rows: Any, rng: np.random.Generator, jitter: Jitter) -> tuple[Tensor, float]:
        """The loss to descend and the plain L1, normalised units."""
        config, samples, device = self.config, self.data.samples, self.device
        training = jitter is not STILL
        pixels = prepare_batch(samples.images[rows], self.network.image, rng, jitter).to(device)
        proprio = self._proprio[rows]
        which = self.data.which[rows]
        if training:
            proprio = proprio + config.proprio_noise * rng.standard_normal(proprio.shape, np.float32)
            which = np.where(rng.random(len(rows)) < config.forget, len(self.data.instructions), which)
        ids, lengths = self._prompts
        used = [int(lengths[w]) for w in which]
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
            output = self.model(
                torch.from_numpy(ids[which][:, : max(used)]).to(device),
                pixels,
                torch.from_numpy(proprio).to(device),
                lengths=used,
            )
        target = torch.from_numpy(self._targets[rows]).to(device)
        plain = (output.actions_normalised.float() - target).abs().mean()
        loss = plain
        if training and config.keypoint_weight:
            points = torch.from_numpy(self._points[rows]).to(device)
            # After BOS come the patches of every image.
            images = output.hidden_states[:, 1 : 1 + self._patches.shape[1]]
            seen = torch.from_numpy(proprio).to(device)
            lit = torch.from_numpy(self._lit[rows]).to(device)
            off = self.keypoints.loss(images, self._patches, output.pooled, seen, points, lit)
            loss = loss + config.keypoint_weight * off
        return loss, float(plain.detach())

    def _keep_patches(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._patches = output

    @torch.no_grad()
    def _put(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])


def fit(
    trainer: BackboneTrainer,
    state: Path,
    out: Path,
    report: Callable[[TrainStep], None],
    save_every_s: float = 60.0,
) -> None:
    """Train to the end; state and checkpoint are kept now and then, at the end, and when anything stops it."""
    saved = time.monotonic()
    try:
        while trainer.step < trainer.config.steps:
            # Half a step would be kept as a whole one.
            with interrupts_held():
                done = trainer.one_step()
            report(done)
            if time.monotonic() - saved > save_every_s:
                trainer.save_state(state)
                saved = time.monotonic()
    finally:
        trainer.save_state(state)
        if math.isfinite(trainer.best_loss):
            trainer.save(out)


def _check_fit(network: OftConfig, data: DemoData) -> None:
    shown = {
        "cameras": (list(data.head["cameras"]), list(network.cameras)),
        "horizon": (data.head["horizon"], network.action.horizon),
        "image_size": (data.samples.images.shape[2], network.image.size),
        "action_names": (list(data.head["action_names"]), list(network.action.names)),
        "proprioception": (data.samples.proprio.shape[1], network.proprio_dim),
    }
    for name, (found, wanted) in shown.items():
        if found != wanted:
            raise UserError(
                f"the demonstrations have {name} {found}, the network {wanted}; use data made for it"
            )


def _prompts(network: OftConfig, data: DemoData) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Ids int64 [instructions + 1, L], padded, and their lengths; the last is of an instruction not known."""
    own = OWN_TOKENIZERS.get(network.tokenizer)
    if own is None:
        raise UserError(
            f"a network with tokenizer '{network.tokenizer}' cannot be trained here; use 'words' or 'byte'"
        )
    found = [prompt_ids(own(), text) for text in (*data.instructions, UNKNOWN)]
    lengths = np.array([len(ids) for ids in found])
    table = np.zeros((len(found), int(lengths.max())), np.int64)
    for row, ids in zip(table, found, strict=True):
        row[: len(ids)] = ids
    return table, lengths


def _normalised(values: np.ndarray[Any, Any], bounds: Bounds) -> np.ndarray[Any, Any]:
    """What the network is to give for values in physical or controller units; the reference clips it to +-1."""
    low, high = np.asarray(bounds.low), np.asarray(bounds.high)
    scaled = np.clip(2.0 * (values - low) / (high - low + 1e-8) - 1.0, -1.0, 1.0)
    return np.where(bounds.mask, scaled, values).astype(np.float32)
