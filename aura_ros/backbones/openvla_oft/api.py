"""`OpenVlaOft`: the network with its tokenizer, statistics and image pipeline, as a backbone."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from aura_ros.backbones.openvla_oft.accelerate import accelerated, check_accelerate
from aura_ros.backbones.openvla_oft.checkpoint import (
    Checkpoint,
    WeightsDigest,
    load_checkpoint,
    random_tensors,
    save_checkpoint,
)
from aura_ros.backbones.openvla_oft.config import COMPACT, OftConfig
from aura_ros.backbones.openvla_oft.folder import find_folder, read_folder
from aura_ros.backbones.openvla_oft.inputs import OWN_TOKENIZERS, Prompts, check_arrays
from aura_ros.backbones.openvla_oft.layout import FolderOptions, describe_action
from aura_ros.backbones.openvla_oft.model import OftModel, OftOutput, load_weights
from aura_ros.backbones.openvla_oft.normalisation import (
    COMPACT_STATISTICS,
    binarise,
    normalise_proprio,
    select_statistics,
    unnormalise_actions,
)
from aura_ros.backbones.openvla_oft.processing import describe_steps, prepare_images
from aura_ros.backbones.openvla_oft.startup import check_accelerated, check_model, check_pixels, known_views
from aura_ros.backbones.openvla_oft.tokenizer import TOKENIZER_FILES, LlamaTokenizer, Tokenizer
from aura_ros.backbones.weights import find_device
from aura_ros.errors import UserError
from aura_ros.types import BackboneInfo, BackboneOutput, FloatArray, Observation

logger = logging.getLogger(__name__)
NOISE_SEED = 0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class OftPrediction:
    """One query.

    hidden_states: [1, S, H], final norm. pooled: float32 [H], their mean (the memory's input).
    actions_normalised: float32 [horizon, action_dim]. actions: float64, same shape, un-normalised, not
    binarised.
    """

    hidden_states: Tensor
    pooled: FloatArray
    actions_normalised: FloatArray
    actions: npt.NDArray[np.float64]


class OpenVlaOft:
    """A frozen OpenVLA-OFT of any size; implements `Backbone`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        source: str,
        device: str = "cpu",
        dtype: str = "float32",
        unnorm_key: str | None = None,
        tokenizer: Tokenizer | None = None,
        accelerate: str = "none",
    ) -> None:
        """Build from a checkpoint's contents.

        source: its path or other identity, for `info` and error messages. tokenizer: where the config's is not
        "byte"; without one only `predict` serves, for it takes token ids. accelerate: "none", "compile" or
        "cuda-graph", see `accelerate.accelerated`; the first query of a new length of prompt is then slow.
        Raises `UserError` if tensors, statistics, key, device or tokenizer do not fit.
        """
        config = checkpoint.config
        label = f"checkpoint '{source}'"
        if dtype not in DTYPES:
            raise UserError(f"dtype '{dtype}' is not supported; choose one of: {', '.join(DTYPES)}")
        self.config = config
        self.statistics = select_statistics(
            checkpoint.statistics,
            unnorm_key,
            action_dim=config.action.dim,
            proprio_dim=config.proprio_dim,
            bounds=config.bounds,
        )
        self._tokenizer = _tokenizer(config, tokenizer, label)
        self._device = find_device(device)
        check_accelerate(accelerate, self._device)
        self._dtype = DTYPES[dtype]
        weights = WeightsDigest(config, checkpoint.statistics)
        self._model: OftModel | None = load_weights(
            config,
            checkpoint.tensors,
            source=label,
            device=self._device,
            dtype=self._dtype,
            seen=weights.update,
        )
        self._run: OftModel | None = accelerated(self._model, accelerate)
        digest = weights.hexdigest()
        if checkpoint.recorded_sha256 not in (None, digest):
            raise UserError(f"{label} was altered: its sha256 is not the recorded one; get the file again")
        self._noise = self._start_noise()
        self._prompts = Prompts(config, self._tokenizer, self._device, label)
        self._all_statistics = checkpoint.statistics
        self._info = BackboneInfo(
            name=config.name,
            hidden_dim=config.language.hidden,
            proprio_dim=config.proprio_dim,
            cameras=config.cameras,
            action=config.action,
            checkpoint=source,
            checkpoint_hash=digest,
            parameters=sum(parameter.numel() for parameter in self._model.parameters()),
            trained=checkpoint.trained,
            image_rotation=describe_steps(config.image),
            details=(
                f"{config.head} head, {'FiLM, ' if config.film else ''}{len(config.cameras)} cameras, "
                f"{config.proprio_dim} proprioception values, statistics '{self.statistics.key}', {dtype}, "
                f"{describe_action(config.action)}"
            ),
            binary_columns=config.binary_columns,
        )

    @classmethod
    def random_compact(
        cls,
        *,
        seed: int = 0,
        device: str = "cpu",
        dtype: str = "float32",
        unnorm_key: str | None = None,
        accelerate: str = "none",
    ) -> OpenVlaOft:
        """The compact model with seeded random weights: same seed, same hash. `info.trained` is False."""
        if seed < 0:
            raise UserError(f"seed {seed} is not allowed; it must be 0 or more")
        checkpoint = Checkpoint(COMPACT, COMPACT_STATISTICS, random_tensors(COMPACT, seed), trained=False)
        return cls(
            checkpoint,
            source=f"random-init:seed={seed}",
            device=device,
            dtype=dtype,
            unnorm_key=unnorm_key,
            accelerate=accelerate,
        )

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        unnorm_key: str | None = None,
        tokenizer: Tokenizer | None = None,
        expected_name: str | None = None,
        accelerate: str = "none",
    ) -> OpenVlaOft:
        """Load a file of `save`. A Llama tokenizer is taken from the file's folder unless given.

        expected_name: refuse a model of another name. Raises `UserError` for any file that cannot be used.
        """
        checkpoint = load_checkpoint(path)
        name = checkpoint.config.name
        if expected_name not in (None, name):
            raise UserError(
                f"checkpoint '{path}' holds '{name}', not '{expected_name}'; load it by its own name"
            )
        if tokenizer is None and checkpoint.config.tokenizer == "llama":
            tokenizer = LlamaTokenizer(Path(path).parent)
        return cls(
            checkpoint,
            source=str(path),
            device=device,
            dtype=dtype,
            unnorm_key=unnorm_key,
            tokenizer=tokenizer,
            accelerate=accelerate,
        )

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        device: str = "cpu",
        dtype: str = "bfloat16",
        unnorm_key: str | None = None,
        *,
        options: FolderOptions | None = None,
        tokenizer: Tokenizer | None = None,
        accelerate: str = "none",
    ) -> OpenVlaOft:
        """Load a published checkpoint: a folder, or a downloaded hub snapshot "owner/name[@revision]".

        unnorm_key: the entry of its statistics, needed if there are several. options: what a checkpoint does
        not say about itself. tokenizer: in place of the folder's; without any only `predict` serves.
        The folder is only read. Raises `UserError` for whatever is missing, broken or of another architecture.
        """
        folder = read_folder(find_folder(path), options)
        for name, reason in folder.ignored.items():
            logger.info("%s: %s ignored, %s", folder.path, name, reason)
        if tokenizer is None and any((folder.path / name).exists() for name in TOKENIZER_FILES):
            tokenizer = LlamaTokenizer(folder.path)
        return cls(
            Checkpoint(folder.config, folder.statistics, folder.tensors, trained=True),
            source=str(path),
            device=device,
            dtype=dtype,
            unnorm_key=unnorm_key,
            tokenizer=tokenizer,
            accelerate=accelerate,
        )

    def save(self, path: str | Path) -> None:
        """Write the weights in use, config and statistics to one `.safetensors` file, atomically."""
        checkpoint = Checkpoint(
            self.config, self._all_statistics, dict(self.model.named_parameters()), self._info.trained
        )
        save_checkpoint(checkpoint, path)

    @property
    def info(self) -> BackboneInfo:
        """Sizes, action columns and the identity of the weights."""
        return self._info

    @property
    def model(self) -> OftModel:
        """The frozen network. Raises `UserError` after `close`."""
        if self._model is None:
            raise UserError(f"backbone '{self.config.name}' is closed; load it again")
        return self._model

    @property
    def served_model(self) -> OftModel:
        """What answers queries: `model`, or its accelerated twin. Raises `UserError` after `close`."""
        if self._run is None:
            raise UserError(f"backbone '{self.config.name}' is closed; load it again")
        return self._run

    @torch.inference_mode()
    def predict(
        self,
        input_ids: ArrayLike,
        pixel_values: ArrayLike,
        proprio_normalised: ArrayLike | None = None,
        noise: ArrayLike | None = None,
    ) -> OftPrediction:
        """One query from ready arrays or tensors.

        input_ids: int64 [1, L], BOS first; the empty-space token (29871) is appended unless already last.
        pixel_values: float [1, 6 n, size, size], n the number of cameras, per image DINO's channels first.
        proprio_normalised: float [proprio_dim], in [-1, 1]; ignored by a model without proprioception.
        noise: float [1, horizon, action_dim], where a diffusion head starts; None: the same seeded noise each
        time. Raises `UserError` for another shape, ids that are no integers, and values that are not finite floats.
        """
        start = None if noise is None else torch.as_tensor(noise)
        if start is not None and start.shape != self._noise.shape:
            raise UserError(f"noise has shape {list(start.shape)}; expected {list(self._noise.shape)}")
        ids, pixels, proprio = check_arrays(self.config, input_ids, pixel_values, proprio_normalised)
        return self._query(ids.to(self._device), pixels, proprio, start)

    def _query(
        self, ids: Tensor, pixel_values: Tensor, proprio: Tensor | None, noise: Tensor | None = None
    ) -> OftPrediction:
        """One query from tensors of the right shapes; ids on the device already."""
        pixels = pixel_values.to(self._device, self._dtype)
        if proprio is not None:
            proprio = proprio.to(self._device, self._dtype)
        start = None
        if self.config.head == "diffusion":
            start = self._noise if noise is None else noise.to(self._device, self._dtype)
        output: OftOutput = self.served_model(ids, pixels, proprio, noise=start)
        normalised = output.actions_normalised[0].float().cpu().numpy()
        return OftPrediction(
            hidden_states=output.hidden_states,
            pooled=output.pooled[0].cpu().numpy(),
            actions_normalised=normalised,
            actions=unnormalise_actions(normalised.astype(np.float64), self.statistics.action),
        )

    @torch.inference_mode()
    def infer(self, observation: Observation) -> BackboneOutput:
        """One query.

        Raises `UserError` for a missing camera, another proprioception size, a blank or too long instruction.
        The chunk is in controller units; the columns named by `config.binary_columns` are 0 or 1.
        """
        begin = time.perf_counter()
        pixel_values, proprio, input_ids = self._prepare(observation)
        prepared = time.perf_counter()
        prediction = self._query(input_ids, pixel_values, proprio)
        computed = time.perf_counter()
        chunk = binarise(prediction.actions, self.config.binary_columns).astype(np.float32)
        end = time.perf_counter()
        return BackboneOutput(
            hidden_state=prediction.pooled,
            base_chunk=chunk,
            timing_ms={
                "preprocess": 1e3 * (prepared - begin),
                "forward": 1e3 * (computed - prepared),
                "postprocess": 1e3 * (end - computed),
                "backbone": 1e3 * (end - begin),
            },
        )

    @torch.inference_mode()
    def act(self, observation: Observation) -> OftPrediction:
        """One query from camera images, proprioception and instruction.

        Raises `UserError` for a missing camera, another proprioception size, an instruction that cannot be used.
        """
        pixel_values, proprio, input_ids = self._prepare(observation)
        return self._query(input_ids, pixel_values, proprio)

    def weights_sha256(self) -> str:
        """Hex digest of the weights as they are now, on the device; the same for the object's whole life."""
        digest = WeightsDigest(self.config, self._all_statistics)
        for name, parameter in sorted(self.model.named_parameters()):
            digest.update(name, parameter)
        return digest.hexdigest()

    def warm_up(self, instruction: str | None = None) -> None:
        """Run the checks of `startup`, then one query on test images. Raises `UserError` if one fails.

        instruction: one to come, so that an accelerated network is prepared for the length of its prompt.
        """
        self._prompts.check_tokenizer()
        proprio = np.zeros(self.config.proprio_dim, np.float32)
        observation = Observation(known_views(self.config), proprio, instruction or "warm up")
        pixels, _, ids = self._prepare(observation)
        check_pixels(self.config, pixels)
        check_model(self.model, ids, pixels.to(self._device))
        served = self.act(observation)
        if self.served_model is not self.model:
            self._run, run = self._model, self._run
            check_accelerated(
                served.actions_normalised, self.act(observation).actions_normalised, self._dtype
            )
            self._run = run

    def close(self) -> None:
        """Free the weights; a second call does nothing."""
        self._model = self._run = None
        self._prompts.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _start_noise(self) -> Tensor:
        """The same for every query, so that `infer` stays a pure function of the observation."""
        shape = (1, self.config.action.horizon, self.config.action.dim)
        noise = np.random.default_rng(NOISE_SEED).standard_normal(shape, np.float32)
        return torch.from_numpy(noise).to(self._device, self._dtype)

    def _prepare(self, observation: Observation) -> tuple[Tensor, Tensor | None, Tensor]:
        """Pixels [1, 6 n, size, size] and proprioception [1, proprio_dim], on the CPU, and ids on the device."""
        pixels = torch.from_numpy(self._pixels(observation))[None]
        return pixels, self._proprio(observation), self._prompts.ids(observation.instruction)

    def _pixels(self, observation: Observation) -> FloatArray:
        missing = [camera for camera in self.config.cameras if camera not in observation.images]
        if missing:
            raise UserError(
                f"camera '{missing[0]}' is missing; this backbone needs {list(self.config.cameras)}, "
                f"the observation has {sorted(observation.images)}"
            )
        images = [observation.images[camera] for camera in self.config.cameras]
        return prepare_images(images, self.config.image)

    def _proprio(self, observation: Observation) -> Tensor | None:
        expected = self.config.proprio_dim
        if observation.proprio.shape != (expected,) and expected:
            raise UserError(
                f"proprioception has {observation.proprio.size} values; this backbone needs {expected}"
            )
        bounds = self.statistics.proprio
        return (
            None if bounds is None else torch.from_numpy(normalise_proprio(observation.proprio, bounds))[None]
        )


def _tokenizer(config: OftConfig, given: Tokenizer | None, source: str) -> Tokenizer | None:
    own = OWN_TOKENIZERS.get(config.tokenizer)
    tokenizer = own() if given is None and own else given
    if tokenizer is not None and tokenizer.vocab > config.language.vocab:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab} tokens but {source} embeds {config.language.vocab}; "
            "use the tokenizer the checkpoint came with"
        )
    return tokenizer
