"""From an instruction to token ids: OpenVLA's prompt, a byte-level tokenizer, and Llama's from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from aura_ros.errors import UserError

LLAMA_BOS_ID = 1
LLAMA_EOS_ID = 2
LLAMA_EMPTY_SPACE_ID = 29871


class Tokenizer(Protocol):
    """Text to ids. `empty_space_id` is the token the reference appends to the prompt (Llama's 29871)."""

    bos_id: int
    eos_id: int
    empty_space_id: int
    vocab: int

    def encode(self, text: str) -> list[int]:
        """Ids of the text with BOS in front and nothing appended."""
        ...


class ByteTokenizer:
    """One token for each UTF-8 byte; needs no files, so that a small model is one file."""

    pad_id = 0
    bos_id = 1
    eos_id = 2
    empty_space_id = 3
    first_byte_id = 4
    vocab = 4 + 256

    def encode(self, text: str) -> list[int]:
        """Ids of the text with BOS in front and nothing appended."""
        return [self.bos_id, *(self.first_byte_id + byte for byte in text.encode("utf-8"))]


class LlamaTokenizer:
    """Llama-2's tokenizer from `tokenizer.json` in a checkpoint's folder."""

    bos_id = LLAMA_BOS_ID
    eos_id = LLAMA_EOS_ID
    empty_space_id = LLAMA_EMPTY_SPACE_ID

    def __init__(self, folder: str | Path) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"'{path}' does not exist; the checkpoint's folder needs its tokenizer.json")
        try:
            self._tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers package raises bare Exception
            raise UserError(f"'{path}' is not a tokenizer ({error}); get the file again") from error
        self.vocab = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of the text with BOS in front and nothing appended."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [self.bos_id, *ids]


def prompt(instruction: str) -> str:
    """OpenVLA's prompt for a task in plain language."""
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


def prompt_ids(tokenizer: Tokenizer, instruction: str) -> list[int]:
    """Ids of the prompt, ending in the empty-space token as in training (appended unless already last)."""
    ids = tokenizer.encode(prompt(instruction))
    return ids if ids[-1] == tokenizer.empty_space_id else [*ids, tokenizer.empty_space_id]
