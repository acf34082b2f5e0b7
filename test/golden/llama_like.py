"""A tokenizer.json like Llama-2's, small, with the ids that the tests' prompts need."""

from __future__ import annotations

import json
from pathlib import Path

EMPTY_SPACE = 29871
PAD = 32000
# Llama-2's ids of the words the tests need; every other id gets a filler.
PIECES = {
    **{"▁In": 512, ":": 29901, "▁What": 1724, "▁action": 3158, "▁should": 881, "▁the": 278, "▁robot": 19964},
    **{"▁take": 2125, "▁to": 304, "▁put": 1925, "▁black": 4628, "▁bow": 12580, "l": 29880, "▁in": 297},
    **{
        "▁basket": 25972,
        "?": 29973,
        "Out": 3744,
        "▁pick": 5839,
        "▁up": 701,
        "▁answer": 1234,
        "▁": EMPTY_SPACE,
    },
}


def special(token_id: int, content: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": True}


def llama_like() -> dict:
    """A tokenizer.json as Llama-2's is: BPE with byte fallback, 32000 tokens, <PAD> added after them."""
    ids = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}, **PIECES}
    # Each word is merged letter by letter from its left.
    merges = list(
        dict.fromkeys((piece[:end], piece[end]) for piece in PIECES for end in range(1, len(piece)))
    )
    parts = {token for left, right in merges for token in (left, right, left + right)}
    taken = set(ids.values())
    free = iter([token_id for token_id in range(259, 32000) if token_id not in taken])
    ids.update({token: next(free) for token in sorted(parts - set(ids))})
    ids.update({f"<filler{token_id}>": token_id for token_id in free})
    prepend = {"type": "Prepend", "prepend": "▁"}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    start, sequence = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>"), special(PAD, "<PAD>")],
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [start, sequence],
            "pair": [start, sequence, sequence],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": dict(sorted(ids.items(), key=lambda item: item[1])),
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }


def write_tokenizer(folder: Path) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(llama_like()), encoding="utf-8")
    return folder
