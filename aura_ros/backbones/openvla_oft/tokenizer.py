"""From an instruction to token ids: OpenVLA's prompt, a byte-level tokenizer, and Llama's from its files."""

from __future__ import annotations

import re
import unicodedata
import zlib
from pathlib import Path
from typing import Any, Protocol

from aura_ros.errors import UserError
from aura_ros.files import LFS_POINTER

LLAMA_BOS_ID = 1
LLAMA_EOS_ID = 2
LLAMA_EMPTY_SPACE_ID = 29871
LLAMA_VOCAB = 32000
LLAMA_TOKENS = {LLAMA_BOS_ID: "<s>", LLAMA_EOS_ID: "</s>", LLAMA_EMPTY_SPACE_ID: "▁"}

# Llama-2's ids of one whole prompt: mixed case, a word of two tokens, a newline. Vocabularies of the same
# size and layout exist (Mistral's), so that only real ids tell the right file from a wrong one.
CHECK_INSTRUCTION = "put the black bowl in the basket"
CHECK_IDS = (
    *(1, 512, 29901, 1724, 3158, 881, 278, 19964, 2125, 304, 1925, 278, 4628, 12580, 29880),
    *(297, 278, 25972, 29973, 13, 3744, 29901, LLAMA_EMPTY_SPACE_ID),
)
# A letter in no vocabulary of this size: it must become its four bytes, not <unk>.
CHECK_RARE = "\U0001f9a5"

# Control characters, lone surrogates, line and paragraph separators.
REFUSED_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")
CONTROL_WORDS = ("<s>", "</s>", "<unk>", "<pad>")

# Either tells that a folder came with its tokenizer; only the first is read here.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
UTF8_BOM = b"\xef\xbb\xbf"


class Tokenizer(Protocol):
    """Text to ids. `empty_space_id` is the token the reference appends to the prompt (Llama's 29871)."""

    bos_id: int
    eos_id: int
    empty_space_id: int
    vocab: int

    def encode(self, text: str) -> list[int]:
        """Ids of the text with BOS in front and nothing appended."""
        ...

    def check(self) -> None:
        """Raise `UserError` unless the ids are those the weights were trained with; call it at start-up."""
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

    def check(self) -> None:
        """Pass: the ids come from no file, so that none can be wrong."""


class WordsTokenizer:
    """One token for each word or mark, by a hash of it: prompts of a tenth of the bytes, and no files.

    Two words may share an id; lower and upper case do.
    """

    pad_id = 0
    bos_id = 1
    eos_id = 2
    empty_space_id = 3
    first_word_id = 4
    words = 1020
    vocab = 4 + words

    def encode(self, text: str) -> list[int]:
        """Ids of the text with BOS in front and nothing appended."""
        parts = re.findall(r"\w+|[^\w\s]", text.lower())
        return [self.bos_id, *(self.first_word_id + zlib.crc32(part.encode()) % self.words for part in parts)]

    def check(self) -> None:
        """Pass: the ids come from no file, so that none can be wrong."""


class LlamaTokenizer:
    """Llama-2's tokenizer from `tokenizer.json` in a checkpoint's folder.

    Ids equal those of transformers' fast Llama tokenizer for text without control tokens. Text that spells a
    control token ("</s>") is encoded as text, never as that token.
    """

    bos_id = LLAMA_BOS_ID
    eos_id = LLAMA_EOS_ID
    empty_space_id = LLAMA_EMPTY_SPACE_ID

    def __init__(self, folder: str | Path) -> None:
        """Read the file. Raises `UserError` if it is missing or no tokenizer; `check` tells which it is."""
        self._path = Path(folder) / "tokenizer.json"
        self._tokenizer = _read(self._path)
        # A file saved after a padded or truncated call keeps those settings; a prompt wants neither.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        self.vocab = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of the text with BOS in front and nothing appended."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [self.bos_id, *ids]

    def check(self) -> None:
        """Raise `UserError` unless this is Llama-2's tokenizer: size, control tokens, ids of one prompt."""
        fault = self._fault()
        if fault is not None:
            raise UserError(
                f"'{self._path}' is not Llama-2's tokenizer: {fault}; "
                "use the tokenizer.json that came with the checkpoint"
            )

    def _fault(self) -> str | None:
        size = self._tokenizer.get_vocab_size(with_added_tokens=False)
        if size != LLAMA_VOCAB:
            return f"it has {size} tokens, expected {LLAMA_VOCAB}"
        for token_id, token in LLAMA_TOKENS.items():
            found = self._tokenizer.id_to_token(token_id)
            if found != token:
                return f"token {token_id} is {found!r}, expected {token!r}"
        try:
            ids = prompt_ids(self, CHECK_INSTRUCTION)
            rare = self.encode(CHECK_RARE)
        except Exception as error:  # the tokenizers package raises bare Exception
            return f"it cannot encode a prompt ({_one_line(error)})"
        if ids != list(CHECK_IDS):
            return self._difference(ids)
        if len(rare) < 1 + len(CHECK_RARE.encode()):
            return f"it loses {CHECK_RARE!r} (ids {rare}), expected one token for each byte"
        return None

    def _difference(self, ids: list[int]) -> str:
        """Where the ids leave the expected ones."""
        expected = list(CHECK_IDS)
        at = next((i for i, pair in enumerate(zip(ids, expected, strict=False)) if pair[0] != pair[1]), None)
        if at is None:
            return f"it makes {len(ids)} ids of the prompt to {CHECK_INSTRUCTION!r}, expected {len(expected)}"
        token = self._tokenizer.id_to_token(ids[at])
        return f"id {at} of the prompt to {CHECK_INSTRUCTION!r} is {ids[at]} ({token!r}), expected {expected[at]}"


