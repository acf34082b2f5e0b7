"""A backbone of any size with random weights, made on the device in seconds and in the memory of the weights alone."""

from __future__ import annotations

import copy
import math
import re
import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from aura_ros.backbones.openvla_oft.api import OpenVlaOft
from aura_ros.backbones.openvla_oft.checkpoint import RANDOM_ACTION_STD, Checkpoint
from aura_ros.backbones.openvla_oft.config import OftConfig
from aura_ros.backbones.openvla_oft.inputs import EMPTY_SPACE_IDS
from aura_ros.backbones.openvla_oft.model import build_on_meta
from aura_ros.backbones.openvla_oft.normalisation import COMPACT_STATISTICS
from aura_ros.backbones.openvla_oft.tokenizer import (
    LLAMA_BOS_ID,
    LLAMA_EOS_ID,
    ByteTokenizer,
    Tokenizer,
)

# Normal numbers to repeat, drawn once: drawing 7.5e9 of them takes a CPU minutes. A prime, so that the rows of a
# matrix differ.
TABLE = 4_194_301
# Ids of words: inside every vocabulary, clear of the control tokens and of the empty-space token.
FIRST_WORD, WORDS = 16, 4000


class RandomTensors(Mapping[str, Tensor]):
    """Weights by name, each made when it is asked for; same seed, device and dtype, same weights.

    For measurements: spread as usual, so that nothing overflows, but repeating themselves.
    """

    def __init__(self, config: OftConfig, *, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self._shapes = {name: tuple(p.shape) for name, p in build_on_meta(config).named_parameters()}
        generator = torch.Generator(device).manual_seed(seed)
        self._table = torch.randn(TABLE, generator=generator, device=device, dtype=dtype)

    def __len__(self) -> int:
        return len(self._shapes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:  # norms and LayerScale are one, biases zero
            value = 0.0 if name.endswith("bias") else 1.0
            return torch.full(shape, value, device=self._table.device, dtype=self._table.dtype)
        count, start = math.prod(shape), zlib.crc32(name.encode()) % TABLE
        tensor = torch.empty(count, device=self._table.device, dtype=self._table.dtype)
        done = min(count, TABLE - start)
        tensor[:done] = self._table[start : start + done]
        for first in range(done, count, TABLE):
            part = tensor[first : first + TABLE]
            part.copy_(self._table[: len(part)])
        rows = name.endswith(("pos_embed", "cls_token", "reg_token", "embed_tokens.weight"))
        spread = 0.5 if rows else 1.0 / math.sqrt(math.prod(shape[1:]))
        if name == "action_head.model.fc2.weight":
            spread *= RANDOM_ACTION_STD
        return tensor.mul_(spread).reshape(shape)


class WordTokenizer:
    """One id for each word, mark and newline: about as many as Llama's tokenizer makes, without its files."""

    bos_id = LLAMA_BOS_ID
    eos_id = LLAMA_EOS_ID

    def __init__(self, config: OftConfig) -> None:
        self.vocab = config.language.vocab
        self.empty_space_id = EMPTY_SPACE_IDS[config.tokenizer]

    def encode(self, text: str) -> list[int]:
        """Ids of the text with BOS in front and nothing appended."""
        words = re.findall(r"\w+|[^\w ]", text)
        return [self.bos_id, *(FIRST_WORD + zlib.crc32(word.encode()) % WORDS for word in words)]

    def check(self) -> None:
        """Pass: the ids come from no file, so that none can be wrong."""


def tokenizer_for(config: OftConfig) -> Tokenizer:
    """The tokenizer of a network without files."""
    return WordTokenizer(config) if config.language.vocab >= FIRST_WORD + WORDS else ByteTokenizer()


def random_backbone(
    config: OftConfig, *, seed: int, device: torch.device, dtype: torch.dtype, accelerate: str = "none"
) -> OpenVlaOft:
    """The backbone; `info.trained` is False. Raises `UserError` for what the device cannot do."""
    tensors = RandomTensors(config, seed=seed, device=device, dtype=dtype)
    return OpenVlaOft(
        Checkpoint(config, copy.deepcopy(COMPACT_STATISTICS), tensors, trained=False),
        source=f"random-weights:seed={seed}",
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        tokenizer=tokenizer_for(config),
        accelerate=accelerate,
    )
