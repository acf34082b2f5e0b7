"""`OpenVlaOft`: the network with its tokenizer, statistics and image pipeline, as a backbone."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from aura_ros.backbones.openvla_oft.checkpoint import (
    Checkpoint,
    load_checkpoint,
    random_tensors,
    save_checkpoint,
)
from aura_ros.backbones.openvla_oft.config import COMPACT, OftConfig
from aura_ros.backbones.openvla_oft.model import OftModel, OftOutput, load_weights
from aura_ros.backbones.openvla_oft.normalisation import (
    COMPACT_STATISTICS,
    binarise,
    normalise_proprio,
    select_statistics,
    unnormalise_actions,
)
from aura_ros.backbones.openvla_oft.processing import prepare_image
from aura_ros.backbones.openvla_oft.tokenizer import ByteTokenizer, LlamaTokenizer, Tokenizer, prompt_ids
from aura_ros.errors import UserError
from aura_ros.types import BackboneInfo, BackboneOutput, FloatArray, Observation

PROMPT_CACHE = 64
NOISE_SEED = 0
EMPTY_SPACE_IDS = {"byte": ByteTokenizer.empty_space_id, "llama": LlamaTokenizer.empty_space_id}
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
    ) -> None:
        """Build from a checkpoint's contents.

        source: its path or other identity, for `info` and error messages. tokenizer: needed only where the
        config's is not "byte". Raises `UserError` if tensors, statistics, key, device or tokenizer do not fit.
        """
        config = checkpoint.config
        label = f"checkpoint '{source}'"
        if dtype not in DTYPES:
            raise UserError(f"dtype '{dtype}' is not supported; choose one of: {', '.join(DTYPES)}")
        self.config = config
        self.statistics = select_statistics(
            checkpoint.statistics, unnorm_key, action_dim=config.action.dim, proprio_dim=config.proprio_dim
        )
        self._tokenizer = _tokenizer(config, tokenizer, label)
        self._device = _device(device)
        self._dtype = DTYPES[dtype]
        self._model: OftModel | None = load_weights(
            config, checkpoint.tensors, source=label, device=self._device, dtype=self._dtype
        )
        digest = checkpoint.sha256()
        if checkpoint.recorded_sha256 not in (None, digest):
            raise UserError(f"{label} was altered: its sha256 is not the recorded one; get the file again")
        self._noise = self._start_noise()
        self._empty_space_id = EMPTY_SPACE_IDS[config.tokenizer]
        self._prompts: OrderedDict[str, Tensor] = OrderedDict()
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
            image_rotation="mirror left-right" if config.image.mirror else "none",
            binary_columns=config.binary_columns,
        )

    @classmethod
    def random_compact(
        cls, *, seed: int = 0, device: str = "cpu", dtype: str = "float32", unnorm_key: str | None = None
    ) -> OpenVlaOft:
        """The compact model with seeded random weights: same seed, same hash. `info.trained` is False."""
        if seed < 0:
            raise UserError(f"seed {seed} is not allowed; it must be 0 or more")
        checkpoint = Checkpoint(COMPACT, COMPACT_STATISTICS, random_tensors(COMPACT, seed), trained=False)
        return cls(
            checkpoint, source=f"random-init:seed={seed}", device=device, dtype=dtype, unnorm_key=unnorm_key
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
        time. Raises `UserError` for arrays of another shape.
        """
        start = None if noise is None else torch.as_tensor(noise)
        if start is not None and start.shape != self._noise.shape:
            raise UserError(f"noise has shape {list(start.shape)}; expected {list(self._noise.shape)}")
        return self._query(*self._checked(input_ids, pixel_values, proprio_normalised), start)

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
        if self._model is None:
            raise UserError(f"backbone '{self.config.name}' is closed; load it again")
        output: OftOutput = self._model(ids, pixels, proprio, noise=start)
        normalised = output.actions_normalised[0].float().cpu().numpy()
        return OftPrediction(
            hidden_states=output.hidden_states,
            pooled=output.pooled[0].cpu().numpy(),
            actions_normalised=normalised,
            actions=unnormalise_actions(normalised.astype(np.float64), self.statistics.action),
        )

    def _checked(
        self, input_ids: ArrayLike, pixel_values: ArrayLike, proprio_normalised: ArrayLike | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The arrays as tensors, ids on the device; raises `UserError` for another shape than the model's."""
        ids = torch.as_tensor(input_ids).to(torch.int64)
        if ids.ndim != 2 or len(ids) != 1 or ids.shape[1] < 1:
            raise UserError(f"input_ids has shape {list(ids.shape)}; give one prompt, [1, length]")
        highest = self.config.language.vocab - 1
        if not 0 <= int(ids.min()) <= int(ids.max()) <= highest:
            raise UserError(f"input_ids goes from {ids.min()} to {ids.max()}; allowed are 0 to {highest}")
        if int(ids[0, -1]) != self._empty_space_id:
            ids = torch.cat([ids, ids.new_full((1, 1), self._empty_space_id)], dim=1)
        pixels = torch.as_tensor(pixel_values)
        cameras, size = self.config.cameras, self.config.image.size
        if pixels.shape != (1, 6 * len(cameras), size, size):
            raise UserError(
                f"pixel_values has shape {list(pixels.shape)}; this checkpoint's {len(cameras)} cameras "
                f"{list(cameras)} need [1, {6 * len(cameras)}, {size}, {size}]"
            )
        width = self.config.proprio_dim
        if not width:
            return ids.to(self._device), pixels, None
        proprio = torch.as_tensor([] if proprio_normalised is None else proprio_normalised).reshape(1, -1)
        if proprio.shape[1] != width:
            raise UserError(f"proprioception has {proprio.shape[1]} values; this checkpoint needs {width}")
        return ids.to(self._device), pixels, proprio

    @torch.inference_mode()
    def infer(self, observation: Observation) -> BackboneOutput:
        """One query.

        Raises `UserError` for a missing camera, another proprioception size, a blank or too long instruction.
        The chunk is in controller units; the columns named by `config.binary_columns` are 0 or 1.
        """
        begin = time.perf_counter()
        pixel_values = torch.from_numpy(self._pixels(observation))[None]
        proprio = self._proprio(observation)
        input_ids = self._input_ids(observation.instruction)
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

    def warm_up(self) -> None:
        """Check that attention sees both directions, then run once on blank images.

        Raises `UserError` if the trunk is causal: nothing is served then.
        """
        self.model.language_model.check_bidirectional()
        size = self.config.image.size
        blank = {camera: np.zeros((size, size, 3), np.uint8) for camera in self.config.cameras}
        self.infer(Observation(blank, np.zeros(self.config.proprio_dim, np.float32), "warm up"))

    def close(self) -> None:
        """Free the weights; a second call does nothing."""
        self._model = None
        self._prompts.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _start_noise(self) -> Tensor:
        """The same for every query, so that `infer` stays a pure function of the observation."""
        shape = (1, self.config.action.horizon, self.config.action.dim)
        noise = np.random.default_rng(NOISE_SEED).standard_normal(shape, np.float32)
        return torch.from_numpy(noise).to(self._device, self._dtype)

    def _pixels(self, observation: Observation) -> FloatArray:
        missing = [camera for camera in self.config.cameras if camera not in observation.images]
        if missing:
            raise UserError(
                f"camera '{missing[0]}' is missing; this backbone needs {list(self.config.cameras)}, "
                f"the observation has {sorted(observation.images)}"
            )
        images = (observation.images[camera] for camera in self.config.cameras)
        return np.concatenate([prepare_image(image, self.config.image) for image in images])

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

    def _input_ids(self, instruction: str) -> Tensor:
        """Ids int64 [1, L] on the device; the newest `PROMPT_CACHE` instructions are kept."""
        if instruction in self._prompts:
            self._prompts.move_to_end(instruction)
            return self._prompts[instruction]
        if not instruction.strip():
            raise UserError(f"instruction '{instruction}' is blank; say what the robot should do")
        ids = prompt_ids(self._tokenizer, instruction)
        # BOS is one of the ids; </s> closes the sequence.
        rows = len(ids) + self.config.prefix_rows + self.config.placeholders + 1
        if rows > self.config.language.max_positions:
            raise UserError(
                f"instruction of {len(instruction)} characters makes a sequence of {rows} rows; at most "
                f"{self.config.language.max_positions} are possible: shorten it"
            )
        self._prompts[instruction] = _ids_tensor(ids).to(self._device)
        if len(self._prompts) > PROMPT_CACHE:
            self._prompts.popitem(last=False)
        return self._prompts[instruction]


def _ids_tensor(ids: Sequence[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)[None]


def _tokenizer(config: OftConfig, given: Tokenizer | None, source: str) -> Tokenizer:
    tokenizer: Any = given if given is not None else ByteTokenizer() if config.tokenizer == "byte" else None
    if tokenizer is None:
        raise UserError(f"{source} needs a '{config.tokenizer}' tokenizer; put its tokenizer.json beside it")
    if tokenizer.vocab > config.language.vocab:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab} tokens but {source} embeds {config.language.vocab}; "
            "use the tokenizer the checkpoint came with"
        )
    return tokenizer


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"device '{name}' is not supported; choose 'cpu', 'cuda' or 'cuda:<n>'")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise UserError(f"device '{name}' is not available ({count} CUDA devices found); use 'cpu'")
    return device