def prompt(instruction: str) -> str:
    """OpenVLA's prompt for a task in plain language."""
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


def check_instruction(text: str) -> None:
    """Raise `UserError` for an instruction that is no task in plain language.

    Refused: nothing but white space; control characters (line feed, tab, NUL), line separators and lone surrogates;
    a control token of the model spelled out ("</s>"), which the reference would take for the token itself.
    Taken as they are, as the reference does: letters of any script, emoji, joiners and direction marks, and
    spaces (a leading, trailing or doubled one is a token that training never had). Length is not checked here.
    """
    if not text.strip():
        raise UserError(f"instruction {text[:8]!r} is blank; say what the robot should do")
    for position, character in enumerate(text):
        if unicodedata.category(character) in REFUSED_CATEGORIES:
            raise UserError(
                f"instruction has the character U+{ord(character):04X} at position {position}; "
                "only printable text on one line is allowed: remove it"
            )
    # Lower case, as `prompt` makes it: "</S>" would become the token too.
    lowered = text.lower()
    for word in CONTROL_WORDS:
        if word in lowered:
            raise UserError(
                f"instruction holds '{word}', a control token of the model; only plain words are allowed: "
                "remove it"
            )


def prompt_ids(tokenizer: Tokenizer, instruction: str) -> list[int]:
    """Ids of the prompt, ending in the empty-space token as in training (appended unless already last).

    Raises `UserError` for what `check_instruction` refuses.
    """
    check_instruction(instruction)
    ids = tokenizer.encode(prompt(instruction))
    return ids if ids[-1] == tokenizer.empty_space_id else [*ids, tokenizer.empty_space_id]


def _read(path: Path) -> Any:
    """A `tokenizers.Tokenizer` from its file; raises `UserError` naming the file and the fault."""
    from tokenizers import Tokenizer as FastTokenizer

    if not path.is_file():
        raise UserError(_missing(path))
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"'{path}' cannot be read ({error.strerror}); mend its permissions") from error
    if data.startswith(LFS_POINTER):
        raise UserError(f"'{path}' is a Git LFS pointer, not the file itself; run `git lfs pull`")
    if data.startswith(UTF8_BOM):
        raise UserError(f"'{path}' begins with a byte-order mark; save it as UTF-8 without one")
    try:
        return FastTokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # the tokenizers package raises bare Exception
        raise UserError(f"'{path}' is not a tokenizer ({_one_line(error)}); get the file again") from error


def _missing(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"'{folder}' is not a folder; give the checkpoint's folder, with its tokenizer.json"
    if path.exists():
        return f"'{path}' is not a file; the checkpoint's folder needs its tokenizer.json"
    if (folder / "tokenizer.model").is_file():
        return (
            f"'{path}' does not exist and tokenizer.model is not read here; make it once where transformers, "
            f"sentencepiece and protobuf are installed: AutoTokenizer.from_pretrained('{folder}')"
            ".save_pretrained('OUT'), then copy OUT/tokenizer.json into the folder"
        )
    return f"'{path}' does not exist; the checkpoint's folder needs its tokenizer.json"


def _one_line(error: Exception, limit: int = 200) -> str:
    return " ".join(str(error).split())[:limit]
