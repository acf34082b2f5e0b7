"""What the network is given: arrays of the right shapes, and the token ids of instructions."""

from __future__ import annotations

from collections import OrderedDict

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from aura_ros.backbones.openvla_oft.config import OftConfig
from aura_ros.backbones.openvla_oft.tensor_files import one_line
from aura_ros.backbones.openvla_oft.tokenizer import (
    ByteTokenizer,
    LlamaTokenizer,
    Tokenizer,
    WordsTokenizer,
    prompt_ids,
)
from aura_ros.errors import UserError

PROMPT_CACHE = 64
# More than any sequence has room for: a longer text is not worth encoding.
MAX_CHARACTERS = 20_000
EMPTY_SPACE_IDS = {
    "byte": ByteTokenizer.empty_space_id,
    "words": WordsTokenizer.empty_space_id,
    "llama": LlamaTokenizer.empty_space_id,
}
# Tokenizers that come from no file.
OWN_TOKENIZERS: dict[str, type[Tokenizer]] = {"byte": ByteTokenizer, "words": WordsTokenizer}


def check_arrays(
    config: OftConfig, input_ids: ArrayLike, pixel_values: ArrayLike, proprio_normalised: ArrayLike | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The arrays as tensors, the empty-space id appended unless already last.

    Returns ids int64 [1, L], pixels [1, 6 n, size, size], proprioception [1, proprio_dim] or None.
    Raises `UserError` for other shapes than the model's, ids that are no integers, and values that are no finite
    floats: pixels of 0 to 255 would run, and give actions that look right.
    """
    ids = _tensor("input_ids", input_ids)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UserError(f"input_ids are {_dtype(ids)}; give integers, as the tokenizer makes them")
    ids = ids.to(torch.int64)
    if ids.ndim != 2 or len(ids) != 1 or ids.shape[1] < 1:
        raise UserError(f"input_ids has shape {list(ids.shape)}; give one prompt, [1, length]")
    highest = config.language.vocab - 1
    if not 0 <= int(ids.min()) <= int(ids.max()) <= highest:
        raise UserError(f"input_ids goes from {ids.min()} to {ids.max()}; allowed are 0 to {highest}")
    empty = EMPTY_SPACE_IDS[config.tokenizer]
    if int(ids[0, -1]) != empty:
        ids = torch.cat([ids, ids.new_full((1, 1), empty)], dim=1)
    pixels = _tensor("pixel_values", pixel_values)
    cameras, size = config.cameras, config.image.size
    if pixels.shape != (1, 6 * len(cameras), size, size):
        raise UserError(
            f"pixel_values has shape {list(pixels.shape)}; this checkpoint's {len(cameras)} cameras "
            f"{list(cameras)} need [1, {6 * len(cameras)}, {size}, {size}]"
        )
    _require_floats("pixel_values", pixels, "normalised as for DINOv2 and SigLIP")
    width = config.proprio_dim
    if not width:
        return ids, pixels, None
    given: ArrayLike = [] if proprio_normalised is None else proprio_normalised
    proprio = _tensor("proprioception", given).reshape(1, -1)
    if proprio.shape[1] != width:
        raise UserError(f"proprioception has {proprio.shape[1]} values; this checkpoint needs {width}")
    _require_floats("proprioception", proprio, "normalised to -1..1")
    return ids, pixels, proprio


def _tensor(name: str, value: ArrayLike) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:  # text, None, rows of different lengths
        raise UserError(
            f"{name} of type {type(value).__name__} is no array of numbers ({one_line(error)[:100]}); give a NumPy "
            "array or a tensor"
        ) from error


def _require_floats(name: str, values: Tensor, wanted: str) -> None:
    if not values.is_floating_point():
        raise UserError(f"{name} are {_dtype(values)}, not normalised; give floats, {wanted}")
    if not bool(torch.isfinite(values).all()):
        raise UserError(f"{name} hold NaN or infinity; give finite floats, {wanted}")


def _dtype(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


class Prompts:
    """Token ids by instruction, on the device; the newest `PROMPT_CACHE` are kept."""

    def __init__(
        self, config: OftConfig, tokenizer: Tokenizer | None, device: torch.device, source: str
    ) -> None:
        self._config, self._tokenizer, self._device, self._source = config, tokenizer, device, source
        self._ids: OrderedDict[str, Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ids)

    def check_tokenizer(self) -> None:
        """Raises `UserError` unless the tokenizer is there and gives the ids that the model was trained on."""
        self._given().check()

    def ids(self, instruction: str) -> Tensor:
        """int64 [1, L]. Raises `UserError` for an instruction that is blank, too long or not plain text."""
        if instruction in self._ids:
            self._ids.move_to_end(instruction)
            return self._ids[instruction]
        if len(instruction) > MAX_CHARACTERS:
            raise UserError(
                f"instruction has {len(instruction)} characters; at most {MAX_CHARACTERS} are taken: shorten it"
            )
        ids = prompt_ids(self._given(), instruction)
        # BOS is one of the ids; </s> closes the sequence.
        rows = len(ids) + self._config.prefix_rows + self._config.placeholders + 1
        if rows > self._config.language.max_positions:
            raise UserError(
                f"instruction of {len(instruction)} characters makes a sequence of {rows} rows; at most "
                f"{self._config.language.max_positions} are possible: shorten it"
            )
        self._ids[instruction] = torch.tensor(ids, dtype=torch.int64, device=self._device)[None]
        if len(self._ids) > PROMPT_CACHE:
            self._ids.popitem(last=False)
        return self._ids[instruction]

    def clear(self) -> None:
        """Forget all."""
        self._ids.clear()

    def _given(self) -> Tokenizer:
        if self._tokenizer is None:
            raise UserError(
                f"{self._source} has no tokenizer.json; put the one it came with beside its weights"
            )
        return self._tokenizer
